/* What the parts of the library in criu that are about connections do for each other. */
#include <sys/socket.h>

/* Begin to write down what the ends of connections have not read, beside what criu does; all processes stand still. Only
 * the first time is one. It has to be over, which is waited for, before criu waits for any child that there is. */
void begin_with_connections(void);
void end_with_connections(void);

/* Put an end of a new connection in the place of a socket, if `address` names one. 1: done; 0: it does not; -1: errno. */
int take_end(int fd, const struct sockaddr *address, socklen_t length);

/* Write into a file for each of two ends of a connection what it has not read, with what is under way to it.
 * -1: that cannot be known, and there are no files. */
int write_under_way(int one, int other, const char *path, const char *other_path);

/* Give an option of a socket's that is a number; -1: there is none. */
int option(int fd, int level, int name);
int set_option(int fd, int level, int name, int value);
