#include <sys/types.h>

/* In a restore, have a process that criu is about to let go open files of /proc that are about one thread. */
void open_thread_files(pid_t pid);
