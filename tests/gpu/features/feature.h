// What the programs here share: `begin` makes what there is, each `step` goes on with it and returns a number that
// depends on all that came before; 0 where a call failed, which `why` names.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cuda.h>
#include <cuda_runtime.h>

static char failure[256];
static bool tried(cudaError_t result, const char *what) {
  if (result && !failure[0]) snprintf(failure, sizeof failure, "%s: %s", what, cudaGetErrorString(result));
  return result == cudaSuccess;
}
#define TRY(call) tried(call, #call)

[[maybe_unused]] static void did(CUresult result, const char *what) {
  if (result && !failure[0]) snprintf(failure, sizeof failure, "%s: CUresult %d", what, (int)result);
}
#define DID(call) did(call, #call)

extern "C" const char *why() { return failure; }

static uint64_t mixed(const unsigned *words, size_t count) {
  uint64_t sum = 0xcbf29ce484222325u;
  for (size_t i = 0; i < count; i++) sum = (sum ^ words[i]) * 0x100000001b3u;
  return failure[0] ? 0 : sum | 1;
}

// The number that a word of GPU memory comes to.
static uint64_t mixed_on_gpu(const unsigned *words, size_t count) {
  unsigned *host = new unsigned[count];
  TRY(cudaMemcpy(host, words, count * sizeof *host, cudaMemcpyDeviceToHost));
  uint64_t sum = mixed(host, count);
  delete[] host;
  return sum;
}
