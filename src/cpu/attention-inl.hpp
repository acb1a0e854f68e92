// Forward and backward of one document and key/value head: quantize its tokens once, then go through the queries in
// blocks of 32.
#if defined(MXFLASH_CPU_ATTENTION_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_ATTENTION_INL
#undef MXFLASH_CPU_ATTENTION_INL
#else
#define MXFLASH_CPU_ATTENTION_INL
#endif

#include "cpu/gradients-inl.hpp"
#include "cpu/kernels.hpp"
#include "cpu/scores-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

inline constexpr std::int64_t kBlockRows = 32;
inline constexpr std::int64_t kStripRows = kStripBlocks * kBlockRows;

HWY_INLINE std::size_t padded_dims(std::int64_t dims) {
  return (static_cast<std::size_t>(dims) + kBlockSize - 1) / kBlockSize * kBlockSize;
}

/// Largest |x| of the 128 tokens, all dims, that share nvfp4's second level with the block.
HWY_INLINE float strip_maximum(const Plan& plan, const TokenOperand& operand, const TokenPlace& place,
                               std::int64_t length, Workspace& work) {
  TokenBlock block;
  block.x = work.block.data();
  float largest = 0;
  const std::int64_t first = place.row - place.row % kStripRows;
  for (std::int64_t row = first; row < HWY_MIN(first + kStripRows, length); row += kBlockRows) {
    const TokenPlace at{place.first + row - place.row, row, place.head,
                        static_cast<std::size_t>(HWY_MIN(kBlockRows, length - row))};
    load_block(operand, plan.rotation_shift, at, work.rows.data(), block);
    float maxima[kBlockSize];
    lane_maxima(block.x, 0, block.dims, block.lanes, maxima);
    spread_maximum(maxima, kBlockSize);
    largest = HWY_MAX(largest, maxima[0]);
  }
  return largest;
}

/// A block of tokens before it is quantized, and what else decides its codes.
struct Fresh {
  TokenBlock block;
  RandomPlace random;
  float strip_maximum = 0;
};

/// Reads one block of a document's `length` tokens.
HWY_INLINE void read_block(const Plan& plan, const TokenOperand& operand, const TokenPlace& place, std::int64_t length,
                           Workspace& work, Fresh& fresh) {
  fresh.block.x = work.block.data();
  if (operand.operand.second_level == SecondLevel::adaptive && operand.operand.block.rows != 1) {
    fresh.strip_maximum = strip_maximum(plan, operand, place, length, work);
  }
  load_block(operand, plan.rotation_shift, place, work.rows.data(), fresh.block);
  fresh.random = {plan.seed, static_cast<std::uint32_t>(operand.stream), static_cast<std::uint32_t>(place.head),
                  static_cast<std::int32_t>(place.row)};
}

/// One block of tokens, quantized, exponents apart.
HWY_INLINE void make_block(const Plan& plan, const TokenOperand& operand, const TokenPlace& place, std::int64_t length,
                           Workspace& work, TokenBlock& block) {
  Fresh fresh;
  read_block(plan, operand, place, length, work, fresh);
  quantize_block(operand, fresh.random, fresh.strip_maximum, fresh.block);
  block = fresh.block;
}

/// In place: takes the gradient of a rotated row back to the row.
HWY_INLINE void unrotate(const Plan& plan, float* x, std::size_t dims) {
  if (plan.rotation_shift < 0) return;
  hadamard(x, dims, kBlockSize, 1.0F);
  scale_all(x, dims, hn::GetLane(pow2(hn::Set(kI, -plan.rotation_shift))));
}

HWY_INLINE void store_row(const Output& out, std::int64_t offset, const float* row, std::size_t dims) {
#if HWY_TARGET != HWY_SCALAR
  if (out.dtype == DType::bf16 && dims % kLanes == 0) {
    const hn::Rebind<std::uint16_t, I32> half;
    auto* to = reinterpret_cast<std::uint16_t*>(out.data) + offset;
    for (std::size_t d = 0; d < dims; d += kLanes) {
      const VU bits = hn::ShiftRight<16>(hn::BitCast(kU, round_bf16(hn::LoadU(kF, row + d))));
      hn::StoreU(hn::DemoteTo(half, hn::BitCast(kI, bits)), half, to + d);
    }
    return;
  }
#endif
  convert_row(out.dtype, row, static_cast<std::int64_t>(dims), out.data, offset);
}

/// x [dims][32] to the rows of tokens [first, first + count) of a head; rows marked `nan` become NaN.
HWY_INLINE void store_block(const Output& out, const float* x, std::size_t dims, std::int64_t heads,
                            const TokenPlace& place, const std::int32_t* nan, float* rows) {
  transpose(reinterpret_cast<const std::uint32_t*>(x), kBlockSize, dims, kBlockSize,
            reinterpret_cast<std::uint32_t*>(rows), dims);
  for (std::size_t lane = 0; lane < place.count; ++lane) {
    float* row = rows + lane * dims;
    if (nan[lane] != 0) {
      for (std::size_t d = 0; d < dims; ++d) row[d] = __builtin_nanf("");
    }
    const std::int64_t token = place.first + static_cast<std::int64_t>(lane);
    store_row(out, (token * heads + place.head) * static_cast<std::int64_t>(dims), row, dims);
  }
}

/// `Scores` multiplies S, `Out` O, `Multiply` everything else.
template <class Multiply, class Scores, class Out>
class Unit {
 public:
  using Element = typename Multiply::Element;

  Unit(const Plan& plan, const Item& item, Workspace& work, Counts& counts)
      : plan_(plan),
        item_(item),
        document_(*item.document),
        work_(work),
        counts_(counts),
        d_(padded_dims(plan.head_dim)),
        dv_(padded_dims(plan.value_dim)) {
    find_tiles();
    work_.block.require(kLargestDims * kBlockSize);
    work_.rows.require(kLargestDims * kBlockSize);
    work_.product.require(kLargestDims * kBlockSize);
    elements(work_.staging, kLargestDims * kBlockSize);
    work_.folds.require(4 * HWY_MAX(tiles_, 1) * kBlockSize);
    work_.poisoned.require(4 * (HWY_MAX(tiles_, 1) * kBlockSize + 1));
    work_.scores.require(HWY_MAX(tiles_, 1) * kTileSize);
    work_.k_largest.require(HWY_MAX(tiles_, 1));
    work_.codes.require(kTileSize);
    work_.left.require(HWY_MAX(tiles_, static_cast<std::size_t>(kStripBlocks)));
    work_.right.require(HWY_MAX(tiles_, static_cast<std::size_t>(kStripBlocks)));
    make_rules();
  }

  void forward(const Forward& out) {
    Multiply::begin();
    const std::size_t tiles = HWY_MAX(tiles_, 1);
    work_.k_rows.require(tiles * Scores::bytes(d_));
    work_.v_columns.require(tiles * Out::value_bytes(dv_));
    if (plan_.has_o_cut) work_.v_cut.require(tiles * Out::value_bytes(dv_));
    work_.weights.require(tiles * Out::weight_bytes());
    work_.q_columns.require(Scores::bytes(d_));
    for (std::size_t tile = 0; tile < tiles_; ++tile) load_keys_forward(tile);
    count_poisoned();
    const std::int64_t group = plan_.heads / plan_.kv_heads;
    for (std::int64_t head = item_.kv_head * group; head < (item_.kv_head + 1) * group; ++head) {
      for (std::int64_t query = item_.query_begin; query < item_.query_end; query += kBlockRows) {
        forward_block(out, head, query);
      }
    }
    Multiply::end();
  }

  void backward(const Backward& out) {
    Multiply::begin();
    prepare_backward();
    for (std::size_t tile = 0; tile < tiles_; ++tile) load_keys_backward(tile);
    count_poisoned();
    const std::int64_t group = plan_.heads / plan_.kv_heads;
    for (std::int64_t head = item_.kv_head * group; head < (item_.kv_head + 1) * group; ++head) {
      dout_base_ = base_of_dout(head);
      for (std::int64_t query = item_.query_begin; query < item_.query_end; query += kStripRows) {
        backward_strip(out, head, query);
      }
    }
    Multiply::end();
    if (item_.sums == nullptr) {
      store_key_gradients(out, gathered());
    } else {
      merge_key_gradients(out);
    }
  }

 private:
  // ---- Places -------------------------------------------------------------------------------------------------------

  static Element* elements(Buffer<std::byte>& buffer, std::size_t count) {
    return reinterpret_cast<Element*>(buffer.require(HWY_MAX(count, 1) * sizeof(Element)));
  }
  static Element* at(const Buffer<std::byte>& buffer, std::size_t offset) {
    return reinterpret_cast<Element*>(buffer.data()) + offset;
  }
  [[nodiscard]] std::size_t keys() const { return HWY_MAX(tiles_, 1) * kBlockSize; }
  [[nodiscard]] std::int32_t* v_folds(std::size_t tile) const { return work_.folds.data() + tile * kBlockSize; }
  [[nodiscard]] std::int32_t* v_cut_folds(std::size_t tile) const { return v_folds(tile) + keys(); }
  [[nodiscard]] std::int32_t* k_folds(std::size_t tile) const { return v_folds(tile) + 2 * keys(); }
  [[nodiscard]] std::int32_t* k_cut_folds(std::size_t tile) const { return v_folds(tile) + 3 * keys(); }
  [[nodiscard]] std::int32_t* k_poisoned() const { return work_.poisoned.data(); }
  [[nodiscard]] std::int32_t* v_poisoned() const { return k_poisoned() + keys(); }
  /// Running counts: poisoned keys before a key, relative to the unit's first.
  [[nodiscard]] std::int32_t* k_bad() const { return k_poisoned() + 2 * keys(); }
  [[nodiscard]] std::int32_t* v_bad() const { return k_bad() + keys() + 1; }
  [[nodiscard]] std::int64_t first_key(std::size_t tile) const {
    return tile_begin_ + static_cast<std::int64_t>(tile * kBlockSize);
  }
  [[nodiscard]] TokenPlace key_place(std::size_t tile) const {
    const std::int64_t key = first_key(tile);
    return {document_.k_begin + key, key, item_.kv_head,
            static_cast<std::size_t>(HWY_MIN(kBlockRows, document_.k_length - key))};
  }
  [[nodiscard]] TokenPlace query_place(std::int64_t head, std::int64_t query) const {
    return {document_.q_begin + query, query, head,
            static_cast<std::size_t>(HWY_MIN(kBlockRows, document_.q_length - query))};
  }

  /// Half-open range of keys that a query sees.
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  [[nodiscard]] Range visible(std::int64_t query) const {
    const KeyRange range = visible_keys(document_, plan_.mask, query);
    return {range.begin, range.end};
  }

  /// The blocks of keys that any query of the item sees.
  void find_tiles() {
    std::int64_t end = 0;
    bool any = false;
    for (std::int64_t query = item_.query_begin; query < item_.query_end; ++query) {
      const Range range = visible(query);
      if (range.begin == range.end) continue;
      tile_begin_ = any ? HWY_MIN(tile_begin_, range.begin) : range.begin;
      end = any ? HWY_MAX(end, range.end) : range.end;
      any = true;
    }
    tile_begin_ -= tile_begin_ % kBlockRows;
    tiles_ = any ? static_cast<std::size_t>((end - tile_begin_ + kBlockRows - 1) / kBlockRows) : 0;
  }

  void make_rules() {
    const Recipe& recipe = *plan_.recipe;
    rule_ = rule_of(recipe.o.weights);
    cut_rule_ = plan_.has_o_cut ? rule_of(recipe.o.cut->weights) : rule_;
  }

  [[nodiscard]] WeightRule rule_of(const Operand& weights) const {
    const bool is_static = weights.block.rows == 0;
    WeightRule rule;
    rule.to = round_to(weights.encoding);
    rule.exponential = plan_.recipe->exponential;
    rule.unit = plan_.unit;
    rule.factor = plan_.unit;
    rule.counts_plain = plan_.recipe->row_sum == RowSum::unquantized;
    if (!rule.to.saturates) return rule;  // f32 and bf16
    rule.smallest_normal = __builtin_bit_cast(float, rule.to.least_field);
    rule.in_groups = !is_static;
    if (is_static) {
      const auto beta = static_cast<float>(plan_.recipe->beta);
      rule.log2_scale = static_cast<float>((__builtin_bit_cast(std::int32_t, beta) >> 23) - 127);
      rule.factor = plan_.unit / beta;
    } else {
      rule.group = group_rule(weights);
    }
    return rule;
  }

  // ---- Keys ---------------------------------------------------------------------------------------------------------

  void note_poisoned(const TokenBlock& block, std::int32_t* flags) {
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) flags[lane] = block.poisoned[lane];
    any_poisoned_ = any_poisoned_ || block.any_poisoned;
  }

  void count_poisoned() {
    if (!any_poisoned_) return;
    k_bad()[0] = v_bad()[0] = 0;
    for (std::size_t i = 0; i < tiles_ * kBlockSize; ++i) {
      k_bad()[i + 1] = k_bad()[i] + k_poisoned()[i];
      v_bad()[i + 1] = v_bad()[i] + v_poisoned()[i];
    }
  }

  /// Exponents of a folding operand by key; lanes past the document's end repeat the first, so that they stand out in
  /// no maximum or minimum.
  static void note_folds(const TokenBlock& block, std::size_t count, std::int32_t* folds) {
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) folds[lane] = block.exponent[lane < count ? lane : 0];
  }

  void load(const TokenOperand& operand, const TokenPlace& place, std::int64_t length, TokenBlock& block) {
    make_block(plan_, operand, place, length, work_, block);
  }

  /// `block` as A of products over its tokens, exponents apart where it folds.
  void put_lanes(const TokenOperand& operand, const TokenPlace& place, std::size_t padded, TokenBlock& block,
                 std::int32_t* folds, Element* out) {
    if (operand.folds) {
      note_folds(block, place.count, folds);
      Multiply::lanes(block.x, block.dims, padded, out);
      return;
    }
    float* x = block.x;
    apply_exponents(block);
    Multiply::lanes(x, block.dims, padded, out);
    for (std::int32_t& exponent : block.exponent) exponent = 0;
  }

  void put_rows(TokenBlock& block, std::size_t padded, Element* out) {
    apply_exponents(block);
    Multiply::rows(block.x, block.dims, padded, out, at(work_.staging, 0));
  }

  [[nodiscard]] std::byte* key_block(std::size_t tile) const { return work_.k_rows.data() + tile * Scores::bytes(d_); }

  /// Reads and quantizes a block for S; it then waits to be put at `out`.
  void load_scored(const TokenOperand& operand, const TokenPlace& place, std::int64_t length, Fresh& fresh,
                   std::byte* out) {
    read_block(plan_, operand, place, length, work_, fresh);
    Scores::quantize(operand, fresh.random, fresh.strip_maximum, d_, fresh.block, out);
  }

  void load_keys(std::size_t tile, const TokenPlace& place, Fresh& fresh) {
    load_scored(plan_.k_s, place, document_.k_length, fresh, key_block(tile));
    note_poisoned(fresh.block, k_poisoned() + tile * kBlockSize);
    work_.k_largest.data()[tile] = fresh.block.largest;
  }

  void load_values(const TokenOperand& operand, std::size_t tile, std::int32_t* folds, std::byte* out) {
    const TokenPlace place = key_place(tile);
    Fresh fresh;
    read_block(plan_, operand, place, document_.k_length, work_, fresh);
    note_poisoned(fresh.block, v_poisoned() + tile * kBlockSize);
    Out::put_values(operand, fresh.random, fresh.strip_maximum, dv_, fresh.block, out + tile * Out::value_bytes(dv_));
    if (operand.folds) note_folds(fresh.block, place.count, folds);
  }

  void load_keys_forward(std::size_t tile) {
    Fresh fresh;
    load_keys(tile, key_place(tile), fresh);
    Scores::put_keys(fresh.block, d_, work_.staging.data(), key_block(tile));
    load_values(plan_.v_o, tile, v_folds(tile), work_.v_columns.data());
    if (plan_.has_o_cut) load_values(plan_.v_o_cut, tile, v_cut_folds(tile), work_.v_cut.data());
  }

  void load_keys_backward(std::size_t tile) {
    const TokenPlace place = key_place(tile);
    const std::int64_t length = document_.k_length;
    Fresh fresh;
    load_keys(tile, place, fresh);
    if (plan_.k_shared && plan_.k_dq.folds) {
      put_lanes(plan_.k_dq, place, d_, fresh.block, k_folds(tile), at(work_.k_columns, tile * kBlockSize * d_));
    }
    Scores::put_keys(fresh.block, d_, work_.staging.data(), key_block(tile));
    TokenBlock block;
    if (!plan_.k_shared || !plan_.k_dq.folds) {
      load(plan_.k_dq, place, length, block);
      put_lanes(plan_.k_dq, place, d_, block, k_folds(tile), at(work_.k_columns, tile * kBlockSize * d_));
    }
    if (plan_.has_dq_cut) {
      load(plan_.k_dq_cut, place, length, block);
      put_lanes(plan_.k_dq_cut, place, d_, block, k_cut_folds(tile), at(work_.k_cut, tile * kBlockSize * d_));
    }
    load(plan_.v_dp, place, length, block);
    note_poisoned(block, v_poisoned() + tile * kBlockSize);
    if (plan_.v_shared && plan_.v_o.folds) note_folds(block, place.count, v_folds(tile));
    put_rows(block, dv_, at(work_.v_rows, tile * kBlockSize * dv_));
    if (!plan_.v_shared && plan_.v_o.folds) {
      load(plan_.v_o, place, length, block);
      note_folds(block, place.count, v_folds(tile));
    }
    if (plan_.has_o_cut && plan_.v_o_cut.folds) {
      load(plan_.v_o_cut, place, length, block);
      note_folds(block, place.count, v_cut_folds(tile));
    }
  }

  // ---- One block of queries
  // -------------------------------------------------------------------------------------------

  /// Its visible ranges, and the tiles [first_tile_, end_tile_) that it sees. Lanes past the last query repeat it.
  void start_block(std::int64_t query) {
    start_rows(rows_);
    const std::int64_t last = HWY_MIN(query + kBlockRows, document_.q_length) - 1;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool any = false;
    for (std::int64_t lane = 0; lane < kBlockRows; ++lane) {
      const Range range = visible(HWY_MIN(query + lane, last));
      rows_.begin[lane] = static_cast<std::int32_t>(range.begin);
      rows_.end[lane] = static_cast<std::int32_t>(range.end);
      if (range.begin == range.end) continue;
      begin = any ? HWY_MIN(begin, range.begin) : range.begin;
      end = any ? HWY_MAX(end, range.end) : range.end;
      any = true;
    }
    first_tile_ = any ? static_cast<std::size_t>((begin - tile_begin_) / kBlockRows) : 0;
    end_tile_ = any ? static_cast<std::size_t>((end - tile_begin_ + kBlockRows - 1) / kBlockRows) : 0;
    first_sees_to_ = visible(query).end;
    last_sees_from_ = visible(last).begin;
  }

  [[nodiscard]] Tile tile_at(std::size_t index) const {
    Tile tile;
    const std::int64_t key = first_key(index);
    tile.key = static_cast<std::int32_t>(key);
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      tile.masked = tile.masked || rows_.begin[lane] > key || rows_.end[lane] < key + kBlockRows;
    }
    tile.cut = first_sees_to_ < HWY_MIN(key + kBlockRows, document_.k_length) || last_sees_from_ > key;
    const bool takes_cut = plan_.has_o_cut && tile.cut;
    if (takes_cut && plan_.v_o_cut.folds) tile.folds = v_cut_folds(index);
    if (!takes_cut && plan_.v_o.folds) tile.folds = v_folds(index);
    return tile;
  }

  [[nodiscard]] const WeightRule& rule_at(const Tile& tile) const {
    return plan_.has_o_cut && tile.cut ? cut_rule_ : rule_;
  }

  [[nodiscard]] float* scores(std::size_t tile) const { return work_.scores.data() + tile * kTileSize; }

  /// c [32][32] = rows of keys times columns of queries.
  void multiply_tile(const Element* key_rows, const Element* query_columns, std::size_t dims, float* c) {
    const void* a = key_rows;
    const void* b = query_columns;
    Product product;
    product.m = product.n = kBlockSize;
    product.k = dims;
    product.a = &a;
    product.b = &b;
    product.c = c;
    Multiply::run(product);
  }

  void multiply_scores(const std::byte* keys_of_tile, const std::byte* queries, float* c) {
    Scores::run(keys_of_tile, queries, static_cast<std::size_t>(plan_.head_dim), d_, c);
  }

  /// Logits of the block against all its tiles, and the row references.
  void score_block() {
    for (std::size_t index = first_tile_; index < end_tile_; ++index) {
      multiply_scores(key_block(index), work_.q_columns.data(), scores(index));
      if (may_overflow(index)) restore_tile(index);
      score_tile(tile_at(index), plan_.logit_factor, scores(index), rows_);
    }
    if (overflows(rows_)) hold_scores(scores(first_tile_), (end_tile_ - first_tile_) * kTileSize, rows_);
    reference_rows(rows_);
  }

  /// Whether FP32 may not hold a dot product of the tile, or its logit. Quantization can double a value.
  [[nodiscard]] bool may_overflow(std::size_t index) const {
    const float factor = HWY_MAX(1.0F, __builtin_fabsf(plan_.logit_factor));
    const double bound = 4.0 * static_cast<double>(q_largest_) * static_cast<double>(work_.k_largest.data()[index]) *
                         static_cast<double>(d_) * static_cast<double>(factor);
    // The codes of q alone as well: int8 products meet q's scale before k's.
    const double of_q = 16.0 * static_cast<double>(q_largest_) * static_cast<double>(d_);
    return bound > 0x1p126 || of_q > 0x1p126;
  }

  /// The tile once more with q and k 2^-64 times as large, for the pairs that overflowed.
  void restore_tile(std::size_t index) {
    std::byte* q = work_.q_small.require(Scores::bytes(d_));
    std::byte* k = work_.k_small.require(Scores::bytes(d_));
    Scores::scaled(work_.q_columns.data(), d_, 0x1p-64F, q);
    Scores::scaled(key_block(index), d_, 0x1p-64F, k);
    alignas(64) float small[kTileSize];
    multiply_scores(k, q, small);
    const float factor = HWY_MAX(1.0F, __builtin_fabsf(plan_.logit_factor));
    restore_scores(small, kLargestLogit / factor, scores(index));
  }

  /// Keeps what keys count in l, in the place of the logits.
  struct BackwardSink {
    float* tile;
    HWY_INLINE void begin(const TileScales& /*scales*/) const {}
    HWY_INLINE void put(std::size_t pair, std::size_t lane, const WeighedPair& w) const {
      hn::Store(w.even_counted, kF, tile + 2 * pair * kBlockSize + lane);
      hn::Store(w.odd_counted, kF, tile + (2 * pair + 1) * kBlockSize + lane);
    }
  };

  /// Whether a row sees a poisoned key, by a running count.
  [[nodiscard]] bool sees_poisoned(const std::int32_t* bad, std::size_t lane) const {
    if (!any_poisoned_ || rows_.begin[lane] >= rows_.end[lane]) return false;
    return bad[rows_.end[lane] - tile_begin_] != bad[rows_.begin[lane] - tile_begin_];
  }

  // ---- Forward
  // --------------------------------------------------------------------------------------------------------

  void forward_block(const Forward& out, std::int64_t head, std::int64_t query) {
    const TokenPlace place = query_place(head, query);
    Fresh fresh;
    load_scored(plan_.q_s, place, document_.q_length, fresh, work_.q_columns.data());
    q_largest_ = fresh.block.largest;
    Scores::put_queries(fresh.block, d_, work_.q_columns.data());
    start_block(query);
    score_block();
    // A few tiles at a time, so that P is multiplied while it is in the first cache.
    for (std::size_t begin = first_tile_; begin < end_tile_ || begin == first_tile_; begin += Out::kTiles) {
      const std::size_t end = HWY_MIN(begin + Out::kTiles, end_tile_);
      for (std::size_t index = begin; index < end; ++index) weigh_values(index);
      Out::run(work_.left.data() + begin, work_.right.data() + begin, end - begin, dv_,
               begin == first_tile_ ? 0.0F : 1.0F, work_.product.data());
    }
    finish_forward(out, place, fresh.block);
  }

  /// P of a tile, ready to multiply V.
  void weigh_values(std::size_t index) {
    const Tile tile = tile_at(index);
    std::byte* weights = weights_of(index);
    weigh_tile(rule_at(tile), tile, scores(index), typename Out::Sink{weights}, rows_);
    const bool cut = plan_.has_o_cut && tile.cut;
    work_.left.data()[index] = (cut ? work_.v_cut : work_.v_columns).data() + index * Out::value_bytes(dv_);
    work_.right.data()[index] = weights;
  }

  [[nodiscard]] std::byte* weights_of(std::size_t index) const {
    return work_.weights.data() + index * Out::weight_bytes();
  }

  [[nodiscard]] double normalizer(std::size_t lane) const {
    return rule_.counts_plain ? rows_.plain_sum[lane] : rows_.sum[lane];
  }

  void finish_forward(const Forward& out, const TokenPlace& place, const TokenBlock& q) {
    float inverse[kBlockSize];
    std::int32_t shift[kBlockSize];
    std::int32_t nan[kBlockSize] = {};
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      const bool sees = rows_.begin[lane] < rows_.end[lane];
      inverse[lane] = sees ? static_cast<float>(static_cast<double>(plan_.o_factor) / normalizer(lane)) : 0.0F;
      shift[lane] = sees ? rows_.shift[lane] : 0;
      if (lane >= place.count) continue;
      const bool bad = sees && (q.poisoned[lane] != 0 || sees_poisoned(k_bad(), lane));
      nan[lane] = bad || sees_poisoned(v_bad(), lane) ? 1 : 0;
      const std::int64_t row = (place.first + static_cast<std::int64_t>(lane)) * plan_.heads + place.head;
      out.lse[row] = bad ? __builtin_nanf("")
                         : log_sum(sees, normalizer(lane) / static_cast<double>(plan_.unit), rows_.reference_s[lane]);
    }
    // In two steps: the whole power of two may lie outside FP32 where O does not.
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const VI whole = hn::LoadU(kI, shift + lane);
      const VI first = hn::ShiftRight<1>(whole);
      const VF factor = hn::Mul(hn::LoadU(kF, inverse + lane), pow2(first));
      const VF rest = pow2(hn::Sub(whole, first));
      for (std::size_t d = 0; d < static_cast<std::size_t>(plan_.value_dim); ++d) {
        float* at_d = work_.product.data() + d * kBlockSize + lane;
        hn::Store(hn::Mul(hn::Mul(hn::Load(kF, at_d), factor), rest), kF, at_d);
      }
    }
    store_block(out.o, work_.product.data(), static_cast<std::size_t>(plan_.value_dim), plan_.heads, place, nan,
                work_.rows.data());
    if (plan_.statistics) count_forward(place);
  }

  void count_forward(const TokenPlace& place) {
    for (std::size_t lane = 0; lane < place.count; ++lane) {
      const bool sees = rows_.begin[lane] < rows_.end[lane];
      const double share = sees ? rows_.sum[lane] / normalizer(lane) : 1.0;
      counts_.row_sum += share;
      counts_.least_row_sum = HWY_MIN(counts_.least_row_sum, share);
    }
    for (std::size_t index = first_tile_; index < end_tile_; ++index) {
      const Tile tile = tile_at(index);
      // The weights as they were multiplied, and without quantization.
      for (std::size_t key = 0; key < kBlockSize; ++key) {
        for (std::size_t lane = 0; lane < place.count; ++lane) {
          const float t = scores(index)[key * kBlockSize + lane];
          if (!(t > -__builtin_inff())) continue;
          const double s = static_cast<double>(t) - (tile.folds == nullptr ? 0 : tile.folds[key]);
          count_probability(counts_.weights, s - static_cast<double>(rows_.reference_s[lane]),
                            normalizer(lane) / static_cast<double>(plan_.unit),
                            Out::is_zero(weights_of(index), key, lane));
        }
      }
    }
  }

  // ---- Backward
  // -------------------------------------------------------------------------------------------------------

  void prepare_backward() {
    constexpr auto blocks = static_cast<std::size_t>(kStripBlocks);
    work_.k_rows.require(HWY_MAX(tiles_, 1) * Scores::bytes(d_));
    elements(work_.v_rows, tiles_ * kBlockSize * dv_);
    elements(work_.k_columns, tiles_ * kBlockSize * d_);
    if (plan_.has_dq_cut) elements(work_.k_cut, tiles_ * kBlockSize * d_);
    work_.q_columns.require(Scores::bytes(d_));
    elements(work_.do_columns, dv_ * kBlockSize);
    elements(work_.q_pairs, blocks * d_ * kBlockSize);
    elements(work_.do_pairs, blocks * dv_ * kBlockSize);
    elements(work_.weights, tiles_ * kTileSize);
    elements(work_.p_rows, blocks * tiles_ * kTileSize);
    elements(work_.ds_rows, blocks * tiles_ * kTileSize);
    work_.gradients.require((plan_.strip_ds ? blocks : 1) * HWY_MAX(tiles_, 1) * kTileSize);
    float* dk = work_.dk.require(keys() * d_);
    float* dv = work_.dv.require(keys() * dv_);
    for (std::size_t i = 0; i < keys() * d_; ++i) dk[i] = 0.0F;
    for (std::size_t i = 0; i < keys() * dv_; ++i) dv[i] = 0.0F;
    std::int32_t* nan = work_.key_nan.require(2 * keys());
    for (std::size_t i = 0; i < 2 * keys(); ++i) nan[i] = 0;
  }

  /// The largest exponent of dO in the document that is not poisoned: what dV's folds are relative to.
  std::int32_t base_of_dout(std::int64_t head) {
    if (!plan_.dout_dv.folds) return 0;
    bool any = false;
    std::int32_t base = 0;
    TokenBlock block;
    for (std::int64_t query = 0; query < document_.q_length; query += kBlockRows) {
      const TokenPlace place = query_place(head, query);
      load(plan_.dout_dv, place, document_.q_length, block);
      for (std::size_t lane = 0; lane < place.count; ++lane) {
        if (block.poisoned[lane] != 0) continue;
        base = any ? HWY_MAX(base, block.exponent[lane]) : block.exponent[lane];
        any = true;
      }
    }
    return base;
  }

  void backward_strip(const Backward& out, std::int64_t head, std::int64_t query) {
    const std::int64_t end = HWY_MIN(query + kStripRows, document_.q_length);
    const auto blocks = static_cast<std::size_t>((end - query + kBlockRows - 1) / kBlockRows);
    for (std::size_t block = 0; block < blocks; ++block) {
      backward_block(out, head, query + static_cast<std::int64_t>(block) * kBlockRows, block);
    }
    if (plan_.strip_ds) quantize_strip(head, query, blocks);
    add_key_gradients(blocks);
  }

  /// What a strip remembers of its blocks.
  struct BlockState {
    std::size_t first_tile = 0;
    std::size_t end_tile = 0;
    std::int32_t q_exponent[kBlockSize] = {};
  };

  void backward_block(const Backward& out, std::int64_t head, std::int64_t query, std::size_t block) {
    const TokenPlace place = query_place(head, query);
    start_block(query);
    load_queries(place, block);
    states_[block].first_tile = first_tile_;
    states_[block].end_tile = end_tile_;
    score_block();
    for (std::size_t index = first_tile_; index < end_tile_; ++index) {
      const Tile tile = tile_at(index);
      weigh_tile(rule_at(tile), tile, scores(index), BackwardSink{scores(index)}, rows_);
    }
    measured_ = -1;
    note_nan(place);
    take_sums(place);
    differentiate(block);
    const RandomPlace random{plan_.seed, static_cast<std::uint32_t>(reference::Stream::ds),
                             static_cast<std::uint32_t>(head), static_cast<std::int32_t>(query)};
    for (std::size_t index = first_tile_; index < end_tile_; ++index) quantize_gradients(index, block, random);
    store_query_gradient(out, place);
  }

  /// q and dO of one block in the orders of the four products that read them.
  void load_queries(const TokenPlace& place, std::size_t block) {
    const std::int64_t length = document_.q_length;
    BlockState& state = states_[block];
    Element* pairs = at(work_.q_pairs, block * d_ * kBlockSize);
    Fresh fresh;
    load_scored(plan_.q_s, place, length, fresh, work_.q_columns.data());
    q_largest_ = fresh.block.largest;
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) q_poisoned_[lane] = fresh.block.poisoned[lane];
    const bool shared = plan_.q_shared && plan_.q_dk.folds;
    if (shared) put_pairs(plan_.q_dk, d_, fresh.block, state.q_exponent, pairs);
    Scores::put_queries(fresh.block, d_, work_.q_columns.data());
    TokenBlock tokens;
    if (!shared) {
      load(plan_.q_dk, place, length, tokens);
      put_pairs(plan_.q_dk, d_, tokens, state.q_exponent, pairs);
    }
    pairs = at(work_.do_pairs, block * dv_ * kBlockSize);
    load(plan_.dout_dp, place, length, tokens);
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) dout_poisoned_[lane] = tokens.poisoned[lane];
    const bool dout_shared = plan_.dout_shared && plan_.dout_dv.folds;
    if (dout_shared) put_dout(tokens, pairs);
    apply_exponents(tokens);
    Multiply::columns(tokens.x, tokens.dims, dv_, at(work_.do_columns, 0));
    if (!dout_shared) {
      load(plan_.dout_dv, place, length, tokens);
      put_dout(tokens, pairs);
    }
  }

  void put_pairs(const TokenOperand& operand, std::size_t padded, TokenBlock& tokens, std::int32_t* exponents,
                 Element* out) {
    if (!operand.folds) {
      apply_exponents(tokens);
      for (std::int32_t& exponent : tokens.exponent) exponent = 0;
    }
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) exponents[lane] = tokens.exponent[lane];
    Multiply::pairs(tokens.x, tokens.dims, padded, out, at(work_.staging, 0));
  }

  /// What of the base multiplies dO: with more, codes of other tokens would overflow. The rest multiplies P.
  [[nodiscard]] std::int32_t held_base() const { return HWY_MIN(dout_base_, 100); }

  /// dO times 2^base: its exponents are folded into P relative to the base.
  void put_dout(TokenBlock& tokens, Element* out) {
    if (plan_.dout_dv.folds) {
      TokenBlock scaled = tokens;
      scaled.x = work_.product.data();
      const VF factor = pow2(hn::Set(kI, held_base()));
      for (std::size_t i = 0; i < tokens.dims * kBlockSize; i += kLanes) {
        hn::Store(hn::Mul(hn::Load(kF, tokens.x + i), factor), kF, scaled.x + i);
      }
      put_pairs(plan_.dout_dv, dv_, scaled, dout_exponent_, out);
      return;
    }
    put_pairs(plan_.dout_dv, dv_, tokens, dout_exponent_, out);
  }

  /// Rows whose P or dS is NaN, and the keys that they reach. Such rows take no part in anything else.
  void note_nan(const TokenPlace& place) {
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      const bool sees = lane < place.count && rows_.begin[lane] < rows_.end[lane];
      const bool p = sees && (q_poisoned_[lane] != 0 || sees_poisoned(k_bad(), lane));
      const bool ds = sees && (p || dout_poisoned_[lane] != 0 || sees_poisoned(v_bad(), lane));
      p_nan_[lane] = p ? 1 : 0;
      ds_nan_[lane] = ds ? 1 : 0;
      if (!ds) continue;
      const bool dv = p || dout_poisoned_[lane] != 0;
      for (std::int64_t key = rows_.begin[lane]; key < rows_.end[lane]; ++key) {
        work_.key_nan.data()[key - tile_begin_] = 1;
        if (dv) work_.key_nan.data()[static_cast<std::int64_t>(keys()) + key - tile_begin_] = 1;
      }
    }
  }

  /// What divides counts into normalized weights.
  void take_sums(const TokenPlace& place) {
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      const bool sees = lane < place.count && rows_.begin[lane] < rows_.end[lane] && p_nan_[lane] == 0;
      // Infinite where the lane has no row of its own: its weights become zero.
      sum_[lane] = sees ? static_cast<float>(normalizer(lane)) : __builtin_inff();
      ds_scale_[lane] = ds_nan_[lane] != 0 ? 0.0F : plan_.softmax_factor;
    }
  }

  [[nodiscard]] float* gradients(std::size_t block, std::size_t tile) const {
    return work_.gradients.data() + ((plan_.strip_ds ? block * tiles_ : 0) + tile) * kTileSize;
  }

  /// Finite: Inf or NaN of an overflow would pass a masked weight of zero.
  static HWY_INLINE VF hold(VF x) {
    const VF most = hn::Set(kF, 1e38F);
    const VF held = hn::IfThenElse(hn::Gt(x, hn::Zero(kF)), most, hn::Neg(most));
    return hn::IfThenElse(hn::Le(hn::Abs(x), most), x, held);
  }

  /// dP, D, then dS in place of dP, and normalized weights in place of the counts.
  void differentiate(std::size_t block) {
    double delta[kBlockSize] = {};
    for (std::size_t index = first_tile_; index < end_tile_; ++index) {
      float* dp = gradients(block, index);
      multiply_tile(at(work_.v_rows, index * kBlockSize * dv_), at(work_.do_columns, 0), dv_, dp);
      float sums[kBlockSize];
      for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
        const VF row_sum = hn::LoadU(kF, sum_ + lane);
        VF sum = hn::Zero(kF);
        for (std::size_t key = 0; key < kBlockSize; ++key) {
          float* p = scores(index) + key * kBlockSize + lane;
          // A division: the only key of a row has the weight 1.
          const VF w = hn::Div(hn::Load(kF, p), row_sum);
          hn::Store(w, kF, p);
          float* at_dp = dp + key * kBlockSize + lane;
          const VF held = hold(hn::Load(kF, at_dp));
          hn::Store(held, kF, at_dp);
          sum = hn::MulAdd(w, held, sum);
        }
        hn::StoreU(sum, kF, sums + lane);
      }
      for (std::size_t lane = 0; lane < kBlockSize; ++lane) delta[lane] += static_cast<double>(sums[lane]);
    }
    float delta_f32[kBlockSize];
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) delta_f32[lane] = static_cast<float>(delta[lane]);
    for (std::size_t index = first_tile_; index < end_tile_; ++index) {
      float* ds = gradients(block, index);
      for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
        const VF d = hn::LoadU(kF, delta_f32 + lane);
        const VF scale = hn::Mul(hn::LoadU(kF, ds_scale_ + lane), hn::Set(kF, plan_.dp_factor));
        for (std::size_t key = 0; key < kBlockSize; ++key) {
          float* at_key = ds + key * kBlockSize + lane;
          const VF w = hn::Load(kF, scores(index) + key * kBlockSize + lane);
          const VF difference = hn::Sub(hn::Load(kF, at_key), d);
          hn::Store(hn::Mul(hn::Mul(w, difference), scale), kF, at_key);
        }
      }
    }
  }

  [[nodiscard]] Element* p_rows(std::size_t block, std::size_t tile) const {
    return at(work_.p_rows, (block * tiles_ + tile) * kTileSize);
  }
  [[nodiscard]] Element* ds_rows(std::size_t block, std::size_t tile) const {
    return at(work_.ds_rows, (block * tiles_ + tile) * kTileSize);
  }

  /// P for dV; dS for dQ and, unless it waits for the strip, for dK.
  void quantize_gradients(std::size_t index, std::size_t block, const RandomPlace& random) {
    const Recipe& recipe = *plan_.recipe;
    const Tile tile = tile_at(index);
    float* w = scores(index);
    if (plan_.dout_dv.folds) {
      float factor[kBlockSize];
      powers_of_two(dout_exponent_, 1, dout_base_, factor);
      scale_lanes(w, kBlockSize, factor);
    }
    quantize_tile(recipe.dv.weights, random, tile.key, w);
    if (dout_base_ != held_base()) {
      scale_all(w, kBlockSize, hn::GetLane(pow2(hn::Set(kI, dout_base_ - held_base()))));
    }
    Multiply::lanes(w, kBlockSize, kBlockSize, p_rows(block, index));

    const float* ds = gradients(block, index);
    float* quantized = work_.product.data();
    const FoldSide q{states_[block].q_exponent, q_poisoned_};
    if (plan_.ds_shared) {
      const bool folds = plan_.k_dq.folds;
      const FoldSide k{folds ? k_folds(index) : nullptr, k_poisoned() + index * kBlockSize};
      const SharedGradient codes(recipe.dq.weights, random, tile, rows_, ds, work_.codes.data());
      codes.for_dq(k, static_cast<std::int32_t>(key_place(index).count), quantized);
      put_dq(tile, index, ds, quantized);
      codes.for_dk(q, quantized);
      put_dk(tile, index, block, ds, quantized);
      return;
    }
    quantize_for_dq(tile, index, block, random, quantized);
    if (plan_.strip_ds) return;
    copy_tile(ds, quantized);
    fold_queries(states_[block], quantized);
    RandomPlace second = random;
    ++second.stream;
    quantize_tile(recipe.dk.weights, second, tile.key, quantized);
    put_dk(tile, index, block, ds, quantized);
  }

  static void copy_tile(const float* from, float* to) {
    for (std::size_t i = 0; i < kTileSize; i += kLanes) hn::Store(hn::Load(kF, from + i), kF, to + i);
  }

  void fold_queries(const BlockState& state, float* tile) {
    if (!plan_.q_dk.folds) return;
    float factor[kBlockSize];
    powers_of_two(state.q_exponent, 1, 0, factor);
    scale_lanes(tile, kBlockSize, factor);
  }

  void fold_keys(const Tile& tile, std::size_t index, float* values) {
    const bool cut = plan_.has_dq_cut && tile.cut;
    if (!(cut ? plan_.k_dq_cut : plan_.k_dq).folds) return;
    float factor[kBlockSize];
    powers_of_two(cut ? k_cut_folds(index) : k_folds(index), 1, 0, factor);
    scale_keys(values, factor);
  }

  void quantize_for_dq(const Tile& tile, std::size_t index, std::size_t block, const RandomPlace& random,
                       float* values) {
    const Recipe& recipe = *plan_.recipe;
    const bool cut = plan_.has_dq_cut && tile.cut;
    const Operand& operand = cut ? recipe.dq.cut->weights : recipe.dq.weights;
    const float* ds = gradients(block, index);
    const bool adaptive = operand.second_level == SecondLevel::adaptive;
    if (adaptive && measured_ != first_key(index) / kStripRows) measure_rows(index, block);
    copy_tile(ds, values);
    fold_keys(tile, index, values);
    float factor[kBlockSize];
    if (adaptive) {
      powers_of_two(row_level_, -1, 0, factor);
      scale_lanes(values, kBlockSize, factor);
    }
    quantize_tile(operand, random, tile.key, values);
    if (adaptive) {
      powers_of_two(row_level_, 1, 0, factor);
      scale_lanes(values, kBlockSize, factor);
    }
    put_dq(tile, index, ds, values);
  }

  /// nvfp4's second level of dS by query, over the 128 keys around tile `index`.
  void measure_rows(std::size_t index, std::size_t block) {
    measured_ = first_key(index) / kStripRows;
    float maxima[kBlockSize] = {};
    float* values = work_.product.data();
    for (std::size_t i = first_tile_; i < end_tile_; ++i) {
      if (first_key(i) / kStripRows != measured_) continue;
      copy_tile(gradients(block, i), values);
      fold_keys(tile_at(i), i, values);
      float more[kBlockSize];
      lane_maxima(values, 0, kBlockSize, kBlockSize, more);
      for (std::size_t lane = 0; lane < kBlockSize; ++lane) maxima[lane] = HWY_MAX(maxima[lane], more[lane]);
    }
    second_levels(kBlockSize, maxima, row_level_);
  }

  /// dS of dK where nvfp4's second level spans the strip: one a key over all its queries.
  void quantize_strip(std::int64_t head, std::int64_t query, std::size_t blocks) {
    float* values = work_.product.data();
    for (std::size_t index = 0; index < tiles_; ++index) {
      float maxima[kBlockSize] = {};
      for (std::size_t block = 0; block < blocks; ++block) {
        if (!sees(block, index)) continue;
        copy_tile(gradients(block, index), values);
        fold_queries(states_[block], values);
        for (std::size_t key = 0; key < kBlockSize; ++key) {
          float more[kBlockSize];
          lane_maxima(values, key, key + 1, kBlockSize, more);
          spread_maximum(more, kBlockSize);
          maxima[key] = HWY_MAX(maxima[key], more[0]);
        }
      }
      std::int32_t level[kBlockSize];
      second_levels(kBlockSize, maxima, level);
      float down[kBlockSize];
      float up[kBlockSize];
      powers_of_two(level, -1, 0, down);
      powers_of_two(level, 1, 0, up);
      for (std::size_t block = 0; block < blocks; ++block) {
        if (!sees(block, index)) continue;
        const RandomPlace random{plan_.seed, static_cast<std::uint32_t>(reference::Stream::ds) + 1,
                                 static_cast<std::uint32_t>(head),
                                 static_cast<std::int32_t>(query + static_cast<std::int64_t>(block) * kBlockRows)};
        copy_tile(gradients(block, index), values);
        fold_queries(states_[block], values);
        scale_keys(values, down);
        quantize_tile(plan_.recipe->dk.weights, random, static_cast<std::int32_t>(first_key(index)), values);
        scale_keys(values, up);
        put_dk_values(index, block, gradients(block, index), values);
      }
    }
  }

  [[nodiscard]] bool sees(std::size_t block, std::size_t tile) const {
    return states_[block].first_tile <= tile && tile < states_[block].end_tile;
  }

  void put_dq(const Tile& tile, std::size_t index, const float* ds, const float* values) {
    Element* out = at(work_.weights, index * kTileSize);
    Multiply::columns(values, kBlockSize, kBlockSize, out);
    const bool cut = plan_.has_dq_cut && tile.cut;
    work_.left.data()[index] = at(cut ? work_.k_cut : work_.k_columns, index * kBlockSize * d_);
    work_.right.data()[index] = out;
    if (plan_.statistics) count_gradients(counts_.weights, ds, values, static_cast<int>(kTileSize));
  }

  void put_dk(const Tile& /*tile*/, std::size_t index, std::size_t block, const float* ds, const float* values) {
    put_dk_values(index, block, ds, values);
  }
  void put_dk_values(std::size_t index, std::size_t block, const float* ds, const float* values) {
    Multiply::lanes(values, kBlockSize, kBlockSize, ds_rows(block, index));
    if (plan_.statistics) count_gradients(counts_.weights, ds, values, static_cast<int>(kTileSize));
  }

  void store_query_gradient(const Backward& out, const TokenPlace& place) {
    Product product;
    product.m = d_;
    product.n = kBlockSize;
    product.k = kBlockSize;
    product.segments = end_tile_ - first_tile_;
    product.a = work_.left.data() + first_tile_;
    product.b = work_.right.data() + first_tile_;
    product.c = work_.product.data();
    Multiply::run(product);
    const auto dims = static_cast<std::size_t>(plan_.head_dim);
    unrotate(plan_, product.c, dims);
    if (plan_.dq_factor != 1.0F) scale_all(product.c, dims, plan_.dq_factor);
    store_block(out.dq, product.c, dims, plan_.heads, place, ds_nan_, work_.rows.data());
  }

  /// dK and dV of the tiles that the strip sees.
  void add_key_gradients(std::size_t blocks) {
    for (std::size_t index = 0; index < tiles_; ++index) {
      Product dk;
      dk.m = kBlockSize;
      dk.k = kBlockSize;
      dk.initial = 1;
      dk.segments = 0;
      dk.a = work_.left.data();
      dk.b = work_.right.data();
      Product dv = dk;
      for (std::size_t block = 0; block < blocks; ++block) {
        if (!sees(block, index)) continue;
        work_.left.data()[dk.segments] = ds_rows(block, index);
        work_.right.data()[dk.segments] = at(work_.q_pairs, block * d_ * kBlockSize);
        ++dk.segments;
      }
      if (dk.segments == 0) continue;
      dk.n = d_;
      dk.c = work_.dk.data() + index * kBlockSize * d_;
      Multiply::run(dk);
      for (std::size_t block = 0; block < blocks; ++block) {
        if (!sees(block, index)) continue;
        work_.left.data()[dv.segments] = p_rows(block, index);
        work_.right.data()[dv.segments] = at(work_.do_pairs, block * dv_ * kBlockSize);
        ++dv.segments;
      }
      dv.n = dv_;
      dv.c = work_.dv.data() + index * kBlockSize * dv_;
      Multiply::run(dv);
    }
  }

  /// dK and dV as they were summed up, for keys [begin, begin + 32 blocks).
  struct Sums {
    const float* dk = nullptr;
    const float* dv = nullptr;
    const std::int32_t* dk_nan = nullptr;
    const std::int32_t* dv_nan = nullptr;
    std::int64_t begin = 0;
    std::size_t blocks = 0;
  };
  [[nodiscard]] Sums gathered() const {
    return {work_.dk.data(), work_.dv.data(), work_.key_nan.data(), work_.key_nan.data() + keys(), tile_begin_, tiles_};
  }

  /// Adds this item's sums to those of the items before it; the last one stores them.
  void merge_key_gradients(const Backward& out) {
    KeySums& sums = *item_.sums;
    sums.wait(item_.number);
    const auto blocks = static_cast<std::size_t>((document_.k_length + kBlockRows - 1) / kBlockRows);
    sums.reserve(blocks * kBlockSize, d_, dv_);
    const auto first = static_cast<std::size_t>(tile_begin_);
    const std::size_t count = tiles_ * kBlockSize;
    add_floats(work_.dk.data(), count * d_, sums.dk() + first * d_);
    add_floats(work_.dv.data(), count * dv_, sums.dv() + first * dv_);
    for (std::size_t i = 0; i < count; ++i) {
      sums.dk_nan()[first + i] |= work_.key_nan.data()[i];
      sums.dv_nan()[first + i] |= work_.key_nan.data()[keys() + i];
    }
    if (sums.is_last(item_.number)) {
      store_key_gradients(out, {sums.dk(), sums.dv(), sums.dk_nan(), sums.dv_nan(), 0, blocks});
      sums.release();
    }
    sums.pass();
  }

  static void add_floats(const float* from, std::size_t count, float* to) {
    for (std::size_t i = 0; i < count; i += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(kF, to + i), hn::LoadU(kF, from + i)), kF, to + i);
    }
  }

  /// Every key of the document, zeros where no query sees it.
  void store_key_gradients(const Backward& out, const Sums& sums) {
    for (std::int64_t key = 0; key < document_.k_length; key += kBlockRows) {
      const TokenPlace place{document_.k_begin + key, key, item_.kv_head,
                             static_cast<std::size_t>(HWY_MIN(kBlockRows, document_.k_length - key))};
      const auto end = sums.begin + static_cast<std::int64_t>(sums.blocks) * kBlockRows;
      const bool seen = key >= sums.begin && key < end;
      const auto row = static_cast<std::size_t>(seen ? key - sums.begin : 0);
      const std::int32_t none[kBlockSize] = {};
      turn_keys(seen ? sums.dk + row * d_ : nullptr, d_, static_cast<std::size_t>(plan_.head_dim));
      unrotate(plan_, work_.block.data(), static_cast<std::size_t>(plan_.head_dim));
      put_keys(out.dk, plan_.head_dim, plan_.dk_factor, place, seen ? sums.dk_nan + row : none);
      turn_keys(seen ? sums.dv + row * dv_ : nullptr, dv_, static_cast<std::size_t>(plan_.value_dim));
      put_keys(out.dv, plan_.value_dim, plan_.dv_factor, place, seen ? sums.dv_nan + row : none);
    }
  }

  /// A block of 32 rows of sums to work_.block, tokens in the lanes; zeros where there are none.
  void turn_keys(const float* rows, std::size_t padded, std::size_t dims) {
    float* x = work_.block.data();
    if (rows == nullptr) {
      for (std::size_t i = 0; i < dims * kBlockSize; ++i) x[i] = 0.0F;
      return;
    }
    transpose(reinterpret_cast<const std::uint32_t*>(rows), padded, kBlockSize, dims,
              reinterpret_cast<std::uint32_t*>(x), kBlockSize);
  }

  void put_keys(const Output& out, std::int64_t dims, float factor, const TokenPlace& place, const std::int32_t* nan) {
    float* x = work_.block.data();
    if (factor != 1.0F) scale_all(x, static_cast<std::size_t>(dims), factor);
    store_block(out, x, static_cast<std::size_t>(dims), plan_.kv_heads, place, nan, work_.rows.data());
  }

  const Plan& plan_;
  const Item& item_;
  const Document& document_;
  Workspace& work_;
  Counts& counts_;
  std::size_t d_;  ///< head_dim and value_dim, padded to blocks of 32.
  std::size_t dv_;
  std::int64_t tile_begin_ = 0;  ///< First key of the first tile.
  std::size_t tiles_ = 0;
  WeightRule rule_;
  WeightRule cut_rule_;
  bool any_poisoned_ = false;

  Rows rows_;
  float q_largest_ = 0;  ///< Of |q| in the block.
  std::size_t first_tile_ = 0;
  std::size_t end_tile_ = 0;
  std::int64_t first_sees_to_ = 0;
  std::int64_t last_sees_from_ = 0;

  BlockState states_[kStripBlocks];
  std::int32_t dout_base_ = 0;
  std::int32_t dout_exponent_[kBlockSize] = {};
  std::int32_t q_poisoned_[kBlockSize] = {};
  std::int32_t dout_poisoned_[kBlockSize] = {};
  std::int32_t p_nan_[kBlockSize] = {};
  std::int32_t ds_nan_[kBlockSize] = {};
  std::int32_t row_level_[kBlockSize] = {};
  std::int64_t measured_ = -1;  ///< Which 128 keys row_level_ is of.
  float sum_[kBlockSize] = {};
  float ds_scale_[kBlockSize] = {};
};

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
