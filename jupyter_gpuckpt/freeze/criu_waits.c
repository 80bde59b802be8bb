/* Waits that are to end at an instant, or have no limit: part of the library that criu is started with.
 *
 * A dump puts code of criu's into each thread, so it interrupts what the thread waits in, and criu has most system calls
 * begun again. One with a time limit ends with EINTR in its place, in the program that goes on as in a restored one: the
 * system's own way to go on with it (its result within the system is ERESTART_RESTARTBLOCK) is lost. Few programs expect
 * that where no signal came; before Python 3.13, `queue.SimpleQueue.get` waits without end then if its time is over. The
 * limit of a futex is an instant (futex(2), FUTEX_WAIT_BITSET, by which the C library's semaphores, locks and condition
 * variables wait), so it can be begun again as it is, and criu is shown that. Clocks go on in a restored program. A poll(2)
 * without a limit is interrupted in the same way, and can be begun again, too: script(1) ended what it runs at its EINTR.
 */
#ifdef __x86_64__
#define _GNU_SOURCE
#include "criu_waits.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/user.h>

enum { RESTART = -512, RESTART_BLOCK = -516 }; /* ERESTARTSYS and ERESTART_RESTARTBLOCK, include/linux/errno.h */

void show_as_begun_again(const struct iovec *set)
{
	struct user_regs_struct *registers = set->iov_base;
	if (set->iov_len != sizeof *registers) /* of a 32-bit program, or not all of them */
		return;
	unsigned operation = (unsigned)registers->rsi & FUTEX_CMD_MASK;
	int is_futex = registers->orig_rax == SYS_futex && operation == FUTEX_WAIT_BITSET;
	int is_poll = registers->orig_rax == SYS_poll && (int)registers->rdx < 0;
	if ((is_futex || is_poll) && (long)registers->rax == RESTART_BLOCK)
		registers->rax = RESTART;
}
#endif
