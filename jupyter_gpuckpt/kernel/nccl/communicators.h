/* NCCL's communicators, as this library hands them out: see front.c. */
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* NCCL's results (nccl.h), as far as they are needed here. */
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, REMOTE_ERROR = 6, IN_PROGRESS = 7 };

enum { LATEST = 23299 }; /* the latest version of NCCL (ncclGetVersion) of which front.c has all functions */

enum { UNKNOWN = -1 }; /* the rank in a communicator that was split off, until it is asked for */

typedef struct { char bytes[128]; } unique_id;

/* The beginning of NCCL's configuration of a communicator: fields were only ever added at the end. */
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share, traffic_class;
  const char *comm_name;
} config;

/* An operation that the program made of a sum and a factor. */
typedef struct { int real, is_used, type, residence; void *scalar; char value[8]; } user_op;

/* Why a communicator cannot be taken down and made again; `freeze/nccl.py` has the words. */
enum { CAPTURED = 1, REGISTERED = 2, MULTICAST = 4, DERIVED = 8 };

/* What a program has for a communicator. `counts` are of calls begun: of collectives, then those of each peer, sent to
 * and received from; `limits` say how far this process has to go, so that every rank has begun the same ones. */
typedef struct comm {
  uint64_t magic;
  void *real; /* NCCL's; NULL while it is taken down */
  uint64_t key; /* the same in all ranks */
  int rank, size, device, reasons;
  config *made_with; /* NULL for NCCL's defaults */
  uint64_t *counts, *limits;
  uint64_t children; /* communicators that were made of it */
  user_op *ops;
  int op_count;
  struct comm *next;
} comm;

typedef struct { comm *comm; int peer, is_receive; } call; /* `peer` is -1 for a collective */

/* communicators.c */
extern comm *comms;
extern int uses_own_memory;
comm *comm_of(void *handle);
comm *new_comm(uint64_t key, int rank, int size, const config *made_with, const comm *parent);
void forget_comm(comm *c);
int is_shared(const comm *c);
size_t count_of(const comm *c, int peer, int is_receive);
size_t counts_of(const comm *c);
void note_capture(comm *c, void *stream);
int be_on_gpu(void);
void leave_gpu(int device);
int wait_for_gpus(void);
int take_down(void);
int make_again(uint64_t key, const unique_id *id);
int real_op(comm *c, int op);
void complete(comm *c);
void end_op(comm *c, int op);
int new_op(comm *c, int real, const void *scalar, int type, int residence);
uint64_t hash(const void *bytes, size_t size, uint64_t begin);
void *real_function(const char *name);
void *loaded_function(const char *name);
int is_newer(void);

/* front.c */
void *function_in_front(const char *name);

/* lookup.c */
typedef void *lookup(void *handle, const char *name);
lookup *next_lookup(void);

/* meeting.c */
extern pthread_mutex_t lock;
int begin_call(call what, int waits);
void end_call(int waited);
int is_away(void);
void begin_group(void);
void close_group(void);
void end_group(void);
void begin_change(void);
void end_change(void);
void be_reachable(void);
extern _Thread_local int group_depth, inside;
