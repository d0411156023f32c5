// Around every kernel: the device, the size of the grid, the error.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda.h"

namespace mcore_rl {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

// Makes the device of a launch the current one while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check_cuda(cudaGetDevice(&before_));
    check_cuda(cudaSetDevice(device));
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// Enough blocks of a kernel to fill the device, and no more than there is work for.
template <typename Kernel>
unsigned num_blocks(Kernel kernel, int threads, int device, int64_t work) {
  int processors = 0, resident = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0));
  return static_cast<unsigned>(std::min<int64_t>(work, int64_t{processors} * resident));
}

// Launches a kernel whose warps take a tile each.
template <typename Kernel>
void launch_warps(Kernel kernel, int threads, const Boxes& table, const Launch& where) {
  if (table.num_tiles == 0) return;
  const OnDevice on_device(where.device);
  const int64_t work = ceil_div(table.num_tiles, threads / 32);
  const unsigned blocks = num_blocks(kernel, threads, where.device, work);
  kernel<<<blocks, threads, 0, reinterpret_cast<cudaStream_t>(where.stream)>>>(table);
  check_cuda(cudaGetLastError());
}

}  // namespace mcore_rl
