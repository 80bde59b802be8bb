/* How the keeper reaches this process.
 *
 * A thread waits for a signal (sigwait), and has nothing open meanwhile: so it can be dumped and restored anywhere, and
 * stands in nobody's way. The signal is sent to this thread alone, which blocks it, as all others: no other thread, no
 * handler of the program's ever sees one. The keeper finds it by its name in /proc, makes the FIFOs, and signals.
 */
#define _GNU_SOURCE
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { IDLE = 500000000 }; /* ns between two calls of `idle` */

static const char *name;
static void (*converse)(channel *);
static int (*idle)(void);
static void (*answer)(int);
static pid_t there; /* the process that has the thread: a forked child has none */

const char *run_folder(void) {
  static const char *folder;
  if (!folder) folder = getenv("GPUCKPT_RUN_DIR");
  return folder && *folder && !access(folder, X_OK) ? folder : NULL;
}

void say(channel *to, const char *text, ...) {
  char line[1100];
  va_list values;
  va_start(values, text);
  int length = vsnprintf(line, sizeof line, text, values);
  va_end(values);
  if (length <= 0 || length >= (int)sizeof line || write(to->out, line, (size_t)length) != length)
    return; /* the keeper's time limit tells */
}

void hear(channel *from, char *line, size_t size, int seconds) {
  struct pollfd ready = {.fd = from->in, .events = POLLIN};
  size_t length = 0;
  int came = 1;
  if (seconds)
    while ((came = poll(&ready, 1, seconds * 1000)) < 0 && errno == EINTR) {}
  /* A line comes in one piece, being shorter than PIPE_BUF. */
  while (came == 1 && length < size - 1) {
    ssize_t got = read(from->in, line + length, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got != 1 || line[length] == '\n') break;
    length++;
  }
  line[length] = 0;
}

int open_fifo(const char *end, int flags) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s-%d-%s", run_folder() ? run_folder() : "", name, (int)getpid(), end);
  return open(path, flags | O_CLOEXEC | O_NOFOLLOW);
}

static void *wait_for_the_keeper(void *nothing) {
  sigset_t called;
  siginfo_t info;
  const struct timespec pause = {.tv_nsec = IDLE};
  sigemptyset(&called);
  sigaddset(&called, CALLED);
  for (int more = 0;;) {
    int came = sigtimedwait(&called, &info, more ? &pause : NULL) == CALLED;
    if (came && info.si_code == SI_QUEUE) {
      answer(info.si_value.sival_int);
    } else if (came) {
      channel with = {open_fifo("to", O_RDWR), open_fifo("from", O_RDWR)}; /* in both directions: nobody is waited for */
      if (with.in >= 0 && with.out >= 0) converse(&with);
      if (with.in >= 0) close(with.in);
      if (with.out >= 0) close(with.out);
    }
    more = idle();
  }
  return nothing;
}

void be_there(const char *of, void (*converse_)(channel *), int (*idle_)(void), void (*answer_)(int)) {
  char comm[16];
  pthread_attr_t attributes;
  pthread_t thread;
  sigset_t all, before;
  pid_t other = there, here = getpid();
  if (other == here || !run_folder() || !__atomic_compare_exchange_n(&there, &other, here, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
    return;
  name = of, converse = converse_, idle = idle_, answer = answer_;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_attr_init(&attributes);
  if (!failed) {
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    failed = pthread_create(&thread, &attributes, wait_for_the_keeper, NULL);
    pthread_attr_destroy(&attributes);
  }
  /* Not by the thread itself, which may begin later: whoever has heard that there is memory here looks for it. */
  snprintf(comm, sizeof comm, "gpuckpt-%s", name);
  if (!failed) pthread_setname_np(thread, comm);
  if (failed) __atomic_store_n(&there, 0, __ATOMIC_SEQ_CST); /* another time */
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}
