// Copies and casts of boxes on the CPU.
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstring>

#include "../portable.h"
#include "convert.h"
#include "move.h"
#include "run_tiles.h"
#include "table.h"

namespace mcore_rl {

VECTORIZED void cast_row(const float* source, uint16_t* target, int64_t num) {
  for (int64_t i = 0; i < num; ++i) target[i] = to_bfloat16(source[i]);
}

VECTORIZED void cast_row(const uint16_t* source, float* target, int64_t num) {
  for (int64_t i = 0; i < num; ++i) target[i] = to_float32(source[i]);
}

namespace {

// Bytes around the caches: whoever reads them is another process or a network, and a cache that took
// them in would first load what they replace. Half of the time of a copy into memory not in a cache.
void copy_bytes(char* target, const char* source, int64_t num) {
#ifdef __SSE2__
  constexpr int64_t kWord = sizeof(__m128i), kLine = 4 * kWord, kLeast = 4096;
  if (num >= kLeast) {
    const int64_t head = -reinterpret_cast<uintptr_t>(target) % kLine, lines = (num - head) / kLine;
    std::memcpy(target, source, head);
    target += head, source += head, num -= head + lines * kLine;
    for (int64_t line = 0; line < lines; ++line, target += kLine, source += kLine) {
      const auto* from = reinterpret_cast<const __m128i*>(source);
      auto* to = reinterpret_cast<__m128i*>(target);
      const __m128i words[] = {_mm_loadu_si128(from), _mm_loadu_si128(from + 1),
                               _mm_loadu_si128(from + 2), _mm_loadu_si128(from + 3)};
      for (int word = 0; word < 4; ++word) _mm_stream_si128(to + word, words[word]);
    }
    _mm_sfence();  // who is told that the copy is done sees it
  }
#endif
  std::memcpy(target, source, num);
}

template <typename S, typename D>
void run_row(const Box& box, Place place, int64_t num) {
  if constexpr (sizeof(S) == sizeof(D))
    copy_bytes(target_at<D>(box, place), source_at<S>(box, place), num);
  else
    cast_row(source_at<S>(box, place), target_at<D>(box, place), num);
}

template <typename S, typename D>
void move_tiles(const Box& box, const Tile& tile) {
  for (uint32_t offset = 0; offset < tile.length;) {
    const Place place = advance(tile.start, offset, box.items);
    const int64_t num = std::min<int64_t>(box.items - place.column, tile.length - offset);
    run_row<S, D>(box, place, num);
    offset += static_cast<uint32_t>(num);
  }
}

template <typename S, typename D>
void run_all(const Boxes& table, const Sizes& sizes, int num_threads) {
  run_tiles(table, num_threads, [&](const Box& box, int64_t number, int64_t count) {
    move_tiles<S, D>(box, tiles_of(box, number, count, sizes, 1));
  });
}

template <Kind kind>
void move_all(const Boxes& table, Moves& moves) {
  const auto count = [&](int width) { ++moves[__builtin_ctz(width)]; };
  for (int64_t tile = 0; tile < table.num_tiles; ++tile) {
    const int64_t at = table.box_of_tile[tile];
    for (uint32_t lane = 0; lane < kWarp; ++lane)
      move_tile<kind>(table.boxes[at], tile - table.first_tile[at], lane, count);
  }
}

}  // namespace

Moves simulate_boxes_cuda(Kind kind, const Boxes& table) {
  Moves moves = {};
  if (kind == Kind::copy) move_all<Kind::copy>(table, moves);
  if (kind == Kind::to_bfloat16) move_all<Kind::to_bfloat16>(table, moves);
  if (kind == Kind::to_float32) move_all<Kind::to_float32>(table, moves);
  return moves;
}

void run_boxes(Kind kind, const Boxes& table, int num_threads) {
  const Sizes sizes = sizes_of(kind);
  if (kind == Kind::copy) run_all<char, char>(table, sizes, num_threads);
  if (kind == Kind::to_bfloat16) run_all<float, uint16_t>(table, sizes, num_threads);
  if (kind == Kind::to_float32) run_all<uint16_t, float>(table, sizes, num_threads);
}

}  // namespace mcore_rl
