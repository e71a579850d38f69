#include "int8.h"

#include "gemm.h"

#if defined(__AVX512VNNI__)

namespace kvasir {
namespace {

// GCC 12 keeps an array of these in registers, but not one of __m512i, whose elements it takes for another type's.
using Ints = int32_t __attribute__((vector_size(64)));

inline Ints dot(Ints totals, Ints a, Ints w) {
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(totals), reinterpret_cast<__m512i>(a),
                                                    reinterpret_cast<__m512i>(w)));
}

template <int kRows, int kBlocks, int kPlanes>
void tile(const uint8_t* a, ptrdiff_t a_stride, ptrdiff_t a_plane, const float* a_scales, const int8_t* w,
          ptrdiff_t w_stride, Ahead ahead, const int32_t* sums, int inputs, float* c, ptrdiff_t c_stride) {
  Ints totals[kPlanes][kRows][kBlocks];
#pragma GCC unroll 4
  for (int block = 0; block < kBlocks; block++) {
    // What is added to each activation adds 128 times the weights to the (high) bytes' total.
    const Ints surplus = reinterpret_cast<Ints>(_mm512_slli_epi32(_mm512_loadu_si512(sums + block * kBlock), 7));
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++) {
      totals[0][row][block] = -surplus;
      if constexpr (kPlanes == 2) totals[1][row][block] = Ints{};
    }
  }
  for (int k = 0; k < inputs; k += kQuad) {
    ahead.fetch(ptrdiff_t{k} * kBlock);
    Ints weights[kBlocks];
#pragma GCC unroll 4
    for (int block = 0; block < kBlocks; block++)
      weights[block] = reinterpret_cast<Ints>(_mm512_loadu_si512(w + block * w_stride + k * kBlock));
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++)
#pragma GCC unroll 2
      for (int plane = 0; plane < kPlanes; plane++) {
        int32_t quad;
        std::memcpy(&quad, a + plane * a_plane + row * a_stride + k, kQuad);
        const Ints quads = reinterpret_cast<Ints>(_mm512_set1_epi32(quad));
#pragma GCC unroll 4
        for (int block = 0; block < kBlocks; block++)
          totals[plane][row][block] = dot(totals[plane][row][block], quads, weights[block]);
      }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++)
#pragma GCC unroll 4
    for (int block = 0; block < kBlocks; block++) {
      Floats total = _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(totals[0][row][block]));
      if constexpr (kPlanes == 2) {
        const Floats low = _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(totals[1][row][block]));
        total = fma(total, broadcast(256.0f), low);
      }
      store(c + row * c_stride + block * kBlock, total * broadcast(a_scales[row]));
    }
}

template <int kRows, int kBlocks, int kPlanes>
constexpr ByteTileFunction tile_if_it_fits() {
  if constexpr (kRows * kPlanes <= kTileRows[kBlocks])
    return tile<kRows, kBlocks, kPlanes>;
  else
    return nullptr;
}

template <int kBlocks, int kPlanes>
ByteTileFunction of_rows(int rows) {
  static constexpr ByteTileFunction kTiles[] = {
      nullptr,
      tile_if_it_fits<1, kBlocks, kPlanes>(),  tile_if_it_fits<2, kBlocks, kPlanes>(),
      tile_if_it_fits<3, kBlocks, kPlanes>(),  tile_if_it_fits<4, kBlocks, kPlanes>(),
      tile_if_it_fits<5, kBlocks, kPlanes>(),  tile_if_it_fits<6, kBlocks, kPlanes>(),
      tile_if_it_fits<7, kBlocks, kPlanes>(),  tile_if_it_fits<8, kBlocks, kPlanes>(),
      tile_if_it_fits<9, kBlocks, kPlanes>(),  tile_if_it_fits<10, kBlocks, kPlanes>(),
      tile_if_it_fits<11, kBlocks, kPlanes>(), tile_if_it_fits<12, kBlocks, kPlanes>(),
  };
  return kTiles[rows];
}

template <int kPlanes>
ByteTileFunction of_blocks(int rows, int blocks) {
  return blocks == 4   ? of_rows<4, kPlanes>(rows)
         : blocks == 2 ? of_rows<2, kPlanes>(rows)
                       : of_rows<1, kPlanes>(rows);
}

}  // namespace

ByteTileFunction byte_tile_function(int rows, int blocks, int planes) {
  return planes == 2 ? of_blocks<2>(rows, blocks) : of_blocks<1>(rows, blocks);
}

}  // namespace kvasir

#endif
