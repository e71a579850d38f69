// Weights of eight bits, [outputs / 16][inputs / 4][16][4], with a float32 scale per output; and rows of activations
// rounded to eight bits, with a scale per row.
#pragma once

#include <algorithm>

#include "simd.h"

namespace kvasir {

// Inputs of one line of a block.
constexpr int kQuad = 4;

// The byte at `index` of each 32-bit word, signed, as a float.
inline Floats byte_of(Pairs words, int index) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 8 * index), 24));
#else
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 24 - 8 * index), 24));
#endif
}

// Two floats that are exact in bfloat16 as a pair.
inline Pairs exact_pair(Floats first, Floats second) {
#if defined(__AVX512F__)
  const __m512i high = _mm512_and_si512(_mm512_castps_si512(second), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm512_or_si512(high, _mm512_srli_epi32(_mm512_castps_si512(first), 16));
#else
  const __m256i high = _mm256_and_si256(_mm256_castps_si256(second), _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm256_or_si256(high, _mm256_srli_epi32(_mm256_castps_si256(first), 16));
#endif
}

// One block as [inputs / 2][16][2] bfloat16, without its scale: an int8 is exact in bfloat16.
inline void widen_int8(const int8_t* block, int inputs, bf16* out) {
  constexpr int kLine = 2 * kBlock;
  for (int input = 0; input < inputs; input += kQuad, block += kQuad * kBlock, out += 2 * kLine)
    for (int lane = 0; lane < kBlock; lane += kLanes) {
      const Pairs words = load_pairs(block + kQuad * lane);
      store_pairs(out + 2 * lane, exact_pair(byte_of(words, 0), byte_of(words, 1)));
      store_pairs(out + kLine + 2 * lane, exact_pair(byte_of(words, 2), byte_of(words, 3)));
    }
}

// Rows rounded to integers, as the target multiplies them.
#if defined(__AVX512VNNI__)

// Bytes, in one plane or two. One plane: 255 steps around 0, with 128 added. Two, for activations that are to stay as
// they are: 65,535 steps with 32,768 added, high bytes and then low ones. Both are multiplied with int8 directly.
constexpr bool kMultipliesBytes = true;
using Rounded = uint8_t;

// C [rows, blocks * 16] = scale of the row * sum of its integers * w; integers until the end, so in any order the same.
// `planes` lie `a_plane` bytes apart; `sums` are those of each output's weights. A tile has up to kTileRows[blocks] of
// gemm.h divided by `planes` rows.
using ByteTileFunction = void (*)(const uint8_t* a, ptrdiff_t a_stride, ptrdiff_t a_plane, const float* a_scales,
                                  const int8_t* w, ptrdiff_t w_stride, Ahead ahead, const int32_t* sums,
                                  int inputs, float* c, ptrdiff_t c_stride);
ByteTileFunction byte_tile_function(int rows, int blocks, int planes);

#else

// bfloat16, which holds 255 steps exactly; there are no two planes.
constexpr bool kMultipliesBytes = false;
using Rounded = bf16;

#endif

// Rounds a row to the integers above. Returns their scale: 0 of a row of zeros, NaN of one that is not finite, since
// integers cannot say so.
inline float round_row(const bf16* row, int size, int planes, ptrdiff_t plane, Rounded* out) {
  Floats top = broadcast(0.0f), doubt = broadcast(0.0f);  // 0 times what is finite
  for (int i = 0; i < size; i += kLanes) {
    const Floats value = widen(row + i);
    top = max(top, max(value, -value));
    doubt = fma(value, broadcast(0.0f), doubt);
  }
  const float scale = greatest(top) / (planes == 2 ? 32767.0f : 127.0f);
  const Floats inverse = broadcast(scale > 0.0f ? 1.0f / scale : 0.0f);
  for (int i = 0; i < size; i += kLanes) {
    const Floats steps = nearest(widen(row + i) * inverse);
#if defined(__AVX512VNNI__)
    const __m512i shifted = _mm512_add_epi32(_mm512_cvtps_epi32(steps), _mm512_set1_epi32(planes == 2 ? 32768 : 128));
    const __m512i high = planes == 2 ? _mm512_srli_epi32(shifted, 8) : shifted;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(high));
    if (planes == 2) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + plane + i), _mm512_cvtepi32_epi8(shifted));
#else
    (void)plane;
    narrow(out + i, steps);
#endif
  }
  return scale + sum(doubt);
}

}  // namespace kvasir
