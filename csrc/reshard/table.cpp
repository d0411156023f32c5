#include "table.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../cuda.h"

namespace mcore_rl {
namespace {

constexpr int64_t kMost = int64_t{1} << 56;  // bytes; above any address, far below an overflow

struct Entry {
  int64_t number;
  void require(bool holds, const char* name, int64_t value, const char* allowed) const {
    if (!holds)
      throw std::invalid_argument("box " + std::to_string(number) + ": " + name + "=" +
                                  std::to_string(value) + "; allowed: " + allowed);
  }
};

// `rows` rows that start at an address, of items of item_bytes bytes. The stride of one row becomes
// 0, whatever it was, so that no one need ask.
void check_side(const Entry& entry, const char* name, int64_t address, int64_t rows,
                int64_t& stride, int item_bytes) {
  const std::string strided = std::string(name) + "_stride";
  entry.require(address > 0 && address < kMost, name, address, "the address of memory, not null");
  entry.require(address % item_bytes == 0, name, address, "a multiple of the item's size");
  if (rows == 1) stride = 0;
  entry.require(stride >= 0 && stride < kMost / rows, strided.c_str(), stride,
                "0 up to the end of the address space");
  entry.require(stride % item_bytes == 0, strided.c_str(), stride, "a multiple of the item's size");
}

void check_box(const Entry& entry, Box& box, Kind kind) {
  const Sizes sizes = sizes_of(kind);
  entry.require(box.rows >= 0 && box.rows < kMost, "rows", box.rows, "0 to 2**56");
  const int64_t most_items = kMost / 4 / (box.rows > 0 ? box.rows : 1);
  entry.require(box.items >= 0 && box.items < most_items, "items", box.items, "0 to 2**54 / rows");
  if (box.rows == 0 || box.items == 0) return;
  check_side(entry, "source", box.source, box.rows, box.source_stride, sizes.source);
  if (is_checksum(kind)) {
    check_side(entry, "target", box.target, 1, box.target_stride, sizes.target);
    entry.require(box.first_item >= 0 && box.first_item < kMost, "first_item", box.first_item,
                  "0 to 2**56");
    return;
  }
  check_side(entry, "target", box.target, box.rows, box.target_stride, sizes.target);
  if (box.rows > 1)
    entry.require(box.target_stride >= box.items * sizes.target, "target_stride", box.target_stride,
                  "at least the bytes of a row");
  if (sizes.tile) return;
  const int64_t scale_rows = ceil_div(box.rows, kBlock), scale_row = ceil_div(box.items, kBlock) * 4;
  check_side(entry, "scales", box.scales, scale_rows, box.scales_stride, 4);
  if (scale_rows > 1)
    entry.require(box.scales_stride >= scale_row, "scales_stride", box.scales_stride,
                  "at least the bytes of a row");
}

Kind checked_kind(int64_t kind) {
  if (kind < 0 || kind > static_cast<int64_t>(Kind::checksum_to_float32))
    throw std::invalid_argument("kind=" + std::to_string(kind) + "; allowed: 0 to 7");
  return static_cast<Kind>(kind);
}

template <typename Run>
Run* choose(Kind kind, Run* copy, Run* quantize, Run* checksum) {
  if (is_checksum(kind)) return checksum;
  return sizes_of(kind).tile ? copy : quantize;
}

}  // namespace

Table::Table(int64_t kind, uintptr_t boxes, int64_t num_boxes)
    : kind_(checked_kind(kind)), num_boxes_(num_boxes) {
  if (num_boxes < 0 || num_boxes > kMost / static_cast<int64_t>(sizeof(Box)))
    throw std::invalid_argument("num_boxes=" + std::to_string(num_boxes) + "; allowed: 0 to 2**50");
  if (num_boxes > 0 && (boxes == 0 || boxes % alignof(Box) != 0))
    throw std::invalid_argument("boxes=" + std::to_string(boxes) +
                                "; allowed: the address of int64 [num_boxes, 8]");
  const auto* given = reinterpret_cast<const int64_t*>(boxes);
  words_.reserve(num_boxes * (kBoxWords + 1) + 1);
  words_.assign(given, given + num_boxes * kBoxWords);
  words_.push_back(0);
  for (int64_t number = 0; number < num_boxes; ++number) {
    Box& box = reinterpret_cast<Box*>(words_.data())[number];
    check_box(Entry{number}, box, kind_);
    words_.push_back(words_.back() + mcore_rl::num_tiles(box, sizes_of(kind_)));
    if (words_.back() >= kMost) throw std::invalid_argument("the boxes hold over 2**56 tiles");
  }
  const Box* all = reinterpret_cast<const Box*>(words_.data());
  if (!is_checksum(kind_)) check_overlap(kind_, all, num_boxes);
  // A search by first tiles instead would be as many loads, one after the other, as num_boxes has
  // bits: a fifth of the time of a copy of boxes of 4 KiB on a GPU.
  const int64_t* first_tile = words_.data() + num_boxes * kBoxWords;
  std::vector<int64_t> box_of_tile(first_tile[num_boxes]);
  for (int64_t number = 0; number < num_boxes; ++number)
    std::fill(box_of_tile.begin() + first_tile[number], box_of_tile.begin() + first_tile[number + 1],
              number);
  words_.insert(words_.end(), box_of_tile.begin(), box_of_tile.end());
}

Boxes Table::at(const int64_t* words) const {
  const int64_t* first_tile = words + num_boxes_ * kBoxWords;
  return {reinterpret_cast<const Box*>(words), first_tile, first_tile + num_boxes_ + 1, num_boxes_,
          num_tiles()};
}

void Table::run(int num_threads) const {
  auto* run = choose(kind_, run_boxes, quantize_boxes, checksum_boxes);
  run(kind_, at(words_.data()), num_threads);
}

void Table::run_cuda(int device, uintptr_t stream, uintptr_t on_device) const {
  if (on_device == 0 || on_device % alignof(Box) != 0)
    throw std::invalid_argument("on_device=" + std::to_string(on_device) +
                                "; allowed: the address of the table's words on the GPU");
  auto* run = choose(kind_, run_boxes_cuda, quantize_boxes_cuda, checksum_boxes_cuda);
  run(kind_, at(reinterpret_cast<const int64_t*>(on_device)), Launch{device, stream});
}

Moves Table::simulate_cuda() const {
  if (kind_ > Kind::to_float32)
    throw std::invalid_argument("kind=" + std::to_string(static_cast<int64_t>(kind_)) +
                                "; allowed: 0 to 2, copies and casts");
  return simulate_boxes_cuda(kind_, at(words_.data()));
}

}  // namespace mcore_rl
