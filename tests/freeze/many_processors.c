/* Loaded first (LD_PRELOAD), it has a program see eight processors, however many there are, and notes its forks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
	(void)pid;
	CPU_ZERO_S(size, set);
	for (int i = 0; i < 8; i++)
		CPU_SET_S(i, size, set);
	return 0;
}

/* A byte for each, in a file that is named in the environment. */
pid_t fork(void)
{
	pid_t (*next)(void) = (pid_t(*)(void))dlsym(RTLD_NEXT, "fork");
	const char *path = getenv("NOTED_FORKS");
	int file = path == NULL ? -1 : open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
	if (file >= 0) {
		if (write(file, "x", 1) != 1)
			abort();
		close(file);
	}
	return next();
}
