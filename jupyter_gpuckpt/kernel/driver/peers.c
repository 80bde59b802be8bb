/* GPUs of one process that may use each other's memory: not while the driver has the process's GPU state.
 *
 * The driver checkpoints a process in which they may, and loses it at the restore. Its own peer access (of small
 * allocations, which the driver makes) can be taken away and given back, and so can access to memory of the virtual
 * memory API (memory.c).
 */
#include "driver.h"

#include <stdio.h>

enum { ALREADY_ENABLED = 704, NOT_ENABLED = 705 };

static unsigned char had_access[MOST_DEVICES][MOST_DEVICES]; /* the first to memory of the second */
static int was_asked_for;

int own_cuCtxEnablePeerAccess(void *peer, unsigned flags) {
  int result = cu.EnablePeerAccess(peer, flags);
  void *left;
  if (!result) was_asked_for = 1;
  if (!result) result = join_current();
  if (!result && !(result = cu.CtxPush(peer))) {
    result = join_current();
    cu.CtxPop(&left);
  }
  return result;
}

int was_peer_access_asked_for(void) { return was_asked_for; }

/* Wait until all that these contexts were given is done, which may need the access. */
static int wait_for_all(void *const contexts[MOST_DEVICES]) {
  int result = 0;
  void *left;
  for (int device = 0; !result && device < MOST_DEVICES; device++) {
    if (!contexts[device] || (result = cu.CtxPush(contexts[device]))) continue;
    result = cu.CtxSynchronize();
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
    for (int to = 0; !result && to < MOST_DEVICES; to++) {
      if (to == from || !contexts[to] || (!apart && !had_access[from][to])) continue;
      result = apart ? cu.DisablePeerAccess(contexts[to]) : cu.EnablePeerAccess(contexts[to], 0);
      if (apart && !result) had_access[from][to] = 1;
      if (apart && !result && largest_left > MOST_LEFT) result = NOT_SUPPORTED;
      if (result == (apart ? NOT_ENABLED : ALREADY_ENABLED)) result = 0;
      if (!apart && !result) had_access[from][to] = 0;
    }
    cu.CtxPop(&left);
  }
  return result;
}

/* How many GPUs there are; 0 where there are not several, or too many. */
static int count_several(int *result) {
  int count;
  *result = cu.DeviceCount(&count);
  return *result || count < 2 || count > MOST_DEVICES ? 0 : count;
}

/* Retain the primary contexts of those that are in use. */
static int retain_all(void *contexts[MOST_DEVICES], int count) {
  int active, result = 0;
  unsigned flags;
  for (int device = 0; !result && device < count; device++)
    if (!cu.PrimaryState(device, &flags, &active) && active) result = cu.PrimaryRetain(&contexts[device], device);
  return result;
}

static void release_all(void *const contexts[MOST_DEVICES]) {
  for (int device = 0; device < MOST_DEVICES; device++)
    if (contexts[device]) cu.PrimaryRelease(device);
}

/* Keep the GPUs apart, or bring them together again, while no call of the program's is under way: where memory `is_parked`
 * its threads are held, else the gate is shut. Returns 0, a CUresult, or -1 where it is not shut any more. */
int keep_gpus_apart(int apart, int is_parked) {
  void *contexts[MOST_DEVICES] = {NULL};
  int result, count = count_several(&result);
  if (!count) return result;
  result = retain_all(contexts, count);
  if (!result && apart) result = wait_for_all(contexts);
  if (!result && apart && !is_parked && !is_gate_shut()) result = -1; /* that took so long that the keeper gave up */
  if (!result) result = switch_access(contexts, apart);
  if (!result) result = keep_memory_apart(apart, is_parked);
  release_all(contexts);
  return result;
}

void bring_gpus_together(int is_parked) {
  int result = keep_gpus_apart(0, is_parked);
  if (result)
    fprintf(stderr, "gpuckpt: GPUs of this process cannot access each other's memory again (CUresult %d)\n", result);
}
