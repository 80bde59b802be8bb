/* Loaded first (LD_PRELOAD), it has a program see eight processors, however many there are. */
#define _GNU_SOURCE
#include <sched.h>

int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
	(void)pid;
	CPU_ZERO_S(size, set);
	for (int i = 0; i < 8; i++)
		CPU_SET_S(i, size, set);
	return 0;
}
