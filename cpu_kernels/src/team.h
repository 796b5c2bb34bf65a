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
    wait(c, count);
  }

  // The same for units that are best taken in runs: body(first, last) over [0, count). Runs get
  // shorter towards the end, so that threads finish together.
  template <typename Body>
  void phase_of_runs(int64_t number, int64_t count, const Body& body) {
    Counter& c = counters_[number];
    int64_t first = c.next.load(std::memory_order_relaxed);
    while (first < count) {
      const int64_t left = (count - first) / (2 * threads_), last = first + (left > 1 ? left : 1);
      if (!c.next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      body(first, last);
      c.done.fetch_add(last - first, std::memory_order_release);
      first = c.next.load(std::memory_order_relaxed);
    }
    wait(c, count);
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

  static void wait(const Counter& c, int64_t count) {
    for (int64_t spins = 0; c.done.load(std::memory_order_acquire) < count; ++spins) rest(spins);
  }
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
