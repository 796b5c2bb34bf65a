// Splitting work over XLA's own thread pool. No thread of ours, and nobody waits for a thread that
// may never come: the caller works too, and helpers only claim pieces that are left.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace eaglejax {

// Calls body(first, last) over [0, count) in pieces of at least `grain`; returns when all are done.
template <typename Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, int64_t grain, const Body& body) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t pieces = std::min(threads * 4, (count + grain - 1) / std::max<int64_t>(grain, 1));
  if (threads == 1 || pieces <= 1) {
    if (count > 0) body(0, count);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto shared = std::make_shared<Shared>();
  const auto work = [shared, pieces, count](const Body& run) {
    for (;;) {
      const int64_t piece = shared->next.fetch_add(1);
      if (piece >= pieces) return;
      run(count * piece / pieces, count * (piece + 1) / pieces);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  // A helper that starts late finds no piece left and never touches `body`, which may be gone.
  const Body* const borrowed = &body;
  for (int64_t i = 1; i < std::min(threads, pieces); ++i) {
    pool.Schedule([work, borrowed] { work(*borrowed); });
  }
  work(body);
  while (shared->done.load(std::memory_order_acquire) < pieces) std::this_thread::yield();
}

// Calls body(team) on the caller and on as many threads of the pool as come in time; returns when all
// of them have left.
template <typename Body>
void run_team(xla::ffi::ThreadPool& pool, int64_t phases, const Body& body) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const auto team = std::make_shared<Team>(phases, threads);
  const Body* const borrowed = &body;  // touched between enter and leave only
  for (int64_t i = 1; i < threads; ++i) {
    pool.Schedule([team, borrowed] {
      if (!team->enter()) return;
      (*borrowed)(*team);
      team->leave();
    });
  }
  body(*team);
  team->close();
}

}  // namespace eaglejax
