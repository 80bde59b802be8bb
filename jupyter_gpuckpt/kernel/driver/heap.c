/* The memory of a stream-ordered pool, cut into blocks.
 *
 * A pool has addresses in plenty and gets physical memory for them in pieces (memory.c), which can be parked. So a large
 * block fits wherever addresses are free side by side, and memory that lies idle elsewhere is given back rather than
 * lost to fragmentation. Blocks know the stream in which they were freed: work that was given to it before may still
 * use them. Each stream gets back at once what was freed in it, and others once that work is done (pools.c).
 */
#define _GNU_SOURCE
#include "heap.h"

#include <stdlib.h>
#include <string.h>

enum { LARGEST_PIECE = 8 };  /* slots */
enum { SPARE = 8 };          /* blocks: as many as one step here may need */
enum { SMALLEST_BITS = 9, PARTS_BITS = 3 }; /* bins begin at 512 bytes, and are eight to each doubling */
enum { ALIGNMENT = 1 << SMALLEST_BITS };

static uint64_t aligned(uint64_t size) { return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

int only_stream;
_Atomic uint64_t lowest_address = UINT64_MAX, highest_address;

/* -- blocks */

static block *spare;
static size_t spares;

/* Have blocks at hand for a step, so that it does not end halfway. */
static int stock(void) {
  while (spares < SPARE) {
    block *b = malloc(sizeof *b);
    if (!b) return 0;
    b->next = spare;
    spare = b;
    spares++;
  }
  return 1;
}

static block *new_block(area *of, uint64_t address, uint64_t size, int state) {
  block *b = spare;
  spare = b->next;
  spares--;
  *b = (block){.address = address, .size = size, .area = of, .state = state};
  return b;
}

static void discard(block *b) {
  if (b->before) b->before->after = b->after;
  else b->area->blocks = b->after;
  if (b->after) b->after->before = b->before;
  if (spares >= 8 * SPARE) {
    free(b);
    return;
  }
  b->next = spare;
  spare = b;
  spares++;
}

static void link_to(block **list, block *b) {
  b->next = *list;
  b->link = list;
  if (b->next) b->next->link = &b->next;
  *list = b;
}

static void unlink_from_list(block *b) {
  *b->link = b->next;
  if (b->next) b->next->link = b->link;
}

/* -- used blocks, by address */

static block **table;
static size_t table_size, table_count;

static block **place(uint64_t address) {
  return &table[(address >> SMALLEST_BITS) * 0x9e3779b97f4a7c15u >> 32 & (table_size - 1)];
}

static int make_room_in_table(void) {
  if (table_count < table_size) return 1;
  size_t before = table_size;
  block **old = table, **more = calloc(before ? 2 * before : 1024, sizeof *more);
  if (!more) return before != 0; /* it is only slower */
  table = more;
  table_size = before ? 2 * before : 1024;
  for (size_t i = 0; i < before; i++)
    for (block *b = old[i], *next; b; b = next) {
      next = b->next;
      link_to(place(b->address), b);
    }
  free(old);
  return 1;
}

block *used_block(uint64_t address) {
  if (!table_size) return NULL;
  block *b = *place(address);
  while (b && b->address != address) b = b->next;
  return b;
}

/* Return the block that an address lies in, of whatever state. */
block *block_around(pool *pools, uint64_t address) {
  block *b = used_block(address);
  for (pool *p = pools; p && !b; p = p->next)
    for (area *a = p->areas; a && !b; a = a->next)
      if (address - a->base < a->slots * SLOT)
        for (b = a->blocks; b && address - b->address >= b->size;) b = b->after;
  return b;
}

/* -- free blocks, by size */

static int bin_of(uint64_t size) {
  int bits = 63 - __builtin_clzll(size), bin;
  bin = ((bits - SMALLEST_BITS) << PARTS_BITS) + (int)(size >> (bits - PARTS_BITS) & ((1 << PARTS_BITS) - 1));
  return bin < BINS ? bin : BINS - 1;
}

static void put(block *b) {
  pool *p = b->area->pool;
  int bin = bin_of(b->size);
  b->state = FREE;
  link_to(&p->bins[bin], b);
  p->in_bins[bin / 64] |= 1ull << bin % 64;
  if (b->freed_in) b->freed_in->held++;
}

static void pull(block *b) {
  pool *p = b->area->pool;
  int bin = bin_of(b->size);
  unlink_from_list(b);
  if (!p->bins[bin]) p->in_bins[bin / 64] &= ~(1ull << bin % 64);
  if (b->freed_in) b->freed_in->held--;
}

static int is_settled(const block *b) { return !b->freed_in || b->freed_at <= b->freed_in->done; }

static int may_use(const block *b, const stream *by) {
  return b->state == FREE && (b->freed_in == by || is_settled(b));
}

/* Cut a block in two, neither of them in a bin or the table; the second one begins at the address. */
static block *cut(block *b, uint64_t address) {
  block *second = new_block(b->area, address, b->address + b->size - address, b->state);
  second->freed_in = b->freed_in;
  second->freed_at = b->freed_at;
  b->size -= second->size;
  second->before = b;
  second->after = b->after;
  if (b->after) b->after->before = second;
  b->after = second;
  return second;
}

/* Make one of a block and the one after it, which is in no bin. */
static void absorb(block *b) {
  b->size += b->after->size;
  discard(b->after);
}

/* Have a block, which is in no bin, end where its use does; the rest is free as it was. */
static void shorten(block *b, uint64_t size) {
  if (b->size > size) put(cut(b, b->address + size));
}

static block *use(block *b, uint64_t asked) {
  pool *p = b->area->pool;
  shorten(b, aligned(asked));
  b->state = USED;
  b->asked = asked;
  b->freed_in = NULL;
  link_to(place(b->address), b);
  table_count++;
  p->used += asked;
  if (p->used > p->used_high) p->used_high = p->used;
  return b;
}

/* Give out a block of what has memory and `by` may use; NULL where none is large enough. */
block *take_block(pool *of, stream *by, uint64_t asked) {
  uint64_t size = aligned(asked);
  if (!stock() || !make_room_in_table()) return NULL;
  int first = bin_of(size);
  for (int word = first / 64; word < BINS / 64; word++) {
    uint64_t bins = of->in_bins[word] & (word == first / 64 ? ~0ull << first % 64 : ~0ull);
    for (; bins; bins &= bins - 1)
      for (block *b = of->bins[word * 64 + __builtin_ctzll(bins)]; b; b = b->next)
        if (b->size >= size && may_use(b, by)) {
          pull(b);
          return use(b, asked);
        }
  }
  return NULL;
}

/* Two free blocks are one where the same streams may use them; where there is but one stream, it may use all. */
static int belong_together(const block *a, const block *b) {
  if (a->state != FREE || b->state != FREE) return 0;
  return a->freed_in == b->freed_in || (is_settled(a) && is_settled(b)) || only_stream;
}

/* Make one of two free blocks, side by side and in no bin. */
static void join(block *b) {
  block *c = b->after;
  if (b->freed_in == c->freed_in) {
    if (c->freed_at > b->freed_at) b->freed_at = c->freed_at;
  } else if (is_settled(b)) {
    b->freed_in = is_settled(c) ? NULL : c->freed_in;
    b->freed_at = c->freed_at;
  }
  absorb(b);
}

/* Take back a block that was freed in a stream; NULL: nothing uses it any more. */
void give_back_block(block *b, stream *in) {
  unlink_from_list(b);
  table_count--;
  b->area->pool->used -= b->asked;
  b->state = FREE;
  b->freed_in = in;
  b->freed_at = in ? in->now : 0;
  if (b->after && belong_together(b, b->after)) {
    pull(b->after);
    join(b);
  }
  if (b->before && belong_together(b->before, b)) {
    b = b->before;
    pull(b);
    join(b);
  }
  put(b);
}

/* Let all use what their streams are done with. */
void merge_settled(pool *p) {
  for (area *a = p->areas; a; a = a->next)
    for (block *b = a->blocks; b; b = b->after) {
      if (b->state != FREE || !is_settled(b)) continue;
      pull(b);
      b->freed_in = NULL;
      while (b->after && b->after->state == FREE && is_settled(b->after)) {
        pull(b->after);
        absorb(b);
      }
      put(b);
    }
}

/* What waited for one stream waits for another, which waits for that one. */
void hand_on(pool *p, stream *from, stream *to) {
  for (area *a = p->areas; a; a = a->next)
    for (block *b = a->blocks; b; b = b->after) {
      if (b->state != FREE || b->freed_in != from) continue;
      pull(b);
      b->freed_in = to;
      b->freed_at = to->now;
      put(b);
    }
}

/* -- pieces of memory */

static block *block_at(area *a, uint64_t address) {
  block *b = a->blocks;
  while (address - b->address >= b->size) b = b->after;
  return b;
}

/* Have a block of just these addresses, which lie in one; it is in no bin. */
static block *carve(area *a, uint64_t from, uint64_t to) {
  block *b = block_at(a, from);
  int is_free = b->state == FREE;
  if (is_free) pull(b);
  if (b->address + b->size > to) {
    block *rest = cut(b, to);
    if (is_free) put(rest);
  }
  if (b->address < from) {
    block *rest = b;
    b = cut(b, from);
    if (is_free) put(rest);
  }
  return b;
}

static int add_piece(area *a, uint64_t slot, uint64_t slots) {
  pool *p = a->pool;
  uint64_t address = a->base + slot * SLOT, size = slots * SLOT;
  if ((p->most && p->reserved + size > p->most) || !stock()) return OUT_OF_MEMORY;
  int result = new_piece(address, size, p->device, p->access, p->accesses);
  if (result) return result;
  for (uint64_t i = slot; i < slot + slots; i++) a->piece[i] = slot + 1;
  p->reserved += size;
  if (p->reserved > p->reserved_high) p->reserved_high = p->reserved;
  put(carve(a, address, address + size));
  return 0;
}

static uint64_t slots_of_piece(const area *a, uint64_t slot) {
  uint64_t end = slot;
  while (end < a->slots && a->piece[end] == slot + 1) end++;
  return end - slot;
}

/* Return the bare block that it leaves; NULL where it stays. */
static block *release_piece(area *a, uint64_t slot, uint64_t slots) {
  uint64_t address = a->base + slot * SLOT, size = slots * SLOT;
  if (!stock() || own_cuMemUnmap(address, size)) return NULL;
  memset(&a->piece[slot], 0, slots * sizeof *a->piece);
  a->pool->reserved -= size;
  block *b = carve(a, address, address + size);
  b->state = BARE;
  b->freed_in = NULL;
  if (b->after && b->after->state == BARE) absorb(b);
  if (b->before && b->before->state == BARE) absorb(b = b->before);
  return b;
}

/* Give memory back that nothing uses, as long as the pool has more than `keep` bytes. */
void release_pieces(pool *p, uint64_t keep) {
  for (area *a = p->areas; a; a = a->next)
    for (block *b = a->blocks; b && p->reserved > keep; b = b->after) {
      if (b->state != FREE || !is_settled(b)) continue;
      uint64_t slot = (b->address - a->base + SLOT - 1) / SLOT, end = (b->address + b->size - a->base) / SLOT, slots;
      for (; slot < end; slot += slots) {
        slots = slots_of_piece(a, slot);
        block *bare = slots && slot + slots <= end ? release_piece(a, slot, slots) : NULL;
        if (bare) {
          b = bare; /* and go on with what is after it */
          break;
        }
        slots += !slots;
      }
    }
}

/* -- growing */

static area *new_area(pool *p, uint64_t size) {
  uint64_t total = 0;
  if (cu.DeviceTotalMem(&total, p->device) || size > total || !stock()) return NULL;
  uint64_t slots = (total + SLOT - 1) / SLOT;
  area *a = calloc(1, sizeof *a);
  uint64_t *piece = calloc(slots, sizeof *piece);
  if (!a || !piece || cu.AddressReserve(&a->base, (size_t)(slots * SLOT), (size_t)0, (uint64_t)0, (uint64_t)0)) {
    free(a);
    free(piece);
    return NULL;
  }
  a->pool = p;
  a->slots = slots;
  a->piece = piece;
  a->blocks = new_block(a, a->base, slots * SLOT, BARE);
  a->next = p->areas;
  if (a->base < lowest_address) lowest_address = a->base;
  if (a->base + slots * SLOT > highest_address) highest_address = a->base + slots * SLOT;
  return p->areas = a;
}

static uint64_t bare_slots(const area *a, uint64_t address, uint64_t size) {
  uint64_t bare = 0;
  for (uint64_t i = (address - a->base) / SLOT; i <= (address + size - 1 - a->base) / SLOT; i++) bare += !a->piece[i];
  return bare;
}

/* Find where a block of this size needs the least of new memory: in addresses side by side, free or bare. */
static uint64_t best_place(pool *p, stream *by, uint64_t size, area **in) {
  uint64_t place = 0, least = ~0ull;
  for (area *a = p->areas; a; a = a->next) {
    uint64_t from = 0;
    for (block *b = a->blocks; b; b = b->after) {
      if (b->state != BARE && !may_use(b, by)) {
        from = 0;
        continue;
      }
      if (!from) from = b->address;
      block *c = b->after;
      if (c && (c->state == BARE || may_use(c, by))) continue;
      uint64_t to = b->address + b->size;
      for (int at_end = 0; at_end < 2 && to - from >= size; at_end++) {
        uint64_t at = at_end ? to - size : from, bare = bare_slots(a, at, size);
        if (bare >= least) continue;
        least = bare;
        place = at;
        *in = a;
      }
    }
  }
  return place;
}

/* Make one block for `by` of what is free from here on for `size` bytes, and it may use. */
static void gather(area *a, stream *by, uint64_t address, uint64_t size) {
  block *b = block_at(a, address);
  pull(b);
  if (b->address < address) {
    block *rest = b;
    b = cut(b, address);
    put(rest);
  }
  while (b->size < size) {
    pull(b->after);
    absorb(b);
  }
  b->freed_in = by;
  b->freed_at = by->now;
  shorten(b, size);
  put(b);
}

/* Add memory, so that there is a block of this size for `by` to take. Fails with what the driver says, and without
 * more memory than before. */
int grow(pool *p, stream *by, uint64_t asked) {
  area *a;
  uint64_t size = aligned(asked), before = p->reserved, at = best_place(p, by, size, &a);
  if (!at) {
    if (!(a = new_area(p, size))) return OUT_OF_MEMORY;
    at = a->base;
  }
  uint64_t slot = (at - a->base) / SLOT, end = (at + size - 1 - a->base) / SLOT + 1, slots;
  for (; slot < end; slot += slots) {
    slots = 1;
    if (a->piece[slot]) continue;
    while (slot + slots < end && slots < LARGEST_PIECE && !a->piece[slot + slots]) slots++;
    int result = add_piece(a, slot, slots);
    if (result) {
      release_pieces(p, before);
      return result;
    }
  }
  if (!stock()) return OUT_OF_MEMORY;
  gather(a, by, at, size);
  return 0;
}

static int is_same(location one, location other) { return one.type == other.type && one.id == other.id; }

/* Give a GPU access to all that the pool has and will have. */
int give_access(pool *p, const access_desc *access) {
  int i = 0, result = 0;
  while (i < p->accesses && !is_same(p->access[i].place, access->place)) i++;
  if (i == MOST_DEVICES) return INVALID_VALUE;
  p->access[i] = *access;
  if (i == p->accesses) p->accesses++;
  for (area *a = p->areas; a; a = a->next)
    for (uint64_t slot = 0; slot < a->slots && !result; slot++)
      if (a->piece[slot] == slot + 1)
        result = own_cuMemSetAccess(a->base + slot * SLOT, slots_of_piece(a, slot) * SLOT, access, (size_t)1);
  return result;
}

/* Give up all that a pool has; nothing of it is used any more. */
void close_pool(pool *p) {
  while (p->areas) {
    area *a = p->areas;
    p->areas = a->next;
    for (uint64_t slot = 0; slot < a->slots; slot++)
      if (a->piece[slot] == slot + 1) own_cuMemUnmap(a->base + slot * SLOT, slots_of_piece(a, slot) * SLOT);
    for (block *b = a->blocks, *after; b; b = after) {
      after = b->after;
      if (b->state == FREE) pull(b);
      free(b);
    }
    cu.AddressFree(a->base, (size_t)(a->slots * SLOT));
    free(a->piece);
    free(a);
  }
}
