#include "attention.h"

#include <cmath>
#include <limits>

#include "transpose.h"

namespace kvasir {
namespace {

// From one block of packed values to the next: not 4 KiB, at which all of them would share few cache lines.
constexpr ptrdiff_t kValueStride = (kSegment + 2) * kBlock;
// A segment's packed keys and values of one head.
constexpr ptrdiff_t key_size(int depth) { return ptrdiff_t{kSegment} * depth; }
constexpr ptrdiff_t value_size(int depth) { return kValueStride * depth / kBlock; }
constexpr int kLine = 64;        // bytes that come together
constexpr int kLinesAtOnce = 4;  // as many as are used in that time
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <class T>
T* sized(std::vector<T>& buffer, size_t count) {
  if (buffer.size() < count) buffer.resize(count);
  return buffer.data();
}

// Scores of `visible` keys, at least one, become the weights 2^(score * scale - greatest), the rest up to kSegment 0;
// returns their sum. `greatest` rises to this segment's; `rescale` is what that makes of earlier weights.
float exponentials(const float* scores, int visible, float scale, float& greatest_so_far, float& rescale,
                   bf16* weights) {
  alignas(64) float last[kBlock];
  const int whole = visible / kBlock * kBlock, rest = visible - whole;
  for (int i = 0; i < kBlock; i++) last[i] = i < rest ? scores[whole + i] : kMinusInfinity;
  Floats top = broadcast(kMinusInfinity);
  for (int i = 0; i < whole; i += kLanes) top = max(top, load(scores + i));
  for (int i = 0; i < kBlock; i += kLanes) top = max(top, load(last + i));
  const float highest = std::max(greatest_so_far, greatest(top) * scale);
  rescale = highest == greatest_so_far ? 1.0f : std::exp2(greatest_so_far - highest);
  greatest_so_far = highest;
  const Floats factor = broadcast(scale), shift = broadcast(-highest);
  Floats total = broadcast(0.0f);
  const auto weigh = [&](const float* from, bf16* to) {
    const Floats weight = power_of_two(fma(load(from), factor, shift));
    total = total + weight;
    narrow(to, weight);
  };
  for (int i = 0; i < whole; i += kLanes) weigh(scores + i, weights + i);
  if (rest > 0)
    for (int i = 0; i < kBlock; i += kLanes) weigh(last + i, weights + whole + i);
  const int written = whole + (rest > 0 ? kBlock : 0);
  std::memset(weights + written, 0, sizeof(bf16) * (kSegment - written));
  return sum(total);
}

// Up to 16 tokens' keys, of one head and zeros, transposed to `keys`; their values, `value_offset` further on,
// interleaved to `values`.
void pack_group(const bf16* const* rows, int present, int head_dim, ptrdiff_t value_offset, bf16* keys, bf16* values,
                Prefetcher& prefetcher) {
  alignas(64) bf16 padded[2 * kBlock][kKeyStep];
  static const bf16 kNothing[kKeyStep] = {};
  for (int d = 0; d < head_dim; d += kKeyStep) {
    const int width = std::min(kKeyStep, head_dim - d);
    const bf16 *k[kBlock], *v[kBlock];
    for (int i = 0; i < kBlock; i++) {
      k[i] = i < present ? rows[i] + d : kNothing;
      v[i] = i < present ? rows[i] + value_offset + d : kNothing;
      if (width < kKeyStep && i < present) {
        for (const bf16** from : {&k[i], &v[i]}) {
          bf16* copy = padded[from == &k[i] ? i : kBlock + i];
          std::memcpy(copy, *from, sizeof(bf16) * width);
          std::memset(copy + width, 0, sizeof(bf16) * (kKeyStep - width));
          *from = copy;
        }
      }
    }
    transpose_keys(k, keys + d * kBlock);
    for (int i = 0; i < kBlock; i += 2) {
      interleave_values(v[i], v[i + 1], values + d / kBlock * kValueStride + i * kBlock, kValueStride);
      prefetcher.advance(kLinesAtOnce);
    }
  }
}

}  // namespace

void Prefetcher::expect(const Keys& now, const Keys& next) {
  if (keys_ != now) {
    begin(now);
    allowed_ = kLead;
    advance(kLead);
  }
  next_ = next;
}

void Prefetcher::begin(const Keys& keys) {
  keys_ = keys;
  next_ = Keys{};
  token_ = 0;
  at_ = run_end_ = values_ = nullptr;
}

// Whether there is another run; at_ and run_end_ are its bounds.
bool Prefetcher::next_run() {
  const int heads = keys_.end_head - keys_.first_head;
  if (values_ != nullptr) {
    at_ = values_;
    values_ = nullptr;
  } else if (token_ >= keys_.end) {
    if (next_.end == 0) return false;
    begin(next_);
    return next_run();
  } else if (heads == cache_.kv_heads) {
    at_ = reinterpret_cast<const char*>(cache_.keys(keys_.table[token_ / cache_.block_size], layer_));
    run_end_ = at_ + 2 * cache_.value_offset() * sizeof(bf16);
    token_ += cache_.block_size;
    return true;
  } else {
    const bf16* key = cache_.key(keys_.table, layer_, token_++) + ptrdiff_t{keys_.first_head} * cache_.head_dim;
    at_ = reinterpret_cast<const char*>(key);
    values_ = reinterpret_cast<const char*>(key + cache_.value_offset());
  }
  run_end_ = at_ + heads * cache_.head_dim * sizeof(bf16);
  return true;
}

void Prefetcher::advance(int lines) {
  for (lines = std::min(lines, allowed_); lines > 0; lines--, allowed_--, at_ += kLine) {
    if (at_ >= run_end_ && !next_run()) return;
    _mm_prefetch(at_, _MM_HINT_T1);
  }
}

const void* Prefetcher::take(int lines, const void* otherwise) {
  if (allowed_ < lines || (at_ >= run_end_ && !next_run()) || run_end_ - at_ < lines * kLine) return otherwise;
  const char* taken = at_;
  at_ += lines * kLine;
  allowed_ -= lines;
  return taken;
}

struct Attention::Shape {
  int start, tokens, heads, group, head_dim;
  int rows() const { return tokens * group; }
  int depth() const { return round_up(head_dim, kKeyStep); }
};

void Attention::attend(const Cache& cache, int layer, const Span& span, int first_head, int end_head, int group,
                       ptrdiff_t row_size, const bf16* queries, bf16* out, Prefetcher& prefetcher) {
  const Shape shape{span.start, span.count, end_head - first_head, group, cache.head_dim};
  const int rows = shape.rows(), depth = shape.depth();
  const ptrdiff_t skipped = ptrdiff_t{first_head} * group * cache.head_dim;
  prepare(shape, row_size, queries + skipped);
  const int total = span.start + span.count;
  for (int first = 0; first < total; first += kSegment) {
    const int keys = std::min(kSegment, total - first);
    pack(cache, layer, span, first, keys, first_head, shape.heads, prefetcher);
    for (int head = 0; head < shape.heads; head++) {
      multiply(queries_.data() + ptrdiff_t{head} * rows * depth, depth, rows, keys_.data() + head * key_size(depth),
               ptrdiff_t{depth} * kBlock, round_up(keys, kBlock) / kBlock, depth, scores_.data(), kSegment, prefetcher);
      weigh(shape, first, keys, head);
      multiply(weights_.data(), kSegment, rows, values_.data() + head * value_size(depth), kValueStride,
               depth / kBlock, round_up(keys, kBlock), part_.data(), depth, prefetcher);
      mix(shape, head);
    }
  }
  for (int head = 0; head < shape.heads; head++)
    for (int row = 0; row < rows; row++) {
      const float* mixed = mixed_.data() + (ptrdiff_t{head} * rows + row) * depth;
      bf16* to = out + row / group * row_size + skipped + (ptrdiff_t{head} * group + row % group) * cache.head_dim;
      const Floats share = broadcast(1.0f / sum_[head * rows + row]);
      int i = 0;
      for (; i + kLanes <= cache.head_dim; i += kLanes) narrow(to + i, load(mixed + i) * share);
      for (; i < cache.head_dim; i++) to[i] = narrow(mixed[i] * (1.0f / sum_[head * rows + row]));
    }
}

// Queries head by head, each token's group together, padded with zeros; empty sums.
void Attention::prepare(const Shape& shape, ptrdiff_t row_size, const bf16* queries) {
  const int rows = shape.rows(), depth = shape.depth();
  const size_t all = size_t(shape.heads) * rows;
  bf16* to = sized(queries_, all * depth);
  for (int head = 0; head < shape.heads; head++)
    for (int row = 0; row < rows; row++, to += depth) {
      const bf16* from =
          queries + row / shape.group * row_size + (head * shape.group + row % shape.group) * shape.head_dim;
      std::memcpy(to, from, sizeof(bf16) * shape.head_dim);
      std::memset(to + shape.head_dim, 0, sizeof(bf16) * (depth - shape.head_dim));
    }
  sized(keys_, shape.heads * key_size(depth));
  sized(values_, shape.heads * value_size(depth));
  sized(scores_, size_t(rows) * kSegment);
  sized(weights_, size_t(rows) * kSegment);
  sized(part_, size_t(rows) * depth);
  sized(rescale_, rows);
  std::fill_n(sized(mixed_, all * depth), all * depth, 0.0f);
  std::fill_n(sized(greatest_, all), all, kMinusInfinity);
  std::fill_n(sized(sum_, all), all, 0.0f);
}

// K and V of `keys` tokens from position `first`, in whole blocks of 16: what follows the last token is zero, since
// memory there may hold anything, and 0 * NaN would be NaN. Of all heads before the next tokens: their memory is read
// from start to end.
void Attention::pack(const Cache& cache, int layer, const Span& span, int first, int keys, int first_head, int heads,
                     Prefetcher& prefetcher) {
  const int head_dim = cache.head_dim, depth = round_up(head_dim, kKeyStep);
  for (int group = 0; group < keys; group += kBlock) {
    const bf16* rows[kBlock];
    const int present = std::min(kBlock, keys - group);
    for (int i = 0; i < present; i++)
      rows[i] = cache.key(span.table, layer, first + group + i) + ptrdiff_t{first_head} * head_dim;
    for (int head = 0; head < heads; head++) {
      pack_group(rows, present, head_dim, cache.value_offset(),
                 keys_.data() + head * key_size(depth) + ptrdiff_t{group} * depth,
                 values_.data() + head * value_size(depth) + group * kBlock, prefetcher);
      prefetcher.used(present * 2 * head_dim * int{sizeof(bf16)} / kLine);
      for (int i = 0; i < present; i++) rows[i] += head_dim;
    }
  }
}

// C [rows, blocks * 16]; meanwhile what is expected next is fetched.
void Attention::multiply(const bf16* a, ptrdiff_t a_stride, int rows, const bf16* w, ptrdiff_t w_stride, int blocks,
                         int inputs, float* c, ptrdiff_t c_stride, Prefetcher& prefetcher) {
  const Tiling tiling(rows);
  for (int block = 0, width; block < blocks; block += width) {
    width = tiling.width(blocks - block);
    for (int row = 0, height; row < rows; row += height) {
      height = std::min(tiling.height, rows - row);
      const bf16* weights = w + block * w_stride;
      tile_function(height, width)(a + row * a_stride, a_stride, weights, w_stride,
                                   {prefetcher.take(inputs / 2, weights)}, inputs, c + row * c_stride + block * kBlock,
                                   c_stride);
    }
  }
}

// Scores to weights, for each row as far as its token sees.
void Attention::weigh(const Shape& shape, int first, int keys, int head) {
  const float scale = kLog2E / std::sqrt(static_cast<float>(shape.head_dim));
  for (int row = 0; row < shape.rows(); row++) {
    const int visible = std::min(keys, shape.start + row / shape.group + 1 - first);
    bf16* weights = weights_.data() + ptrdiff_t{row} * kSegment;
    if (visible <= 0) {
      std::memset(weights, 0, sizeof(bf16) * kSegment);
      rescale_[row] = 1.0f;
      continue;
    }
    const int at = head * shape.rows() + row;
    const float added = exponentials(scores_.data() + ptrdiff_t{row} * kSegment, visible, scale, greatest_[at],
                                     rescale_[row], weights);
    sum_[at] = sum_[at] * rescale_[row] + added;
  }
}

void Attention::mix(const Shape& shape, int head) {
  const int rows = shape.rows(), depth = shape.depth();
  for (int row = 0; row < rows; row++) {
    float* mixed = mixed_.data() + (ptrdiff_t{head} * rows + row) * depth;
    const float* part = part_.data() + ptrdiff_t{row} * depth;
    const Floats rescale = broadcast(rescale_[row]);
    for (int i = 0; i < depth; i += kLanes) store(mixed + i, fma(load(mixed + i), rescale, load(part + i)));
  }
}

}  // namespace kvasir
