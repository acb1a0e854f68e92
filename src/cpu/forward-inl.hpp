// The forward of one document and key/value head.
#if defined(MXFLASH_CPU_FORWARD_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_FORWARD_INL
#undef MXFLASH_CPU_FORWARD_INL
#else
#define MXFLASH_CPU_FORWARD_INL
#endif

#include "cpu/unit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// `Scores` multiplies S, `Out` O.
template <class Multiply, class Scores, class Out>
class ForwardUnit : private Unit {
 public:
  ForwardUnit(const Plan& plan, const Item& item, Workspace& work, Counts& counts)
      : Unit(plan, item, work), counts_(counts) {}

  void run(const Forward& out) {
    Multiply::begin();
    const std::size_t tiles = HWY_MAX(tiles_, 1);
    work_.k_rows.require(tiles * Scores::bytes(d_));
    work_.v_columns.require(tiles * Out::value_bytes(dv_));
    if (plan_.has_o_cut) work_.v_cut.require(tiles * Out::value_bytes(dv_));
    work_.weights.require(tiles * Out::weight_bytes());
    work_.q_columns.require(Scores::bytes(d_));
    for (std::size_t tile = 0; tile < tiles_; ++tile) read_keys(tile);
    count_poisoned();
    for (std::int64_t head = first_head(); head < end_head(); ++head) {
      for (std::int64_t query = item_.query_begin; query < item_.query_end; query += kBlockRows) {
        forward_block(out, head, query);
      }
    }
    Multiply::end();
  }

 private:
  void load_values(const TokenOperand& operand, std::size_t tile, std::int32_t* folds, std::byte* out) {
    const TokenPlace place = key_place(tile);
    Fresh fresh;
    read_block(plan_, operand, place, document_.k_length, work_, fresh);
    note_poisoned(fresh.block, v_poisoned() + tile * kBlockSize);
    Out::put_values(operand, fresh.random, fresh.strip_maximum, dv_, fresh.block, out + tile * Out::value_bytes(dv_));
    if (operand.folds) note_folds(fresh.block, place.count, folds);
    // The group of blocks that O adds up first is there.
    const std::size_t before = tile_number(tile) % Out::kGroup;
    if (before + 1 < Out::kGroup && tile + 1 < tiles_) return;
    const std::size_t count = HWY_MIN(before, tile) + 1;
    Out::join_values(out + (tile + 1 - count) * Out::value_bytes(dv_), count, dv_);
  }

  void read_keys(std::size_t tile) {
    Fresh fresh;
    fetch_rows(*plan_.v_o.tensor, key_place(tile), 0, kBlockSize);
    load_keys<Scores>(tile, key_place(tile), fresh);
    Scores::put_keys(fresh.block, d_, work_.staging.data(), key_block<Scores>(tile));
    if (tile + 1 < tiles_) fetch_rows(*plan_.k_s.tensor, key_place(tile + 1), 0, kBlockSize);
    load_values(plan_.v_o, tile, v_folds(tile), work_.v_columns.data());
    if (plan_.has_o_cut) load_values(plan_.v_o_cut, tile, v_cut_folds(tile), work_.v_cut.data());
  }

  void forward_block(const Forward& out, std::int64_t head, std::int64_t query) {
    const TokenPlace place = query_place(head, query);
    Fresh fresh;
    load_scored<Scores>(plan_.q_s, place, document_.q_length, fresh, work_.q_columns.data());
    q_largest_ = fresh.block.largest;
    Scores::put_queries(fresh.block, d_, work_.q_columns.data());
    start_block(query);
    score_block<Scores>([&](std::size_t index, const Tile& tile) { return begin_early(index, tile); });
    fetch_output(out.o, plan_.value_dim, plan_.heads, place);
    // A few tiles at a time, so that P is multiplied while it is in the first cache; whole groups of them.
    for (std::size_t begin = first_tile_, end = 0; begin < end_tile_ || begin == first_tile_; begin = end) {
      end = HWY_MIN(begin + Out::kTiles - tile_number(begin) % Out::kTiles, end_tile_);
      for (std::size_t index = begin; index < end; ++index) {
        weigh_values(index);
        fetch_queries(head, query + kBlockRows, index - first_tile_);
      }
      Out::run(work_.left.data() + begin, work_.right.data() + begin, end - begin, dv_,
               begin == first_tile_ ? 0.0F : 1.0F, work_.product.data());
      if (end == begin) break;
    }
    finish_forward(out, place, fresh.block);
  }

  /// A share of the next block of queries: all of it at once would wait for the memory.
  void fetch_queries(std::int64_t head, std::int64_t query, std::size_t step) {
    const std::size_t steps = end_tile_ - first_tile_;
    if (query >= item_.query_end) return;
    fetch_rows(*plan_.q_s.tensor, query_place(head, query), step * kBlockSize / steps, (step + 1) * kBlockSize / steps);
  }

  bool begin_early(std::size_t index, const Tile& tile) {
    const TileOperands of{key_block<Scores>(index), work_.q_columns.data(), static_cast<std::size_t>(plan_.head_dim),
                          d_, plan_.logit_factor};
    return Out::template begin_early<Scores>(rule_at(tile), tile, of, weights_of(index), rows_);
  }

  /// P of a tile, ready to multiply V.
  void weigh_values(std::size_t index) {
    const Tile tile = tile_at(index);
    std::byte* weights = weights_of(index);
    const WeightRule& rule = rule_at(tile);
    const bool early = Out::is_early(weights);
    if (!early || !Out::end_early(rule, weights, rows_)) {
      if (early) score_one<Scores>(index, tile);
      weigh_tile(rule, tile, scores(index), typename Out::Sink{weights}, rows_);
    }
    const bool cut = plan_.has_o_cut && tile.cut;
    work_.left.data()[index] = (cut ? work_.v_cut : work_.v_columns).data() + index * Out::value_bytes(dv_);
    work_.right.data()[index] = weights;
  }

  [[nodiscard]] std::byte* weights_of(std::size_t index) const {
    return work_.weights.data() + index * Out::weight_bytes();
  }

  void finish_forward(const Forward& out, const TokenPlace& place, const TokenBlock& q) {
    float inverse[kBlockSize];
    std::int32_t shift[kBlockSize];
    std::int32_t nan[kBlockSize] = {};
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      const bool sees = sees_any(lane);
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
      const bool sees = sees_any(lane);
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

  Counts& counts_;
};

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
