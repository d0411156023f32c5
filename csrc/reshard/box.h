// A box on its way, and how the bytes of many are cut into tiles. The same on CPU and GPU.
#pragma once

#include "../portable.h"

namespace mcore_rl {

enum class Kind : int64_t {
  copy,               // items are bytes
  to_bfloat16,        // float32 -> bfloat16
  to_float32,         // bfloat16 -> float32
  quantize_float32,   // float32 -> float8 e4m3 and a scale for each block
  quantize_bfloat16,  // bfloat16 -> the same
  checksum,              // items of 2 bytes, of which larger ones consist -> a sum for each box
  checksum_to_bfloat16,  // float32 -> the sum of the same as bfloat16
  checksum_to_float32,   // bfloat16 -> the sum of the same as float32
};

HOST_DEVICE bool is_checksum(Kind kind) { return kind >= Kind::checksum; }

// `rows` rows of `items` items. Addresses are integers, strides are in bytes from row to row,
// and 0 where there is one row. The scales, one float32 for each block of 128 x 128 items, are those
// of a quantisation only. The target of a checksum is one 64-bit number, to which several boxes may
// add: each holds the items from first_item on of what is summed.
struct Box {
  int64_t source, target, rows, items, source_stride, target_stride;
  union {
    int64_t scales, first_item;
  };
  int64_t scales_stride;
};
constexpr int64_t kBoxWords = sizeof(Box) / sizeof(int64_t);

constexpr int kBlock = 128;  // rows and columns that share a scale

struct Sizes {
  int source, target;  // bytes of an item
  int64_t tile;        // items of a tile, in row order; 0 where a tile is a block
};

HOST_DEVICE Sizes sizes_of(Kind kind) {
  switch (kind) {
    case Kind::copy: return {1, 1, 8192};
    case Kind::to_bfloat16: return {4, 2, 4096};
    case Kind::to_float32: return {2, 4, 4096};
    case Kind::quantize_float32: return {4, 1, 0};
    case Kind::checksum: return {2, 8, 4096};
    case Kind::checksum_to_bfloat16: return {4, 8, 4096};
    case Kind::checksum_to_float32: return {2, 8, 4096};
    default: return {2, 1, 0};
  }
}

HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

HOST_DEVICE int64_t num_tiles(const Box& box, const Sizes& sizes) {
  if (sizes.tile) return ceil_div(box.rows * box.items, sizes.tile);
  return ceil_div(box.rows, kBlock) * ceil_div(box.items, kBlock);
}

// The boxes of a bucket; for each and the end, the number of its first tile; for each tile, its box.
struct Boxes {
  const Box* boxes;
  const int64_t* first_tile;   // [num_boxes + 1]
  const int64_t* box_of_tile;  // [num_tiles]
  int64_t num_boxes, num_tiles;
};

struct Place {
  int64_t row, column;  // the column counts items, or units of several items
};

// The place `offset` columns behind `start`, row after row. offset is below 2**31.
HOST_DEVICE Place advance(Place start, uint32_t offset, int64_t columns) {
  const int64_t column = start.column + offset;
  if (column < columns) return {start.row, column};
  if (offset < columns) return {start.row + 1, column - columns};
  // Now column < columns + offset <= 2 * offset: the division fits into 32 bits.
  const uint32_t rows = static_cast<uint32_t>(column) / static_cast<uint32_t>(columns);
  return {start.row + rows, column - static_cast<int64_t>(rows) * columns};
}

// A tile of a box, or some: where it starts and how many columns it has.
struct Tile {
  Place start;
  uint32_t length;
};

// `count` tiles of a box from the number-th, taken as one, in units of `unit` items, which must
// divide the box's rows. They hold fewer than 2**31 items.
HOST_DEVICE Tile tiles_of(const Box& box, int64_t number, int64_t count, const Sizes& sizes,
                          int unit) {
  const int64_t begin = number * sizes.tile, most = count * sizes.tile;
  const int64_t left = box.rows * box.items - begin;
  const int64_t length = left < most ? left : most;
  const int64_t columns = box.items / unit, first = begin / unit;
  const int64_t row = first / columns;
  return {{row, first - row * columns}, static_cast<uint32_t>(length / unit)};
}

// The largest power of two of items, up to `most`, that divides every address and size of a box's
// rows.
HOST_DEVICE int aligned_unit(const Box& box, const Sizes& sizes, int most) {
  const int64_t source = (box.source | box.source_stride) / sizes.source;
  const int64_t target = (box.target | box.target_stride) / sizes.target;
  const int64_t bits = source | target | box.items | most;
  return static_cast<int>(bits & -bits);
}

// The largest power of two of items, up to `most`, of which source and target are alike: in a row
// from there on, whatever is aligned to it in the target is so in the source.
HOST_DEVICE int congruent_unit(int64_t source, int64_t target, const Sizes& sizes, int most) {
  const int64_t bits = (source / sizes.source - target / sizes.target) | most;
  return static_cast<int>(bits & -bits);
}

// Whether the rows of a box are moved one by one, each without its ends in congruent units, instead
// of together in aligned units: some are wider, and a row is more than `least` aligned units.
HOST_DEVICE bool should_peel(const Box& box, const Sizes& sizes, int aligned, int most, int least) {
  const int64_t apart = box.source_stride / sizes.source - box.target_stride / sizes.target;
  const int widest = apart % most ? most : congruent_unit(box.source, box.target, sizes, most);
  return widest > aligned && box.items > int64_t{least} * aligned;
}

// The items of a run, from an item's address on, before its first and behind its last whole unit.
struct Ends {
  uint32_t head, tail;
};

HOST_DEVICE Ends ends_of(int64_t target, uint32_t length, const Sizes& sizes, int unit) {
  const uint32_t past = static_cast<uint32_t>(-(target / sizes.target)) & (unit - 1);
  const uint32_t head = past < length ? past : length;
  return {head, (length - head) & (unit - 1)};
}

template <typename T>
HOST_DEVICE const T* source_at(const Box& box, Place place) {
  return reinterpret_cast<const T*>(box.source + place.row * box.source_stride) + place.column;
}

template <typename T>
HOST_DEVICE T* target_at(const Box& box, Place place) {
  return reinterpret_cast<T*>(box.target + place.row * box.target_stride) + place.column;
}

}  // namespace mcore_rl
