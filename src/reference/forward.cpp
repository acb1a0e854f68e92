#include "reference/forward.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <numbers>
#include <numeric>

#include "mxflash/schedule.hpp"
#include "reference/reference.hpp"
#include "threading/parallel.hpp"

namespace mxflash::reference {
namespace {

/// O: queries x value_dim.
std::vector<double> strip_output(const Strip& strip, const Recipe& recipe, const ForwardRows& rows,
                                 const Probabilities& p) {
  const std::int64_t dims = rows.v.dims;
  std::vector<double> o(static_cast<std::size_t>(strip.queries() * dims));
  for (std::int64_t query = strip.query_begin; query < strip.query_end; ++query) {
    const std::int64_t row = query - strip.query_begin;
    double* out = o.data() + row * dims;
    for (std::int64_t block = strip.key_begin; block < strip.key_end; block += kBlock) {
      const KeyRange range = strip.sees_within(query, block, block + kBlock);
      if (range.empty()) continue;
      const Rows& v = recipe.o.cut && strip.cuts(query, block) ? rows.v_cut : rows.v;
      for (std::int64_t key = range.begin; key < range.end; ++key) {
        add_scaled(dims, p.weights[strip.at(query, key)], v.row(key), out);
      }
    }
    if (strip.sees(query).empty()) continue;
    for (std::int64_t d = 0; d < dims; ++d) out[d] /= p.sum[static_cast<std::size_t>(row)];
  }
  return o;
}

double log_sum_exp(const Strip& strip, const Probabilities& p, std::int64_t query) {
  if (strip.sees(query).empty()) return -std::numeric_limits<double>::infinity();
  const auto row = static_cast<std::size_t>(query - strip.query_begin);
  return std::numbers::ln2 * (p.reference[row] + std::log2(p.sum[row]));
}

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Probabilities strip_probabilities(const Strip& strip, const Recipe& recipe, const ForwardRows& rows, double logit_scale,
                                  OctaveCounter& counter) {
  std::vector<double> logits = dot_products(strip, rows.q, rows.k_transposed, rows.keys);
  for (double& logit : logits) logit *= logit_scale;
  const Rows& v_cut = recipe.o.cut ? rows.v_cut : rows.v;
  return quantize_probabilities(strip, recipe, logits, rows.v, v_cut, counter);
}

Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                              const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const Result<Operands> operands = quantize_operands(problem, recipe, inputs, options, false);
  if (!operands.ok()) return operands.error();
  const Result<Schedule> schedule = make_schedule(problem.packing, problem.mask, {kStrip, kStrip});
  if (!schedule.ok()) return schedule.error();

  ForwardResult result;
  result.timing.quantize_ms = milliseconds_since(start);
  const std::int64_t heads = inputs.q.heads();
  const std::int64_t group = heads / std::max<std::int64_t>(inputs.k.heads(), 1);
  const std::int64_t dims = inputs.v.dims();
  result.o = Tensor::zeros(inputs.q.dtype, {inputs.q.tokens(), heads, dims});
  result.lse = Tensor::zeros(DType::f32, {inputs.q.tokens(), heads});
  std::vector<double> effective(static_cast<std::size_t>(inputs.q.tokens() * heads), 1.0);
  const double logit_scale =
      softmax_scale(problem.scale, rotation_of(recipe, inputs.q.dims()), inputs.q.dims()) * std::numbers::log2e;
  OctaveCounter total;
  std::mutex mutex;

  const auto items = static_cast<std::int64_t>(schedule->items.size()) * heads;
  parallel_for(
      items, options.threads,
      [&](std::int64_t index) {
        const WorkItem& item = schedule->items[static_cast<std::size_t>(index / heads)];
        const std::int64_t head = index % heads;
        const Document& document = problem.packing.documents()[static_cast<std::size_t>(item.document)];
        const Strip strip(document, problem.mask, item.query_begin, item.query_end);
        OctaveCounter counter;
        const ForwardRows rows = forward_rows(*operands, recipe, document, head, head / group);
        const Probabilities p = strip_probabilities(strip, recipe, rows, logit_scale, counter);
        const std::vector<double> o = strip_output(strip, recipe, rows, p);
        for (std::int64_t query = item.query_begin; query < item.query_end; ++query) {
          const std::int64_t row = query - item.query_begin;
          const std::int64_t place = (document.q_begin + query) * heads + head;
          result.lse.set(place, static_cast<float>(log_sum_exp(strip, p, query)));
          effective[static_cast<std::size_t>(place)] = p.effective[static_cast<std::size_t>(row)];
          for (std::int64_t d = 0; d < dims; ++d) {
            result.o.set(place * dims + d, static_cast<float>(o[static_cast<std::size_t>(row * dims + d)]));
          }
        }
        const std::scoped_lock lock(mutex);
        total.merge(counter);
      },
      [&](std::int64_t done) {
        if (options.progress) options.progress(static_cast<double>(done) / static_cast<double>(items));
      });

  result.statistics.p = total.octaves();
  result.statistics.flushed_p = total.flushed_share();
  if (!effective.empty()) {
    const double sum = std::accumulate(effective.begin(), effective.end(), 0.0);
    result.statistics.row_sum_mean = sum / static_cast<double>(effective.size());
    result.statistics.row_sum_min = *std::ranges::min_element(effective);
  }
  result.timing.compute_ms = milliseconds_since(start) - result.timing.quantize_ms;
  return result;
}

}  // namespace mxflash::reference
