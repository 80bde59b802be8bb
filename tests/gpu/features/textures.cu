// Arrays, of which only the driver knows the layout: as textures and surfaces, with layers, and with mipmaps.
#include "feature.h"

enum { SIDE = 2048, LAYERS = 4, LEVELS = 3, RESULTS = 4096 };
static cudaArray_t plane, layered;
static cudaMipmappedArray_t pyramid;
static cudaSurfaceObject_t surface, layers, level;
static cudaTextureObject_t smooth, layered_texture, pyramid_texture;
static unsigned *results;

__global__ void write(cudaSurfaceObject_t plane, cudaSurfaceObject_t layers, cudaSurfaceObject_t level) {
  int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
  float old = surf2Dread<float>(plane, x * 4, y);
  surf2Dwrite(old * 0.75f + (x * 31 + y * 17) % 97, plane, x * 4, y);
  unsigned word = surf2DLayeredread<unsigned>(layers, x * 4, y, (x + y) % LAYERS);
  surf2DLayeredwrite(word * 1664525u + 1013904223u + x, layers, x * 4, y, (x + y) % LAYERS);
  if (x < SIDE / 2 && y < SIDE / 2) surf2Dwrite(old + x - y, level, x * 4, y);
}

__global__ void read(cudaTextureObject_t smooth, cudaTextureObject_t layers, cudaTextureObject_t pyramid, unsigned *to) {
  unsigned i = blockIdx.x * 256 + threadIdx.x;
  float u = (i * 7919u % 65536) / 65536.f, v = (i * 104729u % 65536) / 65536.f;
  unsigned sum = __float_as_uint(tex2D<float>(smooth, u, v));
  sum = sum * 31 + __float_as_uint(tex2DLod<float>(pyramid, u, v, 0.5f));
  to[i] = sum * 31 + tex2DLayered<unsigned>(layers, u * SIDE, v * SIDE, i % LAYERS);
}

static cudaSurfaceObject_t surface_of(cudaArray_t array) {
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = array;
  cudaSurfaceObject_t made = 0;
  TRY(cudaCreateSurfaceObject(&made, &resource));
  return made;
}

static cudaTextureObject_t texture_of(cudaResourceDesc resource, bool is_smooth) {
  cudaTextureDesc how = {};
  how.addressMode[0] = how.addressMode[1] = cudaAddressModeMirror;
  how.filterMode = how.mipmapFilterMode = is_smooth ? cudaFilterModeLinear : cudaFilterModePoint;
  how.normalizedCoords = is_smooth;
  if (!is_smooth) how.addressMode[0] = how.addressMode[1] = cudaAddressModeClamp;
  how.maxMipmapLevelClamp = LEVELS - 1;
  cudaTextureObject_t made = 0;
  TRY(cudaCreateTextureObject(&made, &resource, &how, nullptr));
  return made;
}

extern "C" int begin() {
  auto floats = cudaCreateChannelDesc<float>();
  auto words = cudaCreateChannelDesc<unsigned>();
  TRY(cudaMallocArray(&plane, &floats, SIDE, SIDE, cudaArraySurfaceLoadStore));
  TRY(cudaMalloc3DArray(&layered, &words, make_cudaExtent(SIDE, SIDE, LAYERS),
                        cudaArrayLayered | cudaArraySurfaceLoadStore));
  TRY(cudaMallocMipmappedArray(&pyramid, &floats, make_cudaExtent(SIDE, SIDE, 0), LEVELS, cudaArraySurfaceLoadStore));
  cudaArray_t one = nullptr;
  for (unsigned i = 0; i < LEVELS; i++) {
    TRY(cudaGetMipmappedArrayLevel(&one, pyramid, i));
    cudaSurfaceObject_t its = surface_of(one);
    if (i == 1) level = its;
  }
  surface = surface_of(plane), layers = surface_of(layered);
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = plane;
  smooth = texture_of(resource, true);
  resource.res.array.array = layered;
  layered_texture = texture_of(resource, false);
  resource = {};
  resource.resType = cudaResourceTypeMipmappedArray;
  resource.res.mipmap.mipmap = pyramid;
  pyramid_texture = texture_of(resource, true);
  TRY(cudaMalloc(&results, RESULTS * sizeof *results));
  // Arrays begin with what was there before.
  float *zeros = new float[(size_t)SIDE * SIDE * LAYERS]();
  TRY(cudaMemcpy2DToArray(plane, 0, 0, zeros, SIDE * 4, SIDE * 4, SIDE, cudaMemcpyHostToDevice));
  cudaMemcpy3DParms all = {};
  all.srcPtr = make_cudaPitchedPtr(zeros, SIDE * 4, SIDE, SIDE);
  all.dstArray = layered;
  all.extent = make_cudaExtent(SIDE, SIDE, LAYERS);
  all.kind = cudaMemcpyHostToDevice;
  TRY(cudaMemcpy3D(&all));
  for (unsigned i = 0; i < LEVELS; i++) {
    TRY(cudaGetMipmappedArrayLevel(&one, pyramid, i));
    TRY(cudaMemcpy2DToArray(one, 0, 0, zeros, SIDE * 4, SIDE * 4 >> i, SIDE >> i, cudaMemcpyHostToDevice));
  }
  delete[] zeros;
  return failure[0] != 0;
}

extern "C" uint64_t step() {
  write<<<dim3(SIDE / 16, SIDE / 16), dim3(16, 16)>>>(surface, layers, level);
  read<<<RESULTS / 256, 256>>>(smooth, layered_texture, pyramid_texture, results);
  TRY(cudaGetLastError());
  return mixed_on_gpu(results, RESULTS);
}
