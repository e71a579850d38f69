// The C interface that ../library.py calls: the step, and each kernel alone for its tests.
#include "rows.h"
#include "step.h"

using namespace kvasir;

extern "C" {

Engine* kvasir_create(int threads) { return new Engine(threads); }
void kvasir_destroy(Engine* engine) { delete engine; }

void kvasir_forward(Engine* engine, const Model* model, const Batch* batch, const Cache* cache, bf16* hidden) {
  engine->forward(*model, *batch, *cache, hidden);
}

void kvasir_logits(Engine* engine, const Matrix* matrix, const bf16* a, int rows, int vocab, float* out) {
  engine->logits(*matrix, a, rows, vocab, out);
}

void kvasir_likeliest(Engine* engine, const Matrix* matrix, const bf16* a, int rows, int vocab, int32_t* out) {
  engine->likeliest(*matrix, a, rows, vocab, out);
}

// Codes a bfloat16 matrix into `room` bytes. Returns how many it took, or 0 if they are too few.
int64_t kvasir_code(const Matrix* plain, std::byte* out, int64_t room) {
  const ptrdiff_t size = coded_block_bytes(plain->inputs);
  const int64_t start = size * plain->blocks();
  std::vector<CodedException> exceptions;
  const auto total = [&] { return start + static_cast<int64_t>(exceptions.size() * sizeof(CodedException)); };
  for (int block = 0; block < plain->blocks(); block++) {
    if (total() > room) return 0;
    code_block(reinterpret_cast<const bf16*>(plain->block(block)), plain->inputs, out + block * size, exceptions);
  }
  if (total() > room) return 0;
  std::memcpy(out + start, exceptions.data(), exceptions.size() * sizeof(CodedException));
  return total();
}

void kvasir_rms_norm(const float* x, const float* weight, int rows, int size, float epsilon, bf16* out) {
  const int padded = round_up(size, kBlock);
  for (int row = 0; row < rows; row++)
    rms_norm(x + ptrdiff_t{row} * padded, weight, size, padded, epsilon, out + ptrdiff_t{row} * padded);
}

void kvasir_rotate(const float* heads, const float* weight, float epsilon, const float* cos, const float* sin, int rows,
                   int size, bf16* out) {
  for (int row = 0; row < rows; row++)
    rotate(heads + ptrdiff_t{row} * size, weight, epsilon, cos + ptrdiff_t{row} * (size / 2),
           sin + ptrdiff_t{row} * (size / 2), size, out + ptrdiff_t{row} * size);
}

void kvasir_attend(const Cache* cache, int layer, const int32_t* table, int start, int count, int first_head,
                   int end_head, int group, const bf16* queries, bf16* out) {
  Prefetcher prefetcher(*cache, layer);
  prefetcher.expect({table, start + count, first_head, end_head}, {});
  Attention().attend(*cache, layer, {table, start, count}, first_head, end_head, group,
                     cache->token_size() * group, queries, out, prefetcher);
}

// Of the structures that Python mirrors, in the order of _STRUCTURES in ../library.py.
void kvasir_sizes(int32_t* sizes) {
  const int32_t found[] = {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Batch), sizeof(Cache)};
  std::memcpy(sizes, found, sizeof(found));
}

}  // extern "C"
