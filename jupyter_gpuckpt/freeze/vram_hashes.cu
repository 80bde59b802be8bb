/* The hashes of chunks of GPU memory, made where they lie: BLAKE3 of 2 MiB each, as the store names its chunks.
 *
 * A chunk is a perfect tree of 2,048 leaves of 1 KiB. One block of threads makes one chunk's hash: each thread the hash
 * of eight leaves that follow one another, and then all of them together that of the whole. The algorithm and its
 * constants: the BLAKE3 specification, https://github.com/BLAKE3-team/BLAKE3-specs, section 2.
 *
 * vram_hashes.ptx is made of it (`python -m jupyter_gpuckpt.freeze.vram_hashes`, where NVRTC is): so no machine needs a
 * compiler. It is plain C as well, for tests where there is no GPU.
 */
#ifdef __CUDACC__
#define ON_GPU __device__ static __forceinline__
#else
#define ON_GPU static inline
#endif

typedef unsigned int word; /* 32 bits */

enum { LEAF_WORDS = 256, BLOCK_WORDS = 16, LEAVES_OF_THREAD = 8, THREADS = 256 };
enum { CHUNK_WORDS = LEAF_WORDS * LEAVES_OF_THREAD * THREADS };
enum { LEAF_BEGINS = 1, LEAF_ENDS = 2, PARENT = 4, ROOT = 8 };

enum { AT_ONCE = 8 }; /* times 16 bytes that each thread reads before all look whether there was anything */

typedef struct {
    word words[8];
} Hash;

/* That of a chunk of zeros. */
#define OF_ZEROS {{0x8C3FC88A, 0x4B069DE0, 0xC1B33A02, 0x2FB08058, 0x18CD8626, 0x9125FD17, 0x3153815B, 0xF859E06E}}

#define FIRST {{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19}}

ON_GPU word rotated(word x, int by) {
    return x >> by | x << (32 - by);
}

ON_GPU void mix(word *v, int a, int b, int c, int d, word x, word y) {
    v[a] += v[b] + x;
    v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotated(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 7);
}

/* Mix 64 bytes (`m`, which is used up) into a hash. */
ON_GPU void compress(Hash *hash, word *m, word counter, word flags) {
    const Hash first = FIRST;
    word v[16];
    for (int i = 0; i < 8; i++)
        v[i] = hash->words[i];
    for (int i = 0; i < 4; i++)
        v[8 + i] = first.words[i];
    v[12] = counter;
    v[13] = 0;
    v[14] = BLOCK_WORDS * sizeof(word);
    v[15] = flags;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int round = 0; round < 7; round++) {
        mix(v, 0, 4, 8, 12, m[0], m[1]);
        mix(v, 1, 5, 9, 13, m[2], m[3]);
        mix(v, 2, 6, 10, 14, m[4], m[5]);
        mix(v, 3, 7, 11, 15, m[6], m[7]);
        mix(v, 0, 5, 10, 15, m[8], m[9]);
        mix(v, 1, 6, 11, 12, m[10], m[11]);
        mix(v, 2, 7, 8, 13, m[12], m[13]);
        mix(v, 3, 4, 9, 14, m[14], m[15]);
        const word next[BLOCK_WORDS] = {m[2],  m[6],  m[3], m[10], m[7], m[0],  m[4],  m[13],
                                        m[1], m[11], m[12], m[5],  m[9], m[14], m[15], m[8]};
        for (int i = 0; i < BLOCK_WORDS; i++)
            m[i] = next[i];
    }
    for (int i = 0; i < 8; i++)
        hash->words[i] = v[i] ^ v[i + 8];
}

ON_GPU Hash hash_of_leaf(const word *leaf, word number) {
    Hash hash = FIRST;
    word m[BLOCK_WORDS];
    for (int at = 0; at < LEAF_WORDS; at += BLOCK_WORDS) {
        for (int i = 0; i < BLOCK_WORDS; i++)
            m[i] = leaf[at + i];
        compress(&hash, m, number, (at == 0 ? LEAF_BEGINS : 0) | (at + BLOCK_WORDS == LEAF_WORDS ? LEAF_ENDS : 0));
    }
    return hash;
}

ON_GPU Hash hash_of_two(const Hash *left, const Hash *right, word flags) {
    Hash hash = FIRST;
    word m[BLOCK_WORDS];
    for (int i = 0; i < 8; i++) {
        m[i] = left->words[i];
        m[8 + i] = right->words[i];
    }
    compress(&hash, m, 0, PARENT | flags);
    return hash;
}

/* The hash of the leaves of one thread. */
ON_GPU Hash hash_of_leaves(const word *chunk, int thread) {
    Hash open[4]; /* of 4, 2 and 1 leaves that wait for their right neighbors */
    int waiting = 0;
    for (int i = 0; i < LEAVES_OF_THREAD; i++) {
        const int number = thread * LEAVES_OF_THREAD + i;
        Hash hash = hash_of_leaf(chunk + number * LEAF_WORDS, number);
        for (int left = i; left & 1; left >>= 1)
            hash = hash_of_two(&open[--waiting], &hash, 0);
        open[waiting++] = hash;
    }
    return open[0];
}

#ifdef __CUDACC__
/* Tell whether a chunk is all zeros, which reading alone tells: ten times as fast as a hash. */
__device__ static int is_zero(const word *chunk, int thread) {
    const uint4 *four = (const uint4 *)chunk;
    for (int at = thread; at < CHUNK_WORDS / 4; at += THREADS * AT_ONCE) {
        word any = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const uint4 next = four[at + i * THREADS];
            any |= next.x | next.y | next.z | next.w;
        }
        if (__syncthreads_or(any != 0))
            return 0;
    }
    return 1;
}

extern "C" __global__ void __launch_bounds__(THREADS) hash_chunks(const word *first, Hash *hashes) {
    __shared__ Hash made[THREADS];
    const int thread = threadIdx.x;
    const word *chunk = first + (unsigned long long)blockIdx.x * CHUNK_WORDS;
    if (is_zero(chunk, thread)) {
        const Hash zeros = OF_ZEROS;
        if (thread == 0)
            hashes[blockIdx.x] = zeros;
        return;
    }
    Hash hash = hash_of_leaves(chunk, thread);
    for (int left = THREADS / 2; left > 0; left /= 2) {
        __syncthreads();
        if (thread < left * 2)
            made[thread] = hash;
        __syncthreads();
        if (thread < left)
            hash = hash_of_two(&made[2 * thread], &made[2 * thread + 1], left == 1 ? ROOT : 0);
    }
    if (thread == 0)
        hashes[blockIdx.x] = hash;
}
#else
static int is_zero(const word *chunk) {
    word any = 0;
    for (int at = 0; at < CHUNK_WORDS && !any; at++)
        any |= chunk[at];
    return !any;
}

void hash_chunks(const word *first, Hash *hashes, int count) {
    for (int chunk = 0; chunk < count; chunk++) {
        const Hash zeros = OF_ZEROS;
        Hash made[THREADS];
        if (is_zero(first + (unsigned long long)chunk * CHUNK_WORDS)) {
            hashes[chunk] = zeros;
            continue;
        }
        for (int thread = 0; thread < THREADS; thread++)
            made[thread] = hash_of_leaves(first + (unsigned long long)chunk * CHUNK_WORDS, thread);
        for (int left = THREADS / 2; left > 0; left /= 2)
            for (int i = 0; i < left; i++)
                made[i] = hash_of_two(&made[2 * i], &made[2 * i + 1], left == 1 ? ROOT : 0);
        hashes[chunk] = made[0];
    }
}
#endif
