// Stands in for the *.cu files where nvcc was not found.
#include <stdexcept>

#include "cuda.h"

namespace mcore_rl {

const bool has_cuda = false;

namespace {
[[noreturn]] void refuse() {
  throw std::runtime_error(
      "mcore_rl._csrc was built without CUDA: install again where nvcc is found");
}
}  // namespace

void run_boxes_cuda(Kind, const Boxes&, const Launch&) { refuse(); }
void quantize_boxes_cuda(Kind, const Boxes&, const Launch&) { refuse(); }
void checksum_boxes_cuda(Kind, const Boxes&, const Launch&) { refuse(); }

}  // namespace mcore_rl
