// Checksums of boxes on the CPU.
#include "checksum.h"

#include <cstring>

#include "run_tiles.h"
#include "table.h"

namespace mcore_rl {

VECTORIZED uint64_t sum_groups(const uint16_t* words, int64_t num_groups, uint64_t first_group) {
  uint64_t sum = 0;
  for (int64_t n = 0; n < num_groups; ++n) {
    uint64_t group;
    std::memcpy(&group, words + n * kGroup, sizeof(group));
    sum += sum_group(group, first_group + n);
  }
  return sum;
}

namespace {

constexpr int64_t kCast = 2048;  // items that are cast at once, in a cache

uint64_t sum_row(const uint16_t* words, int64_t num, uint64_t index) {
  uint64_t sum = 0;
  for (; num > 0 && index % kGroup != 0; --num, ++words, ++index) sum += sum_words(*words, index);
  const int64_t groups = num / kGroup;
  sum += sum_groups(words, groups, index / kGroup);
  for (int64_t n = groups * kGroup; n < num; ++n) sum += sum_words(words[n], index + n);
  return sum;
}

template <typename S, typename D>
uint64_t sum_cast_row(const S* items, int64_t num, uint64_t index) {
  D values[kCast];
  uint16_t words[kCast * sizeof(D) / 2];
  uint64_t sum = 0;
  for (int64_t done = 0; done < num; done += kCast) {
    const int64_t count = std::min(kCast, num - done), num_words = count * sizeof(D) / 2;
    cast_row(items + done, values, count);
    std::memcpy(words, values, count * sizeof(D));
    sum += sum_row(words, num_words, index);
    index += num_words;
  }
  return sum;
}

uint64_t sum_part(Kind kind, const Box& box, Place place, int64_t num, uint64_t index) {
  switch (kind) {
    case Kind::checksum_to_bfloat16:
      return sum_cast_row<float, uint16_t>(source_at<float>(box, place), num, index);
    case Kind::checksum_to_float32:
      return sum_cast_row<uint16_t, float>(source_at<uint16_t>(box, place), num, index);
    default: return sum_row(source_at<uint16_t>(box, place), num, index);
  }
}

uint64_t sum_tiles(Kind kind, const Box& box, int64_t number, int64_t count) {
  const Tile tile = tiles_of(box, number, count, sizes_of(kind), 1);
  uint64_t sum = 0, index = first_word(kind, box, number);
  for (uint32_t offset = 0; offset < tile.length;) {
    const Place place = advance(tile.start, offset, box.items);
    const int64_t num = std::min<int64_t>(box.items - place.column, tile.length - offset);
    sum += sum_part(kind, box, place, num, index);
    offset += static_cast<uint32_t>(num);
    index += num * words_of_item(kind);
  }
  return sum;
}

}  // namespace

void checksum_boxes(Kind kind, const Boxes& table, int num_threads) {
  run_tiles(table, num_threads, [&](const Box& box, int64_t number, int64_t count) {
    __atomic_fetch_add(reinterpret_cast<uint64_t*>(box.target),
                       sum_tiles(kind, box, number, count), __ATOMIC_RELAXED);
  });
}

}  // namespace mcore_rl
