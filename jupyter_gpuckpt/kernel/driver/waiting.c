/* Waiting until the GPUs have done what this process gave them, for no longer than the keeper has time.
 *
 * The driver's own wait has no limit, and what is waited for may need a call that stands at the gate: a collective of
 * several GPUs that was launched on one of them so far. So a thread of its own waits in the driver. Where the time is over,
 * it is left there, and ends when the GPUs are done.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST_NAP = 1000 }; /* in microseconds */

static int at_work, found; /* whether there is such a thread; what the driver said to it */

void forget_waiting(void) { at_work = 0; }

static int wait_for_one(int device) {
  void *context, *left;
  unsigned flags;
  int active;
  if (cu.PrimaryState(device, &flags, &active) || !active) return 0;
  int result = cu.PrimaryRetain(&context, device);
  if (result) return result;
  if (!(result = cu.CtxPush(context))) {
    result = cu.CtxSynchronize();
    cu.CtxPop(&left);
  }
  cu.PrimaryRelease(device);
  return result;
}

static void *wait_for_all(void *nothing) {
  int count, result = cu.DeviceCount(&count);
  for (int device = 0; !result && device < count; device++) result = wait_for_one(device);
  found = result;
  __atomic_store_n(&at_work, 0, __ATOMIC_SEQ_CST);
  return nothing;
}

/* Tell whether the thread ends before this time. */
static int ends_before(const struct timespec *end) {
  struct timespec now;
  for (useconds_t nap = 20; __atomic_load_n(&at_work, __ATOMIC_SEQ_CST); nap = nap < LONGEST_NAP ? 2 * nap : nap) {
    if (clock_gettime(CLOCK_MONOTONIC, &now) || now.tv_sec > end->tv_sec ||
        (now.tv_sec == end->tv_sec && now.tv_nsec > end->tv_nsec))
      return 0;
    usleep(nap);
  }
  return 1;
}

int wait_for_gpus(int milliseconds) {
  struct timespec end;
  pthread_t thread;
  if (!cu.DeviceCount || clock_gettime(CLOCK_MONOTONIC, &end)) return 0;
  end.tv_nsec += milliseconds % 1000 * 1000000L;
  end.tv_sec += milliseconds / 1000 + end.tv_nsec / 1000000000L;
  end.tv_nsec %= 1000000000L;
  if (!ends_before(&end)) return STILL_AT_WORK;
  at_work = 1;
  if (pthread_create(&thread, NULL, wait_for_all, NULL)) return at_work = 0, OUT_OF_MEMORY;
  pthread_setname_np(thread, "gpuckpt-waiting");
  if (!ends_before(&end)) return pthread_detach(thread), STILL_AT_WORK;
  pthread_join(thread, NULL);
  return found;
}
