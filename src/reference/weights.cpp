#include "reference/weights.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "quantize/scales.hpp"

namespace mxflash {
namespace {

/// Stays NaN in every format: E2M1 has no code for it, and a scale would spread it.
double requantized(const Operand& operand, const BlockScale& scale, float value, std::uint32_t random) {
  if (std::isnan(value)) return std::numeric_limits<double>::quiet_NaN();
  const std::uint8_t code = encode_element(operand, scale, value, random);
  return static_cast<double>(decode(*element_format(operand.encoding), code)) * scale_value(operand, scale);
}

/// f32 and bf16 operands.
double rounded(const Operand& operand, double value) {
  const auto narrow = static_cast<float>(value);
  return operand.encoding == Encoding::bf16 ? decode_bf16(encode_bf16(narrow)) : narrow;
}

/// Mitchell's: the logarithm's fixed point read as a float, linear inside an octave, at most 4.7 % off.
float mitchell(double t) {
  constexpr double offset = 0.0695;
  const double bits = std::floor((t + 127.0 - offset) * 8388608.0);
  return std::bit_cast<float>(static_cast<std::uint32_t>(std::clamp(bits, 0.0, 2139095039.0)));
}

/// Schraudolph's, in the bit pattern of a BF16.
float schraudolph(double t) {
  constexpr double offset = 7.0;
  const double bits = std::nearbyint((t + 127.0) * 128.0 - offset);
  return decode_bf16(static_cast<std::uint16_t>(std::clamp(bits, 0.0, 32639.0)));
}

/// 2^t in the recipe's way. Of every 8 pairs of keys, 5 take Schraudolph's bits and 3 the exact exponential.
float exponential(Exponential kind, double t, std::int64_t key) {
  if (std::isnan(t)) return std::numeric_limits<float>::quiet_NaN();
  if (kind == Exponential::mitchell) return mitchell(t);
  if (kind == Exponential::schraudolph && (key / 2) % 8 < 5) return schraudolph(t);
  return static_cast<float>(std::exp2(t));
}

bool is_static(const Operand& weights) { return weights.quantized() && weights.block == Block::tensor(); }

/// The scale exponent of a group whose largest base-2 logit is g: the maximum is taken before the exponential, so that
/// no group underflows.
/// A double: logits of huge inputs are beyond any int.
double group_exponent(const Operand& weights, double g) {
  const double octave = std::floor(g);
  const auto maximum = static_cast<float>(std::exp2(g - octave));
  return octave + scale_exponent(*element_format(weights.encoding), weights.rule, maximum);
}

float smallest_normal(Format format) { return detail::pow2(1 - spec_of(format).bias); }

/// One query's row of P while it is being quantized. `counted` is what a key adds to the normalizer and to the
/// backward: its quantized weight without V's exponent, but the unquantized one where a light V (zero, in the extreme)
/// pushes the weight out of the format's normal range: such a key adds nothing to O, yet has its share of the row.
class ProbabilityRow {
 public:
  ProbabilityRow(const Strip& strip, const Recipe& recipe, std::int64_t query, const double* logits)
      : strip_(strip), recipe_(recipe), query_(query), range_(strip.sees(query)) {
    t_.assign(logits + (range_.begin - strip.key_begin), logits + (range_.end - strip.key_begin));
    folds_.resize(t_.size());
    cut_.resize(t_.size());
    light_.resize(t_.size());
    weights_.resize(t_.size());
    plain_.resize(t_.size());
    counted_.resize(t_.size());
  }

  void fold(const Rows& v, const Rows& v_cut) {
    for (std::int64_t key = range_.begin; key < range_.end; ++key) {
      const bool cut = recipe_.o.cut.has_value() && strip_.cuts(query_, key);
      cut_[index(key)] = cut ? 1 : 0;
      folds_[index(key)] = (cut ? v_cut : v).exponent(key);
      t_[index(key)] += folds_[index(key)];
    }
    mark_light(v, v_cut);
    double maximum = -std::numeric_limits<double>::infinity();
    for (const double t : t_) maximum = t > maximum ? t : maximum;  // a NaN is never greater
    reference_ = std::isinf(maximum) ? 0.0 : std::ceil(maximum);
  }

  void quantize() {
    for (std::int64_t begin = range_.begin; begin < range_.end;) {
      const std::int64_t end = std::min(begin - begin % kBlock + kBlock, range_.end);
      quantize_group(begin, end);
      begin = end;
    }
  }

  void store(Probabilities& out, OctaveCounter& counter) const {
    const double sum = row_sum(recipe_.row_sum == RowSum::quantized ? counted_ : plain_);
    const std::int64_t row = query_ - strip_.query_begin;
    out.reference[static_cast<std::size_t>(row)] = reference_;
    out.sum[static_cast<std::size_t>(row)] = sum;
    out.effective[static_cast<std::size_t>(row)] = row_sum(counted_) / sum;
    for (std::int64_t key = range_.begin; key < range_.end; ++key) {
      out.weights[strip_.at(query_, key)] = weights_[index(key)];
      out.normalized[strip_.at(query_, key)] = counted_[index(key)] / sum;
      counter.count(static_cast<float>(plain_[index(key)] / sum), weights_[index(key)] == 0.0);
    }
  }

 private:
  [[nodiscard]] std::size_t index(std::int64_t key) const { return static_cast<std::size_t>(key - range_.begin); }

  /// Among the keys whose V folds; the others' weights do not depend on the size of V.
  void mark_light(const Rows& v, const Rows& v_cut) {
    const auto folds = [&](std::int64_t key) { return !(cut_[index(key)] != 0 ? v_cut : v).exponents.empty(); };
    int largest = -kE8m0Bias;
    for (std::int64_t key = range_.begin; key < range_.end; ++key) {
      if (folds(key)) largest = std::max(largest, folds_[index(key)]);
    }
    for (std::int64_t key = range_.begin; key < range_.end; ++key) {
      const int fold = folds_[index(key)];
      light_[index(key)] = folds(key) && (fold == -kE8m0Bias || fold + kLightFold <= largest) ? 1 : 0;
    }
  }

  /// Keys of one block of 32, so of one tile kind.
  void quantize_group(std::int64_t begin, std::int64_t end) {
    const Operand& weights = cut_[index(begin)] != 0 ? recipe_.o.cut->weights : recipe_.o.weights;
    double scale = reference_;  // log2 of what divides the weights before they are encoded
    if (is_static(weights)) {
      scale = reference_ - std::log2(recipe_.beta);
    } else if (weights.quantized()) {
      double g = -std::numeric_limits<double>::infinity();
      for (std::int64_t key = begin; key < end; ++key) g = t_[index(key)] > g ? t_[index(key)] : g;
      if (!std::isinf(g)) scale = std::max(reference_ - kE8m0Bias, group_exponent(weights, g));
    }
    for (std::int64_t key = begin; key < end; ++key) {
      const double t = t_[index(key)];
      const int fold = folds_[index(key)];
      plain_[index(key)] = exponential(recipe_.exponential, t - fold - reference_, key);
      const float scaled = exponential(recipe_.exponential, t - scale, key);
      const double value =
          weights.quantized() ? requantized(weights, BlockScale{}, scaled, 0) : rounded(weights, scaled);
      weights_[index(key)] = times_pow2(value, static_cast<int>(scale - reference_));
      const bool light =
          light_[index(key)] != 0 && weights.quantized() && value < smallest_normal(*element_format(weights.encoding));
      counted_[index(key)] = light ? plain_[index(key)] : times_pow2(weights_[index(key)], -fold);
    }
  }

  [[nodiscard]] static double row_sum(const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0);
  }

  const Strip& strip_;
  const Recipe& recipe_;
  std::int64_t query_;
  KeyRange range_;
  double reference_ = 0;
  std::vector<double> t_;
  std::vector<int> folds_;
  std::vector<std::uint8_t> cut_;
  std::vector<std::uint8_t> light_;
  std::vector<double> weights_;
  std::vector<double> plain_;    ///< Without V's exponent.
  std::vector<double> counted_;  ///< Without V's exponent.
};

/// Quantizes weights in place, tile by tile, with `cut` on cut tiles where there is one.
class BlockQuantizer {
 public:
  BlockQuantizer(const Strip& strip, const TokenProduct& product, const WeightRandom& random)
      : strip_(strip), product_(product), random_(random) {}

  void run(std::vector<double>& weights) {
    weights_ = &weights;
    if (adaptive_operand() != nullptr) measure_second_level();
    for (std::int64_t query = strip_.query_begin; query < strip_.query_end; query += kBlock) {
      for (std::int64_t key = strip_.key_begin; key < strip_.key_end; key += kBlock) {
        const bool cut = product_.cut.has_value() && strip_.cuts(query, key);
        tile(cut ? product_.cut->weights : product_.weights, query, key);
      }
    }
  }

 private:
  void tile(const Operand& operand, std::int64_t query, std::int64_t key) {
    const bool blocked = operand.quantized() && !is_static(operand);
    const std::int64_t height = blocked ? operand.block.rows : kBlock;
    const std::int64_t width = blocked ? operand.block.columns : kBlock;
    for (std::int64_t row = query; row < query + kBlock; row += height) {
      for (std::int64_t column = key; column < key + kBlock; column += width) {
        block(operand, row, std::min(row + height, strip_.query_end), column, column + width);
      }
    }
  }

  void block(const Operand& operand, std::int64_t row, std::int64_t row_end, std::int64_t column,
             std::int64_t column_end) {
    BlockScale scale;
    if (is_static(operand)) {
      scale.exponent = -spec_of(*element_format(operand.encoding)).max_exponent;
    } else if (operand.quantized()) {
      float maximum = 0;
      for (std::int64_t query = row; query < row_end; ++query) {
        const KeyRange range = strip_.sees_within(query, column, column_end);
        for (std::int64_t key = range.begin; key < range.end; ++key) {
          maximum = std::fmax(maximum, std::fabs(narrowed(operand, query, key)));
        }
      }
      scale = block_scale(operand, maximum);
    }
    for (std::int64_t query = row; query < row_end; ++query) {
      const KeyRange range = strip_.sees_within(query, column, column_end);
      for (std::int64_t key = range.begin; key < range.end; ++key) element(operand, scale, query, key);
    }
  }

  void element(const Operand& operand, const BlockScale& scale, std::int64_t query, std::int64_t key) {
    double& weight = (*weights_)[strip_.at(query, key)];
    if (!operand.quantized()) {
      weight = rounded(operand, weight);
      return;
    }
    const std::uint32_t random = operand.rounding == Rounding::stochastic
                                     ? element_random(random_.seed, random_.stream, random_.head, query, key)
                                     : 0;
    weight = times_pow2(requantized(operand, scale, narrowed(operand, query, key), random),
                        second_level(operand, query, key));
  }

  [[nodiscard]] float narrowed(const Operand& operand, std::int64_t query, std::int64_t key) const {
    return static_cast<float>(times_pow2((*weights_)[strip_.at(query, key)], -second_level(operand, query, key)));
  }

  [[nodiscard]] int second_level(const Operand& operand, std::int64_t query, std::int64_t key) const {
    if (operand.second_level != SecondLevel::adaptive) return 0;
    return second_level_[second_level_index(operand, query, key)];
  }

  /// Along a row: one a query and 128 keys. Along a column: one a key and strip.
  [[nodiscard]] std::size_t second_level_index(const Operand& operand, std::int64_t query, std::int64_t key) const {
    const std::int64_t tiles = strip_.document.k_length / kStrip + 1;
    return static_cast<std::size_t>(operand.block.rows == 1 ? (query - strip_.query_begin) * tiles + key / kStrip
                                                            : key - strip_.key_begin);
  }

  /// The operand of whole tiles or of cut ones, whichever has a second level; where both do, blocks run the same way.
  [[nodiscard]] const Operand* adaptive_operand() const {
    if (product_.weights.second_level == SecondLevel::adaptive) return &product_.weights;
    if (product_.cut && product_.cut->weights.second_level == SecondLevel::adaptive) return &product_.cut->weights;
    return nullptr;
  }

  void measure_second_level() {
    const Operand& operand = *adaptive_operand();
    const std::int64_t tiles = strip_.document.k_length / kStrip + 1;
    std::vector<float> maxima(static_cast<std::size_t>(std::max(strip_.queries() * tiles, strip_.keys())));
    for (std::int64_t query = strip_.query_begin; query < strip_.query_end; ++query) {
      const KeyRange range = strip_.sees(query);
      for (std::int64_t key = range.begin; key < range.end; ++key) {
        float& maximum = maxima[second_level_index(operand, query, key)];
        maximum = std::fmax(maximum, std::fabs(static_cast<float>((*weights_)[strip_.at(query, key)])));
      }
    }
    second_level_.clear();
    for (const float maximum : maxima) second_level_.push_back(second_level_exponent(maximum));
  }

  const Strip& strip_;
  const TokenProduct& product_;
  const WeightRandom& random_;
  std::vector<double>* weights_ = nullptr;
  std::vector<int> second_level_;
};

/// One set of codes for both products of dS: encoded once, then shifted in the exponent for each.
class SharedCodes {
 public:
  SharedCodes(const Strip& strip, const Operand& operand, const std::vector<double>& ds, const WeightRandom& random)
      : strip_(strip), operand_(operand), decoded_(ds), exponents_(strip.size()) {
    // BlockQuantizer leaves code x scale; split it again so that a shift is one of the code.
    const TokenProduct product{operand, {}, std::nullopt};
    scale_exponents(ds);
    BlockQuantizer(strip, product, random).run(decoded_);
    for (std::size_t i = 0; i < decoded_.size(); ++i) decoded_[i] = times_pow2(decoded_[i], -exponents_[i]);
  }

  /// Each query's code times 2^(k's exponent), relative to the largest in the block of 32 keys: among all of the
  /// block's keys where squares share scales anyway, among those the query sees where rows do not.
  [[nodiscard]] std::vector<double> for_dq(const Rows& k) const {
    std::vector<double> result(strip_.size());
    for (std::int64_t query = strip_.query_begin; query < strip_.query_end; ++query) {
      for (std::int64_t block = strip_.key_begin; block < strip_.key_end; block += kBlock) {
        const KeyRange range = strip_.sees_within(query, block, block + kBlock);
        const std::int64_t end = std::min(block + kBlock, strip_.document.k_length);
        const std::optional<int> top =
            operand_.block.rows == 1 ? top_exponent(k, range.begin, range.end) : top_exponent(k, block, end);
        for (std::int64_t key = range.begin; key < range.end; ++key) {
          result[strip_.at(query, key)] = shifted(query, key, k.exponent(key), top.value_or(0), 0);
        }
      }
    }
    return result;
  }

  /// Each code times 2^(q's exponent), and the row's scale where rows have their own, relative to the largest in the
  /// block of 32 queries.
  [[nodiscard]] std::vector<double> for_dk(const Rows& q) const {
    std::vector<double> result(strip_.size());
    for (std::int64_t block = strip_.query_begin; block < strip_.query_end; block += kBlock) {
      const std::int64_t end = std::min(block + kBlock, strip_.query_end);
      for (std::int64_t key = strip_.key_begin; key < strip_.key_end; key += kBlock)
        dk_tile(q, block, end, key, result);
    }
    return result;
  }

 private:
  void scale_exponents(const std::vector<double>& ds) {
    for (std::int64_t block = strip_.query_begin; block < strip_.query_end; block += kBlock) {
      for (std::int64_t key = strip_.key_begin; key < strip_.key_end; key += kBlock) {
        for (std::int64_t row = block; row < std::min(block + kBlock, strip_.query_end); row += operand_.block.rows) {
          assign_exponent(ds, row, std::min(row + operand_.block.rows, strip_.query_end), key);
        }
      }
    }
  }

  void assign_exponent(const std::vector<double>& ds, std::int64_t row, std::int64_t row_end, std::int64_t block) {
    float maximum = 0;
    for (std::int64_t query = row; query < row_end; ++query) {
      const KeyRange range = strip_.sees_within(query, block, block + kBlock);
      for (std::int64_t key = range.begin; key < range.end; ++key) {
        maximum = std::fmax(maximum, std::fabs(static_cast<float>(ds[strip_.at(query, key)])));
      }
    }
    const int exponent = block_scale(operand_, maximum).exponent;
    for (std::int64_t query = row; query < row_end; ++query) {
      const KeyRange range = strip_.sees_within(query, block, block + kBlock);
      for (std::int64_t key = range.begin; key < range.end; ++key) exponents_[strip_.at(query, key)] = exponent;
    }
  }

  void dk_tile(const Rows& q, std::int64_t block, std::int64_t end, std::int64_t key_block,
               std::vector<double>& result) const {
    const bool own_scales = operand_.block.rows == 1;
    std::optional<int> top;
    for (std::int64_t query = block; query < end; ++query) {
      const KeyRange range = strip_.sees_within(query, key_block, key_block + kBlock);
      if (range.empty() || q.poisoned[static_cast<std::size_t>(query)] != 0) continue;
      const int exponent = q.exponent(query) + (own_scales ? exponents_[strip_.at(query, range.begin)] : 0);
      top = std::max(top.value_or(exponent), exponent);
    }
    for (std::int64_t query = block; query < end; ++query) {
      const KeyRange range = strip_.sees_within(query, key_block, key_block + kBlock);
      for (std::int64_t key = range.begin; key < range.end; ++key) {
        const int own = own_scales ? exponents_[strip_.at(query, key)] : 0;
        result[strip_.at(query, key)] = shifted(query, key, q.exponent(query) + own, top.value_or(0), own);
      }
    }
  }

  static std::optional<int> top_exponent(const Rows& rows, std::int64_t begin, std::int64_t end) {
    std::optional<int> top;
    for (std::int64_t r = begin; r < end; ++r) {
      if (rows.poisoned[static_cast<std::size_t>(r)] == 0)
        top = std::max(top.value_or(rows.exponent(r)), rows.exponent(r));
    }
    return top;
  }

  /// The code moved by exponent - top <= 0, what falls below the format's range rounded; `applied` is the part of the
  /// scale that `exponent` already holds.
  [[nodiscard]] double shifted(std::int64_t query, std::int64_t key, int exponent, int top, int applied) const {
    const std::size_t at = strip_.at(query, key);
    if (std::isnan(decoded_[at])) return decoded_[at];
    const int shift = std::min(exponent - top, 0);
    const Format format = *element_format(operand_.encoding);
    const float code = decode(format, encode(format, static_cast<float>(times_pow2(decoded_[at], shift))));
    return times_pow2(static_cast<double>(code), top + exponents_[at] - applied);
  }

  const Strip& strip_;
  const Operand& operand_;
  std::vector<double> decoded_;
  std::vector<int> exponents_;
};

/// k's exponents, those of k_cut on cut tiles.
void fold_keys(const Strip& strip, const TokenProduct& product, const Rows& k, const Rows& k_cut,
               std::vector<double>& weights) {
  for (std::int64_t query = strip.query_begin; query < strip.query_end; ++query) {
    for (std::int64_t block = strip.key_begin; block < strip.key_end; block += kBlock) {
      const Rows& rows = product.cut.has_value() && strip.cuts(query, block) ? k_cut : k;
      if (rows.exponents.empty()) continue;
      const KeyRange range = strip.sees_within(query, block, block + kBlock);
      for (std::int64_t key = range.begin; key < range.end; ++key) {
        double& weight = weights[strip.at(query, key)];
        weight = times_pow2(weight, rows.exponent(key));
      }
    }
  }
}

void fold_queries(const Strip& strip, const Rows& rows, int base, std::vector<double>& weights) {
  if (rows.exponents.empty()) return;
  for (std::int64_t query = strip.query_begin; query < strip.query_end; ++query) {
    const KeyRange range = strip.sees(query);
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      double& weight = weights[strip.at(query, key)];
      weight = times_pow2(weight, rows.exponent(query) - base);
    }
  }
}

void count_flushed(const Strip& strip, const std::vector<double>& before, const std::vector<double>& after,
                   OctaveCounter& counter) {
  for (std::int64_t query = strip.query_begin; query < strip.query_end; ++query) {
    const KeyRange range = strip.sees(query);
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      const std::size_t at = strip.at(query, key);
      counter.count(static_cast<float>(before[at]), after[at] == 0.0);
    }
  }
}

}  // namespace

bool shares_codes(const Recipe& recipe) {
  const Operand& ds = recipe.dq.weights;
  return ds == recipe.dk.weights && ds.quantized() && ds.encoding != Encoding::nvfp4 && !recipe.dq.cut &&
         !recipe.dk.cut && ds.block.columns == kBlock;
}

void OctaveCounter::count(float weight, bool flushed) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(weight) & detail::kAbsMask;
  if (bits == 0 || bits >= detail::kInfBits) return;
  Bin& bin = bins_[static_cast<std::size_t>(detail::floor_log2(bits) - kLowest)];
  ++bin.count;
  bin.flushed += flushed ? 1 : 0;
}

void OctaveCounter::merge(const OctaveCounter& other) {
  for (std::size_t i = 0; i < bins_.size(); ++i) {
    bins_[i].count += other.bins_[i].count;
    bins_[i].flushed += other.bins_[i].flushed;
  }
}

Octaves OctaveCounter::octaves() const {
  Octaves octaves;
  for (std::size_t i = 0; i < bins_.size(); ++i) {
    if (bins_[i].count != 0) octaves.bins[static_cast<int>(i) + kLowest] = {bins_[i].count, bins_[i].flushed};
  }
  return octaves;
}

double OctaveCounter::flushed_share() const {
  std::int64_t count = 0;
  std::int64_t flushed = 0;
  for (const Bin& bin : bins_) {
    count += bin.count;
    flushed += bin.flushed;
  }
  return count == 0 ? 0.0 : static_cast<double>(flushed) / static_cast<double>(count);
}

Probabilities quantize_probabilities(const Strip& strip, const Recipe& recipe, const std::vector<double>& logits,
                                     const Rows& v, const Rows& v_cut, OctaveCounter& counter) {
  Probabilities out;
  out.weights.resize(strip.size());
  out.normalized.resize(strip.size());
  const auto queries = static_cast<std::size_t>(strip.queries());
  out.reference.resize(queries);
  out.sum.resize(queries);
  out.effective.assign(queries, 1.0);
  for (std::int64_t query = strip.query_begin; query < strip.query_end; ++query) {
    if (strip.sees(query).empty()) continue;
    ProbabilityRow row(strip, recipe, query, logits.data() + (query - strip.query_begin) * strip.keys());
    row.fold(v, v_cut);
    row.quantize();
    row.store(out, counter);
  }
  return out;
}

std::vector<double> quantize_for_dv(const Strip& strip, const TokenProduct& product,
                                    const std::vector<double>& normalized, const Rows& dout, int base) {
  std::vector<double> weights = normalized;
  fold_queries(strip, dout, base, weights);
  const WeightRandom nearest;
  BlockQuantizer(strip, product, nearest).run(weights);
  if (!dout.exponents.empty()) {
    for (double& weight : weights) weight = times_pow2(weight, base);
  }
  return weights;
}

ScoreGradients quantize_score_gradients(const Strip& strip, const Recipe& recipe, const std::vector<double>& ds,
                                        const Rows& k, const Rows& k_cut, const Rows& q, const WeightRandom& random,
                                        OctaveCounter& counter) {
  ScoreGradients out;
  if (shares_codes(recipe)) {
    const SharedCodes codes(strip, recipe.dq.weights, ds, random);
    out.for_dq = codes.for_dq(k);
    out.for_dk = codes.for_dk(q);
  } else {
    // Each product has its own codes, of dS with the operand's exponents already in it. Two streams: the roundings of
    // the two products are independent.
    out.for_dq = ds;
    fold_keys(strip, recipe.dq, k, k_cut, out.for_dq);
    BlockQuantizer(strip, recipe.dq, random).run(out.for_dq);
    out.for_dk = ds;
    fold_queries(strip, q, 0, out.for_dk);
    const WeightRandom second{random.seed, random.stream + 1, random.head};
    BlockQuantizer(strip, recipe.dk, second).run(out.for_dk);
  }
  count_flushed(strip, ds, out.for_dq, counter);
  count_flushed(strip, ds, out.for_dk, counter);
  return out;
}

}  // namespace mxflash
