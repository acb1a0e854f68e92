#include "audit/perturb.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace mxflash {
namespace {

Tensor copy_of(const TensorView& view) {
  Tensor tensor = Tensor::zeros(view.dtype, {view.tokens(), view.heads(), view.dims()});
  std::int64_t place = 0;
  for (std::int64_t t = 0; t < view.tokens(); ++t) {
    for (std::int64_t h = 0; h < view.heads(); ++h) {
      for (std::int64_t d = 0; d < view.dims(); ++d) tensor.set(place++, view.at(t, h, d));
    }
  }
  return tensor;
}

TensorView view_of(const Tensor& tensor) {
  const std::int64_t heads = tensor.shape[1];
  const std::int64_t dims = tensor.shape[2];
  return {tensor.data.data(), tensor.dtype, {tensor.shape[0], heads, dims}, {heads * dims, dims, 1}};
}

float largest_of(DType dtype) { return dtype == DType::f16 ? 65504.0F : dtype == DType::bf16 ? 3.38e38F : 3.4e38F; }
float smallest_normal_of(DType dtype) { return dtype == DType::f16 ? 0x1p-14F : 0x1p-126F; }

struct Size {
  double rms = 0;
  double largest = 0;
};

Size size_of_values(const Tensor& tensor) {
  Size size;
  std::int64_t finite = 0;
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    const double value = tensor.at(i);
    if (!std::isfinite(value)) continue;
    ++finite;
    size.rms += value * value;
    size.largest = std::max(size.largest, std::fabs(value));
  }
  size.rms = finite == 0 ? 0 : std::sqrt(size.rms / static_cast<double>(finite));
  return size;
}

float changed(float value, const Size& size, DType dtype, Perturbation kind, ProbeRandom& random) {
  const double sign = random.uniform() < 0.5 ? -1.0 : 1.0;
  switch (kind) {
    case Perturbation::resample: return static_cast<float>(size.rms * random.normal());
    case Perturbation::raise: {
      const double raised = 64.0 * static_cast<double>(value);
      return static_cast<float>(std::clamp<double>(raised, -largest_of(dtype), largest_of(dtype)));
    }
    case Perturbation::lower: return 0.0F;
    case Perturbation::denormal: return static_cast<float>(sign) * smallest_normal_of(dtype);
    case Perturbation::outlier:
      return static_cast<float>(sign * std::min<double>(0x1p20 * size.largest, largest_of(dtype)));
  }
  return value;
}

struct Region {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t head_begin = 0;
  std::int64_t head_end = 0;
};

void change(Tensor& tensor, const Region& region, Perturbation kind, ProbeRandom& random) {
  const Size size = size_of_values(tensor);
  const std::int64_t dims = tensor.shape[2];
  for (std::int64_t row = region.row_begin; row < region.row_end; ++row) {
    for (std::int64_t head = region.head_begin; head < region.head_end; ++head) {
      for (std::int64_t d = 0; d < dims; ++d) {
        const std::int64_t place = (row * tensor.shape[1] + head) * dims + d;
        tensor.set(place, changed(tensor.at(place), size, tensor.dtype, kind, random));
      }
    }
  }
}

bool alone(Perturbation kind) { return kind == Perturbation::raise || kind == Perturbation::outlier; }

}  // namespace

std::string to_string(Perturbation perturbation) {
  switch (perturbation) {
    case Perturbation::resample: return "resample";
    case Perturbation::raise: return "raise";
    case Perturbation::lower: return "lower";
    case Perturbation::denormal: return "denormal";
    case Perturbation::outlier: return "outlier";
  }
  return "";
}

std::string_view to_string(Target target) {
  switch (target) {
    case Target::all: return "all";
    case Target::q: return "q";
    case Target::k: return "k";
    case Target::v: return "v";
    case Target::dout: return "do";
  }
  return "";
}

InputTensors InputTensors::copy(const Inputs& inputs) {
  InputTensors tensors{copy_of(inputs.q), copy_of(inputs.k), copy_of(inputs.v), std::nullopt};
  if (inputs.dout) tensors.dout = copy_of(*inputs.dout);
  if (inputs.dlse) tensors.dlse = copy_of(*inputs.dlse);
  return tensors;
}

Inputs InputTensors::inputs() const {
  Inputs inputs{view_of(q), view_of(k), view_of(v), std::nullopt};
  if (dout) inputs.dout = view_of(*dout);
  if (dlse) inputs.dlse = view_of(*dlse);
  return inputs;
}

double ProbeRandom::uniform() { return static_cast<double>(random_bits(seed_, 0x61756469ULL, counter_++)) * 0x1p-32; }

double ProbeRandom::normal() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

void perturb(InputTensors& tensors, const Problem& problem, const Cell& cell, Target target, Perturbation kind,
             ProbeRandom& random) {
  const Document& document = problem.packing.documents()[static_cast<std::size_t>(cell.document)];
  const std::int64_t group = tensors.q.shape[1] / tensors.k.shape[1];
  const std::int64_t key =
      std::clamp<std::int64_t>(cell.query + document.k_length - document.q_length, 0, document.k_length);
  const std::int64_t query_end = alone(kind) ? std::min(cell.query + 1, document.q_length) : document.q_length;
  const std::int64_t key_end = alone(kind) ? std::min(key + 1, document.k_length) : document.k_length;
  const Region queries{document.q_begin + cell.query, document.q_begin + query_end, cell.kv_head * group,
                       (cell.kv_head + 1) * group};
  const Region keys{document.k_begin + key, document.k_begin + key_end, cell.kv_head, cell.kv_head + 1};
  const auto wants = [target](Target one) { return target == Target::all || target == one; };
  if (wants(Target::q)) change(tensors.q, queries, kind, random);
  if (wants(Target::k)) change(tensors.k, keys, kind, random);
  if (wants(Target::v)) change(tensors.v, keys, kind, random);
  if (wants(Target::dout) && tensors.dout) change(*tensors.dout, queries, kind, random);
  if (wants(Target::dout) && tensors.dlse) change(*tensors.dlse, queries, kind, random);
}

void perturb_document(InputTensors& tensors, const Problem& problem, std::int64_t document, Perturbation kind,
                      ProbeRandom& random) {
  const Document& rows = problem.packing.documents()[static_cast<std::size_t>(document)];
  const Region queries{rows.q_begin, rows.q_begin + rows.q_length, 0, tensors.q.shape[1]};
  const Region keys{rows.k_begin, rows.k_begin + rows.k_length, 0, tensors.k.shape[1]};
  change(tensors.q, queries, kind, random);
  change(tensors.k, keys, kind, random);
  change(tensors.v, keys, kind, random);
  if (tensors.dout) change(*tensors.dout, queries, kind, random);
  if (tensors.dlse) change(*tensors.dlse, queries, kind, random);
}

}  // namespace mxflash
