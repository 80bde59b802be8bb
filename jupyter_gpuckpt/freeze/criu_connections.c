/* TCP connections inside the tree: a dump writes down what their ends have not read, and a restore gets new ones.
 * Part of the library that criu is started with.
 *
 * criu could take a connection out of the kernel's hands and copy all of it (TCP_REPAIR, tcp(7)). That takes rights that
 * let a process have any connection of the machine's. Where both ends are in the tree, none of it is needed: whoever
 * restores makes a new connection, and sends what had not been read. So criu is told to leave connections alone
 * (--tcp-close), and what lies unread is read here without being taken away (MSG_PEEK), when all processes stand still.
 *
 * What was sent and has not arrived lies in the sender. Whoever may administer the network reads it there
 * (`criu_under_way.c`). For others it has to arrive, which it does while the processes stand still: where the receiver
 * has no room for it, it is given more. Only a connection of which all is known, in both directions, is written down.
 *
 * Where a connection inside the tree waits to be accepted, criu gives up as often as it is asked to: whoever accepts it in
 * the next moment, may.
 *
 * All of it is done by a child of criu's. If criu is killed, the child leaves the sockets as they were.
 *
 * A connection is inside the tree where the socket at its other end is open in a process of this PID namespace. One that
 * waits to be accepted is open nowhere yet: it counts as outside. Where the other end was closed and nobody has it any
 * more, all that it sent is here, and is written down as well.
 *
 * In a restore, criu's images name an end of a new connection by an address that there is not, to which criu binds a
 * socket. Whoever made the connections is asked for the socket of that number, which takes the place of criu's.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "criu_connections.h"

#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72 /* asm-generic/socket.h, Linux 5.15 */
#endif
#ifndef TCP_ULP
#define TCP_ULP 31
#endif
#ifndef SO_MEMINFO
#define SO_MEMINFO 55
#endif

#define PUBLIC __attribute__((visibility("default")))
#define MAPPED "0000000000000000FFFF0000" /* what is before an address of IPv4 in IPv6, as net/tcp6 has it */
#define UNREAD "tcp-unread-" /* then the number of the socket */
#define MAKER "/dev/shm/gpuckpt/connections" /* where whoever made the new ones listens: in the run folder */

enum {
	RECEIVES = 2,		  /* linux/socket.h, SOCK_RCVBUF_LOCK */
	ESTABLISHED = 1, CLOSE_WAIT = 8, LISTEN = 10, /* net/tcp_states.h */
	END = 32 + 1 + 4 + 1,     /* an address and a port, in hexadecimal digits */
	LOOK = 1000,		  /* microseconds between looks */
	QUIET = 1,		  /* looks in which nothing moves until nothing is taken to move by itself */
	SETTLE = 200, MOST = 3000, /* milliseconds: until nothing moves, and until what has room has arrived */
	ALLOCATED = 0, BUFFER = 1, MEMORY = 9, /* linux/sock_diag.h, SK_MEMINFO_* */
	LARGE = 1 << 28,	  /* bytes of a buffer that has room for all that a sender can have kept */
};

struct connection {
	char here[END], there[END];
	unsigned long inode, unsent; /* bytes */
	unsigned state;		     /* as net/tcp_states.h has it */
	const struct connection *other; /* NULL: it is outside, or closed */
	int is_held_outside;
	int own; /* the socket, as far as it is needed here; -1: not held */
};

union address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

static struct connection *connections; /* the tree's ends of them */
static size_t connections_count;

static struct room {
	unsigned long inode;
	int buffer, locks; /* as they were */
	int is_too_small;  /* for what is to arrive */
} * rooms; /* the sockets that were given more room for a moment */
static size_t rooms_count;

static const char *folder; /* where what is unread is written down */
static int is_one_waiting; /* a connection inside the tree that nobody has accepted yet */
static pid_t parent;

/* Make room for one more; NULL, and what was there is as it was, where there is none. */
static void *grown(void *all, size_t count, size_t size)
{
	return count & (count - 1) ? all : realloc(all, (count ? 2 * count : 1) * size);
}

typedef void visitor(int pidfd, int fd, unsigned long inode);

static void visit_sockets_of(const char *pid, visitor *visit)
{
	char path[sizeof "/proc//fd" + NAME_MAX], name[64];
	snprintf(path, sizeof path, "/proc/%s/fd", pid);
	int pidfd = syscall(SYS_pidfd_open, atoi(pid), 0);
	DIR *descriptors = opendir(path);
	struct dirent *entry;
	while (descriptors != NULL && (entry = readdir(descriptors)) != NULL) {
		unsigned long inode;
		ssize_t length = readlinkat(dirfd(descriptors), entry->d_name, name, sizeof name - 1);
		if (length <= 0)
			continue;
		name[length] = '\0';
		if (sscanf(name, "socket:[%lu]", &inode) == 1)
			visit(pidfd, atoi(entry->d_name), inode);
	}
	if (descriptors != NULL)
		closedir(descriptors);
	if (pidfd >= 0)
		close(pidfd);
}

/* Have `visit` see all sockets of all processes, one that is open twice as often. */
static void visit_sockets(visitor *visit)
{
	DIR *processes = opendir("/proc");
	struct dirent *entry;
	while (processes != NULL && (entry = readdir(processes)) != NULL)
		if (isdigit((unsigned char)entry->d_name[0]))
			visit_sockets_of(entry->d_name, visit);
	if (processes != NULL)
		closedir(processes);
}

/* Have `visit` see all connections of one table of the kernel's (proc(5)); `mapped` is put before each address. */
static void visit_table(const char *path, const char *mapped, void (*visit)(const struct connection *))
{
	char line[512], here[33], there[33], here_port[5], there_port[5];
	FILE *file = fopen(path, "re");
	while (file != NULL && fgets(line, sizeof line, file) != NULL) {
		struct connection one = {.own = -1};
		if (sscanf(line, "%*d: %32[0-9A-F]:%4[0-9A-F] %32[0-9A-F]:%4[0-9A-F] %x %*s %*s %*s %*s %*s %lu",
			   here, here_port, there, there_port, &one.state, &one.inode) != 6)
			continue;
		snprintf(one.here, sizeof one.here, "%s%s:%s", mapped, here, here_port);
		snprintf(one.there, sizeof one.there, "%s%s:%s", mapped, there, there_port);
		visit(&one);
	}
	if (file != NULL)
		fclose(file);
}

static void visit_connections(void (*visit)(const struct connection *))
{
	visit_table("/proc/net/tcp", MAPPED, visit);
	visit_table("/proc/net/tcp6", "", visit);
}

static int is_between(const struct connection *one, const struct connection *other)
{
	return strcmp(one->here, other->there) == 0 && strcmp(one->there, other->here) == 0;
}

static const struct room *room_of(unsigned long inode)
{
	for (size_t i = 0; i < rooms_count; i++)
		if (rooms[i].inode == inode)
			return rooms + i;
	return NULL;
}

static void name_file(char path[PATH_MAX], unsigned long inode)
{
	snprintf(path, PATH_MAX, "%s/" UNREAD "%lx", folder, inode);
}

/* Tell whether a connection is not waited for any more: it is written down, or cannot be. */
static int is_settled(const struct connection *one)
{
	char path[PATH_MAX];
	const struct room *here = room_of(one->inode), *there = room_of(one->other->inode);
	if ((here != NULL && here->is_too_small) || (there != NULL && there->is_too_small))
		return 1;
	name_file(path, one->inode);
	return access(path, F_OK) == 0;
}

static void forget_connections(void)
{
	for (size_t i = 0; i < connections_count; i++)
		if (connections[i].own >= 0)
			close(connections[i].own);
	free(connections);
	connections = NULL, connections_count = 0;
}

static struct connection *connection_of(unsigned long inode)
{
	for (size_t i = 0; i < connections_count; i++)
		if (connections[i].inode == inode)
			return connections + i;
	return NULL;
}

/* Name an end as the kernel's tables do. */
static void name_end(char name[END], const union address *of)
{
	const uint32_t *words = of->v6.sin6_addr.s6_addr32;
	if (of->any.sa_family == AF_INET)
		snprintf(name, END, MAPPED "%08X:%04X", of->v4.sin_addr.s_addr, ntohs(of->v4.sin_port));
	else
		snprintf(name, END, "%08X%08X%08X%08X:%04X", words[0], words[1], words[2], words[3], ntohs(of->v6.sin6_port));
}

/* Describe a socket; tell whether it is an end of a connection, or listens. */
static int describe(int fd, struct connection *one)
{
	union address here = {0}, there = {0};
	socklen_t length = sizeof here;
	int unsent = 0;
	if (option(fd, SOL_SOCKET, SO_PROTOCOL) != IPPROTO_TCP || getsockname(fd, &here.any, &length) != 0)
		return 0;
	one->state = option(fd, IPPROTO_TCP, TCP_INFO) & 0xff; /* the first byte of it */
	length = sizeof there;
	if (getpeername(fd, &there.any, &length) != 0 && one->state != LISTEN)
		return 0;
	name_end(one->here, &here);
	name_end(one->there, &there);
	if (ioctl(fd, SIOCOUTQ, &unsent) == 0)
		one->unsent = unsent;
	return 1;
}

/* By way of the processes: to read the kernel's tables takes 3 to 4 ms each, however few connections there are. */
static void keep(int pidfd, int fd, unsigned long inode)
{
	struct connection one = {.inode = inode, .own = -1}, *more;
	int own = connection_of(inode) != NULL ? -1 : syscall(SYS_pidfd_getfd, pidfd, fd, 0);
	if (own < 0)
		return;
	if (describe(own, &one) && (more = grown(connections, connections_count, sizeof one)) != NULL) {
		connections = more;
		connections[connections_count++] = one;
	}
	close(own);
}

/* Find the connections, and their other ends; return how many bytes have not arrived that are waited for. */
static unsigned long look(void)
{
	unsigned long unsent = 0;
	forget_connections();
	visit_sockets(keep);
	for (size_t i = 0; i < connections_count; i++)
		for (size_t k = i + 1; k < connections_count; k++) {
			struct connection *one = connections + i, *other = connections + k;
			if (!is_between(one, other))
				continue;
			one->other = other, other->other = one;
			if (one->unsent + other->unsent != 0 && !is_settled(one))
				unsent += one->unsent + other->unsent;
		}
	return unsent;
}

int option(int fd, int level, int name)
{
	int value = 0;
	socklen_t length = sizeof value;
	return syscall(SYS_getsockopt, fd, level, name, &value, &length) == 0 ? value : -1;
}

int set_option(int fd, int level, int name, int value)
{
	return syscall(SYS_setsockopt, fd, level, name, &value, sizeof value);
}

/* Hold both ends of each connection in which something is under way. */
static void hold(int pidfd, int fd, unsigned long inode)
{
	struct connection *one = connection_of(inode);
	if (one != NULL && one->other != NULL && one->own < 0 && one->unsent + one->other->unsent != 0)
		one->own = syscall(SYS_pidfd_getfd, pidfd, fd, 0);
}

/* Tell whether a socket gives what is unread as it came: from where it was read last, and not by way of TLS. */
static int is_plain(int fd)
{
	char layer[16] = "";
	socklen_t length = sizeof layer;
	syscall(SYS_getsockopt, fd, IPPROTO_TCP, TCP_ULP, layer, &length);
	return layer[0] == '\0' && option(fd, SOL_SOCKET, SO_PEEK_OFF) < 0;
}

/* Tell whether criu lives, and so the processes stand still. */
static int is_wanted(void)
{
	return getppid() == parent;
}

/* Write down those connections in which something is under way, as far as that is allowed; tell whether all are. */
static int write_held(void)
{
	char path[PATH_MAX], other_path[PATH_MAX];
	int are_all = 1;
	for (struct connection *one = connections; one < connections + connections_count; one++) {
		const struct connection *other = one->other;
		if (other < one || one->unsent + other->unsent == 0)
			continue;
		name_file(path, one->inode), name_file(other_path, other->inode);
		if (one->own < 0 || other->own < 0 || !is_plain(one->own) || !is_plain(other->own) || !is_wanted() ||
		    write_under_way(one->own, other->own, path, other_path) != 0)
			are_all = 0;
	}
	return are_all;
}

/* Tell whether a socket has not as much room as is to come, whatever it takes. */
static int lacks(int fd, unsigned long bytes)
{
	uint32_t memory[MEMORY] = {0};
	socklen_t length = sizeof memory;
	return syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_MEMINFO, memory, &length) == 0 &&
	       memory[ALLOCATED] + bytes > memory[BUFFER];
}

/* Let a socket receive all that the other end has sent, and say so to it. */
static void make_room(int pidfd, int fd, unsigned long inode)
{
	const struct connection *one = connection_of(inode);
	struct room room = {.inode = inode}, *more;
	char byte;
	if (one == NULL || one->other == NULL || one->other->unsent == 0 || is_settled(one) || room_of(inode) != NULL ||
	    (more = grown(rooms, rooms_count, sizeof room)) == NULL)
		return;
	rooms = more;
	int own = syscall(SYS_pidfd_getfd, pidfd, fd, 0);
	if (own < 0)
		return;
	int waits_for = option(own, SOL_SOCKET, SO_RCVLOWAT);
	room.buffer = option(own, SOL_SOCKET, SO_RCVBUF), room.locks = option(own, SOL_SOCKET, SO_BUF_LOCK);
	if (room.locks >= 0)
		set_option(own, SOL_SOCKET, SO_BUF_LOCK, room.locks & ~RECEIVES);
	if (set_option(own, SOL_SOCKET, SO_RCVBUFFORCE, LARGE) == 0) {
		set_option(own, IPPROTO_TCP, TCP_WINDOW_CLAMP, LARGE);
	} else { /* Without CAP_NET_ADMIN: this, too, makes a buffer large, and it stays so (tcp(7)). */
		set_option(own, SOL_SOCKET, SO_RCVLOWAT, INT_MAX);
		set_option(own, SOL_SOCKET, SO_RCVLOWAT, waits_for);
	}
	set_option(own, IPPROTO_TCP, TCP_QUICKACK, 1);
	recv(own, &byte, 1, MSG_PEEK | MSG_DONTWAIT); /* the other end is told of the room after reads */
	room.is_too_small = lacks(own, one->other->unsent);
	rooms[rooms_count++] = room;
	close(own);
}

static void take_room_back(int pidfd, int fd, unsigned long inode)
{
	const struct room *room = room_of(inode);
	int own = room == NULL || room->locks < 0 ? -1 : syscall(SYS_pidfd_getfd, pidfd, fd, 0);
	if (own < 0)
		return;
	if (option(own, SOL_SOCKET, SO_RCVBUF) != room->buffer && /* the kernel doubles what it is told */
	    set_option(own, SOL_SOCKET, SO_RCVBUFFORCE, room->buffer / 2) != 0)
		set_option(own, SOL_SOCKET, SO_RCVBUF, room->buffer / 2);
	set_option(own, SOL_SOCKET, SO_BUF_LOCK, room->locks);
	close(own);
}

/* Write all that is unread in a socket into a file, or nothing. */
static void write_unread(int fd, const char *path)
{
	int size = -1, file = -1, is_whole = 0;
	char *unread = NULL;
	if (ioctl(fd, FIONREAD, &size) == 0 && size >= 0 && (unread = malloc((size_t)size + 1)) != NULL &&
	    (file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) >= 0) {
		ssize_t found = recv(fd, unread, (size_t)size + 1, MSG_PEEK | MSG_DONTWAIT), done = 0, more = 1;
		is_whole = found == size || (size == 0 && found < 0 && errno == EAGAIN);
		while (is_whole && done < size && (more = write(file, unread + done, size - done)) > 0)
			done += more;
		if (!is_whole || more <= 0)
			unlink(path);
	}
	if (file >= 0)
		close(file);
	free(unread);
}

/* Tell whether the tree listens at the port of this address. */
static int listens_at(const char *address)
{
	const char *port = strrchr(address, ':');
	for (size_t i = 0; i < connections_count; i++)
		if (connections[i].state == LISTEN && strcmp(strrchr(connections[i].here, ':'), port) == 0)
			return 1;
	return 0;
}

/* Note which of the tree's ends have another end that somebody outside the tree has, or that waits to be accepted. */
static void note_holder(const struct connection *of)
{
	int waits = of->inode == 0 && (of->state == ESTABLISHED || of->state == CLOSE_WAIT);
	for (size_t i = 0; (of->inode != 0 || waits) && i < connections_count; i++) {
		if (connections[i].other != NULL || !is_between(of, connections + i))
			continue;
		if (!waits)
			connections[i].is_held_outside = 1;
		else if (listens_at(of->here))
			is_one_waiting = 1;
	}
}

/* Tell whether it matters of one of the tree's ends who has the other one. */
static int are_holders_sought(void)
{
	for (struct connection *one = connections; one < connections + connections_count; one++)
		if (one->other == NULL && (one->state == CLOSE_WAIT || (one->state != LISTEN && listens_at(one->there))))
			return 1;
	return 0;
}

/* Tell whether all has arrived at an end that will ever, as far as it can be known on this machine. */
static int is_complete(const struct connection *one)
{
	if (one->other != NULL)
		return one->unsent == 0 && one->other->unsent == 0;
	return one->state == CLOSE_WAIT && !one->is_held_outside;
}

static void save(int pidfd, int fd, unsigned long inode)
{
	const struct connection *one = connection_of(inode);
	char path[PATH_MAX];
	if (one == NULL || !is_complete(one))
		return;
	name_file(path, inode);
	int own = access(path, F_OK) == 0 ? -1 : syscall(SYS_pidfd_getfd, pidfd, fd, 0);
	if (own < 0)
		return;
	if (is_plain(own))
		write_unread(own, path);
	close(own);
}

/* Milliseconds. */
static long now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* Wait until all that is waited for has arrived, or nothing has moved in so many looks, or for so long (milliseconds). */
static unsigned long wait_for(unsigned long unsent, int looks, long most)
{
	long begin = now();
	for (int quiet = 0; unsent != 0 && quiet < looks && now() < begin + most && is_wanted(); quiet++) {
		unsigned long before = unsent;
		usleep(LOOK);
		if ((unsent = look()) < before)
			quiet = 0;
	}
	return unsent;
}

/* Remove what an earlier dump into the same folder has written, which failed: much may have been read since. */
static void remove_earlier(void)
{
	DIR *entries = opendir(folder);
	struct dirent *entry;
	while (entries != NULL && (entry = readdir(entries)) != NULL)
		if (strncmp(entry->d_name, UNREAD, strlen(UNREAD)) == 0)
			unlinkat(dirfd(entries), entry->d_name, 0);
	if (entries != NULL)
		closedir(entries);
}

static void save_all(void)
{
	remove_earlier();
	if (wait_for(look(), QUIET, SETTLE) != 0) {
		visit_sockets(hold);
		if (!write_held() && look() != 0) {
			visit_sockets(make_room);
			wait_for(look(), INT_MAX, MOST);
		}
	}
	if (are_holders_sought())
		visit_connections(note_holder);
	visit_sockets(save);
	if (rooms_count)
		visit_sockets(take_room_back);
}

/* Tell whether it is better to try again, and say so to whoever has started criu: by a file, if there is one for that. */
static int asks_again(void)
{
	char path[PATH_MAX];
	snprintf(path, sizeof path, "%s/tcp-not-accepted", folder);
	int file = is_one_waiting ? open(path, O_WRONLY | O_CLOEXEC) : -1, is_told = file >= 0 && write(file, "1", 1) == 1;
	if (file >= 0)
		close(file);
	return is_told;
}

static pid_t saver; /* the child that does it */
static enum { NOT_BEGUN, IS_DONE_BY_CHILD, IS_OVER } step;
static int is_to_be_tried_again;

/* Have a child do it, which nobody ends who ends criu, nor criu's session. */
void begin_with_connections(void)
{
	if (step != NOT_BEGUN || (folder = getenv("GPUCKPT_DUMP_UNREAD")) == NULL)
		return;
	parent = getpid();
	/* Without a signal at its end, which criu would take for that of a process which it saves, and give up. */
	saver = syscall(SYS_clone, 0, NULL, NULL, NULL, NULL);
	if (saver == 0) {
		setsid();
		save_all();
		_exit(asks_again());
	}
	step = IS_DONE_BY_CHILD;
}

void end_with_connections(void)
{
	int status = 0;
	if (step != IS_DONE_BY_CHILD)
		return;
	step = IS_OVER;
	while (saver > 0 && waitpid(saver, &status, __WALL) < 0 && errno == EINTR)
		;
	if (saver > 0) {
		is_to_be_tried_again = WIFEXITED(status) && WEXITSTATUS(status) != 0;
	} else { /* there could be no child */
		parent = getppid();
		save_all();
		is_to_be_tried_again = asks_again();
	}
}

PUBLIC int getsockopt(int fd, int level, int name, void *restrict value, socklen_t *restrict length)
{
	/* criu asks this of each TCP socket that it saves. */
	if (level == IPPROTO_TCP && name == TCP_NODELAY) {
		begin_with_connections();
		end_with_connections();
		if (is_to_be_tried_again) {
			is_to_be_tried_again = 0;
			errno = EAGAIN;
			return -1;
		}
	}
	return syscall(SYS_getsockopt, fd, level, name, value, length);
}

/* Give the number of an end that an address stands for: 0.0.0.0/8 of IPv4, or 100::/64 of IPv6. 0: none. */
static uint32_t number_of(const struct sockaddr *address, socklen_t length)
{
	static const unsigned char nowhere[8] = {0x01};
	if (length >= sizeof(struct sockaddr_in) && address->sa_family == AF_INET) {
		uint32_t number = ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr);
		return number >> 24 == 0 ? number : 0;
	}
	if (length >= sizeof(struct sockaddr_in6) && address->sa_family == AF_INET6) {
		const unsigned char *bytes = ((const struct sockaddr_in6 *)address)->sin6_addr.s6_addr;
		uint32_t number;
		memcpy(&number, bytes + 12, sizeof number);
		return memcmp(bytes, nowhere, sizeof nowhere) == 0 ? ntohl(number) : 0;
	}
	return 0;
}

static int receive(int from)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	char byte;
	struct iovec data = {.iov_base = &byte, .iov_len = 1};
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	int fd = -1;
	if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1 || message.msg_controllen < sizeof control.header ||
	    control.header.cmsg_type != SCM_RIGHTS) {
		errno = ECONNRESET;
		return -1;
	}
	memcpy(&fd, CMSG_DATA(&control.header), sizeof fd);
	return fd;
}

int take_end(int fd, const struct sockaddr *address, socklen_t length)
{
	static const struct sockaddr_un maker = {.sun_family = AF_UNIX, .sun_path = MAKER};
	uint32_t number = number_of(address, length);
	if (number == 0)
		return 0;
	static const struct timeval patience = {.tv_sec = 30};
	int taken = -1, asked = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (asked >= 0 &&
	    syscall(SYS_setsockopt, asked, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0 && syscall(SYS_connect, asked, &maker, sizeof maker) == 0 &&
	    send(asked, &number, sizeof number, MSG_NOSIGNAL) == sizeof number)
		taken = receive(asked);
	int result = taken < 0 ? -1 : dup2(taken, fd), error = errno;
	if (asked >= 0)
		close(asked);
	if (taken >= 0)
		close(taken);
	errno = error;
	return result < 0 ? -1 : 1;
}
