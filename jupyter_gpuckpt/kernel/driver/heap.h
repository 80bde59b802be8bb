/* Memory of stream-ordered pools, cut into blocks (heap.c), as pools.c gives it out. */
#pragma once
#include "driver.h"

/* A stream, as far as others have to wait for it before they use memory that was freed in it. A block that was freed
 * when `now` was n may be used by all once `done` is n or more; an event that is recorded lets `done` follow. */
typedef struct stream {
  struct stream *next;
  uint64_t id;
  void *handle, *context, *event;
  int device;
  int of_thread;     /* only its thread can name it, so an event is recorded at each free */
  int destroyed;
  size_t held;       /* free blocks that wait for it, or did */
  uint64_t now, recorded, done; /* `recorded` is 0 while no event is awaited */
} stream;

enum { FREE, USED, BARE }; /* bare: addresses alone, without memory */

typedef struct block {
  uint64_t address, size;
  uint64_t asked; /* used: for how many bytes, which are aligned */
  struct area *area;
  struct block *before, *after; /* by address, in its area */
  struct block *next, **link;   /* free: in its bin; used: in the table */
  stream *freed_in;             /* NULL: all may use it */
  uint64_t freed_at;
  int state;
} block;

enum { SLOT = 32 << 20 }; /* bytes: memory is added, and given back, in multiples of it */
enum { BINS = 256 };

/* Addresses of a pool, in slots. Slots that got their memory together, as one piece, give it back together. */
typedef struct area {
  struct area *next;
  struct pool *pool;
  uint64_t base, slots;
  block *blocks;
  uint64_t *piece; /* of each slot, the first slot of its piece, plus 1; 0 for a bare one */
} area;

typedef struct pool {
  struct pool *next;
  void *handle;
  int device, destroyed;
  int accesses;
  access_desc access[MOST_DEVICES];
  uint64_t most, threshold, reserved, reserved_high, used, used_high;
  area *areas;
  block *bins[BINS];
  uint64_t in_bins[BINS / 64]; /* a bit for each bin: whether it has any */
} pool;

extern int only_stream; /* whether there is no more than one */
extern _Atomic uint64_t lowest_address, highest_address; /* of all pools */

block *used_block(uint64_t address);
block *block_around(pool *pools, uint64_t address);
block *take_block(pool *of, stream *by, uint64_t asked);
void give_back_block(block *b, stream *in);
int grow(pool *p, stream *by, uint64_t asked);
void merge_settled(pool *p);
void hand_on(pool *p, stream *from, stream *to);
void release_pieces(pool *p, uint64_t keep);
int give_access(pool *p, const access_desc *access);
void close_pool(pool *p);
