/* Event counters that are semaphores (eventfd(2), EFD_SEMAPHORE): part of the library that criu is started with.
 *
 * criu saves a counter's value alone, and restores it as one that a read empties. It reads the value from
 * /proc/PID/fdinfo, and gives it to eventfd(2), which takes 32 bits of it. So where the system says that the counter is a
 * semaphore (since Linux 6.5), the highest of these is set in what criu reads, and is told by that in the restore. No
 * program is expected to let a counter come to 2^31, which would be taken for that.
 */
#define _GNU_SOURCE
#include "criu_counters.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

static const char count[] = "eventfd-count: ", is_semaphore[] = "\neventfd-semaphore: 1\n";
enum { DIGITS = 16, MARKED = 8 /* of them: 32 bits */ };
static const unsigned int mark = 1u << 31;

void show_semaphore(char *text, size_t size)
{
	char *at = memmem(text, size, count, strlen(count)), value[DIGITS + 1];
	if (at == NULL || memmem(text, size, is_semaphore, strlen(is_semaphore)) == NULL)
		return;
	at += strlen(count);
	if (text + size - at < DIGITS)
		return;
	memcpy(value, at, DIGITS);
	value[DIGITS] = '\0';
	if (strtoull(value, NULL, 16) >= mark)
		return;
	char *marked = at + DIGITS - MARKED;
	for (char *digit = marked; *digit == ' '; digit++)
		*digit = '0';
	*marked = "89abcdef"[*marked - '0'];
}

PUBLIC int eventfd(unsigned int value, int flags)
{
	int semaphore = (value & mark) != 0;
	return syscall(SYS_eventfd2, semaphore ? value & ~mark : value, semaphore ? flags | EFD_SEMAPHORE : flags);
}
