// What only tests bind.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zero_ext {

void bind_for_tests(pybind11::module_& m);

}  // namespace zero_ext
