/* The list of a process's mappings, read before the process is paused: part of the library that criu is started with.
 *
 * criu reads it for the flags of each mapping (VmFlags), which no other list has. To write it, the system looks at each page
 * of the process, which takes 10 ms for each GB (smaps, proc(5)). So the first process of the tree is asked for it before it
 * is stopped. When criu reads it, the process stands still: if the mappings are the same then (maps has them without a look
 * at pages), criu is given what was read before.
 *
 * Flags may have changed in between that maps does not have. So whoever started criu compares what criu was given,
 * `twin-PID.given`, with the list of the twin (`criu_memory.c`), which has the process's flags of that instant. It has
 * not those of memory that it has not, or that is locked: where there is such memory, criu reads the list itself. Where
 * there is no twin, `twin-PID.paused` has the list as it was while the process was paused.
 *
 * All this is done where GPUCKPT_DUMP_MAPPINGS_AHEAD is set.
 */
#ifdef __x86_64__
#define _GNU_SOURCE
#include "criu_mappings.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct text {
	char *bytes; /* NULL: it could not be read */
	size_t size;
} read_before;
static pid_t owner; /* whose it is */
static enum { UNUSED, GIVEN, GIVEN_AND_ORDINARY } use;

static struct text read_all(pid_t pid, const char *name)
{
	struct text text = {0};
	size_t room = 0;
	ssize_t more = 1;
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
	int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
	while (fd >= 0 && more > 0) {
		if (text.size == room) {
			char *grown = realloc(text.bytes, room = room ? 2 * room : 1 << 19);
			if (grown == NULL)
				break;
			text.bytes = grown;
		}
		more = syscall(SYS_read, fd, text.bytes + text.size, room - text.size);
		text.size += more > 0 ? more : 0;
	}
	if (fd >= 0)
		close(fd);
	if (fd < 0 || more != 0) {
		free(text.bytes);
		return (struct text){0};
	}
	return text;
}

static const char *end_of_line(const char *line, const char *end)
{
	const char *found = memchr(line, '\n', end - line);
	return found == NULL ? end : found + 1;
}

/* Tell whether some mapping has a flag, two letters. */
static int has_flag(const char *flag)
{
	static const char begin[] = "VmFlags:";
	const char *end = read_before.bytes + read_before.size, *next;
	for (const char *line = read_before.bytes; line < end; line = next) {
		next = end_of_line(line, end);
		if (strncmp(line, begin, sizeof begin - 1) == 0)
			for (const char *at = line + sizeof begin; at + 2 < next; at += 3)
				if (memcmp(at, flag, 2) == 0)
					return 1;
	}
	return 0;
}

/* Tell whether the mappings are now as they were. Their own lines are the same in both lists. */
static int is_the_same(const struct text *maps)
{
	const char *end = read_before.bytes + read_before.size, *next, *now = maps->bytes;
	size_t left = maps->size;
	for (const char *line = read_before.bytes; line < end; line = next) {
		next = end_of_line(line, end);
		if (*line >= 'A' && *line <= 'Z') /* something about the mapping before */
			continue;
		size_t size = next - line;
		if (size > left || memcmp(line, now, size) != 0)
			return 0;
		now += size, left -= size;
	}
	return left == 0;
}

static int has_locked(pid_t pid)
{
	struct text status = read_all(pid, "status");
	int has = status.bytes == NULL || memmem(status.bytes, status.size, "\nVmLck:\t       0 kB\n", 20) == NULL;
	free(status.bytes);
	return has;
}

void read_mappings(void)
{
	const char *first = getenv("GPUCKPT_DUMP_MAPPINGS_AHEAD") != NULL ? getenv("GPUCKPT_DUMP_TWINS") : NULL;
	owner = first == NULL ? 0 : atoi(first);
	if (owner > 0 && read_before.bytes == NULL)
		read_before = read_all(owner, "smaps");
}

/* Whose folder of /proc a descriptor is of. */
static int is_folder_of(int fd, pid_t pid)
{
	char link[64], path[64], expected[64];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	int length = snprintf(expected, sizeof expected, "/%d", pid);
	ssize_t found = readlink(link, path, sizeof path);
	return found >= length && memcmp(path + found - length, expected, length) == 0;
}

int mappings_in(int folder)
{
	struct text maps;
	int fd = -1;
	if (read_before.bytes == NULL || !is_folder_of(folder, owner))
		return -1;
	maps = read_all(owner, "maps");
	if (maps.bytes != NULL && is_the_same(&maps) && !has_flag("dc") && !has_locked(owner) &&
	    (fd = memfd_create("mappings", MFD_CLOEXEC)) >= 0) {
		if (write(fd, read_before.bytes, read_before.size) == (ssize_t)read_before.size && lseek(fd, 0, SEEK_SET) == 0) {
			use = has_flag("wf") ? GIVEN : GIVEN_AND_ORDINARY;
		} else {
			close(fd);
			fd = -1;
		}
	}
	free(maps.bytes);
	return fd;
}

int is_all_in_twin(pid_t pid) { return pid == owner && use == GIVEN_AND_ORDINARY; }

int were_given(pid_t pid) { return pid == owner && use != UNUSED; }

static int put(int into, const struct text *text)
{
	int result = text->bytes != NULL && write(into, text->bytes, text->size) == (ssize_t)text->size ? 0 : -1;
	close(into);
	return result;
}

int note_given(int into) { return put(into, &read_before); }

int note_paused(int into)
{
	struct text now = read_all(owner, "smaps");
	int result = put(into, &now);
	free(now.bytes);
	return result;
}
#endif
