// Checksums of boxes on a GPU: one launch, and a warp for each tile of 4096 items, which adds its sum
// to that of the box.
#include "checksum.h"

#include "../cuda_launch.cuh"
#include "convert.h"

namespace mcore_rl {
namespace {

constexpr int kThreads = 256, kWarp = 32, kAtOnce = 4;  // loads of a thread before their sums

// What a thread reads at once, and the part of it in the sum, from its first word's index on.
struct EightWords {
  using Source = uint4;
  static constexpr int kItems = 8;
  __device__ static uint64_t sum(uint4 v, uint64_t index) {
    return sum_group(uint64_t{v.y} << 32 | v.x, index / kGroup) +
           sum_group(uint64_t{v.w} << 32 | v.z, index / kGroup + 1);
  }
};

struct FourWords {
  using Source = uint2;
  static constexpr int kItems = 4;
  __device__ static uint64_t sum(uint2 v, uint64_t index) {
    return sum_group(uint64_t{v.y} << 32 | v.x, index / kGroup);
  }
};

template <typename U>
struct FewWords {
  using Source = U;
  static constexpr int kItems = sizeof(U) / 2;
  __device__ static uint64_t sum(U value, uint64_t index) { return sum_words(value, index); }
};

struct OneDown {
  using Source = float;
  static constexpr int kItems = 1;
  __device__ static uint64_t sum(float value, uint64_t index) {
    return sum_words(to_bfloat16(value), index);
  }
};

struct FourDown {
  using Source = float4;
  static constexpr int kItems = 4;
  __device__ static uint64_t sum(float4 v, uint64_t index) {
    const uint32_t low = to_bfloat16(v.x) | uint32_t{to_bfloat16(v.y)} << 16;
    const uint32_t high = to_bfloat16(v.z) | uint32_t{to_bfloat16(v.w)} << 16;
    return sum_group(uint64_t{high} << 32 | low, index / kGroup);
  }
};

struct OneUp {  // the low word of the float32 is 0
  using Source = uint16_t;
  static constexpr int kItems = 1;
  __device__ static uint64_t sum(uint16_t value, uint64_t index) {
    return sum_words(value, index + 1);
  }
};

template <typename Op>
__device__ __forceinline__ uint64_t sum_tile(Kind kind, const Box& box, int64_t number) {
  using Source = typename Op::Source;
  const Tile tile = tiles_of(box, number, 1, sizes_of(kind), Op::kItems);
  const int64_t columns = box.items / Op::kItems;
  const uint64_t index = first_word(kind, box, number);
  const uint32_t step = Op::kItems * words_of_item(kind), lane = threadIdx.x % kWarp;
  uint64_t sum = 0;
  for (uint32_t first = lane; first < tile.length; first += kAtOnce * kWarp) {
    Source values[kAtOnce] = {};  // zeros count nothing
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t offset = first + i * kWarp;
      if (offset < tile.length)
        values[i] = *source_at<Source>(box, advance(tile.start, offset, columns));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      sum += Op::sum(values[i], index + uint64_t{first + i * kWarp} * step);
  }
  return sum;
}

template <Kind kind>
__device__ __forceinline__ uint64_t sum_of(const Box& box, int64_t number) {
  if constexpr (kind == Kind::checksum) {
    switch (unit_of(box, 2, 8)) {
      case 8: return sum_tile<EightWords>(kind, box, number);
      case 4: return sum_tile<FourWords>(kind, box, number);
      case 2: return sum_tile<FewWords<uint32_t>>(kind, box, number);
      default: return sum_tile<FewWords<uint16_t>>(kind, box, number);
    }
  } else if constexpr (kind == Kind::checksum_to_bfloat16) {
    if (unit_of(box, 4, 4) == 4) return sum_tile<FourDown>(kind, box, number);
    return sum_tile<OneDown>(kind, box, number);
  } else {
    return sum_tile<OneUp>(kind, box, number);
  }
}

template <Kind kind>
__global__ void __launch_bounds__(kThreads, 3) checksum_kernel(Boxes table) {
  constexpr int warps = kThreads / kWarp;
  const int64_t step = int64_t{gridDim.x} * warps;
  for (int64_t tile = int64_t{blockIdx.x} * warps + threadIdx.x / kWarp; tile < table.num_tiles;
       tile += step) {
    const int64_t at = table.box_of_tile[tile];
    const Box box = table.boxes[at];
    uint64_t sum = sum_of<kind>(box, tile - table.first_tile[at]);
#pragma unroll
    for (int other = kWarp / 2; other > 0; other /= 2)
      sum += __shfl_down_sync(0xffffffffu, sum, other);
    if (threadIdx.x % kWarp == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(box.target), sum);
  }
}

template <Kind kind>
void launch(const Boxes& table, const Launch& where) {
  launch_warps(checksum_kernel<kind>, kThreads, table, where);
}

}  // namespace

void checksum_boxes_cuda(Kind kind, const Boxes& table, const Launch& where) {
  if (kind == Kind::checksum) launch<Kind::checksum>(table, where);
  if (kind == Kind::checksum_to_bfloat16) launch<Kind::checksum_to_bfloat16>(table, where);
  if (kind == Kind::checksum_to_float32) launch<Kind::checksum_to_float32>(table, where);
}

}  // namespace mcore_rl
