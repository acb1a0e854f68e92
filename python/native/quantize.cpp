#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "quantize/tensors.hpp"

namespace mxflash::python {

namespace {

struct Request {
  std::string format;
  std::string block;
  std::optional<std::string> scale_rule;
  std::string rounding;
  bool hadamard = false;
  std::uint64_t seed = 0;
  int threads = 0;
  bool numpy = false;  ///< Results as arrays of numpy.
};

Error named(std::string_view argument, const Error& error) {
  return {error.kind, fmt::format("{}: {}", argument, error.message)};
}

template <class T>
T argument(std::string_view name, Result<T> result) {
  if (!result) raise(named(name, result.error()));
  return *std::move(result);
}

QuantizeOptions options_of(const Request& request) {
  QuantizeOptions options;
  Operand& operand = options.operand;
  operand.encoding = argument("format", parse_encoding(request.format));
  if (!operand.quantized()) {
    raise(invalid(fmt::format("format: '{}' given, e4m3, e5m2, e2m3, e3m2, e2m1 or nvfp4 allowed", request.format)));
  }
  operand.block = argument("block", parse_block(request.block));
  if (request.scale_rule && operand.encoding == Encoding::nvfp4) {
    raise(invalid(fmt::format("scale_rule: {} given with nvfp4, None allowed (its scale is E4M3 of maximum / 6)",
                              *request.scale_rule)));
  }
  if (request.scale_rule) operand.rule = argument("scale_rule", parse_scale_rule(*request.scale_rule));
  operand.rounding = argument("rounding", parse_rounding(request.rounding));
  options.hadamard = request.hadamard;
  options.seed = request.seed;
  return options;
}

/// (codes, scales, dequantized)
nb::tuple quantize_array(const Array& x, const std::optional<Array>& cu_seqlens, const Request& request) {
  const TensorView view = view_of("x", x);
  const QuantizeOptions options = options_of(request);
  const Packing packing = packing_of({cu_seqlens, std::nullopt}, view.tokens(), view.tokens());
  const Quantized quantized = value_of([&] {
    const nb::gil_scoped_release release;
    return quantize(view, packing, options, request.threads);
  }());
  QuantizedTensors tensors = tensors_of(quantized, options.operand);
  return nb::make_tuple(give(std::move(tensors.codes), request.numpy), give(std::move(tensors.scales), request.numpy),
                        give(std::move(tensors.dequantized), request.numpy));
}

}  // namespace

void bind_quantize(nb::module_& module) {
  nb::class_<Request>(module, "Request", "How to quantize one tensor.")
      .def(nb::init<>())
      .def_rw("format", &Request::format)
      .def_rw("block", &Request::block)
      .def_rw("scale_rule", &Request::scale_rule, nb::for_setter(nb::arg("scale_rule").none()))
      .def_rw("rounding", &Request::rounding)
      .def_rw("hadamard", &Request::hadamard)
      .def_rw("seed", &Request::seed)
      .def_rw("threads", &Request::threads)
      .def_rw("numpy", &Request::numpy);
  module.def("quantize", &quantize_array, "(codes, scales, dequantized)", nb::arg("x"), nb::arg("cu_seqlens").none(),
             nb::arg("request"));
}

}  // namespace mxflash::python
