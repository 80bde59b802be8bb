/* Filters of system calls that criu itself is under, as in a container: part of the library that criu is started with.
 *
 * criu takes every filter (seccomp(2)) of a process that it dumps for the process's own: it suspends it, saves it, and
 * installs it in a restore. Suspending and saving are refused to who is under a filter. But what a container's processes
 * have in common is the container's, and none of theirs: who restores them is under it as well, and they inherit it. So a
 * process that has as many filters as criu, and as process 1, from which all of the tree descend, is shown to criu as one
 * that has none. A filter that it has installed by itself is one more: that one criu sees, and says that it cannot save
 * it.
 *
 * criu reads that from /proc/PID/status (`Seccomp`; the number, since Linux 5.9, is `Seccomp_filters`).
 */
#define _GNU_SOURCE
#include "criu_counters.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

static const char first_line[] = "Name:\t", mode[] = "\nSeccomp:\t2\n", count[] = "\nSeccomp_filters:\t";
enum { UNKNOWN = -2, NOT_TOLD = -1, ROOM = 8192 /* bytes of a status, which has about 1,500 */ };

/* How many filters a status tells of; NOT_TOLD: none, or not their number. */
static int filters_in(const char *status, size_t size)
{
	const char *at = memmem(status, size, mode, strlen(mode));
	const char *number = at == NULL ? NULL : memmem(at, size - (at - status), count, strlen(count));
	int told = NOT_TOLD;
	if (number != NULL && memchr(number + 1, '\n', size - (number + 1 - status)) != NULL)
		told = atoi(number + strlen(count));
	return told > 0 ? told : NOT_TOLD;
}

static int filters_of(const char *path)
{
	char status[ROOM];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t size = fd < 0 ? -1 : syscall(SYS_read, fd, status, sizeof status);
	if (fd >= 0)
		close(fd);
	return size < 0 ? NOT_TOLD : filters_in(status, size);
}

/* How many filters are criu's and process 1's alike; NOT_TOLD: none. */
static int shared_filters(void)
{
	static int known = UNKNOWN;
	if (known == UNKNOWN) {
		int own = filters_of("/proc/self/status");
		known = own == filters_of("/proc/1/status") ? own : NOT_TOLD;
	}
	return known;
}

static int is_status(int fd)
{
	static const char end[] = "/status";
	char link[64], path[256];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t length = readlink(link, path, sizeof path);
	return length > (ssize_t)strlen(end) && memcmp(path + length - strlen(end), end, strlen(end)) == 0;
}

PUBLIC ssize_t read(int fd, void *buffer, size_t room)
{
	ssize_t size = syscall(SYS_read, fd, buffer, room);
	if (size > 4 && memcmp(buffer, "pos:", 4) == 0)
		show_semaphore(buffer, size);
	if (size <= (ssize_t)strlen(first_line) || memcmp(buffer, first_line, strlen(first_line)) != 0)
		return size;
	char *at = memmem(buffer, size, mode, strlen(mode));
	if (at != NULL && is_status(fd) && shared_filters() != NOT_TOLD && filters_in(buffer, size) == shared_filters())
		at[strlen(mode) - 2] = '0';
	return size;
}
