// bfloat16 weights in 12 bits each, without loss.
//
// A bfloat16's high byte is its sign and all but the last bit of its exponent. Of the weights of a trained matrix it
// takes few values: 16 are enough for all but some 3 in 100,000. So a block keeps its low bytes, a code of four bits
// for each high byte, and beside them the exceptions. Where reading the weights is what takes the time, a quarter of it
// is saved; the products get the very same bits.
#pragma once

#include <vector>

#include "simd.h"

namespace kvasir {

constexpr int kCodes = 16;

// Where a block begins. Its units follow, and after all blocks of the matrix the exceptions.
struct alignas(64) CodedHeader {
  uint8_t high_bytes[kCodes];
  int64_t first_exception;  // index
};

// 8 inputs of 16 outputs, in two halves. Of each pair of 16-byte lanes of the widened half, 8 low bytes of its first
// line and 8 of its second lie side by side, so that unpacking them with their high bytes gives both lines.
struct CodedUnit {
  static constexpr int kInputs = 8, kLines = 4, kWeights = kInputs * kBlock, kHalf = kWeights / 2;
  uint8_t low_bytes[2][kHalf];
  uint8_t codes[kHalf];  // four bits of the first half, four of the second
};
static_assert(sizeof(CodedUnit) == 3 * CodedUnit::kHalf);

// A weight whose high byte has no code. They ascend, and each block's end with one of no unit.
struct CodedException {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t unit;
  uint16_t place;  // in the widened unit
  bf16 value;
};

inline ptrdiff_t coded_block_bytes(int inputs) {
  return static_cast<ptrdiff_t>(sizeof(CodedHeader) + inputs / CodedUnit::kInputs * sizeof(CodedUnit));
}

// A block's units, widened one after the other.
class CodedReader {
 public:
  CodedReader() = default;
  CodedReader(const std::byte* block, const CodedException* exceptions) {
    const auto* header = reinterpret_cast<const CodedHeader*>(block);
    table_ = repeat_lane(header->high_bytes);
    unit_ = reinterpret_cast<const CodedUnit*>(header + 1);
    exception_ = exceptions + header->first_exception;
  }

  // The next unit, number `index`, as [CodedUnit::kLines][16][2].
  void read(uint32_t index, bf16* out) {
    constexpr int kLine = 2 * kBlock;
#pragma GCC unroll 2
    for (int at = 0; at < kLine; at += 2 * kLanes) {
      const Pairs codes = load_pairs(unit_->codes + 2 * at);
      const Pairs high[] = {look_up(table_, low_nibbles(codes)), look_up(table_, high_nibbles(codes))};
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const Pairs low = load_pairs(unit_->low_bytes[half] + 2 * at);
        store_pairs(out + 2 * half * kLine + at, unpack_low(low, high[half]));
        store_pairs(out + (2 * half + 1) * kLine + at, unpack_high(low, high[half]));
      }
    }
    unit_++;
    for (; exception_->unit == index; exception_++) [[unlikely]] out[exception_->place] = exception_->value;
  }

 private:
  Pairs table_;
  const CodedUnit* unit_ = nullptr;
  const CodedException* exception_ = nullptr;
};

// One block as [inputs / 2][16][2].
inline void widen_coded(CodedReader block, int inputs, bf16* out) {
  for (int unit = 0; unit < inputs / CodedUnit::kInputs; unit++) block.read(unit, out + unit * CodedUnit::kWeights);
}

// Codes a block [inputs / 2][16][2] and appends its exceptions.
void code_block(const bf16* block, int inputs, std::byte* out, std::vector<CodedException>& exceptions);

}  // namespace kvasir
