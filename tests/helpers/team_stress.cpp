// A team through very many barriers, some waits long enough to sleep in. Run under the thread sanitizer.
//
// Each member writes its own cell before a barrier and reads everybody's after it, without any other protection.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "team.h"

using kvasir::Team;

namespace {

// 0 to 60 microseconds, on both sides of the time that members spin; seldom much longer.
void work(uint32_t& random) {
  random = random * 1664525u + 1013904223u;
  if (random >> 24 == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds((random >> 8) % 60'000);
  while (std::chrono::steady_clock::now() < end) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int members = std::atoi(argv[1]), runs = std::atoi(argv[argc - 1]);
  constexpr int kBarriers = 20;
  std::vector<int> cells(members);
  std::vector<uint32_t> random(members);
  for (int i = 0; i < members; i++) random[i] = i + 1;
  Team team(members);
  int wrong = 0;
  for (int run = 0; run < runs; run++) {
    std::vector<int> errors(members);
    team.run([&](int member) {
      for (int step = 0; step < kBarriers; step++) {
        work(random[member]);
        cells[member] = run * kBarriers + step;
        const int number = team.claim();
        if (number >= members) errors[member]++;
        team.barrier();
        for (const int cell : cells) errors[member] += cell != run * kBarriers + step;
        team.barrier();
      }
    });
    for (const int count : errors) wrong += count;
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
