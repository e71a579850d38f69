// Weights of four bits, in groups of inputs that share a scale and a minimum: widened to packed bfloat16.
#pragma once

#include "simd.h"

namespace kvasir {

// Inputs of a group. A block's group is 16 float16 scales, 16 float16 minima, and 64 words of codes: word
// [input / 16][2 * output + input % 2] has the codes of 8 inputs, two apart, the first in its lowest bits.
constexpr int kGroup = 32;
constexpr int kGroupBytes = 4 * kBlock + kGroup * kBlock / 2;

// One block, as [inputs / 2][16][2] with the inputs rounded up to whole groups.
inline void widen_int4(const std::byte* block, int inputs, bf16* out) {
  constexpr int kLine = 2 * kBlock, kCodes = 8;
  for (int input = 0; input < inputs; input += kGroup, block += kGroupBytes, out += kGroup * kBlock) {
    const auto* scales = reinterpret_cast<const uint16_t*>(block);
    const auto* minima = scales + kBlock;
    const auto* words = reinterpret_cast<const uint32_t*>(minima + kBlock);
    for (int lane = 0; lane < kLine; lane += kLanes) {
      const Floats scale = load_doubled(scales + lane / 2), minimum = load_doubled(minima + lane / 2);
      for (int half = 0; half < 2; half++) {
        Pairs codes = load_pairs(words + half * kLine + lane);
        bf16* line = out + half * kCodes * kLine + lane;
        for (int i = 0; i < kCodes; i++, line += kLine, codes = without_low_bits(codes))
          narrow(line, fma(low_bits(codes), scale, minimum));
      }
    }
  }
}

}  // namespace kvasir
