/* What criu asks about raw sockets: part of the library that criu is started with.
 *
 * criu asks the system for all sockets of each protocol (sock_diag(7)), while the processes that it dumps stand still. For
 * raw ones the system has a module of its own (raw_diag). Where that is not loaded, the system starts a program to load
 * it (modprobe), and waits: more than a millisecond for each of IPv4 and IPv6, in each dump, where there is no such module.
 * Most machines have no raw socket at all, as /proc/net/raw tells. Then criu's question is asked for TCP, in no state.
 */
#include "criu_raw_sockets.h"

#include <fcntl.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <string.h>
#include <unistd.h>

/* Tell whether somebody in this network namespace has one: it would have a line behind the first. */
static int are_there(int family)
{
	char some[1024];
	int file = open(family == AF_INET ? "/proc/net/raw" : "/proc/net/raw6", O_RDONLY | O_CLOEXEC);
	ssize_t size = file < 0 ? -1 : read(file, some, sizeof some);
	const char *end = size > 0 ? memchr(some, '\n', size) : NULL;
	if (file >= 0)
		close(file);
	return end == NULL || end + 1 < some + size;
}

int ask_for_none(const struct msghdr *message, struct question *instead)
{
	const struct sockaddr_nl *to = message->msg_name;
	if (to == NULL || message->msg_namelen < sizeof *to || to->nl_family != AF_NETLINK || message->msg_iovlen != 1 ||
	    message->msg_iov->iov_len < sizeof *instead)
		return 0;
	memcpy(instead, message->msg_iov->iov_base, sizeof *instead);
	if (instead->header.nlmsg_type != SOCK_DIAG_BY_FAMILY || instead->about.sdiag_protocol != IPPROTO_RAW ||
	    (instead->about.sdiag_family != AF_INET && instead->about.sdiag_family != AF_INET6) ||
	    are_there(instead->about.sdiag_family))
		return 0;
	instead->header.nlmsg_len = sizeof *instead;
	instead->about.sdiag_protocol = IPPROTO_TCP;
	instead->about.idiag_states = 0;
	return 1;
}
