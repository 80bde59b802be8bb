/* Parking: the process's end of a save and a restore, in which its GPU memory leaves it and comes back.
 *
 * The holder, another process, opens the physical memory of every piece (memory.c); this one lets go of it, and keeps
 * the addresses. The holder copies it to the host at the speed of the bus, while the driver's checkpoint finds nothing
 * to copy. Afterwards new physical memory is made for the same addresses, and the holder fills it; or this process
 * does, from few large pieces of the holder's, where there is room for those beside it: that takes half as long.
 *
 * Written in C, and run without Python: all other threads are paused then, and any may hold a lock of Python's.
 */
#define _GNU_SOURCE
#include "channel.h"
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
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

enum { PROTOCOL = 6 };       /* how the holder is talked to; said to the keeper, since a restored process may be older */
enum { BATCH = 64 };         /* parts in one message, with a descriptor each */
enum { ACK_SECONDS = 60 };   /* for how long the holder may take over one message */
enum { CLOSE_SECONDS = 5 };   /* for how long the holder may take to close what it was shown */
enum { WORTH_IT = 256 << 20 }; /* bytes from which on the keeper has a process park */
enum { MUCH_LOCAL = 512 << 20 }; /* bytes of local memory from which on it does so, too */
enum { KEEPER_SECONDS = 10 }; /* for how long the keeper may take to say what comes next, until memory is parked */

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

static channel *keeper;

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

/* Wait until the holder has its end, and hear its `greeting`. Only it has that end, from then on: when it ends, it is
 * noticed at once. */
static int meet(int pair[2], uint64_t *greeting) {
  if (hear_number(pair[0], greeting)) return -1;
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

/* -- local memory: each context has memory on its GPU for what the threads of a kernel have there, as their stacks: so
 * many bytes (CU_LIMIT_STACK_SIZE) for each thread that can run at once, 264 MB on an H200, and more after a kernel that
 * needs more. Nothing is in it between kernels, and the driver would copy all of it at a checkpoint and at a restore.
 * The driver makes room for a kernel that needs more than there is; but not for one in a CUDA graph, which fails (719).
 * So what a context had it has again before anything can run. */

enum { STACK_SIZE = 0, SMALLEST_STACK = 16 };
enum { PROCESSORS = 16, THREADS_OF_EACH = 39 }; /* CUdevice_attribute */

static size_t stack_sizes[MOST_DEVICES]; /* what the contexts had that have the smallest meanwhile, in bytes */

/* Return how many bytes of it the primary context of a GPU has. */
static uint64_t local_memory(int device) {
  void *context, *left;
  unsigned flags;
  int active, processors, threads;
  size_t size = 0;
  if (cu.PrimaryState(device, &flags, &active) || !active || cu.DeviceAttribute(&processors, PROCESSORS, device) ||
      cu.DeviceAttribute(&threads, THREADS_OF_EACH, device) || cu.PrimaryRetain(&context, device))
    return 0;
  if (!cu.CtxPush(context)) {
    if (cu.CtxGetLimit(&size, STACK_SIZE)) size = 0;
    cu.CtxPop(&left);
  }
  cu.PrimaryRelease(device);
  return size * (uint64_t)processors * (uint64_t)threads;
}

static void shrink_stacks(void) {
  for (int device = 0; device < MOST_DEVICES; device++) {
    size_t size;
    if (!contexts[device] || stack_sizes[device] || enter(device)) continue;
    if (!cu.CtxGetLimit(&size, STACK_SIZE) && !cu.CtxSetLimit(STACK_SIZE, (size_t)SMALLEST_STACK))
      stack_sizes[device] = size;
    leave();
  }
}

static int grow_stacks(void) {
  int result = 0;
  for (int device = 0; !result && device < MOST_DEVICES; device++) {
    if (!stack_sizes[device] || (result = enter(device))) continue;
    if (!(result = cu.CtxSetLimit(STACK_SIZE, stack_sizes[device]))) stack_sizes[device] = 0;
    leave();
  }
  return result;
}

/* -- before */

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

/* Send all that can be parked, for the holder to open. */
static int send_all(batch *b) {
  int result = 0;
  for (size_t i = 0; !result && i < memory_count; i++) {
    memory *m = memories[i];
    if (!is_parkable(m)) continue;
    for (size_t part = 0; !result && part < parts_of(m); part++) {
      if (b->count == BATCH) result = flush(b, (item){m->offset + part * m->part, part_size(m, part)});
      if (!result) result = add(b, m, part);
    }
  }
  return result;
}

static int was_shown;  /* whether the holder may have memory open that this process goes on with */
static int is_same;    /* whether that is what there is */
static uint64_t shown; /* the end of it */

/* Tell the holder, by a FIFO, that what it was shown is not what there is any more: what it has open stays on the GPU
 * when this process gives it up, so it has to close it. Returns whether it has not yet: after that it closes its end. */
static int tell_changed(void) {
  int fd = was_shown ? open_fifo("changed", O_WRONLY | O_NONBLOCK) : -1;
  if (fd < 0) return is_same = was_shown = 0;
  /* As one who reads, too: the holder may end in this moment, and a signal (SIGPIPE) would end this process then. */
  int both = open_fifo("changed", O_RDWR | O_NONBLOCK);
  ssize_t told = is_same && both >= 0 ? write(both, "", 1) : 1;
  is_same = 0;
  if (both >= 0) close(both);
  close(fd);
  return told == 1;
}

void memory_changed(void) {
  if (is_same) tell_changed();
}

int wait_for_holder(void) {
  struct timespec pause = {.tv_nsec = 2000000};
  int patience = CLOSE_SECONDS * 500;
  if (!tell_changed()) return 0;
  while (patience-- && tell_changed()) nanosleep(&pause, NULL);
  return 1;
}

/* Show the holder what there is, for it to open, before anything is held still: opening it takes long, and it sees how
 * much of it is in use. The process goes on with its memory. */
static int show(int pair[2], const uint64_t places[MOST_DEVICES]) {
  batch b = {.to = pair[0]};
  uint64_t greeting;
  int result = meet(pair, &greeting);
  if (result) return result;
  lock_memory();
  if (memory_count && !(result = retain_contexts())) {
    was_shown = 1;
    if (!(result = lay_out(places, &shown))) result = send_all(&b);
    is_same = !result;
    release_contexts();
  }
  unlock_memory(); /* the holder takes its time */
  if (!result) result = finish(&b, shown);
  while (b.count) close(b.fds[--b.count]);
  return result;
}

/* -- there */

/* Hand all memory to the holder, which has it open then. Nothing is changed where it fails. */
static int hand_over(int pair[2], const uint64_t places[MOST_DEVICES]) {
  batch b = {.to = pair[0]};
  uint64_t has_shown, end = shown;
  int result = meet(pair, &has_shown);
  if (!result) result = synchronize();
  if (!result && !(has_shown && is_same) && !(result = lay_out(places, &end))) result = send_all(&b);
  if (!result) result = finish(&b, end);
  while (b.count) close(b.fds[--b.count]);
  is_same = was_shown = 0;
  return result;
}

/* Keep nothing of it but the addresses. */
static void give_parts_up(void) {
  synchronize();
  for (size_t i = 0; i < memory_count; i++)
    if (is_parkable(memories[i])) take_parts(memories[i]);
}

/* -- and back */

/* Get new memory for all that was parked, and have the holder fill it. The holder says for how many bytes more there is
 * room; it knows that this waits for more when the next part is larger than what is left of them. */
static int send_to_fill(batch *b) {
  uint64_t room = 0, more;
  int device = -1, result = 0;
  for (size_t i = 0; !result && i < memory_count; i++) {
    memory *m = memories[i];
    if (!is_parkable(m)) continue;
    if (device_of(m) != device) room = 0; /* what was said is of another GPU */
    device = device_of(m);
    for (size_t part = 0; !result && part < parts_of(m); part++) {
      item next = {m->offset + part * m->part, part_size(m, part)};
      if (b->count == BATCH || next.size > room) result = flush(b, next);
      while (!result && next.size > room)
        if (!(result = hear_number(b->to, &more))) room += more;
      if (!result && m->had <= part) result = give_part(m);
      if (!result) result = add(b, m, part);
      room -= next.size;
    }
  }
  return result;
}

/* A piece of the holder's GPU memory, mapped here: it has bytes of what was parked. */
typedef struct { uint64_t offset, size, address; } piece;

/* Where the bytes are from which this process fills its memory itself: in pieces, in their order, or in a file that is
 * mapped. What neither has is zero. */
typedef struct {
  piece *pieces;
  size_t count;
  const char *bytes;
  int fd;
} source;

static int copy_from_file(uint64_t address, uint64_t size, const source *from, uint64_t offset) {
  int result = cu.MemsetD8(address, 0, size);
  off_t at = (off_t)offset, end = (off_t)(offset + size);
  while (!result && at < end && (at = lseek(from->fd, at, SEEK_DATA)) >= 0 && at < end) {
    off_t hole = lseek(from->fd, at, SEEK_HOLE);
    if (hole < 0) return -1;
    if (hole > end) hole = end;
    result = cu.HtoD(address + (uint64_t)at - offset, from->bytes + at, (size_t)(hole - at));
    at = hole;
  }
  return result;
}

static int copy_from_pieces(uint64_t address, uint64_t size, const source *from, uint64_t offset) {
  uint64_t at = offset, end = offset + size;
  int result = 0;
  for (size_t i = 0; !result && i < from->count && from->pieces[i].offset < end; i++) {
    const piece *p = &from->pieces[i];
    uint64_t upto = p->offset + p->size < end ? p->offset + p->size : end;
    if (upto <= at) continue;
    if (at < p->offset && (result = cu.MemsetD8(address + at - offset, 0, p->offset - at))) break;
    if (at < p->offset) at = p->offset;
    result = cu.DtoDAsync(address + at - offset, p->address + at - p->offset, upto - at, NULL);
    at = upto;
  }
  return !result && at < end ? cu.MemsetD8(address + at - offset, 0, end - at) : result;
}

static int copy_to(uint64_t address, const memory *m, size_t part, const source *from) {
  uint64_t offset = m->offset + part * m->part, size = part_size(m, part);
  int result = enter(device_of(m));
  if (result) return result;
  result = from->bytes ? copy_from_file(address, size, from, offset) : copy_from_pieces(address, size, from, offset);
  leave();
  return result;
}

/* Copy to a part that the program has mapped nowhere where it could be written. */
static int copy_to_unmapped(const memory *m, size_t part, const source *from) {
  uint64_t address, size = part_size(m, part);
  access_desc access = {m->prop.place, READ_WRITE};
  int result = cu.AddressReserve(&address, size, (size_t)0, (uint64_t)0, (uint64_t)0);
  if (result) return result;
  if (!(result = cu.Map(address, size, (size_t)0, m->handles[part], (uint64_t)0))) {
    if (!(result = cu.SetAccess(address, size, &access, (size_t)1))) {
      result = copy_to(address, m, part, from);
      /* What was begun is not waited for by the calls themselves, and the GPU faults where it has no place. */
      int ended = synchronize();
      if (!result) result = ended;
    }
    cu.Unmap(address, size);
  }
  cu.AddressFree(address, size);
  return result;
}

/* Get new memory for all that was parked, and fill it. */
static int fill_from(const source *from) {
  int result = 0, ended;
  for (size_t i = 0; !result && i < memory_count; i++) {
    memory *m = memories[i];
    for (size_t part = 0; !result && is_parkable(m) && part < parts_of(m); part++) {
      if (m->had <= part && (result = give_part(m))) break;
      uint64_t address = writable_at(m, part);
      result = address ? copy_to(address, m, part, from) : copy_to_unmapped(m, part, from);
    }
  }
  if ((ended = synchronize()) && !result) result = ended;
  return result;
}

/* The GPU that has the bytes at an offset; any where they are nobody's any more, since nothing is copied of them. */
static int device_at(uint64_t offset, uint64_t size) {
  for (size_t i = 0; i < memory_count; i++) {
    const memory *m = memories[i];
    if (is_parkable(m) && m->offset < offset + size && offset < m->offset + m->size) return device_of(m);
  }
  return 0;
}

static int open_piece(piece *p, int fd) {
  access_desc access = {{ON_DEVICE, device_at(p->offset, p->size)}, READ_WRITE};
  uint64_t handle;
  int result = cu.Import(&handle, (void *)(intptr_t)fd, POSIX_FD);
  if (result) return result;
  if (!(result = cu.AddressReserve(&p->address, p->size, (size_t)0, (uint64_t)0, (uint64_t)0))) {
    if (!(result = cu.Map(p->address, p->size, (size_t)0, handle, (uint64_t)0)) &&
        (result = cu.SetAccess(p->address, p->size, &access, (size_t)1)))
      cu.Unmap(p->address, p->size);
    if (result) cu.AddressFree(p->address, p->size);
  }
  cu.Release(handle); /* the mapping keeps it */
  return result;
}

/* Open the holder's pieces, so many, which come in messages like the parts of this process. */
static int open_pieces(int holder, uint64_t count, source *to) {
  item items[BATCH + 1];
  int fds[BATCH], result = 0;
  char space[CMSG_SPACE(sizeof fds)];
  if (!(to->pieces = calloc(count, sizeof *to->pieces))) return -1;
  while (!result && to->count < count) {
    struct iovec data = {items, sizeof items};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t got;
    while ((got = recvmsg(holder, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {}
    struct cmsghdr *header = got > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    size_t sent = header ? (header->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
    if (header) memcpy(fds, CMSG_DATA(header), sent * sizeof(int));
    if (!sent || sent > count - to->count || (size_t)got != (sent + 1) * sizeof(item)) result = -1;
    for (size_t i = 0; i < sent; i++) {
      if (!result) {
        to->pieces[to->count] = (piece){.offset = items[i].offset, .size = items[i].size};
        if (!(result = open_piece(&to->pieces[to->count], fds[i]))) to->count++;
      }
      close(fds[i]);
    }
  }
  return result;
}

/* None of them may be open here at a checkpoint: the driver would lose the process. */
static void close_pieces(source *of) {
  for (size_t i = 0; i < of->count; i++) {
    cu.Unmap(of->pieces[i].address, of->pieces[i].size);
    cu.AddressFree(of->pieces[i].address, of->pieces[i].size);
  }
  free(of->pieces);
}

/* Have all memory back from the holder, which says in its greeting how many pieces it lends. It fills the memory itself
 * where it lends none, or another program has taken what the GPU had room for. */
static int have_filled(void) {
  int pair[2], result = 0;
  uint64_t lent;
  source from = {0};
  if (open_pair(pair)) return -1;
  batch b = {.to = pair[0]};
  say(keeper, "socket %d %d\n", pair[1], PROTOCOL);
  result = meet(pair, &lent);
  are_apart = 0; /* the driver has restored the process */
  if (!result) result = grow_stacks();
  if (!result && lent) {
    if (!(result = open_pieces(pair[0], lent, &from))) result = fill_from(&from);
    close_pieces(&from);
    if (result == OUT_OF_MEMORY) {
      give_parts_up();
      lent = result = 0;
    }
  }
  if (!result && !lent) result = send_to_fill(&b);
  if (!result) result = finish(&b, 0);
  while (b.count) close(b.fds[--b.count]);
  close_pair(pair);
  return result;
}

/* Have all memory back from a file: slower, and without anybody's help. */
static int load(const char *path) {
  struct stat status;
  int result, fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  char *bytes = MAP_FAILED;
  if (!fstat(fd, &status)) bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
  if (bytes == MAP_FAILED) return close(fd), -1;
  are_apart = 0;
  result = grow_stacks();
  for (size_t i = 0; i < memory_count; i++)
    if (is_parkable(memories[i]) && memories[i]->offset + memories[i]->size > (uint64_t)status.st_size) result = -1;
  if (!result) result = fill_from(&(source){.bytes = bytes, .fd = fd});
  munmap(bytes, (size_t)status.st_size);
  close(fd);
  return result;
}

/* Give up what was got back so far: where there was no room for all of it. The driver takes the process away again. */
static void drop(void) {
  give_parts_up();
  shrink_stacks();
  say(keeper, "dropped\n");
}

/* -- Python, where the program is one: while a thread has its lock, no Python code runs in the others. They sleep, and can
 * be held still; without it, one that computes cannot. */

static void *of_python(const char *name) { return dlsym(RTLD_DEFAULT, name); }

/* Take Python's lock; returns what `leave_python` wants. */
static int enter_python(int *state) {
  int (*is_there)(void) = (int (*)(void))of_python("Py_IsInitialized");
  int (*ensure)(void) = (int (*)(void))of_python("PyGILState_Ensure");
  if (!is_there || !is_there() || !ensure || !of_python("PyGILState_Release")) return 0;
  *state = ensure();
  return 1;
}

static void leave_python(int state) { ((void (*)(int))of_python("PyGILState_Release"))(state); }

/* Let Python's other threads run: the memory stays parked for long. Their CUDA calls wait, in the driver or for the
 * memory's lock. Returns what `have_python` needs to take Python's lock again. */
static void *let_python_go(void) { return ((void *(*)(void))of_python("PyEval_SaveThread"))(); }

static void have_python(void *thread) {
  if (thread) ((void (*)(void *))of_python("PyEval_RestoreThread"))(thread);
}

/* Give up what is handed over, which takes 40 ms for 1,200 parts: other threads run on meanwhile, where the keeper lets
 * them. It is told whether they can miss nothing now. Then come back to memory as it says: `fill` by the holder, or `load`
 * from a file. Until then `sleep` lets Python run on; returns what `have_python` wants afterwards. */
static void *stay_parked(int has_python) {
  char line[4200];
  void *python = NULL;
  int result;
  if (has_managed() || is_on_host) say(keeper, "handed\n");
  else say(keeper, "handed free %d\n", threads_at_gate());
  hear(keeper, line, sizeof line, KEEPER_SECONDS);
  if (has_python && !strcmp(line, "sleep")) python = let_python_go();
  give_parts_up();
  shrink_stacks();
  say(keeper, "parked\n");
  for (;; *line = 0) {
    if (!*line) hear(keeper, line, sizeof line, 0); /* else the keeper that was to answer has died, and another one did */
    result = -1;
    if (!strcmp(line, "sleep")) {
      if (has_python && !python) python = let_python_go();
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
    say(keeper, "error %d\n", result);
  }
  bring_managed_back();
  bring_gpus_together(1);
  say(keeper, "done\n");
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
  if (!cu.DeviceCount || cu.DeviceCount(&count) || device >= count || cu.DeviceUuid(uuid, device)) return -1;
  lock_memory();
  for (size_t i = 0; i < memory_count; i++)
    if (is_parkable(memories[i]) && device_of(memories[i]) == device) bytes += memories[i]->size;
  unlock_memory();
  return bytes;
}

/* Read what a line says after a command: for each GPU, how many bytes the holder has room for. */
static int read_places(const char *line, const char *command, uint64_t places[MOST_DEVICES]) {
  if (strncmp(line, command, strlen(command))) return 0;
  char *at = (char *)line + strlen(command);
  for (int device = 0; device < MOST_DEVICES && *at; device++) places[device] = strtoull(at, &at, 10);
  return !*at;
}

/* Park, wait, and come back. Other threads are held still by now, and may hold the memory's lock. */
static void *park(int pair[2], const uint64_t places[MOST_DEVICES], int has_python) {
  void *python = NULL;
  int result = -1;
  if (!memory_count || !try_lock_memory()) {
    say(keeper, "not %d\n", -1);
    return NULL;
  }
  if (!(result = retain_contexts())) {
    if (!(result = keep_gpus_apart(1, 1)) && !(result = synchronize()) && !(result = put_managed_away()))
      result = hand_over(pair, places);
    close_pair(pair);
    pair[0] = pair[1] = -1;
    if (!result) {
      python = stay_parked(has_python);
    } else {
      bring_managed_back();
      bring_gpus_together(1);
    }
    release_contexts();
  }
  if (result) say(keeper, "not %d\n", result);
  unlock_memory();
  return python;
}

/* Say what can be parked: "here", and for each GPU that this process sees, in its order, UUID=BYTES. */
static void say_what_there_is(void) {
  char line[1024], *end = line + sprintf(line, "here");
  unsigned char uuid[16];
  int64_t bytes;
  for (int device = 0; device < MOST_DEVICES && (bytes = gpuckpt_parkable_on(device, uuid)) >= 0; device++) {
    if (!device && has_managed() && bytes < WORTH_IT) bytes = WORTH_IT; /* it has to park */
    if (bytes && bytes < WORTH_IT && local_memory(device) >= MUCH_LOCAL) bytes = WORTH_IT;
    *end++ = ' ';
    for (size_t i = 0; i < sizeof uuid; i++) end += sprintf(end, "%02x", uuid[i]);
    end += sprintf(end, "=%lld", (long long)bytes);
  }
  say(keeper, "%s\n", line);
}

/* Keep the GPUs apart although nothing is parked; returns 0 or what failed, and then they have access as before. */
static int keep_apart_unparked(void) {
  lock_memory();
  int result = keep_gpus_apart(1, 0);
  if (result) bring_gpus_together(0);
  unlock_memory();
  return result;
}

static void bring_together_unparked(void) {
  lock_memory();
  bring_gpus_together(0);
  unlock_memory();
}

/* What the keeper wants of this process. What there is is said first; then come
 *
 * - watch: every call looks at the gate from now on, until the gate has been shut and opened again: "watching"
 * - imports: what `say_imports` says of others' memory that is open here
 * - away: it is closed, and back: it is opened again: the same word, and what failed
 * - wait, with milliseconds: until the GPUs have done what they were given: "waited", and what failed
 * - peers: "peers", and whether the program asked for access of GPUs to each other's memory, by the driver's own
 * - apart: that is taken away though nothing is parked, while the gate is shut and the GPUs have nothing to do: "apart" and
 *   what failed; and together: it is given back: "together"
 * - show, with the bytes for each GPU: "showing", and the descriptor that the holder is to take; then "shown", or
 *   "unshown" and what failed
 * - halt: no Python code runs from now on, where there is Python: "halted", this thread's id, and the descriptor that
 *   the holder is to take
 * - park, with the bytes for each GPU: "handed", or "not" and what failed. "handed free" says that no thread can miss
 *   anything while the driver has the GPU state, as it would managed memory: others may run; and how many threads wait
 *   at the gate. With "sleep" Python runs on from then on, with anything else it does not; then "parked", `stay_parked`,
 *   and the end
 * - anything else: "not", and the end.
 */
static void converse(channel *with) {
  int pair[2] = {-1, -1}, has_python = 0, state = 0;
  void *python = NULL;
  char line[512];
  uint64_t places[MOST_DEVICES] = {0};
  keeper = with;
  say_what_there_is();
  for (;;) {
    hear(keeper, line, sizeof line, KEEPER_SECONDS);
    if (!strcmp(line, "watch")) {
      watch_gate();
      say(keeper, "watching\n");
    } else if (pair[0] < 0 && read_places(line, "show", places) && !open_pair(pair)) {
      say(keeper, "showing %d %d\n", pair[1], PROTOCOL);
      int result = show(pair, places);
      close_pair(pair);
      pair[0] = pair[1] = -1;
      if (result) say(keeper, "unshown %d\n", result);
      else say(keeper, "shown\n");
    } else if (!strcmp(line, "imports")) {
      say_imports(keeper);
    } else if (!strcmp(line, "away")) {
      say(keeper, "away %d\n", imports_away());
    } else if (!strcmp(line, "back")) {
      say(keeper, "back %d\n", imports_back());
    } else if (!strncmp(line, "wait ", 5)) {
      say(keeper, "waited %d\n", wait_for_gpus(atoi(line + 5)));
    } else if (!strcmp(line, "peers")) {
      say(keeper, "peers %d\n", was_peer_access_asked_for());
    } else if (!strcmp(line, "apart")) {
      say(keeper, "apart %d\n", keep_apart_unparked());
    } else if (!strcmp(line, "together")) {
      bring_together_unparked();
      say(keeper, "together\n");
    } else if (!strcmp(line, "halt") && pair[0] < 0 && !open_pair(pair)) {
      has_python = enter_python(&state);
      say(keeper, "halted %ld %d %d\n", syscall(SYS_gettid), pair[1], PROTOCOL);
    } else {
      break;
    }
  }
  if (pair[0] >= 0 && read_places(line, "park", places))
    python = park(pair, places, has_python);
  else
    say(keeper, "not %d\n", -1);
  if (pair[0] >= 0) close_pair(pair);
  have_python(python); /* last: who has it may wait for the memory's lock */
  if (has_python) leave_python(state);
}

/* Have the keeper find this process, which has a CUDA context now, or memory. */
void found_by_the_keeper(void) { be_there("parking", converse, has_watch, lend); }

static int retained[MOST_DEVICES]; /* how often this process has a GPU's primary context */

int own_cuDevicePrimaryCtxRetain(void **context, int device) {
  int result = cu.PrimaryRetain(context, device);
  if (!result) found_by_the_keeper();
  if (!result && device >= 0 && device < MOST_DEVICES) __atomic_add_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
  return result;
}

/* Note that a primary context is about to be given up once; tell whether it ends by that, as far as is known here. */
int is_last_release(int device) {
  if (device < 0 || device >= MOST_DEVICES) return 1;
  int before = __atomic_fetch_sub(&retained[device], 1, __ATOMIC_SEQ_CST);
  if (before < 1) __atomic_store_n(&retained[device], 0, __ATOMIC_SEQ_CST);
  return before <= 1;
}

int own_cuCtxCreate_v2(void **context, unsigned flags, int device) {
  int result = cu.CtxCreate(context, flags, device);
  if (!result) found_by_the_keeper();
  return result;
}

int own_cuCtxCreate_v3(void **context, void *affinities, int count, unsigned flags, int device) {
  int result = cu.CtxCreate3(context, affinities, count, flags, device);
  if (!result) found_by_the_keeper();
  return result;
}

int own_cuCtxCreate_v4(void **context, void *parameters, unsigned flags, int device) {
  int result = cu.CtxCreate4(context, parameters, flags, device);
  if (!result) found_by_the_keeper();
  return result;
}
