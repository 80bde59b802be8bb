/* NVML of the made-up GPUs, which have all that is asked for free, or next to nothing beside what processes have while a
 * file GPU.crowded exists; and the processes that the made-up driver is in, each of which has 4 GiB that it does not know
 * of while a file GPU.beside exists, and is said to use the first GPU alone while a file GPU.unlisted exists. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "made_up_state.h"

enum { OK, NO_ROOM = 7 };
struct memory { unsigned long long total, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned gpu, compute; };

int nvmlInit_v2(void) { return OK; }
const char *nvmlErrorString(int number) { return "no"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = atoi(getenv("MADE_UP_GPUS") ?: "1"); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(uintptr_t)index; return OK; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  unsigned b = 0xab + (uintptr_t)device;
  snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b, b, b, b, b, b, b, b, b, b, b,
           b, b, b, b, b);
  return OK;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) { strcpy(text, "Made-up GPU"); return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "1.0"); return OK; }
static uint64_t checkpointed(uintptr_t device) {
  DIR *all = opendir("/proc");
  uint64_t bytes = 0;
  struct state its;
  for (struct dirent *one; (one = readdir(all));)
    if (atoi(one->d_name) > 0 && read_state(atoi(one->d_name), &its) && its.now == CHECKPOINTED) bytes += its.bytes[device];
  closedir(all);
  return bytes;
}
static int is_there(const char *file) {
  char path[4096];
  snprintf(path, sizeof path, "%s.%s", getenv("MADE_UP_GPU"), file);
  return !access(path, F_OK);
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
  *memory = (struct memory){1ull << 40, 1ull << 40, 0};
  if (is_there("crowded")) memory->free = (32 << 20) + checkpointed((uintptr_t)device);
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *room, struct process *found) {
  unsigned long long beside = is_there("beside") ? 4ull << 30 : 0;
  DIR *all = opendir("/proc");
  unsigned count = 0, size = *room;
  struct state its;
  for (struct dirent *one; (one = readdir(all));) {
    int pid = atoi(one->d_name);
    if (device && is_there("unlisted")) continue;
    if (pid <= 0 || !read_state(pid, &its) || !its.bytes[(uintptr_t)device]) continue;
    if (count < size) found[count] = (struct process){pid, its.bytes[(uintptr_t)device] + beside};
    count++;
  }
  closedir(all);
  *room = count;
  return count > size ? NO_ROOM : OK;
}
