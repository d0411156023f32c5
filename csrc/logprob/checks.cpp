// Arguments of the log-prob kernels, and which of CPU and GPU runs them.
#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "../cuda.h"
#include "cpu.h"

namespace mcore_rl {
namespace {

void require(bool holds, const std::string& name, const std::string& value, const char* allowed) {
  if (!holds) throw std::invalid_argument(name + "=" + value + "; allowed: " + allowed);
}

template <typename T>
T* pointer(const char* name, uintptr_t address) {
  require(address % alignof(T) == 0, name, std::to_string(address), "a multiple of the item's size");
  return reinterpret_cast<T*>(address);
}

void check_given(std::initializer_list<std::pair<const char*, const void*>> pointers) {
  for (const auto& [name, address] : pointers) require(address, name, "null", "an address");
}

// The gradients are written over the logits, and the sums beside them.
void check_apart(const LogitTile& tile, std::initializer_list<const float*> others) {
  const int64_t item_bytes = tile.is_bfloat16 ? 2 : 4;
  const auto begin = reinterpret_cast<uintptr_t>(tile.logits);
  const uintptr_t end = begin + ((tile.tokens - 1) * tile.stride + tile.ids) * item_bytes;
  for (const float* other : others) {
    const auto at = reinterpret_cast<uintptr_t>(other);
    if (other && at < end && at + tile.tokens * sizeof(float) > begin)
      throw std::invalid_argument("numbers of the tokens lie in the memory of the logits");
  }
}

bool is_empty(const LogitTile& tile) { return tile.tokens == 0 || tile.ids == 0; }

}  // namespace

LogitTile make_tile(uintptr_t logits, bool is_bfloat16, int64_t tokens, int64_t ids, int64_t stride,
                    uintptr_t targets, int64_t first_id, float scale) {
  constexpr int64_t most = int64_t{1} << 48;
  require(tokens >= 0 && tokens < most, "tokens", std::to_string(tokens), "0 to 2**48");
  require(ids >= 0 && ids < most, "ids", std::to_string(ids), "0 to 2**48");
  require(tokens <= 1 || (stride >= ids && stride < most / tokens), "stride",
          std::to_string(stride), "at least the ids of the tile");
  require(std::isfinite(scale) && scale > 0, "scale", std::to_string(scale), "finite, above 0");
  void* at = is_bfloat16 ? static_cast<void*>(pointer<uint16_t>("logits", logits))
                         : pointer<float>("logits", logits);
  const auto* ids_of_targets = pointer<int64_t>("targets", targets);
  return {at, is_bfloat16, tokens, ids, stride, ids_of_targets, first_id, scale};
}

Sums make_sums(uintptr_t top, uintptr_t total, uintptr_t moment, uintptr_t chosen) {
  return {pointer<float>("top", top), pointer<float>("total", total),
          pointer<float>("moment", moment), pointer<float>("chosen", chosen)};
}

Gradients make_gradients(uintptr_t top, uintptr_t total, uintptr_t entropy, uintptr_t of_log_probs,
                         uintptr_t of_entropy) {
  require((entropy == 0) == (of_entropy == 0), "of_entropy", of_entropy ? "given" : "null",
          "given where entropy is");
  return {pointer<float>("top", top), pointer<float>("total", total),
          pointer<float>("entropy", entropy), pointer<float>("of_log_probs", of_log_probs),
          pointer<float>("of_entropy", of_entropy)};
}

void logprob_forward(const LogitTile& tile, const Sums& sums, int device, uintptr_t stream,
                     int num_threads) {
  if (is_empty(tile)) return;
  check_given({{"logits", tile.logits}, {"targets", tile.targets}, {"top", sums.top},
               {"total", sums.total}, {"chosen", sums.chosen}});
  check_apart(tile, {sums.top, sums.total, sums.moment, sums.chosen});
  if (device >= 0)
    logprob_forward_cuda(tile, sums, Launch{device, stream});
  else
    logprob_forward_cpu(tile, sums, num_threads);
}

void logprob_backward(const LogitTile& tile, const Gradients& of, int device, uintptr_t stream,
                      int num_threads) {
  if (is_empty(tile)) return;
  check_given({{"logits", tile.logits}, {"targets", tile.targets}, {"top", of.top},
               {"total", of.total}, {"of_log_probs", of.of_log_probs}});
  check_apart(tile, {of.top, of.total, of.entropy, of.of_log_probs, of.of_entropy});
  if (device >= 0)
    logprob_backward_cuda(tile, of, Launch{device, stream});
  else
    logprob_backward_cpu(tile, of, num_threads);
}

}  // namespace mcore_rl
