// The greatest of each row's values, which come in pieces.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

namespace kvasir {

// Of one row. Lanes are looked at apart, and compared at the end: the first of equal values wins.
class Likeliest {
 public:
  // kBlock values from `first` on, of which `count` are the row's; later calls have a greater `first`.
  void look(const float* values, int first, int count) {
    for (int i = 0; i < count; i++) {
      const bool greater = values[i] > value_[i];
      value_[i] = greater ? values[i] : value_[i];
      index_[i] = greater ? first + i : index_[i];
      finite_[i] &= std::fabs(values[i]) <= std::numeric_limits<float>::max();
    }
  }

  // Another member's part of the same row.
  void join(const Likeliest& other) {
    for (int i = 0; i < kBlock; i++) {
      finite_[i] &= other.finite_[i];
      if (other.value_[i] > value_[i] || (other.value_[i] == value_[i] && other.index_[i] < index_[i])) {
        value_[i] = other.value_[i];
        index_[i] = other.index_[i];
      }
    }
  }

  // Its index, or -1 if some value was not finite.
  int32_t index() const {
    int best = 0;
    bool finite = true;
    for (int i = 0; i < kBlock; i++) {
      finite = finite && finite_[i] != 0;
      if (value_[i] > value_[best] || (value_[i] == value_[best] && index_[i] < index_[best])) best = i;
    }
    return finite ? index_[best] : -1;
  }

 private:
  static constexpr float kNone = -std::numeric_limits<float>::infinity();
  alignas(64) float value_[kBlock] = {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone,
                                      kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone};
  alignas(64) int32_t index_[kBlock] = {};
  alignas(64) int32_t finite_[kBlock] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
};

}  // namespace kvasir
