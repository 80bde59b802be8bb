/* A made-up NCCL for machines without a GPU: real operations between real processes, of numbers in shared memory.
 *
 * A communicator is a file in /dev/shm, named by its id, in which its ranks meet. Types are of 64-bit integers alone, and
 * operations block until all ranks have come, as far as these do. What was freed is overwritten: who still uses it fails.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, INVALID = 4, OPS = 4 };
typedef struct { unsigned char bytes[128]; } unique_id;
typedef struct {
  int64_t came, left, members;
  int64_t values[RANKS];
  int64_t box[RANKS][RANKS], full[RANKS][RANKS];
} place;
typedef struct { uint64_t magic; place *place; int rank, size; int64_t round; uint64_t name; int64_t factors[OPS]; } comm;

static void nap(void) { struct timespec t = {.tv_nsec = 200000}; nanosleep(&t, NULL); }
static void until(volatile int64_t *at, int64_t value) { while (__atomic_load_n(at, __ATOMIC_ACQUIRE) < value) nap(); }
static void add(int64_t *at, int64_t n) { __atomic_add_fetch(at, n, __ATOMIC_ACQ_REL); }
static int is_bad(const comm *c) { return !c || c->magic != 0x1234; }

/* All come, look, and leave, before anybody comes again. */
static int64_t meet(comm *c, int64_t value, int64_t all[RANKS]) {
  int64_t sum = 0;
  until(&c->place->left, c->round * c->size);
  c->place->values[c->rank] = value;
  c->round++;
  add(&c->place->came, 1);
  until(&c->place->came, c->round * c->size);
  for (int i = 0; i < c->size; i++) sum += all[i] = c->place->values[i];
  add(&c->place->left, 1);
  until(&c->place->left, c->round * c->size);
  return sum;
}

static void path_of(char *path, size_t size, uint64_t name) { snprintf(path, size, "/dev/shm/made-up-nccl-%016lx", name); }

static comm *join(uint64_t name, int rank, int size) {
  char path[64];
  comm *c = calloc(1, sizeof *c);
  path_of(path, sizeof path, name);
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(place))) return NULL;
  *c = (comm){.magic = 0x1234, .rank = rank, .size = size, .name = name};
  c->place = mmap(NULL, sizeof(place), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  add(&c->place->members, 1);
  until(&c->place->members, size);
  return c;
}

int ncclGetVersion(int *version) {
  const char *said = getenv("MADE_UP_NCCL_VERSION");
  *version = said ? atoi(said) : 22809;
  return 0;
}
int ncclGetUniqueId(unique_id *id) { return getrandom(id, sizeof *id, 0) == sizeof *id ? 0 : 2; }
int ncclCommInitRank(comm **c, int size, unique_id id, int rank) {
  uint64_t name;
  memcpy(&name, &id, sizeof name);
  return size > RANKS || !(*c = join(name, rank, size)) ? 2 : 0;
}
int ncclCommInitRankConfig(comm **c, int size, unique_id id, int rank, void *config) { (void)config; return ncclCommInitRank(c, size, id, rank); }

int ncclCommSplit(comm *c, int color, int key, comm **child, void *config) {
  (void)config; (void)key;
  if (is_bad(c)) return INVALID;
  int64_t colors[RANKS];
  meet(c, color, colors);
  int rank = 0, size = 0;
  for (int i = 0; i < c->size; i++)
    if (colors[i] == color) { if (i < c->rank) rank++; size++; }
  *child = color < 0 ? NULL : join(c->name * 31 + (uint64_t)c->round * 1009 + (uint64_t)color + 1, rank, size);
  return 0;
}

int ncclCommDestroy(comm *c) {
  char path[64];
  if (is_bad(c)) return INVALID;
  c->magic = 0xdead; /* who asks meanwhile has an error, as with NCCL */
  for (int i = 0; i < 250; i++) nap();
  path_of(path, sizeof path, c->name);
  unlink(path);
  munmap(c->place, sizeof(place));
  memset(c, 0xee, sizeof *c);
  free(c);
  return 0;
}
int ncclCommAbort(comm *c) { return ncclCommDestroy(c); }
int ncclCommFinalize(comm *c) { return is_bad(c) ? INVALID : 0; }
int ncclCommGetAsyncError(comm *c, int *error) { *error = 0; return is_bad(c) ? INVALID : 0; }
int ncclCommCount(comm *c, int *n) { if (is_bad(c)) return INVALID; *n = c->size; return 0; }
int ncclCommUserRank(comm *c, int *n) { if (is_bad(c)) return INVALID; *n = c->rank; return 0; }
int ncclCommCuDevice(comm *c, int *n) { *n = 0; return is_bad(c) ? INVALID : 0; }
int ncclCommRegister(comm *c, void *memory, size_t size, void **handle) { (void)memory; (void)size; *handle = c; return is_bad(c) ? INVALID : 0; }

int ncclRedOpCreatePreMulSum(int *op, int64_t *factor, int type, int residence, comm *c) {
  (void)type; (void)residence;
  if (is_bad(c)) return INVALID;
  for (int i = 0; i < OPS; i++)
    if (!c->factors[i]) { c->factors[i] = *factor; *op = 1000 + (int)(c->name % 97) * OPS + i; return 0; }
  return 2;
}
int ncclRedOpDestroy(int op, comm *c) { if (is_bad(c)) return INVALID; c->factors[(op - 1000) % OPS] = 0; return 0; }

/* -- operations, in a group when it ends: those of receiving last, as nobody would send otherwise */
typedef struct { int kind, peer; const int64_t *in; int64_t *out; int64_t factor; comm *c; } task;
static _Thread_local int depth, count;
static _Thread_local task tasks[64];

static void run(const task *t) {
  comm *c = t->c;
  int64_t all[RANKS];
  if (t->kind == 0) *t->out = meet(c, *t->in * t->factor, all);
  if (t->kind == 1) {
    while (__atomic_load_n(&c->place->full[c->rank][t->peer], __ATOMIC_ACQUIRE)) nap();
    c->place->box[c->rank][t->peer] = *t->in;
    __atomic_store_n(&c->place->full[c->rank][t->peer], 1, __ATOMIC_RELEASE);
  }
  if (t->kind == 2) {
    until(&c->place->full[t->peer][c->rank], 1);
    *t->out = c->place->box[t->peer][c->rank];
    __atomic_store_n(&c->place->full[t->peer][c->rank], 0, __ATOMIC_RELEASE);
  }
}
static int enqueue(task t) {
  if (is_bad(t.c)) return INVALID;
  if (depth) tasks[count++] = t;
  else run(&t);
  return 0;
}
const char *ncclGetErrorString(int result) { return result ? "an error" : "none"; }
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) {
  if (--depth) return 0;
  for (int kind = 0; kind < 3; kind++)
    for (int i = 0; i < count; i++) if (tasks[i].kind == kind) run(&tasks[i]);
  count = 0;
  return 0;
}
int ncclAllReduce(const int64_t *in, int64_t *out, size_t n, int type, int op, comm *c, void *stream) {
  (void)n; (void)type; (void)stream;
  int64_t factor = op < 5 ? 1 : is_bad(c) || op < 1000 || (op - 1000) / OPS != (int)(c->name % 97) ? 0 : c->factors[(op - 1000) % OPS];
  return factor ? enqueue((task){0, 0, in, out, factor, c}) : INVALID;
}
int ncclSend(const int64_t *in, size_t n, int type, int peer, comm *c, void *stream) { (void)n; (void)type; (void)stream; return enqueue((task){1, peer, in, NULL, 1, c}); }
int ncclRecv(int64_t *out, size_t n, int type, int peer, comm *c, void *stream) { (void)n; (void)type; (void)stream; return enqueue((task){2, peer, NULL, out, 1, c}); }
