// Blocks of 128 x 128 to float8 e4m3 on the CPU: DeepSeek-V3's format, as checkpoint/fp8.py has it.
#include "../parallel.h"
#include "convert.h"
#include "table.h"

namespace mcore_rl {

VECTORIZED uint32_t largest_magnitude(const float* values, int64_t num) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < num; ++i) largest = std::max(largest, magnitude_of(values[i]));
  return largest;
}

VECTORIZED uint32_t largest_magnitude(const uint16_t* values, int64_t num) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < num; ++i)
    largest = std::max(largest, magnitude_of(to_float32(values[i])));
  return largest;
}

VECTORIZED void quantize_row(const float* source, float scale, uint8_t* target, int64_t num) {
  for (int64_t i = 0; i < num; ++i) target[i] = to_e4m3(source[i] / scale);
}

VECTORIZED void quantize_row(const uint16_t* source, float scale, uint8_t* target, int64_t num) {
  for (int64_t i = 0; i < num; ++i) target[i] = to_e4m3(to_float32(source[i]) / scale);
}

namespace {

template <typename S>
void quantize_block(const Box& box, int64_t number) {
  const int64_t blocks = ceil_div(box.items, kBlock);
  const int64_t block_row = number / blocks, block_column = number % blocks;
  const int64_t column = block_column * kBlock, num = std::min(box.items - column, int64_t{kBlock});
  const int64_t begin = block_row * kBlock, end = std::min(box.rows, begin + kBlock);
  uint32_t largest = 0;
  for (int64_t row = begin; row < end; ++row)
    largest = std::max(largest, largest_magnitude(source_at<S>(box, {row, column}), num));
  const float scale = scale_of(largest);
  reinterpret_cast<float*>(box.scales + block_row * box.scales_stride)[block_column] = scale;
  for (int64_t row = begin; row < end; ++row)
    quantize_row(source_at<S>(box, {row, column}), scale, target_at<uint8_t>(box, {row, column}),
                 num);
}

template <typename S>
void quantize_all(const Boxes& table, int num_threads) {
  parallel_for(table.num_tiles, 1, num_threads, [&](int64_t tile, int64_t) {
    const int64_t at = table.box_of_tile[tile];
    quantize_block<S>(table.boxes[at], tile - table.first_tile[at]);
  });
}

}  // namespace

void quantize_boxes(Kind kind, const Boxes& table, int num_threads) {
  if (kind == Kind::quantize_float32)
    quantize_all<float>(table, num_threads);
  else
    quantize_all<uint16_t>(table, num_threads);
}

}  // namespace mcore_rl
