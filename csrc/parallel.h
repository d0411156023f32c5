// Work shared out among threads that live for one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace mcore_rl {

// Calls work(begin, end) for runs of at most `run` of `count` items, on up to num_threads threads,
// this one among them. `work` must not throw. Threads that cannot be started are done without.
template <typename Work>
void parallel_for(int64_t count, int64_t run, int num_threads, Work work) {
  if (num_threads < 1)
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) +
                                "; allowed: at least 1");
  std::atomic<int64_t> next{0};
  auto take = [&] {
    for (int64_t begin; (begin = next.fetch_add(run)) < count;)
      work(begin, std::min(begin + run, count));
  };
  const int64_t others = std::min<int64_t>(num_threads, (count + run - 1) / run) - 1;
  std::vector<std::thread> threads;
  threads.reserve(std::max<int64_t>(others, 0));
  try {
    while (static_cast<int64_t>(threads.size()) < others) threads.emplace_back(take);
  } catch (const std::system_error&) {
  }
  take();
  for (auto& thread : threads) thread.join();
}

}  // namespace mcore_rl
