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

// K and V of tokens on their way to the second-level cache, a few at a time while others are worked on: they lie in
// blocks all over memory, in an order that the hardware does not guess.
class Prefetcher {
 public:
  Prefetcher(const Cache& cache, int layer, int first_head, int end_head)
      : cache_(cache),
        layer_(layer),
        first_(first_head * cache.head_dim),
        size_((end_head - first_head) * cache.head_dim) {}
  void expect(const int32_t* table, int first, int end) {
    table_ = table;
    next_ = first;
    end_ = end;
  }
  void advance(int tokens);

 private:
  const Cache& cache_;
  const int layer_;
  const ptrdiff_t first_, size_;
  const int32_t* table_ = nullptr;
  int next_ = 0, end_ = 0;
};

// Buffers of one thread.
class Attention {
 public:
  // For the new tokens `span` and the KV heads [first_head, end_head) of `layer`. queries and out are
  // [count][kv_heads * group][head_dim] bfloat16, rows of all heads `row_size` apart.
  // `next`, if there is one, is what this thread attends after this, with as many heads.
  void attend(const Cache& cache, int layer, const Span& span, int first_head, int end_head, int group,
              ptrdiff_t row_size, const bf16* queries, bf16* out, const Span* next);

 private:
  struct Shape;
  void prepare(const Shape& shape, ptrdiff_t row_size, const bf16* queries);
  void pack(const Cache& cache, int layer, const Span& span, int first, int keys, int head, Prefetcher& prefetcher,
            int share);
  void weigh(const Shape& shape, int first, int keys, int head);
  void mix(const Shape& shape, int head);

  std::vector<bf16> queries_, keys_, values_, weights_;
  std::vector<float> scores_, mixed_, part_, greatest_, sum_, rescale_;
};

}  // namespace kvasir
