// Tokens of the cache laid out as gemm.h wants the blocks of a matrix.
#pragma once

#include "simd.h"

namespace kvasir {

constexpr int kKeyStep = 2 * kBlock;  // values of one token that one transposition takes

// K of 16 tokens, each a pointer to kKeyStep values, to [16 pairs of values][16 tokens][2].
inline void transpose_keys(const bf16* const* tokens, bf16* to) {
#if defined(__AVX512F__)
  // A 16 x 16 transposition of 32-bit pairs: lanes of 2, of 4, then whole quarters change places.
  __m512i rows[16], turned[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(tokens[i]);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    turned[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    turned[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(turned[i], turned[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(turned[i], turned[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(turned[i + 1], turned[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(turned[i + 1], turned[i + 3]);
  }
  // rows[4 * q + i]: quarter j has pair 4 * j + i of tokens 4 * q to 4 * q + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i low01 = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
    const __m512i low23 = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
    const __m512i high23 = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
    _mm512_storeu_si512(to + i * 32, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_storeu_si512(to + (4 + i) * 32, _mm512_shuffle_i32x4(high01, high23, 0x88));
    _mm512_storeu_si512(to + (8 + i) * 32, _mm512_shuffle_i32x4(low01, low23, 0xdd));
    _mm512_storeu_si512(to + (12 + i) * 32, _mm512_shuffle_i32x4(high01, high23, 0xdd));
  }
#else
  for (int pair = 0; pair < kBlock; pair++)
    for (int token = 0; token < kBlock; token++)
      std::memcpy(to + (pair * kBlock + token) * 2, tokens[token] + 2 * pair, 4);
#endif
}

// kKeyStep values of two tokens' V to two blocks' lines [16 values][2 tokens], at `to` and at `to + stride`.
inline void interleave_values(const bf16* first, const bf16* second, bf16* to, ptrdiff_t stride) {
#if defined(__AVX512F__)
  const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                                6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
  const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, even, b));
  _mm512_storeu_si512(to + stride, _mm512_permutex2var_epi16(a, odd, b));
#else
  for (int i = 0; i < kKeyStep; i++) {
    bf16* line = to + i / kBlock * stride + i % kBlock * 2;
    line[0] = first[i];
    line[1] = second[i];
  }
#endif
}

}  // namespace kvasir
