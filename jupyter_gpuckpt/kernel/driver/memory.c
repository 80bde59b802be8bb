/* GPU memory that can be parked: whatever of it is asked for in pieces of 2 MiB and more.
 *
 * The driver's checkpoint copies what a process has on the GPU through one thread, at 6 to 9 GiB/s. Memory of the
 * virtual memory API (cuMemCreate, cuMemMap) can be taken out of its hands before: another process, the holder, opens
 * the same physical memory, this one lets go of it and keeps only its addresses, and the driver has nothing left to
 * copy (parking.c). So what cuMemAlloc is asked for is made by that API, and what programs make by it themselves (torch's
 * expandable segments in pieces of 20 MiB, JAX three quarters of the GPU in one) is kept account of: after it was
 * parked it is other physical memory, so a program has a handle of ours in place of the driver's.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RDMA_WITH_VMM = 110 }; /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
enum { PITCH = 512 };         /* bytes: rows begin at multiples of it, as cuMemAllocPitch has them */
enum { SMALLEST = 2 << 20 };  /* smaller ones the driver packs together, and copies */
enum { WRITE_COMBINED = 4 };   /* CU_MEMHOSTALLOC_WRITECOMBINED */
enum { OF_NCCL = 16 << 20 };  /* NCCL's own pieces are smaller (10 MiB at most were seen), torch's and JAX's are larger */

memory **memories;
static mapping *mappings;
size_t memory_count;
static size_t mapping_count, memory_room, mapping_room;
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
int are_apart, is_on_host;
uint64_t largest_left;

static int was_cancellable; /* the thread that has the lock: it is not cancelled meanwhile */

void lock_memory(void) {
  int before;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
  pthread_mutex_lock(&busy);
  was_cancellable = before;
}

int try_lock_memory(void) {
  int before;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
  if (!pthread_mutex_trylock(&busy)) return was_cancellable = before, 1;
  pthread_setcancelstate(before, NULL);
  return 0;
}

void unlock_memory(void) {
  int before = was_cancellable;
  pthread_mutex_unlock(&busy);
  pthread_setcancelstate(before, NULL);
}

void renew_memory_lock(void) { pthread_mutex_init(&busy, NULL); }

/* -- what there is */

size_t parts_of(const memory *m) { return (m->size + m->part - 1) / m->part; }

uint64_t part_size(const memory *m, size_t part) {
  uint64_t left = m->size - part * m->part;
  return left < m->part ? left : m->part;
}

int is_parkable(const memory *m) { return !m->shared; }

int device_of(const memory *m) { return m->prop.place.id; }

static int make_room(void **list, size_t count, size_t *room, size_t each) {
  if (count < *room) return 1;
  void *more = realloc(*list, (*room + 256) * each);
  if (!more) return 0;
  *list = more;
  *room += 256;
  return 1;
}

static memory *of_handle(uint64_t handle) {
  for (size_t i = 0; i < memory_count; i++)
    if ((uint64_t)memories[i] == handle) return memories[i];
  return NULL;
}

static mapping *mapping_at(uint64_t address) {
  for (size_t i = 0; i < mapping_count; i++)
    if (address >= mappings[i].address && address < mappings[i].address + mappings[i].size) return &mappings[i];
  return NULL;
}

/* -- physical memory */

/* It is not to be parked any more. */
static void stays(memory *m) {
  if (!m->shared) memory_changed();
  m->shared = 1;
}

static int is_foreign(const mapping *at, const access_desc *access) {
  return access->place.type != ON_DEVICE || access->place.id != device_of(at->of);
}

/* Let GPUs access a stretch of a mapping, as the program wants it: its own alone while they are kept apart. */
static int set_access(mapping *at, uint64_t address, uint64_t size) {
  access_desc now[MOST_DEVICES];
  size_t count = 0;
  for (int i = 0; i < at->accesses; i++)
    if (!are_apart || !is_foreign(at, &at->access[i])) now[count++] = at->access[i];
  at->is_apart = are_apart && count < (size_t)at->accesses;
  return count ? cu.SetAccess(address, size, now, count) : 0;
}

static void note_access(mapping *at, const access_desc *access) {
  for (int i = 0; i < at->accesses; i++)
    if (at->access[i].place.type == access->place.type && at->access[i].place.id == access->place.id) {
      at->access[i].flags = access->flags;
      return;
    }
  if (at->accesses == MOST_DEVICES) {
    stays(at->of); /* it cannot be mapped again as it was */
    return;
  }
  at->access[at->accesses++] = *access;
}

/* Map a part wherever its memory is mapped. */
static int map_part(memory *m, size_t part, uint64_t handle) {
  uint64_t from = part * m->part, to = from + part_size(m, part);
  for (size_t i = 0; i < mapping_count; i++) {
    mapping *at = &mappings[i];
    if (at->of != m || from >= at->size) continue;
    uint64_t address = at->address + from, size = (to < at->size ? to : at->size) - from;
    int result = cu.Map(address, size, (size_t)0, handle, (uint64_t)0);
    if (!result) result = set_access(at, address, size);
    if (result) return result;
  }
  return 0;
}

/* Return where a part's own GPU can write all of it; 0: nowhere. */
uint64_t writable_at(const memory *m, size_t part) {
  uint64_t from = part * m->part, to = from + part_size(m, part);
  for (size_t i = 0; i < mapping_count; i++)
    for (int k = 0; mappings[i].of == m && to <= mappings[i].size && k < mappings[i].accesses; k++)
      if (!is_foreign(&mappings[i], &mappings[i].access[k]) && mappings[i].access[k].flags == READ_WRITE)
        return mappings[i].address + from;
  return 0;
}

static void unmap_part(memory *m, size_t part) {
  uint64_t from = part * m->part, to = from + part_size(m, part);
  for (size_t i = 0; i < mapping_count; i++) {
    mapping *at = &mappings[i];
    if (at->of == m && from < at->size) cu.Unmap(at->address + from, (to < at->size ? to : at->size) - from);
  }
}

/* Give it the physical memory of its next part, mapped where it belongs. */
int give_part(memory *m) {
  uint64_t handle;
  int result = cu.Create(&handle, part_size(m, m->had), &m->prop, (uint64_t)0);
  if (result) return result;
  if ((result = map_part(m, m->had, handle))) {
    unmap_part(m, m->had); /* of what is not mapped it fails, and changes nothing */
    cu.Release(handle);
    return result;
  }
  m->handles[m->had++] = handle;
  return 0;
}

void take_parts(memory *m) {
  while (m->had) {
    m->had--;
    unmap_part(m, m->had);
    cu.Release(m->handles[m->had]);
  }
}

static void forget(memory *m) {
  if (is_parkable(m)) memory_changed(); /* of what is not, the holder has nothing open */
  for (size_t i = 0; i < memory_count; i++)
    if (memories[i] == m) memories[i] = memories[--memory_count];
  free(m->handles);
  free(m);
}

/* Keep account of physical memory that is to be made (`give_all`). */
static memory *new_memory(uint64_t size, uint64_t part, const allocation_prop *prop) {
  found_by_the_keeper();
  if (!make_room((void **)&memories, memory_count, &memory_room, sizeof *memories)) return NULL;
  memory *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  m->size = size;
  m->part = part;
  m->prop = *prop;
  if (!(m->handles = malloc(parts_of(m) * sizeof *m->handles))) return free(m), NULL;
  memory_changed();
  return memories[memory_count++] = m;
}

/* Give it all that it lacks; where that fails, it keeps what it has. What was given up while the holder had it open may
 * not have left the GPU yet. */
static int give_all(memory *m) {
  int result = 0;
  while (!result && m->had < parts_of(m))
    if ((result = give_part(m)) == OUT_OF_MEMORY && wait_for_holder()) result = give_part(m);
  return result;
}

/* Give memory up that nothing refers to any more. */
static void give_up_unused(memory *m) {
  if (m->named || m->mapped) return;
  take_parts(m);
  forget(m);
}

/* -- cuMemAlloc */

static struct {
  allocation_prop prop;
  size_t granularity, total;
  int joined; /* whether it has memory of the program's, and may be copied to and from */
} gpus[MOST_DEVICES];
static int gpu_count; /* 0: not looked yet; -1: left to the driver */

/* Look at the GPUs, and tell whether to make blocks. Where one cannot access another's memory, only the driver can copy
 * from one to the other, and only what it made itself. */
static int look_at_gpus(void) {
  int count, can = 1, rdma;
  if (cu.DeviceCount(&count)) return 0; /* before cuInit */
  gpu_count = -1;
  if (count < 1 || count > MOST_DEVICES) return 0;
  for (int i = 0; i < count; i++) {
    gpus[i].prop = (allocation_prop){.type = PINNED, .handle_types = POSIX_FD, .place = {ON_DEVICE, i}};
    rdma = 0;
    if (!cu.DeviceAttribute(&rdma, RDMA_WITH_VMM, i) && rdma) gpus[i].prop.flags.rdma = 1;
    if (cu.Granularity(&gpus[i].granularity, &gpus[i].prop, 0) || !gpus[i].granularity) return 0;
    if (cu.DeviceTotalMem(&gpus[i].total, i)) return 0;
    for (int k = 0; k < count; k++)
      if (k != i && (cu.CanAccessPeer(&can, i, k) || !can)) return 0;
  }
  gpu_count = count;
  return 1;
}

static int at_work(int device) {
  return (gpu_count > 0 || (!gpu_count && look_at_gpus())) && device >= 0 && device < gpu_count;
}

static uint64_t largest_part(void) { return gpu_count > 1 ? PART_OF_SEVERAL : PART; }

/* Say in parts of how many bytes to make what a program makes itself. What it may export is one part, by which that
 * works, with two exceptions. Of several GPUs, a large piece would have no access again. And a quarter of a GPU and more
 * is a reservation, which nobody hands on (XLA's can be exported): parts of it that are zero leave the GPU early in a
 * save, and memory that was just given up is had again only when the GPU has cleared it (113 GiB: 0.3 s). */
static uint64_t part_of(int device, uint64_t size, int exportable) {
  return exportable && gpu_count == 1 && size < gpus[device].total / 4 ? size : largest_part();
}

/* From now on this GPU uses memory, its own or another's: it and the others that do so may access each other's blocks.
 * A program that copies from one to the other need not have asked for that, so whether it did does not matter. */
static int join(int device) {
  int result = 0;
  if (gpus[device].joined) return 0;
  for (size_t i = 0; !result && i < mapping_count; i++) {
    mapping *at = &mappings[i];
    if (!at->is_block && !at->is_piece) continue;
    note_access(at, &(access_desc){gpus[device].prop.place, READ_WRITE});
    result = set_access(at, at->address, at->size);
  }
  gpus[device].joined = !result;
  return result;
}

int join_current(void) {
  int device, result = 0;
  lock_memory();
  if (!cu.CtxGetDevice(&device) && at_work(device)) result = join(device);
  unlock_memory();
  return result;
}

int is_at_work(int device) {
  lock_memory();
  int does = at_work(device);
  unlock_memory();
  return does;
}

/* Tell whether an address is the beginning of a block that cuMemAlloc gave out. */
int is_block(uint64_t address) {
  lock_memory();
  const mapping *at = mapping_at(address);
  int is = at && at->is_block && at->address == address;
  unlock_memory();
  return is;
}

/* Have new memory at addresses that are reserved; also those GPUs may access it that `others` tells. */
static int map_new(mapping at, int device, const access_desc *others, int count) {
  int result = join(device);
  if (result) return result;
  if (!make_room((void **)&mappings, mapping_count, &mapping_room, sizeof *mappings)) return OUT_OF_MEMORY;
  if (!(at.of = new_memory(at.size, largest_part(), &gpus[device].prop))) return OUT_OF_MEMORY;
  for (int i = 0; i < gpu_count; i++)
    if (gpus[i].joined) note_access(&at, &(access_desc){gpus[i].prop.place, READ_WRITE});
  for (int i = 0; i < count; i++) note_access(&at, &others[i]);
  at.of->mapped = 1;
  mappings[mapping_count++] = at;
  if (!(result = give_all(at.of))) return 0;
  take_parts(at.of);
  mapping_count--;
  forget(at.of);
  return result;
}

static int new_block(uint64_t *address, uint64_t size) {
  int result, device;
  if (cu.CtxGetDevice(&device) || !at_work(device)) return NOT_SUPPORTED;
  size_t granularity = gpus[device].granularity;
  mapping at = {.size = (size + granularity - 1) / granularity * granularity, .is_block = 1};
  if ((result = cu.AddressReserve(&at.address, at.size, (size_t)0, (uint64_t)0, (uint64_t)0))) return result;
  if (!(result = map_new(at, device, NULL, 0))) *address = at.address;
  else cu.AddressFree(at.address, at.size);
  return result;
}

/* Have memory of a GPU's at some of a pool's addresses. */
int new_piece(uint64_t address, uint64_t size, int device, const access_desc *others, int count) {
  mapping at = {.address = address, .size = size, .is_piece = 1};
  lock_memory();
  int result = at_work(device) ? map_new(at, device, others, count) : NOT_SUPPORTED;
  unlock_memory();
  return result;
}

/* Wait for the work of all GPUs that may use a block. */
static int synchronize(void) {
  int result = cu.CtxSynchronize();
  for (int i = 0; gpu_count > 1 && !result && i < gpu_count; i++) {
    void *context;
    unsigned flags;
    int active;
    if (!gpus[i].joined || cu.PrimaryState(i, &flags, &active) || !active) continue;
    if ((result = cu.PrimaryRetain(&context, i))) break;
    if (!(result = cu.CtxPush(context))) {
      result = cu.CtxSynchronize();
      cu.CtxPop(&context);
    }
    cu.PrimaryRelease(i);
  }
  return result;
}

/* Note what was left to the driver. */
static int left(int result, uint64_t size) {
  if (!result && size > largest_left) largest_left = size;
  return result;
}

static int allocate(uint64_t *address, size_t size) {
  if (size < SMALLEST || !address) {
    if (gpu_count != 1) join_current();
    return cu.Alloc(address, size);
  }
  lock_memory();
  int failed = new_block(address, size);
  unlock_memory();
  /* What fails here fails there too, with the driver's own error. */
  return failed ? left(cu.Alloc(address, size), size) : 0;
}

int own_cuMemAlloc_v2(uint64_t *address, size_t size) {
  int result = allocate(address, size);
  return result == OUT_OF_MEMORY && give_back_pooled() ? allocate(address, size) : result;
}

int own_cuMemAllocPitch_v2(uint64_t *address, size_t *pitch, size_t width, size_t height, unsigned element) {
  size_t row = (width + PITCH - 1) / PITCH * PITCH, size;
  if (!address || !pitch || !width || __builtin_mul_overflow(row, height, &size) || size < SMALLEST)
    return cu.AllocPitch(address, pitch, width, height, element);
  lock_memory();
  int failed = new_block(address, size);
  unlock_memory();
  if (failed) return left(cu.AllocPitch(address, pitch, width, height, element), size);
  *pitch = row;
  return 0;
}

int own_cuMemFree_v2(uint64_t address) {
  int freed;
  if (free_managed(address, &freed)) return freed;
  if (is_pooled(address)) {
    int result = synchronize();
    if (!result) free_pooled(address);
    return result;
  }
  lock_memory();
  mapping *at = mapping_at(address);
  if (!at || !at->is_block || at->address != address) {
    unlock_memory();
    return cu.Free(address);
  }
  int result = synchronize(); /* cuMemFree waits for the GPU's work, which may use the block */
  if (!result) {
    memory *of = at->of;
    uint64_t size = at->size;
    take_parts(of);
    *at = mappings[--mapping_count];
    of->mapped--;
    give_up_unused(of);
    cu.AddressFree(address, size);
  }
  unlock_memory();
  return result;
}

int own_cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
  if (pooled_range(&address, base, size, NULL) || managed_range(address, base, size)) return 0;
  return mapped_range(address, base, size) ? 0 : cu.AddressRange(base, size, address);
}

/* Say which mapping an address is in, where the driver would say it of a part; tells whether it is in one of these. By
 * that answer a program unmaps and frees what it has made itself (XLA). */
int mapped_range(uint64_t address, uint64_t *base, size_t *size) {
  lock_memory();
  const mapping *at = mapping_at(address);
  int ours = at && (at->is_block || parts_of(at->of) > 1);
  if (ours && base) *base = at->address;
  if (ours && size) *size = at->size;
  unlock_memory();
  return ours;
}

int find_block(uint64_t address, uint64_t *base, uint64_t *size) {
  lock_memory();
  const mapping *at = mapping_at(address);
  int found = at && at->is_block;
  if (found) *base = at->address, *size = at->size;
  unlock_memory();
  return found;
}

const memory *memory_at(uint64_t address) {
  const mapping *at = mapping_at(address);
  return at && at->is_block ? at->of : NULL;
}

/* -- the virtual memory API, as programs use it */

/* Where there are several GPUs, small memory that can be exported is the driver's: NCCL makes what its GPUs in one process
 * talk through that way, and the driver brings it back, as it does where nothing is parked. */
static int create(uint64_t *handle, size_t size, const allocation_prop *prop, uint64_t flags) {
  int plain = handle && prop && !flags && prop->type == PINNED && prop->place.type == ON_DEVICE && size >= SMALLEST &&
              (prop->handle_types & ~POSIX_FD) == 0 && !prop->flags.compression && !prop->flags.usage;
  int result = NOT_SUPPORTED;
  if (plain) {
    lock_memory();
    int device = prop->place.id;
    if (at_work(device) && size % gpus[device].granularity == 0 &&
        !(gpu_count > 1 && prop->handle_types && size < OF_NCCL)) {
      allocation_prop made = *prop;
      made.handle_types = POSIX_FD;
      memory *m = new_memory(size, part_of(device, size, prop->handle_types), &made);
      if (m && !(result = give_all(m))) {
        m->named = 1;
        *handle = (uint64_t)m;
      } else if (m) {
        take_parts(m);
        forget(m);
      }
    }
    unlock_memory();
  }
  return result ? left(cu.Create(handle, size, prop, flags), size) : 0;
}

int own_cuMemCreate(uint64_t *handle, size_t size, const allocation_prop *prop, uint64_t flags) {
  int result = create(handle, size, prop, flags);
  if (prop && prop->place.type != ON_DEVICE) is_on_host = 1;
  return result == OUT_OF_MEMORY && give_back_pooled() ? create(handle, size, prop, flags) : result;
}

int own_cuMemRelease(uint64_t handle) {
  lock_memory();
  memory *m = of_handle(handle);
  int result = 0;
  if (m && m->named) {
    m->named--;
    give_up_unused(m);
  } else if (m) {
    result = INVALID_VALUE;
  }
  unlock_memory();
  return m ? result : cu.Release(handle);
}

int own_cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  int result = INVALID_VALUE;
  lock_memory();
  memory *m = of_handle(handle);
  if (m && offset == 0 && size <= m->size) {
    mapping at = {.address = address, .size = size, .of = m};
    result = OUT_OF_MEMORY;
    if (make_room((void **)&mappings, mapping_count, &mapping_room, sizeof *mappings)) {
      size_t part = 0;
      result = 0;
      for (; !result && part * m->part < size; part++) {
        uint64_t from = part * m->part, to = from + part_size(m, part);
        result = cu.Map(address + from, (to < size ? to : size) - from, (size_t)0, m->handles[part], flags);
      }
      if (!result) {
        mappings[mapping_count++] = at;
        m->mapped++;
      } else {
        for (part--; part--;) cu.Unmap(address + part * m->part, part_size(m, part));
      }
    }
  }
  unlock_memory();
  return m ? result : cu.Map(address, size, offset, handle, flags);
}

/* Tell whether only a part of a mapping is among these addresses, or a block, which is freed and not unmapped. */
static int cuts_a_mapping(uint64_t address, uint64_t size) {
  for (size_t i = 0; i < mapping_count; i++) {
    const mapping *at = &mappings[i];
    if (at->address >= address + size || at->address + at->size <= address) continue;
    if (at->is_block || at->address < address || at->address + at->size > address + size) return 1;
  }
  return 0;
}

int own_cuMemUnmap(uint64_t address, size_t size) {
  lock_memory();
  int result = cuts_a_mapping(address, size) ? INVALID_VALUE : cu.Unmap(address, size); /* as the driver has it */
  for (size_t i = mapping_count; !result && i--;) {
    mapping *at = &mappings[i];
    if (at->is_block || at->address < address || at->address + at->size > address + size) continue;
    memory *of = at->of;
    *at = mappings[--mapping_count];
    of->mapped--;
    give_up_unused(of);
  }
  unlock_memory();
  return result;
}

int own_cuMemSetAccess(uint64_t address, size_t size, const access_desc *access, size_t count) {
  int result = 0, known = 0;
  lock_memory();
  if (!are_apart) result = cu.SetAccess(address, size, access, count);
  for (size_t i = 0; !result && i < mapping_count; i++) {
    mapping *at = &mappings[i];
    if (at->address >= address + size || at->address + at->size <= address) continue;
    int whole = at->address >= address && at->address + at->size <= address + size;
    known = 1;
    if (!whole) stays(at->of); /* one mapping with two kinds of access is not kept account of */
    for (size_t k = 0; whole && k < count; k++) note_access(at, &access[k]);
    if (are_apart) result = set_access(at, at->address, at->size);
  }
  if (are_apart && !known) result = cu.SetAccess(address, size, access, count);
  unlock_memory();
  return result;
}

int own_cuMemExportToShareableHandle(void *exported, uint64_t handle, int type, uint64_t flags) {
  lock_memory();
  memory *m = of_handle(handle);
  int result = m && parts_of(m) > 1 ? NOT_SUPPORTED : 0;
  if (m && !result && !(result = cu.Export(exported, m->handles[0], type, flags))) stays(m);
  unlock_memory();
  return m ? result : cu.Export(exported, handle, type, flags);
}

int own_cuMemRetainAllocationHandle(uint64_t *handle, void *address) {
  if (pooled_range(&(uint64_t){(uint64_t)address}, NULL, NULL, NULL)) return INVALID_VALUE; /* as of the driver's pools */
  lock_memory();
  mapping *at = mapping_at((uint64_t)address);
  if (at && handle) {
    at->of->named++;
    *handle = (uint64_t)at->of;
  }
  unlock_memory();
  return at && handle ? 0 : cu.Retain(handle, address);
}

int own_cuMemGetAllocationPropertiesFromHandle(allocation_prop *prop, uint64_t handle) {
  lock_memory();
  memory *m = of_handle(handle);
  if (m && prop) *prop = m->prop;
  unlock_memory();
  return m ? (prop ? 0 : INVALID_VALUE) : cu.Properties(prop, handle);
}

int own_cuMulticastBindMem(uint64_t multicast, size_t to, uint64_t handle, size_t offset, size_t size, uint64_t flags) {
  lock_memory();
  memory *m = of_handle(handle);
  int result = m && parts_of(m) > 1 ? NOT_SUPPORTED : 0;
  if (m && !result && !(result = cu.BindMem(multicast, to, m->handles[0], offset, size, flags))) stays(m);
  unlock_memory();
  return m ? result : cu.BindMem(multicast, to, handle, offset, size, flags);
}

/* What a multicast object has is written to past its addresses. */
int own_cuMulticastBindAddr(uint64_t multicast, size_t to, uint64_t address, size_t size, uint64_t flags) {
  lock_memory();
  int result = cu.BindAddr(multicast, to, address, size, flags);
  for (size_t i = 0; !result && i < mapping_count; i++)
    if (mappings[i].address < address + size && address < mappings[i].address + mappings[i].size) stays(mappings[i].of);
  unlock_memory();
  return result;
}

/* -- several GPUs */

/* Take away the access that GPUs have to others' memory, or give it back: to all of it, or to what is not parked. What
 * is parked has it again with its new memory. Returns 0 or a CUresult. */
int keep_memory_apart(int apart, int is_parked) {
  int result = 0;
  are_apart = apart;
  for (size_t i = 0; !result && i < mapping_count; i++) {
    mapping *at = &mappings[i];
    if (at->is_apart == apart || (is_parked && is_parkable(at->of))) continue;
    for (int k = 0; !result && k < at->accesses; k++) {
      access_desc access = at->access[k];
      if (!is_foreign(at, &access) || !access.flags) continue;
      if (apart && part_size(at->of, 0) > MOST_LEFT) return NOT_SUPPORTED;
      if (apart) access.flags = 0;
      result = cu.SetAccess(at->address, at->size, &access, (size_t)1);
      at->is_apart = apart;
    }
  }
  return result;
}

/* -- on the host */

/* Pinned memory. That which is write-combined would be mapped from the driver's device: a checkpoint takes it away, and a
 * thread that touches it before the restore ends its process (SIGSEGV; driver 580.159). Other pinned memory stays where
 * it is, and can be written to all the time. To be write-combined is a hint, and the GPU sees no difference. */
int own_cuMemHostAlloc(void **address, size_t size, unsigned flags) {
  return cu.HostAlloc(address, size, flags & ~(unsigned)WRITE_COMBINED);
}
