// A variable that both processor and GPU use: managed memory, which the driver does not checkpoint.
#include "feature.h"

__managed__ unsigned counter = 3;

__global__ void count() { counter = counter * 5 + 1; }

extern "C" int begin() { return 0; }

extern "C" uint64_t step() {
  count<<<1, 1>>>();
  TRY(cudaDeviceSynchronize());
  unsigned now = counter;
  return mixed(&now, 1);
}
