/* Memory that processes share, copied by many processors: part of the library that criu is started with.
 *
 * criu copies memory without a file that can be shared (MAP_SHARED, memfd_create(2)) by one thread, while the processes
 * stand still; they go on with it, so that it cannot be copied later. To that kind belongs the host memory that CUDA
 * pins. criu looks for the parts with data (SEEK_DATA) when it has opened the images. Here it is told that there are
 * none, and all of them are copied into the image of pages at once, each by another process: a few that are forked, since
 * criu knows of no threads. What was copied is written down: `shared-ID.regions`, in the folder
 * GPUCKPT_DUMP_SHARED_FOLDER, has first address and end of each part, 64-bit numbers. Whoever started criu puts them into
 * the pagemap of that ID (`shared_memory.py`). Where that is little, as is what each CUDA context shares with its driver,
 * one process copies all of it while criu goes on with the rest. In a restore, what criu reads (pread(2)) into shared
 * memory is read by several processes as well. Likewise files without a name that processes have open, or mapped
 * (`/dev/shm` above all), which criu copies into an image for each, and out of it (sendfile(2)). Where anything fails, criu
 * copies by itself.
 */
#define _GNU_SOURCE
#include "criu_shared.h"

#include "criu_connections.h"
#include "criu_mappings.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/sched.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* linux/mman.h, since 5.14 */
#endif

enum { PAGE = 4096, BLOCK = 4 << 20, WORTH_IT = 16 << 20 /* bytes */, FEWEST_COPIERS = 2, MOST_COPIERS = 8, ROOM = 256 };
enum { MANY_COPIERS = 4 /* fewer take no less time than sendfile(2), which need not clear the pages first */ };
#ifdef __x86_64__
enum { IS_TOLD = 1 /* what criu does, by its calls of ptrace(2), which are ours (criu_memory.c) */ };
#else
enum { IS_TOLD = 0 };
#endif
enum { MOST_AT_ONCE = 1 << 30 /* bytes that criu is told of: it takes the number for an int */ };

struct part {
	uint64_t start, end;
};

/* The images that criu writes now: of which shared memory, and the file of its pages. */
static char id[32];
static int pages = -1;

static void note(const char *path, int flags, int fd)
{
	unsigned int number;
	int end = 0;
	if ((flags & O_ACCMODE) == O_RDONLY || fd < 0)
		return;
	if (strncmp(path, "pagemap-", strlen("pagemap-")) == 0) {
		pages = -1;
		if (sscanf(path, "pagemap-shmem-%31[0-9].img%n", id, &end) != 1 || end == 0)
			id[0] = '\0';
	} else if (id[0] != '\0' && pages < 0 && sscanf(path, "pages-%u.img%n", &number, &end) == 1 && end > 0) {
		pages = fd;
	}
}

PUBLIC int openat64(int folder, const char *path, int flags, ...)
{
	va_list arguments;
	va_start(arguments, flags);
	mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
	va_end(arguments);
#ifdef __x86_64__ /* where `ptrace` is ours */
	if (strcmp(path, "irmap-cache") == 0) /* what criu looks for when nothing else is to be done before it stops the tree */
		read_mappings();
	if (strcmp(path, "smaps") == 0) { /* of a process that is saved: all stand still */
		begin_with_connections();
		int known = mappings_in(folder);
		if (known >= 0)
			return known;
	}
#endif
	if (strncmp(path, "stats-dump", strlen("stats-dump")) == 0) /* the last image: criu is done */
		end_with_shared();
	int fd = syscall(SYS_openat, folder, path, flags, mode);
	note(path, flags, fd);
	return fd;
}

static off_t seek(int fd, off_t at, int whence) { return syscall(SYS_lseek, fd, at, whence); }

static size_t copiers(void)
{
	cpu_set_t ours;
	size_t count = sched_getaffinity(0, sizeof ours, &ours) == 0 ? CPU_COUNT(&ours) : 1;
	return count < FEWEST_COPIERS ? FEWEST_COPIERS : count < MOST_COPIERS ? count : MOST_COPIERS;
}

/* Fork a process without a signal at its end, which criu would take for that of one of its own. In a restore its pid must
 * be none that is to be restored, in a thread perhaps: it is one of the highest, which the system comes to last, and
 * another for each process that criu restores. */
static pid_t fork_apart(size_t number)
{
	static long highest;
	if (highest == 0) {
		FILE *file = fopen("/proc/sys/kernel/pid_max", "re");
		if (file == NULL || fscanf(file, "%ld", &highest) != 1)
			highest = -1;
		if (file != NULL)
			fclose(file);
	}
	pid_t pid = highest - 1 - number - getpid() % 1024 * MOST_COPIERS;
	struct clone_args how = {.set_tid = (uintptr_t)&pid, .set_tid_size = 1};
	return highest > 0 ? syscall(SYS_clone3, &how, sizeof how) : -1;
}

/* Have each of some processes do its share of some work; tell whether all of it is done. */
static int is_shared_out(int (*share)(const void *work, size_t first, size_t of), const void *work)
{
	pid_t others[MOST_COPIERS];
	size_t of = copiers(), begun = 0;
	int done = 1, status;
	for (; done && begun < of; begun++) {
		others[begun] = fork_apart(begun);
		if (others[begun] == 0)
			_exit(share(work, begun, of) == 0 ? 0 : 1);
		if (others[begun] < 0)
			break;
	}
	done = done && begun == of;
	while (begun-- > 0) {
		while (syscall(SYS_wait4, others[begun], &status, __WALL, NULL) < 0 && errno == EINTR)
			continue;
		done = done && WIFEXITED(status) && WEXITSTATUS(status) == 0;
	}
	return done;
}

/* -- in a dump: into the image */

/* Find the parts with data, in whole pages; how many bytes they are. -1: they are not known. */
static int64_t find(int fd, struct part **parts, size_t *count)
{
	int64_t total = 0;
	off_t at = 0;
	while ((at = seek(fd, at, SEEK_DATA)) >= 0) {
		off_t end = seek(fd, at, SEEK_HOLE);
		if (end < 0)
			return -1;
		if (*count % ROOM == 0) {
			struct part *grown = realloc(*parts, (*count + ROOM) * sizeof *grown);
			if (grown == NULL)
				return -1;
			*parts = grown;
		}
		struct part found = {at / PAGE * PAGE, (end + PAGE - 1) / PAGE * PAGE};
		(*parts)[(*count)++] = found;
		total += found.end - found.start;
		at = end;
	}
	return errno == ENXIO ? total : -1;
}

/* Copy a block into the file, which is mapped for that: tmpfs lets one write(2) at a time into a file. Its memory is asked
 * for first, so that where there is none is told, and not by a signal. What lies behind the end of what is copied, in its
 * last page, is zeros. */
static int copy(int from, uint64_t at, int file, uint64_t to, size_t size)
{
	size_t before = to % PAGE, done = 0;
	char *block = mmap(NULL, before + size, PROT_READ | PROT_WRITE, MAP_SHARED, file, to - before);
	if (block == MAP_FAILED)
		return -1;
	int result = madvise(block, before + size, MADV_POPULATE_WRITE);
	while (result == 0 && done < size) {
		ssize_t got = syscall(SYS_pread64, from, block + before + done, size - done, at + done);
		if (got == 0)
			break;
		if (got < 0 && errno != EINTR)
			result = -1;
		done += got > 0 ? got : 0;
	}
	munmap(block, before + size);
	return size - done < PAGE ? result : -1;
}

struct dump {
	int from, file;
	const struct part *parts;
	size_t count;
};

/* Copy every `of`th block, from the one with number `first` on. */
static int copy_share(const void *work, size_t first, size_t of)
{
	const struct dump *dump = work;
	uint64_t to = 0;
	size_t number = 0;
	for (size_t i = 0; i < dump->count; i++)
		for (uint64_t at = dump->parts[i].start; at < dump->parts[i].end; at += BLOCK) {
			size_t size = dump->parts[i].end - at < BLOCK ? dump->parts[i].end - at : BLOCK;
			if (number++ % of == first && copy(dump->from, at, dump->file, to, size) != 0)
				return -1;
			to += size;
		}
	return 0;
}

static int copy_all(int from, const struct part *parts, size_t count, off_t total)
{
	char path[32];
	snprintf(path, sizeof path, "/proc/self/fd/%d", pages);
	int file = open(path, O_RDWR | O_CLOEXEC);
	const struct dump work = {from, file, parts, count};
	int done = file >= 0 && ftruncate(file, total) == 0 && is_shared_out(copy_share, &work);
	if (file >= 0)
		close(file);
	return done ? 0 : -1;
}

static int write_down(const char *folder, const struct part *parts, size_t count)
{
	char path[PATH_MAX];
	ssize_t size = count * sizeof *parts;
	snprintf(path, sizeof path, "%s/shared-%s.regions", folder, id);
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	int result = fd >= 0 && write(fd, parts, size) == size ? 0 : -1;
	if (fd >= 0)
		close(fd);
	if (fd >= 0 && result != 0)
		unlink(path);
	return result;
}

/* -- what is little: copied beside what criu does */

/* Shared memory that is to be copied, and its image, which has its size already. */
static struct {
	struct dump *all;
	size_t count;
} later;
static int word = -1; /* from who copies it now: a byte when all is done */

static void forget_later(void)
{
	while (later.count > 0) {
		struct dump *last = &later.all[--later.count];
		close(last->from);
		close(last->file);
		free((void *)last->parts);
	}
}

static int copy_those(void)
{
	for (size_t i = 0; i < later.count; i++)
		if (copy_share(&later.all[i], 0, 1) != 0)
			return -1;
	return 0;
}

/* Leave it for later, with its parts. -1: it cannot be left. */
static int leave(int from, const struct part *parts, size_t count, off_t total, const char *folder)
{
	char path[32];
	if (word >= 0)
		end_with_shared(); /* of the process before */
	struct dump *grown = realloc(later.all, (later.count + 1) * sizeof *grown);
	if (grown == NULL)
		return -1;
	later.all = grown;
	snprintf(path, sizeof path, "/proc/self/fd/%d", pages);
	struct dump one = {fcntl(from, F_DUPFD_CLOEXEC, 0), open(path, O_RDWR | O_CLOEXEC), parts, count};
	if (one.from >= 0 && one.file >= 0 && ftruncate(one.file, total) == 0 && write_down(folder, parts, count) == 0) {
		later.all[later.count++] = one;
		return 0;
	}
	if (one.from >= 0)
		close(one.from);
	if (one.file >= 0)
		close(one.file);
	return -1;
}

void begin_with_shared(void)
{
	int pair[2];
	if (later.count == 0 || word >= 0 || pipe2(pair, O_CLOEXEC) != 0)
		return;
	/* A child of a child: criu waits for any of its own, and takes its end for that of a process which it saves. */
	pid_t between = syscall(SYS_clone, 0, NULL, NULL, NULL, NULL);
	if (between == 0) {
		if (syscall(SYS_clone, 0, NULL, NULL, NULL, NULL) == 0) {
			setsid();
			if (copy_those() == 0 && write(pair[1], "", 1) != 1)
				_exit(1);
		}
		_exit(0);
	}
	while (between > 0 && waitpid(between, NULL, __WALL) < 0 && errno == EINTR)
		continue;
	close(pair[1]);
	word = pair[0];
}

void end_with_shared(void)
{
	char done;
	ssize_t got = 0;
	if (later.count == 0)
		return;
	while (word >= 0 && (got = read(word, &done, 1)) < 0 && errno == EINTR)
		continue;
	if (word >= 0)
		close(word);
	word = -1;
	if (got != 1 && copy_those() != 0)
		abort(); /* nobody may take these images for whole */
	forget_later();
}

/* Copy shared memory into its image; tell whether criu need not. */
static int is_copied(int from)
{
	const char *folder = getenv("GPUCKPT_DUMP_SHARED_FOLDER");
	struct part *parts = NULL;
	size_t count = 0;
	int done = 0;
	int64_t total = folder != NULL ? find(from, &parts, &count) : 0;
	if (total >= WORTH_IT) {
		done = copy_all(from, parts, count, total) == 0 && write_down(folder, parts, count) == 0;
		if (!done && ftruncate(pages, 0) != 0)
			abort(); /* criu would write behind what is there */
	}
	if (IS_TOLD && total > 0 && total < WORTH_IT && leave(from, parts, count, total, folder) == 0)
		return 1;
	free(parts);
	return done;
}

PUBLIC off_t lseek64(int fd, off_t at, int whence)
{
	if (whence == SEEK_DATA && at == 0 && id[0] != '\0' && pages >= 0) {
		int done = is_copied(fd);
		id[0] = '\0';
		if (done) {
			errno = ENXIO;
			return -1;
		}
	}
	return seek(fd, at, whence);
}

/* -- in a restore: out of the image, straight to where it belongs */

struct restore {
	int from;
	char *to;
	size_t size;
	off_t at;
};

static int read_share(const void *work, size_t first, size_t of)
{
	const struct restore *restore = work;
	for (size_t done = first * BLOCK; done < restore->size; done += of * BLOCK) {
		size_t size = restore->size - done < BLOCK ? restore->size - done : BLOCK;
		madvise(restore->to + done, size, MADV_POPULATE_WRITE);
		for (size_t got = 0; got < size;) {
			ssize_t more = syscall(SYS_pread64, restore->from, restore->to + done + got, size - got, restore->at + done + got);
			if (more == 0 || (more < 0 && errno != EINTR))
				return -1;
			got += more > 0 ? more : 0;
		}
	}
	return 0;
}

/* Tell whether other processes see what is written there: forked ones can write it. */
static int is_shared(const char *memory, size_t size)
{
	char line[512], shared = 0;
	uintptr_t begin, end, wanted = (uintptr_t)memory;
	FILE *maps = fopen("/proc/self/maps", "re");
	while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " rw%*c%c", &begin, &end, &shared) == 3 && begin <= wanted &&
		    wanted + size <= end)
			break;
		else
			shared = 0;
	if (maps != NULL)
		fclose(maps);
	return shared == 's';
}

PUBLIC ssize_t pread64(int fd, void *buffer, size_t size, off_t at)
{
	const struct restore work = {fd, buffer, size, at};
	if (size >= WORTH_IT && is_shared(buffer, size) && is_shared_out(read_share, &work))
		return size;
	return syscall(SYS_pread64, fd, buffer, size, at);
}

/* -- files without a name, into their images and out of these */

struct transfer {
	int from, file;
	uint64_t at, to;
	size_t size;
};

/* Copy into every `of`th block of the file, from the one with number `first` on. A block begins at a multiple of its
 * size, so that one of huge pages is mapped as such. */
static int transfer_share(const void *work, size_t first, size_t of)
{
	const struct transfer *transfer = work;
	for (uint64_t to = transfer->to, all = transfer->to + transfer->size, end; to < all; to = end) {
		end = to / BLOCK * BLOCK + BLOCK < all ? to / BLOCK * BLOCK + BLOCK : all;
		if (to / BLOCK % of == first &&
		    copy(transfer->from, transfer->at + (to - transfer->to), transfer->file, to, end - to) != 0)
			return -1;
	}
	return 0;
}

/* Copy from one file to the end of another, or into a hole that it has there; tell whether it is done. */
static int is_transferred(int out, uint64_t to, int in, uint64_t at, size_t size)
{
	struct stat target, source;
	char path[32];
	if (fstat(out, &target) != 0 || fstat(in, &source) != 0 || !S_ISREG(target.st_mode) || !S_ISREG(source.st_mode) ||
	    at + size > (uint64_t)source.st_size)
		return 0;
	snprintf(path, sizeof path, "/proc/self/fd/%d", out);
	const struct transfer work = {in, open(path, O_RDWR | O_CLOEXEC), at, to, size};
	int longer = to + size > (uint64_t)target.st_size, done = 0;
	if (work.file < 0)
		return 0;
	if (!longer || ftruncate(work.file, to + size) == 0)
		done = is_shared_out(transfer_share, &work);
	if (!done && longer && ftruncate(work.file, target.st_size) != 0)
		abort(); /* criu would write behind what is there */
	close(work.file);
	return done;
}

PUBLIC ssize_t sendfile64(int out, int in, off_t *at, size_t size)
{
	if (size >= WORTH_IT && copiers() >= MANY_COPIERS) {
		/* criu says in a dump where it reads, and not in a restore. */
		off_t from = at != NULL ? *at : seek(in, 0, SEEK_CUR), to = seek(out, 0, SEEK_CUR);
		size_t some = size < MOST_AT_ONCE ? size : MOST_AT_ONCE;
		if (from >= 0 && to >= 0 && is_transferred(out, to, in, from, some) && seek(out, to + some, SEEK_SET) >= 0) {
			if (at != NULL)
				*at += some;
			else
				seek(in, from + some, SEEK_SET);
			return some;
		}
	}
	return syscall(SYS_sendfile, out, in, at, size);
}
