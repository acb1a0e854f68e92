#include "mxflash/audit.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <nlohmann/json.hpp>

#include "bindings.hpp"
#include "problem.hpp"

namespace mxflash::python {

namespace {

using Json = nlohmann::ordered_json;

/// A copy that Python owns: the probe's own arrays go when it ends, and whoever is audited may keep what it got.
nb::object give_copy(const TensorView& view, bool numpy) {
  Tensor tensor = Tensor::uninitialized(view.dtype, {view.shape[0], view.shape[1], view.shape[2]});
  std::int64_t index = 0;
  for (std::int64_t token = 0; token < view.shape[0]; ++token) {
    for (std::int64_t head = 0; head < view.shape[1]; ++head) {
      for (std::int64_t dim = 0; dim < view.shape[2]; ++dim) tensor.set(index++, view.at(token, head, dim));
    }
  }
  return give(std::move(tensor), numpy);
}

Tensor offsets_tensor(const Packing& packing, std::int64_t Document::* begin, std::int64_t total) {
  const auto& documents = packing.documents();
  Tensor tensor = Tensor::uninitialized(DType::i32, {static_cast<std::int64_t>(documents.size()) + 1});
  auto* out = reinterpret_cast<std::int32_t*>(tensor.data.data());
  for (const Document& document : documents) *out++ = static_cast<std::int32_t>(document.*begin);
  *out = static_cast<std::int32_t>(total);
  return tensor;
}

/// What was audited answers for the shapes that the probes compare.
Tensor result_of(std::string_view name, const nb::handle& given, const std::vector<std::int64_t>& shape) {
  Tensor tensor = copy_of(name, nb::cast<Array>(given));
  if (!is_floating(tensor.dtype)) {
    raise(invalid(
        fmt::format("{}: the function gave type {}, a floating-point type allowed", name, name_of(tensor.dtype))));
  }
  if (tensor.shape != shape) {
    raise(invalid(fmt::format("{}: the function gave shape [{}], [{}] allowed", name, fmt::join(tensor.shape, ", "),
                              fmt::join(shape, ", "))));
  }
  return tensor;
}

/// `function(q, k, v, do or None, cu_seqlens_q, cu_seqlens_k)` gives (o, lse, dq, dk, dv); lse and the gradients may be
/// None.
AttentionFunction attention_of(const nb::callable& function, bool numpy) {
  return [function, numpy](const Problem& problem, const Inputs& inputs) -> Result<AttentionOutputs> {
    const Packing& packing = problem.packing;
    const nb::object dout = inputs.dout ? give_copy(*inputs.dout, numpy) : nb::none();
    const nb::tuple out =
        nb::cast<nb::tuple>(function(give_copy(inputs.q, numpy), give_copy(inputs.k, numpy), give_copy(inputs.v, numpy),
                                     dout, give(offsets_tensor(packing, &Document::q_begin, packing.tokens_q()), false),
                                     give(offsets_tensor(packing, &Document::k_begin, packing.tokens_k()), false)));
    const std::int64_t tokens = inputs.q.tokens();
    const std::int64_t heads = inputs.q.heads();
    const auto shape_of = [](const TensorView& view) {
      return std::vector<std::int64_t>(view.shape.begin(), view.shape.end());
    };
    AttentionOutputs outputs;
    outputs.o = result_of("o", out[0], {tokens, heads, inputs.v.dims()});
    outputs.lse =
        out[1].is_none() ? Tensor::zeros(DType::f32, {tokens, heads}) : result_of("lse", out[1], {tokens, heads});
    if (inputs.dout && !out[2].is_none()) {
      outputs.gradients.emplace();
      outputs.gradients->dq = result_of("dq", out[2], shape_of(inputs.q));
      outputs.gradients->dk = result_of("dk", out[3], shape_of(inputs.k));
      outputs.gradients->dv = result_of("dv", out[4], shape_of(inputs.v));
    }
    return outputs;
  };
}

Json leak_json(const Leak& leak) {
  return {{"document", leak.document},
          {"head", leak.head},
          {"position", leak.position},
          {"perturbed", leak.perturbed},
          {"tensor", leak.tensor},
          {"output", leak.output},
          {"perturbation", to_string(leak.perturbation)},
          {"change", leak.change}};
}

Json summary_json(const LeakSummary& summary) {
  Json examples = Json::array();
  for (const Leak& leak : summary.examples) examples.push_back(leak_json(leak));
  return {{"probes", summary.probes},
          {"leaks", summary.leaks},
          {"max_relative_change", summary.max_relative_change},
          {"reach_tokens", summary.reach_tokens},
          {"worst", summary.leaks > 0 ? leak_json(summary.worst) : Json()},
          {"examples", examples}};
}

std::string audit_json(const nb::callable& function, const Arguments& arguments, const AuditOptions& options,
                       bool numpy) {
  const Call call = call_of(arguments);
  const AuditReport report =
      value_of(audit(attention_of(function, numpy), Claims{}, call.problem, call.inputs, options));
  return Json({{"has_backward", report.has_backward},
               {"forward", summary_json(report.forward)},
               {"backward", summary_json(report.backward)},
               {"documents", summary_json(report.documents)},
               {"deterministic", report.deterministic},
               {"row_sum_error", report.row_sum_error}})
      .dump();
}

}  // namespace

void bind_audit(nb::module_& module) {
  nb::class_<AuditOptions>(module, "AuditOptions", "How much to probe.")
      .def(nb::init<>())
      .def_rw("probes", &AuditOptions::probes)
      .def_rw("seed", &AuditOptions::seed)
      .def_prop_rw(
          "progress", [](const AuditOptions&) { return nb::none(); },
          [](AuditOptions& self, nb::object progress) {
            self.progress = nullptr;
            if (!progress.is_none()) self.progress = [progress](double done) { progress(done); };
          },
          nb::for_setter(nb::arg("progress").none()));
  module.def("audit", &audit_json, "The probes of `mxflash audit` on a Python function, as JSON text",
             nb::arg("function"), nb::arg("arguments"), nb::arg("options"), nb::arg("numpy"));
}

}  // namespace mxflash::python
