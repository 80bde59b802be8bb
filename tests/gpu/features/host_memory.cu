// Host memory that the GPU uses: mapped, registered, write-combined; and functions of the host in a stream.
#include "feature.h"
#include <cstdlib>
#include <sys/mman.h>

enum { COUNT = 4 << 20 };
static unsigned *mapped, *registered, *combined, *portable, *of_gpu, *total;
static unsigned *mapped_there, *registered_there, *combined_there;
static cudaStream_t stream;
static unsigned called;

__global__ void mix(unsigned *mapped, unsigned *registered, const unsigned *combined, unsigned *of_gpu, unsigned *total) {
  unsigned i = blockIdx.x * 256 + threadIdx.x;
  of_gpu[i] = mapped[i] * 3 + registered[i] + combined[i % 1024];
  mapped[i] = of_gpu[i] ^ i;
  registered[i] += of_gpu[i] >> 5;
  atomicAdd_system(total, of_gpu[i]);
}

static void CUDART_CB count(void *more) { called += *(unsigned *)more; }

extern "C" int begin() {
  TRY(cudaHostAlloc(&mapped, COUNT * 4, cudaHostAllocMapped));
  TRY(cudaHostAlloc(&combined, 4096, cudaHostAllocMapped | cudaHostAllocWriteCombined));
  TRY(cudaHostAlloc(&portable, 4096, cudaHostAllocPortable));
  TRY(cudaHostAlloc(&total, 4, cudaHostAllocMapped));
  registered = (unsigned *)mmap(nullptr, COUNT * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TRY(cudaHostRegister(registered, COUNT * 4, cudaHostRegisterMapped | cudaHostRegisterPortable));
  TRY(cudaHostGetDevicePointer(&mapped_there, mapped, 0));
  TRY(cudaHostGetDevicePointer(&registered_there, registered, 0));
  TRY(cudaHostGetDevicePointer(&combined_there, combined, 0));
  TRY(cudaMalloc(&of_gpu, COUNT * 4));
  TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (unsigned i = 0; i < COUNT; i++) mapped[i] = i * 7, registered[i] = i ^ 0x55;
  for (unsigned i = 0; i < 1024; i++) combined[i] = i * i;
  *total = 0;
  return failure[0] != 0;
}

extern "C" uint64_t step() {
  unsigned one = 1;
  mix<<<COUNT / 256, 256, 0, stream>>>(mapped_there, registered_there, combined_there, of_gpu, total);
  TRY(cudaMemcpyAsync(portable, of_gpu + COUNT / 2, 4096, cudaMemcpyDeviceToHost, stream));
  TRY(cudaLaunchHostFunc(stream, count, &one));
  TRY(cudaStreamSynchronize(stream));
  cudaPointerAttributes of_mapped, of_registered;
  unsigned flags = 0;
  TRY(cudaPointerGetAttributes(&of_mapped, mapped + 5));
  TRY(cudaPointerGetAttributes(&of_registered, registered + 5));
  TRY(cudaHostGetFlags(&flags, combined));
  if (of_mapped.type != cudaMemoryTypeHost || of_registered.type != cudaMemoryTypeHost ||
      !(flags & cudaHostAllocWriteCombined))
    snprintf(failure, sizeof failure, "types %d and %d, flags %u", of_mapped.type, of_registered.type, flags);
  registered[called % COUNT] += *total;
  return mixed(registered, COUNT) ^ mixed(mapped, COUNT) ^ (mixed(portable, 1024) & ~1ull);
}
