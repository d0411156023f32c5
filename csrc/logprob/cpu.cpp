// Log-probs and entropy on the CPU: a token's logits in chunks that stay in the first-level cache.
#include "cpu.h"

#include <algorithm>
#include <cmath>

#include "../parallel.h"
#include "../reshard/convert.h"

namespace mcore_rl {
namespace {

constexpr int64_t kChunk = 1024;  // logits
constexpr int kLanes = 16;        // sums side by side; their loops become vector instructions

// exp(x) for x <= 88 within 2e-7, relative, and 0 below -87. Cephes' expf (S. Moshier): the nearest
// n with x = n log 2 + r, a polynomial of r, and n put into the exponent. NaN stays NaN. `shifted`
// holds n in its last bits, so no float is converted to an integer that cannot hold it.
inline __attribute__((always_inline)) float exponential(float x) {
  const float bounded = x < kNothing ? kNothing : x;
  const float shifted = bounded * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2**23
  const float n = shifted - 12582912.0f;
  const float r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  float poly = 1.9875691500e-4f;
  poly = poly * r + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  poly = poly * r * r + r + 1.0f;
  const float power = bit_cast<float>((bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
  return x < kNothing ? 0.0f : poly * power;
}


}  // namespace

VECTORIZED void load_chunk(const float* logits, float scale, float* z, int64_t num) {
  for (int64_t i = 0; i < num; ++i) z[i] = logits[i] * scale;
}

VECTORIZED void load_chunk(const uint16_t* logits, float scale, float* z, int64_t num) {
  for (int64_t i = 0; i < num; ++i) z[i] = to_float32(logits[i]) * scale;
}

// num is a multiple of kLanes in what follows: chunks are filled up with minus infinity.
VECTORIZED float largest_of(const float* z, int64_t num) {
  float lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = -INFINITY;
  for (int64_t i = 0; i < num; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane)
      lanes[lane] = z[i + lane] > lanes[lane] ? z[i + lane] : lanes[lane];
  return *std::max_element(lanes, lanes + kLanes);
}

VECTORIZED float total_of(const float* z, float top, int64_t num) {
  float totals[kLanes] = {};
  for (int64_t i = 0; i < num; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) totals[lane] += exponential(z[i + lane] - top);
  float total = 0;
  for (float lane : totals) total += lane;
  return total;
}

VECTORIZED void sums_of(const float* z, float top, int64_t num, float* total, float* moment) {
  float totals[kLanes] = {}, moments[kLanes] = {};
  for (int64_t i = 0; i < num; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = z[i + lane] - top, p = exponential(x);
      totals[lane] += p;
      moments[lane] += p * (x < kNothing ? kNothing : x);
    }
  *total = *moment = 0;
  for (int lane = 0; lane < kLanes; ++lane) *total += totals[lane], *moment += moments[lane];
}

VECTORIZED void grad_chunk(const float* z, const RowGradient& row, float* grad, int64_t num) {
  const float top = row.top, a = row.a, b = row.b, c = row.c;
  for (int64_t i = 0; i < num; ++i) {
    const float x = z[i] - top, bounded = x < kNothing ? kNothing : x;
    grad[i] = exponential(x) * (a + b * (bounded + c));
  }
}

VECTORIZED void store_chunk(const float* grad, float* logits, int64_t num) {
  for (int64_t i = 0; i < num; ++i) logits[i] = grad[i];
}

VECTORIZED void store_chunk(const float* grad, uint16_t* logits, int64_t num) {
  for (int64_t i = 0; i < num; ++i) logits[i] = to_bfloat16(grad[i]);
}

namespace {

double exp_double(double x) { return std::exp(x); }

template <typename T>
void add_token(const LogitTile& tile, const Sums& sums, int64_t token) {
  const T* logits = static_cast<const T*>(tile.logits) + token * tile.stride;
  RunningSums<double> running{sums.top[token], sums.total[token],
                              sums.moment ? sums.moment[token] : 0.0};
  alignas(64) float z[kChunk];
  for (int64_t begin = 0; begin < tile.ids; begin += kChunk) {
    const int64_t num = std::min(kChunk, tile.ids - begin);
    const int64_t filled = (num + kLanes - 1) / kLanes * kLanes;
    load_chunk(logits + begin, tile.scale, z, num);
    std::fill(z + num, z + filled, -INFINITY);
    const float largest = largest_of(z, filled);
    if (largest > running.top) running.move_to(largest, exp_double);
    const float top = static_cast<float>(running.top);
    float total, moment = 0;
    if (sums.moment)
      sums_of(z, top, filled, &total, &moment);
    else
      total = total_of(z, top, filled);
    running.total += total;
    running.moment += moment;
  }
  sums.top[token] = static_cast<float>(running.top);
  sums.total[token] = static_cast<float>(running.total);
  if (sums.moment) sums.moment[token] = static_cast<float>(running.moment);
  const int64_t target = tile.targets[token] - tile.first_id;
  if (target >= 0 && target < tile.ids) sums.chosen[token] += to_float32(logits[target]) * tile.scale;
}

template <typename T>
void grad_token(const LogitTile& tile, const Gradients& of, int64_t token) {
  T* logits = static_cast<T*>(tile.logits) + token * tile.stride;
  const RowGradient row = RowGradient::of(of, token, tile.scale, std::log(of.total[token]));
  const int64_t target = tile.targets[token] - tile.first_id;
  alignas(64) float z[kChunk], grad[kChunk];
  for (int64_t begin = 0; begin < tile.ids; begin += kChunk) {
    const int64_t num = std::min(kChunk, tile.ids - begin);
    load_chunk(logits + begin, tile.scale, z, num);
    grad_chunk(z, row, grad, num);
    if (target >= begin && target < begin + num) grad[target - begin] += row.at_target;
    store_chunk(grad, logits + begin, num);
  }
}

// work(token, an item of the logits' type) for all tokens; a run of tokens has about 64k logits.
template <typename Work>
void each_token(const LogitTile& tile, int num_threads, Work work) {
  const int64_t run = std::max<int64_t>(1, 65536 / tile.ids);
  parallel_for(tile.tokens, run, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      tile.is_bfloat16 ? work(token, uint16_t{}) : work(token, float{});
  });
}

}  // namespace

void logprob_forward_cpu(const LogitTile& tile, const Sums& sums, int num_threads) {
  each_token(tile, num_threads,
             [&](int64_t token, auto item) { add_token<decltype(item)>(tile, sums, token); });
}

void logprob_backward_cpu(const LogitTile& tile, const Gradients& of, int num_threads) {
  each_token(tile, num_threads,
             [&](int64_t token, auto item) { grad_token<decltype(item)>(tile, of, token); });
}

}  // namespace mcore_rl
