// The virtual memory API: memory at two addresses, addresses without memory, and access that changes.
#include "feature.h"

static CUdeviceptr here, there, apart;
static CUmemGenericAllocationHandle handle, late;
static size_t size;
static unsigned steps;

__global__ void mix(unsigned *words, const unsigned *from, unsigned by) {
  unsigned i = blockIdx.x * 256 + threadIdx.x;
  words[i] = from[i ^ 1] * 1664525u + by;
}

static void allow(CUdeviceptr at, CUmemAccess_flags how) {
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.flags = how;
  DID(cuMemSetAccess(at, size, &access, 1));
}

extern "C" int begin() {
  TRY(cudaFree(nullptr));
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  DID(cuMemGetAllocationGranularity(&size, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  size *= 16;
  DID(cuMemCreate(&handle, size, &prop, 0));
  DID(cuMemAddressReserve(&here, size, 0, 0, 0));
  DID(cuMemAddressReserve(&there, size, 0, 0, 0));
  DID(cuMemAddressReserve(&apart, size, 0, 0, 0));
  DID(cuMemMap(here, size, 0, handle, 0));
  DID(cuMemMap(there, size, 0, handle, 0));
  allow(here, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  allow(there, CU_MEM_ACCESS_FLAGS_PROT_READ);
  DID(cuMemsetD32(here, 5, size / 4));
  return failure[0] != 0;
}

extern "C" uint64_t step() {
  mix<<<size / 1024, 256>>>((unsigned *)here, (const unsigned *)there, ++steps);
  TRY(cudaGetLastError());
  TRY(cudaDeviceSynchronize());
  if (steps % 3 == 1) {  // the addresses that had no memory get some, and lose it again two steps later
    CUmemAllocationProp prop = {};
    DID(cuMemGetAllocationPropertiesFromHandle(&prop, handle));
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    DID(cuMemCreate(&late, size, &prop, 0));
    DID(cuMemMap(apart, size, 0, late, 0));
    allow(apart, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  }
  DID(cuMemcpyDtoD(apart, there, size));
  uint64_t sum = mixed_on_gpu((const unsigned *)apart, 65536);
  if (steps % 3 == 0) {
    DID(cuMemUnmap(apart, size));
    DID(cuMemRelease(late));
  }
  return sum;
}
