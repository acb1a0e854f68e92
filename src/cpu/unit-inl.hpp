// What forward and backward share of one document and key/value head: its keys in blocks of 32, which of them a block
// of 32 queries sees, and the logits of the two.
#if defined(MXFLASH_CPU_UNIT_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_UNIT_INL
#undef MXFLASH_CPU_UNIT_INL
#else
#define MXFLASH_CPU_UNIT_INL
#endif

#include "cpu/rows-inl.hpp"
#include "cpu/scores-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// Room for `count` elements of a multiply's type, and its element `offset`.
template <class Element>
HWY_INLINE Element* elements(Buffer<std::byte>& buffer, std::size_t count) {
  return reinterpret_cast<Element*>(buffer.require(HWY_MAX(count, 1) * sizeof(Element)));
}
template <class Element>
HWY_INLINE Element* at(const Buffer<std::byte>& buffer, std::size_t offset) {
  return reinterpret_cast<Element*>(buffer.data()) + offset;
}

/// The keys from the first to the last that any of some queries sees.
struct KeyHull {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool any = false;

  void add(const KeyRange& range) {
    if (range.begin == range.end) return;
    begin = any ? HWY_MIN(begin, range.begin) : range.begin;
    end = any ? HWY_MAX(end, range.end) : range.end;
    any = true;
  }
};

class Unit {
 protected:
  Unit(const Plan& plan, const Item& item, Workspace& work)
      : plan_(plan),
        item_(item),
        document_(*item.document),
        work_(work),
        d_(padded_dims(plan.head_dim)),
        dv_(padded_dims(plan.value_dim)) {
    find_tiles();
    const std::size_t tiles = HWY_MAX(tiles_, 1);
    work_.block.require(kLargestDims * kBlockSize);
    work_.rows.require(kLargestDims * kBlockSize);
    work_.product.require(kLargestDims * kBlockSize);
    work_.staging.require(kLargestDims * kBlockSize * sizeof(float));
    work_.folds.require(4 * keys());
    work_.poisoned.require(4 * (keys() + 1));
    work_.scores.require(tiles * kTileSize);
    work_.k_largest.require(tiles);
    work_.left.require(HWY_MAX(tiles, static_cast<std::size_t>(kStripBlocks)));
    work_.right.require(HWY_MAX(tiles, static_cast<std::size_t>(kStripBlocks)));
    rule_ = rule_of(plan.recipe->o.weights);
    cut_rule_ = plan.has_o_cut ? rule_of(plan.recipe->o.cut->weights) : rule_;
  }

  /// Query heads [first_head(), end_head()) read the unit's key/value head.
  [[nodiscard]] std::int64_t first_head() const { return item_.kv_head * (plan_.heads / plan_.kv_heads); }
  [[nodiscard]] std::int64_t end_head() const { return (item_.kv_head + 1) * (plan_.heads / plan_.kv_heads); }

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
  /// Of a tile in its document.
  [[nodiscard]] std::size_t tile_number(std::size_t tile) const {
    return static_cast<std::size_t>(tile_begin_ / kBlockRows) + tile;
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

  template <class Scores>
  [[nodiscard]] std::byte* key_block(std::size_t tile) const {
    return work_.k_rows.data() + tile * Scores::bytes(d_);
  }

  /// Reads and quantizes a block for S; it then waits to be put at `out`.
  template <class Scores>
  void load_scored(const TokenOperand& operand, const TokenPlace& place, std::int64_t length, Fresh& fresh,
                   std::byte* out) {
    read_block(plan_, operand, place, length, work_, fresh);
    Scores::quantize(operand, fresh.random, fresh.strip_maximum, d_, fresh.block, out);
  }

  template <class Scores>
  void load_keys(std::size_t tile, const TokenPlace& place, Fresh& fresh) {
    load_scored<Scores>(plan_.k_s, place, document_.k_length, fresh, key_block<Scores>(tile));
    note_poisoned(fresh.block, k_poisoned() + tile * kBlockSize);
    work_.k_largest.data()[tile] = fresh.block.largest;
  }

  /// Its visible ranges, and the tiles [first_tile_, end_tile_) that it sees. Lanes past the last query repeat it.
  void start_block(std::int64_t query) {
    start_rows(rows_);
    const std::int64_t last = HWY_MIN(query + kBlockRows, document_.q_length) - 1;
    KeyHull seen;
    for (std::int64_t lane = 0; lane < kBlockRows; ++lane) {
      const KeyRange range = visible_keys(document_, plan_.mask, HWY_MIN(query + lane, last));
      rows_.begin[lane] = static_cast<std::int32_t>(range.begin);
      rows_.end[lane] = static_cast<std::int32_t>(range.end);
      seen.add(range);
    }
    first_tile_ = seen.any ? static_cast<std::size_t>((seen.begin - tile_begin_) / kBlockRows) : 0;
    end_tile_ = seen.any ? static_cast<std::size_t>((seen.end - tile_begin_ + kBlockRows - 1) / kBlockRows) : 0;
    first_query_ = query;
  }

  [[nodiscard]] Tile tile_at(std::size_t index) const {
    Tile tile;
    const std::int64_t key = first_key(index);
    tile.key = static_cast<std::int32_t>(key);
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      tile.masked = tile.masked || rows_.begin[lane] > key || rows_.end[lane] < key + kBlockRows;
    }
    tile.cut = cuts_tile(document_, plan_.mask, first_query_, key);
    const bool takes_cut = plan_.has_o_cut && tile.cut;
    if (takes_cut && plan_.v_o_cut.folds) tile.folds = v_cut_folds(index);
    if (!takes_cut && plan_.v_o.folds) tile.folds = v_folds(index);
    return tile;
  }

  [[nodiscard]] const WeightRule& rule_at(const Tile& tile) const {
    return plan_.has_o_cut && tile.cut ? cut_rule_ : rule_;
  }

  [[nodiscard]] float* scores(std::size_t tile) const { return work_.scores.data() + tile * kTileSize; }

  /// Logits of the block against all its tiles but those that `early` takes, and the row references.
  template <class Scores, class Early>
  void score_block(const Early& early) {
    for (std::size_t index = first_tile_; index < end_tile_; ++index) {
      const Tile tile = tile_at(index);
      if (!early(index, tile)) score_one<Scores>(index, tile);
    }
    if (overflows(rows_)) hold_scores(scores(first_tile_), (end_tile_ - first_tile_) * kTileSize, rows_);
    reference_rows(rows_);
  }

  template <class Scores>
  void score_one(std::size_t index, const Tile& tile) {
    multiply_scores<Scores>(key_block<Scores>(index), work_.q_columns.data(), scores(index));
    if (may_overflow(index)) restore_tile<Scores>(index);
    score_tile(tile, plan_.logit_factor, scores(index), rows_);
  }

  [[nodiscard]] double normalizer(std::size_t lane) const {
    return rule_.counts_plain ? rows_.plain_sum[lane] : rows_.sum[lane];
  }

  [[nodiscard]] bool sees_any(std::size_t lane) const { return rows_.begin[lane] < rows_.end[lane]; }

  /// Whether a row sees a poisoned key, by a running count.
  [[nodiscard]] bool sees_poisoned(const std::int32_t* bad, std::size_t lane) const {
    if (!any_poisoned_ || !sees_any(lane)) return false;
    return bad[rows_.end[lane] - tile_begin_] != bad[rows_.begin[lane] - tile_begin_];
  }

  const Plan& plan_;
  const Item& item_;
  const Document& document_;
  Workspace& work_;
  std::size_t d_;  ///< head_dim and value_dim, padded to blocks of 32.
  std::size_t dv_;
  std::int64_t tile_begin_ = 0;  ///< First key of the first tile.
  std::size_t tiles_ = 0;
  WeightRule rule_;
  Rows rows_;
  float q_largest_ = 0;  ///< Of |q| in the block.
  std::size_t first_tile_ = 0;
  std::size_t end_tile_ = 0;

 private:
  /// The blocks of keys that any query of the item sees.
  void find_tiles() {
    KeyHull seen;
    for (std::int64_t query = item_.query_begin; query < item_.query_end; ++query) {
      seen.add(visible_keys(document_, plan_.mask, query));
    }
    tile_begin_ = seen.begin - seen.begin % kBlockRows;
    tiles_ = seen.any ? static_cast<std::size_t>((seen.end - tile_begin_ + kBlockRows - 1) / kBlockRows) : 0;
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
    rule.is_e2m1 = weights.encoding == Encoding::e2m1;
    if (is_static) {
      const auto beta = static_cast<float>(plan_.recipe->beta);
      rule.log2_scale = static_cast<float>((__builtin_bit_cast(std::int32_t, beta) >> 23) - 127);
      rule.factor = plan_.unit / beta;
    } else {
      rule.limit = scale_limit(weights);
      rule.early = rule.is_e2m1 && rule.exponential == Exponential::exact && !rule.counts_plain && !plan_.statistics;
    }
    return rule;
  }

  template <class Scores>
  void multiply_scores(const std::byte* keys_of_tile, const std::byte* queries, float* c) {
    Scores::run(keys_of_tile, queries, static_cast<std::size_t>(plan_.head_dim), d_, c);
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
  template <class Scores>
  void restore_tile(std::size_t index) {
    std::byte* q = work_.q_small.require(Scores::bytes(d_));
    std::byte* k = work_.k_small.require(Scores::bytes(d_));
    Scores::scaled(work_.q_columns.data(), d_, 0x1p-64F, q);
    Scores::scaled(key_block<Scores>(index), d_, 0x1p-64F, k);
    alignas(64) float small[kTileSize];
    multiply_scores<Scores>(k, q, small);
    const float factor = HWY_MAX(1.0F, __builtin_fabsf(plan_.logit_factor));
    restore_scores(small, kHeld / factor, scores(index));
  }

  WeightRule cut_rule_;
  bool any_poisoned_ = false;
  std::int64_t first_query_ = 0;
};

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
