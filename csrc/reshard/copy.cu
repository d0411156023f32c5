// Copies and casts of boxes on a GPU: one launch, and a warp for each tile of 8 KiB or 4096 items.
#include "../cuda_launch.cuh"
#include "box.h"
#include "convert.h"

namespace mcore_rl {

const bool has_cuda = true;

namespace {

constexpr int kThreads = 256, kWarp = 32, kAtOnce = 4;  // loads of a thread before its stores

// What a thread moves at once: U is read, V is written.
template <typename U>
struct Copy {
  using Source = U;
  using Target = U;
  __device__ static U convert(U value) { return value; }
};

struct CastOneDown {
  using Source = float;
  using Target = uint16_t;
  __device__ static uint16_t convert(float value) { return to_bfloat16(value); }
};

struct CastFourDown {
  using Source = float4;
  using Target = ushort4;
  __device__ static ushort4 convert(float4 v) {
    return make_ushort4(to_bfloat16(v.x), to_bfloat16(v.y), to_bfloat16(v.z), to_bfloat16(v.w));
  }
};

struct CastOneUp {
  using Source = uint16_t;
  using Target = float;
  __device__ static float convert(uint16_t value) { return to_float32(value); }
};

struct CastFourUp {
  using Source = ushort4;
  using Target = float4;
  __device__ static float4 convert(ushort4 v) {
    return make_float4(to_float32(v.x), to_float32(v.y), to_float32(v.z), to_float32(v.w));
  }
};

// One warp moves one tile; `unit` is how many items Op moves at once.
template <typename Op>
__device__ __forceinline__ void move_tile(const Box& box, int64_t number, const Sizes& sizes,
                                          int unit) {
  using Source = typename Op::Source;
  using Target = typename Op::Target;
  const Tile tile = tiles_of(box, number, 1, sizes, unit);
  const int64_t columns = box.items / unit;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t first = lane; first < tile.length; first += kAtOnce * kWarp) {
    Source values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t offset = first + i * kWarp;
      if (offset < tile.length)
        values[i] = *source_at<Source>(box, advance(tile.start, offset, columns));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t offset = first + i * kWarp;
      if (offset < tile.length)
        *target_at<Target>(box, advance(tile.start, offset, columns)) = Op::convert(values[i]);
    }
  }
}

template <Kind kind>
__device__ __forceinline__ void run_tile(const Box& box, int64_t number) {
  const Sizes sizes = sizes_of(kind);
  if constexpr (kind == Kind::copy) {
    switch (alignment_of(box)) {
      case 16: return move_tile<Copy<uint4>>(box, number, sizes, 16);
      case 8: return move_tile<Copy<uint2>>(box, number, sizes, 8);
      case 4: return move_tile<Copy<uint32_t>>(box, number, sizes, 4);
      case 2: return move_tile<Copy<uint16_t>>(box, number, sizes, 2);
      default: return move_tile<Copy<uint8_t>>(box, number, sizes, 1);
    }
  } else if constexpr (kind == Kind::to_bfloat16) {
    if (casts_by_four(box, sizes)) return move_tile<CastFourDown>(box, number, sizes, 4);
    move_tile<CastOneDown>(box, number, sizes, 1);
  } else {
    if (casts_by_four(box, sizes)) return move_tile<CastFourUp>(box, number, sizes, 4);
    move_tile<CastOneUp>(box, number, sizes, 1);
  }
}

template <Kind kind>
__global__ void __launch_bounds__(kThreads, 3) run_kernel(Boxes table) {
  constexpr int warps = kThreads / kWarp;
  const int64_t step = int64_t{gridDim.x} * warps;
  for (int64_t tile = int64_t{blockIdx.x} * warps + threadIdx.x / kWarp; tile < table.num_tiles;
       tile += step) {
    const int64_t at = table.box_of_tile[tile];
    const Box box = table.boxes[at];  // a copy: what is stored does not alias it
    run_tile<kind>(box, tile - table.first_tile[at]);
  }
}

template <Kind kind>
void launch(const Boxes& table, const Launch& where) {
  launch_warps(run_kernel<kind>, kThreads, table, where);
}

}  // namespace

void run_boxes_cuda(Kind kind, const Boxes& table, const Launch& where) {
  if (kind == Kind::copy) launch<Kind::copy>(table, where);
  if (kind == Kind::to_bfloat16) launch<Kind::to_bfloat16>(table, where);
  if (kind == Kind::to_float32) launch<Kind::to_float32>(table, where);
}

}  // namespace mcore_rl
