/* A shield against signals from outside of the kernel's or job's PID namespace.
 *
 * What stops a server may signal every process of its control group (systemd, Slurm): the kernels too, which the server
 * is about to hibernate. A program that leaves such a signal to its default action would end of it. With this library
 * preloaded (LD_PRELOAD, by `spawning.py`), it takes no notice, and so do its children; the numbers of the signals are
 * in GPUCKPT_SHIELDED_FROM. A signal that a process of the namespace sends ends it as always; so does one that the
 * keeper sends on purpose, which comes queued (sigqueue(3), `processes.signal_group`).
 *
 * To the program there is no handler: it is told the default action where it asks, and may set a handler of its own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef int (*sigaction_type)(int, const struct sigaction *, struct sigaction *);

static sigset_t shielded;

static int set_action(int number, const struct sigaction *wanted, struct sigaction *before)
{
	static sigaction_type next;

	if (next == NULL)
		next = (sigaction_type)dlsym(RTLD_NEXT, "sigaction");
	return next(number, wanted, before);
}

static void on_signal(int number, siginfo_t *info, void *context)
{
	struct sigaction ending = { .sa_handler = SIG_DFL };

	(void)context;
	/* A sender in another namespace has no pid here (kill(2) in pid_namespaces(7)). */
	if (info->si_code == SI_USER && info->si_pid == 0)
		return;
	set_action(number, &ending, NULL);
	raise(number); /* it is blocked until this returns */
}

static int is_shield(const struct sigaction *action)
{
	return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_signal;
}

EXPORT int sigaction(int number, const struct sigaction *wanted, struct sigaction *before)
{
	struct sigaction shield = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART };
	int result;

	if (sigismember(&shielded, number) == 1 && wanted != NULL && wanted->sa_handler == SIG_DFL)
		wanted = &shield;
	result = set_action(number, wanted, before);
	if (result == 0 && before != NULL && is_shield(before)) {
		memset(before, 0, sizeof *before);
		before->sa_handler = SIG_DFL;
	}
	return result;
}

EXPORT sighandler_t signal(int number, sighandler_t handler)
{
	struct sigaction wanted = { .sa_handler = handler, .sa_flags = SA_RESTART }, before;

	return sigaction(number, &wanted, &before) == 0 ? before.sa_handler : SIG_ERR;
}

__attribute__((constructor)) static void begin(void)
{
	const char *text = getenv("GPUCKPT_SHIELDED_FROM");
	struct sigaction now, unset = { .sa_handler = SIG_DFL };

	sigemptyset(&shielded);
	while (text != NULL && *text != '\0') {
		char *end;
		int number = (int)strtol(text, &end, 10);

		if (end == text)
			return;
		if (sigaddset(&shielded, number) == 0 && set_action(number, NULL, &now) == 0 && now.sa_handler == SIG_DFL)
			sigaction(number, &unset, NULL);
		text = *end == ',' ? end + 1 : end;
	}
}
