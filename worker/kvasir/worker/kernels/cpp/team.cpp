#include "team.h"

#include <immintrin.h>

#include <chrono>

namespace kvasir {
namespace {

// Longer than most waits inside a step. On a busy machine two members may share a core, and one that spins then only
// delays what it waits for.
constexpr auto kSpin = std::chrono::microseconds(20);

}  // namespace

void Milestone::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  const std::lock_guard lock(mutex_);
  woken_.notify_all();
}

void Milestone::wait_beyond(uint32_t old) {
  const auto limit = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; i++) {
      if (reached() != old) return;
      _mm_pause();
    }
  } while (std::chrono::steady_clock::now() < limit);
  std::unique_lock lock(mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  woken_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != old; });
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Team::Team(int size) : size_(size) {
  for (int member = 1; member < size; member++) threads_.emplace_back([this, member] { serve(member); });
}

Team::~Team() {
  start(nullptr);
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& work) {
  if (size_ == 1) {
    work(0);
    next_.store(0, std::memory_order_relaxed);
    return;
  }
  start(&work);
  work(0);
  barrier();
}

void Team::start(const std::function<void(int)>* work) {
  work_ = work;
  started_.advance();
}

void Team::serve(int member) {
  for (uint32_t runs = 0;; runs++) {
    started_.wait_beyond(runs);
    if (work_ == nullptr) return;
    (*work_)(member);
    barrier();
  }
}

void Team::barrier() {
  if (size_ == 1) {
    next_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t before = passed_.reached();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    passed_.advance();
  } else {
    passed_.wait_beyond(before);
  }
}

}  // namespace kvasir
