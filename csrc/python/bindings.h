// What the files of bindings share. Everything runs without the GIL, except for getters.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <utility>

namespace zero_ext {

using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// A Python function that any thread may call and drop.
template <typename Result, typename... Arguments>
std::function<Result(Arguments...)> from_any_thread(pybind11::function function) {
  std::shared_ptr<pybind11::function> held(new pybind11::function(std::move(function)),
                                           [](pybind11::function* f) {
                                             const pybind11::gil_scoped_acquire gil;
                                             delete f;
                                           });
  return [held](Arguments... arguments) {
    const pybind11::gil_scoped_acquire gil;
    return (*held)(arguments...).template cast<Result>();
  };
}

void bind_engine(pybind11::module_& m);
void bind_errors(pybind11::module_& m);
void bind_optimizer(pybind11::module_& m);
void bind_for_tests(pybind11::module_& m);

}  // namespace zero_ext
