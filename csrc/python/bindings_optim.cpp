// Optimizer states, and what a step finds out.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/kernel_table.h"
#include "kernels/fingerprint.h"
#include "memory/storage.h"
#include "optim/optimizer_state.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace zero_ext {
namespace {

// int64 [tensors, 2], see HashedSegment. Tensors are 1-D in host memory, of elements of 4 bytes.
at::Tensor hash_sums(const std::vector<at::Tensor>& tensors, const std::vector<uint64_t>& keys,
                     const std::vector<uint64_t>& firsts) {
  const at::Tensor sums = at::zeros({std::ssize(tensors), 2}, at::kLong);
  auto* sum = reinterpret_cast<uint64_t*>(sums.mutable_data_ptr<int64_t>());
  std::vector<kernels::HashedSegment> segments;
  for (size_t k = 0; k < tensors.size(); ++k) {
    const at::Tensor& each = tensors[k];
    TORCH_CHECK_VALUE(each.device().is_cpu() && each.is_contiguous() && each.element_size() == 4,
                      "zero_ext: tensor ", k, " is not contiguous 4-byte elements in host memory.");
    segments.push_back(
        {each.const_data_ptr(), each.numel(), keys.at(k), firsts.at(k), sum + 2 * k});
  }
  check(kernels::add_hashes(segments.data(), std::ssize(segments), cpu_launch()), "add_hashes");
  return sums;
}

// The squares of all elements, int64 [kSquareSumLength]; see Note [A norm without an order]. Tensors
// lie on `device`, in a dtype with kernels, and are summed in the order of their memory.
at::Tensor square_sum(const std::vector<at::Tensor>& tensors, const at::Device& device) {
  const c10::DeviceGuard guard(device);
  const KernelTable kernels(device);
  const at::Tensor digits =
      at::zeros({kernels::kSquareSumLength}, at::TensorOptions().dtype(at::kLong).device(device));
  auto* sum = reinterpret_cast<kernels::SquareSum*>(digits.mutable_data_ptr<int64_t>());
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor own = tensor.detach();
    const at::Tensor flat = own.is_non_overlapping_and_dense() ? own.as_strided({own.numel()}, {1})
                                                               : own.contiguous().view({-1});
    const at::Tensor value = flat.to(at::kFloat);
    check(kernels->add_squares(value.const_data_ptr<float>(), value.numel(), sum, kernels.launch()),
          "add_squares");
  }
  return digits;
}

// Its square root, fp32 [].
at::Tensor norm_of(const at::Tensor& square_sum) {
  const c10::DeviceGuard guard(square_sum.device());
  const KernelTable kernels(square_sum.device());
  const at::Tensor norm = at::empty({}, square_sum.options().dtype(at::kFloat));
  const at::Tensor factor = at::empty_like(norm);
  check(kernels->clip_factor(
            reinterpret_cast<const kernels::SquareSum*>(square_sum.const_data_ptr<int64_t>()),
            /*max_norm=*/1, norm.mutable_data_ptr<float>(), factor.mutable_data_ptr<float>(),
            kernels.launch()),
        "clip_factor");
  return norm;
}

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
      .def(py::init<double, double, double, double, double, bool, bool, bool>(), py::kw_only(),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("amsgrad"), py::arg("maximize"), py::arg("decoupled"));
  py::class_<SgdGroup>(m, "SgdGroup")
      .def(py::init<double, double, double, double, bool, bool>(), py::kw_only(), py::arg("lr"),
           py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"),
           py::arg("maximize"));
}

kernels::Moments moments_named(const std::string& name) {
  if (name == "int8") return kernels::Moments::int8;
  if (name == "bf16") return kernels::Moments::bf16;
  TORCH_CHECK_VALUE(name == "fp32", "no moments are stored as '", name, "'");
  return kernels::Moments::f32;
}

void bind_state(py::module_& m) {
  py::class_<OptimizerState>(m, "OptimizerState")
      .def(py::init([](std::shared_ptr<Engine> engine, int64_t states, const std::string& moments) {
             return std::make_unique<OptimizerState>(std::move(engine), states,
                                                     moments_named(moments));
           }),
           py::arg("engine").none(false), py::arg("states"), py::arg("moments") = "fp32")
      .def("assign", &OptimizerState::assign, NoGil())
      .def("slice", &OptimizerState::slice, NoGil())
      .def("scales", &OptimizerState::scales, NoGil())
      .def("step", &OptimizerState::step)
      .def("zero_grad", &OptimizerState::zero_grad, NoGil())
      .def("clip_gradients", &OptimizerState::clip_gradients, NoGil())
      .def(
          "prepare_step",
          [](OptimizerState& state, bool nonfinite, std::optional<double> max_norm,
             int64_t settings, bool foreign, std::optional<double> divide_by) {
            return state.prepare_step({.nonfinite = nonfinite,
                                       .max_norm = max_norm,
                                       .settings = settings,
                                       .foreign = foreign,
                                       .divide_by = divide_by});
          },
          py::kw_only(), py::arg("nonfinite"), py::arg("max_norm"), py::arg("settings"),
          py::arg("foreign"), py::arg("divide_by"), NoGil())
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
  m.def("square_sum", &square_sum, NoGil());
  m.def("norm_of", &norm_of, NoGil());
  m.def("hash_sums", &hash_sums, NoGil());
  // Of each parameter its name, its number of elements, and its unit's number; -1: it is frozen.
  m.def("facts", [](const Engine& engine, const std::vector<int64_t>& indices) {
    const ShardedParameters& all = engine.parameters();
    std::vector<py::tuple> found;
    for (const int64_t i : indices) {
      const int64_t numel = all[i].managed() ? all.home_of(i).layout().slot(all[i].slot).spec.numel
                                             : all[i].local.numel();
      found.push_back(py::make_tuple(all[i].name, numel, all[i].unit));
    }
    return found;
  });
  bind_verdict(m);
  bind_groups(m);
  bind_state(m);
}

}  // namespace zero_ext
