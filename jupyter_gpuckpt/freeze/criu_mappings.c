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

enum { LARGE = 2 << 20, ROOM = 256 };

struct text {
	char *bytes; /* NULL: it could not be read */
	size_t size;
};

/* What is known of the list that was read before. All that can be is found out then: the process does not wait for it. */
static struct {
	pid_t owner; /* whose it is */
	struct text all;
	struct text mappings; /* the lines of maps in it */
	struct areas anonymous;
	int lacks, may_lack; /* a twin does not have all of this memory, or may not */
	int file; /* with the list, for criu; -1: there is none */
} before = {.file = -1};
static int is_given;

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

/* Tell whether a line is of a mapping, and not something about the mapping before. */
static int is_mapping(const char *line) { return *line < 'A' || *line > 'Z'; }

/* Add an area, where it is large, no file is mapped to it, and it is nothing special. */
static void add_anonymous(struct areas *areas, const char *from, size_t size)
{
	char line[512], may[5];
	uint64_t start, end;
	unsigned long inode;
	int name = 0;
	snprintf(line, sizeof line, "%.*s", (int)size, from);
	if (sscanf(line, "%lx-%lx %4s %*x %*x:%*x %lu %n", &start, &end, may, &inode, &name) != 4 || name == 0 ||
	    end - start < LARGE || may[3] != 'p' || inode != 0 ||
	    (line[name] != '\0' && strncmp(line + name, "[heap]", 6) != 0))
		return;
	if (areas->count % ROOM == 0) {
		struct area *grown = realloc(areas->all, (areas->count + ROOM) * sizeof *grown);
		if (grown == NULL)
			return; /* it is looked at like all else */
		areas->all = grown;
	}
	areas->all[areas->count++] = (struct area){start, end};
}

static struct areas anonymous_in(const struct text *maps)
{
	struct areas found = {0};
	const char *end = maps->bytes + maps->size, *next;
	for (const char *line = maps->bytes; line < end; line = next) {
		next = end_of_line(line, end);
		add_anonymous(&found, line, next - line);
	}
	return found;
}

static void put_aside(void)
{
	static const char flags[] = "VmFlags:";
	const char *end = before.all.bytes + before.all.size, *next;
	before.mappings.bytes = malloc(before.all.size);
	for (const char *line = before.all.bytes; line < end && before.mappings.bytes != NULL; line = next) {
		next = end_of_line(line, end);
		if (is_mapping(line)) {
			memcpy(before.mappings.bytes + before.mappings.size, line, next - line);
			before.mappings.size += next - line;
		} else if (strncmp(line, flags, sizeof flags - 1) == 0) {
			for (const char *at = line + sizeof flags; at + 2 < next; at += 3) {
				before.lacks |= memcmp(at, "dc", 2) == 0;    /* MADV_DONTFORK */
				before.may_lack |= memcmp(at, "wf", 2) == 0; /* MADV_WIPEONFORK */
			}
		}
	}
	if (before.mappings.bytes == NULL || (before.file = memfd_create("mappings", MFD_CLOEXEC)) < 0)
		return;
	before.anonymous = anonymous_in(&before.mappings);
	if (write(before.file, before.all.bytes, before.all.size) != (ssize_t)before.all.size ||
	    lseek(before.file, 0, SEEK_SET) != 0) {
		close(before.file);
		before.file = -1;
	}
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
	before.owner = first == NULL ? 0 : atoi(first);
	if (before.owner > 0 && before.all.bytes == NULL && (before.all = read_all(before.owner, "smaps")).bytes != NULL)
		put_aside();
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
	int fd = before.file;
	if (fd < 0 || !is_folder_of(folder, before.owner))
		return -1;
	struct text now = read_all(before.owner, "maps");
	is_given = now.bytes != NULL && now.size == before.mappings.size && !before.lacks &&
		   memcmp(now.bytes, before.mappings.bytes, now.size) == 0 && !has_locked(before.owner);
	free(now.bytes);
	before.file = -1;
	if (is_given)
		return fd;
	close(fd);
	return -1;
}

int were_given(pid_t pid) { return pid == before.owner && is_given; }

int is_all_in_twin(pid_t pid) { return were_given(pid) && !before.may_lack; }

struct areas anonymous_areas(pid_t pid)
{
	if (were_given(pid))
		return before.anonymous;
	struct text maps = read_all(pid, "maps");
	struct areas found = anonymous_in(&maps);
	free(maps.bytes);
	return found;
}

static int put(int into, const struct text *text)
{
	int result = text->bytes != NULL && write(into, text->bytes, text->size) == (ssize_t)text->size ? 0 : -1;
	close(into);
	return result;
}

int note_given(int into) { return put(into, &before.all); }

int note_paused(int into)
{
	struct text now = read_all(before.owner, "smaps");
	int result = put(into, &now);
	free(now.bytes);
	return result;
}
#endif
