/* Managed memory (cuMemAllocManaged), which the driver does not checkpoint: no process that has any can be saved.
 *
 * One that has none any more can. So for a save the bytes move to ordinary memory at the same addresses, and the managed
 * memory is freed; afterwards it is made again, and they move back. The addresses are what a program knows, so they have
 * to be the same: the driver asks Linux for addresses of its choice (mmap), keeps a stretch of them that begins at a
 * multiple of 32 MiB, and puts its memory there. It is answered with those that are wanted (`answer`). Each allocation
 * gets a stretch of its own. Where all this does not bring an allocation back to its place, the ordinary memory stays
 * there and is pinned, which both the processor and the GPU can use, at the speed of the bus.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <elf.h>
#include <inttypes.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { STRETCH = 32 << 20 }; /* bytes */
enum { PINNED_FOR_ALL = 3 }; /* CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP */

typedef struct {
  uint64_t address, size, room;
  unsigned flags;
  int device;
  enum { MANAGED, AWAY, HOST } state; /* away: ordinary memory, for now; host: for good, and pinned */
} allocation;

static allocation *allocations;
static size_t count, room_for;
static uint64_t reasons[MOST_DEVICES]; /* blocks, so that there is something to park wherever there is managed memory */
static int strangers;                  /* allocations that cannot be brought back */

/* -- where the driver puts it */

static uint64_t wanted, wanted_size; /* where the driver's next stretch is to be */
static char *pretended;              /* where it was told to be, with what it gives back at once */

static void *answer(void *address, size_t size, int access, int flags, int fd, off_t offset) {
  if (wanted && !address && fd < 0 && access == PROT_NONE && size >= wanted_size) {
    void *there = mmap((void *)wanted, wanted_size, access, flags | MAP_FIXED_NOREPLACE, fd, offset);
    if (there == (void *)wanted) return pretended = (char *)(wanted + wanted_size - size);
    if (there != MAP_FAILED) munmap(there, wanted_size);
  }
  return mmap(address, size, access, flags, fd, offset);
}

static int take_back(void *address, size_t size) {
  if (pretended && address == pretended) {
    pretended = NULL;
    if ((uint64_t)address + size <= wanted) return 0; /* there never was any */
    size -= wanted - (uint64_t)address;
    address = (void *)wanted;
  }
  return munmap(address, size);
}

static void redirect(char *base, const Elf64_Rela *relocation, const Elf64_Sym *symbols, const char *names) {
  uint32_t type = ELF64_R_TYPE(relocation->r_info);
  if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) return;
  const char *name = names + symbols[ELF64_R_SYM(relocation->r_info)].st_name;
  void *to = NULL, **slot = (void **)(base + relocation->r_offset);
  if (!strcmp(name, "mmap") || !strcmp(name, "mmap64")) to = (void *)answer;
  if (!strcmp(name, "munmap")) to = (void *)take_back;
  long page = sysconf(_SC_PAGESIZE);
  if (to && !mprotect((void *)((uint64_t)slot & -(uint64_t)page), (size_t)page, PROT_READ | PROT_WRITE)) *slot = to;
}

/* Have the driver's own calls of mmap and munmap come here. */
static void redirect_driver(void) {
  static int is_done;
  Dl_info where;
  struct link_map *driver;
  if (is_done++ || !dladdr1((void *)cu.AllocManaged, &where, (void **)&driver, RTLD_DL_LINKMAP)) return;
  uint64_t found[DT_JMPREL + 1] = {0};
  for (const Elf64_Dyn *one = driver->l_ld; one->d_tag != DT_NULL; one++)
    if (one->d_tag > 0 && one->d_tag <= DT_JMPREL) found[one->d_tag] = one->d_un.d_val;
  const uint64_t tables[][2] = {{found[DT_JMPREL], found[DT_PLTRELSZ]}, {found[DT_RELA], found[DT_RELASZ]}};
  for (int i = 0; i < 2; i++)
    for (uint64_t at = 0; tables[i][0] && at < tables[i][1]; at += sizeof(Elf64_Rela))
      redirect((char *)driver->l_addr, (const Elf64_Rela *)(tables[i][0] + at), (const Elf64_Sym *)found[DT_SYMTAB],
               (const char *)found[DT_STRTAB]);
}

/* -- what programs call */

static allocation *allocation_at(uint64_t address) {
  for (size_t i = 0; i < count; i++)
    if (address - allocations[i].address < allocations[i].size) return &allocations[i];
  return NULL;
}

static int is_room(void) {
  if (count < room_for) return 1;
  allocation *more = realloc(allocations, (room_for + 256) * sizeof *more);
  if (!more) return 0;
  allocations = more;
  room_for += 256;
  return 1;
}

/* It costs programs with many small allocations time, so it is done where the user wants it. */
static int is_on(void) {
  const char *setting = getenv("GPUCKPT_MANAGED");
  return setting && !strcmp(setting, "on");
}

int own_cuMemAllocManaged(uint64_t *address, size_t size, unsigned flags) {
  allocation new = {.size = size, .room = (size + STRETCH - 1) / STRETCH * STRETCH, .flags = flags};
  if (!is_on() || !address || !size || cu.CtxGetDevice(&new.device) || !is_at_work(new.device))
    return cu.AllocManaged(address, size, flags);
  if (!reasons[new.device]) own_cuMemAlloc_v2(&reasons[new.device], 2 << 20);
  lock_memory();
  redirect_driver();
  int result = cu.AllocManaged(&new.address, new.room, flags);
  if (!result && new.address % STRETCH == 0 && is_room()) {
    allocations[count++] = new;
    *address = new.address;
  } else {
    if (!result) cu.Free(new.address);
    result = cu.AllocManaged(address, size, flags);
    strangers += !result;
  }
  unlock_memory();
  return result;
}

/* Free managed memory; tell whether it is any. */
int free_managed(uint64_t address, int *result) {
  if (!count) return 0;
  lock_memory();
  allocation *a = allocation_at(address);
  int ours = a && a->address == address;
  if (ours) {
    if (a->state == MANAGED) *result = cu.Free(address);
    else if (!(*result = cu.CtxSynchronize()) && !(*result = cu.HostUnregister((void *)address)))
      munmap((void *)address, a->size);
    if (!*result) *a = allocations[--count];
  }
  unlock_memory();
  return ours;
}

/* Say which managed memory an address is in; tell whether it is in any. */
int managed_range(uint64_t address, uint64_t *base, size_t *size) {
  if (!count) return 0;
  lock_memory();
  const allocation *a = allocation_at(address);
  if (a && base) *base = a->address;
  if (a && size) *size = a->size;
  unlock_memory();
  return a != NULL;
}

int has_managed(void) { return count != 0; }

/* A GPU's primary context was reset, and its memory is gone. */
void forget_managed(int device) {
  lock_memory();
  for (size_t i = count; i--;)
    if (allocations[i].device == device && allocations[i].state == MANAGED) allocations[i] = allocations[--count];
  unlock_memory();
}

/* -- for a save; the memory's lock is held, and all other threads are still */

static size_t pages(uint64_t size) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (size + page - 1) / page * page;
}

static int is_moved(void *from, uint64_t size, void *to) {
  return mremap(from, pages(size), pages(size), MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

static void *ordinary(uint64_t size) {
  void *memory = mmap(NULL, pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? NULL : memory;
}

/* Move memory to addresses that are free. */
static void must_move(void *from, const allocation *a) {
  if (is_moved(from, a->size, (void *)a->address)) return;
  fputs("gpuckpt: managed memory has lost its addresses\n", stderr);
  abort();
}

/* Call the driver in the context of an allocation's GPU. */
static int enter(const allocation *a) {
  void *context;
  int result = cu.PrimaryRetain(&context, a->device);
  if (!result && (result = cu.CtxPush(context))) cu.PrimaryRelease(a->device);
  return result;
}

static void leave(const allocation *a) {
  void *context;
  cu.CtxPop(&context);
  cu.PrimaryRelease(a->device);
}

static int put_away(allocation *a) {
  void *bytes = ordinary(a->size);
  if (!bytes) return OUT_OF_MEMORY;
  int result = enter(a);
  if (!result) {
    if (!(result = cu.DtoH(bytes, a->address, a->size))) result = cu.Free(a->address);
    leave(a);
  }
  if (result) {
    munmap(bytes, pages(a->size));
    return result;
  }
  must_move(bytes, a);
  a->state = AWAY;
  return 0;
}

static int make_again(const allocation *a) {
  uint64_t address = 0;
  wanted = a->address;
  wanted_size = a->room;
  int result = cu.AllocManaged(&address, a->room, a->flags);
  wanted = 0;
  pretended = NULL;
  if (!result && address != a->address) result = cu.Free(address) ?: INVALID_VALUE;
  return result;
}

static void bring_back(allocation *a) {
  int result = enter(a);
  void *bytes = ordinary(a->size);
  int is_away = !result && bytes && is_moved((void *)a->address, a->size, bytes);
  if (!is_away && bytes) munmap(bytes, pages(a->size));
  if (is_away && !make_again(a)) {
    memcpy((void *)a->address, bytes, a->size);
    munmap(bytes, pages(a->size));
    a->state = MANAGED;
    return leave(a);
  }
  if (is_away) must_move(bytes, a);
  a->state = HOST;
  if (!result) {
    result = cu.HostRegister((void *)a->address, pages(a->size), PINNED_FOR_ALL);
    leave(a);
  }
  fprintf(stderr, "gpuckpt: %zu bytes of managed memory are pinned host memory now, which is slower for the GPU\n",
          (size_t)a->size);
  if (result) fprintf(stderr, "gpuckpt: the GPU cannot use them (CUresult %d)\n", result);
}

/* Make managed memory what it was. */
void bring_managed_back(void) {
  for (size_t i = 0; i < count; i++)
    if (allocations[i].state == AWAY) bring_back(&allocations[i]);
}

/* Read a number of bytes from a file of the system's; UINT64_MAX where it says none, or no limit. */
static uint64_t number_in(const char *path) {
  uint64_t number = UINT64_MAX;
  FILE *file = fopen(path, "re");
  if (file && fscanf(file, "%" SCNu64, &number) != 1) number = UINT64_MAX;
  if (file) fclose(file);
  return number;
}

/* Return how many bytes this process may take more, by its cgroups (version 2). */
static uint64_t left_in_cgroups(void) {
  char group[PATH_MAX / 2] = "", path[PATH_MAX];
  uint64_t least = UINT64_MAX;
  FILE *file = fopen("/proc/self/cgroup", "re");
  if (file && fscanf(file, "0::%2000[^\n]", group) != 1) group[0] = 0;
  if (file) fclose(file);
  for (char *end; group[0]; *end = 0) {
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", group);
    uint64_t most = number_in(path);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.current", group);
    uint64_t now = number_in(path);
    uint64_t left = most > now ? most - now : 0;
    if (most != UINT64_MAX && now != UINT64_MAX && left < least) least = left;
    end = strrchr(group, '/');
  }
  return least;
}

/* Tell whether there is host memory for so many bytes more. */
static int has_host_memory(uint64_t bytes) {
  char line[256];
  uint64_t kib = 0;
  FILE *file = fopen("/proc/meminfo", "re");
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1) break;
  if (file) fclose(file);
  return bytes < kib << 10 && bytes < left_in_cgroups();
}

/* Turn managed memory into ordinary memory. Nothing is changed where that fails. */
int put_managed_away(void) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < count; i++)
    if (allocations[i].state == MANAGED) bytes += allocations[i].size;
  int result = strangers ? NOT_SUPPORTED : bytes && !has_host_memory(bytes) ? OUT_OF_MEMORY : 0;
  for (size_t i = 0; !result && i < count; i++)
    if (allocations[i].state == MANAGED) result = put_away(&allocations[i]);
  if (result) bring_managed_back();
  return result;
}
