/* Parking: GPU memory that can leave its process for a save, and come back at the same address.
 *
 * The driver's checkpoint copies what a process has on the GPU through one thread, at 6 to 9 GiB/s. Memory of the
 * virtual memory API (cuMemCreate, cuMemMap) can be taken out of its hands before: another process, the holder, opens
 * the same physical memory, this one lets go of it and keeps only its addresses, and the driver has nothing left to
 * copy. The holder copies it to the host at the speed of the bus meanwhile.
 *
 * So this library, loaded with RTLD_GLOBAL before anything that uses CUDA, stands in for cudaMalloc and cudaFree of the
 * dynamic CUDA runtime (as torch links it): large blocks are made by the virtual memory API. Others of the runtime's
 * functions wait here while the driver has the process's GPU state. And it has the kernel's end of the parking,
 * `gpuckpt_park`, which runs without Python: all other threads are paused then, and any may hold a lock of Python's.
 *
 * Written in C because cudaMalloc is called under torch's locks, from threads that do not hold Python's: a function
 * of Python in its place would deadlock. The types of cuda.h are spelled out: no CUDA toolkit is needed to build it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
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

#define PUBLIC __attribute__((visibility("default")))

enum { OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 }; /* the same numbers in CUresult and cudaError_t */
enum { ON_DEVICE = 1, PINNED = 1, POSIX_FD = 1, READ_WRITE = 3 };
enum { RDMA_WITH_VMM = 110 }; /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
enum { SMALLEST = 16 << 20 }; /* what torch has in smaller blocks is little, and the driver's to copy */
enum { PART = 1 << 30 };      /* a block comes back in parts: the GPU need not have room for all of it twice */
enum { ACK_SECONDS = 60 };    /* for how long the holder may take over one part, or all of them */
enum { FIRST_SECONDS = 10 };  /* for how long the keeper may take to say whether to park at all */

typedef int (*fn)();

typedef struct { int type, id; } location;
typedef struct {
  int type, handle_types;
  location place;
  void *windows;
  struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} allocation_prop;
typedef struct { location place; int flags; } access_desc;

static struct {
  fn Create, Release, Map, Unmap, AddressReserve, AddressFree, SetAccess, ExportToShareableHandle, Granularity;
  fn CtxGetCurrent, CtxGetDevice, CtxSynchronize, CtxPush, CtxPop, Retain, DeviceCount, DeviceAttribute, HtoD;
} cu;

/* A block of GPU memory, and the physical memory of its first `had` parts: of all but while it is parked. */
typedef struct { uint64_t address, size, offset, *handles; size_t had; } block;
/* What is sent beside a part's file descriptor; `size` 0 ends a list. */
typedef struct { uint64_t offset, size; } item;

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static size_t count, room;
static size_t granularity;
static int state; /* 0: not looked yet; 1: at work; -1: left to the CUDA runtime */
static allocation_prop prop;

/* -- the functions that this library stands in for */

static fn of_cuda(const char *name) {
  fn found = (fn)dlsym(RTLD_NEXT, name);
  /* Not global where it was loaded as some library's own dependency. */
  static const char *names[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so",
                                "libcuda.so.1"};
  for (size_t i = 0; !found && i < sizeof names / sizeof *names; i++) {
    void *library = dlopen(names[i], RTLD_NOLOAD | RTLD_NOW);
    if (library) found = (fn)dlsym(library, name);
  }
  return found;
}

static int load_driver(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
  if (!driver) return 0;
  const struct { fn *to; const char *name; } names[] = {
      {&cu.Create, "cuMemCreate"}, {&cu.Release, "cuMemRelease"}, {&cu.Map, "cuMemMap"}, {&cu.Unmap, "cuMemUnmap"},
      {&cu.AddressReserve, "cuMemAddressReserve"}, {&cu.AddressFree, "cuMemAddressFree"},
      {&cu.SetAccess, "cuMemSetAccess"}, {&cu.ExportToShareableHandle, "cuMemExportToShareableHandle"},
      {&cu.Granularity, "cuMemGetAllocationGranularity"}, {&cu.CtxGetCurrent, "cuCtxGetCurrent"},
      {&cu.CtxGetDevice, "cuCtxGetDevice"}, {&cu.CtxSynchronize, "cuCtxSynchronize"},
      {&cu.CtxPush, "cuCtxPushCurrent_v2"}, {&cu.CtxPop, "cuCtxPopCurrent_v2"},
      {&cu.Retain, "cuDevicePrimaryCtxRetain"}, {&cu.DeviceCount, "cuDeviceGetCount"},
      {&cu.DeviceAttribute, "cuDeviceGetAttribute"}, {&cu.HtoD, "cuMemcpyHtoD_v2"},
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (!(*names[i].to = (fn)dlsym(driver, names[i].name))) return 0;
  return 1;
}

/* Tell whether to make blocks: with one GPU only, since others' access to this memory would have to be given one by
 * one, and cuCtxDisablePeerAccess could not take it away before a save. */
static int at_work(void) {
  if (state) return state == 1;
  int devices = 0, rdma = 0;
  state = -1;
  if (!load_driver() || cu.DeviceCount(&devices) || devices != 1) return 0;
  prop.type = PINNED;
  prop.handle_types = POSIX_FD;
  prop.place.type = ON_DEVICE;
  if (!cu.DeviceAttribute(&rdma, RDMA_WITH_VMM, 0) && rdma) prop.flags.rdma = 1;
  if (cu.Granularity(&granularity, &prop, 0) || !granularity) return 0;
  state = 1;
  return 1;
}

static int has_context(void) {
  void *context = NULL;
  return state == 1 && !cu.CtxGetCurrent(&context) && context;
}

static size_t parts_of(const block *b) { return (b->size + PART - 1) / PART; }

static uint64_t part_size(const block *b, size_t part) {
  uint64_t left = b->size - part * PART;
  return left < PART ? left : PART;
}

/* Give a block the physical memory of its next part. */
static int give_part(block *b) {
  access_desc access = {prop.place, READ_WRITE};
  uint64_t address = b->address + b->had * PART, size = part_size(b, b->had), handle;
  int result = cu.Create(&handle, size, &prop, (uint64_t)0);
  if (result) return result;
  if ((result = cu.Map(address, size, (size_t)0, handle, (uint64_t)0))) {
    cu.Release(handle);
    return result;
  }
  if ((result = cu.SetAccess(address, size, &access, (size_t)1))) {
    cu.Unmap(address, size);
    cu.Release(handle);
    return result;
  }
  b->handles[b->had++] = handle;
  return 0;
}

/* Give a block all that it lacks; where that fails, it keeps what it has. */
static int give_memory(block *b) {
  int result = 0;
  while (!result && b->had < parts_of(b)) result = give_part(b);
  return result;
}

static void take_memory(block *b) {
  while (b->had) {
    b->had--;
    cu.Unmap(b->address + b->had * PART, part_size(b, b->had));
    cu.Release(b->handles[b->had]);
  }
}

static int new_block(void **result, size_t size) {
  block b = {.size = (size + granularity - 1) / granularity * granularity};
  if (count == room) {
    block *more = realloc(blocks, (room + 256) * sizeof *more);
    if (!more) return OUT_OF_MEMORY;
    blocks = more;
    room += 256;
  }
  int failed = cu.AddressReserve(&b.address, b.size, (size_t)0, (uint64_t)0, (uint64_t)0);
  if (failed) return failed;
  b.handles = malloc(parts_of(&b) * sizeof *b.handles);
  if (!b.handles || (failed = give_memory(&b))) {
    take_memory(&b);
    free(b.handles);
    cu.AddressFree(b.address, b.size);
    return failed ? failed : OUT_OF_MEMORY;
  }
  blocks[count++] = b;
  *result = (void *)b.address;
  return 0;
}

static block *find(const void *address) {
  for (size_t i = 0; i < count; i++)
    if (blocks[i].address == (uint64_t)address) return &blocks[i];
  return NULL;
}

PUBLIC int cudaMalloc(void **result, size_t size) {
  static fn real;
  static fn real_free;
  if (!real) real = of_cuda("cudaMalloc");
  if (!real_free) real_free = of_cuda("cudaFree");
  if (!real || !real_free) return NOT_SUPPORTED;
  if (size < SMALLEST || !result) return real(result, size);
  pthread_mutex_lock(&busy);
  if (!has_context()) real_free(NULL); /* has the runtime make its context, as its own cudaMalloc would */
  int made = at_work() && has_context() && !new_block(result, size);
  pthread_mutex_unlock(&busy);
  /* What fails here fails there too, and leaves the error where the runtime's callers look for it. */
  return made ? 0 : real(result, size);
}

PUBLIC int cudaFree(void *address) {
  static fn real;
  if (!real) real = of_cuda("cudaFree");
  if (!real) return NOT_SUPPORTED;
  pthread_mutex_lock(&busy);
  block *b = address ? find(address) : NULL;
  if (!b) {
    pthread_mutex_unlock(&busy);
    return real(address);
  }
  int result = cu.CtxSynchronize(); /* cudaFree waits for the GPU's work, which may use the block */
  if (!result) {
    take_memory(b);
    free(b->handles);
    cu.AddressFree(b->address, b->size);
    *b = blocks[--count];
  }
  pthread_mutex_unlock(&busy);
  return result;
}

/* -- calls that do not wait in the driver by themselves */

static char *gate;

/* Say where the file is that stands there while the driver has this process's GPU state. */
PUBLIC void gpuckpt_gate(const char *path) { gate = strdup(path); }

/* Looked for once in a tick of the clock (some milliseconds), so that it costs next to nothing: the keeper waits for two
 * ticks before it goes on. */
static int is_shut(void) {
  static _Atomic long open_at = -1;
  struct timespec now;
  int before = errno;
  if (!gate || clock_gettime(CLOCK_MONOTONIC_COARSE, &now)) return 0;
  long tick = now.tv_sec * 1000000000L + now.tv_nsec;
  if (tick == open_at) return 0;
  int shut = !access(gate, F_OK);
  errno = before;
  if (!shut) open_at = tick;
  return shut;
}

/* The driver (580) holds back most calls of a checkpointed process, and not all. cuCtxSynchronize and the queries of
 * streams and events look at memory that is not there, and the process dies. Addresses of parked memory are unknown to
 * it, and copies to and from there fail. So these wait here first. */
#define WAITS(name, parameters, arguments)                          \
  PUBLIC int name parameters {                                      \
    static fn real;                                                 \
    if (!real && !(real = of_cuda(#name))) return NOT_SUPPORTED; \
    while (is_shut()) usleep(1000);                                 \
    return real arguments;                                          \
  }

WAITS(cudaDeviceSynchronize, (void), ())
WAITS(cudaStreamQuery, (void *stream), (stream))
WAITS(cudaStreamSynchronize, (void *stream), (stream))
WAITS(cudaEventQuery, (void *event), (event))
WAITS(cudaEventSynchronize, (void *event), (event))
WAITS(cudaMemGetInfo, (size_t *available, size_t *total), (available, total))
WAITS(cudaPointerGetAttributes, (void *attributes, const void *address), (attributes, address))
WAITS(cudaMemset, (void *to, int value, size_t size), (to, value, size))
WAITS(cudaMemsetAsync, (void *to, int value, size_t size, void *stream), (to, value, size, stream))
WAITS(cudaMemcpy, (void *to, const void *from, size_t size, int kind), (to, from, size, kind))
WAITS(cudaMemcpyAsync, (void *to, const void *from, size_t size, int kind, void *stream), (to, from, size, kind, stream))
WAITS(cudaMemcpyPeerAsync, (void *to, int there, const void *from, int here, size_t size, void *stream),
      (to, there, from, here, size, stream))
WAITS(cudaMemcpy2D, (void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height, int kind),
      (to, to_pitch, from, pitch, width, height, kind))
WAITS(cudaMemcpy2DAsync,
      (void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height, int kind, void *stream),
      (to, to_pitch, from, pitch, width, height, kind, stream))

/* What Triton's programs begin with: whether an argument is on the GPU. They are linked with the driver itself. */
WAITS(cuPointerGetAttribute, (void *value, int attribute, uint64_t address), (value, attribute, address))

/* -- more of the runtime's functions, for blocks */

PUBLIC int cudaIpcGetMemHandle(void *handle, void *address) {
  static fn real;
  if (!real) real = of_cuda("cudaIpcGetMemHandle");
  if (!real) return NOT_SUPPORTED;
  pthread_mutex_lock(&busy);
  int ours = 0;
  for (size_t i = 0; i < count; i++)
    ours |= (uint64_t)address >= blocks[i].address && (uint64_t)address < blocks[i].address + blocks[i].size;
  pthread_mutex_unlock(&busy);
  if (!ours) return real(handle, address);
  fputs("gpuckpt: this kernel's GPU memory can be parked, and so not be shared with other processes. To share it, "
        "start the kernel with GPUCKPT_PARKING=off.\n", stderr);
  return NOT_SUPPORTED;
}

/* -- the kernel's end of a save and a restore */

static int in, out;

static void say(const char *text, long a, long b) {
  char line[128];
  int length = snprintf(line, sizeof line, text, a, b);
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

static int send_item(int to, item i, int fd) {
  char space[CMSG_SPACE(sizeof fd)] = {0};
  struct iovec data = {&i, sizeof i};
  struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
  if (fd >= 0) {
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  ssize_t sent;
  while ((sent = sendmsg(to, &message, MSG_NOSIGNAL)) < 0 && errno == EINTR) {}
  return sent == (ssize_t)sizeof i ? 0 : -1;
}

static int heard_from(int holder) {
  char byte;
  ssize_t got;
  while ((got = recv(holder, &byte, 1, 0)) < 0 && errno == EINTR) {}
  return got == 1;
}

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
  close(pair[1]);
}

static int export_part(int to, const block *b, size_t part) {
  int fd = -1;
  int result = cu.ExportToShareableHandle(&fd, b->handles[part], POSIX_FD, (uint64_t)0);
  if (result) return result;
  item i = {b->offset + part * PART, part_size(b, part)};
  result = send_item(to, i, fd);
  close(fd);
  return result;
}

/* Hand all blocks to the holder, and keep nothing but their addresses. Nothing is changed where it fails. */
static int hand_over(int holder) {
  int result = cu.CtxSynchronize();
  uint64_t offset = 0;
  for (size_t i = 0; !result && i < count; i++) {
    blocks[i].offset = offset;
    offset += blocks[i].size;
    for (size_t part = 0; !result && part < parts_of(&blocks[i]); part++)
      result = export_part(holder, &blocks[i], part);
  }
  item end = {offset, 0};
  if (!result && (send_item(holder, end, -1) || !heard_from(holder))) result = -1;
  for (size_t i = 0; !result && i < count; i++) take_memory(&blocks[i]);
  return result;
}

/* Get new memory for every block, part by part as the holder asks for it, and have the holder fill it. It asks for the
 * next when it has filled the one before. */
static int have_filled(void) {
  int pair[2], result = 0;
  if (open_pair(pair)) return -1;
  say("socket %ld\n", pair[1], 0);
  for (size_t i = 0; !result && i < count; i++) {
    block *b = &blocks[i];
    for (size_t part = 0; !result && part < parts_of(b); part++) {
      if (!heard_from(pair[0])) result = -1;
      else if (b->had > part || !(result = give_part(b))) result = export_part(pair[0], b, part);
    }
  }
  item end = {0, 0};
  if (!result && (send_item(pair[0], end, -1) || !heard_from(pair[0]))) result = -1;
  close_pair(pair);
  return result;
}

/* Get new memory for every block that lacks some, and fill it from a file: slower, and without anybody's help. */
static int load(const char *path) {
  struct stat status;
  int result = 0, fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  char *bytes = MAP_FAILED;
  if (!fstat(fd, &status)) bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (bytes == MAP_FAILED) return -1;
  for (size_t i = 0; !result && i < count; i++) {
    block *b = &blocks[i];
    if (b->offset + b->size > (uint64_t)status.st_size) result = -1;
    else if (!(result = give_memory(b))) result = cu.HtoD(b->address, bytes + b->offset, b->size);
  }
  munmap(bytes, (size_t)status.st_size);
  return result;
}

/* Give up what was got back so far: where there was no room for all of it. */
static void drop(void) {
  cu.CtxSynchronize();
  for (size_t i = 0; i < count; i++) take_memory(&blocks[i]);
  say("dropped\n", 0, 0);
}

/* Let Python's other threads run: the memory stays parked for long. Their CUDA calls wait, in the driver or for `busy`.
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
    say("error %ld\n", result, 0);
  }
  say("done\n", 0, 0);
  return python;
}

/* Return how many bytes could be parked now. */
PUBLIC uint64_t gpuckpt_parkable(void) {
  uint64_t bytes = 0;
  pthread_mutex_lock(&busy);
  for (size_t i = 0; i < count; i++) bytes += blocks[i].size;
  pthread_mutex_unlock(&busy);
  return bytes;
}

/* Park, wait, and come back: all of it as the keeper says by the FIFO `to`, answering by the FIFO `from`.
 *
 * Said first: "here", this thread's id, and the descriptor that the holder is to take. "park" parks, and anything else
 * ends it. "parked", or "not" and what failed; then `stay_parked`. Called with Python's lock, and returns with it.
 */
PUBLIC void gpuckpt_park(const char *to, const char *from) {
  void *context, *before, *python = NULL;
  char line[16];
  int pair[2] = {-1, -1}, result = -1;
  in = open(to, O_RDWR | O_CLOEXEC);
  out = open(from, O_RDWR | O_CLOEXEC);
  if (in < 0 || out < 0 || open_pair(pair)) goto end;
  say("here %ld %ld\n", syscall(SYS_gettid), pair[1]);
  struct pollfd first = {.fd = in, .events = POLLIN};
  if (poll(&first, 1, FIRST_SECONDS * 1000) != 1) goto end;
  hear(line, sizeof line);
  if (strcmp(line, "park")) {
    say("not %ld\n", -1, 0);
    goto end;
  }
  /* Without blocks there is no driver to call; a paused thread may hold the lock. */
  if (!count || pthread_mutex_trylock(&busy)) {
    say("not %ld\n", -1, 0);
    goto end;
  }
  if (!(result = cu.Retain(&context, 0)) && !(result = cu.CtxPush(context))) {
    result = hand_over(pair[0]);
    close_pair(pair);
    pair[0] = pair[1] = -1;
    if (result) {
      say("not %ld\n", result, 0);
    } else {
      say("parked\n", 0, 0);
      python = stay_parked();
    }
    cu.CtxPop(&before);
  } else {
    say("not %ld\n", result, 0);
  }
  pthread_mutex_unlock(&busy);
end:
  if (pair[0] >= 0) close_pair(pair);
  if (in >= 0) close(in);
  if (out >= 0) close(out);
  have_python(python); /* last: who has it may wait for `busy` */
}
