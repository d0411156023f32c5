// The checksum of a box: a sum modulo 2**64 over its words of 16 bits, in row-major order of its
// items. Word i counts as often as its place says: prime (i % 4) times an odd weight of the group
// i / 4. So parts of a box may be summed in any order and by anyone, a change of one or two words of
// a group never goes unseen, and any other change does with a chance of about 2**-48.
#pragma once

#include "box.h"

namespace mcore_rl {

constexpr int kGroup = 4;  // words; those of a group are read as one 64-bit number

HOST_DEVICE uint64_t weight_of(uint64_t group) {
  uint64_t bits = (group + 1) * 0x9E3779B97F4A7C15u;
  bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93u;
  return (bits ^ bits >> 32) | 1u;
}

// The part of a group in the sum. Words that are not there are 0. The primes are xxHash's.
HOST_DEVICE uint64_t sum_group(uint64_t words, uint64_t group) {
  const uint64_t sum = (words & 0xffffu) * 0x9E3779B1u + (words >> 16 & 0xffffu) * 0x85EBCA77u +
                       (words >> 32 & 0xffffu) * 0xC2B2AE3Du + (words >> 48) * 0x27D4EB2Fu;
  return weight_of(group) * sum;
}

// The part of words that lie in one group, the first of which is the index-th of the box.
HOST_DEVICE uint64_t sum_words(uint64_t words, uint64_t index) {
  return sum_group(words << index % kGroup * 16, index / kGroup);
}

// What the words of a cast box are counted in: one item is read as so many.
HOST_DEVICE int words_of_item(Kind kind) { return kind == Kind::checksum_to_float32 ? 2 : 1; }

// The number of a tile's first word in its box.
HOST_DEVICE uint64_t first_word(Kind kind, const Box& box, int64_t number) {
  return static_cast<uint64_t>(box.first_item + number * sizes_of(kind).tile) * words_of_item(kind);
}

// The largest power of two, up to `most`, of items that every row consists of and that are aligned
// in memory and in the order of the box.
HOST_DEVICE int unit_of(const Box& box, int item_bytes, int most) {
  const int64_t bits = (box.source | box.source_stride) / item_bytes | box.items | box.first_item | most;
  return static_cast<int>(bits & -bits);
}

}  // namespace mcore_rl
