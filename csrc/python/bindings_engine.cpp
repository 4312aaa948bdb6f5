// The engine: one class, bound facet by facet.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/torch_internals.h"
#include "engine/engine.h"
#include "memory/layout.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace zero_ext {
namespace {

using EngineClass = py::class_<Engine, std::shared_ptr<Engine>>;

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

// Of 1-D tensors that Python made: gloo's threads may be the last to hold them, without the GIL.
Values::Whole whole(std::vector<int64_t> indices, const std::vector<at::Tensor>& into,
                    bool masters) {
  Values::Whole result{.indices = std::move(indices), .into = {}, .masters = masters};
  for (const at::Tensor& each : into) {
    result.into.push_back(over_storage(each.storage(), each.scalar_type(), each.storage_offset(),
                                       each.sizes(), each.strides()));
  }
  return result;
}

// A method of a facet as one of the engine.
template <typename Facet, typename Result, typename... Arguments>
auto of(Facet& (Engine::*facet)(), Result (Facet::*method)(Arguments...)) {
  return [facet, method](Engine& engine, Arguments... arguments) -> Result {
    return ((engine.*facet)().*method)(std::forward<Arguments>(arguments)...);
  };
}

template <typename Facet, typename Result, typename... Arguments>
auto of(Facet& (Engine::*facet)(), Result (Facet::*method)(Arguments...) const) {
  return [facet, method](Engine& engine, Arguments... arguments) -> Result {
    return ((engine.*facet)().*method)(std::forward<Arguments>(arguments)...);
  };
}

void bind_options(py::module_& m) {
  py::enum_<Reduction>(m, "Reduction")
      .value("exchange", Reduction::exchange)
      .value("collective", Reduction::collective);
  py::class_<GatherOptions>(m, "GatherOptions")
      .def_readwrite("prefetch_bytes", &GatherOptions::prefetch_bytes)
      .def_readwrite("prefetch_from_local_peers", &GatherOptions::prefetch_from_local_peers)
      .def_readwrite("retained_bytes", &GatherOptions::retained_bytes);
  py::class_<EngineOptions>(m, "EngineOptions")
      .def(py::init<>())
      .def_readwrite("stage", &EngineOptions::stage)
      .def_property(
          "device", [](const EngineOptions& o) { return o.device; },
          [](EngineOptions& o, const at::Device& device) { o.device = device; })
      .def_readwrite("offload", &EngineOptions::offload)
      .def_readwrite("offload_parameters", &EngineOptions::offload_parameters)
      .def_readwrite("pin_memory", &EngineOptions::pin_memory)
      .def_readwrite("reduce_group", &EngineOptions::reduce_group)
      .def_readwrite("gather_group", &EngineOptions::gather_group)
      .def_readwrite("within_reduce_group", &EngineOptions::within_reduce_group)
      .def_readwrite("within_gather_group", &EngineOptions::within_gather_group)
      .def_readwrite("across_group", &EngineOptions::across_group)
      .def_readwrite("expert_places", &EngineOptions::expert_places)
      .def_readwrite("expert_reduce_group", &EngineOptions::expert_reduce_group)
      .def_readwrite("expert_gather_group", &EngineOptions::expert_gather_group)
      .def_readwrite("timeout_ms", &EngineOptions::timeout_ms)
      .def_readwrite("host", &EngineOptions::host)
      .def_readwrite("reduction", &EngineOptions::reduction)
      .def_readwrite("default_reduction", &EngineOptions::default_reduction)
      .def_readwrite("reduce_dtype", &EngineOptions::reduce_dtype)
      .def_readwrite("host_copies", &EngineOptions::host_copies)
      .def_readwrite("window_bytes", &EngineOptions::window_bytes)
      .def_readwrite("divide_factor", &EngineOptions::divide_factor)
      .def_readwrite("accumulation_steps", &EngineOptions::accumulation_steps)
      .def_readwrite("broadcast", &EngineOptions::broadcast)
      .def_readwrite("limit_bytes", &EngineOptions::limit_bytes)
      .def_readwrite("global_ranks", &EngineOptions::global_ranks)
      .def_readwrite("gather", &EngineOptions::gather);
}

// One-dimensional slots, named by their numbers.
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

// Construction, and where parameters lie.
void bind_construction(EngineClass& engine) {
  engine
      .def(py::init([](EngineOptions options) {
             const py::gil_scoped_release no_gil;  // it waits for the other ranks
             return Engine::create(std::move(options), destroy_without_gil);
           }),
           py::arg("options"))
      .def("begin_shutdown", &Engine::begin_shutdown, NoGil())
      .def_property_readonly("why_sent", &Engine::why_sent)
      .def("add_parameters", &Engine::add_parameters, NoGil())
      .def("add_unit", &Engine::add_unit, NoGil())
      .def("replace_parameter", &Engine::replace_parameter, NoGil())
      .def("set_local", &Engine::set_local, NoGil())
      .def("set_to_local",
           [](Engine& e, py::function f) {
             auto to_local = from_any_thread<at::Tensor, int64_t, const at::Tensor&>(std::move(f));
             const py::gil_scoped_release no_gil;
             e.set_to_local(std::move(to_local));
           })
      .def("set_across_meshes",
           [](Engine& e, py::function f) {
             auto across = from_any_thread<at::Tensor, const at::Tensor&>(std::move(f));
             const py::gil_scoped_release no_gil;
             e.set_across_meshes(std::move(across));
           })
      .def("unfrozen", &Engine::unfrozen, NoGil())
      .def("stats", &Engine::stats, NoGil())
      .def("set_gradient_dtype",  // of the unit of parameter i
           [](Engine& e, int64_t i, at::ScalarType dtype) {
             e.parameters().trainable_home_of(i).set_gradient_dtype(dtype);
           })
      .def_property_readonly("stage", [](const Engine& e) { return e.context().policy.stage; });
}

void bind_layout_of(EngineClass& engine) {
  engine.def("unit_of", [](const Engine& e, int64_t i) { return e.parameters()[i].unit; })
      .def("frozen_unit_of",
           [](const Engine& e, int64_t i) { return e.parameters()[i].frozen_unit; })
      .def("unit_name_of",
           [](const Engine& e, int64_t i) { return e.parameters().home_of(i).name(); })
      .def("parameter_name", [](const Engine& e, int64_t i) { return e.parameters()[i].name; })
      .def("bounds",
           [](const Engine& e, int64_t i) {
             return e.parameters().home_of(i).layout().bounds(e.parameters()[i].slot);
           })
      .def("strides",
           [](const Engine& e, int64_t i) {
             return e.parameters().home_of(i).layout().slot(e.parameters()[i].slot).spec.strides;
           })
      .def("comes_and_goes",
           [](const Engine& e, int64_t i) {
             return e.parameters().home_of(i).parameters().comes_and_goes();
           })
      .def("padded_numel", [](const Engine& e, int64_t u) {
        return e.parameters().unit(u).layout().padded_numel();
      });
}

void bind_forwards(EngineClass& engine) {
  const auto forwards = &Engine::forwards;
  const auto backward = &Engine::backward;
  engine
      .def(
          "add_hook_site",
          [](Engine& e, std::vector<int64_t> units, bool root, bool first, bool last) {
            return e.forwards().add_hook_site(
                {.units = std::move(units), .root = root, .first = first, .last = last});
          },
          py::arg("units"), py::kw_only(), py::arg("root"), py::arg("first"), py::arg("last"),
          NoGil())
      .def("add_inner_site", of(forwards, &Forwards::add_inner_site), NoGil())
      .def("is_recomputed", of(forwards, &Forwards::is_recomputed), NoGil())
      .def("watch_unit",
           [](Engine& e, int64_t u, bool frozen, py::function f) {
             auto watcher = from_any_thread<void, bool, bool>(std::move(f));
             const py::gil_scoped_release no_gil;
             e.forwards().watch_unit(u, frozen, std::move(watcher));
           })
      .def("enter_forward", of(forwards, &Forwards::enter), NoGil())
      .def("leave_forward", of(forwards, &Forwards::leave), NoGil())
      .def("unshard", of(forwards, &Forwards::unshard), py::arg("site") = std::nullopt, NoGil())
      .def("start_gathers", of(forwards, &Forwards::start_gathers), NoGil())
      .def("set_reshard_after_forward", of(forwards, &Forwards::set_reshard_after_forward), NoGil())
      .def("set_reshard_after_backward", of(forwards, &Forwards::set_reshard_after_backward),
           NoGil())
      .def(
          "reshard",
          [](Engine& e, bool keep_writes, std::optional<int64_t> site) {
            e.forwards().reshard(keep_writes ? Writes::keep : Writes::discard, site);
          },
          py::arg("keep_writes"), py::arg("site") = std::nullopt, NoGil())
      .def_property_readonly("releases", of(forwards, &Forwards::releases))
      .def_property_readonly("serves_one_alone", of(forwards, &Forwards::serves_one_alone))
      .def_property_readonly("held_by_user",
                             py::cpp_function(of(forwards, &Forwards::held_by_user), NoGil()))
      .def("release_kept", of(forwards, &Forwards::release_kept), NoGil())
      .def("gathered_units", of(forwards, &Forwards::gathered_units), NoGil())
      .def("wait_for_shards", of(forwards, &Forwards::wait_for_shards), NoGil())
      .def("give_parameters_back", of(forwards, &Forwards::give_parameters_back), NoGil())
      .def("retire", of(backward, &RunningBackward::retire), NoGil())
      .def("before_forward", of(backward, &RunningBackward::before_forward), NoGil())
      .def_property_readonly("backwards", of(backward, &RunningBackward::count));
}

void bind_values(EngineClass& engine) {
  const auto values = &Engine::values;
  engine.def("parameter_slice", of(values, &Values::parameter_slice), NoGil())
      .def(
          "grad_slice", [](const Engine& e, int64_t i) { return e.parameters().grad_slice(i); },
          NoGil())
      .def(
          "master_slice", [](const Engine& e, int64_t i) { return e.parameters().master_slice(i); },
          NoGil())
      .def("current_master", of(values, &Values::current_master), NoGil())
      .def(
          "gather_whole",
          [](Engine& e, std::vector<int64_t> indices, const std::vector<at::Tensor>& into,
             bool masters, bool wanted) {
            return e.values().gather_whole(whole(std::move(indices), into, masters), wanted);
          },
          py::kw_only(), py::arg("indices"), py::arg("into"), py::arg("masters"), py::arg("wanted"),
          NoGil())
      .def(
          "read_whole",
          [](Engine& e, std::vector<int64_t> indices, const std::vector<at::Tensor>& into,
             bool masters) { e.values().read_whole(whole(std::move(indices), into, masters)); },
          py::kw_only(), py::arg("indices"), py::arg("into"), py::arg("masters"), NoGil())
      .def("write_parameter", of(values, &Values::write_parameter), NoGil())
      .def("write_gradient", of(values, &Values::write_gradient), NoGil())
      .def("keep_local_gradients", of(values, &Values::keep_local_gradients), NoGil())
      .def("take_local_gradients", of(values, &Values::take_local_gradients), NoGil())
      .def("set_local_reader",
           [](Engine& e, py::function f) {
             auto reader =
                 from_any_thread<PublishedGradients::Edited, const at::Tensor&>(std::move(f));
             const py::gil_scoped_release no_gil;
             e.values().set_local_reader(std::move(reader));
           })
      .def("set_view_maker",
           [](Engine& e, py::function f) {
             auto maker = from_any_thread<PublishedGradients::Edited, int64_t, const at::Tensor&>(
                 std::move(f));
             const py::gil_scoped_release no_gil;
             e.values().set_view_maker(std::move(maker));
           })
      .def("set_offloaded", of(values, &Values::set_offloaded), NoGil())
      .def("offloaded", of(values, &Values::offloaded), NoGil());
}

void bind_changes(py::module_& m, EngineClass& engine) {
  const auto changes = &Engine::changes;
  py::class_<ChangeToken, std::shared_ptr<ChangeToken>>(m, "ChangeToken");
  py::class_<Change>(m, "Change")
      .def_property_readonly("of_all", [](const Change& c) { return c.numel == Change::kAll; })
      .def_readonly("numel", &Change::numel)
      .def_readonly("digest", &Change::digest);
  engine.def("change_token", of(changes, &Changes::begin), NoGil())
      .def("count_changes", of(changes, &Changes::count), py::arg("since").none(true),
           py::arg("wanted"), NoGil())
      .def(
          "gather_changes",
          [](Engine& e, const std::vector<int64_t>& indices, int64_t count) {
            std::vector<std::pair<at::Tensor, at::Tensor>> gathered;
            for (ChangedValues& each : e.changes().gather(indices, count)) {
              gathered.emplace_back(std::move(each.indices), std::move(each.values));
            }
            return gathered;
          },
          py::arg("parameters"), py::arg("count"), NoGil())
      .def_property_readonly("change_counts", of(changes, &Changes::counted))
      .def_property_readonly("change_bytes",
                             py::cpp_function(of(changes, &Changes::bytes), NoGil()));
}

void bind_steps(EngineClass& engine) {
  const auto steps = &Engine::steps;
  engine.def("push_no_sync", of(steps, &Steps::push_no_sync), NoGil())
      .def("pop_no_sync", of(steps, &Steps::pop_no_sync), NoGil())
      .def_property_readonly("divide_factor", of(steps, &Steps::divide_factor))
      .def_property_readonly("unreduced", of(steps, &Steps::unreduced))
      .def("set_divide_factor", of(steps, &Steps::set_divide_factor), NoGil())
      .def_property_readonly("gradient_divisor", of(steps, &Steps::gradient_divisor))
      .def("set_loss_scale", of(steps, &Steps::set_loss_scale), NoGil())
      .def("check_reduced", of(steps, &Steps::check_reduced), NoGil())
      .def(
          "meet_for_clipping",
          [](Engine& e, const std::vector<int64_t>& indices, bool by_value) {
            e.steps().meet_for_clipping(by_value ? Agreement::clip_value : Agreement::clip,
                                        indices);
          },
          py::arg("indices"), py::kw_only(), py::arg("by_value"), NoGil())
      .def(
          "norm_of_gradients",
          [](Engine& e, const std::vector<int64_t>& indices) {
            return e.steps().clip(indices, HUGE_VAL, Steps::kUnknown);
          },
          NoGil())
      .def("meet_for_unfreezing", of(steps, &Steps::meet_for_unfreezing), NoGil())
      .def("settle", of(steps, &Steps::settle), NoGil())
      .def("zero_grad", of(steps, &Steps::zero_grad), NoGil());
}

}  // namespace

void bind_engine(py::module_& m) {
  m.def("count_before_first_of_ddp", [](const std::vector<at::Tensor>& parameters) {
    const auto is_reduced = [](const at::Tensor& each) { return reduced_by_ddp(each); };
    return std::ranges::find_if(parameters, is_reduced) - parameters.begin();
  });
  bind_options(m);
  bind_layout(m);
  py::enum_<ZeroGrad>(m, "ZeroGrad")
      .value("to_none", ZeroGrad::to_none)
      .value("to_zero", ZeroGrad::to_zero);
  py::enum_<UnitKind>(m, "UnitKind")
      .value("trainable", UnitKind::trainable)
      .value("resident", UnitKind::resident)
      .value("frozen", UnitKind::frozen);
  py::class_<Edits, std::shared_ptr<Edits>>(m, "Edits")
      .def(py::init<>())
      .def_readwrite("digest", &Edits::digest)
      // torch's copies of checkpoints copy all that a tensor has.
      .def(py::pickle(
          [](const Edits& edits) { return py::int_(edits.digest); },
          [](const py::int_& digest) { return std::make_shared<Edits>(Edits{.digest = digest}); }));
  py::class_<Call, std::shared_ptr<Call>>(m, "Call");
  EngineClass engine(m, "Engine");
  bind_construction(engine);
  bind_layout_of(engine);
  bind_forwards(engine);
  bind_values(engine);
  bind_changes(m, engine);
  bind_steps(engine);
}

}  // namespace zero_ext
