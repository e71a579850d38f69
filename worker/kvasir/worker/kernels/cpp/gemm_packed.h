// multiply_packed of gemm.h: a template, so that what is done with the sums is part of the loop.
#pragma once

#include <vector>

namespace kvasir {

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

// Consecutive packed blocks as bfloat16, `stride` elements apart.
struct Blocks {
  const bf16* data;
  ptrdiff_t stride;

  Blocks from(int index) const { return {data + index * stride, stride}; }
};

// Blocks [first, first + count) where they are, or widened into a buffer of this thread's until its next call.
inline Blocks bf16_blocks(const Matrix& matrix, int first, int count) {
  if (matrix.kind == Kind::kBf16) {
    const ptrdiff_t stride = ptrdiff_t{matrix.inputs} * kBlock;
    return {static_cast<const bf16*>(matrix.weights) + first * stride, stride};
  }
  static thread_local std::vector<bf16> buffer;
  const ptrdiff_t stride = ptrdiff_t{matrix.groups()} * kGroup * kBlock;
  const bool int4 = matrix.kind == Kind::kInt4;
  const ptrdiff_t packed = int4 ? ptrdiff_t{matrix.groups()} * kGroupBytes : ptrdiff_t{matrix.inputs} * kBlock;
  if (const size_t size = stride * kMaxTileBlocks; buffer.size() < size) buffer.resize(size);
  const auto* from = static_cast<const std::byte*>(matrix.weights) + first * packed;
  for (int i = 0; i < count; i++) {
    if (int4)
      widen_int4(from + i * packed, matrix.inputs, buffer.data() + i * stride);
    else
      widen_int8(reinterpret_cast<const int8_t*>(from + i * packed), matrix.inputs, buffer.data() + i * stride);
  }
  return {buffer.data(), stride};
}

// Sums of a tile's rows, times the rows' scales if they are rounded.
inline void multiply_tile(const Matrix& matrix, const Rows& a, int row, int rows, const Blocks& widened,
                          [[maybe_unused]] int block, int count, Ahead ahead, float* sums, ptrdiff_t stride) {
#if defined(__AVX512VNNI__)
  if (matrix.by_bytes()) {
    const ptrdiff_t w_stride = ptrdiff_t{matrix.inputs} * kBlock;
    const auto* weights = static_cast<const int8_t*>(matrix.weights) + block * w_stride;
    byte_tile_function(rows, count, matrix.planes())(a.rounded + row * a.stride, a.stride, a.plane, a.scales + row,
                                                     weights, w_stride, ahead, matrix.sums + block * kBlock,
                                                     matrix.inputs, sums, stride);
    return;
  }
#else
  if (matrix.rounds()) {
    tile_function(rows, count)(a.rounded + row * a.stride, a.stride, widened.data, widened.stride, ahead, matrix.inputs,
                               sums, stride);
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < count * kBlock; j += kLanes)
        store(sums + i * stride + j, load(sums + i * stride + j) * broadcast(a.scales[row + i]));
    return;
  }
#endif
  tile_function(rows, count)(a.values + row * a.stride, a.stride, widened.data, widened.stride, ahead, matrix.inputs,
                             sums, stride);
}

template <class Finish>
void multiply_packed(const Matrix& matrix, const Rows& a, Range rows, Range blocks, const Finish& finish) {
  constexpr ptrdiff_t kStride = kMaxTileBlocks * kBlock;
  alignas(64) float sums[kMaxTileRows * kStride];
  const bool plain = matrix.scales == nullptr && matrix.bias == nullptr;
  if (rows.first == rows.end) return;
  const Tiling tiling(rows.end - rows.first, matrix.planes());
  for (int block = blocks.first, width; block < blocks.end; block += width) {
    const int tile = tiling.width(blocks.end - block);
    width = std::max(tile, std::min(2, blocks.end - block));  // pairs stay together, however narrow the tiles are
    const Blocks widened = matrix.by_bytes() ? Blocks{} : bf16_blocks(matrix, block, width);
    // The next two blocks are fetched while the first tiles are computed, one for each, or both for an only one: the
    // hardware sees too late where they are.
    int next = block + width;
    const bool only = tile == 2 && tiling.height >= rows.end - rows.first;
    const bool as_packed = matrix.kind == Kind::kBf16 || matrix.by_bytes();  // else one run is several blocks long
    const ptrdiff_t apart = only && as_packed ? matrix.block_bytes() : 0;
    for (int row = rows.first, height; row < rows.end; row += height) {
      height = std::min(tiling.height, rows.end - row);
      const Ahead ahead{matrix.block(next), apart};
      for (int i = 0; i < width; i += tile)
        multiply_tile(matrix, a, row, height, widened.from(i), block + i, tile, ahead, sums + i * kBlock, kStride);
      if (next + 1 < block + 2 * width) next++;
      for (int i = 0; i < height; i++) {
        float* values = sums + i * kStride;
        if (!plain) complete(matrix, block, width, values);
        finish(row + i, block, width, values);
      }
    }
  }
}

}  // namespace kvasir
