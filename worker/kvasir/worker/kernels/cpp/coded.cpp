#include "coded.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace kvasir {
namespace {

constexpr int kHighBytes = 256, kLane = 16, kLineWords = 2 * kBlock;

// The most frequent high bytes first.
std::array<uint8_t, kHighBytes> by_frequency(const bf16* block, int count) {
  std::array<int, kHighBytes> found{};
  for (int i = 0; i < count; i++) found[block[i] >> 8]++;
  std::array<uint8_t, kHighBytes> order;
  std::iota(order.begin(), order.end(), uint8_t{0});
  std::stable_sort(order.begin(), order.end(), [&](uint8_t a, uint8_t b) { return found[a] > found[b]; });
  return order;
}

}  // namespace

void code_block(const bf16* block, int inputs, std::byte* out, std::vector<CodedException>& exceptions) {
  const auto order = by_frequency(block, inputs * kBlock);
  auto* header = new (out) CodedHeader{};
  header->first_exception = static_cast<int64_t>(exceptions.size());
  std::copy_n(order.begin(), kCodes, header->high_bytes);
  std::array<uint8_t, kHighBytes> code;
  code.fill(kCodes);
  for (int i = 0; i < kCodes; i++) code[order[i]] = static_cast<uint8_t>(i);
  out += sizeof(CodedHeader);
  for (int i = 0; i < inputs / CodedUnit::kInputs; i++, out += sizeof(CodedUnit)) {
    auto* unit = new (out) CodedUnit{};
    for (int place = 0; place < CodedUnit::kWeights; place++) {
      const int half = place / CodedUnit::kHalf, line = place / kLineWords % 2, word = place % kLineWords;
      const int at = word / (kLane / 2) * kLane + line * (kLane / 2) + word % (kLane / 2);
      const bf16 value = *block++;
      unit->low_bytes[half][at] = static_cast<uint8_t>(value);
      const uint8_t found = code[value >> 8];
      if (found == kCodes)
        exceptions.push_back({static_cast<uint32_t>(i), static_cast<uint16_t>(place), value});
      else
        unit->codes[at] |= static_cast<uint8_t>(found << (4 * half));
    }
  }
  exceptions.push_back({CodedException::kNone, 0, 0});
}

}  // namespace kvasir
