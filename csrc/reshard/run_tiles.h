// The tiles of a table shared out among threads of the CPU.
#pragma once

#include "../parallel.h"
#include "box.h"

namespace mcore_rl {

// Calls work(box, number, count) for runs of `count` tiles of a box from the number-th. A thread
// takes 128 KiB to 128 MiB of a copy at once, and eight times if it can be.
template <typename Work>
void run_tiles(const Boxes& table, int num_threads, Work work) {
  const int64_t run = std::clamp<int64_t>(
      table.num_tiles / (int64_t{8} * std::max(num_threads, 1)), 16, 16384);
  parallel_for(table.num_tiles, run, num_threads, [&](int64_t begin, int64_t end) {
    int64_t at = table.box_of_tile[begin];
    for (int64_t tile = begin; tile < end;) {
      while (tile >= table.first_tile[at + 1]) ++at;
      const int64_t count = std::min(end, table.first_tile[at + 1]) - tile;
      work(table.boxes[at], tile - table.first_tile[at], count);
      tile += count;
    }
  });
}

}  // namespace mcore_rl
