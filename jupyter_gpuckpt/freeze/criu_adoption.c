/* Processes whose parents have ended: part of the library that criu is started with.
 *
 * The first process of a kernel or job adopts what its children leave behind (PR_SET_CHILD_SUBREAPER). If such a process
 * is in the session of another than its new parent, criu lets it be born by the leader of that session, or by a stand-in,
 * which then ends. But criu makes the first process adopt again only at the very end, so that process 1 got these: they
 * were out of the tree, and it could not be saved again. So it is made to adopt from its first moment on, when criu asks
 * for its pid: that is the process that criu itself is the parent of.
 */
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

static pid_t criu, known;

__attribute__((constructor)) static void begin(void) { criu = syscall(SYS_getpid); }

PUBLIC pid_t getpid(void)
{
	pid_t pid = syscall(SYS_getpid);
	if (pid != known && pid != criu && syscall(SYS_getppid) == criu)
		prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
	known = pid;
	return pid;
}
