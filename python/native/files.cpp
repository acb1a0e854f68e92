#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "mxflash/safetensors.hpp"

namespace mxflash::python {

namespace {

nb::tuple load(const std::filesystem::path& path, bool numpy) {
  TensorFile file = value_of([&] {
    const nb::gil_scoped_release release;
    return read_safetensors(path);
  }());
  nb::dict tensors;
  nb::dict types;
  for (auto& [name, tensor] : file.tensors) {
    types[name.c_str()] = nb::cast(std::string(name_of(tensor.dtype)));
    tensors[name.c_str()] = give(std::move(tensor), numpy);
  }
  return nb::make_tuple(tensors, types, nb::cast(file.metadata));
}

void save(const std::filesystem::path& path, const nb::dict& tensors,
          const std::map<std::string, std::string>& metadata) {
  TensorFile file;
  file.metadata = metadata;
  for (const auto& [name, array] : tensors) {
    const auto key = nb::cast<std::string>(name);
    file.tensors[key] = copy_of(key, nb::cast<Array>(array));
  }
  const nb::gil_scoped_release release;
  check(write_safetensors(path, file));
}

}  // namespace

void bind_files(nb::module_& module) {
  module.def("load", &load, "(tensors, their safetensors types, metadata)", nb::arg("path"), nb::arg("numpy"));
  module.def("save", &save, "Writes a file whole or not at all", nb::arg("path"), nb::arg("tensors"),
             nb::arg("metadata"));
}

}  // namespace mxflash::python
