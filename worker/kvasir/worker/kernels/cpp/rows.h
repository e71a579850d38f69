// What is done to each token's row apart from matrix products and attention.
#pragma once

#include <cmath>

#include "gemm.h"
#include "simd.h"

namespace kvasir {

// Rows are padded with zeros to whole vectors: `padded` is a multiple of kBlock, `size` counts the values.

// RMSNorm (Zhang and Sennrich 2019), rounded to bfloat16.
inline void rms_norm(const float* row, const float* weight, int size, int padded, float epsilon, bf16* out) {
  Floats squares = broadcast(0.0f);
  for (int i = 0; i < padded; i += kLanes) {
    const Floats value = load(row + i);
    squares = fma(value, value, squares);
  }
  const Floats scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + epsilon));
  for (int i = 0; i < padded; i += kLanes) narrow(out + i, load(row + i) * scale * load(weight + i));
}

// One row of the embedding, which is packed like the output layer, in bfloat16 or int8.
void embed(const Matrix& matrix, int token, int padded, float* out);

// Rotary position embedding with partners half a head apart (Su et al. 2021), rounded to bfloat16. `weight`, if there
// is one, is Qwen3's norm of the head, applied first. cos and sin are [size / 2].
void rotate(const float* head, const float* weight, float epsilon, const float* cos, const float* sin, int size,
            bf16* out);

inline void narrow_row(const float* row, int size, bf16* out) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) narrow(out + i, load(row + i));
  for (; i < size; i++) out[i] = narrow(row[i]);
}

}  // namespace kvasir
