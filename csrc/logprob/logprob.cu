// Log-probs and entropy on a GPU: a thread block for each token; each logit is read once.
#include <cfloat>

#include "../cuda_launch.cuh"
#include "../reshard/convert.h"

namespace mcore_rl {
namespace {

constexpr int kThreads = 256, kWarp = 32;

struct Exp {
  __device__ float operator()(float x) const { return expf(x); }
};

template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T items[N];
};

__device__ float bounded(float x) { return x < kNothing ? kNothing : x; }

__device__ void merge(RunningSums<float>& sums, RunningSums<float> other) {
  const float top = fmaxf(sums.top, other.top);
  sums.move_to(top, Exp{});
  other.move_to(top, Exp{});
  sums.total += other.total;
  sums.moment += other.moment;
}

// Of all lanes of a warp; every lane gets it.
__device__ void merge_warp(RunningSums<float>& sums) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    merge(sums, {__shfl_xor_sync(0xffffffffu, sums.top, distance),
                 __shfl_xor_sync(0xffffffffu, sums.total, distance),
                 __shfl_xor_sync(0xffffffffu, sums.moment, distance)});
}

// Of all threads of a block; those of the first warp get it. The caller synchronises before the
// next call writes to `shared`, which has a place for each warp.
__device__ void merge_block(RunningSums<float>& sums, RunningSums<float>* shared) {
  constexpr int warps = kThreads / kWarp;
  merge_warp(sums);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = sums;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    sums = threadIdx.x < warps ? shared[threadIdx.x] : RunningSums<float>{-FLT_MAX / 4, 0, 0};
    merge_warp(sums);
  }
}

// Takes the logits [begin, end) into this thread's sums, N at a time; N divides both.
template <int N, typename T>
__device__ __forceinline__ void add(const T* logits, int64_t begin, int64_t end, float scale,
                                    RunningSums<float>& sums) {
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += kThreads * N) {
    const auto vector = *reinterpret_cast<const Vector<T, N>*>(logits + i);
    float z[N];
    float top = sums.top;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      z[j] = to_float32(vector.items[j]) * scale;
      top = fmaxf(top, z[j]);
    }
    if (top > sums.top) sums.move_to(top, Exp{});
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float x = z[j] - top, p = expf(x);
      sums.total += p;
      sums.moment += p * bounded(x);  // 0 for minus infinity
    }
  }
}

// Overwrites the logits [begin, end) with their gradients.
template <int N, typename T>
__device__ __forceinline__ void differentiate(T* logits, int64_t begin, int64_t end, float scale,
                                              const RowGradient& row, int64_t target) {
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += kThreads * N) {
    auto* at = reinterpret_cast<Vector<T, N>*>(logits + i);
    auto vector = *at;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float x = bounded(to_float32(vector.items[j]) * scale - row.top);
      float grad = x > kNothing || x != x ? expf(x) * (row.a + row.b * (x + row.c)) : 0.0f;
      if (i + j == target) grad += row.at_target;
      if constexpr (sizeof(T) == 2)
        vector.items[j] = to_bfloat16(grad);
      else
        vector.items[j] = grad;
    }
    *at = vector;
  }
}

template <typename T>
__device__ bool is_aligned(const T* logits) {
  return reinterpret_cast<uintptr_t>(logits) % 16 == 0;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) forward_kernel(LogitTile tile, Sums sums) {
  constexpr int N = 16 / sizeof(T);
  __shared__ RunningSums<float> shared[kThreads / kWarp];
  for (int64_t token = blockIdx.x; token < tile.tokens; token += gridDim.x) {
    const T* logits = static_cast<const T*>(tile.logits) + token * tile.stride;
    const int64_t even = is_aligned(logits) ? tile.ids / N * N : 0;
    RunningSums<float> mine{-FLT_MAX / 4, 0, 0};
    add<N>(logits, 0, even, tile.scale, mine);
    add<1>(logits, even, tile.ids, tile.scale, mine);
    merge_block(mine, shared);
    if (threadIdx.x == 0) {
      merge(mine, {sums.top[token], sums.total[token], sums.moment ? sums.moment[token] : 0});
      sums.top[token] = mine.top;
      sums.total[token] = mine.total;
      if (sums.moment) sums.moment[token] = mine.moment;
      const int64_t target = tile.targets[token] - tile.first_id;
      if (target >= 0 && target < tile.ids)
        sums.chosen[token] += to_float32(logits[target]) * tile.scale;
    }
    __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) backward_kernel(LogitTile tile, Gradients of) {
  constexpr int N = 16 / sizeof(T);
  for (int64_t token = blockIdx.x; token < tile.tokens; token += gridDim.x) {
    T* logits = static_cast<T*>(tile.logits) + token * tile.stride;
    const int64_t even = is_aligned(logits) ? tile.ids / N * N : 0;
    const int64_t target = tile.targets[token] - tile.first_id;
    const RowGradient row = RowGradient::of(of, token, tile.scale, logf(of.total[token]));
    differentiate<N>(logits, 0, even, tile.scale, row, target);
    differentiate<1>(logits, even, tile.ids, tile.scale, row, target);
  }
}

template <typename Kernel, typename Of>
void launch(Kernel kernel, const LogitTile& tile, const Of& of, const Launch& where) {
  const OnDevice on_device(where.device);
  const unsigned blocks = num_blocks(kernel, kThreads, where.device, tile.tokens);
  kernel<<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(where.stream)>>>(tile, of);
  check_cuda(cudaGetLastError());
}

}  // namespace

void logprob_forward_cuda(const LogitTile& tile, const Sums& sums, const Launch& where) {
  launch(tile.is_bfloat16 ? forward_kernel<uint16_t> : forward_kernel<float>, tile, sums, where);
}

void logprob_backward_cuda(const LogitTile& tile, const Gradients& of, const Launch& where) {
  launch(tile.is_bfloat16 ? backward_kernel<uint16_t> : backward_kernel<float>, tile, of, where);
}

}  // namespace mcore_rl
