/* What criu asks about raw sockets. */
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <sys/socket.h>

struct question {
	struct nlmsghdr header;
	struct inet_diag_req_v2 about;
};

/* Tell whether a message asks for raw sockets, and there are none; then give what is to be asked instead of it. */
int ask_for_none(const struct msghdr *message, struct question *instead);
