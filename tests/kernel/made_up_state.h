/* What the made-up driver keeps in each process, at a known address: so criu saves it with the process. */
#pragma once
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#define STATE ((struct state *)0x7a0000000000)
#define MAGIC 0x6d6164652d75700aull
enum { RUNNING, LOCKED, CHECKPOINTED };
struct state { uint64_t magic, now, peers, bytes[4]; };

static int of_process(int pid, struct state *its, int write) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/mem", pid);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t size = write ? pwrite(fd, its, sizeof *its, (off_t)STATE) : pread(fd, its, sizeof *its, (off_t)STATE);
  close(fd);
  return size == sizeof *its && its->magic == MAGIC;
}
static int read_state(int pid, struct state *its) { return of_process(pid, its, 0); }
static int write_state(int pid, struct state *its) { return of_process(pid, its, 1); }
