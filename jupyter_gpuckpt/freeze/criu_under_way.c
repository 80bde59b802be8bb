/* What is under way in a connection whose two ends are in the tree: read where it lies, in the sender.
 * Part of the library that criu is started with.
 *
 * To have it arrive, the receiver would have to be given room, and the program would go on with a connection that has
 * promised more than it can keep: what comes next is dropped, and sent again after seconds, when that comes to it. To
 * read it in the sender leaves the connection as it is. It takes CAP_NET_ADMIN (TCP_REPAIR, tcp(7)).
 *
 * Which part of what the sender has kept the receiver has got already is told by the sequence numbers, exactly. While
 * they are looked at, the processes stand still; that segments arrive meanwhile does no harm.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "criu_connections.h"

enum {
	ON = 1, OFF = -1, OFF_AND_SAY_SO = 0,	/* linux/tcp.h, TCP_REPAIR_* */
	NONE = 0, RECEIVED = 1, SENT = 2,	/* the queues, likewise */
	ESTABLISHED = 1, CLOSE_WAIT = 8,	/* net/tcp_states.h: it may go on sending */
	SPARE = 1 << 18,	/* bytes: what of the first segment was received is in the queue as well */
	TRIES = 20,
};

struct end {
	int fd, is_reused;
	char *sent, *unread;
	size_t sent_size, unread_size;
	uint32_t first_sent, next; /* the numbers of the first byte in `sent`, and of the one behind `unread` */
};

/* Have a socket tell of its queues; a program that runs must not have it so. */
static int open_queues(struct end *end)
{
	end->is_reused = option(end->fd, SOL_SOCKET, SO_REUSEADDR);
	return set_option(end->fd, IPPROTO_TCP, TCP_REPAIR, ON);
}

static void close_queues(const struct end *end)
{
	if (set_option(end->fd, IPPROTO_TCP, TCP_REPAIR, OFF) != 0)
		set_option(end->fd, IPPROTO_TCP, TCP_REPAIR, OFF_AND_SAY_SO);
	set_option(end->fd, SOL_SOCKET, SO_REUSEADDR, end->is_reused); /* it was set, and unset, by that */
}

/* Read what a socket has sent and keeps, until all of it is known to be received. */
static int read_sent(struct end *end)
{
	int size = -1, state = option(end->fd, IPPROTO_TCP, TCP_INFO) & 0xff;
	if (ioctl(end->fd, SIOCOUTQ, &size) != 0 || size < 0 || (end->sent = malloc((size_t)size + SPARE)) == NULL ||
	    set_option(end->fd, IPPROTO_TCP, TCP_REPAIR_QUEUE, SENT) != 0)
		return -1;
	ssize_t found = recv(end->fd, end->sent, (size_t)size + SPARE, MSG_PEEK | MSG_DONTWAIT);
	uint32_t behind = option(end->fd, IPPROTO_TCP, TCP_QUEUE_SEQ);
	set_option(end->fd, IPPROTO_TCP, TCP_REPAIR_QUEUE, NONE);
	/* The end of the stream has a number, too, and is in no queue. */
	if (found < 0 || (found > 0 && state != ESTABLISHED && state != CLOSE_WAIT))
		return -1;
	end->sent_size = found;
	end->first_sent = behind - (uint32_t)found;
	return 0;
}

/* Read what a socket has received and its program has not read. */
static int read_unread(struct end *end)
{
	if (set_option(end->fd, IPPROTO_TCP, TCP_REPAIR_QUEUE, RECEIVED) != 0)
		return -1;
	for (int i = 0; i < TRIES; i++) {
		int size = -1;
		end->next = option(end->fd, IPPROTO_TCP, TCP_QUEUE_SEQ);
		free(end->unread);
		if (ioctl(end->fd, FIONREAD, &size) != 0 || size < 0 || (end->unread = malloc((size_t)size + 1)) == NULL)
			return -1;
		ssize_t found = recv(end->fd, end->unread, (size_t)size + 1, MSG_PEEK | MSG_DONTWAIT);
		end->unread_size = found < 0 && errno == EAGAIN ? 0 : found;
		if (end->unread_size == (size_t)size && end->next == (uint32_t)option(end->fd, IPPROTO_TCP, TCP_QUEUE_SEQ))
			return 0;
	}
	return -1;
}

static int write_all(int file, const char *bytes, size_t size)
{
	while (size > 0) {
		ssize_t done = write(file, bytes, size);
		if (done <= 0)
			return -1;
		bytes += done, size -= done;
	}
	return 0;
}

static int write_file(const char *path, const struct end *to, const struct end *from)
{
	uint32_t known = to->next - from->first_sent; /* so much of what was sent is received */
	if (from->sent_size == 0)
		known = 0; /* the end of the stream may be */
	if (known > from->sent_size)
		return -1;
	int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (file < 0)
		return -1;
	int result = write_all(file, to->unread, to->unread_size);
	if (result == 0)
		result = write_all(file, from->sent + known, from->sent_size - known);
	close(file);
	return result;
}

int write_under_way(int one, int other, const char *path, const char *other_path)
{
	struct end ends[2] = {{.fd = one}, {.fd = other}};
	int opened = 0, is_known = 0;
	while (opened < 2 && open_queues(&ends[opened]) == 0)
		opened++;
	/* What was sent first: what is received of it meanwhile is in both. */
	if (opened == 2)
		is_known = read_sent(&ends[0]) == 0 && read_sent(&ends[1]) == 0 && read_unread(&ends[0]) == 0 &&
			   read_unread(&ends[1]) == 0;
	while (opened > 0)
		close_queues(&ends[--opened]);
	if (is_known && (write_file(path, &ends[0], &ends[1]) != 0 || write_file(other_path, &ends[1], &ends[0]) != 0)) {
		unlink(path);
		unlink(other_path);
		is_known = 0;
	}
	for (int i = 0; i < 2; i++) {
		free(ends[i].sent);
		free(ends[i].unread);
	}
	return is_known ? 0 : -1;
}
