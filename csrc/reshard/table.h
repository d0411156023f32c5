// The boxes of one launch: checked once, run as often as wanted.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "box.h"

namespace mcore_rl {

using Moves = std::array<int64_t, 5>;  // how many of 1, 2, 4, 8 and 16 items

class Table {
 public:
  // kind: a Kind. boxes: the address of int64 [num_boxes, 8], in the order of Box's fields.
  // Throws std::invalid_argument for a null, misaligned or out-of-range entry and, except for
  // checksums, for targets that overlap each other and sources that overlap targets.
  Table(int64_t kind, uintptr_t boxes, int64_t num_boxes);

  // On the CPU, on up to num_threads threads. Returns when all is done.
  void run(int num_threads) const;

  // On a GPU, in one launch. on_device: the address of a copy of words() there. Returns at once.
  void run_cuda(int device, uintptr_t stream, uintptr_t on_device) const;

  // A copy or cast by the loops of the GPU, lane by lane on the CPU: for tests without a GPU.
  Moves simulate_cuda() const;

  // What run_cuda needs in the memory of the GPU: the boxes, the first tiles, the box of each tile.
  const std::vector<int64_t>& words() const { return words_; }
  int64_t num_tiles() const { return words_[num_boxes_ * (kBoxWords + 1)]; }

 private:
  Boxes at(const int64_t* words) const;

  Kind kind_;
  int64_t num_boxes_;
  std::vector<int64_t> words_;
};

void run_boxes(Kind kind, const Boxes& table, int num_threads);      // copy.cpp
Moves simulate_boxes_cuda(Kind kind, const Boxes& table);             // copy.cpp
void quantize_boxes(Kind kind, const Boxes& table, int num_threads);  // quantize.cpp
void checksum_boxes(Kind kind, const Boxes& table, int num_threads);  // checksum.cpp

// Items of a row, float32 -> bfloat16 and back; copy.cpp.
void cast_row(const float* source, uint16_t* target, int64_t num);
void cast_row(const uint16_t* source, float* target, int64_t num);

// Throws std::invalid_argument unless the boxes can be run in any order.
void check_overlap(Kind kind, const Box* boxes, int64_t num_boxes);  // overlap.cpp

}  // namespace mcore_rl
