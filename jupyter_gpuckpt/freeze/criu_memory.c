/* A dump that does not wait for memory: each process is forked while it is paused, and its memory read afterwards.
 * Part of the library that criu is started with; for x86-64.
 *
 * criu copies all memory while the tree stands still. Here it copies next to none: it asks the system which pages are to
 * be saved (PAGEMAP_SCAN), is told that there are none, and the true answer is written down. When all else is saved, right
 * before criu lets the processes go, each is made to fork (clone(2), put into its first thread by ptrace). The child, its
 * twin, has all of its memory as it is in that instant, and shares the pages until one of them is written to. A twin
 * executes nothing of the program: it gives up what it inherited of open files, and is stopped. Whoever started criu reads
 * its memory, puts it into the images, and kills it (`twin.py`).
 *
 * A twin must not be the program's child: the program would have one that it does not know, and criu would dump it. That
 * of the first process of the tree is its sibling (CLONE_PARENT), a child of process 1. For the others a process in
 * between, which shares their memory, is forked first; the twin is its child, and process 1's when it is killed, since
 * nobody in the tree takes what others leave behind in that moment (PR_SET_CHILD_SUBREAPER).
 *
 * A twin has not all of the memory (madvise(2), MADV_DONTFORK and MADV_WIPEONFORK). So the system is asked which of the
 * pages it has, and the others are copied while the process is still paused. All of them are, where there can be no twin:
 * too many processes, no memory for page tables.
 *
 * A dump that fails lets the processes go, too, and they may be in any state then: no twins are made. That all is saved is
 * told by the file `saved` in the folder below (`at_post_dump.sh`).
 *
 * GPUCKPT_DUMP_TWINS is the pid of the first process. Into the folder GPUCKPT_DUMP_TWINS_FOLDER: `twin-PID.regions` has the
 * twin's pid, or 0, and for each run of pages its first address, its end, and 0, or 1 where the pages are in
 * `twin-PID.bytes`, in the same order; each a 64-bit number. It is there from when the first page is left out. Where it is
 * empty in the end, the dump is void. What else there is, `criu_mappings.c` says.
 */
#ifdef __x86_64__
#define _GNU_SOURCE
#include "criu_connections.h"
#include "criu_locks.h"
#include "criu_mappings.h"
#include "criu_shared.h"
#include "criu_thread_files.h"
#include "criu_threads.h"
#include "criu_waits.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/close_range.h>
#include <linux/ptrace.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

/* linux/fs.h, since 6.7 */
struct region {
	uint64_t start, end, categories;
};
struct scan {
	uint64_t size, flags, start, end, walk_end, regions, room, most_pages, inverted, all_of, any_of, returned;
};
#define SCAN _IOWR('f', 16, struct scan)
enum { OF_FILE = 1 << 2, IS_PRESENT = 1 << 3, IS_SWAPPED = 1 << 4, IS_GUARD = 1 << 8 };
enum { ROOM = 1024, PAGE = 4096, BLOCK = 1 << 20 };

enum { NOWHERE = 16 /* a stack: whoever uses it ends */ };

struct regions {
	struct region *all;
	size_t count;
};

static struct process {
	pid_t pid;
	int file;              /* where its regions are written down; -1: criu copies its memory itself */
	struct scan question;  /* as criu asked it */
	struct areas anonymous; /* its large areas that no file is mapped to */
	struct regions wanted; /* what criu would have copied; the categories say later what the twin does not have */
	int is_short;          /* no memory to write all of that down */
	int is_subreaper; /* by its own wish, and not while twins are made */
	long suspends; /* of the options by which criu traces it: its seccomp filters do not count */
} *processes;
static size_t processes_count;
static pid_t dumper; /* who dumps; not what is forked from it */

/* The first process of the tree that is dumped; 0: its memory is criu's business. */
static pid_t first(void)
{
	static pid_t asked = -1;
	if (asked < 0) {
		const char *pid = getenv("GPUCKPT_DUMP_TWINS");
		asked = pid != NULL && getenv("GPUCKPT_DUMP_TWINS_FOLDER") != NULL ? atoi(pid) : 0;
		dumper = getpid();
	}
	return getpid() == dumper ? asked : 0;
}

static int file_of(pid_t pid, const char *suffix)
{
	char path[PATH_MAX];
	snprintf(path, sizeof path, "%s/twin-%d.%s", getenv("GPUCKPT_DUMP_TWINS_FOLDER"), pid, suffix);
	return open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
}

/* What is known of a process, from now on. NULL: no memory for it. */
static struct process *known(pid_t pid)
{
	for (size_t i = 0; i < processes_count; i++)
		if (processes[i].pid == pid)
			return &processes[i];
	struct process *grown = realloc(processes, (processes_count + 1) * sizeof *processes);
	if (grown == NULL)
		return NULL;
	processes = grown;
	processes[processes_count] = (struct process){.pid = pid, .file = -1};
	return &processes[processes_count++];
}

static int all_is_saved(void)
{
	char path[PATH_MAX];
	snprintf(path, sizeof path, "%s/saved", getenv("GPUCKPT_DUMP_TWINS_FOLDER"));
	return access(path, F_OK) == 0;
}

/* The pid in the path of a pagemap that a descriptor is of; 0: it is something else. */
static pid_t named_in(int fd)
{
	char link[64], path[PATH_MAX];
	pid_t pid;
	int end = 0;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t length = readlink(link, path, sizeof path - 1);
	if (length < 0)
		return 0;
	path[length] = '\0';
	for (const char *slash = strchr(path, '/'); slash != NULL; slash = strchr(slash + 1, '/'))
		if (sscanf(slash, "/%d/pagemap%n", &pid, &end) == 1 && end > 0 && slash[end] == '\0')
			return pid;
	return 0;
}

/* Whose pagemap a descriptor is of; 0: it is something else. criu asks of each mapping, by the same one. */
static pid_t owner_of(int fd)
{
	static struct stat last;
	static pid_t last_owner;
	struct stat about;
	if (fstat(fd, &about) != 0)
		return 0;
	if (about.st_dev != last.st_dev || about.st_ino != last.st_ino) {
		last_owner = named_in(fd);
		last = about;
	}
	return last_owner;
}

static int add(struct regions *regions, uint64_t start, uint64_t end, uint64_t categories)
{
	if (regions->count % ROOM == 0) {
		struct region *grown = realloc(regions->all, (regions->count + ROOM) * sizeof *grown);
		if (grown == NULL)
			return -1;
		regions->all = grown;
	}
	regions->all[regions->count++] = (struct region){start, end, categories};
	return 0;
}

/* Add all that the system answers to a question. -1: it does not, or there is no memory (ENOMEM). */
static int look_at(struct regions *regions, int pagemap, struct scan scan)
{
	struct region found[ROOM];
	scan.regions = (uintptr_t)found;
	scan.room = ROOM;
	for (; scan.start < scan.end; scan.start = scan.walk_end) {
		long count = syscall(SYS_ioctl, pagemap, SCAN, &scan);
		if (count < 0)
			return -1;
		for (long i = 0; i < count; i++)
			if (!(found[i].categories & IS_GUARD) && add(regions, found[i].start, found[i].end, 0) != 0)
				return -1;
		if (scan.walk_end <= scan.start)
			break;
	}
	return 0;
}

/* The same, where these areas are anonymous: what is there is of no file. To see that of each page takes the system 40 ns. */
static int look(struct regions *regions, int pagemap, const struct scan *scan, const struct areas *anonymous)
{
	struct scan part = *scan, plain = *scan;
	plain.all_of &= ~(uint64_t)OF_FILE;
	plain.inverted &= ~(uint64_t)OF_FILE;
	for (size_t i = 0; i < anonymous->count && part.start < scan->end; i++) {
		const struct area *area = &anonymous->all[i];
		if (area->end <= part.start || area->start >= scan->end)
			continue;
		plain.start = area->start > part.start ? area->start : part.start;
		plain.end = area->end < scan->end ? area->end : scan->end;
		part.end = plain.start;
		if (look_at(regions, pagemap, part) != 0 || look_at(regions, pagemap, plain) != 0)
			return -1;
		part.start = plain.end;
	}
	part.end = scan->end;
	return look_at(regions, pagemap, part);
}

/* Write down all that the system answers, and answer that there is nothing. */
static int note(struct process *process, int fd, struct scan *asked)
{
	process->question = *asked;
	if (look(&process->wanted, fd, asked, &process->anonymous) != 0) {
		if (errno != ENOMEM)
			return -1;
		process->is_short = 1;
	}
	asked->walk_end = asked->end;
	return 0;
}

PUBLIC int ioctl(int fd, unsigned long request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	void *argument = va_arg(arguments, void *);
	va_end(arguments);
	struct scan *scan = argument;
	if (request == SCAN && first() != 0 && scan->any_of == (IS_PRESENT | IS_SWAPPED)) {
		pid_t pid = owner_of(fd);
		struct process *process = pid != 0 && pid != dumper ? known(pid) : NULL;
		if (process != NULL && process->file < 0 && process->wanted.count == 0) {
			process->file = file_of(pid, "regions");
			process->anonymous = anonymous_areas(pid);
		}
		if (process != NULL && process->file >= 0)
			return note(process, fd, scan);
	}
	return syscall(SYS_ioctl, fd, request, argument);
}

/* Have it fork with these flags; what it forked, which is taken, too. 0: it could not. */
static pid_t fork_by(struct thread *thread, uint64_t flags, struct thread *child, long suspends)
{
	/* The table of open files is shared until the twin gets an empty one: none of them is held open by it. */
	const uint64_t clone[4] = {SYS_clone, CLONE_FILES | flags, NOWHERE, 0};
	pid_t pid = 0;
	int status;
	call(thread, clone, &pid);
	if (pid != 0 && (wait_for(pid, &status) != 0 || !WIFSTOPPED(status) ||
			 take(child, pid, thread->instruction, suspends) != 0)) {
		end_process(pid);
		pid = 0;
	}
	return pid;
}

/* Leave a twin without files, in a session of its own, deaf, stopped, and about to end should anybody continue it. A
 * process group of the program's with a process that is stopped would be hung up (SIGHUP) when its leader leaves it. */
static int lay_down(struct thread *twin)
{
	static const uint64_t close_all[4] = {SYS_close_range, 0, ~0u, CLOSE_RANGE_UNSHARE}, leave[4] = {SYS_exit_group};
	static const uint64_t set_apart[4] = {SYS_setsid};
	struct user_regs_struct registers = registers_for(twin, leave);
	return call(twin, close_all, NULL) != 0 || call(twin, set_apart, NULL) < 0 || trace(PTRACE_SETREGS, twin->pid, 0, (uintptr_t)&registers) != 0 ||
			       kill(twin->pid, SIGSTOP) != 0 || trace(PTRACE_DETACH, twin->pid, 0, 0) != 0
		       ? -1
		       : 0;
}

/* Fork a process that stands still, and leave it as it was. 0: there is no twin. */
static pid_t twin_of(const struct process *process)
{
	struct thread thread, between, twin;
	pid_t made = 0;
	uint64_t instruction = instruction_in(process->pid);
	if (instruction == 0)
		return 0;
	if (take(&thread, process->pid, instruction, process->suspends) == 0) {
		if (process->pid == first()) {
			made = fork_by(&thread, CLONE_PARENT | SIGCHLD, &twin, process->suspends);
		} else if (fork_by(&thread, CLONE_VM, &between, process->suspends) != 0) {
			const uint64_t reap[4] = {SYS_wait4, between.pid, 0, __WALL}; /* no wait(2) of the program's would */
			made = fork_by(&between, SIGCHLD, &twin, process->suspends);
			end_process(between.pid);
			call(&thread, reap, NULL);
		}
	}
	give_back(&thread, process->suspends);
	if (made != 0 && lay_down(&twin) != 0) {
		end_process(made);
		made = 0;
	}
	return made;
}

static int by_start(const void *one, const void *other)
{
	const struct region *a = one, *b = other;
	return (a->start > b->start) - (a->start < b->start);
}

/* criu asks for small areas with what is beside them, and so for some twice. */
static void put_in_order(struct regions *regions)
{
	struct region *all = regions->all;
	size_t kept = 0;
	qsort(all, regions->count, sizeof *all, by_start);
	for (size_t i = 0; i < regions->count; i++) {
		if (kept > 0 && all[i].start <= all[kept - 1].end)
			all[kept - 1].end = all[i].end > all[kept - 1].end ? all[i].end : all[kept - 1].end;
		else
			all[kept++] = all[i];
	}
	regions->count = kept;
}

/* Divide what is wanted into what is there, and what is not and is marked. All are in order. */
static int divide(struct regions *into, const struct regions *wanted, const struct regions *there)
{
	size_t next = 0;
	for (size_t i = 0; i < wanted->count; i++) {
		uint64_t at = wanted->all[i].start, end = wanted->all[i].end;
		while (next < there->count && there->all[next].end <= at)
			next++;
		for (size_t j = next; at < end; j++) {
			uint64_t from = j < there->count && there->all[j].start < end ? there->all[j].start : end;
			uint64_t to = from < end && there->all[j].end < end ? there->all[j].end : end;
			if (from > at && add(into, at, from, 1) != 0)
				return -1;
			at = from > at ? from : at;
			if (at < to && from < end && add(into, at, to, 0) != 0)
				return -1;
			at = to;
		}
	}
	return 0;
}

/* Mark those of the pages that a twin does not have. */
static int mark_missing(struct process *process, pid_t twin)
{
	struct regions there = {0}, divided = {0};
	struct scan scan = process->question;
	char path[64];
	if (process->wanted.count == 0 || is_all_in_twin(process->pid))
		return 0;
	scan.start = process->wanted.all[0].start;
	scan.end = process->wanted.all[process->wanted.count - 1].end;
	snprintf(path, sizeof path, "/proc/%d/pagemap", twin);
	int pagemap = open(path, O_RDONLY | O_CLOEXEC);
	int result = pagemap < 0 || look(&there, pagemap, &scan, &process->anonymous) != 0 ? -1 : 0;
	if (result == 0) {
		put_in_order(&there);
		result = divide(&divided, &process->wanted, &there);
	}
	if (pagemap >= 0)
		close(pagemap);
	free(there.all);
	free(process->wanted.all);
	process->wanted = divided;
	return result;
}

static int write_all(int fd, const void *bytes, size_t size)
{
	while (size > 0) {
		ssize_t written = write(fd, bytes, size);
		if (written < 0 && errno != EINTR)
			return -1;
		if (written > 0) {
			bytes = (const char *)bytes + written;
			size -= written;
		}
	}
	return 0;
}

/* Copy the pages that no twin has. */
static int copy_missing(const struct process *process)
{
	static char block[BLOCK];
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/mem", process->pid);
	int memory = open(path, O_RDONLY | O_CLOEXEC), out = file_of(process->pid, "bytes");
	int result = memory < 0 || out < 0 ? -1 : 0;
	for (size_t i = 0; i < process->wanted.count; i++) {
		struct region run = process->wanted.all[i];
		for (uint64_t at = run.start; run.categories && at < run.end && result == 0; at += BLOCK) {
			size_t size = run.end - at < BLOCK ? run.end - at : BLOCK;
			if (pread(memory, block, size, at) != (ssize_t)size || write_all(out, block, size) != 0)
				result = -1;
		}
	}
	if (memory >= 0)
		close(memory);
	if (out >= 0)
		close(out);
	return result;
}

/* Write down what criu was given as the list of its mappings, which was not read in this instant. */
static int note_mappings(const struct process *process, int has_twin)
{
	if (!were_given(process->pid))
		return 0;
	return note_given(file_of(process->pid, "given")) != 0 ||
	       (!has_twin && note_paused(file_of(process->pid, "paused")) != 0);
}

static void make_twin(struct process *process)
{
	uint64_t twin = 0;
	int failed = process->is_short;
	if (!failed) {
		put_in_order(&process->wanted);
		twin = twin_of(process);
		/* Known before anything else: should this program be killed, somebody must end the twin. */
		failed = write_all(process->file, &twin, sizeof twin) != 0 || note_mappings(process, twin != 0) != 0 ||
			 (twin != 0 && mark_missing(process, twin) != 0);
	}
	for (size_t i = 0; i < process->wanted.count && twin == 0; i++)
		process->wanted.all[i].categories = 1;
	failed = failed || copy_missing(process) != 0 ||
		 write_all(process->file, process->wanted.all, process->wanted.count * sizeof *process->wanted.all) != 0;
	if (failed && twin != 0)
		kill(twin, SIGKILL);
	if (failed && ftruncate(process->file, 0) != 0)
		abort(); /* nobody may take these images for whole */
	close(process->file);
	process->file = -1;
}

/* Have a process take what those below it leave behind, or not; tell whether it did. */
static int set_subreaper(const struct process *process, int wanted)
{
	struct thread thread;
	int flag = 0;
	if (take(&thread, process->pid, instruction_in(process->pid), process->suspends) == 0 && thread.instruction != 0) {
		uint64_t below = below_stack(&thread);
		const uint64_t ask[4] = {SYS_prctl, PR_GET_CHILD_SUBREAPER, below}, set[4] = {SYS_prctl, PR_SET_CHILD_SUBREAPER, wanted};
		struct iovec here = {&flag, sizeof flag}, there = {(void *)below, sizeof flag};
		if (call(&thread, ask, NULL) == 0 && process_vm_readv(process->pid, &here, 1, &there, 1, 0) == sizeof flag &&
		    flag != wanted)
			call(&thread, set, NULL);
	}
	give_back(&thread, process->suspends);
	return flag;
}

/* All of them, before the first runs on. */
static void make_twins(void)
{
	size_t to_make = 0;
	sigset_t all, own;
	sigfillset(&all); /* a thread that stops where it is to stop is an error to criu's handler, which would end criu */
	sigprocmask(SIG_SETMASK, &all, &own);
	for (size_t i = 0; i < processes_count; i++)
		to_make += processes[i].file >= 0;
	for (size_t i = 0; i < processes_count && to_make > 1; i++)
		if (processes[i].file >= 0)
			processes[i].is_subreaper = set_subreaper(&processes[i], 0);
	for (size_t i = 0; i < processes_count; i++)
		if (processes[i].file >= 0)
			make_twin(&processes[i]);
	for (size_t i = 0; i < processes_count; i++)
		if (processes[i].is_subreaper)
			processes[i].is_subreaper = set_subreaper(&processes[i], 1);
	sigprocmask(SIG_SETMASK, &own, NULL);
}

PUBLIC long ptrace(int request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	pid_t pid = va_arg(arguments, pid_t);
	uintptr_t address = va_arg(arguments, uintptr_t), data = va_arg(arguments, uintptr_t);
	va_end(arguments);
	end_with_connections();
	if (request == PTRACE_DETACH)
		end_with_shared();
	else
		begin_with_shared();
	if (first() != 0) {
		struct process *process = request == PTRACE_SETOPTIONS ? known(pid) : NULL;
		if (process != NULL)
			process->suspends = data & PTRACE_O_SUSPEND_SECCOMP;
		if (request == PTRACE_DETACH && all_is_saved())
			make_twins();
	} else if (request == PTRACE_DETACH) {
		lock_again(pid);
		open_thread_files(pid);
	}
	if (request < PTRACE_PEEKTEXT || request > PTRACE_PEEKUSR) {
		long failed = trace(request, pid, address, data);
		if (request == PTRACE_GETREGSET && failed == 0 && address == NT_PRSTATUS)
			show_as_begun_again((const struct iovec *)data);
		return failed;
	}
	long word, result = trace(request, pid, address, (uintptr_t)&word); /* the system call's own way, ptrace(2) */
	if (result < 0)
		return result;
	errno = 0;
	return word;
}
#endif
