// One step of a decoder: a flat batch of new tokens of any mix of sequences, through all layers, in one call.
#pragma once

#include <vector>

#include "attention.h"
#include "gemm.h"
#include "likeliest.h"
#include "team.h"

namespace kvasir {

// Mirrored in ../library.py, as are Model, Batch, Cache and Matrix. Norms are float32, padded with zeros to whole
// blocks; gate_up alternates a block of gate and one of up.
struct Layer {
  const float* attention_norm;  // [hidden]
  const float* qk_norm;         // [2, head_dim]: queries', keys'; or null
  const float* mlp_norm;        // [hidden]
  Matrix qkv;
  Matrix output;
  Matrix gate_up;
  Matrix down;
};

struct Model {
  int32_t hidden;
  int32_t intermediate;
  int32_t num_layers;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  float epsilon;
  const Layer* layers;
  const Matrix* embedding;
  const float* final_norm;
  const float* cos;  // [positions, head_dim / 2]
  const float* sin;
};

// `sequences` sequences follow each other in `tokens`: sequence s has counts[s] new tokens, from position starts[s],
// and its blocks at tables[s * table_size].
struct Batch {
  int32_t tokens;
  int32_t sequences;
  int32_t table_size;
  const int32_t* token_ids;
  const int32_t* starts;
  const int32_t* counts;
  const int32_t* tables;
};

// A team of threads and its buffers, for one step at a time.
class Engine {
 public:
  explicit Engine(int threads) : team_(threads), attention_(threads) {}

  // Writes K and V of all tokens, and the hidden states after the final norm: [tokens, hidden] bfloat16.
  void forward(const Model& model, const Batch& batch, const Cache& cache, bf16* hidden);

  // out [rows, vocab] float32 = a [rows, inputs] x matrix^T.
  void logits(const Matrix& matrix, const bf16* a, int rows, int vocab, float* out);

  // The column of each row's greatest logit, or -1 if some are not finite; no logit is kept.
  void likeliest(const Matrix& matrix, const bf16* a, int rows, int vocab, int32_t* out);

 private:
  struct Item {
    Span span;
    int first_row, first_head, end_head;
    Keys keys() const { return {span.table, span.start + span.count, first_head, end_head}; }
  };
  struct Step;
  void plan(const Batch& batch, const Model& model);
  template <class Finish>
  void product(const Matrix& matrix, const Rows& a, int rows, int member, const Finish& finish);
  void reserve_rounded(size_t rows, int size, int copies);
  Rows ready(const Matrix& matrix, const bf16* values, int rows);
  Rows rounded_rows(const Matrix& matrix, const bf16* values, int rows, int copy);

  Team team_;
  std::vector<Attention> attention_;
  std::vector<Item> items_;
  std::vector<int32_t> positions_, sequence_of_;
  std::vector<float> residual_, projected_;
  std::vector<Rounded> rounded_;
  std::vector<float> row_scales_;
  std::vector<Likeliest> likeliest_;
  std::vector<bf16> normed_, queries_, attended_, activated_;
};

}  // namespace kvasir
