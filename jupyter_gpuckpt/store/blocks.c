/* Finds the blocks in which a chunk differs from another one of its size, and how: the exclusive or of both. That is
 * what a delta is made of (blocks.py, which does the same in Python where this is missing). */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 512
#define EXPORTED __attribute__((visibility("default")))

static size_t block_at(size_t at, size_t size) { return size - at < BLOCK ? size - at : BLOCK; }

static void combine(uint8_t *into, const uint8_t *one, const uint8_t *other, size_t size)
{
	size_t at = 0;

	for (uint64_t word, another; at + sizeof(word) <= size; at += sizeof(word)) {
		memcpy(&word, one + at, sizeof(word));
		memcpy(&another, other + at, sizeof(word));
		word ^= another;
		memcpy(into + at, &word, sizeof(word));
	}
	for (; at < size; at++)
		into[at] = one[at] ^ other[at];
}

/* Set the bit of each block that differs, and write down how, one behind the other; return how many bytes that is.
 * All bits are 0 before, and `difference` has room for `size` bytes. */
EXPORTED size_t gpuckpt_difference(const uint8_t *chunk, const uint8_t *other, size_t size, uint8_t *bits,
				   uint8_t *difference)
{
	size_t done = 0;

	for (size_t at = 0; at < size; at += BLOCK) {
		size_t length = block_at(at, size);

		if (memcmp(chunk + at, other + at, length) == 0)
			continue;
		bits[at / BLOCK / 8] |= 1 << at / BLOCK % 8;
		combine(difference + done, chunk + at, other + at, length);
		done += length;
	}
	return done;
}

/* Make one of the two of the other; `difference` has as many bytes as the blocks whose bit is set. */
EXPORTED void gpuckpt_differ(uint8_t *chunk, size_t size, const uint8_t *bits, const uint8_t *difference)
{
	for (size_t at = 0; at < size; at += BLOCK) {
		size_t length = block_at(at, size);

		if (!(bits[at / BLOCK / 8] >> at / BLOCK % 8 & 1))
			continue;
		combine(chunk + at, chunk + at, difference, length);
		difference += length;
	}
}
