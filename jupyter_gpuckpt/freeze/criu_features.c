/* What criu has found out about the system, kept for the next criu: part of the library that criu is started with.
 *
 * criu tries what the kernel can do, for 0.1 s, before each dump and each restore (criu/kerndat.c). It keeps the answers
 * in /run, but only if that is in memory, so that they end with the boot: on a machine or in a container where it is not,
 * it asks every time, while a kernel stands still. GPUCKPT_FEATURES is a file for them in place of that. Whoever starts
 * criu names a file that is of this boot (`criu_features.py`).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

static const char criu_s[] = "/run/criu.kdat";
static int written = -1; /* the file that criu writes the answers into */

/* Return where a file of criu's is instead, in `own`, or its path as it is. One that it has not finished has a name of this
 * process's: criu makes it anew, and would never do so again where another was killed over it. */
static const char *place_of(const char *path, char own[PATH_MAX])
{
	const char *kept = getenv("GPUCKPT_FEATURES");
	if (kept == NULL || strncmp(path, criu_s, sizeof criu_s - 1) != 0)
		return path;
	const char *suffix = path + sizeof criu_s - 1;
	int size = *suffix == '\0' ? snprintf(own, PATH_MAX, "%s", kept)
				   : snprintf(own, PATH_MAX, "%s%s-%d", kept, suffix, getpid());
	return size < PATH_MAX ? own : path;
}

PUBLIC int open64(const char *path, int flags, ...)
{
	char own[PATH_MAX];
	const char *place = place_of(path, own);
	va_list arguments;
	va_start(arguments, flags);
	mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
	va_end(arguments);
	int fd = syscall(SYS_openat, AT_FDCWD, place, place == own ? flags | O_NOFOLLOW : flags, mode);
	if (place == own && (flags & O_CREAT))
		written = fd;
	return fd;
}

/* criu takes only what is in memory. */
PUBLIC int fstatfs64(int fd, struct statfs64 *about)
{
	int result = syscall(SYS_fstatfs, fd, about);
	if (result == 0 && fd >= 0 && fd == written) {
		about->f_type = TMPFS_MAGIC;
		written = -1;
	}
	return result;
}

PUBLIC int rename(const char *from, const char *to)
{
	char own_from[PATH_MAX], own_to[PATH_MAX];
	return syscall(SYS_renameat2, AT_FDCWD, place_of(from, own_from), AT_FDCWD, place_of(to, own_to), 0);
}

PUBLIC int unlink(const char *path)
{
	char own[PATH_MAX];
	return syscall(SYS_unlinkat, AT_FDCWD, place_of(path, own), 0);
}
