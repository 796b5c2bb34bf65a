// Threads that walk through the phases of one kernel call together. Any of them may come late or
// never: the pieces of a phase go to whoever asks, and one thread alone would do them all.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace eaglejax {

class Team {
 public:
  Team(int64_t phases, int64_t threads)
      : threads_(threads), counters_(new Counter[phases]) {}

  int64_t threads() const { return threads_; }

  // Runs body(piece) for pieces [0, count) that no other thread has taken, then waits for those that
  // others took. Every thread passes the same phases in the same order.
  template <typename Body>
  void phase(int64_t number, int64_t count, const Body& body) {
    Counter& c = counters_[number];
    for (;;) {
      const int64_t piece = c.next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= count) break;
      body(piece);
      c.done.fetch_add(1, std::memory_order_release);
    }
    for (int64_t spins = 0; c.done.load(std::memory_order_acquire) < count; ++spins) rest(spins);
  }

  // A thread beside the caller's enters, or finds that all is done and must touch nothing.
  bool enter() {
    inside_.fetch_add(1);
    if (!closed_.load()) return true;
    inside_.fetch_sub(1);
    return false;
  }
  void leave() { inside_.fetch_sub(1); }
  // The caller, after its own last phase: waits until every other thread has left.
  void close() {
    closed_.store(true);
    for (int64_t spins = 0; inside_.load() != 0; ++spins) rest(spins);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0}, done{0};
  };

  // Phases last microseconds: sleeping would cost more. A thread that lost its core is waited for
  // without keeping another from it.
  static void rest(int64_t spins) {
#if defined(__x86_64__) || defined(__i386__)
    if (spins < 500) return _mm_pause();
#endif
    (void)spins;
    std::this_thread::yield();
  }

  const int64_t threads_;
  const std::unique_ptr<Counter[]> counters_;
  std::atomic<int64_t> inside_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace eaglejax
