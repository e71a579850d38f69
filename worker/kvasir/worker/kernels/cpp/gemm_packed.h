// multiply_packed of gemm.h: a template, so that what is done with the sums is part of the loop.
#pragma once

namespace kvasir {

// Rows that go through a block together: their A stays in the second-level cache.
constexpr int kRowChunk = 96;

// Scaled, and with bias, in place.
inline void complete(const Matrix& matrix, int block, int count, float* values) {
  const int first = block * kBlock;
  for (int i = 0; i < count * kBlock; i += kLanes) {
    Floats value = load(values + i);
    if (matrix.scales != nullptr) value = value * load(matrix.scales + first + i);
    if (matrix.bias != nullptr) value = value + load(matrix.bias + first + i);
    store(values + i, value);
  }
}

template <class Finish>
void multiply_packed(const Matrix& matrix, const bf16* a, ptrdiff_t a_stride, int rows, Range range,
                     const Finish& finish) {
  constexpr ptrdiff_t kStride = kMaxTileBlocks * kBlock;
  alignas(64) float sums[kMaxTileRows * kStride];
  const auto* weights = static_cast<const bf16*>(matrix.weights);
  const ptrdiff_t w_stride = ptrdiff_t{matrix.inputs} * kBlock;
  const bool plain = matrix.scales == nullptr && matrix.bias == nullptr;
  for (int first = 0; first < rows; first += kRowChunk) {
    const int end = std::min(rows, first + kRowChunk);
    const Tiling tiling(end - first);
    for (int block = range.first, width; block < range.end; block += width) {
      width = tiling.width(range.end - block);
      for (int row = first, height; row < end; row += height) {
        height = std::min(tiling.height, end - row);
        tile_function(height, width)(a + row * a_stride, a_stride, weights + block * w_stride, w_stride,
                                     matrix.inputs, sums, kStride);
        for (int i = 0; i < height; i++) {
          float* values = sums + i * kStride;
          if (!plain) complete(matrix, block, width, values);
          finish(row + i, block, width, values);
        }
      }
    }
  }
}

}  // namespace kvasir
