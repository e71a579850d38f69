#include "gemm.h"

namespace kvasir {
namespace {

constexpr int kVectors = kBlock / kLanes;  // to hold one block's sums

template <int kRows, int kBlocks>
void tile(const bf16* a, ptrdiff_t a_stride, const bf16* w, ptrdiff_t w_stride, Ahead ahead, int inputs,
          float* c, ptrdiff_t c_stride) {
  constexpr int kWidth = kBlocks * kVectors;
  Floats sums[kRows][kWidth];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++)
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; j++) sums[row][j] = broadcast(0.0f);
  for (int k = 0; k < inputs; k += 2) {
    ahead.fetch(ptrdiff_t{k} * kBlock * sizeof(bf16));
    Pairs weights[kWidth];
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; j++)
      weights[j] = load_pairs(w + j / kVectors * w_stride + k * kBlock + j % kVectors * 2 * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++) {
      const Pairs pair = broadcast_pair(a + row * a_stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; j++) sums[row][j] = dot(sums[row][j], pair, weights[j]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++)
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; j++) store(c + row * c_stride + j * kLanes, sums[row][j]);
}

template <int kRows, int kBlocks>
constexpr TileFunction tile_if_it_fits() {
  if constexpr (kRows <= kTileRows[kBlocks])
    return tile<kRows, kBlocks>;
  else
    return nullptr;
}

template <int kBlocks>
TileFunction of_rows(int rows) {
  static constexpr TileFunction kTiles[] = {
      nullptr,
      tile_if_it_fits<1, kBlocks>(),  tile_if_it_fits<2, kBlocks>(),  tile_if_it_fits<3, kBlocks>(),
      tile_if_it_fits<4, kBlocks>(),  tile_if_it_fits<5, kBlocks>(),  tile_if_it_fits<6, kBlocks>(),
      tile_if_it_fits<7, kBlocks>(),  tile_if_it_fits<8, kBlocks>(),  tile_if_it_fits<9, kBlocks>(),
      tile_if_it_fits<10, kBlocks>(), tile_if_it_fits<11, kBlocks>(), tile_if_it_fits<12, kBlocks>(),
  };
  return kTiles[rows];
}

}  // namespace

TileFunction tile_function(int rows, int blocks) {
  return blocks == 4 ? of_rows<4>(rows) : blocks == 2 ? of_rows<2>(rows) : of_rows<1>(rows);
}

}  // namespace kvasir
