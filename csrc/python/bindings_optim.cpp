// Optimizer states, and what a step finds out.
#include <ATen/ops/scalar_tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/storage.h"
#include "optim/optimizer_state.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace zero_ext {
namespace {

void bind_verdict(py::module_& m) {
  py::class_<StepVerdict>(m, "StepVerdict")
      .def_property_readonly("is_settled", &StepVerdict::is_settled)
      .def_property_readonly("norm",
                             [](const StepVerdict& v) {
                               return v.on_device ? v.on_device->norm
                                                  : at::scalar_tensor(v.norm, at::kFloat);
                             })
      .def_readonly("unfrozen", &StepVerdict::unfrozen)
      .def_readonly("backwards", &StepVerdict::backwards)
      .def_readonly("settings_differ", &StepVerdict::settings_differ)
      .def_readonly("nonfinite", &StepVerdict::nonfinite)
      .def_readonly("rank", &StepVerdict::rank)
      .def_readonly("parameter", &StepVerdict::parameter)
      .def_readonly("micro_batch", &StepVerdict::micro_batch);
}

void bind_groups(py::module_& m) {
  py::class_<AdamGroup>(m, "AdamGroup")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay,
                       bool amsgrad, bool maximize, bool decoupled) {
             return AdamGroup{lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("amsgrad"), py::arg("maximize"), py::arg("decoupled"));
  py::class_<SgdGroup>(m, "SgdGroup")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay,
                       bool nesterov, bool maximize) {
             return SgdGroup{lr, momentum, dampening, weight_decay, nesterov, maximize};
           }),
           py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"),
           py::arg("weight_decay"), py::arg("nesterov"), py::arg("maximize"));
}

void bind_state(py::module_& m) {
  py::class_<OptimizerState>(m, "OptimizerState")
      .def(py::init<std::shared_ptr<Engine>, int64_t>(), py::arg("engine").none(false),
           py::arg("states"))
      .def("assign", &OptimizerState::assign, NoGil())
      .def("unassign", &OptimizerState::unassign)
      .def("slice", &OptimizerState::slice, NoGil())
      .def("step", &OptimizerState::step)
      .def_property_readonly("indices", &OptimizerState::indices)
      .def("clip_gradients", &OptimizerState::clip_gradients, NoGil())
      .def(
          "prepare_step",
          [](OptimizerState& state, bool nonfinite, std::optional<double> max_norm,
             int64_t settings, bool foreign) {
            return state.prepare_step({.nonfinite = nonfinite,
                                       .max_norm = max_norm,
                                       .settings = settings,
                                       .foreign = foreign});
          },
          py::kw_only(), py::arg("nonfinite"), py::arg("max_norm"), py::arg("settings"),
          py::arg("foreign"), NoGil())
      .def("apply_adam", &OptimizerState::apply_adam, NoGil(), py::arg("groups"))
      .def("apply_sgd", &OptimizerState::apply_sgd, NoGil(), py::arg("groups"))
      .def("set_offloaded", &OptimizerState::set_offloaded, NoGil())
      .def("apply_masters", &OptimizerState::apply_masters, NoGil());
  m.attr("STATES_OFFLOADED") = kStatesOffloaded;
  py::class_<OffloadedStorage>(m, "OffloadedStorage")
      .def(py::init([](const at::Tensor& tensor, const std::string& message) {
             return OffloadedStorage(tensor.storage(), message);
           }),
           NoGil())
      .def("bring_back", &OffloadedStorage::bring_back, NoGil());
}

}  // namespace

void bind_optimizer(py::module_& m) {
  bind_verdict(m);
  bind_groups(m);
  bind_state(m);
}

}  // namespace zero_ext
