/* A CUDA driver whose GPU memory is files in memory: for tests of what stands before it, where there is no GPU.
 *
 * Functions that it does not have itself answer with a sum of their arguments, by which a test sees that all came
 * through. What the GPU has free is in a file that all processes share (MADE_UP_GPU).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OUT_OF_MEMORY = 2, UNSUPPORTED_LIMIT = 215, NOT_FOUND = 500 };

/* Threads may call at the same time: what is written down of memory is one's at a time, to the end of a function. */
static pthread_mutex_t turns = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void end_turn(pthread_mutex_t **mutex) { pthread_mutex_unlock(*mutex); }
#define TURN __attribute__((cleanup(end_turn))) pthread_mutex_t *turn_ = (pthread_mutex_lock(&turns), &turns)
static void in_a_child(void) { turns = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP; }

/* What of the GPUs is in use: by inode of the files, since several processes have them. Each has as much. */
static struct { uint64_t size, count; struct { uint64_t inode, size, users, device; } used[8192]; } *gpu;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("MADE_UP_GPU");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  gpu = mmap(0, sizeof *gpu, PROT_READ | PROT_WRITE, fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
  if (fd < 0) gpu->size = 1ull << 40;
  if (fd >= 0) close(fd);
  pthread_atfork(NULL, NULL, in_a_child);
}

/* The GPU of the context that this thread uses; the context of a GPU is its number and one. */
static __thread uint64_t current, before[16];
static __thread int depth;

static uint64_t free_bytes(uint64_t device) {
  uint64_t left = gpu->size;
  for (uint64_t i = 0; i < gpu->count; i++)
    left -= gpu->used[i].users && gpu->used[i].device == device ? gpu->used[i].size : 0;
  return left;
}

/* A process and its holder count at the same time, and each may be killed meanwhile. */
static void use(int fd, int by, uint64_t device) {
  const char *path = getenv("MADE_UP_GPU");
  int turn = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (turn >= 0) flock(turn, LOCK_EX);
  struct stat status;
  fstat(fd, &status);
  uint64_t i = 0;
  while (i < gpu->count && gpu->used[i].inode != status.st_ino) i++;
  if (i == gpu->count) gpu->used[gpu->count++].device = device;
  gpu->used[i].inode = status.st_ino;
  gpu->used[i].size = status.st_size;
  gpu->used[i].users += by;
  if (turn >= 0) close(turn);
}

/* What another process, by its pid, has here: for the driver's calls about processes, and for made_up_nvml.c. */
#include "made_up_state.h"

static int initialized;
static int has_state(void) { return initialized; }
int cuInit(unsigned flags) {
  int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
  if (!initialized && mmap(STATE, sizeof *STATE, PROT_READ | PROT_WRITE, anonymous, -1, 0) == STATE) {
    STATE->magic = MAGIC;
    initialized = 1;
  }
  return 0;
}

enum { NOT_INITIALIZED = 3, ILLEGAL_STATE = 401 };
static int move(int pid, uint64_t from, uint64_t to) {
  struct state its;
  if (!read_state(pid, &its)) return NOT_INITIALIZED;
  if (its.now != from) return ILLEGAL_STATE;
  if (its.peers && to == CHECKPOINTED) return ILLEGAL_STATE; /* the real one notices when it is too late */
  its.now = to;
  return write_state(pid, &its) ? 0 : ILLEGAL_STATE;
}
/* While there is a file of that name beside the GPU's memory, what calls this is under way: there is another one then. */
static void be_under_way(const char *name) {
  char held[4096], reached[4096];
  snprintf(held, sizeof held, "%s.%s", getenv("MADE_UP_GPU"), name);
  snprintf(reached, sizeof reached, "%s.%s.reached", getenv("MADE_UP_GPU"), name);
  if (access(held, F_OK)) return;
  close(open(reached, O_CREAT | O_CLOEXEC, 0600));
  while (!access(held, F_OK)) usleep(1000);
  unlink(reached);
}
int cuMemsetD16_v2(uint64_t to, unsigned short value, size_t count) {
  be_under_way("in-a-call");
  return 0;
}
int cuCheckpointProcessGetState(int pid, int *state) {
  struct state its;
  if (!read_state(pid, &its)) return NOT_INITIALIZED;
  *state = its.now;
  return 0;
}
int cuCheckpointProcessLock(int pid, void *arguments) { return move(pid, RUNNING, LOCKED); }
int cuCheckpointProcessCheckpoint(int pid, void *arguments) {
  be_under_way("checkpoints");
  return move(pid, LOCKED, CHECKPOINTED);
}
int cuCheckpointProcessRestore(int pid, void *arguments) {
  be_under_way("restores");
  return move(pid, CHECKPOINTED, LOCKED);
}
int cuCheckpointProcessUnlock(int pid, void *arguments) { return move(pid, LOCKED, RUNNING); }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = atoi(getenv("MADE_UP_GPUS") ?: "1"); return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0xab + device, 16); return 0; }
int cuDeviceGetUuid(char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 16 ? 132 : attribute == 39 ? 2048 : 0; /* the processors of an H100, and the threads of each */
  return 0;
}
int cuDevicePrimaryCtxRetain(uint64_t *context, int device) { *context = device + 1; return 0; }
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = !getenv("MADE_UP_APART"); return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *active = 1; return 0; }
/* Which GPUs have access to small memory of others: the driver's own peer access. */
static int has_access[16][16];
int made_up_peer(int gpu, int other) { return has_access[gpu][other]; }
static void switch_access(uint64_t context, int on) {
  has_access[current][context - 1] = on;
  if (has_state()) STATE->peers += on ? 1 : -1;
}
int cuCtxEnablePeerAccess(uint64_t context, unsigned flags) {
  return has_access[current][context - 1] ? 704 : (switch_access(context, 1), 0);
}
int cuCtxDisablePeerAccess(uint64_t context) {
  return has_access[current][context - 1] ? (switch_access(context, 0), 0) : 705;
}
int cuCtxGetCurrent(uint64_t *context) { *context = current + 1; return 0; }
int cuCtxSetCurrent(uint64_t context) { current = context ? context - 1 : 0; return 0; }
int cuCtxGetDevice(int *device) { *device = current; return 0; }
int cuCtxCreate_v2(uint64_t *context, unsigned flags, int device) { return cuDevicePrimaryCtxRetain(context, device); }
int cuCtxCreate_v3(uint64_t *context, void *a, int b, unsigned c, int device) { return cuCtxCreate_v2(context, 0, device); }
int cuCtxCreate_v4(uint64_t *context, void *a, unsigned b, int device) { return cuCtxCreate_v2(context, 0, device); }
int cuCtxPushCurrent_v2(uint64_t context) { before[depth++] = current; current = context - 1; return 0; }
int cuCtxPopCurrent_v2(uint64_t *context) { *context = current + 1; current = before[--depth]; return 0; }
int cuMemGetAllocationGranularity(size_t *size, void *prop, int option) { *size = 2 << 20; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = free_bytes(current); *total = gpu->size; return 0; }

int cuMemCreate(uint64_t *handle, size_t size, const int *prop, uint64_t flags) {
  TURN;
  uint64_t device = prop ? prop[3] : current;
  if (size > free_bytes(device)) return OUT_OF_MEMORY;
  char full[4096];
  snprintf(full, sizeof full, "%s.full", getenv("MADE_UP_GPU"));
  if (!unlink(full)) return OUT_OF_MEMORY; /* once: another had it for a moment */
  int fd = memfd_create("gpu", MFD_CLOEXEC);
  if (ftruncate(fd, size)) return OUT_OF_MEMORY;
  char used[4096];
  snprintf(used, sizeof used, "%s.used", getenv("MADE_UP_GPU"));
  if (!access(used, F_OK)) { /* what was another's before */
    void *bytes = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memset(bytes, 'x', size);
    munmap(bytes, size);
  }
  use(fd, 1, device);
  *handle = fd;
  if (has_state()) STATE->bytes[device] += size;
  return 0;
}
int cuMemRelease(uint64_t handle) {
  be_under_way("releases");
  TURN;
  struct stat status;
  fstat(handle, &status);
  for (uint64_t i = 0; has_state() && i < gpu->count; i++)
    if (gpu->used[i].inode == status.st_ino) STATE->bytes[gpu->used[i].device] -= status.st_size;
  use(handle, -1, 0);
  return close(handle);
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, uint64_t flags) {
  *address = (uint64_t)mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return 0;
}
/* What is mapped, each by one call. */
static struct { uint64_t address, size; } maps[16384];
static int map_count;
int made_up_maps(void) { return map_count; }
static int is_mapped(int i, uint64_t address, size_t size) {
  return maps[i].address < address + size && address < maps[i].address + maps[i].size;
}
static int is_inside(int i, uint64_t address, size_t size) {
  return maps[i].address >= address && maps[i].address + maps[i].size <= address + size;
}
int cuMemAddressFree(uint64_t address, size_t size) {
  TURN;
  for (int i = 0; i < map_count; i++)
    if (is_mapped(i, address, size)) return 1;
  return munmap((void *)address, size);
}
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  TURN;
  for (int i = 0; i < map_count; i++)
    if (is_mapped(i, address, size)) return 1;
  maps[map_count].address = address;
  maps[map_count++].size = size;
  return mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, 0) == MAP_FAILED;
}
/* Which GPUs, by their bits, may access addresses; what was said last holds. */
static struct { uint64_t address, size, gpus; } accesses[65536];
static int access_count;
uint64_t made_up_access(uint64_t address) {
  TURN;
  for (int i = access_count; i--;)
    if (address >= accesses[i].address && address < accesses[i].address + accesses[i].size) return accesses[i].gpus;
  return 0;
}
static void give_access(uint64_t address, size_t size, uint64_t gpus) {
  accesses[access_count].address = address;
  accesses[access_count].size = size;
  accesses[access_count++].gpus = gpus;
}
/* Work that has begun and may be under way yet: the real GPU faults where its memory is unmapped meanwhile. */
static struct { uint64_t address, size; } under_way[64];
static int begun;
static void begin_work(uint64_t address, size_t size) {
  TURN;
  under_way[begun % 64].address = address;
  under_way[begun++ % 64].size = size;
}
static void end_work(void) {
  TURN;
  begun = 0;
}
static int is_under_way(uint64_t address, size_t size) {
  for (int i = 0; i < begun && i < 64; i++)
    if (under_way[i].address < address + size && address < under_way[i].address + under_way[i].size) return 1;
  return 0;
}
/* What was mapped by one call is unmapped by one. */
int cuMemUnmap(uint64_t address, size_t size) {
  TURN;
  int found = 0;
  if (is_under_way(address, size)) abort();
  for (int i = 0; i < map_count; i++)
    if (is_mapped(i, address, size)) {
      if (!is_inside(i, address, size)) return 1;
      found = 1;
    }
  if (!found) return 1;
  for (int i = map_count; i--;)
    if (is_inside(i, address, size)) maps[i] = maps[--map_count];
  give_access(address, size, 0);
  return mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) ==
         MAP_FAILED;
}
int cuMemSetAccess(uint64_t address, size_t size, const int *access, size_t count) {
  TURN;
  uint64_t gpus = made_up_access(address);
  for (size_t i = 0; access && i < count; i++) {
    gpus &= ~(1ull << access[3 * i + 1]);
    if (access[3 * i + 2]) gpus |= 1ull << access[3 * i + 1];
  }
  give_access(address, size, gpus);
  return mprotect((void *)address, size, PROT_READ | PROT_WRITE);
}
int cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, uint64_t flags) {
  *fd = fcntl(handle, F_DUPFD_CLOEXEC, 0);
  return 0;
}
static int imports;
int made_up_imports(void) { return imports; } /* how often something was opened in this process */
int cuMemImportFromShareableHandle(uint64_t *handle, void *fd, int type) {
  TURN;
  imports++;
  char no[4096];
  snprintf(no, sizeof no, "%s.fails", getenv("MADE_UP_GPU"));
  if (!access(no, F_OK)) return 999;
  *handle = fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 0);
  struct stat status;
  fstat(*handle, &status);
  if (has_state()) STATE->bytes[current] += status.st_size;
  use(*handle, 1, 0);
  return 0;
}
int cuMemGetAllocationPropertiesFromHandle(void *prop, uint64_t handle) { return 1; }
int cuMemRetainAllocationHandle(uint64_t *handle, void *address) { return 1; }

/* Ordinary memory: as above, in one call. */
static struct { uint64_t address, size, handle; } plain[4096];
int cuMemAlloc_v2(uint64_t *address, size_t size) {
  TURN;
  int i = 0, result;
  while (plain[i].address) i++;
  if ((result = cuMemCreate(&plain[i].handle, plain[i].size = size, 0, 0))) return result;
  cuMemAddressReserve(address, size, 0, 0, 0);
  cuMemMap(plain[i].address = *address, size, 0, plain[i].handle, 0);
  return cuMemSetAccess(*address, size, 0, 1);
}
static struct { uint64_t address, room; } all_managed[256];
int cuMemFree_v2(uint64_t address) {
  TURN;
  for (int i = 0; i < 256; i++)
    if (all_managed[i].address == address) {
      all_managed[i].address = 0;
      return munmap((void *)address, all_managed[i].room);
    }
  for (int i = 0; i < 4096; i++)
    if (plain[i].address == address) {
      plain[i].address = 0;
      cuMemUnmap(address, plain[i].size);
      cuMemRelease(plain[i].handle);
      return cuMemAddressFree(address, plain[i].size);
    }
  return 1;
}
/* Managed memory: where the real one has it, at the first multiple of 32 MiB of what Linux gives. */
int cuMemAllocManaged(uint64_t *address, size_t size, unsigned flags) {
  TURN;
  uint64_t stretch = 32 << 20, room = (size + stretch - 1) / stretch * stretch, asked = room + stretch - 4096;
  uint64_t from = (uint64_t)mmap(NULL, asked, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uint64_t at = (from + stretch - 1) / stretch * stretch;
  if (getenv("MADE_UP_ELSEWHERE") && !access(getenv("MADE_UP_ELSEWHERE"), F_OK)) at = from; /* a driver of another mind */
  else {
    munmap((void *)from, at - from);
    if (at + room < from + asked) munmap((void *)(at + room), from + asked - at - room);
  }
  if (mmap((void *)at, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != (void *)at) return 2;
  int i = 0;
  while (all_managed[i].address) i++;
  all_managed[i].address = *address = at;
  all_managed[i].room = room;
  return 0;
}
int made_up_managed(void) {
  TURN;
  int count = 0;
  for (int i = 0; i < 256; i++) count += all_managed[i].address != 0;
  return count;
}
int cuMemAllocPitch_v2(uint64_t *address, size_t *pitch, size_t width, size_t height, unsigned element) { return 7; }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
  TURN;
  for (int i = 0; i < 4096; i++)
    if (plain[i].address == address) return 8;
  for (int i = 0; i < map_count; i++)
    if (is_mapped(i, address, 1)) {
      if (base) *base = maps[i].address;
      if (size) *size = maps[i].size;
      return 0;
    }
  return 8;
}
int cuIpcGetMemHandle(void *handle, uint64_t address) { return 9; }
typedef struct { char bytes[64]; } ipc_handle;
int cuIpcOpenMemHandle(uint64_t *address, ipc_handle handle, unsigned flags) { return 11; }
int cuIpcOpenMemHandle_v2(uint64_t *address, ipc_handle handle, unsigned flags) { return 12; }
int cuIpcCloseMemHandle(uint64_t address) { return 13; }
int cuMulticastBindAddr(uint64_t a, size_t b, uint64_t c, size_t d, uint64_t e) { return a != 1; }
int cuMulticastBindMem(uint64_t a, size_t b, uint64_t c, size_t d, size_t e, uint64_t f) { return 10; }

unsigned made_up_host_flags; /* with which pinned memory was asked for last */
int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
  made_up_host_flags = flags;
  *address = malloc(size);
  return 0;
}
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) { return 0; }
int cuMemHostUnregister(void *address) { return 0; }
/* The real one ends a process that calls it while it is checkpointed: by SIGSEGV, and not with every call. */
static void is_there(void) {
  if (has_state() && STATE->now == CHECKPOINTED) abort();
}
/* Where there is a file of that name beside the GPU's memory, the next copy has a wrong byte. */
static void tear(uint64_t copied, const char *name) {
  char torn[4096];
  snprintf(torn, sizeof torn, "%s.%s", getenv("MADE_UP_GPU"), name);
  if (!unlink(torn)) *(char *)copied ^= 1;
}
static int copy_in(uint64_t to, const void *from, size_t size) {
  is_there();
  end_work();
  memcpy((void *)to, from, size);
  return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
  int result = copy_in(to, from, size);
  if (size > 2 << 20) tear(to, "torn-in");
  return result;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *s) { return cuMemcpyHtoD_v2(to, from, size); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
  is_there();
  end_work();
  memcpy(to, (void *)from, size);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *s) { return cuMemcpyDtoH_v2(to, from, size); }
/* What is copied may be written to meanwhile. */
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *s) {
  int result = copy_in(to, (void *)from, size);
  begin_work(to, size);
  begin_work(from, size);
  tear(to, "torn");
  return result;
}
/* The host does not wait for it. */
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t size) {
  memset((void *)to, value, size);
  begin_work(to, size);
  return 0;
}

/* The one function that is ever launched, as plain C. */
void hash_chunks(const void *first, void *hashes, int count);
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
int cuLaunchKernel(void *f, unsigned count, unsigned gy, unsigned gz, unsigned x, unsigned y, unsigned z, unsigned shared,
                   void *stream, void **arguments, void **extra) {
  hash_chunks(*(void **)arguments[0], *(void **)arguments[1], count);
  return 0;
}

/* Streams: work that is begun in one is done when the test says so, or somebody waits for it. */
enum { STREAMS = 64, NOT_READY = 600 };
static struct stream { uint64_t begun, done, waited[STREAMS]; int device, capturing, destroyed; } streams[STREAMS];
static int stream_count = 8; /* the first ones are the GPUs' default streams */
static struct stream *stream(void *handle) {
  static __thread int own;
  if (handle == (void *)2 && !own) own = stream_count++;
  return handle == (void *)2 ? &streams[own] : (uintptr_t)handle < 2 ? &streams[current] : handle;
}
/* A stream's work is done only when that is which it waited for. */
static int reach(struct stream *s, uint64_t done) {
  if (s->done >= done) return 0;
  s->done = done;
  for (int i = 0; i < stream_count; i++) reach(&streams[i], s->waited[i]);
  return 0;
}
int cuStreamCreate(struct stream **made, unsigned flags) {
  *made = &streams[stream_count++];
  (*made)->device = current;
  return 0;
}
int cuStreamDestroy_v2(struct stream *s) { return s->destroyed++ ? 400 : 0; }
int cuStreamGetId(void *s, uint64_t *id) { return *id = stream(s) - streams + 1, 0; }
int cuStreamGetCtx(void *s, void **context) {
  return *context = (void *)(intptr_t)((uintptr_t)s <= 2 ? current + 1 : ((struct stream *)s)->device + 1), 0;
}
int cuStreamGetGreenCtx(void *s, void **context) { return *context = NULL, 0; }
int cuStreamIsCapturing(void *s, int *status) { return *status = stream(s)->capturing, 0; }
int cuStreamQuery(void *s) {
  if (stream(s)->destroyed) abort();
  return stream(s)->done < stream(s)->begun ? NOT_READY : 0;
}
int cuStreamSynchronize(void *s) { return reach(stream(s), stream(s)->begun); }
int cuStreamSynchronize_ptsz(void *s) { return cuStreamSynchronize(s ? s : (void *)2); }
struct event { struct stream *in; uint64_t at, waited[STREAMS]; };
int cuEventCreate(struct event **made, unsigned flags) { return *made = calloc(1, sizeof **made), 0; }
int cuEventDestroy_v2(struct event *e) { return free(e), 0; }
int cuEventRecord(struct event *e, void *s) {
  if (stream(s)->destroyed || stream(s)->capturing) abort();
  *e = (struct event){stream(s), stream(s)->begun};
  memcpy(e->waited, stream(s)->waited, sizeof e->waited);
  e->waited[e->in - streams] = e->at;
  return 0;
}
int cuEventQuery(const struct event *e) { return e->in->done < e->at ? NOT_READY : 0; }
int cuEventSynchronize(const struct event *e) { return reach(e->in, e->at); }
int cuStreamWaitEvent(void *s, const struct event *e, unsigned flags) {
  for (int i = 0; i < stream_count; i++)
    if (&streams[i] != stream(s) && stream(s)->waited[i] < e->waited[i]) stream(s)->waited[i] = e->waited[i];
  stream(s)->begun += e->in->done < e->at; /* to wait is work, too */
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
static int waits[16];
int made_up_waits(int gpu) { return waits[gpu]; } /* how often it was waited for */
int cuCtxSynchronize(void) {
  waits[current]++;
  if (getenv("GPUCKPT_RUN_DIR")) be_under_way("computes"); /* what was saved is at work, not who helps with it */
  end_work();
  for (int i = 0; i < stream_count; i++) reach(&streams[i], streams[i].begun);
  return 0;
}
/* What a context has for the stacks of its threads. */
static size_t stack_sizes[16];
int cuCtxGetLimit(size_t *size, int limit) {
  if (limit) return UNSUPPORTED_LIMIT;
  *size = stack_sizes[current] ? stack_sizes[current] : 1024;
  return 0;
}
int cuCtxSetLimit(int limit, size_t size) {
  if (limit) return UNSUPPORTED_LIMIT;
  if (size * 1024 > free_bytes(current)) return OUT_OF_MEMORY; /* for so many threads */
  stack_sizes[current] = size;
  return 0;
}
int cuCtxSynchronize_v2(void *context) { return cuCtxSynchronize(); }
int cuCtxDestroy_v2(void *context) { return 0; }
int cuDevicePrimaryCtxReset_v2(int device) { return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
/* What the tests ask: each memset in a stream is work. */
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void *s) { return stream(s)->begun++, 0; }
int cuStreamGetPriority(void *s, uint64_t *begun_and_done) { return memcpy(begun_and_done, stream(s), 16), 0; }
int cuStreamGetFlags(void *s, uint64_t *waited) { return memcpy(waited, stream(s)->waited, sizeof stream(s)->waited), 0; }
int cuStreamGetAttribute(void *s, int done, void *value) { return reach(stream(s), done); }
int cuStreamBeginCapture_v2(void *s, int mode) { return stream(s)->capturing = 1, 0; }
int cuStreamEndCapture(void *s, void **graph) { return stream(s)->capturing = 0; }

/* Pools, of which the library asks no more than their settings. */
static struct pool { uint64_t threshold; } default_pools[8], *chosen_pools[8];
int cuDeviceTotalMem_v2(size_t *size, int device) { return *size = gpu->size < 1ull << 36 ? gpu->size : 1ull << 36, 0; }
int cuDeviceGetDefaultMemPool(struct pool **pool, int device) { return *pool = &default_pools[device], 0; }
int cuDeviceGetMemPool(struct pool **pool, int device) {
  return *pool = chosen_pools[device] ?: &default_pools[device], 0;
}
int cuDeviceSetMemPool(int device, struct pool *pool) { return chosen_pools[device] = pool, 0; }
int cuMemPoolCreate(struct pool **pool, const void *props) { return *pool = calloc(1, sizeof **pool), 0; }
int cuMemPoolDestroy(struct pool *pool) {
  for (int i = 0; i < 8; i++)
    if (chosen_pools[i] == pool) chosen_pools[i] = NULL;
  return pool >= default_pools && pool < default_pools + 8;
}
int cuMemPoolTrimTo(struct pool *pool, size_t keep) { return 0; }
int cuMemPoolSetAccess(struct pool *pool, const void *access, size_t count) { return 0; }
int cuMemPoolSetAttribute(struct pool *pool, int attribute, uint64_t *value) {
  if (attribute == 4) pool->threshold = *value;
  return 0;
}
int cuMemPoolGetAttribute(struct pool *pool, int attribute, uint64_t *value) {
  *value = attribute == 4 ? pool->threshold : 0;
  return 0;
}
int cuMemAllocAsync(uint64_t *address, size_t size, void *s) { return size > free_bytes(current) ? OUT_OF_MEMORY : 11; }
int cuMemAllocFromPoolAsync(uint64_t *address, size_t size, void *pool, void *s) {
  return size > free_bytes(current) ? OUT_OF_MEMORY : 12;
}
int cuMemFreeAsync(uint64_t address, void *s) { return 13; }
int cuMemAllocAsync_ptsz(uint64_t *address, size_t size, void *s) { return 1101; }
int cuMemAllocFromPoolAsync_ptsz(uint64_t *address, size_t size, void *pool, void *s) { return 1201; }
int cuMemFreeAsync_ptsz(uint64_t address, void *s) { return 1301; }
int cuPointerGetAttribute(uint64_t *data, int attribute, uint64_t address) { return *data = 14, 0; }
int cuPointerGetAttributes(unsigned count, int *attributes, uint64_t **data, uint64_t address) {
  for (unsigned i = 0; i < count; i++) *data[i] = 15;
  return 0;
}

static int newer(void) { return 4711; }

/* int cuProfilerStop(void): by which way the call came, as r11 tells. */
__asm__(".text\n.globl cuProfilerStop\n.type cuProfilerStop, @function\ncuProfilerStop: movq %r11, %rax\n  ret\n");

/* By name alone, the second version first; what it does not know is asked for under another name. */
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status) {
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  static void *self;
  if (!self) {
    Dl_info here;
    dladdr((void *)cuInit, &here);
    self = dlopen(here.dli_fname, RTLD_NOLOAD | RTLD_NOW);
  }
  if (!strcmp(name, "cuOfALaterDriver")) return *found = (void *)newer, 0;
  if (!(*found = dlsym(self, second))) *found = dlsym(self, name);
  return *found ? 0 : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
/* The others, which the test writes (REST): each adds its number to its arguments, weighted by their places. */
#define SUM(name, number)                                                                          \
  int name(long a, long b, long c, long d, long e, long f, long g, long h, long i, long k) {       \
    return 100000 * number + a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * k; \
  }
#include REST
