/* How all ranks come to one point, between two operations of theirs, where no communicator is in use.
 *
 * Every call counts itself. The keeper stops all ranks, asks each for its counts, and has those go on that have begun
 * fewer than another one. Where all counts agree, every operation that was begun on one rank was begun on all, and ends.
 * Then the communicators are taken down, and calls wait at the gate until the keeper has them made again.
 *
 * A thread of this process waits for the keeper, in the opening of a FIFO: such a process can be saved at any time, and
 * a restored one, whose run folder is another, finds that the FIFO is not there any more and makes it again.
 */
#define _GNU_SOURCE
#include "communicators.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PROTOCOL = 1, LINE = 1024, MOST_KEYS = 4096 };

/* OPEN: calls go on. STOPPING: those go on that some rank has begun already. SETTLING: none begins, and those that were
 * begun are waited for. QUIET: nothing is in use. GONE: the communicators are taken down, or are just being taken down. */
typedef enum { OPEN, STOPPING, SETTLING, QUIET, GONE } phase;
static const char *const NAMES[] = {"open", "stopping", "settling", "quiet", "gone"};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
_Thread_local int group_depth, inside;
static _Thread_local int changes_in_group;

static phase now;
static int in_flight, open_groups, changes, working, error;
static struct { uint64_t key; unique_id id; } fresh[MOST_KEYS];
static int fresh_count;

/* -- the gate */

/* Tell whether another rank waits for what this one has not begun yet. */
static int is_behind(void) {
  for (comm *c = comms; c; c = c->next)
    for (size_t i = 0; i < counts_of(c); i++)
      if (c->counts[i] < c->limits[i]) return 1;
  return 0;
}

static void pass(void) {
  while (now != OPEN && !(now == STOPPING && is_behind())) pthread_cond_wait(&changed, &lock);
  in_flight++;
}

static void leave(void) {
  in_flight--;
  if (now != OPEN) pthread_cond_broadcast(&changed);
}

/* Begin an operation; in a group, which is one step for the gate, it has passed already, as where it is not to wait.
 * Returns an error to give in its place. */
int begin_call(call what, int waits) {
  pthread_mutex_lock(&lock);
  if (waits && !group_depth) pass();
  if (what.comm->real) complete(what.comm);
  what.comm->counts[count_of(what.comm, what.peer, what.is_receive)]++;
  int result = what.comm->real ? SUCCESS : REMOTE_ERROR;
  pthread_mutex_unlock(&lock);
  inside++;
  return result;
}

void end_call(int waited) {
  inside--;
  if (!waited || group_depth) return;
  pthread_mutex_lock(&lock);
  leave();
  pthread_mutex_unlock(&lock);
}

/* Tell whether the communicators are taken down, and will be back. */
int is_away(void) { return now == GONE; }

void begin_group(void) {
  if (group_depth++) return;
  pthread_mutex_lock(&lock);
  pass();
  open_groups++;
  pthread_mutex_unlock(&lock);
}

/* The group is complete: what follows may wait for other ranks. */
void close_group(void) {
  if (group_depth != 1) return;
  pthread_mutex_lock(&lock);
  open_groups--;
  pthread_mutex_unlock(&lock);
}

void end_group(void) {
  if (!group_depth || --group_depth) return;
  pthread_mutex_lock(&lock);
  changes -= changes_in_group;
  changes_in_group = 0;
  leave();
  pthread_mutex_unlock(&lock);
}

/* Begin to make or to end a communicator, which all its ranks do together. */
void begin_change(void) {
  pthread_mutex_lock(&lock);
  if (!group_depth) pass();
  changes++;
  pthread_mutex_unlock(&lock);
  inside++;
}

void end_change(void) {
  inside--;
  pthread_mutex_lock(&lock);
  if (group_depth) changes_in_group++;
  else changes--, leave();
  pthread_mutex_unlock(&lock);
}

/* -- what takes long, in a thread of its own: the keeper must be heard meanwhile */

static void *settle(void *nothing) {
  pthread_mutex_lock(&lock);
  while (in_flight && now == SETTLING) pthread_cond_wait(&changed, &lock);
  int given_up = now != SETTLING;
  pthread_mutex_unlock(&lock);
  int result = given_up ? 0 : wait_for_gpus();
  pthread_mutex_lock(&lock);
  if (now == SETTLING) {
    error = result;
    if (!result) now = QUIET;
  }
  working = 0;
  pthread_mutex_unlock(&lock);
  return nothing;
}

static void *destroy(void *nothing) {
  inside++;
  int gpu = be_on_gpu(), result = take_down();
  pthread_mutex_lock(&lock);
  error = result;
  working = 0;
  pthread_mutex_unlock(&lock);
  leave_gpu(gpu);
  return nothing;
}

static int by_key(const void *a, const void *b) {
  uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
  return one < other ? -1 : one > other;
}

/* Make all of them again: in the same order everywhere, so that no two ranks wait for each other. */
static void *create(void *nothing) {
  int result = SUCCESS, gpu = be_on_gpu();
  inside++;
  qsort(fresh, (size_t)fresh_count, sizeof *fresh, by_key);
  for (int i = 0; !result && i < fresh_count; i++) result = make_again(fresh[i].key, &fresh[i].id);
  leave_gpu(gpu);
  pthread_mutex_lock(&lock);
  error = result;
  if (now == GONE) now = OPEN;
  working = 0;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return nothing;
}

static int start(void *(*work)(void *)) {
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  int result = pthread_create(&thread, &attributes, work, NULL);
  pthread_attr_destroy(&attributes);
  return result;
}

static void work(void *(*what)(void *)) {
  working = 1;
  if (start(what)) working = 0, error = EAGAIN;
}

/* -- the keeper */

static void tell_state(FILE *to) {
  fprintf(to, "state %d %s %d %d %d\n", PROTOCOL, NAMES[now], working, error, changes + open_groups);
  fprintf(to, "late %d\n", is_behind() && !in_flight);
  for (comm *c = comms; c; c = c->next) {
    if (now != GONE) complete(c);
    if (!is_shared(c)) continue;
    fprintf(to, "comm %016" PRIx64 " %d %d %d %d", c->key, c->rank, c->size, c->device, c->reasons | (uses_own_memory ? REGISTERED : 0));
    for (size_t i = 0; i < counts_of(c); i++)
      if (c->counts[i] || c->limits[i]) fprintf(to, " %zu=%" PRIu64, i, c->counts[i]);
    fputc('\n', to);
  }
}

static void set_limit(const char *line) {
  uint64_t key, count;
  size_t index;
  int rank;
  if (sscanf(line, "limit %" SCNx64 " %d %zu %" SCNu64, &key, &rank, &index, &count) != 4) return;
  for (comm *c = comms; c; c = c->next)
    if (c->key == key && c->rank == rank && index < counts_of(c)) c->limits[index] = count;
  pthread_cond_broadcast(&changed);
}

/* A communicator's first rank names the place where all meet. */
static void tell_ids(FILE *to) {
  int (*get)(unique_id *) = real_function("ncclGetUniqueId");
  unique_id id;
  int gpu = be_on_gpu();
  for (comm *c = comms; c; c = c->next) {
    if (c->rank || c->real) continue;
    inside++;
    int result = get(&id);
    inside--;
    if (result) continue; /* the keeper misses it */
    fprintf(to, "id %016" PRIx64 " ", c->key);
    for (size_t i = 0; i < sizeof id; i++) fprintf(to, "%02x", (unsigned char)id.bytes[i]);
    fputc('\n', to);
  }
  leave_gpu(gpu);
}

static void take_id(const char *line) {
  char text[2 * sizeof(unique_id) + 1];
  if (fresh_count == MOST_KEYS) return;
  if (sscanf(line, "id %" SCNx64 " %256s", &fresh[fresh_count].key, text) != 2 || strlen(text) != 2 * sizeof(unique_id)) return;
  for (size_t i = 0; i < sizeof(unique_id); i++) sscanf(text + 2 * i, "%2hhx", (unsigned char *)&fresh[fresh_count].id.bytes[i]);
  fresh_count++;
}

/* Let the calls go on. Communicators that are not there give an error, as if a rank of theirs had ended. */
static void open_gate(void) {
  now = OPEN;
  for (comm *c = comms; c; c = c->next) memcpy(c->limits, c->counts, counts_of(c) * sizeof *c->limits);
  pthread_cond_broadcast(&changed);
}

/* A line is a number of the keeper's, which is in the answer, and what is to be done. */
static void obey(const char *line, FILE *to) {
  int length = 0;
  unsigned long number;
  if (sscanf(line, "%lu %n", &number, &length) != 1) return;
  line += length;
  pthread_mutex_lock(&lock);
  fprintf(to, "begin %lu\n", number);
  if (!strcmp(line, "state")) tell_state(to);
  else if (!strcmp(line, "stop") && now == OPEN && !working) {
    now = STOPPING;
    error = 0;
    for (comm *c = comms; c; c = c->next) memset(c->limits, 0, counts_of(c) * sizeof *c->limits);
  } else if (!strncmp(line, "limit ", 6) && now == STOPPING) set_limit(line);
  else if (!strcmp(line, "settle") && now == STOPPING && !working) {
    now = SETTLING;
    work(settle);
  } else if (!strcmp(line, "destroy") && now == QUIET && !working) {
    now = GONE; /* before it is done: nobody may ask a communicator that is being ended */
    work(destroy);
  }
  else if (!strcmp(line, "ids") && now == GONE && !working) {
    fresh_count = 0;
    tell_ids(to);
  } else if (!strncmp(line, "id ", 3) && now == GONE && !working) take_id(line);
  else if (!strcmp(line, "create") && now == GONE && !working) work(create);
  else if (!strcmp(line, "open") && now != GONE) open_gate();
  else if (!strcmp(line, "lost")) open_gate();
  fprintf(to, "end %lu\n", number);
  pthread_mutex_unlock(&lock);
}

static void talk(int from, const char *path) {
  char line[LINE];
  size_t length = 0;
  ssize_t got;
  int fd = open(path, O_RDWR | O_CLOEXEC); /* a keeper may come after another one, in the same conversation */
  FILE *to = fd < 0 ? NULL : fdopen(fd, "w");
  while (to && ((got = read(from, line + length, 1)) == 1 || (got < 0 && errno == EINTR))) {
    if (got != 1) continue;
    if (line[length] != '\n') {
      if (length < sizeof line - 1) length++;
      continue;
    }
    line[length] = 0;
    length = 0;
    obey(line, to);
    if (fflush(to)) break;
  }
  if (to) fclose(to);
  pthread_mutex_lock(&lock);
  if (now != GONE) open_gate(); /* the keeper has ended, or has given up */
  pthread_mutex_unlock(&lock);
}

static void *listen_to_keeper(void *folder) {
  char path[PATH_MAX], answers[PATH_MAX + 8];
  snprintf(path, sizeof path, "%s/nccl-%d", (char *)folder, (int)getpid());
  snprintf(answers, sizeof answers, "%s.said", path);
  for (;;) {
    if ((mkfifo(answers, 0600) && errno != EEXIST) || (mkfifo(path, 0600) && errno != EEXIST)) return NULL;
    int from = open(path, O_RDONLY | O_CLOEXEC);
    if (from < 0 && (errno == EINTR || errno == ENOENT)) continue;
    if (from < 0) return NULL;
    talk(from, answers);
    close(from);
  }
}

static void take_lock(void) { pthread_mutex_lock(&lock); }
static void release_lock(void) { pthread_mutex_unlock(&lock); }

/* A forked child has none of its parent's threads, and cannot use its communicators. */
static void begin_in_child(void) {
  now = OPEN;
  in_flight = open_groups = changes = working = 0;
  comms = NULL;
  pthread_cond_init(&changed, NULL); /* its parent's threads wait for nothing here */
  pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void begin(void) { pthread_atfork(take_lock, release_lock, begin_in_child); }

/* Have the keeper find this process, from the first communicator on. */
void be_reachable(void) {
  static pid_t reachable;
  char *folder = getenv("GPUCKPT_RUN_DIR");
  pthread_mutex_lock(&lock);
  if (folder && reachable != getpid()) { /* a forked child has its parent's thread no more */
    pthread_t thread;
    sigset_t all, before;
    reachable = getpid();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!pthread_create(&thread, NULL, listen_to_keeper, strdup(folder))) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
  }
  pthread_mutex_unlock(&lock);
}
