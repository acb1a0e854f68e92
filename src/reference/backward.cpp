#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <numbers>
#include <optional>

#include "quantize/scales.hpp"
#include "reference/forward.hpp"
#include "reference/reference.hpp"
#include "threading/parallel.hpp"

namespace mxflash::reference {
namespace {

/// The backward's operands of one document: those of a query head, and those of its key/value head.
struct BackwardRows {
  Rows dout_dp;
  std::vector<double> v_transposed;
  Rows dout_dv;
  int dout_base = 0;  ///< Largest folding exponent of dO in the document: what P's folds are relative to.
  Rows k;
  Rows k_cut;
  Rows q;
  std::vector<double> dlse;  ///< By query: 0 where there is none, NaN where it is poisoned.
};

std::vector<double> lse_gradients(const std::optional<TensorView>& dlse, const Document& document, std::int64_t head) {
  std::vector<double> values(static_cast<std::size_t>(document.q_length));
  if (!dlse) return values;
  for (std::int64_t query = 0; query < document.q_length; ++query) {
    const float value = dlse->at(document.q_begin + query, head, 0);
    values[static_cast<std::size_t>(query)] = std::isfinite(value) ? value : std::numeric_limits<double>::quiet_NaN();
  }
  return values;
}

int largest_exponent(const Rows& rows) {
  std::optional<int> largest;
  for (std::int64_t r = 0; r < rows.count; ++r) {
    if (rows.poisoned[static_cast<std::size_t>(r)] == 0) {
      largest = std::max(largest.value_or(rows.exponent(r)), rows.exponent(r));
    }
  }
  return largest.value_or(0);
}

BackwardRows backward_rows(const Operands& operands, const Recipe& recipe, const Document& document, std::int64_t head,
                           std::int64_t kv_head) {
  BackwardRows rows;
  rows.dout_dp = dequantized_rows(*operands.dout_dp, document, Side::query, head);
  rows.v_transposed = transposed(dequantized_rows(*operands.v_dp, document, Side::key, kv_head));
  rows.dout_dv = folding_rows(*operands.dout_dv, recipe.dv.tokens.folds(), document, Side::query, head);
  rows.dout_base = largest_exponent(rows.dout_dv);
  rows.k = folding_rows(*operands.k_dq, recipe.dq.tokens.folds(), document, Side::key, kv_head);
  const Operand& k_cut = recipe.dq.cut ? recipe.dq.cut->tokens : recipe.dq.tokens;
  rows.k_cut = folding_rows(*operands.k_dq_cut, k_cut.folds(), document, Side::key, kv_head);
  rows.q = folding_rows(*operands.q_dk, recipe.dk.tokens.folds(), document, Side::query, head);
  return rows;
}

/// Sums of one key/value head over the query heads that read it, in rising order of the head, so always the same bits.
struct KeyGradients {
  std::vector<double> dk;
  std::vector<double> dv;
};

struct Scales {
  double softmax = 1;  ///< dS = softmax w (dP - D + dLSE); logits = softmax log2(e) q . k
  Rotation rotation;
};

/// dS before quantization, on the visible pairs.
std::vector<double> score_gradients(const Strip& strip, const Probabilities& p, const BackwardRows& rows,
                                    double scale) {
  std::vector<double> ds = dot_products(strip, rows.dout_dp, rows.v_transposed, strip.document.k_length);
  for (std::int64_t query = strip.query_begin; query < strip.query_end; ++query) {
    // Not dO . O: where V has other codes in O than in dP, rows of dS would not add up to zero.
    const KeyRange range = strip.sees(query);
    double delta = 0;
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      delta += p.normalized[strip.at(query, key)] * ds[strip.at(query, key)];
    }
    delta -= rows.dlse[static_cast<std::size_t>(query)];
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      const std::size_t at = strip.at(query, key);
      ds[at] = p.normalized[at] * (ds[at] - delta) * scale;
    }
  }
  return ds;
}

/// out_j += sum over queries of weights_ij rows_i.
void add_transposed_product(const Strip& strip, const std::vector<double>& weights, const Rows& rows,
                            std::vector<double>& out) {
  for (std::int64_t query = strip.query_begin; query < strip.query_end; ++query) {
    const KeyRange range = strip.sees(query);
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      add_scaled(rows.dims, weights[strip.at(query, key)], rows.row(query), out.data() + key * rows.dims);
    }
  }
}

/// Power-of-two prescales that keep an FP16 dQ below 2^14, by query, from
/// |dQ_i| <= scale (2 |dO_i|_2 max |V_j|_2 + |dLSE_i|) max |K_j|_inf, the maxima over all keys or over those up to the
/// query's last.
class DqPrescale {
 public:
  DqPrescale(const Strip& strip, const Recipe& recipe, const BackwardRows& rows, double scale) : recipe_(recipe) {
    const std::int64_t keys = strip.document.k_length;
    const std::int64_t dims = rows.dout_dp.dims;
    std::vector<double> v_norm(static_cast<std::size_t>(keys));
    for (std::int64_t d = 0; d < dims; ++d) {
      for (std::int64_t key = 0; key < keys; ++key) {
        const double v = rows.v_transposed[static_cast<std::size_t>(d * keys + key)];
        v_norm[static_cast<std::size_t>(key)] += v * v;
      }
    }
    running_.push_back(0);
    running_k_.push_back(0);
    double v_max = 0;
    double k_max = 0;
    for (std::int64_t key = 0; key < keys; ++key) {
      v_max = std::fmax(v_max, std::sqrt(v_norm[static_cast<std::size_t>(key)]));
      k_max = std::fmax(k_max, std::fmax(largest(rows.k, key), largest(rows.k_cut, key)));
      running_.push_back(2 * std::fabs(scale) * v_max * k_max);
      running_k_.push_back(std::fabs(scale) * k_max);
    }
    for (std::int64_t query = 0; query < strip.document.q_length; ++query) {
      double norm = 0;
      for (std::int64_t d = 0; d < dims; ++d) norm += rows.dout_dp.row(query)[d] * rows.dout_dp.row(query)[d];
      dout_norm_.push_back(std::sqrt(norm));
      largest_dout_ = std::fmax(largest_dout_, dout_norm_.back());
      dlse_.push_back(std::fabs(rows.dlse[static_cast<std::size_t>(query)]));
      largest_dlse_ = std::fmax(largest_dlse_, dlse_.back());
    }
  }

  [[nodiscard]] int exponent(const Strip& strip, std::int64_t query) const {
    const bool causal = recipe_.dq_accumulation == DqAccumulation::f16_causal;
    const auto row = static_cast<std::size_t>(query);
    const auto end = static_cast<std::size_t>(strip.sees(query).end);
    const double bound = causal ? dout_norm_[row] * running_[end] + dlse_[row] * running_k_[end]
                                : largest_dout_ * running_.back() + largest_dlse_ * running_k_.back();
    if (!(bound > 0) || std::isinf(bound)) return 0;
    return 14 - static_cast<int>(std::ceil(std::log2(bound)));
  }

 private:
  static double largest(const Rows& rows, std::int64_t key) {
    double value = 0;
    for (std::int64_t d = 0; d < rows.dims; ++d) value = std::fmax(value, std::fabs(rows.row(key)[d]));
    return times_pow2(value, rows.exponent(key));
  }

  const Recipe& recipe_;
  std::vector<double> running_;    ///< 2 scale max |V_j|_2 max |K_j|_inf
  std::vector<double> running_k_;  ///< scale max |K_j|_inf
  std::vector<double> dout_norm_;
  std::vector<double> dlse_;
  double largest_dout_ = 0;
  double largest_dlse_ = 0;
};

/// dQ of one query: key tiles of 128 in rising order, added in double or, prescaled, in FP16.
std::vector<double> query_gradient(const Strip& strip, const Recipe& recipe, const BackwardRows& rows,
                                   const std::vector<double>& weights, std::int64_t query,
                                   std::optional<int> f16_exponent) {
  const std::int64_t dims = rows.k.dims;
  std::vector<double> sum(static_cast<std::size_t>(dims));
  std::vector<double> tile(static_cast<std::size_t>(dims));
  const std::int64_t first = strip.key_begin - strip.key_begin % kStrip;
  for (std::int64_t begin = first; begin < strip.key_end; begin += kStrip) {
    const KeyRange range = strip.sees_within(query, begin, begin + kStrip);
    if (range.empty()) continue;
    std::ranges::fill(tile, 0.0);
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      const Rows& k = recipe.dq.cut && strip.cuts(query, key) ? rows.k_cut : rows.k;
      add_scaled(dims, weights[strip.at(query, key)], k.row(key), tile.data());
    }
    for (std::size_t d = 0; d < tile.size(); ++d) {
      if (!f16_exponent) {
        sum[d] += tile[d];
        continue;
      }
      const float part = decode_f16(encode_f16(static_cast<float>(times_pow2(tile[d], *f16_exponent))));
      sum[d] = decode_f16(encode_f16(static_cast<float>(sum[d]) + part));
    }
  }
  if (f16_exponent) {
    for (double& value : sum) value = times_pow2(value, -*f16_exponent);
  }
  return sum;
}

/// One document and query head: writes its dQ, adds to its key/value head's gradients.
class HeadBackward {
 public:
  HeadBackward(const Recipe& recipe, const Document& document, const Mask& mask, const Scales& scales)
      : recipe_(recipe), document_(document), mask_(mask), scales_(scales) {}

  void run(const ForwardRows& forward, const BackwardRows& rows, const WeightRandom& random, KeyGradients& sums,
           std::vector<double>& dq) {
    const double logit_scale = scales_.softmax * std::numbers::log2e;
    OctaveCounter unused;
    std::optional<DqPrescale> prescale;
    for (std::int64_t begin = 0; begin < document_.q_length; begin += kStrip) {
      const Strip strip(document_, mask_, begin, std::min(begin + kStrip, document_.q_length));
      const Probabilities p = strip_probabilities(strip, recipe_, forward, logit_scale, unused);
      const std::vector<double> ds = score_gradients(strip, p, rows, scales_.softmax);
      const ScoreGradients weights =
          quantize_score_gradients(strip, recipe_, ds, rows.k, rows.k_cut, rows.q, random, counter_);
      add_transposed_product(strip, quantize_for_dv(strip, recipe_.dv, p.normalized, rows.dout_dv, rows.dout_base),
                             rows.dout_dv, sums.dv);
      add_transposed_product(strip, weights.for_dk, rows.q, sums.dk);
      const bool f16 = recipe_.dq_accumulation != DqAccumulation::f32;
      if (f16 && !prescale) prescale.emplace(strip, recipe_, rows, scales_.softmax);
      for (std::int64_t query = begin; query < strip.query_end; ++query) {
        std::vector<double> row = query_gradient(strip, recipe_, rows, weights.for_dq, query,
                                                 f16 ? std::optional(prescale->exponent(strip, query)) : std::nullopt);
        unrotate(scales_.rotation, rows.k.dims, row.data());
        std::ranges::copy(row, dq.begin() + query * rows.k.dims);
      }
    }
  }

  [[nodiscard]] const OctaveCounter& counter() const { return counter_; }

 private:
  const Recipe& recipe_;
  const Document& document_;
  const Mask& mask_;
  const Scales& scales_;
  OctaveCounter counter_;
};

void store_rows(const std::vector<double>& rows, std::int64_t first, std::int64_t head, Tensor& out) {
  const std::int64_t dims = out.shape[2];
  const std::int64_t count = static_cast<std::int64_t>(rows.size()) / dims;
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t d = 0; d < dims; ++d) {
      out.set(((first + r) * out.shape[1] + head) * dims + d,
              static_cast<float>(rows[static_cast<std::size_t>(r * dims + d)]));
    }
  }
}

}  // namespace

Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&start] {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  const Result<Operands> operands = quantize_operands(problem, recipe, inputs, options, true);
  if (!operands.ok()) return operands.error();

  BackwardResult result;
  result.timing.quantize_ms = elapsed();
  const std::int64_t kv_heads = inputs.k.heads();
  const std::int64_t group = inputs.q.heads() / std::max<std::int64_t>(kv_heads, 1);
  result.dq = Tensor::zeros(inputs.q.dtype, {inputs.q.tokens(), inputs.q.heads(), inputs.q.dims()});
  result.dk = Tensor::zeros(inputs.k.dtype, {inputs.k.tokens(), kv_heads, inputs.k.dims()});
  result.dv = Tensor::zeros(inputs.v.dtype, {inputs.v.tokens(), kv_heads, inputs.v.dims()});
  Scales scales;
  scales.rotation = rotation_of(recipe, inputs.q.dims());
  scales.softmax = softmax_scale(problem.scale, scales.rotation, inputs.q.dims());
  OctaveCounter total;
  std::mutex mutex;

  const std::vector<Document>& documents = problem.packing.documents();
  const auto items = static_cast<std::int64_t>(documents.size()) * kv_heads;
  parallel_for(
      items, options.threads,
      [&](std::int64_t index) {
        const Document& document = documents[static_cast<std::size_t>(index / kv_heads)];
        const std::int64_t kv_head = index % kv_heads;
        KeyGradients sums;
        sums.dk.resize(static_cast<std::size_t>(document.k_length * inputs.k.dims()));
        sums.dv.resize(static_cast<std::size_t>(document.k_length * inputs.v.dims()));
        HeadBackward work(recipe, document, problem.mask, scales);
        for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          std::vector<double> dq(static_cast<std::size_t>(document.q_length * inputs.q.dims()));
          BackwardRows rows = backward_rows(*operands, recipe, document, head, kv_head);
          rows.dlse = lse_gradients(inputs.dlse, document, head);
          work.run(forward_rows(*operands, recipe, document, head, kv_head), rows,
                   {options.seed, static_cast<std::uint64_t>(Stream::ds), head}, sums, dq);
          store_rows(dq, document.q_begin, head, result.dq);
        }
        for (std::int64_t key = 0; key < document.k_length; ++key) {
          unrotate(scales.rotation, inputs.k.dims(), sums.dk.data() + key * inputs.k.dims());
        }
        store_rows(sums.dk, document.k_begin, kv_head, result.dk);
        store_rows(sums.dv, document.k_begin, kv_head, result.dv);
        const std::scoped_lock lock(mutex);
        total.merge(work.counter());
      },
      [&](std::int64_t done) {
        if (options.progress) options.progress(static_cast<double>(done) / static_cast<double>(items));
      });

  result.statistics.ds = total.octaves();
  result.statistics.flushed_ds = total.flushed_share();
  result.timing.compute_ms = elapsed() - result.timing.quantize_ms;
  return result;
}

}  // namespace mxflash::reference
