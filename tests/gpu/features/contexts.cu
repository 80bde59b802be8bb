// Contexts beside the one that all libraries share: of the driver's API, and with a part of the GPU's processors.
#include "feature.h"

static CUcontext own, primary;
static CUstream apart;
static CUgreenCtx green;
static CUdeviceptr words[2];
static CUmodule compiled[2];

static const char ptx[] =
    ".version 7.8\n.target sm_80\n.address_size 64\n"
    ".visible .entry mix(.param .u64 to) {\n"
    ".reg .u64 %a, %b; .reg .u32 %w, %i, %n, %m;\n"
    "ld.param.u64 %a, [to]; cvta.to.global.u64 %a, %a;\n"
    "mov.u32 %i, %tid.x; mov.u32 %n, %ctaid.x; mad.lo.u32 %i, %n, 256, %i;\n"
    "mul.wide.u32 %b, %i, 4; add.u64 %a, %a, %b;\n"
    "ld.global.u32 %w, [%a]; mad.lo.u32 %w, %w, 1664525, %i; st.global.u32 [%a], %w; ret;\n}\n";

enum { BYTES = 64 << 20 };

static void mix(int i, CUstream stream) {
  CUfunction function;
  void *given[] = {&words[i]};
  DID(cuModuleGetFunction(&function, compiled[i], "mix"));
  DID(cuLaunchKernel(function, BYTES / 1024, 1, 1, 256, 1, 1, 0, stream, given, nullptr));
}

extern "C" int begin() {
  CUdevResource all, group;
  CUdevResourceDesc described;
  unsigned groups = 1;
  TRY(cudaFree(nullptr));
  DID(cuCtxGetCurrent(&primary));
  DID(cuMemAlloc(&words[0], BYTES));
  DID(cuMemsetD32(words[0], 7, BYTES / 4));
  DID(cuModuleLoadData(&compiled[0], ptx));
  DID(cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
  DID(cuDevSmResourceSplitByCount(&group, &groups, &all, nullptr, 0, 16));
  DID(cuDevResourceGenerateDesc(&described, &group, 1));
  DID(cuGreenCtxCreate(&green, described, 0, CU_GREEN_CTX_DEFAULT_STREAM));
  DID(cuGreenCtxStreamCreate(&apart, green, CU_STREAM_NON_BLOCKING, 0));
#if CUDA_VERSION >= 13000
  DID(cuCtxCreate(&own, nullptr, 0, 0));
#else
  DID(cuCtxCreate(&own, 0, 0));
#endif
  DID(cuMemAlloc(&words[1], BYTES));
  DID(cuMemsetD32(words[1], 9, BYTES / 4));
  DID(cuModuleLoadData(&compiled[1], ptx));
  DID(cuCtxSynchronize());
  DID(cuCtxSetCurrent(primary));
  return failure[0] != 0;
}

extern "C" uint64_t step() {
  unsigned part[2][1024];
  mix(0, apart);
  DID(cuStreamSynchronize(apart));
  DID(cuMemcpyDtoH(part[0], words[0] + BYTES / 2, sizeof part[0]));
  DID(cuCtxPushCurrent(own));
  mix(1, nullptr);
  DID(cuMemcpyDtoH(part[1], words[1] + BYTES / 2, sizeof part[1]));
  DID(cuCtxPopCurrent(nullptr));
  CUcontext now;
  DID(cuCtxGetCurrent(&now));
  if (now != primary) snprintf(failure, sizeof failure, "another context is current");
  return mixed(part[0], 2048);
}
