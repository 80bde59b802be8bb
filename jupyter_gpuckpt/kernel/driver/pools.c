/* Stream-ordered memory (cuMemAllocAsync and its pools) that can be parked.
 *
 * What the driver gives out of its pools it copies at a checkpoint, slowly. So blocks come from memory of ours (heap.c),
 * by the same rules: what was freed in a stream is there for the next allocation in it at once, and for other streams
 * when the GPU has come so far, or, rather than fail, with a wait between the streams. The driver's pools stay as names
 * and for their settings, and do the rest: what is allocated while a stream is captured is the graph's, and pools that
 * are shared with other processes are the driver's.
 */
#define _GNU_SOURCE
#include "heap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { PER_THREAD = 2, WITHOUT_TIMES = 2, RELAXED = 2 }; /* CU_STREAM_PER_THREAD; of events; of captures */
enum { NOWHERE = 1 }; /* an address */
enum { RELEASE_THRESHOLD = 4, RESERVED_NOW, RESERVED_HIGH, USED_NOW, USED_HIGH }; /* CU_MEMPOOL_ATTR_… */
enum { ALLOWED_HANDLES = 14, RANGE_START = 11, RANGE_SIZE = 12, POOL_OF_POINTER = 17 }; /* CU_POINTER_ATTRIBUTE_… */

typedef struct {
  int type, handle_types;
  location place;
  void *windows;
  size_t most;
  unsigned short usage;
  unsigned char reserved[54];
} pool_props;

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; /* before that of memory.c, where both are needed */
static pool *pools;
static stream *streams;
static _Atomic int excess; /* a pool may have more than it should keep: looked at when a program waits for the GPU */

void renew_pools_lock(void) { pthread_mutex_init(&busy, NULL); }

static int may_be_ours(uint64_t address) { return address >= lowest_address && address < highest_address; }

/* -- streams */

static int is_captured(void *handle) {
  int status = 0;
  return cu.StreamIsCapturing(handle, &status) || status;
}

static stream *known_stream(uint64_t id) {
  stream *s = streams;
  while (s && (s->id != id || s->destroyed)) s = s->next;
  return s;
}

/* Forget the streams that nothing waits for and nobody uses any more. */
static void tidy_streams(void) {
  for (stream **at = &streams; *at;) {
    stream *s = *at;
    if (s->held || !(s->destroyed || s->of_thread)) {
      at = &s->next;
      continue;
    }
    *at = s->next;
    if (s->event) cu.EventDestroy(s->event);
    free(s);
  }
}

/* Return what is known of a stream; NULL where it is one of those that are left to the driver. */
static stream *stream_of(void *handle) {
  uint64_t id;
  void *context = NULL, *green = NULL;
  if (cu.StreamGetId(handle, &id)) return NULL;
  stream *s = known_stream(id);
  if (s) return s;
  tidy_streams();
  /* Streams of green contexts end with these, unseen. */
  if (cu.StreamGetGreenCtx(handle, &green) || green || cu.StreamGetCtx(handle, &context)) return NULL;
  if (!(s = calloc(1, sizeof *s))) return NULL;
  *s = (stream){.next = streams, .id = id, .handle = handle, .context = context, .now = 1};
  s->of_thread = handle == (void *)PER_THREAD;
  int result = cu.CtxPush(context);
  if (!result) {
    result = cu.CtxGetDevice(&s->device);
    cu.CtxPop(&context);
  }
  if (result) return free(s), NULL;
  only_stream = !streams;
  return streams = s;
}

/* Have an event tell when the stream is done with what was freed in it so far. Its context is the current one. */
static int record(stream *s) {
  if (!s->event && cu.EventCreate(&s->event, WITHOUT_TIMES)) return s->event = NULL, -1;
  if (cu.EventRecord(s->event, s->handle)) return -1;
  s->recorded = s->now++;
  return 0;
}

static int can_be_asked(const stream *s) { return !s->of_thread && !s->destroyed && !is_captured(s->handle); }

/* Find out how far the streams have come. */
static void ask_streams(void) {
  void *before;
  for (stream *s = streams; s; s = s->next) {
    if (!s->held || cu.CtxPush(s->context)) continue;
    if (s->recorded && !cu.EventQuery(s->event)) {
      s->done = s->recorded;
      s->recorded = 0;
    }
    if (!s->recorded && can_be_asked(s)) {
      if (!cu.StreamQuery(s->handle)) s->done = s->now++;
      else record(s);
    }
    cu.CtxPop(&before);
  }
}

/* Have an event for all that was freed in the other streams, and let `by` wait for it; or, without `by`, wait here. */
static void wait_for_streams(pool *p, stream *by) {
  void *before;
  for (stream *s = streams; s; s = s->next) {
    if (!s->held || s == by || cu.CtxPush(s->context)) continue;
    if (can_be_asked(s)) record(s);
    if (s->recorded && s->recorded + 1 == s->now) {
      if (by && !cu.StreamWaitEvent(by->handle, s->event, 0)) hand_on(p, s, by);
      if (!by && !cu.EventSynchronize(s->event)) {
        s->done = s->recorded;
        s->recorded = 0;
      }
    }
    cu.CtxPop(&before);
  }
}

/* A stream that is about to be destroyed: what waits for it waits for an event from now on. */
static void note_end(stream *s) {
  void *before;
  if (s->held && !s->of_thread && !cu.CtxPush(s->context)) {
    if (!is_captured(s->handle)) record(s);
    cu.CtxPop(&before);
  }
  s->destroyed = 1;
}

int own_cuStreamDestroy_v2(void *handle) {
  uint64_t id;
  pthread_mutex_lock(&busy);
  stream *s = streams && !cu.StreamGetId(handle, &id) ? known_stream(id) : NULL;
  if (s) note_end(s);
  pthread_mutex_unlock(&busy);
  return cu.StreamDestroy(handle);
}

/* Streams that are about to end with their context, as events do: they are waited for. */
static void end_streams(void *context, int device) {
  void *before;
  pthread_mutex_lock(&busy);
  for (stream *s = streams; s; s = s->next) {
    if ((context ? s->context != context : s->device != device) || cu.CtxPush(s->context)) continue;
    if (can_be_asked(s)) cu.StreamSynchronize(s->handle); /* one that is captured would lose its graph by that */
    else if (s->recorded) cu.EventSynchronize(s->event);
    if (s->event) cu.EventDestroy(s->event);
    s->event = NULL;
    s->recorded = 0;
    s->done = s->now++;
    s->destroyed = 1;
    cu.CtxPop(&before);
  }
  pthread_mutex_unlock(&busy);
}

int own_cuCtxDestroy_v2(void *context) {
  if (context) end_streams(context, 0);
  return cu.CtxDestroy(context);
}

int own_cuDevicePrimaryCtxReset_v2(int device) {
  end_streams(NULL, device);
  int result = cu.PrimaryReset(device);
  if (!result) forget_managed(device);
  return result;
}

int own_cuDevicePrimaryCtxRelease_v2(int device) {
  if (is_last_release(device)) end_streams(NULL, device);
  return cu.PrimaryRelease(device);
}

/* -- pools */

static pool *new_pool(void *handle, int device, uint64_t most) {
  pool *p = calloc(1, sizeof *p);
  if (!p) return NULL;
  *p = (pool){.next = pools, .handle = handle, .device = device, .most = most};
  cu.PoolGetAttribute(handle, RELEASE_THRESHOLD, &p->threshold);
  return pools = p;
}

/* Return what is known of a pool; NULL where it is one of those that are left to the driver. */
static pool *pool_of(void *handle) {
  int devices = 0;
  pool *p = pools;
  while (p && p->handle != handle) p = p->next;
  if (p || !handle || cu.DeviceCount(&devices)) return p;
  for (int device = 0; device < devices && is_at_work(device); device++) {
    void *own = NULL;
    if (!cu.DeviceGetDefaultMemPool(&own, device) && own == handle) return new_pool(handle, device, 0);
  }
  return NULL;
}

/* Give back what nothing uses: of all pools, or of one device's, as far as they have more than they are to keep. */
static void release(int device, int all) {
  for (pool *p = pools; p; p = p->next) {
    if (device >= 0 && p->device != device) continue;
    uint64_t keep = all ? 0 : p->threshold;
    if (p->reserved <= keep) continue;
    merge_settled(p);
    release_pieces(p, keep);
  }
  for (pool **at = &pools; *at;) {
    pool *p = *at;
    if (!p->destroyed || p->reserved) {
      at = &p->next;
      continue;
    }
    *at = p->next;
    close_pool(p);
    free(p);
  }
}

static int begin_slow_way(void) {
  int mode = RELAXED; /* a capture in another thread must not forbid what is done here */
  cu.ExchangeCaptureMode(&mode);
  return mode;
}

/* The driver gives back what pools keep too much of when a program waits for the GPU. */
static void release_excess(void) {
  pthread_mutex_lock(&busy);
  int mode = begin_slow_way(), more = 0;
  ask_streams();
  release(-1, 0);
  for (stream *s = streams; s; s = s->next) more |= s->held && s->done + 1 < s->now;
  excess = more;
  cu.ExchangeCaptureMode(&mode);
  pthread_mutex_unlock(&busy);
}

/* Give back all that nothing uses, since there is no memory left; tell whether it was any. */
int give_back_pooled(void) {
  uint64_t before = 0, after = 0;
  if (!highest_address) return 0;
  pthread_mutex_lock(&busy);
  int mode = begin_slow_way();
  for (pool *p = pools; p; p = p->next) before += p->reserved;
  ask_streams();
  release(-1, 1);
  for (pool *p = pools; p; p = p->next) after += p->reserved;
  cu.ExchangeCaptureMode(&mode);
  pthread_mutex_unlock(&busy);
  return after < before;
}

static block *add_and_take(pool *p, stream *by, uint64_t size) {
  return grow(p, by, size) ? NULL : take_block(p, by, size);
}

static block *take_slowly(pool *p, stream *by, uint64_t size) {
  block *b;
  ask_streams();
  merge_settled(p);
  if ((b = take_block(p, by, size)) || (b = add_and_take(p, by, size))) return b;
  release(p->device, 1);
  if ((b = add_and_take(p, by, size))) return b;
  wait_for_streams(p, by);
  if ((b = take_block(p, by, size)) || (b = add_and_take(p, by, size))) return b;
  wait_for_streams(p, NULL);
  release(p->device, 1);
  return add_and_take(p, by, size);
}

/* -- what programs call */

/* Allocate from a pool, or from the one that is its device's now; NOT_SUPPORTED where that is the driver's to do. */
static int allocate(uint64_t *address, size_t size, void *handle, void *in) {
  if (!address || !size || size > (size_t)1 << 44 || is_captured(in)) return NOT_SUPPORTED;
  int result = NOT_SUPPORTED;
  pthread_mutex_lock(&busy);
  stream *by = stream_of(in);
  if (by && !handle) cu.DeviceGetMemPool(&handle, by->device);
  pool *p = by ? pool_of(handle) : NULL;
  if (p) {
    block *b = take_block(p, by, size);
    if (!b) {
      int mode = begin_slow_way();
      b = take_slowly(p, by, size);
      if (by->of_thread && by->held) record(by); /* what is left over, or was another stream's, is its own now */
      cu.ExchangeCaptureMode(&mode);
    }
    if (b) *address = b->address;
    result = b ? OK : p->most ? OUT_OF_MEMORY : NOT_SUPPORTED;
  }
  pthread_mutex_unlock(&busy);
  return result;
}

int own_cuMemAllocAsync(uint64_t *address, size_t size, void *in) {
  int result = allocate(address, size, NULL, in);
  return result == NOT_SUPPORTED ? cu.AllocAsync(address, size, in) : result;
}

int own_cuMemAllocFromPoolAsync(uint64_t *address, size_t size, void *from, void *in) {
  int result = from ? allocate(address, size, from, in) : NOT_SUPPORTED;
  return result == NOT_SUPPORTED ? cu.AllocFromPoolAsync(address, size, from, in) : result;
}

int own_cuMemFreeAsync(uint64_t address, void *in) {
  int ours = 0;
  if (may_be_ours(address) && !is_captured(in)) {
    pthread_mutex_lock(&busy);
    block *b = used_block(address);
    stream *s = b ? stream_of(in) : NULL;
    if ((ours = s != NULL)) {
      pool *p = b->area->pool;
      give_back_block(b, s);
      if (s->of_thread) record(s);
      if (p->reserved > p->threshold) excess = 1;
    }
    pthread_mutex_unlock(&busy);
  }
  if (ours) return OK;
  /* Other memory may be freed this way, too. */
  if (!is_block(address) && !managed_range(address, NULL, NULL)) return cu.FreeAsync(address, in);
  int result = cu.StreamSynchronize(in);
  return result ? result : own_cuMemFree_v2(address);
}

/* What is said of the default stream is meant of the thread's own. */
static void *of_thread(void *in) { return in ? in : (void *)PER_THREAD; }

int own_cuMemAllocAsync_ptsz(uint64_t *address, size_t size, void *in) {
  return own_cuMemAllocAsync(address, size, of_thread(in));
}

int own_cuMemAllocFromPoolAsync_ptsz(uint64_t *address, size_t size, void *from, void *in) {
  return own_cuMemAllocFromPoolAsync(address, size, from, of_thread(in));
}

int own_cuMemFreeAsync_ptsz(uint64_t address, void *in) { return own_cuMemFreeAsync(address, of_thread(in)); }

/* Tell whether an address is the beginning of a block. */
int is_pooled(uint64_t address) {
  if (!may_be_ours(address)) return 0;
  pthread_mutex_lock(&busy);
  int is = used_block(address) != NULL;
  pthread_mutex_unlock(&busy);
  return is;
}

/* Free a block that nothing uses any more. */
void free_pooled(uint64_t address) {
  pthread_mutex_lock(&busy);
  block *b = used_block(address);
  if (b) {
    const pool *p = b->area->pool;
    give_back_block(b, NULL);
    if (p->reserved > p->threshold) excess = 1;
  }
  pthread_mutex_unlock(&busy);
}

/* Say which block an address is in, and of which pool; tell whether it is in any. An address that is a pool's and in no
 * block becomes one that the driver does not know. */
int pooled_range(uint64_t *address, uint64_t *base, size_t *size, void **of) {
  if (!may_be_ours(*address)) return 0;
  pthread_mutex_lock(&busy);
  const block *b = block_around(pools, *address);
  int is_used = b && b->state == USED;
  if (b && !is_used) *address = NOWHERE;
  if (is_used && base) *base = b->address;
  if (is_used && size) *size = b->asked;
  if (is_used && of) *of = b->area->pool->handle;
  pthread_mutex_unlock(&busy);
  return is_used;
}

static int is_range(int attribute) { return attribute == RANGE_START || attribute == RANGE_SIZE; }

/* What is to be said of a pointer, where the driver sees other memory than the program. */
typedef struct { int is_pooled, is_mapped; uint64_t base; size_t size; void *of; } said;

/* An address becomes one that the driver is to be asked about. */
static said what_is_said(uint64_t *address, unsigned count, const int *attributes) {
  said s = {0};
  int ranges = 0;
  for (unsigned i = 0; i < count; i++) ranges |= is_range(attributes[i]);
  s.is_pooled = pooled_range(address, &s.base, &s.size, &s.of);
  s.is_mapped = !s.is_pooled && ranges && mapped_range(*address, &s.base, &s.size);
  return s;
}

/* Change what the driver says of a block: it sees the memory that the block is in, or a part of it. */
static void correct(void *data, int attribute, const said *s) {
  if ((s->is_pooled || s->is_mapped) && attribute == RANGE_START) *(uint64_t *)data = s->base;
  if ((s->is_pooled || s->is_mapped) && attribute == RANGE_SIZE) *(size_t *)data = s->size;
  if (s->is_pooled && attribute == POOL_OF_POINTER) *(void **)data = s->of;
  if (s->is_pooled && attribute == ALLOWED_HANDLES) *(uint64_t *)data = 0;
}

int own_cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
  said s = what_is_said(&address, 1, &attribute);
  int result = cu.PointerGetAttribute(data, attribute, address);
  if (!result) correct(data, attribute, &s);
  return result;
}

int own_cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t address) {
  said s = what_is_said(&address, attributes ? count : 0, attributes);
  int result = cu.PointerGetAttributes(count, attributes, data, address);
  for (unsigned i = 0; !result && i < count; i++) correct(data[i], attributes[i], &s);
  return result;
}

#define SYNCHRONIZES(name, real, type) \
  int own_##name(type what) { \
    int result = cu.real(what); \
    if (excess) release_excess(); \
    return result; \
  }
SYNCHRONIZES(cuStreamSynchronize, StreamSynchronize, void *)
SYNCHRONIZES(cuEventSynchronize, EventSynchronize, void *)
SYNCHRONIZES(cuCtxSynchronize_v2, CtxSynchronize2, void *)

int own_cuStreamSynchronize_ptsz(void *in) { return own_cuStreamSynchronize(of_thread(in)); }

int own_cuCtxSynchronize(void) {
  int result = cu.CtxSynchronize();
  if (excess) release_excess();
  return result;
}

int own_cuMemPoolCreate(void **handle, const pool_props *props) {
  int result = cu.PoolCreate(handle, props);
  if (!result && props->place.type != ON_DEVICE) is_on_host = 1;
  if (!result && props->type == PINNED && !props->handle_types && props->place.type == ON_DEVICE && !props->usage &&
      is_at_work(props->place.id)) {
    pthread_mutex_lock(&busy);
    new_pool(*handle, props->place.id, props->most);
    pthread_mutex_unlock(&busy);
  }
  return result;
}

int own_cuMemPoolDestroy(void *handle) {
  int result = cu.PoolDestroy(handle);
  if (result) return result;
  pthread_mutex_lock(&busy);
  pool *p = pools;
  while (p && p->handle != handle) p = p->next;
  if (p) {
    p->handle = NULL;
    p->destroyed = 1;
    p->threshold = 0;
  }
  pthread_mutex_unlock(&busy);
  if (p) release_excess();
  return result;
}

int own_cuMemPoolTrimTo(void *handle, size_t keep) {
  int result = cu.PoolTrimTo(handle, keep);
  if (result) return result;
  pthread_mutex_lock(&busy);
  int mode = begin_slow_way();
  pool *p = pool_of(handle);
  if (p) {
    ask_streams();
    merge_settled(p);
    release_pieces(p, keep);
  }
  cu.ExchangeCaptureMode(&mode);
  pthread_mutex_unlock(&busy);
  return result;
}

int own_cuMemPoolSetAttribute(void *handle, int attribute, void *value) {
  int result = cu.PoolSetAttribute(handle, attribute, value);
  if (result || (attribute != RELEASE_THRESHOLD && attribute != RESERVED_HIGH && attribute != USED_HIGH)) return result;
  pthread_mutex_lock(&busy);
  pool *p = pool_of(handle);
  if (p && attribute == RELEASE_THRESHOLD) {
    p->threshold = *(uint64_t *)value;
    if (p->reserved > p->threshold) excess = 1;
  }
  if (p && attribute == RESERVED_HIGH) p->reserved_high = p->reserved;
  if (p && attribute == USED_HIGH) p->used_high = p->used;
  pthread_mutex_unlock(&busy);
  return result;
}

/* What captured streams allocated of a pool, the driver knows of. */
int own_cuMemPoolGetAttribute(void *handle, int attribute, void *value) {
  int result = cu.PoolGetAttribute(handle, attribute, value);
  if (result || attribute < RESERVED_NOW || attribute > USED_HIGH) return result;
  pthread_mutex_lock(&busy);
  const pool *p = pool_of(handle);
  if (p) {
    const uint64_t ours[] = {p->reserved, p->reserved_high, p->used, p->used_high};
    *(uint64_t *)value += ours[attribute - RESERVED_NOW];
  }
  pthread_mutex_unlock(&busy);
  return result;
}

int own_cuMemPoolSetAccess(void *handle, const access_desc *access, size_t count) {
  int result = cu.PoolSetAccess(handle, access, count);
  if (result) return result;
  pthread_mutex_lock(&busy);
  pool *p = pool_of(handle);
  for (size_t i = 0; p && !result && i < count; i++)
    if (access[i].flags) result = give_access(p, &access[i]);
  pthread_mutex_unlock(&busy);
  return result;
}
