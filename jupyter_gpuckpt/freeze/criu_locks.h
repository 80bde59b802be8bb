#include <sys/types.h>

/* In a restore, have a process that criu is about to let go take the locks again that it has lost. */
void lock_again(pid_t pid);
