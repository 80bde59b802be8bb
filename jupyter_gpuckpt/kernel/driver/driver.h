/* What the parts of this library share. The types of cuda.h are spelled out: no CUDA toolkit is needed to build it. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_SUPPORTED = 801 }; /* CUresult */

typedef int (*fn)();

typedef struct { int type, id; } location;
typedef struct {
  int type, handle_types;
  location place;
  void *windows;
  struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} allocation_prop;
typedef struct { location place; int flags; } access_desc;

enum { ON_DEVICE = 1, PINNED = 1, POSIX_FD = 1, READ_WRITE = 3 };

/* -- place.c */

/* Find the driver's own library: write its path, of PATH_MAX bytes, and tell whether there is one. */
int find_driver(char *path);
/* Tell whether a keeper may park this process's memory: nobody has switched it off, and no tool is at work here. */
int is_wanted(void);

/* -- door.c */

/* The driver's own functions, of those that this library calls. */
extern struct driver {
  fn Create, Release, Map, Unmap, AddressReserve, AddressFree, SetAccess, Export, Granularity, Retain, Properties;
  fn BindAddr;
  fn BindMem, CtxGetCurrent, CtxGetDevice, CtxSynchronize, CtxPush, CtxPop, PrimaryRetain, PrimaryRelease;
  fn CtxCreate, CtxCreate3, CtxCreate4, CtxGetLimit, CtxSetLimit;
  fn DeviceCount, DeviceUuid, DeviceAttribute, CanAccessPeer, EnablePeerAccess, DisablePeerAccess, PrimaryState;
  fn HostAlloc, HtoD, DtoDAsync, MemsetD8, Alloc, AllocPitch, Free, AddressRange, IpcGetMemHandle, IpcOpenMemHandle1, IpcOpenMemHandle, IpcCloseMemHandle, Import;
  fn GetProcAddress, GetProcAddress2;
  fn AllocAsync, AllocFromPoolAsync, FreeAsync, StreamIsCapturing, StreamGetId, StreamGetCtx, StreamGetGreenCtx;
  fn StreamQuery, StreamSynchronize, StreamWaitEvent, StreamDestroy, EventCreate, EventDestroy, EventRecord, EventQuery;
  fn EventSynchronize, CtxSynchronize2, CtxDestroy, PrimaryReset, ExchangeCaptureMode, DeviceTotalMem;
  fn DeviceGetMemPool, DeviceGetDefaultMemPool, PoolCreate, PoolDestroy, PoolTrimTo, PoolSetAttribute, PoolGetAttribute;
  fn PoolSetAccess, PointerGetAttribute, PointerGetAttributes, AllocManaged, DtoH, HostRegister, HostUnregister;
} cu;

/* Have every call look at the gate, until it has been shut and opened again, or is not shut for seconds. */
void watch_gate(void);
/* Tell whether they look yet; to be asked from time to time, by which they end to. */
int has_watch(void);

/* Wait while the gate is shut. */
void wait_at_gate(void);
/* How many threads do. */
int threads_at_gate(void);
int is_gate_shut(void);

/* -- parking.c */

void found_by_the_keeper(void);
int is_last_release(int device);

/* -- sharing.c */

void renew_imports_lock(void);
/* Tell how many blocks of others are open here, how often memory was shared by the driver's own handles, and, where it
 * is known, whose the blocks are. */
struct channel;
void say_imports(struct channel *to);
/* Close them, and keep their addresses; and open them again. Both give what failed, and 0 where nothing did. */
int imports_away(void);
int imports_back(void);
/* Send a thread of another process descriptors of the block that it asks for. */
void lend(int thread);

/* -- memory.c */

enum { PART = 1 << 30, PART_OF_SEVERAL = 256 << 20 };
enum { MOST_DEVICES = 16 }; /* GPUs of one process; more are left to the driver */

/* Physical memory, in parts: the GPU need not have room for all of it twice while it changes hands. It has the first
 * `had` of them: all, but while it is parked. */
typedef struct {
  uint64_t size, part, *handles;
  size_t had;
  allocation_prop prop;
  int named, mapped; /* whether the program has its handle; how often it is mapped */
  int shared;        /* the program handed it to others: it stays where it is */
  uint64_t offset;   /* where its bytes are while it is parked */
} memory;

/* Where it is mapped. */
typedef struct {
  uint64_t address, size;
  memory *of;
  int is_block; /* made for cuMemAlloc: the addresses are reserved for it */
  int is_piece; /* made for a pool */
  int accesses, is_apart; /* whether others' access is taken away */
  access_desc access[MOST_DEVICES];
} mapping;

extern memory **memories;
extern size_t memory_count;
extern int are_apart; /* GPUs have no access to each other's memory now */
extern int is_on_host; /* memory of the virtual memory API, or a pool, was made on the host */
extern uint64_t largest_left; /* bytes of the largest allocation that was left to the driver */

void lock_memory(void);
int try_lock_memory(void);
void unlock_memory(void);
void renew_memory_lock(void);
size_t parts_of(const memory *m);
uint64_t part_size(const memory *m, size_t part);
int is_parkable(const memory *m);
/* Find the block that an address is in: where it begins, and its bytes. Tells whether there is one. */
int find_block(uint64_t address, uint64_t *base, uint64_t *size);
int mapped_range(uint64_t address, uint64_t *base, size_t *size);
/* The physical memory of the block at an address; to be asked with the memory's lock. */
const memory *memory_at(uint64_t address);
int device_of(const memory *m);
int join_current(void);
int keep_memory_apart(int apart, int is_parked);
int give_part(memory *m);
uint64_t writable_at(const memory *m, size_t part);
void take_parts(memory *m);
int is_at_work(int device);
int new_piece(uint64_t address, uint64_t size, int device, const access_desc *others, int count);
int is_block(uint64_t address);

/* -- pools.c */

void renew_pools_lock(void);
int is_pooled(uint64_t address);
void free_pooled(uint64_t address);
int pooled_range(uint64_t *address, uint64_t *base, size_t *size, void **of);
int give_back_pooled(void);

/* -- managed.c */

int free_managed(uint64_t address, int *result);
int managed_range(uint64_t address, uint64_t *base, size_t *size);
int has_managed(void);
void forget_managed(int device);
int put_managed_away(void);
void bring_managed_back(void);

/* -- waiting.c */

enum { STILL_AT_WORK = -2 };
/* Wait so long at most; returns 0, a CUresult, or STILL_AT_WORK. For the thread that talks to the keeper, which blocks all
 * signals. */
int wait_for_gpus(int milliseconds);
void forget_waiting(void); /* in a forked child */

/* -- peers.c */

/* With a larger allocation of the driver's there is no access again (docs/internals/cuda.md). */
enum { MOST_LEFT = 448 << 20 };

int keep_gpus_apart(int apart, int is_parked);
void bring_gpus_together(int is_parked); /* and tell of it where that fails */
int was_peer_access_asked_for(void);     /* of the driver's own */

/* -- parking.c; both with the memory's lock */

void memory_changed(void); /* what can be parked is, or will in a moment be, something else */
int wait_for_holder(void); /* until it has closed what it was shown; 0 where there was nothing */

#define OWN_FUNCTIONS(O) \
  O(cuMemAlloc_v2) O(cuMemAllocPitch_v2) O(cuMemFree_v2) O(cuMemGetAddressRange_v2) O(cuIpcGetMemHandle) \
  O(cuIpcOpenMemHandle) O(cuIpcOpenMemHandle_v2) O(cuIpcCloseMemHandle) \
  O(cuMemCreate) O(cuMemRelease) O(cuMemMap) O(cuMemUnmap) O(cuMemSetAccess) O(cuMemExportToShareableHandle) \
  O(cuMemRetainAllocationHandle) O(cuMemGetAllocationPropertiesFromHandle) O(cuMulticastBindMem) O(cuMulticastBindAddr) \
  O(cuCtxEnablePeerAccess) O(cuDevicePrimaryCtxRetain) O(cuCtxCreate_v2) O(cuCtxCreate_v3) O(cuCtxCreate_v4) \
  O(cuMemAllocAsync) O(cuMemAllocAsync_ptsz) O(cuMemAllocFromPoolAsync) O(cuMemAllocFromPoolAsync_ptsz) \
  O(cuMemFreeAsync) O(cuMemFreeAsync_ptsz) O(cuMemPoolCreate) O(cuMemPoolDestroy) O(cuMemPoolTrimTo) \
  O(cuMemPoolSetAttribute) O(cuMemPoolGetAttribute) O(cuMemPoolSetAccess) O(cuPointerGetAttribute) \
  O(cuPointerGetAttributes) O(cuStreamSynchronize) O(cuStreamSynchronize_ptsz) O(cuEventSynchronize) \
  O(cuCtxSynchronize) O(cuCtxSynchronize_v2) O(cuStreamDestroy_v2) O(cuCtxDestroy_v2) \
  O(cuDevicePrimaryCtxReset_v2) O(cuDevicePrimaryCtxRelease_v2) O(cuMemAllocManaged) O(cuMemHostAlloc)
/* `own_NAME` stands in for the driver's NAME. */
#define O(name) int own_##name();
OWN_FUNCTIONS(O)
#undef O
int own_cuGetProcAddress(const char *name, void **found, int version, uint64_t flags);
int own_cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status);
