// Attention over the paged KV cache, straight from its blocks, for one or many new tokens per sequence alike.
//
// Keys are taken in segments of kSegment, counted from the sequence's first token, with an online softmax across
// them (Milakov and Gimelshein 2018; Dao et al. 2022). A segment's K is transposed and its V interleaved into small
// buffers laid out like packed weights, so that both products are those of gemm.h. A row's result depends on its own
// query and its keys alone, in the same order of sums: decoding, a chunk of a prompt and the checking of drafted
// tokens give the same bits.
#pragma once

#include <vector>

#include "gemm.h"

namespace kvasir {

// [blocks, layers, 2 (K, V), block_size, kv_heads, head_dim] bfloat16.
struct Cache {
  bf16* data;
  int32_t layers;
  int32_t block_size;
  int32_t kv_heads;
  int32_t head_dim;

  ptrdiff_t token_size() const { return ptrdiff_t{kv_heads} * head_dim; }
  // Where the first token of a block has its K of one layer; its V is value_offset() further on.
  bf16* keys(int block, int layer) const {
    return data + (ptrdiff_t{block} * layers + layer) * 2 * value_offset();
  }
  ptrdiff_t value_offset() const { return block_size * token_size(); }
  bf16* key(const int32_t* table, int layer, int position) const {
    return keys(table[position / block_size], layer) + position % block_size * token_size();
  }
};

// `count` consecutive new tokens of a sequence, from position `start`; K and V up to them are in the cache.
struct Span {
  const int32_t* table;
  int start;
  int count;
};

constexpr int kSegment = 128;

// The keys and values that one piece of work reads: up to the token `end`, of the KV heads [first_head, end_head).
struct Keys {
  const int32_t* table;
  int end;
  int first_head;
  int end_head;
  bool operator==(const Keys&) const = default;
};

// K and V on their way to the caches while earlier ones are worked on: they lie in blocks all over memory,
// in an order that the hardware does not guess. The lead stays the same, from one piece of work on to the next, and a
// few lines are fetched at once, since a core waits for few at a time.
class Prefetcher {
 public:
  static constexpr int kLead = 1024;  // lines that are on their way or there before they are used

  explicit Prefetcher(const Cache& cache, int layer) : cache_(cache), layer_(layer) {}
  // `now` is worked on from here on, and after it `next`; no keys at all are fine.
  void expect(const Keys& now, const Keys& next);
  // So many lines were used: as many more may be fetched.
  void used(int lines) { allowed_ = std::min(allowed_ + lines, kLead); }
  // Fetches up to so many lines.
  void advance(int lines);
  // So many consecutive lines for the caller to fetch, or `otherwise` where that cannot be.
  const void* take(int lines, const void* otherwise);

 private:
  void begin(const Keys& keys);
  bool next_run();

  const Cache cache_;
  const int layer_;
  Keys keys_{}, next_{};
  int token_ = 0;                                  // of keys_
  int allowed_ = 0;                                // lines
  const char *at_ = nullptr, *run_end_ = nullptr;  // what is contiguous: a whole block, or a token's keys or values
  const char* values_ = nullptr;                   // of the token whose keys at_ points to, or null
};

// Buffers of one thread.
class Attention {
 public:
  // For the new tokens `span` and the KV heads [first_head, end_head). queries and out are
  // [count][kv_heads * group][head_dim] bfloat16, rows of all heads `row_size` apart.
  // The prefetcher expects the span's keys, or none.
  void attend(const Cache& cache, int layer, const Span& span, int first_head, int end_head, int group,
              ptrdiff_t row_size, const bf16* queries, bf16* out, Prefetcher& prefetcher);

 private:
  struct Shape;
  void prepare(const Shape& shape, ptrdiff_t row_size, const bf16* queries);
  void pack(const Cache& cache, int layer, const Span& span, int first, int keys, int first_head, int heads,
            Prefetcher& prefetcher);
  void weigh(const Shape& shape, int first, int keys, int head);
  void mix(const Shape& shape, int head);
  void multiply(const bf16* a, ptrdiff_t a_stride, int rows, const bf16* w, ptrdiff_t w_stride, int blocks, int inputs,
                float* c, ptrdiff_t c_stride, Prefetcher& prefetcher);

  std::vector<bf16> queries_, keys_, values_, weights_;
  std::vector<float> scores_, mixed_, part_, greatest_, sum_, rescale_;
};

}  // namespace kvasir
