// The Python face of the engine and of optimizer states. Everything runs without the GIL.
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "comm/local/shared_host_transport.h"
#include "device/kernel_table.h"
#include "engine/engine.h"
#include "gather/residency.h"
#include "gather/shutdown_handshake.h"
#include "memory/layout.h"
#include "memory/storage.h"
#include "optim/optimizer_state.h"

namespace py = pybind11;

namespace zero_ext {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// A Python function that may be called, and dropped, on any thread.
template <typename... Arguments>
std::function<at::Tensor(Arguments...)> from_any_thread(py::function function) {
  std::shared_ptr<py::function> held(new py::function(std::move(function)), [](py::function* f) {
    const py::gil_scoped_acquire gil;
    delete f;
  });
  return [held](Arguments... arguments) {
    const py::gil_scoped_acquire gil;
    return (*held)(arguments...).template cast<at::Tensor>();
  };
}

// For tests: one-dimensional slots named by their number.
Layout make_layout(const std::vector<int64_t>& numels, int64_t ranges, int64_t alignment) {
  std::vector<SlotSpec> specs;
  for (const int64_t numel : numels) {
    specs.push_back(
        {.name = std::to_string(specs.size()), .sizes = {numel}, .strides = {1}, .numel = numel});
  }
  return {std::move(specs), ranges, alignment};
}

void bind_layout(py::module_& m) {
  py::class_<Slot>(m, "Slot")
      .def_readonly("offset", &Slot::offset)
      .def_readonly("padded_numel", &Slot::padded_numel)
      .def_property_readonly("numel", [](const Slot& slot) { return slot.spec.numel; });
  py::class_<Piece>(m, "Piece")
      .def_readonly("range", &Piece::range)
      .def_readonly("range_begin", &Piece::range_begin)
      .def_readonly("slot_begin", &Piece::slot_begin)
      .def_readonly("numel", &Piece::numel)
      .def_readonly("gap_numel", &Piece::gap_numel);
  py::class_<Layout>(m, "Layout")
      .def(py::init(&make_layout), py::arg("numels"), py::kw_only(), py::arg("ranges"),
           py::arg("alignment"))
      .def("slot", &Layout::slot, py::return_value_policy::reference_internal)
      .def("pieces",
           [](const Layout& layout, int64_t i) {
             const auto pieces = layout.pieces(i);
             return std::vector<Piece>(pieces.begin(), pieces.end());
           })
      .def("bounds", &Layout::bounds)
      .def("range_begin", &Layout::range_begin)
      .def_property_readonly("size", &Layout::size)
      .def_property_readonly("ranges", &Layout::ranges)
      .def_property_readonly("range_numel", &Layout::range_numel)
      .def_property_readonly("padded_numel", &Layout::padded_numel);
}

// A process group's destructor joins gloo's threads, and these may be waiting for the GIL: the last
// reference to a collective's work may be theirs, with a Python context in it that torch put there.
void destroy_without_gil(Engine* engine) {
  if (PyGILState_Check() == 0) {
    delete engine;
    return;
  }
  const py::gil_scoped_release no_gil;
  delete engine;
}

void bind_residency(py::module_& m) {
  py::enum_<Residency>(m, "Residency")
      .value("released", Residency::released)
      .value("gathering", Residency::gathering)
      .value("gathered", Residency::gathered);
  py::enum_<ResidencyEvent>(m, "ResidencyEvent")
      .value("prefetch", ResidencyEvent::prefetch)
      .value("enter_forward", ResidencyEvent::enter_forward)
      .value("leave_forward", ResidencyEvent::leave_forward)
      .value("enter_backward", ResidencyEvent::enter_backward)
      .value("leave_backward", ResidencyEvent::leave_backward)
      .value("gradient", ResidencyEvent::gradient)
      .value("backward_ended", ResidencyEvent::backward_ended)
      .value("hold", ResidencyEvent::hold)
      .value("drop", ResidencyEvent::drop)
      .value("step", ResidencyEvent::step)
      .value("reset", ResidencyEvent::reset);
  py::enum_<ResidencyAction>(m, "ResidencyAction")
      .value("none", ResidencyAction::none)
      .value("start", ResidencyAction::start)
      .value("gather", ResidencyAction::gather)
      .value("wait", ResidencyAction::wait)
      .value("release", ResidencyAction::release)
      .value("error", ResidencyAction::error);
  py::class_<Holds>(m, "Holds")
      .def(py::init([](int32_t forward, int32_t calls, bool graph, bool escaped, bool user,
                       bool permanent) {
             return Holds{forward, calls, graph, escaped, user, permanent};
           }),
           py::kw_only(), py::arg("forward") = 0, py::arg("calls") = 0, py::arg("graph") = false,
           py::arg("escaped") = false, py::arg("user") = false, py::arg("permanent") = false)
      .def_readonly("forward", &Holds::forward)
      .def_readonly("calls", &Holds::calls)
      .def_readonly("graph", &Holds::graph)
      .def_readonly("escaped", &Holds::escaped)
      .def_readonly("user", &Holds::user)
      .def_readonly("permanent", &Holds::permanent);
  m.def(
      "transition",
      [](Residency state, const Holds& holds, ResidencyEvent event, bool keep, bool escapes,
         bool expected, bool graph_kept, bool may_retain) {
        const Transition next =
            transition(state, holds, event, {keep, escapes, expected, graph_kept, may_retain});
        return std::make_tuple(next.state, next.holds, next.action);
      },
      py::arg("state"), py::arg("holds"), py::arg("event"), py::kw_only(), py::arg("keep") = false,
      py::arg("escapes") = false, py::arg("expected") = false, py::arg("graph_kept") = false,
      py::arg("may_retain") = true);
}

// For tests.
void bind_shared_host_transport(py::module_& m) {
  py::class_<SharedHostTransport, std::shared_ptr<SharedHostTransport>>(m, "SharedHostTransport")
      .def_static(
          "connect",
          [](int64_t rank, int64_t world, int64_t timeout_ms, bool allowed,
             py::function all_gather) {
            return SharedHostTransport::connect(
                rank, world, std::chrono::milliseconds(timeout_ms), allowed,
                from_any_thread<const at::Tensor&>(std::move(all_gather)));
          },
          py::arg("rank"), py::arg("world"), py::kw_only(), py::arg("timeout_ms"),
          py::arg("allowed"), py::arg("all_gather"))
      .def("reaches", &SharedHostTransport::reaches)
      .def(
          "send",
          [](SharedHostTransport& memory, const at::Tensor& tensor, int64_t to, int64_t tag,
             int64_t epoch) {
            return memory.send(tensor, to, {SharedHostTransport::Kind::gather, tag, epoch});
          },
          NoGil(), py::arg("tensor"), py::arg("to"), py::arg("tag"),
          py::arg("epoch") = SharedHostTransport::kNoEpoch)
      .def(
          "receive",
          [](SharedHostTransport& memory, const at::Tensor& into, int64_t from, int64_t tag,
             int64_t epoch) {
            return memory.receive(into, from, {SharedHostTransport::Kind::gather, tag, epoch});
          },
          NoGil(), py::arg("into"), py::arg("from_rank"), py::arg("tag"),
          py::arg("epoch") = SharedHostTransport::kNoEpoch)
      .def(
          "post",
          [](SharedHostTransport& memory, const at::Tensor& tensor, int64_t to, int64_t tag) {
            return memory.post(tensor, to, {SharedHostTransport::Kind::gather, tag});
          },
          NoGil(), py::arg("tensor"), py::arg("to"), py::arg("tag"))
      .def(
          "next_epoch",
          [](SharedHostTransport& memory, int64_t last) {
            return memory.next_epoch(SharedHostTransport::Kind::gather, last);
          },
          NoGil(), py::arg("last"))
      .def(
          "abandon_epoch",
          [](SharedHostTransport& memory, int64_t epoch) {
            memory.leave_epoch(SharedHostTransport::Kind::gather, epoch,
                               SharedHostTransport::Exit::abandoned);
          },
          NoGil(), py::arg("epoch"));
}

void bind_engine(py::module_& m) {
  py::enum_<Reduction>(m, "Reduction")
      .value("exchange", Reduction::exchange)
      .value("collective", Reduction::collective);
  py::enum_<Engine::ZeroGrad>(m, "ZeroGrad")
      .value("to_none", Engine::ZeroGrad::to_none)
      .value("to_zero", Engine::ZeroGrad::to_zero);
  py::enum_<UnitKind>(m, "UnitKind")
      .value("trainable", UnitKind::trainable)
      .value("frozen", UnitKind::frozen);
  py::class_<GatherOptions>(m, "GatherOptions")
      .def_readwrite("prefetch_bytes", &GatherOptions::prefetch_bytes)
      .def_readwrite("prefetch_from_local_peers", &GatherOptions::prefetch_from_local_peers)
      .def_readwrite("retained_bytes", &GatherOptions::retained_bytes)
      .def_readwrite("reshard_after_forward", &GatherOptions::reshard_after_forward);
  py::class_<Call, std::shared_ptr<Call>>(m, "Call");
  py::class_<EngineOptions>(m, "EngineOptions")
      .def(py::init<>())
      .def_readwrite("stage", &EngineOptions::stage)
      .def_property(
          "device", [](const EngineOptions& o) { return o.device; },
          [](EngineOptions& o, const at::Device& device) { o.device = device; })
      .def_readwrite("offload", &EngineOptions::offload)
      .def_readwrite("pin_memory", &EngineOptions::pin_memory)
      .def_readwrite("reduce_group", &EngineOptions::reduce_group)
      .def_readwrite("gather_group", &EngineOptions::gather_group)
      .def_readwrite("within_reduce_group", &EngineOptions::within_reduce_group)
      .def_readwrite("within_gather_group", &EngineOptions::within_gather_group)
      .def_readwrite("across_group", &EngineOptions::across_group)
      .def_readwrite("timeout_ms", &EngineOptions::timeout_ms)
      .def_readwrite("shared_host_transport", &EngineOptions::shared_host_transport)
      .def_readwrite("reduction", &EngineOptions::reduction)
      .def_readwrite("reduce_dtype", &EngineOptions::reduce_dtype)
      .def_readwrite("divide_factor", &EngineOptions::divide_factor)
      .def_readwrite("accumulation_steps", &EngineOptions::accumulation_steps)
      .def_readwrite("broadcast", &EngineOptions::broadcast)
      .def_readwrite("limit_bytes", &EngineOptions::limit_bytes)
      .def_readwrite("global_ranks", &EngineOptions::global_ranks)
      .def_readwrite("gather", &EngineOptions::gather);
  py::class_<StepVerdict>(m, "StepVerdict")
      .def_property_readonly("is_settled", &StepVerdict::is_settled)
      .def_property_readonly("norm",
                             [](const StepVerdict& v) {
                               return v.on_device ? v.on_device->norm
                                                  : at::scalar_tensor(v.norm, at::kFloat);
                             })
      .def_property_readonly("factor",
                             [](const StepVerdict& v) {
                               return v.on_device ? v.on_device->factor
                                                  : at::scalar_tensor(v.factor, at::kFloat);
                             })
      .def_readonly("settings_differ", &StepVerdict::settings_differ)
      .def_readonly("nonfinite", &StepVerdict::nonfinite)
      .def_readonly("rank", &StepVerdict::rank)
      .def_readonly("parameter", &StepVerdict::parameter)
      .def_readonly("micro_batch", &StepVerdict::micro_batch);
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](EngineOptions options) {
             const py::gil_scoped_release no_gil;  // it waits for the other ranks
             return Engine::create(std::move(options), destroy_without_gil);
           }),
           py::arg("options"))
      .def("begin_shutdown", &Engine::begin_shutdown, NoGil())
      .def("add_parameters", &Engine::add_parameters, NoGil())
      .def("add_unit", &Engine::add_unit, NoGil())
      .def("replace_parameter", &Engine::replace_parameter, NoGil())
      .def(
          "add_hook_site",
          [](Engine& e, std::vector<int64_t> units, bool root, bool first, bool last) {
            return e.add_hook_site({std::move(units), root, first, last});
          },
          py::arg("units"), py::kw_only(), py::arg("root"), py::arg("first"), py::arg("last"))
      .def("enter_forward", &Engine::enter_forward, NoGil())
      .def("leave_forward", &Engine::leave_forward, NoGil())
      .def("unshard", &Engine::unshard, NoGil())
      .def(
          "reshard",
          [](Engine& e, bool keep_writes) {
            e.reshard(keep_writes ? Writes::keep : Writes::discard);
          },
          py::arg("keep_writes"), NoGil())
      .def_property_readonly("serves_one_alone", &Engine::serves_one_alone)
      .def_property_readonly("held_by_user", py::cpp_function(&Engine::held_by_user, NoGil()))
      .def("wait_for_shards", &Engine::wait_for_shards, NoGil())
      .def("gathered_units", &Engine::gathered_units, NoGil())
      .def("set_gradient_dtype",
           [](Engine& e, int64_t u, at::ScalarType dtype) {
             e.parameters().unit(u).set_gradient_dtype(dtype);
           })
      .def_property_readonly("world", &Engine::world)
      .def_property_readonly("stage", [](const Engine& e) { return e.policy().stage; })
      .def_property_readonly("unit_count",
                             [](const Engine& e) { return e.parameters().unit_count(); })
      .def_property_readonly("backwards", &Engine::backwards)
      .def("unit_of", [](const Engine& e, int64_t i) { return e.parameters()[i].unit; })
      .def("parameter_name", [](const Engine& e, int64_t i) { return e.parameters()[i].name; })
      .def("frozen_unit_of",
           [](const Engine& e, int64_t i) { return e.parameters()[i].frozen_unit; })
      .def("parameter_slice", &Engine::parameter_slice, NoGil())
      .def_property_readonly("releases", &Engine::releases)
      .def("bounds",
           [](const Engine& e, int64_t i) {
             return e.parameters().home_of(i).layout().bounds(e.parameters()[i].slot);
           })
      .def("strides",
           [](const Engine& e, int64_t i) {
             return e.parameters().home_of(i).layout().slot(e.parameters()[i].slot).spec.strides;
           })
      .def("unit_name", [](const Engine& e, int64_t u) { return e.parameters().unit(u).name(); })
      .def("give_parameters_back", &Engine::give_parameters_back, NoGil())
      .def("comes_and_goes",
           [](const Engine& e, int64_t i) {
             return e.parameters().home_of(i).parameters().comes_and_goes();
           })
      .def("unit_name_of",
           [](const Engine& e, int64_t i) { return e.parameters().home_of(i).name(); })
      .def("padded_numel", [](const Engine& e,
                              int64_t u) { return e.parameters().unit(u).layout().padded_numel(); })
      .def("range_numel",
           [](const Engine& e, int64_t u) { return e.parameters().unit(u).layout().range_numel(); })
      .def(
          "grad_slice", [](const Engine& e, int64_t i) { return e.parameters().grad_slice(i); },
          NoGil())
      .def(
          "master_slice", [](const Engine& e, int64_t i) { return e.parameters().master_slice(i); },
          NoGil())
      .def("make_published", &Engine::make_published, NoGil())
      .def("set_local_reader",
           [](Engine& e, py::function f) {
             e.set_local_reader(from_any_thread<const at::Tensor&>(std::move(f)));
           })
      .def("set_view_maker",
           [](Engine& e, py::function f) {
             e.set_view_maker(from_any_thread<int64_t, const at::Tensor&>(std::move(f)));
           })
      .def("push_no_sync", &Engine::push_no_sync, NoGil())
      .def("pop_no_sync", &Engine::pop_no_sync, NoGil())
      .def("set_accumulation_steps", &Engine::set_accumulation_steps, NoGil())
      .def_property_readonly("divide_factor", &Engine::divide_factor)
      .def_property_readonly("gradient_divisor", &Engine::gradient_divisor)
      .def("set_divide_factor", &Engine::set_divide_factor, NoGil())
      .def("set_offloaded", &Engine::set_offloaded, NoGil())
      .def("offloaded", &Engine::offloaded, NoGil())
      .def("set_loss_scale", &Engine::set_loss_scale, NoGil())
      .def("write_gradient", &Engine::write_gradient, NoGil())
      .def("current_master", &Engine::current_master, NoGil())
      .def("write_parameter", &Engine::write_parameter, NoGil())
      .def("before_forward", &Engine::before_forward, NoGil())
      .def("unfrozen", &Engine::unfrozen, NoGil())
      .def("adopt_writes", &Engine::adopt_writes, NoGil())
      .def("settle", &Engine::settle, NoGil())
      .def("scale_gradients", &Engine::scale_gradients, NoGil())
      .def("zero_grad", &Engine::zero_grad, NoGil())
      .def("stats", &Engine::stats, NoGil());
}

void bind_optimizer(py::module_& m) {
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
  py::class_<OptimizerState>(m, "OptimizerState")
      .def(py::init<std::shared_ptr<Engine>, int64_t>())
      .def("assign", &OptimizerState::assign, NoGil())
      .def("unassign", &OptimizerState::unassign)
      .def("slice", &OptimizerState::slice, NoGil())
      .def("step", &OptimizerState::step)
      .def_property_readonly("indices", &OptimizerState::indices)
      .def("clip_gradients", &OptimizerState::clip_gradients, NoGil())
      .def(
          "prepare_step",
          [](OptimizerState& state, bool nonfinite, std::optional<double> max_norm,
             int64_t settings) {
            return state.prepare_step(
                {.nonfinite = nonfinite, .max_norm = max_norm, .settings = settings});
          },
          py::kw_only(), py::arg("nonfinite"), py::arg("max_norm"), py::arg("settings"), NoGil())
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
}  // namespace zero_ext

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("has_kernels_on",
        [](const at::Device& device) { return zero_ext::has_kernels_on(device.type()); });
  // For a device that this package does not know: the address of its zero_ext::kernels::Kernels.
  m.def("set_kernels", [](const at::Device& device, uintptr_t table) {
    zero_ext::set_kernels(device.type(),
                          reinterpret_cast<const zero_ext::kernels::Kernels*>(table));
  });
  m.def("cpu_instruction_set", &zero_ext::kernels::cpu_instruction_set);
  m.def("reduced_by_ddp", &zero_ext::reduced_by_ddp);
  m.def(
      "wait_for_shutdowns",
      [](double seconds) {
        zero_ext::wait_for_shutdowns(
            std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)));
      },
      py::arg("seconds"), zero_ext::NoGil());
  m.def("broadcast_parts", &zero_ext::broadcast_parts, zero_ext::NoGil());
  // For tests: calls of modules that a graph still leads back into.
  m.def("living_calls", &zero_ext::Call::living);
  // For tests: digits of a sum of squares, and what they are worth.
  m.def("square_digits", [](const at::Tensor& value) {
    const c10::DeviceGuard guard(value.device());
    const at::Tensor digits =
        at::zeros({zero_ext::kernels::kSquareSumLength}, value.options().dtype(at::kLong));
    auto* sum = reinterpret_cast<zero_ext::kernels::SquareSum*>(digits.mutable_data_ptr<int64_t>());
    zero_ext::check(zero_ext::kernels_on(value.device().type())
                        .add_squares(value.const_data_ptr<float>(), value.numel(), sum,
                                     zero_ext::launch_on(value.device())),
                    "add_squares");
    const at::Tensor here = digits.cpu();
    zero_ext::kernels::SquareSum result{};
    std::copy_n(here.const_data_ptr<int64_t>(), result.size(), result.data());
    return result;
  });
  m.def("value_of_digits", &zero_ext::kernels::value_of);
  zero_ext::bind_layout(m);
  zero_ext::bind_residency(m);
  zero_ext::bind_shared_host_transport(m);
  zero_ext::bind_engine(m);
  zero_ext::bind_optimizer(m);
}
