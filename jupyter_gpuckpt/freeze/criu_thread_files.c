/* Files of /proc that are about one thread: part of the library that criu is started with; for x86-64.
 *
 * criu opens files before it makes the threads, so such files are not there yet: in its images they are those of the
 * process's first thread. When all threads are there, right before criu lets the restored processes go, these are made to
 * open their own in the place of them.
 *
 * GPUCKPT_RESTORE_THREAD_FILES has them, each as PID:FD:FLAGS:PATH and a space: FLAGS as open(2) has them, as a number.
 */
#ifdef __x86_64__
#define _GNU_SOURCE
#include "criu_thread_files.h"

#include "criu_threads.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LONGEST = 128 /* bytes of a path, with its end */ };

static long make(struct thread *thread, uint64_t number, uint64_t first, uint64_t second, uint64_t third)
{
	const uint64_t set[4] = {number, first, second, third};
	return call(thread, set, NULL);
}

static void open_in_place(struct thread *thread, int fd, int flags, const char *path)
{
	uint64_t below = below_stack(thread);
	char name[LONGEST] = {0}, own[LONGEST];
	struct iovec ours = {name, sizeof name}, kept = {own, sizeof own}, there = {(void *)below, sizeof name};
	snprintf(name, sizeof name, "%s", path);
	if (process_vm_readv(thread->pid, &kept, 1, &there, 1, 0) != sizeof own ||
	    process_vm_writev(thread->pid, &ours, 1, &there, 1, 0) != sizeof name)
		return;
	long opened = make(thread, SYS_open, below, flags, 0);
	if (opened >= 0) {
		long at = make(thread, SYS_lseek, fd, 0, SEEK_CUR), closes = make(thread, SYS_fcntl, fd, F_GETFD, 0);
		if (at > 0)
			make(thread, SYS_lseek, opened, at, SEEK_SET);
		make(thread, SYS_dup3, opened, fd, closes == FD_CLOEXEC ? O_CLOEXEC : 0);
		make(thread, SYS_close, opened, 0, 0);
	}
	process_vm_writev(thread->pid, &kept, 1, &there, 1, 0);
}

void open_thread_files(pid_t pid)
{
	const char *at = getenv("GPUCKPT_RESTORE_THREAD_FILES");
	struct thread thread = {.pid = 0};
	char path[LONGEST];
	int owner, fd, flags, end = 0;
	sigset_t all, own;
	sigfillset(&all); /* a thread that stops where it is to stop is an error to criu's handler */
	sigprocmask(SIG_SETMASK, &all, &own);
	for (; at != NULL && sscanf(at, "%d:%d:%d:%127s %n", &owner, &fd, &flags, path, &end) == 4; at += end) {
		if (owner != pid)
			continue;
		if (thread.pid == 0 && take(&thread, pid, instruction_in(pid), 0) != 0)
			break;
		if (thread.instruction != 0)
			open_in_place(&thread, fd, flags, path);
	}
	if (thread.pid != 0)
		give_back(&thread, 0);
	sigprocmask(SIG_SETMASK, &own, NULL);
}
#endif
