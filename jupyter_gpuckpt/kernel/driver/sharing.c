/* CUDA IPC of memory that can be parked: another process of the kernel's or job's tree opens the same physical memory.
 *
 * What cuIpcGetMemHandle gives names a block of this process. Who opens it makes a socket in the run folder, and sends
 * the owner's thread (channel.c) a signal with its own number; the owner connects and sends descriptors of the block's
 * parts. Nothing stays open on either side.
 *
 * The driver loses a process at its checkpoint that has another's memory open. So all of it is closed before, and opened
 * again at the same addresses when the owners have theirs: the keeper says when. What is shared by the driver's own
 * handles cannot be closed so; the keeper is told whether there was any.
 */
#define _GNU_SOURCE
#include "channel.h"
#include "driver.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST_OWNERS = 64 }; /* that are told to the keeper */
enum { INVALID_CONTEXT = 201, OPERATING_SYSTEM = 304 }; /* CUresult */
enum { TRIES = 12, TRY_SECONDS = 5 };                   /* for how long the owner may be busy with the keeper */
static const char MARK[8] = "gpuckpt";

/* The 64 bytes of a CUipcMemHandle. */
typedef struct {
  char mark[8];
  int owner, unused;
  uint64_t address, size;
  char rest[32];
} ticket;
_Static_assert(sizeof(ticket) == 64, "a CUipcMemHandle");

/* What of others' memory is open here. */
typedef struct {
  ticket of;
  uint64_t address;
  int device;
  int opened;  /* how often */
  int is_away; /* whether it is closed for a checkpoint */
} import;

static import *imports;
static size_t import_count;
static pthread_mutex_t importing = PTHREAD_MUTEX_INITIALIZER;

void renew_imports_lock(void) { pthread_mutex_init(&importing, NULL); }

static size_t by_driver; /* how often memory was shared by the driver's own handles, given or opened */

static int counted(int result) {
  if (!result) __atomic_add_fetch(&by_driver, 1, __ATOMIC_SEQ_CST);
  return result;
}

int own_cuIpcGetMemHandle(ticket *handle, uint64_t address) {
  uint64_t base, size;
  if (!handle || !find_block(address, &base, &size)) return counted(cu.IpcGetMemHandle(handle, address));
  *handle = (ticket){.owner = (int)getpid(), .address = base, .size = size};
  memcpy(handle->mark, MARK, sizeof MARK);
  return 0;
}

/* -- the owner's end */

/* Name a socket in the run folder, by a path that is short enough; returns the folder, to be closed. */
static int name_socket(int thread, struct sockaddr_un *name) {
  int folder = run_folder() ? open(run_folder(), O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
  name->sun_family = AF_UNIX;
  snprintf(name->sun_path, sizeof name->sun_path, "/proc/self/fd/%d/share-%d", folder, thread);
  return folder;
}

static int send_part(int to, uint64_t size, int fd) {
  char space[CMSG_SPACE(sizeof fd)] = {0};
  struct iovec data = {&size, sizeof size};
  struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  memcpy(CMSG_DATA(header), &fd, sizeof fd);
  return sendmsg(to, &message, MSG_NOSIGNAL) == sizeof size ? 0 : -1;
}

/* Send a thread of another process what it asks for. */
void lend(int thread) {
  struct sockaddr_un name = {0};
  struct timeval limit = {.tv_sec = TRY_SECONDS};
  ticket wanted;
  int folder = name_socket(thread, &name), fd, to = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  setsockopt(to, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(to, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (!connect(to, (struct sockaddr *)&name, sizeof name) && recv(to, &wanted, sizeof wanted, 0) == sizeof wanted) {
    lock_memory();
    const memory *m = memory_at(wanted.address);
    for (size_t part = 0; m && m->had == parts_of(m) && part < parts_of(m); part++) {
      if (cu.Export(&fd, m->handles[part], POSIX_FD, (uint64_t)0)) break;
      int failed = send_part(to, part_size(m, part), fd);
      close(fd);
      if (failed) break;
    }
    unlock_memory();
  }
  close(to);
  close(folder);
}

/* -- the other end */

/* Send the owner's thread a signal with this thread's number; returns whether it was sent. */
static int call_owner(int owner) {
  char path[64], text[32];
  snprintf(path, sizeof path, "/proc/%d/task", owner);
  DIR *tasks = opendir(path);
  int sent = 0;
  for (struct dirent *task; !sent && tasks && (task = readdir(tasks));) {
    snprintf(path, sizeof path, "/proc/%d/task/%.16s/comm", owner, task->d_name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[size > 0 ? size : 0] = 0;
    if (strcmp(text, "gpuckpt-parking\n")) continue;
    siginfo_t info = {.si_signo = CALLED, .si_code = SI_QUEUE};
    info.si_pid = getpid();
    info.si_uid = getuid();
    info.si_value.sival_int = (int)syscall(SYS_gettid);
    sent = !syscall(SYS_rt_tgsigqueueinfo, owner, atoi(task->d_name), CALLED, &info);
  }
  if (tasks) closedir(tasks);
  return sent;
}

/* Ask the owner, and return a socket that the parts come through; -1 without an answer. A call of the program's waits
 * `at_gate`, while the owner cannot answer. */
static int ask(const ticket *for_, int at_gate) {
  struct sockaddr_un name = {0};
  struct timeval limit = {.tv_sec = TRY_SECONDS};
  int folder = name_socket((int)syscall(SYS_gettid), &name);
  int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), there = -1;
  unlink(name.sun_path);
  if (folder >= 0 && !bind(listener, (struct sockaddr *)&name, sizeof name) && !listen(listener, 1))
    for (int n = 0; there < 0 && n < TRIES && call_owner(for_->owner); n++) {
      struct pollfd ready = {.fd = listener, .events = POLLIN};
      if (poll(&ready, 1, TRY_SECONDS * 1000) == 1) there = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
      else if (at_gate) wait_at_gate();
    }
  unlink(name.sun_path);
  close(listener);
  close(folder);
  if (there >= 0) {
    setsockopt(there, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (send(there, for_, sizeof *for_, MSG_NOSIGNAL) != sizeof *for_) close(there), there = -1;
  }
  return there;
}

static int receive_part(int from, uint64_t *size) {
  char space[CMSG_SPACE(sizeof(int))];
  struct iovec data = {size, sizeof *size};
  struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
  int fd = -1;
  if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != sizeof *size) return -1;
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  if (header && header->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return fd;
}

static int map_parts(int from, uint64_t address, uint64_t size) {
  uint64_t done = 0, part, handle;
  while (done < size) {
    int fd = receive_part(from, &part), result = fd < 0 || part > size - done ? OPERATING_SYSTEM : 0;
    if (!result && !(result = cu.Import(&handle, (void *)(intptr_t)fd, POSIX_FD))) {
      result = cu.Map(address + done, part, (size_t)0, handle, (uint64_t)0);
      cu.Release(handle); /* the mapping keeps it */
    }
    if (fd >= 0) close(fd);
    if (result) {
      if (done) cu.Unmap(address, done);
      return result;
    }
    done += part;
  }
  return 0;
}

/* Have the owner's memory at addresses that are reserved. */
static int map_block(const import *one, int at_gate) {
  access_desc access = {{ON_DEVICE, one->device}, READ_WRITE};
  int from = ask(&one->of, at_gate), result = from < 0 ? OPERATING_SYSTEM : map_parts(from, one->address, one->of.size);
  if (from >= 0) close(from);
  if (!result && (result = cu.SetAccess(one->address, one->of.size, &access, (size_t)1)))
    cu.Unmap(one->address, one->of.size);
  return result;
}

static int open_block(import *one) {
  int result = cu.CtxGetDevice(&one->device);
  if (!result) result = cu.AddressReserve(&one->address, one->of.size, (size_t)0, (uint64_t)0, (uint64_t)0);
  if (!result && (result = map_block(one, 1))) cu.AddressFree(one->address, one->of.size);
  return result;
}

/* -- for a checkpoint, while no call of the program's passes the gate */

/* Find whose blocks are open here; returns how many owners there are, 0 where they are not known: somebody is just opening
 * something, or they are too many. */
static int find_owners(int owners[MOST_OWNERS]) {
  int count = 0;
  if (pthread_mutex_trylock(&importing)) return 0;
  for (size_t i = 0; i < import_count && count <= MOST_OWNERS; i++) {
    int at = 0;
    while (at < count && owners[at] != imports[i].of.owner) at++;
    if (at < count) continue;
    if (count < MOST_OWNERS) owners[count] = imports[i].of.owner;
    count++;
  }
  pthread_mutex_unlock(&importing);
  return count <= MOST_OWNERS ? count : 0;
}

void say_imports(channel *to) {
  int owners[MOST_OWNERS], count = find_owners(owners);
  char line[1024];
  int end = sprintf(line, "imports %zu %zu", __atomic_load_n(&import_count, __ATOMIC_SEQ_CST),
                    __atomic_load_n(&by_driver, __ATOMIC_SEQ_CST));
  for (int i = 0; i < count; i++) end += sprintf(line + end, " %d", owners[i]);
  say(to, "%s\n", line);
}

/* Enter the primary context of a GPU, do something with an import there, and leave it. */
static int in_context(import *one, int (*act)(import *)) {
  void *context, *left;
  int result = cu.PrimaryRetain(&context, one->device);
  if (result) return result;
  if (!(result = cu.CtxPush(context))) {
    result = act(one);
    cu.CtxPop(&left);
  }
  cu.PrimaryRelease(one->device);
  return result;
}

static int put_away(import *one) {
  int result = cu.CtxSynchronize();
  if (!result) result = cu.Unmap(one->address, one->of.size);
  if (!result) one->is_away = 1;
  return result;
}

static int have_back(import *one) {
  int result = map_block(one, 0);
  if (!result) one->is_away = 0;
  return result;
}

int imports_away(void) {
  int result = 0;
  if (pthread_mutex_trylock(&importing)) return -1;
  for (size_t i = 0; !result && i < import_count; i++)
    if (!imports[i].is_away) result = in_context(&imports[i], put_away);
  pthread_mutex_unlock(&importing);
  return result;
}

int imports_back(void) {
  int result = 0, failed;
  if (pthread_mutex_trylock(&importing)) return -1;
  for (size_t i = 0; i < import_count; i++)
    if (imports[i].is_away && (failed = in_context(&imports[i], have_back))) result = failed;
  pthread_mutex_unlock(&importing);
  return result;
}

/* -- the program's calls */

int own_cuIpcOpenMemHandle_v2(uint64_t *address, ticket of, unsigned flags) {
  if (memcmp(of.mark, MARK, sizeof MARK)) return counted(cu.IpcOpenMemHandle(address, of, flags));
  if (!address) return INVALID_VALUE;
  if (of.owner == getpid()) return INVALID_CONTEXT;
  pthread_mutex_lock(&importing);
  int result = 0;
  size_t i = 0;
  while (i < import_count && memcmp(&imports[i].of, &of, sizeof of)) i++;
  if (i == import_count) {
    import *more = realloc(imports, (import_count + 1) * sizeof *imports);
    result = more ? 0 : OUT_OF_MEMORY;
    if (more) {
      imports = more;
      imports[i] = (import){.of = of};
      /* Counted before it is open: while it is counted, there is no checkpoint. */
      __atomic_store_n(&import_count, i + 1, __ATOMIC_SEQ_CST);
      if ((result = open_block(&imports[i]))) __atomic_store_n(&import_count, i, __ATOMIC_SEQ_CST);
    }
  }
  if (!result) {
    imports[i].opened++;
    *address = imports[i].address;
  }
  pthread_mutex_unlock(&importing);
  return result;
}

int own_cuIpcOpenMemHandle(uint64_t *address, ticket of, unsigned flags) {
  if (memcmp(of.mark, MARK, sizeof MARK)) return counted(cu.IpcOpenMemHandle1(address, of, flags));
  return own_cuIpcOpenMemHandle_v2(address, of, flags);
}

int own_cuIpcCloseMemHandle(uint64_t address) {
  pthread_mutex_lock(&importing);
  size_t i = 0;
  while (i < import_count && imports[i].address != address) i++;
  int is_import = i < import_count, result = 0;
  if (is_import && imports[i].opened == 1 && !(result = cu.CtxSynchronize())) {
    if (!imports[i].is_away) cu.Unmap(address, imports[i].of.size);
    cu.AddressFree(address, imports[i].of.size);
    imports[i] = imports[import_count - 1];
    __atomic_store_n(&import_count, import_count - 1, __ATOMIC_SEQ_CST);
  } else if (is_import && !result) {
    imports[i].opened--;
  }
  pthread_mutex_unlock(&importing);
  return is_import ? result : cu.IpcCloseMemHandle(address);
}
