#include "rows.h"

namespace kvasir {
namespace {

float norm_scale(const float* head, int size, float epsilon) {
  float squares = 0.0f;
  for (int i = 0; i < size; i++) squares += head[i] * head[i];
  return 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
}

}  // namespace

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
