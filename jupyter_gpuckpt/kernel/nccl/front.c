/* In front of NCCL: a program's communicators, so that they can be taken down for a save and made again after it.
 *
 * Loaded first in every process (LD_PRELOAD), it is found by all that link with libnccl.so.2, as torch and CuPy do, and by
 * those that open NCCL themselves (lookup.c). Programs get handles of this library's in place of NCCL's, and every call
 * leads to NCCL's communicator of the moment. The driver cannot restore processes with a communicator between them;
 * communicators.c says how they are made again, meeting.c when. Nothing else is changed: without a communicator, all of
 * this does nothing.
 */
#define _GNU_SOURCE
#include "communicators.h"

#include <stdlib.h>
#include <string.h>

/* Call NCCL's function of this name. */
#define REAL(name, types, ...) \
  ({ \
    static int(*function) types; \
    if (!function) function = (int(*) types)real_function(name); \
    function ? function(__VA_ARGS__) : INTERNAL_ERROR; \
  })

typedef struct { const char *name; void *function; } named;

/* Have a function found by lookup.c, and by NCCL's second name for it, which a profiler calls that is in front of us. */
#define FOUND(name) \
  EXPORT typeof(name) p##name __attribute__((alias(#name))); \
  static typeof(name) own_##name __attribute__((alias(#name))); \
  static const named entry_##name __attribute__((section("in_front"), used)) = {#name, own_##name};

/* -- operations */

/* An operation with these arguments, of which `comm_` and `stream` are two: counted, and handed on. */
#define OPERATION(name, peer, is_receive, types, real_names) \
  EXPORT int name types { \
    comm *c = comm_of(handle); \
    if (!c || inside) { \
      void *real = c ? c->real : handle; \
      return REAL(#name, types, UNPACK real_names); \
    } \
    if (stream) note_capture(c, stream); \
    int result = begin_call((call){c, peer, is_receive}, 1); \
    void *real = c->real; \
    if (!result) result = REAL(#name, types, UNPACK real_names); \
    end_call(1); \
    return result; \
  } \
  FOUND(name)
#define UNPACK(...) __VA_ARGS__
#define COLLECTIVE(name, types, real_names) OPERATION(name, -1, 0, types, real_names)

COLLECTIVE(ncclAllReduce, (const void *in, void *out, size_t n, int type, int op, void *handle, void *stream), (in, out, n, type, c ? real_op(c, op) : op, real, stream))
COLLECTIVE(ncclReduce, (const void *in, void *out, size_t n, int type, int op, int root, void *handle, void *stream), (in, out, n, type, c ? real_op(c, op) : op, root, real, stream))
COLLECTIVE(ncclReduceScatter, (const void *in, void *out, size_t n, int type, int op, void *handle, void *stream), (in, out, n, type, c ? real_op(c, op) : op, real, stream))
COLLECTIVE(ncclBcast, (void *data, size_t n, int type, int root, void *handle, void *stream), (data, n, type, root, real, stream))
COLLECTIVE(ncclBroadcast, (const void *in, void *out, size_t n, int type, int root, void *handle, void *stream), (in, out, n, type, root, real, stream))
COLLECTIVE(ncclAllGather, (const void *in, void *out, size_t n, int type, void *handle, void *stream), (in, out, n, type, real, stream))
COLLECTIVE(ncclAlltoAll, (const void *in, void *out, size_t n, int type, void *handle, void *stream), (in, out, n, type, real, stream))
COLLECTIVE(ncclGather, (const void *in, void *out, size_t n, int type, int root, void *handle, void *stream), (in, out, n, type, root, real, stream))
COLLECTIVE(ncclScatter, (const void *in, void *out, size_t n, int type, int root, void *handle, void *stream), (in, out, n, type, root, real, stream))
COLLECTIVE(ncclAllReduceConfig, (const void *in, void *out, size_t n, int type, int op, void *handle, void *stream, const void *how), (in, out, n, type, c ? real_op(c, op) : op, real, stream, how))
COLLECTIVE(ncclReduceConfig, (const void *in, void *out, size_t n, int type, int op, int root, void *handle, void *stream, const void *how), (in, out, n, type, c ? real_op(c, op) : op, root, real, stream, how))
COLLECTIVE(ncclReduceScatterConfig, (const void *in, void *out, size_t n, int type, int op, void *handle, void *stream, const void *how), (in, out, n, type, c ? real_op(c, op) : op, real, stream, how))
COLLECTIVE(ncclBroadcastConfig, (const void *in, void *out, size_t n, int type, int root, void *handle, void *stream, const void *how), (in, out, n, type, root, real, stream, how))
COLLECTIVE(ncclAllGatherConfig, (const void *in, void *out, size_t n, int type, void *handle, void *stream, const void *how), (in, out, n, type, real, stream, how))
COLLECTIVE(ncclAlltoAllConfig, (const void *in, void *out, size_t n, int type, void *handle, void *stream, const void *how), (in, out, n, type, real, stream, how))
COLLECTIVE(ncclGatherConfig, (const void *in, void *out, size_t n, int type, int root, void *handle, void *stream, const void *how), (in, out, n, type, root, real, stream, how))
COLLECTIVE(ncclScatterConfig, (const void *in, void *out, size_t n, int type, int root, void *handle, void *stream, const void *how), (in, out, n, type, root, real, stream, how))
OPERATION(ncclSend, peer, 0, (const void *in, size_t n, int type, int peer, void *handle, void *stream), (in, n, type, peer, real, stream))
OPERATION(ncclRecv, peer, 1, (void *out, size_t n, int type, int peer, void *handle, void *stream), (out, n, type, peer, real, stream))

/* -- groups */

EXPORT int ncclGroupStart(void) {
  if (inside) return REAL("ncclGroupStart", (void));
  begin_group();
  int result = REAL("ncclGroupStart", (void));
  if (result) {
    close_group();
    end_group();
  }
  return result;
}
FOUND(ncclGroupStart)

#define GROUP_END(name, types, ...) \
  EXPORT int name types { \
    if (inside || !group_depth) return REAL(#name, types, ##__VA_ARGS__); \
    close_group(); \
    inside++; \
    int result = REAL(#name, types, ##__VA_ARGS__); \
    inside--; \
    end_group(); \
    return result; \
  } \
  FOUND(name)
GROUP_END(ncclGroupEnd, (void))
GROUP_END(ncclGroupSimulateEnd, (void *info), info)

/* -- communicators are made */

/* Hand out what was made, or forget it. */
static int made(comm *c, int result, void **handle) {
  if (result && result != IN_PROGRESS) {
    pthread_mutex_lock(&lock);
    forget_comm(c);
    pthread_mutex_unlock(&lock);
    return result;
  }
  *handle = c;
  be_reachable();
  return result;
}

static comm *making(uint64_t key, int rank, int size, const config *made_with, const comm *parent) {
  pthread_mutex_lock(&lock);
  comm *c = new_comm(key, rank, size, made_with, parent);
  pthread_mutex_unlock(&lock);
  return c;
}

/* Make a communicator by NCCL's function, whose first argument is where it puts it. */
#define MAKE(name, key, types, names, real_names) \
  EXPORT int name types { \
    if (inside || is_newer()) return REAL(#name, types, UNPACK names); \
    begin_change(); \
    comm *c = making(key, rank, size, made_with, NULL); \
    int result = c ? REAL(#name, types, UNPACK real_names) : SYSTEM_ERROR; \
    if (c) result = made(c, result, handle); \
    end_change(); \
    return result; \
  } \
  FOUND(name)
static config *const made_with = NULL; /* where the function has no such argument */

MAKE(ncclCommInitRank, hash(&id, sizeof id, 0), (void **handle, int size, unique_id id, int rank), (handle, size, id, rank), (&c->real, size, id, rank))
MAKE(ncclCommInitRankConfig, hash(&id, sizeof id, 0), (void **handle, int size, unique_id id, int rank, config *made_with), (handle, size, id, rank, made_with), (&c->real, size, id, rank, made_with))
MAKE(ncclCommInitRankScalable, hash(ids, (size_t)count * sizeof *ids, 0), (void **handle, int size, int rank, int count, unique_id *ids, config *made_with), (handle, size, rank, count, ids, made_with), (&c->real, size, rank, count, ids, made_with))

EXPORT int ncclCommInitAll(void **handles, int size, const int *devices) {
  if (inside || is_newer() || size < 1) return REAL("ncclCommInitAll", (void **, int, const int *), handles, size, devices);
  void **real = calloc((size_t)size, sizeof *real);
  if (!real) return SYSTEM_ERROR;
  begin_change();
  int result = REAL("ncclCommInitAll", (void **, int, const int *), real, size, devices);
  uint64_t key = hash(&real, sizeof real, (uint64_t)random());
  for (int rank = 0; !result && rank < size; rank++) {
    comm *c = making(key, rank, size, NULL, NULL);
    if (!c) result = SYSTEM_ERROR;
    else {
      c->device = devices ? devices[rank] : rank;
      c->real = real[rank];
      result = made(c, SUCCESS, &handles[rank]);
    }
  }
  end_change();
  free(real);
  return result;
}
FOUND(ncclCommInitAll)

EXPORT int ncclCommSplit(void *handle, int color, int order, void **child, config *made_with) {
  comm *parent = comm_of(handle);
  int (*split)(void *, int, int, void **, config *) = real_function("ncclCommSplit");
  if (!parent || inside) return split(parent ? parent->real : handle, color, order, child, made_with);
  begin_change();
  int result = begin_call((call){parent, -1, 0}, 0);
  uint64_t key = hash(&parent->children, sizeof parent->children, hash(&color, sizeof color, parent->key));
  parent->children++;
  comm *c = color < 0 ? NULL : making(key, UNKNOWN, 1, made_with, parent);
  *child = NULL;
  if (!result) result = split(parent->real, color, order, c ? &c->real : child, made_with);
  if (c) result = made(c, result, child);
  end_call(0);
  end_change();
  return result;
}
FOUND(ncclCommSplit)

/* -- and ended */

#define END(name, forget) \
  EXPORT int name(void *handle) { \
    comm *c = comm_of(handle); \
    if (!c || inside) return REAL(#name, (void *), c ? c->real : handle); \
    begin_change(); \
    int result = c->real ? REAL(#name, (void *), c->real) : SUCCESS; \
    pthread_mutex_lock(&lock); \
    if (forget) forget_comm(c); \
    pthread_mutex_unlock(&lock); \
    end_change(); \
    return result; \
  } \
  FOUND(name)
END(ncclCommFinalize, 0)
END(ncclCommDestroy, 1)
END(ncclCommAbort, 1)

/* -- what is known of them */

/* Answer at once, also while the communicators are taken down: torch's watchdog asks all the time. */
EXPORT int ncclCommGetAsyncError(void *handle, int *error) {
  comm *c = comm_of(handle);
  if (!c || inside) return REAL("ncclCommGetAsyncError", (void *, int *), c ? c->real : handle, error);
  pthread_mutex_lock(&lock);
  int result = SUCCESS;
  if (is_away()) *error = SUCCESS;
  else if (!c->real) *error = REMOTE_ERROR;
  else result = REAL("ncclCommGetAsyncError", (void *, int *), c->real, error);
  pthread_mutex_unlock(&lock);
  return result;
}
FOUND(ncclCommGetAsyncError)

#define KNOWN(name, value) \
  EXPORT int name(void *handle, int *answer) { \
    comm *c = comm_of(handle); \
    if (!c) return REAL(#name, (void *, int *), handle, answer); \
    pthread_mutex_lock(&lock); \
    if (!is_away()) complete(c); \
    *answer = value; \
    pthread_mutex_unlock(&lock); \
    return SUCCESS; \
  } \
  FOUND(name)
KNOWN(ncclCommCount, c->size)
KNOWN(ncclCommUserRank, c->rank)
KNOWN(ncclCommCuDevice, c->device)

EXPORT const char *ncclGetLastError(void *handle) {
  comm *c = comm_of(handle);
  const char *(*get)(void *) = real_function("ncclGetLastError");
  if (c && is_away()) return "";
  return get ? get(c ? c->real : handle) : "NCCL is not loaded";
}
FOUND(ncclGetLastError)

EXPORT int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, void *handle) {
  comm *c = comm_of(handle);
  int (*create)(int *, void *, int, int, void *) = real_function("ncclRedOpCreatePreMulSum");
  if (!c || inside) return create(op, scalar, type, residence, c ? c->real : handle);
  begin_change();
  int real, result = create(&real, scalar, type, residence, c->real);
  if (!result && (*op = new_op(c, real, scalar, type, residence)) < 0) result = SYSTEM_ERROR;
  end_change();
  return result;
}
FOUND(ncclRedOpCreatePreMulSum)

EXPORT int ncclRedOpDestroy(int op, void *handle) {
  comm *c = comm_of(handle);
  if (!c || inside) return REAL("ncclRedOpDestroy", (int, void *), op, c ? c->real : handle);
  begin_change();
  int result = REAL("ncclRedOpDestroy", (int, void *), real_op(c, op), c->real);
  end_op(c, op);
  end_change();
  return result;
}
FOUND(ncclRedOpDestroy)

/* -- what cannot be made again, or needs not be */

typedef struct { uint64_t first, second; } answer; /* in the two registers in which any of these answers */

/* A function whose first argument is a communicator, whatever the others are. */
#define HAND_ON(name, reason) \
  EXPORT answer name(void *handle, uint64_t a, uint64_t b, uint64_t d, uint64_t e, uint64_t f) { \
    comm *c = comm_of(handle); \
    answer (*function)(void *, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) = real_function(#name); \
    if (!function) return (answer){INTERNAL_ERROR, 0}; \
    if (!c || inside) return function(c ? c->real : handle, a, b, d, e, f); \
    begin_change(); \
    c->reasons |= reason; \
    answer result = function(c->real, a, b, d, e, f); \
    end_change(); \
    return result; \
  } \
  FOUND(name)
HAND_ON(ncclCommRegister, REGISTERED)
HAND_ON(ncclCommDeregister, 0)
HAND_ON(ncclCommWindowRegister, REGISTERED)
HAND_ON(ncclCommWindowDeregister, 0)
HAND_ON(ncclWinGetUserPtr, 0)
HAND_ON(ncclDevCommCreate, REGISTERED)
HAND_ON(ncclDevCommDestroy, 0)
HAND_ON(ncclGinBarrierCreateRequirement, REGISTERED)
HAND_ON(ncclCommQueryProperties, 0)
HAND_ON(ncclCommMemStats, 0)
HAND_ON(ncclCommShrink, DERIVED) /* what it makes is NCCL's own, and passes by */
HAND_ON(ncclCommGrow, DERIVED)
HAND_ON(ncclCommGetUniqueId, DERIVED)
HAND_ON(ncclCommRevoke, DERIVED)
HAND_ON(ncclCommSuspend, DERIVED)
HAND_ON(ncclCommResume, 0)
HAND_ON(ncclTeamWorld, 0)
HAND_ON(ncclTeamLsa, 0)
HAND_ON(ncclTeamRail, 0)
HAND_ON(ncclTeamCft, 0)
HAND_ON(ncclTeamCftMultimem, 0)
HAND_ON(ncclTeamRankToLsa, 0)
HAND_ON(ncclTeamRankToWorld, 0)

/* One-sided operations need registered memory. */
OPERATION(ncclPutSignal, -1, 0, (const void *in, size_t n, int type, int peer, void *window, size_t offset, int signal, int context, unsigned flags, void *handle, void *stream), (in, n, type, peer, window, offset, signal, context, flags, real, stream))
OPERATION(ncclSignal, -1, 0, (int peer, int signal, int context, unsigned flags, void *handle, void *stream), (peer, signal, context, flags, real, stream))
OPERATION(ncclWaitSignal, -1, 0, (int count, void *signals, void *handle, void *stream), (count, signals, real, stream))

EXPORT int ncclMemAlloc(void **memory, size_t size) {
  int result = REAL("ncclMemAlloc", (void **, size_t), memory, size);
  if (!result && !inside) uses_own_memory = 1;
  return result;
}
FOUND(ncclMemAlloc)

/* The program has them, too, where it looks for them in all that is loaded. */
EXPORT int ncclGetVersion(int *version) { return REAL("ncclGetVersion", (int *), version); }
FOUND(ncclGetVersion)
EXPORT int ncclGetUniqueId(unique_id *id) { return REAL("ncclGetUniqueId", (unique_id *), id); }
FOUND(ncclGetUniqueId)

/* Return the function that stands in front of this one of NCCL's, by whichever of its two names; NULL for no such. */
void *function_in_front(const char *name) {
  extern __attribute__((visibility("hidden"))) const named __start_in_front[], __stop_in_front[]; /* by the linker */
  if (*name == 'p') name++;
  for (const named *one = __start_in_front; one < __stop_in_front; one++)
    if (!strcmp(one->name, name)) return one->function;
  return NULL;
}
