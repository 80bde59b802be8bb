#include <sys/uio.h>

/* Have criu begin a wait again that is to end at an instant, where these are the registers of a thread in one. */
void show_as_begun_again(const struct iovec *registers);
