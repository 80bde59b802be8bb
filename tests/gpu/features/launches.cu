// Ways to start programs on the GPU that need to be allowed, or have attributes: what was set once holds on.
#include "feature.h"
#include <cooperative_groups.h>

namespace groups = cooperative_groups;
enum { BLOCKS = 64, BIG = 160 << 10 };
static unsigned *words;
static cudaStream_t stream;

__global__ void shared(unsigned *words) {
  extern __shared__ unsigned mine[];
  for (int i = threadIdx.x; i < BIG / 4; i += 256) mine[i] = words[i % 4096] + i;
  __syncthreads();
  unsigned sum = 0;
  for (int i = threadIdx.x; i < BIG / 4; i += 256) sum = sum * 31 + mine[BIG / 4 - 1 - i];
  words[threadIdx.x] ^= sum;
}

__global__ void together(unsigned *words) {
  groups::grid_group grid = groups::this_grid();
  unsigned i = grid.thread_rank(), count = grid.size();
  for (int round = 0; round < 5; round++) {
    unsigned next = words[(i + 1) % count] * 1664525u + round;
    grid.sync();
    words[i] += next;
    grid.sync();
  }
}

__global__ void inner(unsigned *words, unsigned by) { words[threadIdx.x + 256] = words[threadIdx.x + 256] * 17 + by; }

__global__ void outer(unsigned *words) {
  if (!threadIdx.x) inner<<<1, 256>>>(words, words[0]);  // by the GPU itself
}

__global__ void __cluster_dims__(4, 1, 1) clustered(unsigned *words) {
#if __CUDA_ARCH__ >= 900
  __shared__ unsigned one;
  groups::cluster_group cluster = groups::this_cluster();
  if (!threadIdx.x) one = words[blockIdx.x + 1024];
  cluster.sync();
  unsigned *others = cluster.map_shared_rank(&one, (cluster.block_rank() + 1) % 4);
  unsigned next = *others;
  cluster.sync();
  if (!threadIdx.x) words[blockIdx.x + 1024] = next * 3 + blockIdx.x;
#endif
}

extern "C" int begin() {
  TRY(cudaMalloc(&words, 8 << 20));
  TRY(cudaMemset(words, 1, 8 << 20));
  TRY(cudaStreamCreate(&stream));
  TRY(cudaFuncSetAttribute(shared, cudaFuncAttributeMaxDynamicSharedMemorySize, BIG));
  TRY(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 8 << 20));
  cudaStreamAttrValue kept = {};
  kept.accessPolicyWindow.base_ptr = words;
  kept.accessPolicyWindow.num_bytes = 4 << 20;
  kept.accessPolicyWindow.hitRatio = 1;
  kept.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
  kept.accessPolicyWindow.missProp = cudaAccessPropertyStreaming;
  TRY(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &kept));
  return failure[0] != 0;
}

extern "C" uint64_t step() {
  void *given[] = {&words};
  shared<<<1, 256, BIG, stream>>>(words);
  TRY(cudaGetLastError());
  TRY(cudaLaunchCooperativeKernel((void *)together, dim3(BLOCKS), dim3(128), given, 0, stream));
  outer<<<1, 32, 0, stream>>>(words);
  TRY(cudaGetLastError());
  clustered<<<16, 64, 0, stream>>>(words);
  TRY(cudaGetLastError());
  TRY(cudaStreamSynchronize(stream));
  size_t persisting = 0;
  cudaStreamAttrValue kept = {};
  TRY(cudaDeviceGetLimit(&persisting, cudaLimitPersistingL2CacheSize));
  TRY(cudaStreamGetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &kept));
  if (persisting < 8 << 20 || kept.accessPolicyWindow.base_ptr != words)
    snprintf(failure, sizeof failure, "of the L2 cache %zu bytes persist, for %p", persisting,
             kept.accessPolicyWindow.base_ptr);
  return mixed_on_gpu(words, 16384);
}
