// What programs on the GPU allocate there themselves, its limits, and pointers to functions of the GPU.
#include "feature.h"

struct Node {
  Node *next;
  unsigned words[1000];
};
typedef unsigned (*Turn)(unsigned);

__device__ Node *heads[256];
__device__ unsigned grown(unsigned word) { return word * 1664525u + 1013904223u; }
__device__ unsigned turned(unsigned word) { return __brev(word) ^ 0x5bd1e995u; }
__device__ Turn turns[2] = {grown, turned};
__constant__ unsigned salt[64];
static unsigned *sums, steps;

__device__ __noinline__ unsigned deep(unsigned word, int more) {
  unsigned local[64];
  for (int i = 0; i < 64; i++) local[i] = word + i;
  return more ? deep(local[word % 64], more - 1) + local[(word + 1) % 64] : local[word % 64];
}

__global__ void grow(unsigned *sums, unsigned step) {
  unsigned i = blockIdx.x * 32 + threadIdx.x;
  Node *made = (Node *)malloc(sizeof(Node));
  if (!made) return;
  made->next = heads[i];
  for (int k = 0; k < 1000; k++) made->words[k] = i * 7 + k + step;
  heads[i] = made;
  unsigned sum = salt[i % 64];
  for (Node *at = made; at; at = at->next)
    for (int k = 0; k < 1000; k++) sum += at->words[k] = turns[(step + k) % 2](at->words[k]);
  if (step % 3 == 2) {
    Node *second = made->next;
    made->next = second->next;
    free(second);
  }
  sums[i] = sum + deep(sum, 40);
  if (!i && step == 1000000) printf("never\n");
}

extern "C" int begin() {
  unsigned salts[64];
  for (unsigned i = 0; i < 64; i++) salts[i] = i * i + 5;
  TRY(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 256 << 20));
  TRY(cudaDeviceSetLimit(cudaLimitStackSize, 16 << 10));
  TRY(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 4 << 20));
  TRY(cudaMemcpyToSymbol(salt, salts, sizeof salts));
  TRY(cudaMalloc(&sums, 256 * sizeof *sums));
  return failure[0] != 0;
}

extern "C" uint64_t step() {
  size_t heap = 0, stack = 0, line = 0;
  TRY(cudaDeviceGetLimit(&heap, cudaLimitMallocHeapSize));
  TRY(cudaDeviceGetLimit(&stack, cudaLimitStackSize));
  TRY(cudaDeviceGetLimit(&line, cudaLimitPrintfFifoSize));
  if (heap < 256 << 20 || stack < 16 << 10 || line < 4 << 20)
    snprintf(failure, sizeof failure, "limits: heap %zu, stack %zu, printf %zu", heap, stack, line);
  grow<<<8, 32>>>(sums, steps++);
  TRY(cudaGetLastError());
  return mixed_on_gpu(sums, 256);
}
