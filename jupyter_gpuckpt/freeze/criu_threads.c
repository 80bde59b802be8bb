/* Threads of other processes, stopped by ptrace(2), which make system calls in the place of their own: part of the
 * library that criu is started with; for x86-64.
 */
#ifdef __x86_64__
#define _GNU_SOURCE
#include "criu_threads.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/ptrace.h>
#include <signal.h>
#include <stdio.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SYSCALL_STOP = SIGTRAP | 0x80, MASK = 8 /* bytes of a signal mask */, PAGE = 4096 };
enum { OPTIONS = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACECLONE };
enum { BELOW_STACK = 4096 /* bytes */ };

static const uint64_t all_signals = ~0ul;

long trace(int request, pid_t pid, uintptr_t address, uintptr_t data)
{
	return syscall(SYS_ptrace, request, pid, address, data);
}

int wait_for(pid_t pid, int *status)
{
	while (syscall(SYS_wait4, pid, status, __WALL, NULL) != pid)
		if (errno != EINTR)
			return -1;
	return 0;
}

void end_process(pid_t pid)
{
	int status;
	kill(pid, SIGKILL);
	while (wait_for(pid, &status) == 0 && WIFSTOPPED(status))
		continue;
}

static ssize_t read_of(pid_t pid, const char *what, void *buffer, size_t size, off_t at)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/%s", pid, what);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t result = fd < 0 ? -1 : pread(fd, buffer, size, at);
	if (fd >= 0)
		close(fd);
	return result;
}

/* Where a process has a `syscall` instruction: in the vdso, which all have. 0: nowhere. */
uint64_t instruction_in(pid_t pid)
{
	unsigned long entries[64][2] = {{0}}, vdso = 0;
	unsigned char code[PAGE];
	ssize_t size = read_of(pid, "auxv", entries, sizeof entries, 0); /* getauxval(3) */
	for (size_t i = 0; (ssize_t)((i + 1) * sizeof *entries) <= size; i++)
		if (entries[i][0] == AT_SYSINFO_EHDR)
			vdso = entries[i][1];
	size = vdso != 0 ? read_of(pid, "mem", code, sizeof code, vdso) : 0;
	for (ssize_t at = 0; at + 1 < size; at++)
		if (code[at] == 0x0F && code[at + 1] == 0x05)
			return vdso + at;
	return 0;
}

int take(struct thread *thread, pid_t pid, uint64_t instruction, long suspends)
{
	*thread = (struct thread){.pid = pid, .instruction = instruction};
	return trace(PTRACE_GETREGS, pid, 0, (uintptr_t)&thread->own) != 0 ||
			       trace(PTRACE_GETSIGMASK, pid, MASK, (uintptr_t)&thread->blocked) != 0 ||
			       trace(PTRACE_SETSIGMASK, pid, MASK, (uintptr_t)&all_signals) != 0 ||
			       trace(PTRACE_SETOPTIONS, pid, 0, OPTIONS | suspends) != 0
		       ? -1
		       : 0;
}

void give_back(const struct thread *thread, long suspends)
{
	if (thread->own.rip == 0)
		return; /* nothing is known of it, and nothing was done */
	trace(PTRACE_SETREGS, thread->pid, 0, (uintptr_t)&thread->own);
	trace(PTRACE_SETSIGMASK, thread->pid, MASK, (uintptr_t)&thread->blocked);
	trace(PTRACE_SETOPTIONS, thread->pid, 0, suspends);
	if (thread->stopped != 0)
		kill(thread->pid, thread->stopped);
}

/* Its registers for a call, with nothing in the others: one that nobody holds any more finds no memory, and ends. */
struct user_regs_struct registers_for(const struct thread *thread, const uint64_t call[4])
{
	struct user_regs_struct registers = {
		.rax = call[0],
		.rdi = call[1],
		.rsi = call[2],
		.rdx = call[3],
		.orig_rax = -1,
		.rip = thread->instruction,
		.rsp = thread->own.rsp,
		.eflags = thread->own.eflags,
		.cs = thread->own.cs,
		.ss = thread->own.ss,
		.ds = thread->own.ds,
		.es = thread->own.es,
		.fs = thread->own.fs,
		.gs = thread->own.gs,
		.fs_base = thread->own.fs_base,
		.gs_base = thread->own.gs_base,
	};
	return registers;
}

/* Let it run to its next stop that is no signal's; what stopped it then, with its event, or -1. */
static int next_stop(struct thread *thread)
{
	int status;
	for (;;) {
		if (trace(PTRACE_SYSCALL, thread->pid, 0, 0) != 0 || wait_for(thread->pid, &status) != 0 ||
		    !WIFSTOPPED(status))
			return -1;
		if (WSTOPSIG(status) == SYSCALL_STOP || status >> 16 != 0)
			return status >> 8;
		thread->stopped = WSTOPSIG(status);
	}
}

/* Have it make a system call; its result. `child` is what it forked, where it did. */
long call(struct thread *thread, const uint64_t number_and_arguments[4], pid_t *child)
{
	struct user_regs_struct registers = registers_for(thread, number_and_arguments);
	unsigned long forked;
	if (trace(PTRACE_SETREGS, thread->pid, 0, (uintptr_t)&registers) != 0)
		return -1;
	for (int calls = 0; calls < 2;) { /* its begin and its end */
		int stop = next_stop(thread);
		if (stop < 0)
			return -1;
		if (stop == SYSCALL_STOP)
			calls++;
		else if (child != NULL && trace(PTRACE_GETEVENTMSG, thread->pid, 0, (uintptr_t)&forked) == 0)
			*child = forked;
	}
	return trace(PTRACE_GETREGS, thread->pid, 0, (uintptr_t)&registers) != 0 ? -1 : (long)registers.rax;
}

uint64_t below_stack(const struct thread *thread) { return (thread->own.rsp - BELOW_STACK) & ~15ul; }
#endif
