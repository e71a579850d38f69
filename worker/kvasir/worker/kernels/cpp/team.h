// A few threads that work through one step together.
//
// The caller is member 0, so a team of one never touches another thread. Waiting members spin for some
// microseconds, which is what most waits inside a step take, and then sleep: between steps the cores belong
// to whoever serves the network. OpenMP's pool would spin for milliseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace kvasir {

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
  std::atomic<uint32_t> started_{0};  // changes with each run
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> passed_{0};  // changes with each barrier
  alignas(64) std::atomic<int> next_{0};
  std::vector<std::thread> threads_;
};

}  // namespace kvasir
