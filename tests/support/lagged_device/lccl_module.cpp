// The extension module `_lccl`: brings lccl's groups to Python as torch's c10d::Backend.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "lccl.h"

PYBIND11_MODULE(_lccl, module) {
  module.def("make", &lagged::make_lccl, pybind11::arg("wire"), pybind11::arg("timeout"));
}
