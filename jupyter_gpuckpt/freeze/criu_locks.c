/* Locks of files that a process has mapped: part of the library that criu is started with; for x86-64.
 *
 * criu takes the locks of fcntl(2) again before it opens the files that are mapped, and maps and closes them. With any
 * descriptor of a file that a process closes, it loses all its locks of that file. So right before criu lets the restored
 * processes go, they are made to take such locks once more. Where one cannot be had, somebody else has it by now; whoever
 * started criu looks which are held. A restore with locks has no running kernel to go back to, so it does not fail for that.
 *
 * GPUCKPT_RESTORE_LOCKS has them, each as PID:FD:TYPE:START:LENGTH and a space, in numbers, TYPE as in `struct flock`.
 */
#ifdef __x86_64__
#define _GNU_SOURCE
#include "criu_locks.h"

#include "criu_threads.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static void take_lock(struct thread *thread, int fd, int type, long long start, long long length)
{
	uint64_t below = below_stack(thread);
	struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length}, own;
	struct iovec ours = {&lock, sizeof lock}, kept = {&own, sizeof own}, there = {(void *)below, sizeof lock};
	const uint64_t set[4] = {SYS_fcntl, fd, F_SETLK, below};
	if (process_vm_readv(thread->pid, &kept, 1, &there, 1, 0) != sizeof lock ||
	    process_vm_writev(thread->pid, &ours, 1, &there, 1, 0) != sizeof lock)
		return;
	call(thread, set, NULL);
	process_vm_writev(thread->pid, &kept, 1, &there, 1, 0);
}

void lock_again(pid_t pid)
{
	const char *at = getenv("GPUCKPT_RESTORE_LOCKS");
	struct thread thread = {.pid = 0};
	long long start, length;
	int owner, fd, type, end = 0;
	sigset_t all, own;
	sigfillset(&all); /* a thread that stops where it is to stop is an error to criu's handler */
	sigprocmask(SIG_SETMASK, &all, &own);
	for (; at != NULL && sscanf(at, "%d:%d:%d:%lld:%lld %n", &owner, &fd, &type, &start, &length, &end) == 5; at += end) {
		if (owner != pid)
			continue;
		if (thread.pid == 0 && take(&thread, pid, instruction_in(pid), 0) != 0)
			break;
		if (thread.instruction != 0)
			take_lock(&thread, fd, type, start, length);
	}
	if (thread.pid != 0)
		give_back(&thread, 0);
	sigprocmask(SIG_SETMASK, &own, NULL);
}
#endif
