// What is compiled by nvcc (*.cu), or refuses to run where there was none (no_cuda.cpp).
#pragma once

#include "reshard/box.h"

namespace mcore_rl {

extern const bool has_cuda;

struct Launch {
  int device;
  uintptr_t stream;
};

// Each returns when the kernel is in the stream, and throws std::runtime_error with CUDA's message.
void run_boxes_cuda(Kind kind, const Boxes& table, const Launch& launch);
void quantize_boxes_cuda(Kind kind, const Boxes& table, const Launch& launch);
void checksum_boxes_cuda(Kind kind, const Boxes& table, const Launch& launch);

}  // namespace mcore_rl
