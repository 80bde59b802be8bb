// Graphs with nodes of many kinds, which are changed between their launches, and times between events.
#include "feature.h"
#include <atomic>

enum { COUNT = 1 << 20 };
static unsigned *words, *pinned;
static cudaStream_t stream, side;
static cudaGraph_t graph;
static cudaGraphExec_t ready;
static cudaGraphNode_t mixing;
static cudaEvent_t first, fork_, join;
static std::atomic<unsigned> calls{0};
static unsigned steps;

__global__ void mix(unsigned *words, unsigned by) {
  unsigned i = blockIdx.x * 256 + threadIdx.x;
  words[i] = words[i] * 1664525u + by + i;
}

__global__ void fold(unsigned *to, const unsigned *from) {
  unsigned i = blockIdx.x * 256 + threadIdx.x;
  to[i] ^= from[COUNT - 1 - i] >> 3;
}

static void CUDART_CB called(void *) { calls++; }

extern "C" int begin() {
  TRY(cudaMalloc(&words, COUNT * 4));
  TRY(cudaMemset(words, 3, COUNT * 4));
  TRY(cudaMallocHost(&pinned, 4096));
  TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  TRY(cudaStreamCreateWithPriority(&side, cudaStreamNonBlocking, -1));
  TRY(cudaEventCreate(&first));
  TRY(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming));
  TRY(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  TRY(cudaEventRecord(first, stream));
  TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  unsigned *between = nullptr;
  mix<<<COUNT / 256, 256, 0, stream>>>(words, 1);
  TRY(cudaMallocAsync(&between, COUNT * 4, stream));  // a node that allocates
  TRY(cudaMemcpyAsync(between, words, COUNT * 4, cudaMemcpyDeviceToDevice, stream));
  TRY(cudaEventRecord(fork_, stream));
  TRY(cudaStreamWaitEvent(side, fork_, 0));
  mix<<<COUNT / 256, 256, 0, side>>>(between, 9);
  TRY(cudaLaunchHostFunc(side, called, nullptr));
  TRY(cudaEventRecord(join, side));
  TRY(cudaStreamWaitEvent(stream, join, 0));
  fold<<<COUNT / 256, 256, 0, stream>>>(words, between);
  TRY(cudaFreeAsync(between, stream));
  TRY(cudaMemcpyAsync(pinned, words, 4096, cudaMemcpyDeviceToHost, stream));
  TRY(cudaStreamEndCapture(stream, &graph));
  TRY(cudaGraphInstantiate(&ready, graph, 0));
  cudaGraphNode_t nodes[32];
  size_t count = 32;
  TRY(cudaGraphGetNodes(graph, nodes, &count));
  for (size_t i = 0; i < count && !mixing; i++) {
    cudaGraphNodeType type;
    TRY(cudaGraphNodeGetType(nodes[i], &type));
    if (type == cudaGraphNodeTypeKernel) mixing = nodes[i];  // the first one that was captured
  }
  if (!mixing) snprintf(failure, sizeof failure, "the graph has no node that mixes");
  return failure[0] != 0;
}

extern "C" uint64_t step() {
  unsigned by = ++steps * 77;
  void *given[] = {&words, &by};
  cudaKernelNodeParams how = {};
  how.func = (void *)mix;
  how.gridDim = dim3(COUNT / 256);
  how.blockDim = dim3(256);
  how.kernelParams = given;
  TRY(cudaGraphExecKernelNodeSetParams(ready, mixing, &how));
  TRY(cudaGraphLaunch(ready, stream));
  cudaEvent_t now;
  float passed = -1;
  TRY(cudaEventCreate(&now));
  TRY(cudaEventRecord(now, stream));
  TRY(cudaStreamSynchronize(stream));
  TRY(cudaEventElapsedTime(&passed, first, now));
  TRY(cudaEventDestroy(now));
  int least, most, priority = 0;
  TRY(cudaDeviceGetStreamPriorityRange(&least, &most));
  TRY(cudaStreamGetPriority(side, &priority));
  if (passed < 0 || priority > -1 || calls != steps)
    snprintf(failure, sizeof failure, "%f ms passed, priority %d, %u calls in %u steps", passed, priority,
             calls.load(), steps);
  return mixed(pinned, 1024);
}
