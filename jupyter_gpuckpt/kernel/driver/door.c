/* A library in the driver's place: every call of it in this process passes here.
 *
 * Its SONAME is libcuda.so.1, and it is loaded first: by the agent in a kernel, by LD_PRELOAD elsewhere. So it is what
 * each later dlopen("libcuda.so.1") finds: the CUDA runtime's, torch's, JAX's, CuPy's, Triton's programs'. It exports
 * the driver's functions; each goes on to the driver at once, by a jump through a table. The driver itself is loaded at
 * the first call: a process without CUDA has none, and nothing is looked at in it.
 *
 * Two things are done on the way. Some functions are its own (memory.c): memory is made so that it can be parked. And
 * there is a gate: the driver (580) holds back most calls of a checkpointed process, and not all. Some end it by SIGSEGV
 * (cuCtxSynchronize, the queries of streams and events), some fail, and parked memory it does not know. So they wait
 * here first, but for those that it answers from the process's own memory. Without a save the table leads past the gate,
 * and it costs nothing.
 */
#define _GNU_SOURCE
#include "channel.h"
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if !defined(__x86_64__)
#error "written for x86-64"
#endif

#define NUMBERED_(name, number) \
  __asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n  movl $" #number ", %r11d\n  jmp *table+8*" \
          #number "(%rip)\n.size " #name ", . - " #name "\n");
#define NUMBERED(name, number) NUMBERED_(name, number)
#define X(name) NUMBERED(name, __COUNTER__)
#include "functions.h"
#undef X

#define X(name) #name,
static const char *const names[] = {
#include "functions.h"
};
#undef X
enum { COUNT = sizeof names / sizeof *names };

#define X(name) extern const char door_##name[] __asm__(#name);
#include "functions.h"
#undef X
#define X(name) door_##name,
static const char *const doors[COUNT] = {
#include "functions.h"
};
#undef X

/* What the driver answers without a GPU (measured: docs/internals/cuda.md). torch asks much of this with Python's lock
 * held, as for each view of a tensor: if it waited, nothing of the kernel could say why. */
static const char *const unwaited[] = {
    "cuCtxGetApiVersion", "cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxGetDevice_v2", "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2", "cuCtxSetCurrent", "cuDeviceCanAccessPeer", "cuDeviceGet", "cuDeviceGetCount",
    "cuDeviceGetUuid_v2", "cuDevicePrimaryCtxGetState", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString",
    "cuGetProcAddress_v2", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode",
};
static char waits[COUNT];

/* Where the doors lead now; where they lead while no call waits; the driver's functions. */
__attribute__((visibility("hidden"), used)) void *table[COUNT];
static void *open_way[COUNT], *real[COUNT];
struct driver cu;

/* The long way: with the caller's arguments kept, asks `passed` where the call goes. r11 has its number. */
__asm__(
    ".text\n.type long_way, @function\nlong_way:\n"
    "  push %rdi\n  push %rsi\n  push %rdx\n  push %rcx\n  push %r8\n  push %r9\n  push %rax\n  sub $128, %rsp\n"
    "  movups %xmm0, (%rsp)\n  movups %xmm1, 16(%rsp)\n  movups %xmm2, 32(%rsp)\n  movups %xmm3, 48(%rsp)\n"
    "  movups %xmm4, 64(%rsp)\n  movups %xmm5, 80(%rsp)\n  movups %xmm6, 96(%rsp)\n  movups %xmm7, 112(%rsp)\n"
    "  movl %r11d, %edi\n  call passed\n  movq %rax, %r11\n"
    "  movups (%rsp), %xmm0\n  movups 16(%rsp), %xmm1\n  movups 32(%rsp), %xmm2\n  movups 48(%rsp), %xmm3\n"
    "  movups 64(%rsp), %xmm4\n  movups 80(%rsp), %xmm5\n  movups 96(%rsp), %xmm6\n  movups 112(%rsp), %xmm7\n"
    "  add $128, %rsp\n  pop %rax\n  pop %r9\n  pop %r8\n  pop %rcx\n  pop %rdx\n  pop %rsi\n  pop %rdi\n  jmp *%r11\n"
    ".size long_way, . - long_way\n");
extern const char long_way[] __attribute__((visibility("hidden")));

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int is_open; /* 1: the driver is loaded; -1: it cannot be */
static _Atomic int watched; /* a save may be under way: the gate has to be looked at, for the agent or the keeper */
static char gate[PATH_MAX]; /* the file that stands there while the driver has this process's GPU state */
enum { FOR_AGENT = 1, FOR_KEEPER = 2 };
static _Atomic int waiting; /* threads that wait at the gate */

static int no_device(void) { return NO_DEVICE; }
static int not_there(void) { return NOT_SUPPORTED; } /* an older driver without this function */

static void lead(int past_the_gate) {
  for (size_t i = 0; i < COUNT; i++)
    __atomic_store_n(&table[i], past_the_gate ? open_way[i] : (void *)long_way, __ATOMIC_RELEASE);
}

/* A forked child has none of its parent's threads. One of them may have had a lock, as that has which parks, for hours:
 * nobody would give it back here. */
static void begin_in_child(void) {
  pthread_mutex_init(&opening, NULL);
  waiting = 0;
  renew_memory_lock();
  renew_pools_lock();
  renew_imports_lock();
  forget_waiting();
}

__attribute__((constructor)) static void begin(void) {
  lead(0);
  pthread_atfork(NULL, NULL, begin_in_child);
}

static fn function(const char *name) {
  for (size_t i = 0; i < COUNT; i++)
    if (!strcmp(names[i], name)) return (fn)real[i];
  return NULL;
}

static int load(void) {
  char path[PATH_MAX];
  void *library = find_driver(path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  for (size_t i = 0; library && i < COUNT; i++) real[i] = dlsym(library, names[i]);
  for (size_t i = 0; i < COUNT; i++) open_way[i] = library ? (real[i] ? real[i] : (void *)not_there) : (void *)no_device;
  if (!library) return -1;
  memset(waits, 1, sizeof waits);
  for (size_t i = 0; i < COUNT; i++)
    for (size_t k = 0; k < sizeof unwaited / sizeof *unwaited; k++)
      if (!strcmp(names[i], unwaited[k])) waits[i] = 0;
  const struct { fn *to; const char *name; } used[] = {
      {&cu.Create, "cuMemCreate"}, {&cu.Release, "cuMemRelease"}, {&cu.Map, "cuMemMap"}, {&cu.Unmap, "cuMemUnmap"},
      {&cu.AddressReserve, "cuMemAddressReserve"}, {&cu.AddressFree, "cuMemAddressFree"},
      {&cu.SetAccess, "cuMemSetAccess"}, {&cu.Export, "cuMemExportToShareableHandle"},
      {&cu.Granularity, "cuMemGetAllocationGranularity"}, {&cu.Retain, "cuMemRetainAllocationHandle"},
      {&cu.Properties, "cuMemGetAllocationPropertiesFromHandle"}, {&cu.BindMem, "cuMulticastBindMem"},
      {&cu.CtxGetCurrent, "cuCtxGetCurrent"}, {&cu.CtxGetDevice, "cuCtxGetDevice"},
      {&cu.CtxSynchronize, "cuCtxSynchronize"}, {&cu.CtxPush, "cuCtxPushCurrent_v2"},
      {&cu.CtxPop, "cuCtxPopCurrent_v2"}, {&cu.PrimaryRetain, "cuDevicePrimaryCtxRetain"},
      {&cu.PrimaryRelease, "cuDevicePrimaryCtxRelease_v2"},
      {&cu.DeviceCount, "cuDeviceGetCount"}, {&cu.DeviceUuid, "cuDeviceGetUuid_v2"}, {&cu.DeviceAttribute, "cuDeviceGetAttribute"},
      {&cu.CanAccessPeer, "cuDeviceCanAccessPeer"}, {&cu.EnablePeerAccess, "cuCtxEnablePeerAccess"},
      {&cu.DisablePeerAccess, "cuCtxDisablePeerAccess"},
      {&cu.PrimaryState, "cuDevicePrimaryCtxGetState"}, {&cu.HtoD, "cuMemcpyHtoD_v2"}, {&cu.HostAlloc, "cuMemHostAlloc"},
      {&cu.DtoDAsync, "cuMemcpyDtoDAsync_v2"},
      {&cu.MemsetD8, "cuMemsetD8_v2"}, {&cu.Alloc, "cuMemAlloc_v2"}, {&cu.AllocPitch, "cuMemAllocPitch_v2"},
      {&cu.CtxCreate, "cuCtxCreate_v2"}, {&cu.CtxCreate3, "cuCtxCreate_v3"}, {&cu.CtxCreate4, "cuCtxCreate_v4"},
      {&cu.CtxGetLimit, "cuCtxGetLimit"}, {&cu.CtxSetLimit, "cuCtxSetLimit"},
      {&cu.Free, "cuMemFree_v2"}, {&cu.AddressRange, "cuMemGetAddressRange_v2"},
      {&cu.IpcGetMemHandle, "cuIpcGetMemHandle"}, {&cu.IpcOpenMemHandle1, "cuIpcOpenMemHandle"},
      {&cu.IpcOpenMemHandle, "cuIpcOpenMemHandle_v2"}, {&cu.IpcCloseMemHandle, "cuIpcCloseMemHandle"},
      {&cu.Import, "cuMemImportFromShareableHandle"}, {&cu.GetProcAddress, "cuGetProcAddress"},
      {&cu.GetProcAddress2, "cuGetProcAddress_v2"},
      {&cu.AllocAsync, "cuMemAllocAsync"}, {&cu.AllocFromPoolAsync, "cuMemAllocFromPoolAsync"},
      {&cu.FreeAsync, "cuMemFreeAsync"}, {&cu.StreamIsCapturing, "cuStreamIsCapturing"},
      {&cu.StreamGetId, "cuStreamGetId"}, {&cu.StreamGetCtx, "cuStreamGetCtx"},
      {&cu.StreamGetGreenCtx, "cuStreamGetGreenCtx"}, {&cu.StreamQuery, "cuStreamQuery"},
      {&cu.StreamSynchronize, "cuStreamSynchronize"}, {&cu.StreamWaitEvent, "cuStreamWaitEvent"},
      {&cu.StreamDestroy, "cuStreamDestroy_v2"}, {&cu.EventCreate, "cuEventCreate"},
      {&cu.EventDestroy, "cuEventDestroy_v2"}, {&cu.EventRecord, "cuEventRecord"}, {&cu.EventQuery, "cuEventQuery"},
      {&cu.EventSynchronize, "cuEventSynchronize"}, {&cu.CtxDestroy, "cuCtxDestroy_v2"}, {&cu.PrimaryReset, "cuDevicePrimaryCtxReset_v2"},
      {&cu.ExchangeCaptureMode, "cuThreadExchangeStreamCaptureMode"}, {&cu.DeviceTotalMem, "cuDeviceTotalMem_v2"},
      {&cu.DeviceGetMemPool, "cuDeviceGetMemPool"}, {&cu.DeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool"},
      {&cu.PoolCreate, "cuMemPoolCreate"}, {&cu.PoolDestroy, "cuMemPoolDestroy"}, {&cu.PoolTrimTo, "cuMemPoolTrimTo"},
      {&cu.PoolSetAttribute, "cuMemPoolSetAttribute"}, {&cu.PoolGetAttribute, "cuMemPoolGetAttribute"},
      {&cu.PoolSetAccess, "cuMemPoolSetAccess"}, {&cu.PointerGetAttribute, "cuPointerGetAttribute"},
      {&cu.PointerGetAttributes, "cuPointerGetAttributes"}, {&cu.AllocManaged, "cuMemAllocManaged"},
      {&cu.DtoH, "cuMemcpyDtoH_v2"}, {&cu.HostRegister, "cuMemHostRegister_v2"},
      {&cu.HostUnregister, "cuMemHostUnregister"},
  };
  int all = 1;
  for (size_t i = 0; i < sizeof used / sizeof *used; i++) all &= (*used[i].to = function(used[i].name)) != NULL;
  cu.CtxSynchronize2 = function("cuCtxSynchronize_v2"); /* since 580 */
  cu.BindAddr = function("cuMulticastBindAddr");        /* with cuMulticastBindMem, and not needed */
  const struct { const char *name; void *own; } own[] = {
#define O(name) {#name, (void *)own_##name},
      OWN_FUNCTIONS(O) O(cuGetProcAddress) O(cuGetProcAddress_v2)
#undef O
  };
  if (!is_wanted()) return 1;
  snprintf(gate, sizeof gate, "%s/gpu-away", run_folder());
  /* Of a driver that lacks what parking needs, only the gate is ours. */
  for (size_t i = 0; i < sizeof own / sizeof *own; i++)
    for (size_t k = 0; k < COUNT; k++)
      if (real[k] && !strcmp(names[k], own[i].name) && (all || !strncmp(names[k], "cuGetProc", 9))) open_way[k] = own[i].own;
  return 1;
}

int is_gate_shut(void) { return !access(gate, F_OK); }

/* Looked for once in a tick of the clock (some milliseconds): the keeper waits for two ticks after it has shut it. */
static int is_seen_shut(void) {
  static _Atomic long open_at = -1;
  struct timespec now;
  if (!*gate || clock_gettime(CLOCK_MONOTONIC_COARSE, &now)) return 0;
  long tick = now.tv_sec * 1000000000L + now.tv_nsec;
  if (tick == open_at) return 0;
  int shut = is_gate_shut();
  if (!shut) open_at = tick;
  return shut;
}

void wait_at_gate(void) {
  if (!watched || !is_seen_shut()) return;
  waiting++;
  while (watched && is_seen_shut()) usleep(1000);
  waiting--;
}

int threads_at_gate(void) { return waiting; }

/* Wait at the gate, and return where the call goes. */
__attribute__((used, visibility("hidden"))) void *passed(int number) {
  int before = errno;
  if (!is_open) {
    pthread_mutex_lock(&opening);
    if (!is_open) {
      int result = load();
      is_open = result;
      if (!watched) lead(1);
    }
    pthread_mutex_unlock(&opening);
  }
  if (waits[number]) wait_at_gate();
  errno = before;
  return open_way[number];
}

/* The runtime asks for functions by name and version. What is found is known by where it is: versions need no table. */
static void through_a_door(void **found) {
  for (size_t i = 0; *found && i < COUNT; i++)
    if (real[i] == *found) {
      *found = (void *)doors[i];
      return;
    }
}

int own_cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
  int result = cu.GetProcAddress(name, found, version, flags);
  if (!result && found) through_a_door(found);
  return result;
}

int own_cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status) {
  int result = cu.GetProcAddress2(name, found, version, flags, status);
  if (!result && found) through_a_door(found);
  return result;
}

/* -- for the keeper, whose gate is shut a moment after `watch_gate` and open when all is over */

static int has_been_shut, looks_left;

static void watch(int whose, int on) {
  pthread_mutex_lock(&opening);
  watched = on ? watched | whose : watched & ~whose;
  lead(!watched && is_open);
  pthread_mutex_unlock(&opening);
}

void watch_gate(void) {
  has_been_shut = 0, looks_left = 20;
  watch(FOR_KEEPER, 1);
}

int has_watch(void) {
  if (!(watched & FOR_KEEPER)) return 0;
  int shut = is_gate_shut();
  has_been_shut |= shut;
  if (shut || (!has_been_shut && looks_left-- > 0)) return 1;
  watch(FOR_KEEPER, 0);
  return 0;
}

/* -- for the agent */

/* Tell whether this library is to stay loaded: there is a driver, and nothing speaks against standing before it. */
PUBLIC int gpuckpt_is_wanted(void) {
  char path[PATH_MAX];
  return is_wanted() && find_driver(path);
}

/* Tell whether the driver is loaded. */
PUBLIC int gpuckpt_is_open(void) { return is_open == 1; }

/* Have every call look at the gate from now on, or none. */
PUBLIC void gpuckpt_watch(int on) {
  watch(FOR_AGENT, on || is_gate_shut()); /* where calls wait they go on to */
}
