/* A library that is loaded first, as those of profilers and allocators are: it stands in front of `malloc` and `getppid`,
 * each of which it finds by RTLD_NEXT, and, where it is made with LOOKS_UP, of `dlsym`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>

int lookups, allocations;

void *malloc(size_t size) {
  static void *(*next)(size_t);
  if (!next) next = dlsym(RTLD_NEXT, "malloc");
  allocations++;
  return next(size);
}

pid_t getppid(void) {
  pid_t (*next)(void) = dlsym(RTLD_NEXT, "getppid");
  return next() + 1000000000;
}

#ifdef LOOKS_UP
void *dlsym(void *handle, const char *name) {
  static void *(*next)(void *, const char *);
  if (!next) next = dlvsym(RTLD_NEXT, "dlsym", LOOKS_UP);
  lookups++;
  if (handle == RTLD_NEXT) return dlvsym(RTLD_NEXT, name, LOOKS_UP); /* as if the call had come from here */
  return next(handle, name);
}
#endif
