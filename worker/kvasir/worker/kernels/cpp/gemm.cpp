#include "gemm.h"

namespace kvasir {
namespace {

constexpr int kVectors = kBlock / kLanes;  // to hold one block's sums

// The sums of a tile.
template <int kRows, int kBlocks>
struct Sums {
  static constexpr int kWidth = kBlocks * kVectors;
  Floats sums[kRows][kWidth];

  Sums() {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++)
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; j++) sums[row][j] = broadcast(0.0f);
  }

  // Adds the products of two inputs of each row.
  void add(const bf16* a, ptrdiff_t a_stride, const bf16* w, ptrdiff_t w_stride) {
    Pairs weights[kWidth];
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; j++)
      weights[j] = load_pairs(w + j / kVectors * w_stride + j % kVectors * 2 * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++) {
      const Pairs pair = broadcast_pair(a + row * a_stride);
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; j++) sums[row][j] = dot(sums[row][j], pair, weights[j]);
    }
  }

  void write(float* c, ptrdiff_t c_stride) const {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++)
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; j++) store(c + row * c_stride + j * kLanes, sums[row][j]);
  }
};

template <int kRows, int kBlocks>
void tile(const bf16* a, ptrdiff_t a_stride, const bf16* w, ptrdiff_t w_stride, Ahead ahead, int inputs,
          float* c, ptrdiff_t c_stride) {
  Sums<kRows, kBlocks> sums;
  for (int k = 0; k < inputs; k += 2) {
    ahead.fetch(ptrdiff_t{k} * kBlock * sizeof(bf16));
    sums.add(a + k, a_stride, w + k * kBlock, w_stride);
  }
  sums.write(c, c_stride);
}

template <int kRows, int kBlocks, bool kLast>
void coded_tile(const bf16* a, ptrdiff_t a_stride, CodedReader* readers, bf16* w, ptrdiff_t w_stride, Ahead ahead,
                int inputs, float* c, ptrdiff_t c_stride) {
  Sums<kRows, kBlocks> sums;
  if (kLast) w_stride = CodedUnit::kWeights;  // all of the room in the first-level cache
  for (int unit = 0; unit < inputs / CodedUnit::kInputs; unit++, w += kLast ? 0 : CodedUnit::kWeights) {
    for (ptrdiff_t line = 3 * unit; line < 3 * (unit + 1); line++) {
      if constexpr (kLast)
        ahead.fetch_once(line * CodedUnit::kHalf);
      else
        ahead.fetch(line * CodedUnit::kHalf);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kBlocks; j++) readers[j].read(unit, w + j * w_stride);
#pragma GCC unroll 4
    for (int line = 0; line < CodedUnit::kLines; line++, a += 2) sums.add(a, a_stride, w + line * 2 * kBlock, w_stride);
  }
  sums.write(c, c_stride);
}

struct Plain {
  using Function = TileFunction;
  template <int kRows, int kBlocks>
  static constexpr Function kTile = tile<kRows, kBlocks>;
};

template <bool kLast>
struct Coded {
  using Function = CodedTileFunction;
  template <int kRows, int kBlocks>
  static constexpr Function kTile = coded_tile<kRows, kBlocks, kLast>;
};

template <class Tile, int kRows, int kBlocks>
constexpr typename Tile::Function if_it_fits() {
  if constexpr (kRows <= kTileRows[kBlocks])
    return Tile::template kTile<kRows, kBlocks>;
  else
    return nullptr;
}

template <class Tile, int kBlocks>
typename Tile::Function of_rows(int rows) {
  static constexpr typename Tile::Function kTiles[] = {
      nullptr,
      if_it_fits<Tile, 1, kBlocks>(),  if_it_fits<Tile, 2, kBlocks>(),  if_it_fits<Tile, 3, kBlocks>(),
      if_it_fits<Tile, 4, kBlocks>(),  if_it_fits<Tile, 5, kBlocks>(),  if_it_fits<Tile, 6, kBlocks>(),
      if_it_fits<Tile, 7, kBlocks>(),  if_it_fits<Tile, 8, kBlocks>(),  if_it_fits<Tile, 9, kBlocks>(),
      if_it_fits<Tile, 10, kBlocks>(), if_it_fits<Tile, 11, kBlocks>(), if_it_fits<Tile, 12, kBlocks>(),
  };
  return kTiles[rows];
}

template <class Tile>
typename Tile::Function of_size(int rows, int blocks) {
  return blocks == 4 ? of_rows<Tile, 4>(rows) : blocks == 2 ? of_rows<Tile, 2>(rows) : of_rows<Tile, 1>(rows);
}

}  // namespace

TileFunction tile_function(int rows, int blocks) { return of_size<Plain>(rows, blocks); }
CodedTileFunction coded_tile_function(int rows, int blocks, bool last) {
  return last ? of_size<Coded<true>>(rows, blocks) : of_size<Coded<false>>(rows, blocks);
}

}  // namespace kvasir
