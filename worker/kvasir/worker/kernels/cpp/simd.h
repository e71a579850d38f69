// Vectors as wide as the target has them, and the one operation that decides the speed of everything else:
// products of bfloat16 pairs summed into float32.
//
// Compiled once per target (see ../build.py): AVX-512 with or without bfloat16 products, or AVX2 with FMA.
// Nothing outside this file asks which one it is.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvasir {

using bf16 = uint16_t;  // the bits of a bfloat16

// Columns of one block of a packed matrix (see gemm.h): a cache line of bfloat16 pairs on every target.
constexpr int kBlock = 16;

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Memory that comes into the caches while something else is computed: two runs of lines, `apart` bytes from each other;
// one and the same if that is 0.
struct Ahead {
  const void* lines;
  ptrdiff_t apart = 0;

  void fetch(ptrdiff_t offset) const {
    const char* at = static_cast<const char*>(lines) + offset;
    _mm_prefetch(at, _MM_HINT_T0);
    _mm_prefetch(at + apart, _MM_HINT_T0);
  }
  // What is read once, and then does not push out of the larger caches what others need there: between the steps,
  // Python's own code and data.
  void fetch_once(ptrdiff_t offset) const {
    const char* at = static_cast<const char*>(lines) + offset;
    _mm_prefetch(at, _MM_HINT_NTA);
    _mm_prefetch(at + apart, _MM_HINT_NTA);
  }
};

inline bf16 narrow(float value) {  // to nearest, ties to even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float widen(bf16 value) {
  const uint32_t bits = uint32_t{value} << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Floats = __m512;
using Pairs = __m512i;  // kLanes pairs of bfloat16

inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Floats values) { return _mm512_reduce_add_ps(values); }
inline float greatest(Floats values) { return _mm512_reduce_max_ps(values); }
inline Floats nearest(Floats values) { return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT); }
inline Floats times_power_of_two(Floats values, Floats exponent) { return _mm512_scalef_ps(values, exponent); }

inline Floats widen(const bf16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline Pairs load_pairs(const void* from) { return _mm512_loadu_si512(from); }
inline void store_pairs(void* to, Pairs pairs) { _mm512_storeu_si512(to, pairs); }
inline Pairs broadcast_pair(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, 4);
  return _mm512_set1_epi32(pair);
}

// 16 bytes in each lane of 16, and lane by lane: the bytes at indices below 16; two vectors' bytes in turn, of the low
// or the high halves.
inline Pairs repeat_lane(const uint8_t* from) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Pairs look_up(Pairs table, Pairs indices) { return _mm512_shuffle_epi8(table, indices); }
inline Pairs unpack_low(Pairs first, Pairs second) { return _mm512_unpacklo_epi8(first, second); }
inline Pairs unpack_high(Pairs first, Pairs second) { return _mm512_unpackhi_epi8(first, second); }
// Of bytes: the low four bits, the high four bits.
inline Pairs low_nibbles(Pairs bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline Pairs high_nibbles(Pairs bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }

// Of 32-bit words: the lowest four bits as floats, and what is left above them.
inline Floats low_bits(Pairs words) { return _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(15))); }
inline Pairs without_low_bits(Pairs words) { return _mm512_srli_epi32(words, 4); }
// kLanes / 2 float16, each of them twice.
inline Floats load_doubled(const uint16_t* from) {
  const __m256i once = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_cvtph_ps(_mm256_or_si256(once, _mm256_slli_epi32(once, 16)));
}

#else

constexpr int kLanes = 8;
using Floats = __m256;
using Pairs = __m256i;

inline Floats broadcast(float value) { return _mm256_set1_ps(value); }
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats values) { _mm256_storeu_ps(to, values); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Floats values) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float greatest(Floats values) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Floats nearest(Floats values) { return _mm256_round_ps(values, _MM_FROUND_TO_NEAREST_INT); }
inline Floats times_power_of_two(Floats values, Floats exponent) {  // while 2^exponent is a normal number
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(values, _mm256_castsi256_ps(bits));
}

inline Floats widen(const bf16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline Pairs load_pairs(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_pairs(void* to, Pairs pairs) { _mm256_storeu_si256(static_cast<__m256i*>(to), pairs); }
inline Pairs broadcast_pair(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, 4);
  return _mm256_set1_epi32(pair);
}

inline Pairs repeat_lane(const uint8_t* from) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Pairs look_up(Pairs table, Pairs indices) { return _mm256_shuffle_epi8(table, indices); }
inline Pairs unpack_low(Pairs first, Pairs second) { return _mm256_unpacklo_epi8(first, second); }
inline Pairs unpack_high(Pairs first, Pairs second) { return _mm256_unpackhi_epi8(first, second); }
inline Pairs low_nibbles(Pairs bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline Pairs high_nibbles(Pairs bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }

inline Floats low_bits(Pairs words) { return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15))); }
inline Pairs without_low_bits(Pairs words) { return _mm256_srli_epi32(words, 4); }
inline Floats load_doubled(const uint16_t* from) {
  const __m128i once = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return _mm256_cvtph_ps(_mm_or_si128(once, _mm_slli_epi32(once, 16)));
}

#endif

#if defined(__AVX512BF16__)

// sums + a.first * b.first + a.second * b.second, lane by lane.
inline Floats dot(Floats sums, Pairs a, Pairs b) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline void narrow(bf16* to, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}

#elif defined(__AVX512F__)

inline Floats first(Pairs pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Floats second(Pairs pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Floats dot(Floats sums, Pairs a, Pairs b) {
  return fma(first(a), first(b), fma(second(a), second(b), sums));
}
inline void narrow(bf16* to, Floats values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

#else

inline Floats first(Pairs pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Floats second(Pairs pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Floats dot(Floats sums, Pairs a, Pairs b) {
  return fma(first(a), first(b), fma(second(a), second(b), sums));
}
inline void narrow(bf16* to, Floats values) {
  float lanes[kLanes];
  store(lanes, values);
  for (int i = 0; i < kLanes; i++) to[i] = narrow(lanes[i]);
}

#endif

// 2^x for x below 128, to about 4e-6 of itself (less than a hundredth of a bfloat16's last place); 0 below -126.
inline Floats power_of_two(Floats x) {
  // 2^x = 2^n * 2^rest; the polynomial is the minimax one of degree 5 on [-1/2, 1/2].
  const Floats bounded = max(x, broadcast(-126.0f));
  const Floats n = nearest(bounded);
  const Floats rest = bounded - n;
  Floats value = broadcast(1.3398874e-3f);
  for (const float term : {9.6184370e-3f, 5.5503324e-2f, 2.4022649e-1f, 6.9314720e-1f, 1.0f})
    value = fma(value, rest, broadcast(term));
  value = times_power_of_two(value, n);
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, broadcast(-126.0f), _CMP_GT_OQ), value);
#else
  return _mm256_and_ps(value, _mm256_cmp_ps(x, broadcast(-126.0f), _CMP_GT_OQ));
#endif
}

constexpr float kLog2E = 1.44269504f;

inline Floats silu(Floats x) {
  return x / (broadcast(1.0f) + power_of_two(min(x * broadcast(-kLog2E), broadcast(126.0f))));
}

}  // namespace kvasir
