// Copies and casts of boxes on a GPU: one launch, and a warp for each tile of 8 KiB or 4096 items.
#include "../cuda_launch.cuh"
#include "move.h"

namespace mcore_rl {

const bool has_cuda = true;

namespace {

constexpr int kThreads = 256;

struct Uncounted {
  HOST_DEVICE void operator()(int) const {}
};

template <Kind kind>
__global__ void __launch_bounds__(kThreads, 3) run_kernel(Boxes table) {
  constexpr int warps = kThreads / kWarp;
  const int64_t step = int64_t{gridDim.x} * warps;
  for (int64_t tile = int64_t{blockIdx.x} * warps + threadIdx.x / kWarp; tile < table.num_tiles;
       tile += step) {
    const int64_t at = table.box_of_tile[tile];
    const Box box = table.boxes[at];  // a copy: what is stored does not alias it
    move_tile<kind>(box, tile - table.first_tile[at], threadIdx.x % kWarp, Uncounted{});
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
