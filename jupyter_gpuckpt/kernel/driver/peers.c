/* GPUs of one process that may use each other's memory: not while the driver has the process's GPU state.
 *
 * The driver checkpoints a process in which they may, and loses it at the restore. Its own peer access (of small
 * allocations, which the driver makes) can be taken away and given back, and so can access to memory of the virtual
 * memory API (memory.c).
 */
#include "driver.h"

enum { ALREADY_ENABLED = 704, NOT_ENABLED = 705 };
enum { MOST_LEFT = 448 << 20 }; /* with a larger allocation of the driver's there is no access again (docs/internals/cuda.md) */

static unsigned char had_access[MOST_DEVICES][MOST_DEVICES]; /* the first to memory of the second */

int own_cuCtxEnablePeerAccess(void *peer, unsigned flags) {
  int result = cu.EnablePeerAccess(peer, flags);
  void *left;
  if (!result) result = join_current();
  if (!result && !(result = cu.CtxPush(peer))) {
    result = join_current();
    cu.CtxPop(&left);
  }
  return result;
}

/* Take access of the primary contexts of those GPUs that are in use away, or give back what was taken away. */
static int switch_access(void *const contexts[MOST_DEVICES], int apart) {
  int result = 0;
  void *left;
  for (int from = 0; !result && from < MOST_DEVICES; from++) {
    if (!contexts[from] || (result = cu.CtxPush(contexts[from]))) continue;
    if (apart) result = cu.CtxSynchronize();
    for (int to = 0; !result && to < MOST_DEVICES; to++) {
      if (to == from || !contexts[to] || (!apart && !had_access[from][to])) continue;
      result = apart ? cu.DisablePeerAccess(contexts[to]) : cu.EnablePeerAccess(contexts[to], 0);
      if (apart) had_access[from][to] = !result;
      if (apart && !result && largest_left > MOST_LEFT) result = NOT_SUPPORTED;
      if (result == (apart ? NOT_ENABLED : ALREADY_ENABLED)) result = 0;
    }
    cu.CtxPop(&left);
  }
  return result;
}

/* Keep the GPUs apart, or bring them together again, in a process whose memory is parked, and which does nothing else
 * meanwhile. Returns 0 or a CUresult. */
int keep_gpus_apart(int apart) {
  void *contexts[MOST_DEVICES] = {NULL};
  int count, done, active, result = cu.DeviceCount(&count);
  unsigned flags;
  if (result || count < 2 || count > MOST_DEVICES) return result;
  for (int device = 0; !result && device < count; device++)
    if (!cu.PrimaryState(device, &flags, &active) && active) result = cu.PrimaryRetain(&contexts[device], device);
  if (!result) result = switch_access(contexts, apart);
  if (!result) result = keep_memory_apart(apart, 1, &done);
  for (int device = 0; device < count; device++)
    if (contexts[device]) cu.PrimaryRelease(device);
  return result;
}

/* The same for all memory, where Python sees to the driver's own peer access. Returns for how many mappings it was done;
 * a negative CUresult where it failed. */
PUBLIC int gpuckpt_keep_apart(int apart) {
  int done;
  lock_memory();
  int result = keep_memory_apart(apart, 0, &done);
  unlock_memory();
  return result ? -result : done;
}
