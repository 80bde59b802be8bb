/* What `criu_connections.c` does for the calls that `criu_sockets.c` stands in for. */
#include <sys/socket.h>

/* Put an end of a new connection in the place of a socket, if `address` names one. 1: done; 0: it does not; -1: errno. */
int take_end(int fd, const struct sockaddr *address, socklen_t length);
