#include <stddef.h>

/* Have criu know of a counter that is a semaphore, where this is what /proc/PID/fdinfo says of it. */
void show_semaphore(char *text, size_t size);
