/* Where the driver is, and whether this library may do more in this process than pass calls on to it. */
#define _GNU_SOURCE
#include "driver.h"

#include "channel.h"

#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DRIVER "libcuda.so.1"
extern char **environ;

static int is_64_bit(const char *path) {
  unsigned char head[EI_NIDENT];
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  int is = read(fd, head, sizeof head) == sizeof head && !memcmp(head, ELFMAG, SELFMAG) && head[EI_CLASS] == ELFCLASS64;
  close(fd);
  return is;
}

static int is_in(const char *folder, size_t length, char *path) {
  return length && snprintf(path, PATH_MAX, "%.*s/" DRIVER, (int)length, folder) < PATH_MAX && is_64_bit(path);
}

/* Look among the paths that the cache of ld.so(8) has as text. */
static int is_in_cache(char *path) {
  struct stat status;
  int found = 0, fd = open("/etc/ld.so.cache", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  size_t size = fstat(fd, &status) ? 0 : (size_t)status.st_size;
  const char *cache = size ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
  close(fd);
  if (cache == MAP_FAILED) return 0;
  const char end[] = "/" DRIVER; /* with the 0 after it */
  for (const char *at = cache; !found && (at = memmem(at, size - (size_t)(at - cache), end, sizeof end)); at++) {
    const char *first = at;
    while (first > cache && first[-1]) first--;
    found = *first == '/' && is_in(first, (size_t)(at - first), path);
  }
  munmap((void *)cache, size);
  return found;
}

/* Write the path of what a program would find as libcuda.so.1, without this library; tell whether there is one. `next` is
 * its LD_LIBRARY_PATH. */
static int find_driver_by(const char *next, char *path) {
  static const char *const folders[] = {"/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu"};
  while (next) {
    size_t length = strcspn(next, ":;");
    if (is_in(next, length, path)) return 1;
    next = next[length] ? next + length + 1 : NULL;
  }
  if (is_in_cache(path)) return 1;
  for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
    if (is_in(folders[i], strlen(folders[i]), path)) return 1;
  return 0;
}

int find_driver(char *path) { return find_driver_by(getenv("LD_LIBRARY_PATH"), path); }

/* Tell whether a program with this LD_LIBRARY_PATH would find a driver. */
PUBLIC int gpuckpt_has_driver(const char *folders) {
  char path[PATH_MAX];
  return find_driver_by(folders, path);
}

/* A debugger wants the driver for itself. */
static int is_traced(void) {
  char text[4096];
  int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t size = read(fd, text, sizeof text - 1);
  close(fd);
  text[size > 0 ? size : 0] = 0;
  const char *tracer = strstr(text, "\nTracerPid:");
  return tracer && atoi(tracer + strlen("\nTracerPid:")) != 0;
}

/* So do NVIDIA's profilers and compute-sanitizer, which have programs load their libraries by these variables. */
static int has_tool(void) {
  static const char *const tools[] = {"CUDA_INJECTION64_PATH", "NV_SANITIZER_"};
  for (char **one = environ; one && *one; one++)
    for (size_t i = 0; i < sizeof tools / sizeof *tools; i++)
      if (!strncmp(*one, tools[i], strlen(tools[i]))) return 1;
  return 0;
}

int is_wanted(void) {
  const char *parking = getenv("GPUCKPT_PARKING");
  return !(parking && !strcmp(parking, "off")) && run_folder() && !has_tool() && !is_traced();
}
