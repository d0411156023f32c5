// Blocks of 128 x 128 to float8 e4m3 on a GPU: each is read once, and held in registers between
// its largest magnitude and its quotients. A thread block takes one block of the weight at a time.
#include <cuda_fp8.h>

#include "../cuda_launch.cuh"
#include "box.h"
#include "convert.h"

namespace mcore_rl {
namespace {

constexpr int kThreads = 512, kWarp = 32;

template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T items[kSize];
};

// Two quotients as e4m3. The largest is below 449, which rounds to 448: it never saturates.
__device__ __forceinline__ uint32_t two_as_e4m3(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// The part of a block that one thread holds: vectors under each other, kRowStep rows apart.
template <typename T>
struct Part {
  static constexpr int kSize = Vector<T>::kSize, kPerRow = kBlock / kSize;
  static constexpr int kRowStep = kThreads / kPerRow, kVectors = kBlock / kRowStep;

  int rows, num;  // how many of the vectors, and how many items of each, are in the weight
  int64_t source, source_step, target, target_step;  // addresses of the first vector, and steps
  bool reads_vectors, writes_vectors;

  __device__ Part(const Box& box, const Place& block) {
    const int64_t row = block.row + threadIdx.x / kPerRow;
    const int64_t column = block.column + threadIdx.x % kPerRow * kSize;
    const int64_t below = box.rows - row, right = box.items - column;
    rows = below <= 0 ? 0 : static_cast<int>(min((below - 1) / kRowStep + 1, int64_t{kVectors}));
    num = right <= 0 ? 0 : static_cast<int>(min(right, int64_t{kSize}));
    source = box.source + row * box.source_stride + column * static_cast<int64_t>(sizeof(T));
    target = box.target + row * box.target_stride + column;
    source_step = box.source_stride * kRowStep;
    target_step = box.target_stride * kRowStep;
    static_assert(kRowStep % 16 == 0);  // so the other vectors are aligned where the first is
    reads_vectors = num == kSize && (source & 15) == 0;
    writes_vectors = num == kSize && (target & (kSize - 1)) == 0;
  }

  __device__ Vector<T> load(int i) const {
    Vector<T> values = {};
    if (i >= rows) return values;
    const T* at = reinterpret_cast<const T*>(source + i * source_step);
    if (reads_vectors) return *reinterpret_cast<const Vector<T>*>(at);
#pragma unroll
    for (int j = 0; j < kSize; ++j)
      if (j < num) values.items[j] = at[j];
    return values;
  }

  __device__ void store(int i, const Vector<T>& values, float scale) const {
    if (i >= rows) return;
    uint32_t words[kSize / 4];
#pragma unroll
    for (int j = 0; j < kSize; j += 4)
      words[j / 4] = two_as_e4m3(to_float32(values.items[j]) / scale,
                                 to_float32(values.items[j + 1]) / scale) |
                     two_as_e4m3(to_float32(values.items[j + 2]) / scale,
                                 to_float32(values.items[j + 3]) / scale)
                         << 16;
    uint8_t* at = reinterpret_cast<uint8_t*>(target + i * target_step);
    if (writes_vectors) {
      if constexpr (kSize == 8)
        *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
      else
        *reinterpret_cast<uint32_t*>(at) = words[0];
      return;
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j)
      if (j < num) at[j] = static_cast<uint8_t>(words[j / 4] >> (j % 4 * 8));
  }
};

// The largest over all threads, which all get it. `shared` has a place for each warp.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t largest, uint32_t* shared) {
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = largest;
  __syncthreads();
  largest = __reduce_max_sync(0xffffffffu, shared[threadIdx.x % (kThreads / kWarp)]);
  __syncthreads();  // before the next block writes to `shared`
  return largest;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) quantize_kernel(Boxes table) {
  __shared__ uint32_t shared[kThreads / kWarp];
  for (int64_t tile = blockIdx.x; tile < table.num_tiles; tile += gridDim.x) {
    const int64_t at = table.box_of_tile[tile];
    const Box box = table.boxes[at];
    const int64_t number = tile - table.first_tile[at], blocks = ceil_div(box.items, kBlock);
    const int64_t block_row = number / blocks, block_column = number - block_row * blocks;
    const Part<T> part(box, {block_row * kBlock, block_column * kBlock});
    Vector<T> values[Part<T>::kVectors];
#pragma unroll
    for (int i = 0; i < Part<T>::kVectors; ++i) values[i] = part.load(i);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < Part<T>::kVectors; ++i)
#pragma unroll
      for (int j = 0; j < Part<T>::kSize; ++j)
        largest = max(largest, magnitude_of(to_float32(values[i].items[j])));
    const float scale = scale_of(largest_of_block(largest, shared));
    if (threadIdx.x == 0)
      reinterpret_cast<float*>(box.scales + block_row * box.scales_stride)[block_column] = scale;
#pragma unroll
    for (int i = 0; i < Part<T>::kVectors; ++i) part.store(i, values[i], scale);
  }
}

template <typename T>
void launch(const Boxes& table, const Launch& where) {
  if (table.num_tiles == 0) return;
  const OnDevice on_device(where.device);
  const unsigned blocks = num_blocks(quantize_kernel<T>, kThreads, where.device, table.num_tiles);
  quantize_kernel<T><<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(where.stream)>>>(table);
  check_cuda(cudaGetLastError());
}

}  // namespace

void quantize_boxes_cuda(Kind kind, const Boxes& table, const Launch& where) {
  if (kind == Kind::quantize_float32)
    launch<float>(table, where);
  else
    launch<uint16_t>(table, where);
}

}  // namespace mcore_rl
