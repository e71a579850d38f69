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
template <class T>
struct BlocksOf {
  T* data;
  ptrdiff_t stride;

  BlocksOf from(int index) const { return {data + index * stride, stride}; }
};
using Blocks = BlocksOf<const bf16>;

// Room for a tile's blocks, of this thread's until its next call.
inline BlocksOf<bf16> room_to_widen(const Matrix& matrix) {
  static thread_local std::vector<bf16> buffer;
  const ptrdiff_t stride = ptrdiff_t{matrix.groups()} * kGroup * kBlock;
  if (const size_t size = stride * kMaxTileBlocks; buffer.size() < size) buffer.resize(size);
  return {buffer.data(), stride};
}

// Blocks [first, first + count) where they are, or widened.
inline Blocks bf16_blocks(const Matrix& matrix, int first, int count) {
  if (matrix.kind == Kind::kBf16) {
    const ptrdiff_t stride = ptrdiff_t{matrix.inputs} * kBlock;
    return {static_cast<const bf16*>(matrix.weights) + first * stride, stride};
  }
  const BlocksOf<bf16> room = room_to_widen(matrix);
  for (int i = 0; i < count; i++) {
    const std::byte* from = matrix.block(first + i);
    bf16* to = room.from(i).data;
    if (matrix.kind == Kind::kCodedBf16)
      widen_coded(matrix.coded(first + i), matrix.inputs, to);
    else if (matrix.kind == Kind::kInt4)
      widen_int4(from, matrix.inputs, to);
    else
      widen_int8(reinterpret_cast<const int8_t*>(from), matrix.inputs, to);
  }
  return {room.data, room.stride};
}

// Sums of the first tile's rows, with blocks that are widened on the way; for tiles to follow if there are any.
inline void widen_and_multiply(const Matrix& matrix, const Rows& a, int row, int rows, BlocksOf<bf16> widened,
                               int block, int count, bool last, Ahead ahead, float* sums, ptrdiff_t stride) {
  CodedReader readers[kMaxTileBlocks];
  for (int i = 0; i < count; i++) readers[i] = matrix.coded(block + i);
  coded_tile_function(rows, count, last)(a.values + row * a.stride, a.stride, readers, widened.data, widened.stride,
                                         ahead, matrix.inputs, sums, stride);
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
  const bool coded = matrix.kind == Kind::kCodedBf16;
  const bool by_lines = matrix.by_bytes() || coded || matrix.kind == Kind::kBf16;  // else a run is several blocks
  const BlocksOf<bf16> room = coded ? room_to_widen(matrix) : BlocksOf<bf16>{};
  const Tiling tiling(rows.end - rows.first, matrix.planes(), coded ? 2 : kMaxTileBlocks);
  for (int block = blocks.first, width; block < blocks.end; block += width) {
    const int tile = tiling.width(blocks.end - block);
    width = std::max(tile, std::min(2, blocks.end - block));  // pairs stay together, however narrow the tiles are
    const Blocks widened = coded               ? Blocks{room.data, room.stride}
                           : matrix.by_bytes() ? Blocks{}
                                               : bf16_blocks(matrix, block, width);
    // The next two blocks are fetched while the first tiles are computed, one for each, or both for an only one: the
    // hardware sees too late where they are.
    int next = block + width;
    const bool once = tiling.height >= rows.end - rows.first;
    const ptrdiff_t apart = once && tile == 2 && by_lines ? matrix.block_bytes() : 0;
    for (int row = rows.first, height; row < rows.end; row += height) {
      height = std::min(tiling.height, rows.end - row);
      const Ahead ahead{matrix.block(next), apart};
      for (int i = 0; i < width; i += tile)
        if (coded && row == rows.first)
          widen_and_multiply(matrix, a, row, height, room.from(i), block + i, tile, row + height == rows.end, ahead,
                             sums + i * kBlock, kStride);
        else
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
