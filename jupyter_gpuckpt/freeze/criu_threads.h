#include <stdint.h>
#include <sys/types.h>
#include <sys/user.h>

/* A thread that is stopped, to make system calls that are not its own. */
struct thread {
	pid_t pid;
	uint64_t instruction; /* where it has a `syscall` */
	struct user_regs_struct own;
	uint64_t blocked; /* its own signal mask */
	int stopped;      /* it was sent a signal that stops it, and which cannot be blocked */
};

/* ptrace(2), the system's own. */
long trace(int request, pid_t pid, uintptr_t address, uintptr_t data);
int wait_for(pid_t pid, int *status);
void end_process(pid_t pid);
/* Where a process has a `syscall` instruction: in the vdso, which all have. 0: nowhere. */
uint64_t instruction_in(pid_t pid);
/* Prepare a stopped thread for calls; `suspends` are the options by which criu traces it. -1: it cannot be. */
int take(struct thread *thread, pid_t pid, uint64_t instruction, long suspends);
/* Leave it as it was. */
void give_back(const struct thread *thread, long suspends);
/* Its registers for a call: number and three arguments. */
struct user_regs_struct registers_for(const struct thread *thread, const uint64_t call[4]);
/* Have it make a system call; its result. `child` is what it forked, where it did. */
long call(struct thread *thread, const uint64_t number_and_arguments[4], pid_t *child);
/* Where it has some memory that nothing of the program is in. */
uint64_t below_stack(const struct thread *thread);
