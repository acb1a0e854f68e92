// The backward of one document and key/value head, or of a part of its queries: P and its sums again, dP, dS, and the
// three gradients.
#if defined(MXFLASH_CPU_BACKWARD_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_BACKWARD_INL
#undef MXFLASH_CPU_BACKWARD_INL
#else
#define MXFLASH_CPU_BACKWARD_INL
#endif

#include "cpu/gradients-inl.hpp"
#include "cpu/key_gradients-inl.hpp"
#include "cpu/prescale-inl.hpp"
#include "cpu/unit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// `Scores` multiplies S, `Multiply` everything else.
template <class Multiply, class Scores>
class BackwardUnit : private Unit {
 public:
  BackwardUnit(const Plan& plan, const Item& item, Workspace& work, Counts& counts)
      : Unit(plan, item, work), counts_(counts), prescale_(plan, item, work) {}

  void run(const Backward& out) {
    Multiply::begin();
    prepare();
    if (prescale_.is_on()) prescale_.read_keys();
    for (std::size_t tile = 0; tile < tiles_; ++tile) read_keys(tile);
    count_poisoned();
    for (std::int64_t head = first_head(); head < end_head(); ++head) {
      dout_base_ = base_of_dout(head);
      if (prescale_.is_on()) prescale_.read_queries(head);
      for (std::int64_t query = item_.query_begin; query < item_.query_end; query += kStripRows) {
        backward_strip(out, head, query);
      }
    }
    Multiply::end();
    KeyGradientStore(plan_, item_, work_)
        .finish(out, {work_.dk.data(), work_.dv.data(), work_.key_nan.data(), work_.key_nan.data() + keys(),
                      tile_begin_, tiles_});
  }

 private:
  using Element = typename Multiply::Element;

  void prepare() {
    constexpr auto blocks = static_cast<std::size_t>(kStripBlocks);
    work_.k_rows.require(HWY_MAX(tiles_, 1) * Scores::bytes(d_));
    elements<Element>(work_.v_rows, tiles_ * kBlockSize * dv_);
    elements<Element>(work_.k_columns, tiles_ * kBlockSize * d_);
    if (plan_.has_dq_cut) elements<Element>(work_.k_cut, tiles_ * kBlockSize * d_);
    work_.q_columns.require(Scores::bytes(d_));
    elements<Element>(work_.do_columns, dv_ * kBlockSize);
    elements<Element>(work_.q_pairs, blocks * d_ * kBlockSize);
    elements<Element>(work_.do_pairs, blocks * dv_ * kBlockSize);
    elements<Element>(work_.weights, tiles_ * kTileSize);
    elements<Element>(work_.p_rows, blocks * tiles_ * kTileSize);
    elements<Element>(work_.ds_rows, blocks * tiles_ * kTileSize);
    work_.gradients.require((plan_.strip_ds ? blocks : 1) * HWY_MAX(tiles_, 1) * kTileSize);
    work_.codes.require(kTileSize);
    float* dk = work_.dk.require(keys() * d_);
    float* dv = work_.dv.require(keys() * dv_);
    for (std::size_t i = 0; i < keys() * d_; ++i) dk[i] = 0.0F;
    for (std::size_t i = 0; i < keys() * dv_; ++i) dv[i] = 0.0F;
    std::int32_t* nan = work_.key_nan.require(2 * keys());
    for (std::size_t i = 0; i < 2 * keys(); ++i) nan[i] = 0;
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
    Multiply::rows(block.x, block.dims, padded, out, at<Element>(work_.staging, 0));
  }

  void read_keys(std::size_t tile) {
    const TokenPlace place = key_place(tile);
    const std::int64_t length = document_.k_length;
    Fresh fresh;
    load_keys<Scores>(tile, place, fresh);
    if (plan_.k_shared && plan_.k_dq.folds) {
      put_lanes(plan_.k_dq, place, d_, fresh.block, k_folds(tile),
                at<Element>(work_.k_columns, tile * kBlockSize * d_));
    }
    Scores::put_keys(fresh.block, d_, work_.staging.data(), key_block<Scores>(tile));
    TokenBlock block;
    if (!plan_.k_shared || !plan_.k_dq.folds) {
      load(plan_.k_dq, place, length, block);
      put_lanes(plan_.k_dq, place, d_, block, k_folds(tile), at<Element>(work_.k_columns, tile * kBlockSize * d_));
    }
    if (plan_.has_dq_cut) {
      load(plan_.k_dq_cut, place, length, block);
      put_lanes(plan_.k_dq_cut, place, d_, block, k_cut_folds(tile), at<Element>(work_.k_cut, tile * kBlockSize * d_));
    }
    load(plan_.v_dp, place, length, block);
    note_poisoned(block, v_poisoned() + tile * kBlockSize);
    if (plan_.v_shared && plan_.v_o.folds) note_folds(block, place.count, v_folds(tile));
    put_rows(block, dv_, at<Element>(work_.v_rows, tile * kBlockSize * dv_));
    if (!plan_.v_shared && plan_.v_o.folds) {
      load(plan_.v_o, place, length, block);
      note_folds(block, place.count, v_folds(tile));
    }
    if (plan_.has_o_cut && plan_.v_o_cut.folds) {
      load(plan_.v_o_cut, place, length, block);
      note_folds(block, place.count, v_cut_folds(tile));
    }
  }

  /// Keeps what keys count in l, in the place of the logits.
  struct CountsSink {
    float* tile;
    HWY_INLINE void begin(const TileScales& /*scales*/) const {}
    HWY_INLINE void put(std::size_t pair, std::size_t lane, const WeighedPair& w) const {
      hn::Store(w.even_counted, kF, tile + 2 * pair * kBlockSize + lane);
      hn::Store(w.odd_counted, kF, tile + (2 * pair + 1) * kBlockSize + lane);
    }
  };

  /// The largest exponent of dO in the document that is not poisoned: what dV's folds are relative to.
  std::int32_t base_of_dout(std::int64_t head) {
    if (!plan_.dout_dv.folds) return 0;
    // Exponents rise with maxima, so the largest value tells: nothing has to be quantized.
    bool any = false;
    float largest = 0;
    Fresh fresh;
    for (std::int64_t query = 0; query < document_.q_length; query += kBlockRows) {
      const TokenPlace place = query_place(head, query);
      read_block(plan_, plan_.dout_dv, place, document_.q_length, work_, fresh);
      largest = HWY_MAX(largest, fresh.block.largest);
      for (std::size_t lane = 0; lane < place.count; ++lane) any = any || fresh.block.poisoned[lane] == 0;
    }
    if (!any) return 0;
    return hn::GetLane(ScaleMaker(plan_.dout_dv.operand)(hn::Set(kF, largest)).exponent);
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
    score_block<Scores>([](std::size_t /*index*/, const Tile& /*tile*/) { return false; });
    for (std::size_t index = first_tile_; index < end_tile_; ++index) {
      const Tile tile = tile_at(index);
      weigh_tile(rule_at(tile), tile, scores(index), CountsSink{scores(index)}, rows_);
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
    auto* pairs = at<Element>(work_.q_pairs, block * d_ * kBlockSize);
    Fresh fresh;
    load_scored<Scores>(plan_.q_s, place, length, fresh, work_.q_columns.data());
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
    pairs = at<Element>(work_.do_pairs, block * dv_ * kBlockSize);
    load(plan_.dout_dp, place, length, tokens);
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) dout_poisoned_[lane] = tokens.poisoned[lane];
    load_lse_gradients(place);
    if (prescale_.is_on()) prescale_.find(tokens, rows_.end, dlse_);
    const bool dout_shared = plan_.dout_shared && plan_.dout_dv.folds;
    if (dout_shared) put_dout(tokens, pairs);
    apply_exponents(tokens);
    Multiply::columns(tokens.x, tokens.dims, dv_, at<Element>(work_.do_columns, 0));
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
    Multiply::pairs(tokens.x, tokens.dims, padded, out, at<Element>(work_.staging, 0));
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

  /// dLSE of the block, and which of it are NaN or Inf.
  void load_lse_gradients(const TokenPlace& place) {
    if (plan_.dlse == nullptr) return;
    load_tokens(*plan_.dlse, place.first, static_cast<std::int64_t>(place.count), place.head, dlse_);
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      const bool finite = lane < place.count && __builtin_fabsf(dlse_[lane]) <= 3.40282347e38F;
      dlse_poisoned_[lane] = lane < place.count && !finite ? 1 : 0;
      dlse_[lane] = finite ? HWY_MAX(HWY_MIN(dlse_[lane], kHeld), -kHeld) : 0.0F;
    }
  }

  /// Rows whose P or dS is NaN, and the keys that they reach. Such rows take no part in anything else.
  void note_nan(const TokenPlace& place) {
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      const bool sees = lane < place.count && sees_any(lane);
      const bool p = sees && (q_poisoned_[lane] != 0 || sees_poisoned(k_bad(), lane));
      const bool ds =
          sees && (p || dout_poisoned_[lane] != 0 || dlse_poisoned_[lane] != 0 || sees_poisoned(v_bad(), lane));
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
      const bool sees = lane < place.count && sees_any(lane) && p_nan_[lane] == 0;
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
    const VF most = hn::Set(kF, kHeld);
    const VF held = hn::IfThenElse(hn::Gt(x, hn::Zero(kF)), most, hn::Neg(most));
    return hn::IfThenElse(hn::Le(hn::Abs(x), most), x, held);
  }

  /// dP, D, then dS in place of dP, and normalized weights in place of the counts.
  void differentiate(std::size_t block) {
    double delta[kBlockSize] = {};
    for (std::size_t index = first_tile_; index < end_tile_; ++index) {
      float* dp = gradients(block, index);
      ValueScores<Multiply>::run(work_.v_rows.data() + index * ValueScores<Multiply>::bytes(dv_),
                                 work_.do_columns.data(), static_cast<std::size_t>(plan_.value_dim), dv_, dp);
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
      if (plan_.dlse != nullptr) add_lse_gradients(scores(index), ds);
    }
  }

  /// dS += scale w dLSE: after the scaling, since dP and D may be in units of a scale that dLSE does not have.
  void add_lse_gradients(const float* weights, float* ds) const {
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const VF dlse = hn::LoadU(kF, dlse_ + lane);
      const VF scale = hn::LoadU(kF, ds_scale_ + lane);
      for (std::size_t key = 0; key < kBlockSize; ++key) {
        const std::size_t at = key * kBlockSize + lane;
        const VF change = hn::Mul(hn::Mul(hn::Load(kF, weights + at), dlse), scale);
        hn::Store(hn::Add(hn::Load(kF, ds + at), change), kF, ds + at);
      }
    }
  }

  [[nodiscard]] Element* p_rows(std::size_t block, std::size_t tile) const {
    return at<Element>(work_.p_rows, (block * tiles_ + tile) * kTileSize);
  }

  [[nodiscard]] Element* ds_rows(std::size_t block, std::size_t tile) const {
    return at<Element>(work_.ds_rows, (block * tiles_ + tile) * kTileSize);
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
      put_dk(index, block, ds, quantized);
      return;
    }
    quantize_for_dq(tile, index, block, random, quantized);
    if (plan_.strip_ds) return;
    copy_tile(ds, quantized);
    fold_queries(states_[block], quantized);
    RandomPlace second = random;
    ++second.stream;
    quantize_tile(recipe.dk.weights, second, tile.key, quantized);
    put_dk(index, block, ds, quantized);
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
        put_dk(index, block, gradients(block, index), values);
      }
    }
  }

  [[nodiscard]] bool sees(std::size_t block, std::size_t tile) const {
    return states_[block].first_tile <= tile && tile < states_[block].end_tile;
  }

  void put_dq(const Tile& tile, std::size_t index, const float* ds, const float* values) {
    auto* out = at<Element>(work_.weights, index * kTileSize);
    Multiply::columns(values, kBlockSize, kBlockSize, out);
    const bool cut = plan_.has_dq_cut && tile.cut;
    work_.left.data()[index] = at<Element>(cut ? work_.k_cut : work_.k_columns, index * kBlockSize * d_);
    work_.right.data()[index] = out;
    if (plan_.statistics) count_gradients(counts_.weights, ds, values, static_cast<int>(kTileSize));
  }

  void put_dk(std::size_t index, std::size_t block, const float* ds, const float* values) {
    Multiply::lanes(values, kBlockSize, kBlockSize, ds_rows(block, index));
    if (plan_.statistics) count_gradients(counts_.weights, ds, values, static_cast<int>(kTileSize));
  }

  /// dQ of tiles [begin, end).
  void multiply_query_gradient(std::size_t begin, std::size_t end, float* c) {
    Product product;
    product.m = d_;
    product.n = kBlockSize;
    product.k = kBlockSize;
    product.segments = end - begin;
    product.a = work_.left.data() + begin;
    product.b = work_.right.data() + begin;
    product.c = c;
    Multiply::run(product);
  }

  /// Tiles of 128 keys, counted from key 0 of the document, add up in FP16.
  void sum_in_f16(std::size_t dims, float* sum) {
    for (std::size_t i = 0; i < dims * kBlockSize; i += kLanes) hn::Store(hn::Zero(kF), kF, sum + i);
    float* part = work_.block.data();
    for (std::size_t begin = first_tile_, end = begin; begin < end_tile_; begin = end) {
      while (end < end_tile_ && first_key(end) / kStripRows == first_key(begin) / kStripRows) ++end;
      multiply_query_gradient(begin, end, part);
      prescale_.add(part, plan_.dq_factor, dims, sum);
    }
    prescale_.take_back(dims, sum);
  }

  void store_query_gradient(const Backward& out, const TokenPlace& place) {
    const auto dims = static_cast<std::size_t>(plan_.head_dim);
    float* dq = work_.product.data();
    if (prescale_.is_on()) {
      sum_in_f16(dims, dq);
    } else {
      multiply_query_gradient(first_tile_, end_tile_, dq);
    }
    unrotate(plan_, dq, dims);
    if (plan_.dq_factor != 1.0F && !prescale_.is_on()) scale_all(dq, dims, plan_.dq_factor);
    store_block(out.dq, dq, dims, plan_.heads, place, ds_nan_, work_.rows.data());
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
        work_.right.data()[dk.segments] = at<Element>(work_.q_pairs, block * d_ * kBlockSize);
        ++dk.segments;
      }
      if (dk.segments == 0) continue;
      dk.n = d_;
      dk.c = work_.dk.data() + index * kBlockSize * d_;
      Multiply::run(dk);
      for (std::size_t block = 0; block < blocks; ++block) {
        if (!sees(block, index)) continue;
        work_.left.data()[dv.segments] = p_rows(block, index);
        work_.right.data()[dv.segments] = at<Element>(work_.do_pairs, block * dv_ * kBlockSize);
        ++dv.segments;
      }
      dv.n = dv_;
      dv.c = work_.dv.data() + index * kBlockSize * dv_;
      Multiply::run(dv);
    }
  }

  Counts& counts_;
  DqPrescale prescale_;
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
  float dlse_[kBlockSize] = {};
  std::int32_t dlse_poisoned_[kBlockSize] = {};
};

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
