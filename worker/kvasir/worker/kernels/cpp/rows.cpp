#include "rows.h"

#include <algorithm>

namespace kvasir {
namespace {

float norm_scale(const float* head, int size, float epsilon) {
  float squares = 0.0f;
  for (int i = 0; i < size; i++) squares += head[i] * head[i];
  return 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
}

}  // namespace

void embed(const Matrix& matrix, int token, int padded, float* out) {
  const int block = token / kBlock, lane = token % kBlock;
  if (!matrix.int8()) {
    const bf16* values = bf16_blocks(matrix, block, 1).data;
    for (int i = 0; i < matrix.inputs; i++)
      out[i] = widen(values[(i / 2 * kBlock + lane) * 2 + i % 2]);
  } else {
    const auto* values = reinterpret_cast<const int8_t*>(matrix.block(block));
    const float scale = matrix.scales[token];
    for (int i = 0; i < matrix.inputs; i++)
      out[i] = scale * static_cast<float>(values[(i / kQuad * kBlock + lane) * kQuad + i % kQuad]);
  }
  std::fill(out + matrix.inputs, out + padded, 0.0f);
}

void rotate(const float* head, const float* weight, float epsilon, const float* cos, const float* sin, int size,
            bf16* out) {
  const int half = size / 2;
  const float scale = weight == nullptr ? 1.0f : norm_scale(head, size, epsilon);
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    Floats low = load(head + i), high = load(head + half + i);
    if (weight != nullptr) {
      low = low * broadcast(scale) * load(weight + i);
      high = high * broadcast(scale) * load(weight + half + i);
    }
    const Floats c = load(cos + i), s = load(sin + i);
    narrow(out + i, low * c - high * s);
    narrow(out + half + i, high * c + low * s);
  }
  for (; i < half; i++) {
    float low = head[i], high = head[half + i];
    if (weight != nullptr) {
      low = low * scale * weight[i];
      high = high * scale * weight[half + i];
    }
    out[i] = narrow(low * cos[i] - high * sin[i]);
    out[half + i] = narrow(high * cos[i] + low * sin[i]);
  }
}

}  // namespace kvasir
