// mxflash._native: the library's verbs on arrays of any framework. mxflash/__init__.py is the public side.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

// NOLINTNEXTLINE(misc-use-anonymous-namespace,readability-identifier-naming): the macro's own
NB_MODULE(_native, module) {
  module.attr("__version__") = MXFLASH_VERSION;
  module.def(
      "check_array", [](const mxflash::python::Array&) {}, "TypeError for what DLPack cannot carry",
      mxflash::python::nb::arg("array"));
  mxflash::python::bind_attention(module);
  mxflash::python::bind_cuda(module);
  mxflash::python::bind_quantize(module);
  mxflash::python::bind_lists(module);
  mxflash::python::bind_files(module);
}
