// Products with packed weight matrices: C [rows, outputs] = A [rows, inputs] x W^T, summed in float32.
//
// A matrix is packed in blocks of kBlock outputs: [outputs / 16][inputs / 2][16][2] bfloat16. One cache line holds two
// inputs of 16 outputs, which is one operand of dot(), and a block is read from start to end once for all rows
// of a tile. Whatever the number of rows, each sum runs over the inputs in the same order: a row's result depends on
// neither the batch nor the number of threads.
#pragma once

#include <algorithm>

#include "simd.h"

namespace kvasir {

// How the weights of a matrix are held; PackedKind in ../packed.py has the same numbers.
enum class Kind : int32_t {
  kBf16 = 0,  // bfloat16
  kInt8 = 1,  // [outputs / 16][inputs / 2][16][2] int8 with a float32 scale per output
};

// `outputs` is a multiple of kBlock, `inputs` even: padded with zeros. Mirrored in ../library.py.
struct Matrix {
  Kind kind;
  int32_t outputs;
  int32_t inputs;
  const void* weights;
  const float* scales;  // [outputs]; null for kBf16
  const float* bias;    // [outputs], or null

  int blocks() const { return outputs / kBlock; }
  ptrdiff_t block_bytes() const { return ptrdiff_t{inputs} * kBlock * (kind == Kind::kBf16 ? 2 : 1); }
};

// The greatest tile of the target, in rows by blocks, whose sums stay in registers.
#if defined(__AVX512F__)
constexpr int kTileRows[] = {0, 12, 12, 0, 6};
#else
constexpr int kTileRows[] = {0, 4, 2, 0, 1};
#endif
constexpr int kMaxTileRows = kTileRows[1];
constexpr int kMaxTileBlocks = 4;

// How rows and blocks are cut into tiles: rows evenly, since a tile of few rows is slow.
struct Tiling {
  int height;      // rows of every tile but perhaps the last
  int max_blocks;  // 1, 2 or 4

  explicit Tiling(int rows) {
    const int tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
    height = (rows + tiles - 1) / tiles;
    max_blocks = height <= kTileRows[4] ? 4 : height <= kTileRows[2] ? 2 : 1;
  }

  int width(int blocks_left) const {
    return std::min(max_blocks, blocks_left >= 4 ? 4 : blocks_left >= 2 ? 2 : 1);
  }
};

// C [rows, blocks * 16] of up to kTileRows[blocks] rows; blocks is 1, 2 or 4. W is packed bfloat16, `stride` elements
// from one block to the next.
using TileFunction = void (*)(const bf16* a, ptrdiff_t a_stride, const bf16* w, ptrdiff_t w_stride, int inputs,
                              float* c, ptrdiff_t c_stride);
TileFunction tile_function(int rows, int blocks);

// C [rows, blocks * 16], any positive number of either.
void multiply(const bf16* a, ptrdiff_t a_stride, int rows, const bf16* w, ptrdiff_t w_stride, int blocks, int inputs,
              float* c, ptrdiff_t c_stride);

struct Range {
  int first;
  int end;
};

// The share of `part` when `count` things are dealt out in consecutive runs whose lengths are multiples of `unit`.
inline Range share(int count, int unit, int part, int parts) {
  const int64_t units = (count + unit - 1) / unit;
  const auto at = [&](int64_t i) { return std::min(count, static_cast<int>(units * i / parts) * unit); };
  return {at(part), at(part + 1)};
}

// Blocks [range.first, range.end) of all rows. `finish(row, block, count, values)` takes each row's sums of `count`
// consecutive blocks, scaled and with bias; count is even where the range's bounds are.
template <class Finish>
void multiply_packed(const Matrix& matrix, const bf16* a, ptrdiff_t a_stride, int rows, Range range,
                     const Finish& finish);

}  // namespace kvasir

#include "gemm_packed.h"
