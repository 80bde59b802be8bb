/* Parking: the process's end of a save and a restore, in which its GPU memory leaves it and comes back.
 *
 * The holder, another process, opens the physical memory of every piece (memory.c); this one lets go of it, and keeps
 * the addresses. The holder copies it to the host at the speed of the bus, while the driver's checkpoint finds nothing
 * to copy. Afterwards new physical memory is made for the same addresses, and the holder fills it.
 *
 * Written in C, and run without Python: all other threads are paused then, and any may hold a lock of Python's.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { PROTOCOL = 2 };       /* how the holder is talked to; said to the keeper, since a restored process may be older */
enum { BATCH = 64 };         /* parts in one message, with a descriptor each */
enum { ACK_SECONDS = 60 };   /* for how long the holder may take over one message */
enum { FIRST_SECONDS = 10 }; /* for how long the keeper may take to say whether to park at all */

/* Where a part's bytes are while it is parked, and how many. */
typedef struct { uint64_t offset, size; } item;

/* Parts on their way to the holder. Each message ends with the part after them, which has no descriptor yet; its `size`
 * is 0 where there is none. */
typedef struct {
  int to;
  size_t count;
  item items[BATCH + 1];
  int fds[BATCH];
} batch;

static int in, out;

static void say(const char *text, long a, long b, long c) {
  char line[128];
  int length = snprintf(line, sizeof line, text, a, b, c);
  if (write(out, line, (size_t)length) != length) return; /* the keeper's time limit tells */
}

/* Read a line of at most `size` - 1 bytes; it comes in one piece, being shorter than PIPE_BUF. */
static void hear(char *line, size_t size) {
  size_t length = 0;
  while (length < size - 1) {
    ssize_t got = read(in, line + length, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got != 1 || line[length] == '\n') break;
    length++;
  }
  line[length] = 0;
}

/* -- the holder's socket */

/* Make a pair of sockets; the holder takes the second one out of this process (pidfd_getfd). */
static int open_pair(int pair[2]) {
  struct timeval limit = {.tv_sec = ACK_SECONDS};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return -1;
  setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(pair[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  return 0;
}

static void close_pair(int pair[2]) {
  close(pair[0]);
  if (pair[1] >= 0) close(pair[1]);
}

/* Send what is gathered, and what comes next. Where more descriptors are on their way than Linux lets a user have
 * (ETOOMANYREFS), the holder is behind, and is waited for. */
static int flush(batch *b, item next) {
  char space[CMSG_SPACE(sizeof b->fds)] = {0};
  struct iovec data = {b->items, (b->count + 1) * sizeof(item)};
  struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
  struct timespec pause = {.tv_nsec = 1000000};
  b->items[b->count] = next;
  if (b->count) {
    message.msg_control = space;
    message.msg_controllen = CMSG_SPACE(b->count * sizeof(int));
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(b->count * sizeof(int));
    memcpy(CMSG_DATA(header), b->fds, b->count * sizeof(int));
  }
  ssize_t sent;
  int patience = ACK_SECONDS * 1000;
  while ((sent = sendmsg(b->to, &message, MSG_NOSIGNAL)) < 0 && (errno == EINTR || (errno == ETOOMANYREFS && patience--)))
    if (errno == ETOOMANYREFS) nanosleep(&pause, NULL);
  while (b->count) close(b->fds[--b->count]);
  return sent == (ssize_t)data.iov_len ? 0 : -1;
}

static int add(batch *b, const memory *m, size_t part) {
  int fd = -1;
  int result = cu.Export(&fd, m->handles[part], POSIX_FD, (uint64_t)0);
  if (result) return result;
  b->items[b->count] = (item){m->offset + part * m->part, part_size(m, part)};
  b->fds[b->count++] = fd;
  return 0;
}

static int hear_number(int holder, uint64_t *number) {
  ssize_t got;
  while ((got = recv(holder, number, sizeof *number, 0)) < 0 && errno == EINTR) {}
  return got == sizeof *number ? 0 : -1;
}

/* Wait until the holder has its end. Only it has, from then on: when it ends, it is noticed at once. */
static int meet(int pair[2]) {
  uint64_t nothing;
  if (hear_number(pair[0], &nothing)) return -1;
  close(pair[1]);
  pair[1] = -1;
  return 0;
}

static int finish(batch *b, uint64_t total) {
  uint64_t thanks;
  return flush(b, (item){total, 0}) || hear_number(b->to, &thanks) ? -1 : 0;
}

/* -- contexts */

static void *contexts[MOST_DEVICES]; /* of the GPUs with memory to park */

static int enter(int device) { return cu.CtxPush(contexts[device]); }

static void leave(void) {
  void *left;
  cu.CtxPop(&left);
}

static int synchronize(void) {
  int result = 0;
  for (int device = 0; !result && device < MOST_DEVICES; device++)
    if (contexts[device] && !(result = enter(device))) {
      result = cu.CtxSynchronize();
      leave();
    }
  return result;
}

static void release_contexts(void) {
  for (int device = 0; device < MOST_DEVICES; device++) {
    if (contexts[device]) cu.PrimaryRelease(device);
    contexts[device] = NULL;
  }
}

static int retain_contexts(void) {
  int result = 0;
  for (size_t i = 0; !result && i < memory_count; i++) {
    int device = device_of(memories[i]);
    if (is_parkable(memories[i]) && !contexts[device]) result = cu.PrimaryRetain(&contexts[device], device);
    if (result) contexts[device] = NULL;
  }
  if (result) release_contexts();
  return result;
}

/* -- there */

static int by_device(const void *one, const void *other) {
  int a = device_of(*(memory *const *)one), b = device_of(*(memory *const *)other);
  return (a > b) - (a < b);
}

/* Say where the bytes of each piece go: first those of the first GPU, which has so many `places`. */
static int lay_out(const uint64_t places[MOST_DEVICES], uint64_t *end) {
  uint64_t offset = 0, limit = 0;
  int device = -1;
  qsort(memories, memory_count, sizeof *memories, by_device);
  for (size_t i = 0; i < memory_count; i++) {
    memory *m = memories[i];
    if (!is_parkable(m)) continue;
    for (; device < device_of(m); offset = limit, limit += places[device]) device++;
    m->offset = offset;
    offset += m->size;
    if (offset > limit) return -1; /* it has more by now */
  }
  *end = offset;
  return 0;
}

/* Hand all memory to the holder, and keep nothing but the addresses. Nothing is changed where it fails. */
static int hand_over(int pair[2], const uint64_t places[MOST_DEVICES]) {
  batch b = {.to = pair[0]};
  uint64_t end;
  int result = meet(pair);
  if (!result) result = synchronize();
  if (!result) result = lay_out(places, &end);
  for (size_t i = 0; !result && i < memory_count; i++) {
    memory *m = memories[i];
    if (!is_parkable(m)) continue;
    for (size_t part = 0; !result && part < parts_of(m); part++) {
      if (b.count == BATCH) result = flush(&b, (item){m->offset + part * m->part, part_size(m, part)});
      if (!result) result = add(&b, m, part);
    }
  }
  if (!result) result = finish(&b, end);
  while (b.count) close(b.fds[--b.count]);
  for (size_t i = 0; !result && i < memory_count; i++)
    if (is_parkable(memories[i])) take_parts(memories[i]);
  return result;
}

/* -- and back */

/* Get new memory for all that was parked, and have the holder fill it. The holder says for how many bytes more there is
 * room; it knows that this waits for more when the next part is larger than what is left of them. */
static int have_filled(void) {
  int pair[2], result = 0;
  uint64_t room = 0, more;
  int device = -1;
  if (open_pair(pair)) return -1;
  batch b = {.to = pair[0]};
  say("socket %ld %ld\n", pair[1], PROTOCOL, 0);
  result = meet(pair);
  are_apart = 0; /* the driver has restored the process */
  for (size_t i = 0; !result && i < memory_count; i++) {
    memory *m = memories[i];
    if (!is_parkable(m)) continue;
    if (device_of(m) != device) room = 0; /* what was said is of another GPU */
    device = device_of(m);
    for (size_t part = 0; !result && part < parts_of(m); part++) {
      item next = {m->offset + part * m->part, part_size(m, part)};
      if (b.count == BATCH || next.size > room) result = flush(&b, next);
      while (!result && next.size > room)
        if (!(result = hear_number(b.to, &more))) room += more;
      if (!result && m->had <= part) result = give_part(m);
      if (!result) result = add(&b, m, part);
      room -= next.size;
    }
  }
  if (!result) result = finish(&b, 0);
  while (b.count) close(b.fds[--b.count]);
  close_pair(pair);
  return result;
}

static int copy_to_part(const memory *m, size_t part, const char *bytes) {
  uint64_t address, size = part_size(m, part);
  access_desc access = {m->prop.place, READ_WRITE};
  int result = cu.AddressReserve(&address, size, (size_t)0, (uint64_t)0, (uint64_t)0);
  if (result) return result;
  if (!(result = cu.Map(address, size, (size_t)0, m->handles[part], (uint64_t)0))) {
    if (!(result = cu.SetAccess(address, size, &access, (size_t)1)) && !(result = enter(device_of(m)))) {
      result = cu.HtoD(address, bytes, size);
      leave();
    }
    cu.Unmap(address, size);
  }
  cu.AddressFree(address, size);
  return result;
}

/* Get new memory for all that was parked, and fill it from a file: slower, and without anybody's help. */
static int load(const char *path) {
  struct stat status;
  int result = 0, fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  char *bytes = MAP_FAILED;
  if (!fstat(fd, &status)) bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (bytes == MAP_FAILED) return -1;
  are_apart = 0;
  for (size_t i = 0; !result && i < memory_count; i++) {
    memory *m = memories[i];
    if (!is_parkable(m)) continue;
    if (m->offset + m->size > (uint64_t)status.st_size) result = -1;
    for (size_t part = 0; !result && part < parts_of(m); part++) {
      if (m->had <= part) result = give_part(m);
      if (!result) result = copy_to_part(m, part, bytes + m->offset + part * m->part);
    }
  }
  munmap(bytes, (size_t)status.st_size);
  return result;
}

/* Give up what was got back so far: where there was no room for all of it. */
static void drop(void) {
  synchronize();
  for (size_t i = 0; i < memory_count; i++)
    if (is_parkable(memories[i])) take_parts(memories[i]);
  say("dropped\n", 0, 0, 0);
}

/* Let Python's other threads run: the memory stays parked for long. Their CUDA calls wait, in the driver or for the memory's lock.
 * Returns what `have_python` needs to take Python's lock again; the functions are Python's C API. */
static void *let_python_go(void) {
  void *(*save)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  return save && dlsym(RTLD_DEFAULT, "PyEval_RestoreThread") ? save() : NULL;
}

static void have_python(void *thread) {
  if (thread) ((void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"))(thread);
}

/* Come back to memory as the keeper says: `fill` by the holder, or `load` from a file. Until then `sleep` lets Python
 * run on; returns what `have_python` wants afterwards. */
static void *stay_parked(void) {
  char line[4200];
  void *python = NULL;
  for (;;) {
    hear(line, sizeof line);
    int result = -1;
    if (!strcmp(line, "sleep")) {
      if (!python) python = let_python_go();
      continue;
    }
    if (!strcmp(line, "drop")) {
      drop();
      continue;
    }
    if (!strcmp(line, "fill")) result = have_filled();
    else if (!strncmp(line, "load ", 5)) result = load(line + 5);
    else continue;
    if (!result) break;
    say("error %ld\n", result, 0, 0);
  }
  say("done\n", 0, 0, 0);
  return python;
}

/* Return how many bytes could be parked now. */
PUBLIC uint64_t gpuckpt_parkable(void) {
  uint64_t bytes = 0;
  lock_memory();
  for (size_t i = 0; i < memory_count; i++)
    if (is_parkable(memories[i])) bytes += memories[i]->size;
  unlock_memory();
  return bytes;
}

/* Return how many bytes of a GPU's could be parked now, and its UUID; -1 where this process sees no GPU of that number. */
PUBLIC int64_t gpuckpt_parkable_on(int device, unsigned char uuid[16]) {
  int64_t bytes = 0;
  int count;
  if (!gpuckpt_is_open() || cu.DeviceCount(&count) || device >= count || cu.DeviceUuid(uuid, device)) return -1;
  lock_memory();
  for (size_t i = 0; i < memory_count; i++)
    if (is_parkable(memories[i]) && device_of(memories[i]) == device) bytes += memories[i]->size;
  unlock_memory();
  return bytes;
}

/* Read what a line says after "park": for each GPU, how many bytes the holder has room for. */
static int read_places(const char *line, uint64_t places[MOST_DEVICES]) {
  const char *command = "park";
  if (strncmp(line, command, strlen(command))) return 0;
  char *at = (char *)line + strlen(command);
  for (int device = 0; device < MOST_DEVICES && *at; device++) places[device] = strtoull(at, &at, 10);
  return !*at;
}

/* Park, wait, and come back: all of it as the keeper says by the FIFO `to`, answering by the FIFO `from`.
 *
 * Said first: "here", this thread's id, and the descriptor that the holder is to take. "park", with the bytes for each
 * GPU, parks, and anything else ends it. "parked", or "not" and what failed; then `stay_parked`. Called with Python's
 * lock, and returns with it.
 */
PUBLIC void gpuckpt_park(const char *to, const char *from) {
  void *python = NULL;
  char line[512];
  uint64_t places[MOST_DEVICES] = {0};
  int pair[2] = {-1, -1}, result = -1;
  in = open(to, O_RDWR | O_CLOEXEC);
  out = open(from, O_RDWR | O_CLOEXEC);
  if (in < 0 || out < 0 || open_pair(pair)) goto end;
  say("here %ld %ld %ld\n", syscall(SYS_gettid), pair[1], PROTOCOL);
  struct pollfd first = {.fd = in, .events = POLLIN};
  if (poll(&first, 1, FIRST_SECONDS * 1000) != 1) goto end;
  hear(line, sizeof line);
  /* Without memory there is no driver to call; a paused thread may hold the lock. */
  if (!read_places(line, places) || !memory_count || !try_lock_memory()) {
    say("not %ld\n", -1, 0, 0);
    goto end;
  }
  if (!(result = retain_contexts())) {
    result = hand_over(pair, places);
    close_pair(pair);
    pair[0] = pair[1] = -1;
    if (!result) {
      say("parked\n", 0, 0, 0);
      python = stay_parked();
    }
    release_contexts();
  }
  if (result) say("not %ld\n", result, 0, 0);
  unlock_memory();
end:
  if (pair[0] >= 0) close_pair(pair);
  if (in >= 0) close(in);
  if (out >= 0) close(out);
  have_python(python); /* last: who has it may wait for the memory's lock */
}
