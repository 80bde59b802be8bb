/* The communicators of this process: what is known of each, and how all are taken down and made again. */
#define _GNU_SOURCE
#include "communicators.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FIRST_USER_OP = 5, MAX_RANKS = 1 << 20, CAPTURING = 1, RELAXED = 2, MULTICAST_SUPPORTED = 132 };
static const uint64_t MAGIC = 0x677075636b6e6363;

comm *comms;
int uses_own_memory; /* the program has memory of NCCL's (ncclMemAlloc) */

/* Return a function of the NCCL that all calls lead to: the one that was loaded first as libnccl.so.2, by whatever path
 * and for whomever. It stays loaded then. */
static void *function_of(int mode, const char *name) {
  static void *nccl;
  void *found = nccl;
  if (!found) nccl = found = dlopen("libnccl.so.2", RTLD_LAZY | mode);
  return found ? next_lookup()(found, name) : NULL;
}

void *real_function(const char *name) { return function_of(0, name); }

/* The same, where NCCL is loaded already. */
void *loaded_function(const char *name) { return function_of(RTLD_NOLOAD, name); }

/* Tell whether NCCL is newer than what is known here: it may have functions which pass by, so programs get its handles. */
int is_newer(void) {
  static int version;
  int (*get)(int *) = real_function("ncclGetVersion");
  if (!version && get && get(&version)) version = 0;
  return version > LATEST;
}

static void *driver_function(const char *name) {
  static void *driver;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return driver ? dlsym(driver, name) : NULL;
}

/* Call a function of the driver, where there is one. */
#define DRIVER(name, types, ...) \
  ({ \
    static int(*function) types; \
    if (!function) function = (int(*) types)driver_function(name); \
    function ? function(__VA_ARGS__) : 0; \
  })

/* FNV-1a. */
uint64_t hash(const void *bytes, size_t size, uint64_t begin) {
  uint64_t value = begin ^ 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; i++) value = (value ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
  return value;
}

comm *comm_of(void *handle) {
  return handle && *(uint64_t *)handle == MAGIC ? handle : NULL;
}

size_t counts_of(const comm *c) { return 1 + 2 * (size_t)c->size; }

size_t count_of(const comm *c, int peer, int is_receive) {
  return peer < 0 || peer >= c->size ? 0 : 1 + 2 * (size_t)peer + (size_t)is_receive;
}

static config *copied(const config *from) {
  if (!from || from->size < offsetof(config, comm_name)) return NULL;
  config *copy = malloc(from->size);
  if (!copy) return NULL;
  memcpy(copy, from, from->size);
  if (copy->net_name) copy->net_name = strdup(copy->net_name);
  if (copy->size > offsetof(config, comm_name) && copy->comm_name) copy->comm_name = strdup(copy->comm_name);
  return copy;
}

static int has_multicast(int device) {
  const char *nvls = getenv("NCCL_NVLS_ENABLE");
  int supported = 0;
  if (nvls && !strcmp(nvls, "0")) return 0;
  DRIVER("cuDeviceGetAttribute", (int *, int, int), &supported, MULTICAST_SUPPORTED, device);
  return supported;
}

/* Make the handle of a communicator that is about to be made; with the lock. */
comm *new_comm(uint64_t key, int rank, int size, const config *made_with, const comm *parent) {
  if (size < 1 || size > MAX_RANKS) return NULL;
  comm *c = calloc(1, sizeof *c);
  if (!c) return NULL;
  *c = (comm){.magic = MAGIC, .key = key, .rank = rank, .size = size, .next = comms};
  c->made_with = made_with ? copied(made_with) : parent ? copied(parent->made_with) : NULL;
  c->counts = calloc(2 * counts_of(c), sizeof *c->counts);
  if (!c->counts) {
    free(c);
    return NULL;
  }
  c->limits = c->counts + counts_of(c);
  DRIVER("cuCtxGetDevice", (int *), &c->device);
  if (size > 2 && has_multicast(c->device)) c->reasons |= MULTICAST;
  return comms = c;
}

/* Learn the rank and the size of a communicator that was split off: in a group, they are not known at once. With the lock. */
void complete(comm *c) {
  int (*get_rank)(void *, int *) = real_function("ncclCommUserRank"), (*get_size)(void *, int *) = real_function("ncclCommCount");
  int rank, size, result;
  if (c->rank != UNKNOWN || !c->real) return;
  inside++;
  result = get_size(c->real, &size) || get_rank(c->real, &rank);
  inside--;
  if (result || size < 1 || size > MAX_RANKS) return;
  uint64_t *counts = calloc(2 * (1 + 2 * (size_t)size), sizeof *counts);
  if (!counts) return;
  counts[0] = c->counts[0];
  free(c->counts);
  c->rank = rank;
  c->size = size;
  c->counts = counts;
  c->limits = counts + counts_of(c);
  if (size > 2 && has_multicast(c->device)) c->reasons |= MULTICAST;
}

/* Wait until what was begun in the background is done, where the program has asked for that (`blocking` is 0). */
static int await_done(const comm *c) {
  int (*get)(void *, int *) = real_function("ncclCommGetAsyncError");
  int error = SUCCESS, result;
  struct timespec pause = {.tv_nsec = 1000000};
  while (!(result = get(c->real, &error)) && error == IN_PROGRESS) nanosleep(&pause, NULL);
  return result ? result : error;
}

static int is_nonblocking(const comm *c) { return c->made_with && c->made_with->blocking == 0; }

/* Tell whether other processes take part. What one process has by itself, on its GPUs, need not be taken down. */
int is_shared(const comm *c) {
  int own = 0;
  for (const comm *other = comms; other; other = other->next) own += other->key == c->key;
  return c->rank == UNKNOWN || own < c->size;
}

/* Forget a communicator that the program has ended; with the lock. Its handle is not given to another one. */
void forget_comm(comm *c) {
  for (comm **at = &comms; *at; at = &(*at)->next)
    if (*at == c) {
      *at = c->next;
      break;
    }
  free(c->counts);
  free(c->ops);
  c->counts = c->limits = NULL;
  c->ops = NULL;
  c->magic = 0;
}

/* A captured graph has the communicator's memory in it, and runs past this library. */
void note_capture(comm *c, void *stream) {
  int status = 0;
  DRIVER("cuStreamIsCapturing", (void *, int *), stream, &status);
  if (status == CAPTURING) c->reasons |= CAPTURED;
}

/* -- operations of the program's */

static const unsigned char TYPE_SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

int new_op(comm *c, int real, const void *scalar, int type, int residence) {
  int i = 0;
  while (i < c->op_count && c->ops[i].is_used) i++;
  if (i == c->op_count) {
    user_op *more = realloc(c->ops, (size_t)(i + 1) * sizeof *more);
    if (!more) return -1;
    c->ops = more;
    c->op_count++;
  }
  c->ops[i] = (user_op){.real = real, .is_used = 1, .type = type, .residence = residence, .scalar = (void *)scalar};
  if (residence == 1) memcpy(c->ops[i].value, scalar, type >= 0 && type < (int)sizeof TYPE_SIZES ? TYPE_SIZES[type] : 1);
  return FIRST_USER_OP + i;
}

void end_op(comm *c, int op) {
  int i = op - FIRST_USER_OP;
  if (i >= 0 && i < c->op_count) c->ops[i].is_used = 0;
}

int real_op(comm *c, int op) {
  int i = op - FIRST_USER_OP;
  return i >= 0 && i < c->op_count && c->ops[i].is_used ? c->ops[i].real : op;
}

static int make_ops_again(comm *c) {
  int (*create)(int *, void *, int, int, void *) = real_function("ncclRedOpCreatePreMulSum");
  int result = SUCCESS;
  for (int i = 0; !result && i < c->op_count; i++) {
    user_op *op = &c->ops[i];
    if (op->is_used) result = create(&op->real, op->residence == 1 ? op->value : op->scalar, op->type, op->residence, c->real);
  }
  return result;
}

/* -- down, and up again */

static int use_device(int device) {
  void *context = NULL;
  int result = DRIVER("cuDevicePrimaryCtxRetain", (void **, int), &context, device);
  if (result) return result;
  if (context && (result = DRIVER("cuCtxPushCurrent_v2", (void *), context)))
    DRIVER("cuDevicePrimaryCtxRelease_v2", (int), device);
  return result;
}

static void leave_device(int device) {
  void *context = NULL;
  DRIVER("cuCtxPopCurrent_v2", (void **), &context);
  DRIVER("cuDevicePrimaryCtxRelease_v2", (int), device);
}

/* Be on the GPU of a communicator, in a thread of this library's. Without that, the CUDA runtime would take it to be on
 * the first GPU, and make a context there, when NCCL goes back to where it was. Returns the GPU, for `leave_gpu`. */
int be_on_gpu(void) {
  for (comm *c = comms; c; c = c->next)
    if (is_shared(c)) return use_device(c->device) ? -1 : c->device;
  return -1;
}

void leave_gpu(int device) {
  if (device >= 0) leave_device(device);
}

/* Wait until the GPUs have done what was begun. Returns the driver's error. */
int wait_for_gpus(void) {
  int mode = RELAXED, result = 0;
  DRIVER("cuThreadExchangeStreamCaptureMode", (int *), &mode); /* elsewhere, a graph may be captured right now */
  for (comm *c = comms; !result && c; c = c->next) {
    if (!is_shared(c)) continue;
    if (c->real && is_nonblocking(c) && (result = await_done(c))) break;
    if ((result = use_device(c->device))) break;
    result = DRIVER("cuCtxSynchronize", (void), );
    leave_device(c->device);
  }
  return result;
}

/* End NCCL's communicators, and keep the handles. Nobody is in a call. */
int take_down(void) {
  int (*destroy)(void *) = real_function("ncclCommDestroy"), (*finalize)(void *) = real_function("ncclCommFinalize");
  int result = SUCCESS;
  for (comm *c = comms; c; c = c->next) {
    if (!c->real || !is_shared(c)) continue;
    use_device(c->device);
    int one = SUCCESS;
    if (is_nonblocking(c)) one = finalize(c->real) == IN_PROGRESS ? await_done(c) : SUCCESS;
    if (!one) one = destroy(c->real);
    leave_device(c->device);
    c->real = NULL;
    if (one) result = one;
  }
  return result;
}

static int init(comm *c, const unique_id *id) {
  int (*plain)(void **, int, unique_id, int) = real_function("ncclCommInitRank");
  int (*with_config)(void **, int, unique_id, int, config *) = real_function("ncclCommInitRankConfig");
  return c->made_with ? with_config(&c->real, c->size, *id, c->rank, c->made_with) : plain(&c->real, c->size, *id, c->rank);
}

/* Make the communicators of this key again, of which this process may have several ranks. */
int make_again(uint64_t key, const unique_id *id) {
  int (*group_start)(void) = real_function("ncclGroupStart"), (*group_end)(void) = real_function("ncclGroupEnd");
  int result = group_start();
  for (comm *c = comms; !result && c; c = c->next) {
    if (c->key != key || c->real) continue;
    if ((result = use_device(c->device))) break;
    result = init(c, id);
    if (result == IN_PROGRESS) result = SUCCESS;
    leave_device(c->device);
  }
  int ended = group_end();
  if (!result && ended != IN_PROGRESS) result = ended;
  for (comm *c = comms; !result && c; c = c->next)
    if (c->key == key && is_nonblocking(c)) result = await_done(c);
  for (comm *c = comms; !result && c; c = c->next)
    if (c->key == key) result = make_ops_again(c);
  return result;
}
