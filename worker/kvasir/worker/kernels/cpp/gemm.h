// Products with packed weight matrices: C [rows, outputs] = A [rows, inputs] x W^T, summed in float32.
//
// A matrix is packed in blocks of kBlock outputs: [outputs / 16][inputs / 2][16][2] bfloat16. One cache line holds two
// inputs of 16 outputs, which is one operand of dot(), and a block is read from start to end once for all rows
// of a tile. Whatever the number of rows, each sum runs over the inputs in the same order: a row's result depends on
// neither the batch nor the number of threads.
#pragma once

#include <algorithm>

#include "coded.h"
#include "int4.h"
#include "int8.h"
#include "simd.h"

namespace kvasir {

// How the weights of a matrix are held; PackedKind in ../packed.py has the same numbers.
enum class Kind : int32_t {
  kBf16 = 0,  // bfloat16
  kInt8 = 1,  // the blocks of int8.h
  kInt8Activations = 2,  // the same, multiplied with rows rounded to int8
  kInt4 = 3,  // [outputs / 16][inputs / 32] groups of int4.h
  kCodedBf16 = 4,  // bfloat16 as in coded.h
};

// `outputs` is a multiple of kBlock, `inputs` even: padded with zeros. Mirrored in ../library.py.
struct Matrix {
  Kind kind;
  int32_t outputs;
  int32_t inputs;
  const void* weights;
  const float* scales;  // [outputs] of int8, else null
  const int32_t* sums;  // [outputs]: each output's int8 weights together; else null
  const float* bias;    // [outputs], or null

  int blocks() const { return outputs / kBlock; }
  bool int8() const { return kind == Kind::kInt8 || kind == Kind::kInt8Activations; }
  // Whether it is multiplied as it is packed, byte by byte, and not widened.
  bool by_bytes() const { return kMultipliesBytes && int8(); }
  // Whether it is multiplied with rounded rows; two planes of bytes keep bfloat16 as good as it was.
  bool rounds() const { return by_bytes() || kind == Kind::kInt8Activations; }
  int planes() const { return by_bytes() && kind == Kind::kInt8 ? 2 : 1; }
  ptrdiff_t block_bytes() const {
    return kind == Kind::kInt4        ? ptrdiff_t{groups()} * kGroupBytes
           : kind == Kind::kCodedBf16 ? coded_block_bytes(inputs)
           : kind == Kind::kBf16      ? ptrdiff_t{inputs} * kBlock * 2
                                      : ptrdiff_t{inputs} * kBlock;
  }
  const std::byte* block(int index) const { return static_cast<const std::byte*>(weights) + index * block_bytes(); }
  CodedReader coded(int index) const {
    return {block(index), reinterpret_cast<const CodedException*>(block(blocks()))};
  }
  int groups() const { return (inputs + kGroup - 1) / kGroup; }
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

  // Of `planes` sums for each output; `most` blocks side by side.
  explicit Tiling(int rows, int planes = 1, int most = kMaxTileBlocks) {
    const int tallest = kMaxTileRows / planes;
    const int tiles = (rows + tallest - 1) / tallest;
    height = (rows + tiles - 1) / tiles;
    max_blocks = height * planes <= kTileRows[4] ? 4 : height * planes <= kTileRows[2] ? 2 : 1;
    max_blocks = std::min(max_blocks, most);
  }

  int width(int blocks_left) const {
    return std::min(max_blocks, blocks_left >= 4 ? 4 : blocks_left >= 2 ? 2 : 1);
  }
};

// C [rows, blocks * 16] of up to kTileRows[blocks] rows; blocks is 1, 2 or 4. W is packed bfloat16, `stride` elements
// from one block to the next. Meanwhile as many lines as one block has are fetched `ahead`, of each run.
using TileFunction = void (*)(const bf16* a, ptrdiff_t a_stride, const bf16* w, ptrdiff_t w_stride, Ahead ahead,
                              int inputs, float* c, ptrdiff_t c_stride);
TileFunction tile_function(int rows, int blocks);

// The same of coded blocks, one reader for each. They are widened into W for the tiles of rows that follow; if this one
// is the `last`, each unit into the same room.
using CodedTileFunction = void (*)(const bf16* a, ptrdiff_t a_stride, CodedReader* readers, bf16* w, ptrdiff_t w_stride,
                                   Ahead ahead, int inputs, float* c, ptrdiff_t c_stride);
CodedTileFunction coded_tile_function(int rows, int blocks, bool last);

// Rows of activations, `stride` values apart: as they are, or rounded, with their scales, where rounds() of the matrix.
struct Rows {
  const bf16* values;
  Rounded* rounded;
  float* scales;
  ptrdiff_t stride;
  ptrdiff_t plane;  // from the high bytes to the low ones, where there are two planes
};

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

// `rows` of A, no more than fit in the second-level cache, times `blocks`. `finish(row, block, count, values)` takes
// each row's sums of `count` consecutive blocks, scaled and with bias; count is even where the bounds of `blocks` are.
template <class Finish>
void multiply_packed(const Matrix& matrix, const Rows& a, Range rows, Range blocks, const Finish& finish);

}  // namespace kvasir

#include "gemm_packed.h"
