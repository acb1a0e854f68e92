#include "reference/exact.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/strip.hpp"
#include "threading/parallel.hpp"

namespace mxflash::reference {
namespace {

Rows load(const TensorView& tensor, std::int64_t begin, std::int64_t count, std::int64_t head) {
  Rows rows;
  rows.count = count;
  rows.dims = tensor.dims();
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t d = 0; d < rows.dims; ++d) {
      rows.values.push_back(static_cast<double>(tensor.at(begin + r, head, d)));
    }
  }
  return rows;
}

/// One query's softmax over the keys it sees.
struct ExactRow {
  KeyRange range;
  std::vector<double> p;
  std::vector<double> o;
  double lse = -std::numeric_limits<double>::infinity();
};

/// What one document and head reads.
struct ExactHead {
  Rows q, k, v;
  std::vector<double> k_transposed;
  double scale = 1;

  ExactHead(const Problem& problem, const Inputs& inputs, const Document& document, std::int64_t head)
      : q(load(inputs.q, document.q_begin, document.q_length, head)),
        k(load(inputs.k, document.k_begin, document.k_length, head / (inputs.q.heads() / inputs.k.heads()))),
        v(load(inputs.v, document.k_begin, document.k_length, head / (inputs.q.heads() / inputs.k.heads()))),
        k_transposed(transposed(k)),
        scale(problem.scale ? static_cast<double>(*problem.scale) : 1.0 / std::sqrt(static_cast<double>(k.dims))) {}

  [[nodiscard]] ExactRow row(std::int64_t query, const KeyRange& range) const {
    ExactRow out;
    out.range = range;
    out.o.resize(static_cast<std::size_t>(v.dims));
    if (range.empty()) return out;
    out.p.resize(static_cast<std::size_t>(range.end - range.begin));
    for (std::int64_t d = 0; d < q.dims; ++d) {
      add_scaled(range.end - range.begin, q.row(query)[d] * scale, k_transposed.data() + d * k.count + range.begin,
                 out.p.data());
    }
    const double maximum = *std::ranges::max_element(out.p);
    double sum = 0;
    for (double& p : out.p) {
      p = std::exp(p - maximum);
      sum += p;
    }
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      double& p = out.p[static_cast<std::size_t>(key - range.begin)];
      p /= sum;
      add_scaled(v.dims, p, v.row(key), out.o.data());
    }
    out.lse = maximum + std::log(sum);
    return out;
  }
};

void store(const double* values, std::int64_t count, std::int64_t place, Tensor& out) {
  for (std::int64_t d = 0; d < count; ++d) out.set(place + d, static_cast<float>(values[d]));
}

void backward_head(const Problem& problem, const Inputs& inputs, const Document& document, std::int64_t head,
                   std::vector<double>& dk, std::vector<double>& dv, Tensor& dq) {
  const ExactHead exact(problem, inputs, document, head);
  const Rows dout = load(*inputs.dout, document.q_begin, document.q_length, head);
  Rows dlse;
  if (inputs.dlse) dlse = load(*inputs.dlse, document.q_begin, document.q_length, head);
  for (std::int64_t query = 0; query < document.q_length; ++query) {
    const ExactRow row = exact.row(query, visible_keys(document, problem.mask, query));
    double delta = inputs.dlse ? -dlse.row(query)[0] : 0;
    for (std::int64_t d = 0; d < dout.dims; ++d) delta += dout.row(query)[d] * row.o[static_cast<std::size_t>(d)];
    std::vector<double> dq_row(static_cast<std::size_t>(exact.q.dims));
    for (std::int64_t key = row.range.begin; key < row.range.end; ++key) {
      const double p = row.p[static_cast<std::size_t>(key - row.range.begin)];
      double dp = 0;
      for (std::int64_t d = 0; d < dout.dims; ++d) dp += dout.row(query)[d] * exact.v.row(key)[d];
      const double ds = p * (dp - delta) * exact.scale;
      add_scaled(exact.q.dims, ds, exact.k.row(key), dq_row.data());
      add_scaled(exact.q.dims, ds, exact.q.row(query), dk.data() + key * exact.q.dims);
      add_scaled(dout.dims, p, dout.row(query), dv.data() + key * dout.dims);
    }
    store(dq_row.data(), exact.q.dims, ((document.q_begin + query) * inputs.q.heads() + head) * exact.q.dims, dq);
  }
}

}  // namespace

ForwardResult exact_forward(const Problem& problem, const Inputs& inputs, const Options& options) {
  ForwardResult result;
  const std::int64_t heads = inputs.q.heads();
  const std::int64_t dims = inputs.v.dims();
  result.o = Tensor::zeros(DType::f32, {inputs.q.tokens(), heads, dims});
  result.lse = Tensor::zeros(DType::f32, {inputs.q.tokens(), heads});
  const auto items = static_cast<std::int64_t>(problem.packing.documents().size()) * heads;
  parallel_for(items, options.threads, [&](std::int64_t index) {
    const Document& document = problem.packing.documents()[static_cast<std::size_t>(index / heads)];
    const std::int64_t head = index % heads;
    const ExactHead exact(problem, inputs, document, head);
    for (std::int64_t query = 0; query < document.q_length; ++query) {
      const ExactRow row = exact.row(query, visible_keys(document, problem.mask, query));
      const std::int64_t place = (document.q_begin + query) * heads + head;
      store(row.o.data(), dims, place * dims, result.o);
      result.lse.set(place, static_cast<float>(row.lse));
    }
  });
  return result;
}

BackwardResult exact_backward(const Problem& problem, const Inputs& inputs, const Options& options) {
  BackwardResult result;
  const std::int64_t kv_heads = inputs.k.heads();
  const std::int64_t group = kv_heads == 0 ? 0 : inputs.q.heads() / kv_heads;
  result.dq = Tensor::zeros(DType::f32, {inputs.q.tokens(), inputs.q.heads(), inputs.q.dims()});
  result.dk = Tensor::zeros(DType::f32, {inputs.k.tokens(), kv_heads, inputs.k.dims()});
  result.dv = Tensor::zeros(DType::f32, {inputs.v.tokens(), kv_heads, inputs.v.dims()});
  const auto items = static_cast<std::int64_t>(problem.packing.documents().size()) * kv_heads;
  parallel_for(items, options.threads, [&](std::int64_t index) {
    const Document& document = problem.packing.documents()[static_cast<std::size_t>(index / kv_heads)];
    const std::int64_t kv_head = index % kv_heads;
    std::vector<double> dk(static_cast<std::size_t>(document.k_length * inputs.k.dims()));
    std::vector<double> dv(static_cast<std::size_t>(document.k_length * inputs.v.dims()));
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      backward_head(problem, inputs, document, head, dk, dv, result.dq);
    }
    for (std::int64_t key = 0; key < document.k_length; ++key) {
      const std::int64_t place = (document.k_begin + key) * kv_heads + kv_head;
      store(dk.data() + key * inputs.k.dims(), inputs.k.dims(), place * inputs.k.dims(), result.dk);
      store(dv.data() + key * inputs.v.dims(), inputs.v.dims(), place * inputs.v.dims(), result.dv);
    }
  });
  return result;
}

}  // namespace mxflash::reference
