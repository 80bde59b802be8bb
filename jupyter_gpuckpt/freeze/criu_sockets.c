/* criu's own sockets, out of everybody's reach: a library that criu is started with (LD_PRELOAD).
 *
 * criu's processes, and the code that it puts into those that it dumps, find each other by abstract names. Those belong
 * to a network namespace, which here is the machine's: every user can list them, connect to them and send to them, and
 * criu asks nobody who they are. So the same sockets get paths instead, in a folder of the sleeper's own /dev/shm. That
 * is in no other mount namespace, and who would look into it from outside must be allowed to trace a process inside.
 *
 * What names criu uses: compel/src/lib/infect.c (gen_parasite_saddr), criu/files.c (transport_name_gen), criu/fdstore.c
 * and criu/pidfd-store.c. Sockets of other names are those of the processes that criu restores, and stay as they are.
 *
 * A process that criu dumps connects to where criu has told it before, in memory that they share: in bind, that is
 * written again, in the same length, and so its path has to be short. For the second process on criu would see that its
 * socket has a name and not bind it again; so it is not shown that name.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "criu_connections.h"
#include "criu_raw_sockets.h"

#define PUBLIC __attribute__((visibility("default")))
#define FOLDER "/dev/shm/gpuckpt-criu"
#define DUMPED FOLDER "/dumped-" /* then the number of criu's descriptor */

static const char dumped_name[] = "/crtools-pr-"; /* where the dumped processes connect */
static const char *const names[] = {dumped_name, "/crtools-fd-", "/criu-fdstore-", "/criu-pidfd-store-"};
enum { NAMES = sizeof names / sizeof *names, BEFORE_PATH = offsetof(struct sockaddr_un, sun_path) };

static pid_t owner; /* who made the folder, and takes it away; not what is forked from it */

/* Open the folder. -1: there is none that is this user's. */
static int open_folder(void)
{
	struct stat about;
	int folder = open(FOLDER, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (folder >= 0 && (fstat(folder, &about) != 0 || about.st_uid != geteuid())) {
		close(folder);
		errno = EPERM; /* another process of the tree's made it, which is another user's */
		return -1;
	}
	return folder;
}

/* Also of what a criu that was killed has left in it. */
static void empty_folder(void)
{
	int folder = open_folder();
	DIR *entries = folder < 0 ? NULL : fdopendir(folder);
	struct dirent *entry;
	while (entries != NULL && (entry = readdir(entries)) != NULL)
		unlinkat(folder, entry->d_name, 0);
	if (entries != NULL)
		closedir(entries);
}

static int make_folder(void)
{
	if (owner != 0)
		return 0;
	empty_folder();
	if (mkdir(FOLDER, 0700) != 0 && errno != EEXIST)
		return -1;
	int folder = open_folder();
	/* Others may pass through: a process of the tree's can be another user's. */
	if (folder < 0 || fchmod(folder, 0711) != 0 || close(folder) != 0)
		return -1;
	owner = getpid();
	return 0;
}

__attribute__((destructor)) static void remove_folder(void)
{
	if (owner == getpid()) {
		empty_folder();
		rmdir(FOLDER);
	}
}

extern char *program_invocation_short_name; /* errno.h, where all of GNU is asked for */

/* Whoever looks for a criu to use asks whether this library is heeded, and what it can do: a criu that is linked
 * statically is without it, and an older library without `criu_connections.c` or `criu_filters.c`. */
__attribute__((constructor)) static void tell(void)
{
	if (getenv("GPUCKPT_TELL_SOCKETS") != NULL)
		dprintf(STDOUT_FILENO, "Sockets: private\nConnections: made anew\nFilters: of the tree alone\n");
	/* It is for criu alone: the shell and the programs that criu starts may be a container's, with another C library. But
	 * a script that starts criu, as GPUCKPT_CRIU may name one, passes it on. */
	if (strncmp(program_invocation_short_name, "criu", strlen("criu")) == 0)
		unsetenv("LD_PRELOAD");
}

static int has_name(const struct sockaddr_un *address, socklen_t length, const char *name)
{
	size_t size = strlen(name);
	return address != NULL && length > BEFORE_PATH + 1 + size && address->sun_family == AF_UNIX &&
	       address->sun_path[0] == '\0' && memcmp(address->sun_path + 1, name, size) == 0;
}

/* Give `address` as it is, or in `own` that of the path which stands for it, with its length. NULL: there is none. */
static const void *private_address(const void *address, socklen_t *length, struct sockaddr_un *own)
{
	int is_criu_s = 0;
	for (int i = 0; i < NAMES; i++)
		is_criu_s |= has_name(address, *length, names[i]);
	if (!is_criu_s)
		return address;
	const struct sockaddr_un *given = address;
	int size = snprintf(own->sun_path, sizeof own->sun_path, FOLDER "%.*s", (int)(*length - BEFORE_PATH - 1),
			    given->sun_path + 1);
	own->sun_family = AF_UNIX;
	*length = BEFORE_PATH + size + 1;
	errno = ENAMETOOLONG;
	return size < (int)sizeof own->sun_path ? own : NULL;
}

static int is_bound_for_dumped(int fd)
{
	struct sockaddr_un name = {0};
	socklen_t length = sizeof name - 1;
	return syscall(SYS_getsockname, fd, &name, &length) == 0 && name.sun_family == AF_UNIX &&
	       strncmp(name.sun_path, DUMPED, strlen(DUMPED)) == 0;
}

/* Bind the socket that dumped processes connect to, or leave it bound; `address` is what the next of them is told. */
static int bind_for_dumped(int fd, struct sockaddr_un *address, socklen_t length)
{
	struct sockaddr_un own = {.sun_family = AF_UNIX};
	int size = snprintf(own.sun_path, sizeof own.sun_path, DUMPED "%d", fd);
	if (BEFORE_PATH + size + 1 > (int)length || length > sizeof own) {
		errno = ENAMETOOLONG;
		return -1;
	}
	if (!is_bound_for_dumped(fd) &&
	    (syscall(SYS_bind, fd, &own, BEFORE_PATH + size + 1) != 0 || chmod(own.sun_path, 0666) != 0))
		return -1;
	memcpy(address, &own, length); /* a path ends at its first zero byte, whatever the length */
	return 0;
}

PUBLIC int bind(int fd, const struct sockaddr *address, socklen_t length)
{
	struct sockaddr_un own;
	socklen_t size = length;
	int taken = take_end(fd, address, length);
	if (taken != 0)
		return taken < 0 ? -1 : 0;
	const void *private = private_address(address, &size, &own);
	if (private == NULL || (private == &own && make_folder() != 0))
		return -1;
	if (has_name((const void *)address, length, dumped_name))
		return bind_for_dumped(fd, (struct sockaddr_un *)address, length);
	return syscall(SYS_bind, fd, private, size);
}

PUBLIC int connect(int fd, const struct sockaddr *address, socklen_t length)
{
	struct sockaddr_un own;
	const void *private = private_address(address, &length, &own);
	return private == NULL ? -1 : syscall(SYS_connect, fd, private, length);
}

PUBLIC ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	struct sockaddr_un own;
	struct question instead;
	struct iovec question = {&instead, sizeof instead};
	struct msghdr private = *message;
	if (ask_for_none(message, &instead))
		private.msg_iov = &question;
	private.msg_name = (void *)private_address(message->msg_name, &private.msg_namelen, &own);
	if (private.msg_name == NULL && message->msg_name != NULL)
		return -1;
	return syscall(SYS_sendmsg, fd, &private, flags);
}

PUBLIC int getsockname(int fd, struct sockaddr *restrict address, socklen_t *restrict length)
{
	int result = syscall(SYS_getsockname, fd, address, length);
	if (result == 0 && address->sa_family == AF_UNIX && is_bound_for_dumped(fd))
		*length = BEFORE_PATH; /* of one that has no name */
	return result;
}
