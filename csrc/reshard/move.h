// How the lanes of a warp move a tile. copy.cu runs this on a GPU, copy.cpp for tests on the CPU.
#pragma once

#include <stdexcept>

#include "box.h"
#include "convert.h"

namespace mcore_rl {

constexpr int kWarp = 32, kAtOnce = 4;  // lanes; loads of a lane before its stores

template <typename T, int n>
struct alignas(n * sizeof(T)) Vector {
  T items[n];
};

template <int num_bytes>
struct Word {
  using Type = Vector<uint32_t, num_bytes / 4>;
};
template <>
struct Word<2> {
  using Type = uint16_t;
};
template <>
struct Word<1> {
  using Type = uint8_t;
};

// What a lane moves at once, n items: Source is read, Target is written.
template <int n>
struct Copy {
  static constexpr int kItems = n;
  using Source = typename Word<n>::Type;
  using Target = Source;
  HOST_DEVICE static Target convert(Source value) { return value; }
};

template <int n>
struct CastDown {
  static constexpr int kItems = n;
  using Source = Vector<float, n>;
  using Target = Vector<uint16_t, n>;
  HOST_DEVICE static Target convert(Source values) {
    Target converted;
    UNROLLED for (int i = 0; i < n; ++i) converted.items[i] = to_bfloat16(values.items[i]);
    return converted;
  }
};

template <int n>
struct CastUp {
  static constexpr int kItems = n;
  using Source = Vector<uint16_t, n>;
  using Target = Vector<uint32_t, n>;  // bits: of floats, nvcc 13.0 makes a store each
  HOST_DEVICE static Target convert(Source values) {
    Target converted;
    UNROLLED for (int i = 0; i < n; ++i)
      converted.items[i] = bit_cast<uint32_t>(to_float32(values.items[i]));
    return converted;
  }
};

template <typename T>
HOST_DEVICE T* aligned_pointer(int64_t address) {
#ifndef __CUDA_ARCH__
  if (address % sizeof(T)) throw std::logic_error("a move at an address that is not aligned");
#endif
  return reinterpret_cast<T*>(address);
}

template <typename Op>
HOST_DEVICE typename Op::Source load(int64_t address) {
  return *aligned_pointer<typename Op::Source>(address);
}

template <typename Op, typename Count>
HOST_DEVICE void store(int64_t address, typename Op::Source value, const Count& count) {
  *aligned_pointer<typename Op::Target>(address) = Op::convert(value);
  count(Op::kItems);
}

struct Addresses {
  int64_t source, target;
};

HOST_DEVICE Addresses addresses_of(const Box& box, Place place, const Sizes& sizes) {
  return {box.source + place.row * box.source_stride + place.column * sizes.source,
          box.target + place.row * box.target_stride + place.column * sizes.target};
}

// One lane's share of `length` units, the n-th of which is at addresses_of_unit(n).
template <typename Op, typename AddressesOf, typename Count>
HOST_DEVICE void move_units(uint32_t length, uint32_t lane, const AddressesOf& addresses_of_unit,
                            const Count& count) {
  for (uint32_t first = lane; first < length; first += kAtOnce * kWarp) {
    typename Op::Source values[kAtOnce] = {};
    UNROLLED
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t offset = first + i * kWarp;
      if (offset < length) values[i] = load<Op>(addresses_of_unit(offset).source);
    }
    UNROLLED
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t offset = first + i * kWarp;
      if (offset < length) store<Op>(addresses_of_unit(offset).target, values[i], count);
    }
  }
}

// A tile in units that divide every row.
struct AlignedTile {
  template <template <int> class Op, int unit, typename Count>
  HOST_DEVICE static void move(const Box& box, int64_t number, const Sizes& sizes, uint32_t lane,
                               const Count& count) {
    const Tile tile = tiles_of(box, number, 1, sizes, unit);
    const int64_t columns = box.items / unit;
    move_units<Op<unit>>(
        tile.length, lane,
        [&](uint32_t offset) {
          const Place place = advance(tile.start, offset, columns);
          return addresses_of(box, {place.row, place.column * unit}, sizes);
        },
        count);
  }
};

// A run of items in one row: whole units, and its ends, each item of which is a lane's.
struct PeeledRun {
  template <template <int> class Op, int unit, typename Count>
  HOST_DEVICE static void move(const Addresses& start, uint32_t length, const Sizes& sizes,
                               uint32_t lane, const Count& count) {
    static_assert(2 * (unit - 1) <= kWarp);
    const Ends ends = ends_of(start.target, length, sizes, unit);
    const bool has_end = lane < ends.head || lane >= kWarp - ends.tail;
    const uint32_t end = lane < ends.head ? lane : length - kWarp + lane;
    typename Op<1>::Source value = {};
    if (has_end) value = load<Op<1>>(start.source + end * sizes.source);
    move_units<Op<unit>>(
        (length - ends.head) / unit, lane,
        [&](uint32_t offset) -> Addresses {
          const uint32_t item = ends.head + offset * unit;
          return {start.source + item * sizes.source, start.target + item * sizes.target};
        },
        count);
    if (has_end) store<Op<1>>(start.target + end * sizes.target, value, count);
  }
};

// Move::move in this unit, one up to `most`.
template <typename Move, template <int> class Op, int most, typename... Arguments>
HOST_DEVICE void move_by(int unit, const Arguments&... arguments) {
  if (unit == most)
    Move::template move<Op, most>(arguments...);
  else if constexpr (most > 1)
    move_by<Move, Op, most / 2>(unit, arguments...);
}

template <template <int> class Op, int most, typename Count>
HOST_DEVICE void move_widest(const Box& box, int64_t number, const Sizes& sizes, uint32_t lane,
                             const Count& count) {
  const int aligned = aligned_unit(box, sizes, most);
  if (!should_peel(box, sizes, aligned, most, kAtOnce * kWarp)) {
    move_by<AlignedTile, Op, most>(aligned, box, number, sizes, lane, count);
    return;
  }
  const Tile tile = tiles_of(box, number, 1, sizes, 1);
  for (uint32_t offset = 0; offset < tile.length;) {
    const Place place = advance(tile.start, offset, box.items);
    const int64_t left = box.items - place.column, most_items = tile.length - offset;
    const uint32_t length = static_cast<uint32_t>(left < most_items ? left : most_items);
    const Addresses start = addresses_of(box, place, sizes);
    const int unit = congruent_unit(start.source, start.target, sizes, most);
    move_by<PeeledRun, Op, most>(unit, start, length, sizes, lane, count);
    offset += length;
  }
}

// One lane's share of a tile of a copy or cast. count(n) is called for every move of n items.
template <Kind kind, typename Count>
HOST_DEVICE void move_tile(const Box& box, int64_t number, uint32_t lane, const Count& count) {
  const Sizes sizes = sizes_of(kind);
  if constexpr (kind == Kind::copy)
    move_widest<Copy, 16>(box, number, sizes, lane, count);
  else if constexpr (kind == Kind::to_bfloat16)
    move_widest<CastDown, 4>(box, number, sizes, lane, count);
  else
    move_widest<CastUp, 4>(box, number, sizes, lane, count);
}

}  // namespace mcore_rl
