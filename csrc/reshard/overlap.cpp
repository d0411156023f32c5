// Whether boxes touch each other: exactly, also for columns of one matrix side by side.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "table.h"

namespace mcore_rl {
namespace {

// Rows of bytes in memory.
struct Region {
  int64_t begin, rows, row_bytes, stride, number;
  bool is_target;
  int64_t end() const { return begin + (rows - 1) * stride + row_bytes; }
};

bool touches_row(const Region& region, int64_t begin, int64_t end) {
  if (region.rows == 1 || region.stride == 0)
    return region.begin < end && region.begin + region.row_bytes > begin;
  // The first row that ends behind `begin`.
  const int64_t before = begin - region.row_bytes - region.begin;
  const int64_t row = before < 0 ? 0 : before / region.stride + 1;
  return row < region.rows && region.begin + row * region.stride < end;
}

// `a` does not begin behind `b`.
bool touch(const Region& a, const Region& b) {
  if (a.end() <= b.begin) return false;
  if (a.rows > 1 && b.rows > 1 && a.stride == b.stride &&
      std::max(a.row_bytes, b.row_bytes) <= a.stride) {
    // b's first row starts behind `column` bytes of one of a's rows, and may reach into the next,
    // which is there: else b would begin behind a's end.
    const int64_t column = (b.begin - a.begin) % a.stride;
    return column < a.row_bytes || column + b.row_bytes > a.stride;
  }
  const Region& few = a.rows < b.rows ? a : b;
  const Region& many = a.rows < b.rows ? b : a;
  for (int64_t row = 0; row < few.rows; ++row) {
    const int64_t begin = few.begin + row * few.stride;
    if (touches_row(many, begin, begin + few.row_bytes)) return true;
  }
  return false;
}

std::vector<Region> regions_of(Kind kind, const Box* boxes, int64_t num_boxes) {
  const Sizes sizes = sizes_of(kind);
  std::vector<Region> regions;
  regions.reserve(num_boxes * (sizes.tile ? 2 : 3));
  for (int64_t n = 0; n < num_boxes; ++n) {
    const Box& box = boxes[n];
    if (box.rows == 0 || box.items == 0) continue;
    regions.push_back(
        {box.source, box.rows, box.items * sizes.source, box.source_stride, n, false});
    regions.push_back({box.target, box.rows, box.items * sizes.target, box.target_stride, n, true});
    if (!sizes.tile)
      regions.push_back({box.scales, ceil_div(box.rows, kBlock), ceil_div(box.items, kBlock) * 4,
                         box.scales_stride, n, true});
  }
  return regions;
}

[[noreturn]] void refuse(const Region& a, const Region& b) {
  auto name = [](const Region& region) {
    return (region.is_target ? "the target of box " : "the source of box ") +
           std::to_string(region.number);
  };
  throw std::invalid_argument(name(a) + " overlaps " + name(b));
}

}  // namespace

void check_overlap(Kind kind, const Box* boxes, int64_t num_boxes) {
  std::vector<Region> regions = regions_of(kind, boxes, num_boxes);
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return a.begin < b.begin; });
  std::vector<Region> open[2];  // sources, targets: those that reach beyond the current region
  for (const Region& region : regions) {
    for (int targets = 0; targets < 2; ++targets) {
      auto& others = open[targets];
      others.erase(std::remove_if(others.begin(), others.end(),
                                  [&](const Region& o) { return o.end() <= region.begin; }),
                   others.end());
      if (!targets && !region.is_target) continue;  // sources may share
      for (const Region& other : others)
        if (touch(other, region)) refuse(other, region);
    }
    open[region.is_target].push_back(region);
  }
}

}  // namespace mcore_rl
