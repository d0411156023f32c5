// Log-probs and entropy of a softmax over a vocabulary that is seen one tile at a time.
//
// Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3), with the sum that the
// entropy needs. Beside the logits of a tile there are only a few numbers a token. With
// z = scale * logit, and everything measured from the largest z so that large ones cancel:
//
//   top = max z   total = sum exp(z - top)   moment = sum exp(z - top) (z - top)   chosen = z[target]
//   log_prob = chosen - top - log(total)     entropy = log(total) - moment / total
//   d log_prob / dz_j = [j = target] - p_j   d entropy / dz_j = -p_j (log p_j + entropy)
#pragma once

#include <cstdint>

#include "../portable.h"

namespace mcore_rl {

// Logits [tokens, ids] of the vocabulary ids first_id, first_id + 1, ...: float32 or bfloat16.
struct LogitTile {
  void* logits;
  bool is_bfloat16;
  int64_t tokens, ids;
  int64_t stride;          // items from token to token
  const int64_t* targets;  // [tokens] vocabulary ids; those outside the tile are another's
  int64_t first_id;
  float scale;  // 1 / temperature
};

// Running sums, each [tokens]. They start as a large negative number (finite) and zeros.
struct Sums {
  float *top, *total, *moment, *chosen;  // moment may be null: no entropy
};

// What the gradient of a logit is made of, each [tokens]; the sums over the whole vocabulary.
struct Gradients {
  const float *top, *total, *entropy;         // entropy may be null, together with of_entropy
  const float *of_log_probs, *of_entropy;  // of the loss
};

// Each throws std::invalid_argument for an address that is misaligned, or a bad size.
LogitTile make_tile(uintptr_t logits, bool is_bfloat16, int64_t tokens, int64_t ids, int64_t stride,
                    uintptr_t targets, int64_t first_id, float scale);
Sums make_sums(uintptr_t top, uintptr_t total, uintptr_t moment, uintptr_t chosen);
Gradients make_gradients(uintptr_t top, uintptr_t total, uintptr_t entropy, uintptr_t of_log_probs,
                         uintptr_t of_entropy);

// Takes a tile into the sums. device: the GPU that holds it all, or -1 for the CPU.
// Throws std::invalid_argument for a null address, and where the sums lie in the logits.
void logprob_forward(const LogitTile& tile, const Sums& sums, int device, uintptr_t stream,
                     int num_threads);

// Overwrites the logits of a tile with the gradient of the loss by them, rounded to their dtype.
// Throws as logprob_forward.
void logprob_backward(const LogitTile& tile, const Gradients& of, int device, uintptr_t stream,
                      int num_threads);

// exp of this is taken as the smallest there is; minus infinity adds nothing to any sum.
constexpr float kNothing = -87.0f;

// Sums of one token, or of one thread's part of it.
template <typename T>
struct RunningSums {
  T top, total, moment;

  // Measures the sums from another top.
  template <typename Exp>
  HOST_DEVICE void move_to(T higher, Exp exp) {
    const T change = top - higher, decay = exp(change);
    moment = decay * (moment + (change < T(kNothing) ? T(0) : change) * total);
    total *= decay;
    top = higher;
  }
};

// What the gradient of one token's logits is made of: d = exp(x) * (a + b * (x + c)), x = z - top.
struct RowGradient {
  float top, a, b, c, at_target;

  HOST_DEVICE static RowGradient of(const Gradients& from, int64_t token, float scale,
                                    float log_total) {
    const float factor = scale / from.total[token], of_log_prob = from.of_log_probs[token];
    const bool with_entropy = from.entropy != nullptr;
    return {from.top[token], -of_log_prob * factor,
            with_entropy ? -from.of_entropy[token] * factor : 0.0f,
            with_entropy ? from.entropy[token] - log_total : 0.0f, of_log_prob * scale};
  }
};

}  // namespace mcore_rl
