// What module.cpp puts together, one function a file.
#pragma once

#include "arrays.hpp"
#include "mxflash/recipe.hpp"

namespace mxflash::python {

void bind_attention(nb::module_& module);
void bind_cuda(nb::module_& module);
void bind_files(nb::module_& module);
void bind_lists(nb::module_& module);
void bind_quantize(nb::module_& module);

/// A recipe of the catalogue by name, or one as JSON text.
Recipe recipe_of(const std::string& name_or_json);

}  // namespace mxflash::python
