/* Packs a kernel's /dev/shm while the kernel stands still: a program that `at_post_dump.sh` runs in the place of tar.
 *
 *     gpuckpt-shm-packer ARCHIVE FOLDER EXCLUDED...
 *
 * Without words it is what criu runs at every stage of a dump, and does all that the script does; where it fails, the
 * script is run, which has tar do it. A shell takes 3 ms for it, in which the kernel stands still.
 *
 * It writes what `tar --sparse --one-file-system` would (the old GNU format), without what is EXCLUDED of the names in
 * FOLDER. tar copies by one thread, by way of its own memory. Here the headers are written first, and the contents are
 * then copied to where they belong, by several processes at once, straight into the archive's pages: tmpfs lets one
 * write(2) at a time into a file, so the archive is mapped. ARCHIVE may be there already, of zeros whose memory was made
 * ready. Whoever calls it takes tar where anything fails.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* linux/mman.h, since 5.14 */
#endif

enum { RECORD = 512, PAGE = 4096, BLOCK = 4 << 20, MOST_COPIERS = 8, WORTH_ANOTHER = 8 << 20 /* bytes for each copier */ };
enum { FILES = 256 /* that are open at once */, PARTS = 4096 /* of files, in one round of copying */ };
enum { IN_HEADER = 4, IN_EXTENSION = 21 /* parts of a sparse file that have their place there */ };

struct place {
	char offset[12], size[12];
};

/* A header of the old GNU format. */
struct header {
	char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, target[100], magic[8], user[32],
		group[32], major[8], minor[8], times[24], unused[17];
	struct place parts[IN_HEADER];
	char is_extended, full_size[12], end[17];
};
struct extension {
	struct place parts[IN_EXTENSION];
	char is_extended, end[7];
};
_Static_assert(sizeof(struct header) == RECORD && sizeof(struct extension) == RECORD, "tar's records");

struct data {
	uint64_t start, end;
};

/* What is still to be copied: bytes of a file, to an offset in the archive. */
struct part {
	int from;
	uint64_t at, size, to;
};

static int archive;
static uint64_t end_of_archive, size_of_archive /* so long is the file */;

static int files[FILES];
static size_t files_count;
static struct part parts[PARTS];
static size_t parts_count;

/* Files that have several names: under which of them one is in the archive. */
static struct known {
	ino_t number;
	char *path;
} *known;
static size_t known_count;

static int fail(const char *path)
{
	fprintf(stderr, "%s: %s\n", path, strerror(errno));
	return -1;
}

static uint64_t padded(uint64_t size) { return (size + RECORD - 1) / RECORD * RECORD; }

/* -- copying */

/* Copy into a block of the archive. The memory is asked for first, so that where there is none is told, and not by a
 * signal. */
static int copy_block(const struct part *part, uint64_t block, uint64_t to, uint64_t end)
{
	char *memory = mmap(NULL, end - block, PROT_READ | PROT_WRITE, MAP_SHARED, archive, block);
	if (memory == MAP_FAILED)
		return -1;
	int result = madvise(memory, end - block, MADV_POPULATE_WRITE);
	while (result == 0 && to < end) {
		ssize_t got = pread(part->from, memory + (to - block), end - to, part->at + (to - part->to));
		if (got == 0 || (got < 0 && errno != EINTR))
			result = -1;
		to += got > 0 ? got : 0;
	}
	munmap(memory, end - block);
	return result;
}

/* Copy into every `of`th block of the archive, from the one with number `first` on. A block begins at a multiple of its
 * size: so one of huge pages is mapped as such, and not page by page, which took three times as long. */
static int copy_share(size_t first, size_t of)
{
	for (const struct part *part = parts; part < parts + parts_count; part++)
		for (uint64_t to = part->to, all = part->to + part->size, end; to < all; to = end) {
			uint64_t block = to / BLOCK * BLOCK;
			end = block + BLOCK < all ? block + BLOCK : all;
			if (block / BLOCK % of == first && copy_block(part, block, to, end) != 0)
				return -1;
		}
	return 0;
}

static size_t copiers(void)
{
	cpu_set_t ours;
	size_t most = sched_getaffinity(0, sizeof ours, &ours) == 0 ? CPU_COUNT(&ours) : 1;
	uint64_t total = 0;
	for (size_t i = 0; i < parts_count; i++)
		total += parts[i].size;
	most = most < 2 ? 2 : most < MOST_COPIERS ? most : MOST_COPIERS;
	return total / WORTH_ANOTHER < most ? total / WORTH_ANOTHER + 1 : most;
}

/* Copy all that is still to be copied. */
static int copy_parts(void)
{
	size_t of = copiers(), begun = 1;
	int status, result = 0;
	if (end_of_archive > size_of_archive) {
		if (ftruncate(archive, end_of_archive) != 0)
			return -1;
		size_of_archive = end_of_archive;
	}
	for (; begun < of && result == 0; begun++) {
		pid_t pid = fork();
		if (pid == 0)
			_exit(copy_share(begun, of) == 0 ? 0 : 1);
		result = pid < 0 ? -1 : 0;
	}
	if (result == 0)
		result = copy_share(0, of);
	while (wait(&status) > 0)
		if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
			result = -1;
	while (files_count > 0)
		close(files[--files_count]);
	parts_count = 0;
	return result;
}

/* -- the archive */

static int append(const void *bytes, size_t size)
{
	for (size_t done = 0; done < size;) {
		ssize_t written = pwrite(archive, (const char *)bytes + done, size - done, end_of_archive + done);
		if (written < 0 && errno != EINTR)
			return -1;
		done += written > 0 ? written : 0;
	}
	end_of_archive += size;
	return 0;
}

/* Write a number: octal digits, or a binary number behind a mark where they have no room for it. */
static void number(char *field, size_t size, int64_t value)
{
	if (value >= 0 && (size > 21 || value >> 3 * (size - 1) == 0)) {
		for (size_t i = size - 1; i-- > 0; value >>= 3)
			field[i] = '0' + (value & 7);
		field[size - 1] = '\0';
		return;
	}
	char mark = value < 0 ? '\xff' : '\x80';
	for (size_t i = size; i-- > 1; value >>= 8)
		field[i] = value & 0xff;
	field[0] = mark;
}

static void set_checksum(struct header *header)
{
	unsigned int sum = 0;
	memset(header->checksum, ' ', sizeof header->checksum);
	for (size_t i = 0; i < sizeof *header; i++)
		sum += ((unsigned char *)header)[i];
	snprintf(header->checksum, sizeof header->checksum, "%06o", sum & 0777777);
}

static void begin(struct header *header, char type, uint64_t size)
{
	*header = (struct header){.type = type, .magic = "ustar  "};
	number(header->size, sizeof header->size, size);
	number(header->mode, sizeof header->mode, 0);
	number(header->uid, sizeof header->uid, 0);
	number(header->gid, sizeof header->gid, 0);
	number(header->mtime, sizeof header->mtime, 0);
}

/* Put a path into a field of the next header, or before that header where it has no room in it. */
static int put_path(char *field, size_t size, const char *path, char type)
{
	static const char zeros[RECORD];
	size_t length = strlen(path);
	if (length > size) {
		struct header header;
		begin(&header, type, length + 1);
		strcpy(header.name, "././@LongLink");
		set_checksum(&header);
		if (append(&header, sizeof header) != 0 || append(path, length + 1) != 0 ||
		    append(zeros, padded(length + 1) - (length + 1)) != 0)
			return -1;
	}
	memcpy(field, path, length < size ? length : size);
	return 0;
}

static int put_header(struct header *header, const char *path, const char *target, const struct stat *about)
{
	if (put_path(header->target, sizeof header->target, target, 'K') != 0 ||
	    put_path(header->name, sizeof header->name, path, 'L') != 0)
		return -1;
	number(header->mode, sizeof header->mode, about->st_mode & 07777);
	number(header->uid, sizeof header->uid, about->st_uid);
	number(header->gid, sizeof header->gid, about->st_gid);
	number(header->mtime, sizeof header->mtime, about->st_mtime);
	set_checksum(header);
	return append(header, sizeof *header);
}

static int put(char type, const char *path, const char *target, const struct stat *about)
{
	struct header header;
	begin(&header, type, 0);
	if (type == '3' || type == '4') {
		number(header.major, sizeof header.major, major(about->st_rdev));
		number(header.minor, sizeof header.minor, minor(about->st_rdev));
	}
	return put_header(&header, path, target, about);
}

/* -- files */

/* Find the parts of a file with data. */
static int find_data(int fd, uint64_t size, struct data **found, size_t *count)
{
	uint64_t at = 0;
	while (at < size) {
		off_t start = lseek(fd, at, SEEK_DATA), end;
		if (start < 0 && errno == ENXIO)
			break;
		if (start < 0 || (end = lseek(fd, start, SEEK_HOLE)) < 0)
			return -1;
		struct data *grown = realloc(*found, (*count + 1) * sizeof *grown);
		if (grown == NULL)
			return -1;
		*found = grown;
		at = (uint64_t)end < size ? (uint64_t)end : size;
		grown[(*count)++] = (struct data){start, at};
	}
	return 0;
}

static void set_place(struct place *place, const struct data *data)
{
	number(place->offset, sizeof place->offset, data->start);
	number(place->size, sizeof place->size, data->end - data->start);
}

/* Write where the parts of a sparse file are that have no place in its header. */
static int put_extensions(const struct data *data, size_t count)
{
	for (size_t i = IN_HEADER; i < count; i += IN_EXTENSION) {
		struct extension extension = {.is_extended = i + IN_EXTENSION < count};
		for (size_t j = 0; j < IN_EXTENSION && i + j < count; j++)
			set_place(&extension.parts[j], &data[i + j]);
		if (append(&extension, sizeof extension) != 0)
			return -1;
	}
	return 0;
}

/* Note that parts of a file are to be copied to the end of the archive. The descriptor is taken. */
static int put_data(int fd, const struct data *data, size_t count)
{
	if (files_count == FILES && copy_parts() != 0)
		return -1;
	files[files_count++] = fd;
	for (size_t i = 0; i < count; i++) {
		if (parts_count == PARTS) {
			int kept = dup(fd);
			if (kept < 0 || copy_parts() != 0)
				return -1;
			files[files_count++] = fd = kept;
		}
		parts[parts_count++] = (struct part){fd, data[i].start, data[i].end - data[i].start, end_of_archive};
		end_of_archive += data[i].end - data[i].start;
	}
	end_of_archive = padded(end_of_archive);
	return 0;
}

static int put_file(int fd, const char *path, const struct stat *about)
{
	struct header header;
	struct data *data = NULL;
	size_t count = 0;
	uint64_t size = about->st_size, total = 0;
	int result = find_data(fd, size, &data, &count);
	for (size_t i = 0; i < count; i++)
		total += data[i].end - data[i].start;
	if (result == 0 && total < size) {
		/* The last part says how long it is, though nothing of it has data. */
		struct data *grown = realloc(data, (count + 1) * sizeof *grown);
		result = grown == NULL ? -1 : 0;
		if (grown != NULL) {
			data = grown;
			data[count++] = (struct data){size, size};
			begin(&header, 'S', total);
			number(header.full_size, sizeof header.full_size, size);
			for (size_t i = 0; i < IN_HEADER && i < count; i++)
				set_place(&header.parts[i], &data[i]);
			header.is_extended = count > IN_HEADER;
		}
	} else {
		begin(&header, '0', total);
	}
	if (result == 0)
		result = put_header(&header, path, "", about);
	if (result == 0 && header.type == 'S')
		result = put_extensions(data, count);
	if (result == 0 && total > 0)
		result = put_data(fd, data, count);
	else
		close(fd);
	free(data);
	return result;
}

/* Return under which name a file of several names is in the archive; NULL: it is not yet, and will be under this one. */
static const char *name_in_archive(const char *path, const struct stat *about)
{
	for (size_t i = 0; i < known_count; i++)
		if (known[i].number == about->st_ino)
			return known[i].path;
	struct known *grown = realloc(known, (known_count + 1) * sizeof *grown);
	if (grown == NULL)
		exit(fail(path));
	known = grown;
	known[known_count++] = (struct known){about->st_ino, strdup(path)};
	return NULL;
}

static int put_link(int folder, const char *name, const char *path, const struct stat *about)
{
	char target[PATH_MAX];
	ssize_t length = readlinkat(folder, name, target, sizeof target - 1);
	if (length < 0)
		return -1;
	target[length] = '\0';
	return put('2', path, target, about);
}

static int put_all(int folder, const char *path, dev_t device, char **excluded);

static int put_entry(int folder, const char *name, const char *path, dev_t device)
{
	struct stat about;
	const char *target;
	int fd;
	if (fstatat(folder, name, &about, AT_SYMLINK_NOFOLLOW) != 0)
		return -1;
	if (S_ISSOCK(about.st_mode))
		return 0;
	if (!S_ISDIR(about.st_mode) && about.st_nlink > 1 && (target = name_in_archive(path, &about)) != NULL)
		return put('1', path, target, &about);
	switch (about.st_mode & S_IFMT) {
	case S_IFREG:
		fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		return fd < 0 ? -1 : put_file(fd, path, &about);
	case S_IFLNK:
		return put_link(folder, name, path, &about);
	case S_IFDIR:
		if (put('5', path, "", &about) != 0 || about.st_dev != device)
			return about.st_dev != device ? 0 : -1; /* another file system: it is there, and nothing of it */
		fd = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		return fd < 0 ? -1 : put_all(fd, path, device, NULL);
	default:
		return put(S_ISFIFO(about.st_mode) ? '6' : S_ISBLK(about.st_mode) ? '4' : '3', path, "", &about);
	}
}

static int is_among(const char *name, char **names)
{
	while (names != NULL && *names != NULL)
		if (strcmp(name, *names++) == 0)
			return 1;
	return 0;
}

/* Put all that lies in a folder. The descriptor is taken. */
static int put_all(int folder, const char *path, dev_t device, char **excluded)
{
	DIR *stream = fdopendir(folder);
	struct dirent *entry;
	int result = stream == NULL ? -1 : 0;
	while (result == 0 && (errno = 0, entry = readdir(stream)) != NULL) {
		char *inside = NULL;
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 || is_among(entry->d_name, excluded))
			continue;
		if (asprintf(&inside, "%s/%s", path, entry->d_name) < 0)
			return -1;
		result = put_entry(folder, entry->d_name, inside, device);
		if (result != 0)
			fail(inside);
		free(inside);
	}
	if (result == 0 && errno != 0)
		result = -1;
	if (stream != NULL)
		closedir(stream);
	return result;
}

static int pack(const char *path, const char *from, char **excluded)
{
	static const char end[2 * RECORD];
	struct stat about, there;
	archive = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	int folder = open(from, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (archive < 0 || fstat(archive, &there) != 0)
		return fail(path);
	if (folder < 0 || fstat(folder, &about) != 0)
		return fail(from);
	size_of_archive = there.st_size;
	if (put('5', ".", "", &about) != 0 || put_all(folder, ".", about.st_dev, excluded) != 0 || copy_parts() != 0 ||
	    append(end, sizeof end) != 0 || ftruncate(archive, end_of_archive) != 0)
		return fail(path);
	return 0;
}

/* -- in the place of the script */

static int copy(const char *from, const char *to)
{
	int source = open(from, O_RDONLY | O_CLOEXEC), copied = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	ssize_t more = source < 0 || copied < 0 ? -1 : 1;
	while (more > 0)
		more = sendfile(copied, source, NULL, BLOCK);
	return more < 0 ? fail(to) : 0;
}

static int save(const char *snapshot, const char *log, const char *twins)
{
	static char *excluded[] = {"gpuckpt", "gpuckpt-criu", "gpuckpt-staging", "gpuckpt-vram", NULL};
	char path[PATH_MAX];
	snprintf(path, sizeof path, "%s/shm.tar", snapshot);
	if (pack(path, "/dev/shm", excluded) != 0)
		return -1;
	snprintf(path, sizeof path, "%s/kernel.log", snapshot);
	if (copy(log, path) != 0)
		return -1;
	snprintf(path, sizeof path, "%s/saved", twins);
	return twins[0] == '\0' || open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) >= 0 ? 0 : fail(path);
}

static const char *variable(const char *name)
{
	const char *value = getenv(name);
	return value == NULL ? "" : value;
}

static int be_script(const char *path)
{
	char script[PATH_MAX];
	if (strcmp(variable("CRTOOLS_SCRIPT_ACTION"), "post-dump") != 0 ||
	    save(variable("GPUCKPT_SNAPSHOT"), variable("GPUCKPT_LOG"), variable("GPUCKPT_DUMP_TWINS_FOLDER")) == 0)
		return 0;
	snprintf(script, sizeof script, "%.*s/at_post_dump.sh", (int)(strrchr(path, '/') - path), path);
	execl(script, script, NULL);
	return -fail(script);
}

int main(int count, char **words)
{
	if (count == 1 && strchr(words[0], '/') != NULL)
		return be_script(words[0]);
	return count < 3 ? 2 : -pack(words[1], words[2], words + 3);
}
