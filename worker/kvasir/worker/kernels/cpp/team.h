// A few threads that work through one step together.
//
// The caller is member 0, so a team of one never touches another thread. Waiting members spin for some
// microseconds, which is what most waits inside a step take, and then sleep: between steps the cores belong
// to whoever serves the network. OpenMP's pool would spin for milliseconds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvasir {

// A number that only grows, and threads that wait for it to.
//
// std::atomic's own wait() looks for sleepers with a load that may overtake the store before it (GCC 12), and then
// wakes nobody.
class Milestone {
 public:
  uint32_t reached() const { return value_.load(std::memory_order_acquire); }

  // One more; what was written before is seen by those who wait for it.
  void advance();

  // Until it is more than `old`.
  void wait_beyond(uint32_t old);

 private:
  // Either advance() sees the sleeper or the sleeper the new number: both orders are sequentially consistent.
  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
};

class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Every member calls work(member); returns when all are done. From one thread at a time.
  void run(const std::function<void(int)>& work);

  // Inside run, called by every member: nobody goes on before all have come.
  void barrier();

  // Inside run: numbers 0, 1, 2, ..., each to one member. Starts anew after each barrier.
  int claim() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void start(const std::function<void(int)>* work);
  void serve(int member);

  const int size_;
  const std::function<void(int)>* work_ = nullptr;  // null: the team ends
  Milestone started_;  // runs
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) Milestone passed_;  // barriers
  alignas(64) std::atomic<int> next_{0};
  std::vector<std::thread> threads_;
};

}  // namespace kvasir
