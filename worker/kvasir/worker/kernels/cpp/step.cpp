#include "step.h"

#include <unistd.h>

#include <algorithm>

#include "rows.h"

namespace kvasir {
namespace {

// Up to here every member normalizes all rows for itself, which is cheaper than to wait for each other.
constexpr int kFewTokens = 2;
// Up to here the memory decides, which likes each member's part of a product in one piece.
constexpr int kFewRows = 16;
// With more rows members take parts in turn, so that one who is interrupted holds nobody up. Up to so many, which stay
// in the second-level cache, each takes a large part first, and seven eighths of the product are in those.
constexpr int kPartRows = 96;
// Where blocks are widened for each part anew, rows are up to so many, if they fill no more than this of that cache.
constexpr int kWidenedPartRows = 256;
constexpr double kOfCache = 0.75;
// Blocks of a part, enough to make it worth while, if there are more rows.
constexpr int kPartBlocks = 12;
// Of a member's part of a product, fetched before it begins: less than the first-level cache.
constexpr int kExpectedBytes = 32 * 1024, kLineBytes = 64;
// Up to here query rows wait for their keys to come from memory; more of them keep a core busy with each key.
constexpr int kFewQueryRows = 24;
// Query rows that are attended together: enough for whole tiles, few enough to keep their scores near.
constexpr int kQueryRows = 48;

long second_level_cache() {  // bytes; 0 where the system does not say
#if defined(_SC_LEVEL2_CACHE_SIZE)
  return std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 0L);
#else
  return 0;
#endif
}

int part_rows(const Matrix& matrix) {
  static const auto room = static_cast<int>(kOfCache * static_cast<double>(second_level_cache()) / sizeof(bf16));
  if (matrix.kind == Kind::kBf16 || matrix.by_bytes()) return kPartRows;
  return std::clamp(room / matrix.inputs, kPartRows, kWidenedPartRows);
}

int padded(int size) { return round_up(size, kBlock); }

template <class T>
void ensure(std::vector<T>& buffer, size_t count) {
  if (buffer.size() < count) buffer.resize(count);
}

// Consecutive runs of blocks: a large one for each member, and small ones to even out what those took.
class Parts {
 public:
  Parts(int blocks, int members)
      : blocks_(blocks),
        members_(members),
        large_(blocks * 7 / 8 / members / 2 * 2),
        small_(std::max(2, round_up(rest() / (4 * members), 2))) {}
  int count() const { return members_ + (rest() + small_ - 1) / small_; }
  Range operator[](int index) const {
    if (index < members_) return {index * large_, (index + 1) * large_};
    const int first = members_ * large_ + (index - members_) * small_;
    return {first, std::min(first + small_, blocks_)};
  }

 private:
  int rest() const { return blocks_ - members_ * large_; }
  const int blocks_, members_, large_, small_;
};

void round_rows(const Matrix& matrix, const Rows& rows, Range range) {
  for (int row = range.first; row < range.end; row++) {
    const ptrdiff_t at = row * rows.stride;
    rows.scales[row] = round_row(rows.values + at, matrix.inputs, matrix.planes(), rows.plane, rows.rounded + at);
  }
}

}  // namespace

// One member's share of a product of all rows.
template <class Finish>
void Engine::product(const Matrix& matrix, const Rows& a, int rows, int member, const Finish& finish) {
  const int size = team_.size(), blocks = matrix.blocks();
  if (rows <= kFewRows) {
    multiply_packed(matrix, a, {0, rows}, share(blocks, 2, member, size), finish);
  } else if (rows <= part_rows(matrix)) {
    const Parts parts(blocks, size);
    for (int part; (part = team_.claim()) < parts.count();) multiply_packed(matrix, a, {0, rows}, parts[part], finish);
  } else {
    const int most = part_rows(matrix);
    const int high = (rows + most - 1) / most, wide = (blocks + kPartBlocks - 1) / kPartBlocks;
    for (int part; (part = team_.claim()) < high * wide;)
      multiply_packed(matrix, a, share(rows, 1, part / wide, high), share(blocks, 2, part % wide, wide), finish);
  }
}

// The phases of a step; each is one member's part of it.
struct Engine::Step {
  Engine& engine;
  const Model& model;
  const Batch& batch;
  const Cache& cache;
  const int members = engine.team_.size();
  const int tokens = batch.tokens;
  const int hidden = padded(model.hidden);
  const int attended = padded(model.num_heads * model.head_dim);
  const int projected = padded((model.num_heads + 2 * model.num_kv_heads) * model.head_dim);
  const int activated = padded(model.intermediate);
  const bool few = tokens <= kFewTokens;

  Range rows(int member) const { return share(tokens, 1, member, members); }
  float* residual(int row) const { return engine.residual_.data() + ptrdiff_t{row} * hidden; }

  void embed(int member) const {
    const Range mine = rows(member);
    for (int row = mine.first; row < mine.end; row++)
      kvasir::embed(*model.embedding, batch.token_ids[row], hidden, residual(row));
  }

  // The norm of the residual stream, ready for every member.
  const bf16* norm(const float* weight, int member) const {
    bf16* out = engine.normed_.data() + (few ? ptrdiff_t{member} * tokens * hidden : 0);
    const Range mine = few ? Range{0, tokens} : rows(member);
    for (int row = mine.first; row < mine.end; row++)
      rms_norm(residual(row), weight, model.hidden, hidden, model.epsilon, out + ptrdiff_t{row} * hidden);
    if (!few) engine.team_.barrier();
    return out;
  }

  // Rows as a matrix takes them.
  Rows ready(const Matrix& matrix, const bf16* values, int member) const {
    if (!matrix.rounds()) return {values, nullptr, nullptr, matrix.inputs, 0};
    const Rows out = engine.rounded_rows(matrix, values, tokens, few ? member : 0);
    round_rows(matrix, out, few ? Range{0, tokens} : rows(member));
    if (!few) engine.team_.barrier();
    return out;
  }

  // Before others are waited for: fetches the beginning of this member's part of what is multiplied next. Otherwise the
  // memory, which decides how long few rows take, would do nothing meanwhile.
  void expect(const Matrix& matrix, int member) const {
    if (tokens > kFewRows) return;
    const std::byte* part = matrix.block(share(matrix.blocks(), 2, member, members).first);
    const Ahead ahead{part, kExpectedBytes / 2};
    for (int at = 0; at < kExpectedBytes / 2; at += kLineBytes) ahead.fetch(at);
  }

  void project(const Layer& layer, const bf16* normed, int member) const {
    engine.product(layer.qkv, ready(layer.qkv, normed, member), tokens, member,
                   [&](int row, int block, int count, const float* values) {
                      float* to = engine.projected_.data() + ptrdiff_t{row} * projected + block * kBlock;
                      std::memcpy(to, values, sizeof(float) * count * kBlock);
                    });
    expect(layer.output, member);
    engine.team_.barrier();
  }

  // Rotated queries to their buffer, rotated keys and values to the cache.
  void place(const Layer& layer, int index, int member) const {
    const int size = model.head_dim, half = size / 2;
    const Range mine = rows(member);
    for (int row = mine.first; row < mine.end; row++) {
      const int position = engine.positions_[row];
      const float* cos = model.cos + ptrdiff_t{position} * half;
      const float* sin = model.sin + ptrdiff_t{position} * half;
      const float* head = engine.projected_.data() + ptrdiff_t{row} * projected;
      bf16* query = engine.queries_.data() + ptrdiff_t{row} * attended;
      for (int i = 0; i < model.num_heads; i++, head += size, query += size)
        rotate(head, layer.qk_norm, model.epsilon, cos, sin, size, query);
      const float* key_norm = layer.qk_norm == nullptr ? nullptr : layer.qk_norm + size;
      const int32_t* table = batch.tables + ptrdiff_t{engine.sequence_of_[row]} * batch.table_size;
      bf16* key = cache.key(table, index, position);
      bf16* value = key + cache.value_offset();
      for (int i = 0; i < model.num_kv_heads; i++, head += size, key += size)
        rotate(head, key_norm, model.epsilon, cos, sin, size, key);
      narrow_row(head, model.num_kv_heads * size, value);
    }
    engine.team_.barrier();
  }

  void attend(int index, int member) const {
    const int group = model.num_heads / model.num_kv_heads;
    const int count = static_cast<int>(engine.items_.size());
    Prefetcher prefetcher(cache, index);
    // The next item is known before this one is worked on, so that its memory is on its way by then.
    for (int i = engine.team_.claim(), next; i < count; i = next) {
      next = engine.team_.claim();
      const Item& item = engine.items_[i];
      const bool waits = item.span.count * group <= kFewQueryRows;
      const Keys following = waits && next < count ? engine.items_[next].keys() : Keys{};
      prefetcher.expect(waits ? item.keys() : Keys{}, following);
      const ptrdiff_t first = ptrdiff_t{item.first_row} * attended;
      engine.attention_[member].attend(cache, index, item.span, item.first_head, item.end_head, group, attended,
                                       engine.queries_.data() + first, engine.attended_.data() + first, prefetcher);
    }
    engine.team_.barrier();
  }

  void add_to_residual(const Matrix& matrix, const std::vector<bf16>& from, const Matrix& next, int member) const {
    engine.product(matrix, ready(matrix, from.data(), member), tokens, member,
                   [&](int row, int block, int count, const float* values) {
                      float* to = residual(row) + block * kBlock;
                      for (int i = 0; i < count * kBlock; i += kLanes) store(to + i, load(to + i) + load(values + i));
                    });
    expect(next, member);
    engine.team_.barrier();
  }

  void activate(const Layer& layer, const bf16* normed, int member) const {
    engine.product(layer.gate_up, ready(layer.gate_up, normed, member), tokens, member,
                   [&](int row, int block, int count, const float* values) {
                      bf16* to = engine.activated_.data() + ptrdiff_t{row} * activated + block / 2 * kBlock;
                      for (int pair = 0; pair < count; pair += 2, values += 2 * kBlock, to += kBlock)
                        for (int i = 0; i < kBlock; i += kLanes)
                          narrow(to + i, silu(load(values + i)) * load(values + kBlock + i));
                    });
    expect(layer.down, member);
    engine.team_.barrier();
  }

  void run(int member, bf16* out) const {
    embed(member);
    engine.team_.barrier();
    for (int index = 0; index < model.num_layers; index++) {
      const Layer& layer = model.layers[index];
      const Matrix& next = index + 1 < model.num_layers ? model.layers[index + 1].qkv : *model.embedding;
      project(layer, norm(layer.attention_norm, member), member);
      place(layer, index, member);
      attend(index, member);
      add_to_residual(layer.output, engine.attended_, layer.gate_up, member);
      activate(layer, norm(layer.mlp_norm, member), member);
      add_to_residual(layer.down, engine.activated_, next, member);
    }
    const Range mine = rows(member);
    for (int row = mine.first; row < mine.end; row++)
      rms_norm(residual(row), model.final_norm, model.hidden, hidden, model.epsilon, out + ptrdiff_t{row} * hidden);
  }
};

void Engine::forward(const Model& model, const Batch& batch, const Cache& cache, bf16* hidden) {
  plan(batch, model);
  const Step step{*this, model, batch, cache};
  const size_t tokens = batch.tokens;
  ensure(residual_, tokens * step.hidden);
  ensure(normed_, tokens * step.hidden * (step.few ? step.members : 1));
  ensure(projected_, tokens * step.projected);
  ensure(queries_, tokens * step.attended);
  ensure(attended_, tokens * step.attended);
  ensure(activated_, tokens * step.activated);
  reserve_rounded(tokens, std::max({step.hidden, step.attended, step.activated}), step.few ? step.members : 1);
  team_.run([&](int member) { step.run(member, hidden); });
}

// Room for `copies` of so many rows, each in two planes.
void Engine::reserve_rounded(size_t rows, int size, int copies) {
  ensure(rounded_, 2 * rows * size * copies);
  ensure(row_scales_, rows * copies);
}

// Where rows are rounded to, in one of the copies.
Rows Engine::rounded_rows(const Matrix& matrix, const bf16* values, int rows, int copy) {
  const ptrdiff_t plane = ptrdiff_t{rows} * matrix.inputs;
  float* scales = row_scales_.data() + ptrdiff_t{rows} * copy;
  return {values, rounded_.data() + 2 * plane * copy, scales, matrix.inputs, plane};
}

// Rows of any matrix as it takes them, before the members set out.
Rows Engine::ready(const Matrix& matrix, const bf16* values, int rows) {
  if (!matrix.rounds()) return {values, nullptr, nullptr, matrix.inputs, 0};
  reserve_rounded(rows, matrix.inputs, 1);
  const Rows out = rounded_rows(matrix, values, rows, 0);
  round_rows(matrix, out, {0, rows});
  return out;
}

void Engine::logits(const Matrix& matrix, const bf16* a, int rows, int vocab, float* out) {
  const Rows from = ready(matrix, a, rows);
  team_.run([&](int member) {
    product(matrix, from, rows, member, [&](int row, int block, int count, const float* values) {
      const int first = block * kBlock, size = std::min(count * kBlock, vocab - first);
      std::memcpy(out + ptrdiff_t{row} * vocab + first, values, sizeof(float) * size);
    });
  });
}

void Engine::likeliest(const Matrix& matrix, const bf16* a, int rows, int vocab, int32_t* out) {
  const Rows from = ready(matrix, a, rows);
  likeliest_.assign(size_t(rows) * team_.size(), Likeliest());
  team_.run([&](int member) {
    Likeliest* mine = likeliest_.data() + ptrdiff_t{member} * rows;
    product(matrix, from, rows, member, [&](int row, int block, int count, const float* values) {
      for (int first = block * kBlock; count > 0; count--, first += kBlock, values += kBlock)
        mine[row].look(values, first, std::min(kBlock, vocab - first));
    });
  });
  for (int row = 0; row < rows; row++) {
    for (int member = 1; member < team_.size(); member++) likeliest_[row].join(likeliest_[member * rows + row]);
    out[row] = likeliest_[row].index();
  }
}

// Positions and sequences of all rows, and the items of attention: longest first, since members take them in turn.
void Engine::plan(const Batch& batch, const Model& model) {
  positions_.clear();
  sequence_of_.clear();
  items_.clear();
  const int group = model.num_heads / model.num_kv_heads;
  const int enough = 4 * team_.size();
  // Few items are made smaller, so that every member has work; what each row becomes is the same either way.
  int most = std::max(kQueryRows / group, 1);
  while (most > 4 && (batch.tokens / most + 1) * model.num_kv_heads < enough) most /= 2;
  for (int sequence = 0, row = 0; sequence < batch.sequences; sequence++) {
    const int32_t* table = batch.tables + ptrdiff_t{sequence} * batch.table_size;
    const int start = batch.starts[sequence], count = batch.counts[sequence];
    const bool whole = count == 1 && batch.sequences >= enough;
    const int heads = whole ? model.num_kv_heads : 1;
    for (int done = 0; done < count; done += most)
      for (int head = 0; head < model.num_kv_heads; head += heads)
        items_.push_back({{table, start + done, std::min(most, count - done)}, row + done, head, head + heads});
    for (int i = 0; i < count; i++, row++) {
      positions_.push_back(start + i);
      sequence_of_.push_back(sequence);
    }
  }
  std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
    const auto cost = [](const Item& i) { return int64_t{i.span.start + i.span.count} * i.span.count; };
    return cost(a) > cost(b);
  });
}

}  // namespace kvasir
