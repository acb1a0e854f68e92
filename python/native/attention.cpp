#include "mxflash/attention.hpp"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "call.hpp"

namespace mxflash::python {

namespace {

std::int64_t bound_of(std::optional<std::int64_t> bound) {
  if (!bound) return Mask::unbounded;
  if (*bound >= -Mask::unbounded && *bound <= Mask::unbounded) return *bound;
  raise(invalid(
      fmt::format("window: {} given, {} to {} or None (no bound) allowed", *bound, -Mask::unbounded, Mask::unbounded)));
}

/// Views into the caller's arrays, which Arguments keeps alive.
struct Call {
  Problem problem;
  Inputs inputs;
};

Call call_of(const Arguments& arguments) {
  Inputs inputs{view_of("q", arguments.q), view_of("k", arguments.k), view_of("v", arguments.v), std::nullopt};
  if (arguments.dout) inputs.dout = view_of("do", *arguments.dout);
  if (arguments.dlse) inputs.dlse = rows_view_of("dlse", *arguments.dlse);
  Problem problem{packing_of(arguments.offsets, inputs.q.tokens(), inputs.k.tokens()), mask_of(arguments),
                  arguments.scale};
  return {std::move(problem), inputs};
}

Options options_of(const Settings& settings) {
  Options options;
  options.engine = settings.engine;
  options.threads = settings.threads;
  options.seed = settings.seed;
  options.deterministic = settings.deterministic;
  return options;
}

nb::tuple give_results(ForwardResult result, bool numpy) {
  return nb::make_tuple(give(std::move(result.o), numpy), give(std::move(result.lse), numpy));
}
nb::tuple give_results(BackwardResult result, bool numpy) {
  return nb::make_tuple(give(std::move(result.dq), numpy), give(std::move(result.dk), numpy),
                        give(std::move(result.dv), numpy));
}

nb::tuple forward(const Arguments& arguments, const Settings& settings) {
  const Call call = call_of(arguments);
  const Recipe recipe = chosen_recipe(settings);
  const Options options = options_of(settings);
  return give_results(value_of(unlocked([&] { return attention_forward(call.problem, recipe, call.inputs, options); })),
                      settings.numpy);
}

nb::tuple backward(const Arguments& arguments, const Settings& settings) {
  const Call call = call_of(arguments);
  const Recipe recipe = chosen_recipe(settings);
  const Options options = options_of(settings);
  return give_results(
      value_of(unlocked([&] { return attention_backward(call.problem, recipe, call.inputs, options); })),
      settings.numpy);
}

nb::tuple float64_forward(const Arguments& arguments, const Settings& settings) {
  const Call call = call_of(arguments);
  const Options options = options_of(settings);
  return give_results(value_of(unlocked([&] { return exact_forward(call.problem, call.inputs, options); })),
                      settings.numpy);
}

nb::tuple float64_backward(const Arguments& arguments, const Settings& settings) {
  const Call call = call_of(arguments);
  const Options options = options_of(settings);
  return give_results(value_of(unlocked([&] { return exact_backward(call.problem, call.inputs, options); })),
                      settings.numpy);
}

}  // namespace

Mask mask_of(const Arguments& arguments) {
  return Mask::window(bound_of(arguments.window.first), bound_of(arguments.window.second));
}

Recipe chosen_recipe(const Settings& settings) {
  Recipe recipe = recipe_of(settings.recipe);
  if (!settings.causality) return recipe;
  return value_of(with_causality(recipe, value_of(parse_causality(*settings.causality))));
}

void bind_attention(nb::module_& module) {
  nb::class_<Arguments>(module, "Arguments", "The arrays of one call; nothing is copied.")
      .def(
          "__init__",
          [](Arguments* self, Array q, Array k, Array v, std::optional<Array> dout, std::optional<Array> dlse) {
            new (self) Arguments{std::move(q),    std::move(k), std::move(v), std::move(dout),
                                 std::move(dlse), {},           {},           std::nullopt};
          },
          nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("do") = nb::none(), nb::arg("dlse") = nb::none())
      .def(
          "documents",
          [](Arguments& self, std::optional<Array> q, std::optional<Array> k) {
            self.offsets = {std::move(q), std::move(k)};
          },
          nb::arg("cu_seqlens_q").none(), nb::arg("cu_seqlens_k").none())
      .def_rw("window", &Arguments::window, nb::for_setter(nb::arg("window")))
      .def_rw("scale", &Arguments::scale, nb::for_setter(nb::arg("scale").none()));
  nb::class_<Settings>(module, "Settings", "What runs, and how.")
      .def(nb::init<>())
      .def_rw("recipe", &Settings::recipe)
      .def_rw("engine", &Settings::engine)
      .def_rw("causality", &Settings::causality, nb::for_setter(nb::arg("causality").none()))
      .def_rw("threads", &Settings::threads)
      .def_rw("seed", &Settings::seed)
      .def_rw("deterministic", &Settings::deterministic)
      .def_rw("numpy", &Settings::numpy);
  module.def("forward", &forward, "(o, lse)", nb::arg("arguments"), nb::arg("settings"));
  module.def("backward", &backward, "(dq, dk, dv)", nb::arg("arguments"), nb::arg("settings"));
  module.def("exact_forward", &float64_forward, "(o, lse) computed in float64, given in float32", nb::arg("arguments"),
             nb::arg("settings"));
  module.def("exact_backward", &float64_backward, "(dq, dk, dv) computed in float64, given in float32",
             nb::arg("arguments"), nb::arg("settings"));
}

}  // namespace mxflash::python
