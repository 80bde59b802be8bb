/* TCP connections inside the tree: a dump looks into no others, and a restore says nothing before both ends are there.
 * Part of the library that criu is started with.
 *
 * To save a connection, criu takes it out of the kernel's hands for a moment (TCP_REPAIR, tcp(7)) and copies its queues.
 * A connection to the outside is not restored, so it must not be touched: its other end goes on meanwhile, criu would
 * give up where an acknowledgement changes a queue under it, and what the kernel sends in that moment would be delayed.
 * criu does all this through a duplicate of the descriptor that is its own. Where the other end is outside the tree, the
 * duplicate is replaced by a new socket. criu then finds a closed connection with empty queues.
 *
 * Nor may anything move between the two ends of a connection inside, which are saved one after the other: the processes
 * stand still by then, but the system's timers do not. So before the first is saved, a filter that drops every packet is
 * attached to all of them (socket(7)); TCP sends again what was dropped when it is gone.
 *
 * criu would leave a connection in that state until its dump ends: a criu that is killed, or that leaves the tree stopped,
 * leaves connections on which nothing can be sent or received (EINVAL, EPERM). So it is given back as soon as the last of
 * its queues is read.
 *
 * A connection is inside the tree where the socket at its other end is open in a process of this PID namespace. One that
 * waits to be accepted is open nowhere yet: criu cannot save it, and it counts as outside.
 *
 * In a restore, what is sent to an end that is not there yet is answered by a reset; criu relies on a firewall that is
 * not used here. So connections have a filter that drops resets from when they are made until criu ends, when all are
 * there. And what was not sent yet is put into a queue while TCP_REPAIR is off; it is turned off without the window probe
 * that this sends, so that nothing goes out before the end.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))
#define MAPPED "0000000000000000FFFF0000" /* what is before an address of IPv4 in IPv6, as net/tcp6 has it */

enum {
	END = 32 + 1 + 4 + 1, /* an address and a port, in hexadecimal digits */
};

struct connection {
	char here[END], there[END];
	unsigned long inode;
	int is_still; /* our filter is attached */
};

static unsigned long *in_tree; /* the inodes of the sockets of all processes, ascending */
static size_t in_tree_count;
static struct connection *connections;
static size_t connections_count;
static struct sock_filter nothing = {.code = BPF_RET | BPF_K}; /* how many bytes of a packet pass: 0 */
static const struct sock_fprog drop_all = {.len = 1, .filter = &nothing};
static struct sock_filter no_resets[] = {
	{.code = BPF_LD | BPF_B | BPF_ABS, .k = 13}, /* the flags of a TCP header */
	{.code = BPF_JMP | BPF_JSET | BPF_K, .jt = 1, .k = 0x04},
	{.code = BPF_RET | BPF_K, .k = 0xFFFFFFFF},
	{.code = BPF_RET | BPF_K},
};
enum { NO_RESETS = sizeof no_resets / sizeof *no_resets };
static const struct sock_fprog drop_resets = {.len = NO_RESETS, .filter = no_resets};
static pid_t restorer; /* criu itself, not the processes that it makes */

static pid_t owner; /* who dumps; not what is forked from it */
static struct {
	int fd, reuse, sends; /* sends: the queue is chosen that is read last */
} saved = {.fd = -1};         /* the connection that is being saved */

static int is_dump_of_connections(void)
{
	static int asked = -1;
	if (asked < 0)
		asked = getenv("GPUCKPT_DUMP_CONNECTIONS") != NULL;
	return asked;
}

__attribute__((constructor)) static void begin(void)
{
	/* criu opens an image for each connection, and more files than a user's shell allows by itself. */
	struct rlimit files;
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
	}
	if (getenv("GPUCKPT_RESTORE_CONNECTIONS") != NULL)
		restorer = getpid();
}

/* Make room for one more; NULL, and what was there is as it was, where there is none. */
static void *grown(void *all, size_t count, size_t size)
{
	return count & (count - 1) ? all : realloc(all, (count ? 2 * count : 1) * size);
}

static int by_number(const void *one, const void *other)
{
	unsigned long a = *(const unsigned long *)one, b = *(const unsigned long *)other;
	return (a > b) - (a < b);
}

static int is_in_tree(unsigned long inode)
{
	return bsearch(&inode, in_tree, in_tree_count, sizeof inode, by_number) != NULL;
}

typedef void visitor(int pidfd, int fd, unsigned long inode);

static void visit_sockets_of(const char *pid, visitor *visit)
{
	char path[sizeof "/proc//fd" + NAME_MAX], name[64];
	snprintf(path, sizeof path, "/proc/%s/fd", pid);
	int pidfd = syscall(SYS_pidfd_open, atoi(pid), 0);
	DIR *folder = opendir(path);
	struct dirent *entry;
	while (folder != NULL && (entry = readdir(folder)) != NULL) {
		unsigned long inode;
		ssize_t length = readlinkat(dirfd(folder), entry->d_name, name, sizeof name - 1);
		if (length <= 0)
			continue;
		name[length] = '\0';
		if (sscanf(name, "socket:[%lu]", &inode) == 1)
			visit(pidfd, atoi(entry->d_name), inode);
	}
	if (folder != NULL)
		closedir(folder);
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

static void note(int pidfd, int fd, unsigned long inode)
{
	(void)pidfd, (void)fd;
	unsigned long *more = grown(in_tree, in_tree_count, sizeof *in_tree);
	if (more != NULL) {
		in_tree = more;
		in_tree[in_tree_count++] = inode;
	}
}

/* Read the connections of one table of the kernel's (proc(5)); `mapped` is put before each address. */
static void read_table(const char *path, const char *mapped)
{
	char line[512], here[33], there[33], here_port[5], there_port[5];
	FILE *file = fopen(path, "re");
	while (file != NULL && fgets(line, sizeof line, file) != NULL) {
		struct connection one = {0}, *more;
		if (sscanf(line, "%*d: %32[0-9A-F]:%4[0-9A-F] %32[0-9A-F]:%4[0-9A-F] %*s %*s %*s %*s %*s %*s %lu", here,
			   here_port, there, there_port, &one.inode) != 5 ||
		    strcmp(there_port, "0000") == 0 ||
		    (more = grown(connections, connections_count, sizeof one)) == NULL)
			continue;
		snprintf(one.here, sizeof one.here, "%s%s:%s", mapped, here, here_port);
		snprintf(one.there, sizeof one.there, "%s%s:%s", mapped, there, there_port);
		connections = more;
		connections[connections_count++] = one;
	}
	if (file != NULL)
		fclose(file);
}

static struct connection *connection_of(unsigned long inode)
{
	for (size_t i = 0; i < connections_count; i++)
		if (connections[i].inode == inode)
			return connections + i;
	return NULL;
}

/* Give the other end of a connection, where that is another socket in the tree. */
static const struct connection *other_end(const struct connection *of)
{
	for (size_t i = 0; i < connections_count; i++) {
		const struct connection *other = connections + i;
		if (other->inode != of->inode && strcmp(other->here, of->there) == 0 &&
		    strcmp(other->there, of->here) == 0 && is_in_tree(other->inode))
			return other;
	}
	return NULL;
}

/* Let no packet come to a socket any more, where both of its connection's ends are inside. */
static void hold(int pidfd, int fd, unsigned long inode)
{
	struct connection *one = connection_of(inode);
	if (one == NULL || one->is_still || other_end(one) == NULL)
		return;
	int own = syscall(SYS_pidfd_getfd, pidfd, fd, 0);
	socklen_t count = 0;
	if (own < 0)
		return;
	/* One that has a filter of its own keeps it. */
	if (syscall(SYS_getsockopt, own, SOL_SOCKET, SO_GET_FILTER, NULL, &count) == 0 && count == 0)
		one->is_still = setsockopt(own, SOL_SOCKET, SO_ATTACH_FILTER, &drop_all, sizeof drop_all) == 0;
	close(own);
}

static void release_fd(int fd, struct connection *one)
{
	if (one != NULL && one->is_still && setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &fd, sizeof fd) == 0)
		one->is_still = 0;
}

static void release(int pidfd, int fd, unsigned long inode)
{
	struct connection *one = connection_of(inode);
	if (one == NULL || !one->is_still)
		return;
	int own = syscall(SYS_pidfd_getfd, pidfd, fd, 0);
	if (own >= 0) {
		release_fd(own, one);
		close(own);
	}
}

static void look(void)
{
	visit_sockets(note);
	if (in_tree_count)
		qsort(in_tree, in_tree_count, sizeof *in_tree, by_number);
	read_table("/proc/net/tcp", MAPPED);
	read_table("/proc/net/tcp6", "");
	visit_sockets(hold);
}

static struct connection *held_connection(int fd)
{
	struct stat about;
	struct connection *one = fstat(fd, &about) == 0 ? connection_of(about.st_ino) : NULL;
	return one != NULL && one->is_still ? one : NULL;
}

static int is_inside(int fd)
{
	if (owner != getpid()) {
		owner = getpid();
		look();
	}
	const struct connection *one = held_connection(fd), *other = one != NULL ? other_end(one) : NULL;
	return other != NULL && other->is_still;
}

static int replace_by_new(int fd)
{
	int new = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int result = new < 0 ? -1 : dup3(new, fd, O_CLOEXEC);
	if (new >= 0)
		close(new);
	return result;
}

static int is_connected(int fd)
{
	struct tcp_info about = {0};
	socklen_t length = sizeof about;
	return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &about, &length) == 0 && about.tcpi_state != TCP_CLOSE &&
	       about.tcpi_state != TCP_LISTEN;
}

/* Give the connection that was saved back to the system. */
static void give_back(void)
{
	static const int off = -1; /* linux/tcp.h: TCP_REPAIR_OFF_NO_WP */
	if (saved.fd < 0 || owner != getpid())
		return;
	int error = errno;
	syscall(SYS_setsockopt, saved.fd, IPPROTO_TCP, TCP_REPAIR, &off, sizeof off);
	syscall(SYS_setsockopt, saved.fd, SOL_SOCKET, SO_REUSEADDR, &saved.reuse, sizeof saved.reuse);
	saved.fd = -1;
	errno = error;
}

static void let_resets_pass(int pidfd, int fd, unsigned long inode)
{
	(void)inode;
	struct sock_filter found[NO_RESETS];
	socklen_t count = NO_RESETS;
	int own = syscall(SYS_pidfd_getfd, pidfd, fd, 0);
	if (own < 0)
		return;
	if (syscall(SYS_getsockopt, own, SOL_SOCKET, SO_GET_FILTER, found, &count) == 0 && count == NO_RESETS &&
	    memcmp(found, no_resets, sizeof found) == 0)
		setsockopt(own, SOL_SOCKET, SO_DETACH_FILTER, &own, sizeof own);
	close(own);
}

__attribute__((destructor)) static void end_restore(void)
{
	if (restorer == getpid())
		visit_sockets(let_resets_pass);
}

/* A dump that leaves the tree stopped does not say when it is done with each. */
__attribute__((destructor)) static void release_all(void)
{
	int are_held = 0;
	give_back();
	for (size_t i = 0; i < connections_count; i++)
		are_held |= connections[i].is_still;
	if (are_held && owner == getpid())
		visit_sockets(release);
}

static int begin_dump(int fd)
{
	socklen_t length = sizeof saved.reuse;
	give_back();
	if (!is_connected(fd))
		return 0;
	if (!is_inside(fd))
		return replace_by_new(fd);
	saved.sends = 0;
	if (getsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &saved.reuse, &length) == 0)
		saved.fd = fd;
	return 0;
}

PUBLIC int setsockopt(int fd, int level, int name, const void *value, socklen_t length)
{
	static const int off_without_probe = -1;
	if (level == IPPROTO_TCP && name == TCP_REPAIR && length == sizeof(int)) {
		int on = *(const int *)value == 1;
		if (on && is_dump_of_connections() && begin_dump(fd) < 0)
			return -1;
		if (!on && is_dump_of_connections())
			release_fd(fd, held_connection(fd));
		if (on && restorer != 0 &&
		    setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &drop_resets, sizeof drop_resets) != 0)
			return -1;
		if (!on && !is_dump_of_connections())
			value = &off_without_probe;
	}
	if (fd == saved.fd && level == IPPROTO_TCP && name == TCP_REPAIR_QUEUE && length == sizeof(int))
		saved.sends = *(const int *)value == TCP_SEND_QUEUE;
	return syscall(SYS_setsockopt, fd, level, name, value, length);
}

/* Tell whether there is anything in the queue that is read last: the end of the stream is not read. */
static int has_queue(int fd)
{
	struct tcp_info about = {0};
	socklen_t length = sizeof about;
	int size = 0;
	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &about, &length) != 0 || ioctl(fd, SIOCOUTQ, &size) != 0)
		return 1;
	int ended = about.tcpi_state != TCP_ESTABLISHED && about.tcpi_state != TCP_CLOSE_WAIT;
	return size > ended;
}

PUBLIC int getsockopt(int fd, int level, int name, void *restrict value, socklen_t *restrict length)
{
	if (level == SOL_SOCKET && name == SO_GET_FILTER && held_connection(fd) != NULL) {
		*length = 0; /* what is attached is ours, and not saved */
		return 0;
	}
	int result = syscall(SYS_getsockopt, fd, level, name, value, length);
	if (fd == saved.fd && level == IPPROTO_TCP && name == TCP_QUEUE_SEQ && saved.sends && !has_queue(fd))
		give_back();
	return result;
}

PUBLIC ssize_t recv(int fd, void *buffer, size_t size, int flags)
{
	ssize_t result = syscall(SYS_recvfrom, fd, buffer, size, flags, NULL, NULL);
	if (fd == saved.fd && saved.sends)
		give_back();
	return result;
}
