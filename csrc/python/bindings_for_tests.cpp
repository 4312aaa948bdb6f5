// What only tests and zero_ext.doctor call: parts of the engine alone.
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <vector>

#include "autograd/call.h"
#include "comm/host_routes.h"
#include "comm/local/shared_host_transport.h"
#include "core/gil.h"
#include "device/kernel_table.h"
#include "gather/pass_order.h"
#include "gather/residency.h"
#include "python/bindings.h"
#include "units/arrivals.h"

namespace py = pybind11;

namespace zero_ext {
namespace {

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

void bind_pass_order(py::module_& m) {
  py::enum_<Pass>(m, "Pass").value("forward", Pass::forward).value("backward", Pass::backward);
  py::class_<PassOrder>(m, "PassOrder")
      .def(py::init<>())
      .def("begin", &PassOrder::begin)
      .def("enter", &PassOrder::enter)
      .def("end", &PassOrder::end)
      .def("upcoming",
           [](const PassOrder& order, Pass pass) {
             const auto units = order.upcoming(pass);
             return std::vector<int64_t>(units.begin(), units.end());
           })
      .def("ends_forward", &PassOrder::ends_forward)
      .def("forget", &PassOrder::forget);
}

void bind_host_routes(py::module_& m) {
  py::class_<HostRoutes>(m, "HostRoutes")
      .def(py::init<std::vector<int64_t>>(), py::arg("hosts"))
      .def("source", &HostRoutes::source, py::arg("start"), py::arg("to"));
}

void bind_shared_host_transport(py::module_& m) {
  py::class_<SharedHostTransport, std::shared_ptr<SharedHostTransport>>(m, "SharedHostTransport")
      .def_static(
          "connect",
          [](int64_t rank, int64_t world, int64_t timeout_ms, int64_t host,
             py::function all_gather) {
            auto made = SharedHostTransport::connect(
                rank, world, std::chrono::milliseconds(timeout_ms), host,
                from_any_thread<at::Tensor, const at::Tensor&>(std::move(all_gather)));
            return made->reaches_any() ? made : nullptr;
          },
          py::arg("rank"), py::arg("world"), py::kw_only(), py::arg("timeout_ms"), py::arg("host"),
          py::arg("all_gather"))
      .def("reaches", &SharedHostTransport::reaches)
      .def("close", &SharedHostTransport::close)
      .def_static("processes_may_read", [] { return linux_calls::ReadsWithinTheLaunch::count(); })
      .def(
          "send",
          [](SharedHostTransport& memory, const at::Tensor& tensor, int64_t to, int64_t tag,
             int64_t epoch) { return memory.send(tensor, to, {MessageKind::gather, tag, epoch}); },
          NoGil(), py::arg("tensor"), py::arg("to"), py::arg("tag"), py::arg("epoch") = kNoEpoch)
      .def(
          "receive",
          [](SharedHostTransport& memory, const at::Tensor& into, int64_t from, int64_t tag,
             int64_t epoch) {
            return memory.receive(into, from, {MessageKind::gather, tag, epoch});
          },
          NoGil(), py::arg("into"), py::arg("from_rank"), py::arg("tag"),
          py::arg("epoch") = kNoEpoch)
      .def(
          "post",
          [](SharedHostTransport& memory, const at::Tensor& tensor, int64_t to, int64_t tag) {
            return memory.post(tensor, to, {MessageKind::gather, tag});
          },
          NoGil(), py::arg("tensor"), py::arg("to"), py::arg("tag"))
      .def_static(
          "withdraw", [](const Message& sent) { SharedHostTransport::withdraw(*sent); }, NoGil(),
          py::arg("sent"))
      .def("announced", &SharedHostTransport::announced, NoGil(), py::arg("by"))
      .def(
          "next_epoch",
          [](SharedHostTransport& memory, int64_t last) {
            return memory.next_epoch(MessageKind::gather, last);
          },
          NoGil(), py::arg("last"))
      .def(
          "abandon_epoch",
          [](SharedHostTransport& memory, int64_t epoch) {
            memory.leave_epoch(MessageKind::gather, epoch, EpochExit::abandoned);
          },
          NoGil(), py::arg("epoch"));
}

// Calls of modules that a graph still leads back into; the digits of a sum of squares, and their
// value.
void bind_functions(py::module_& m) {
  m.def("living_calls", &Call::living);
  m.def("square_digits", [](const at::Tensor& value) {
    const c10::DeviceGuard guard(value.device());
    const at::Tensor digits =
        at::zeros({kernels::kSquareSumLength}, value.options().dtype(at::kLong));
    auto* sum = reinterpret_cast<kernels::SquareSum*>(digits.mutable_data_ptr<int64_t>());
    check(kernels_on(value.device().type())
              .add_squares(value.const_data_ptr<float>(), value.numel(), sum,
                           launch_on(value.device())),
          "add_squares");
    const at::Tensor here = digits.cpu();
    kernels::SquareSum result{};
    std::copy_n(here.const_data_ptr<int64_t>(), result.size(), result.data());
    return result;
  });
  m.def("value_of_digits", &kernels::value_of);
  m.def(
      "take_owned_mutex",
      [](bool release_gil, bool twice) {
        std::optional<py::gil_scoped_release> no_gil;
        if (release_gil) no_gil.emplace();
        OwnedMutex mutex(0);
        const std::lock_guard lock(mutex);
        if (twice) const std::lock_guard again(mutex);
      },
      py::kw_only(), py::arg("release_gil"), py::arg("twice"));
}

void bind_arrivals(py::module_& m) {
  py::class_<Arrivals>(m, "Arrivals")
      .def(py::init<int64_t>(), py::arg("slots"))
      .def("begin", &Arrivals::begin)
      .def("await_hidden", &Arrivals::await_hidden)
      .def("reach", &Arrivals::reach)
      .def("fill", &Arrivals::fill)
      .def("leave_module", &Arrivals::leave_module)
      .def("start_reduction", &Arrivals::start_reduction)
      .def("reopen_for_late_gradients", &Arrivals::reopen_for_late_gradients)
      .def("close", &Arrivals::close)
      .def("remember", &Arrivals::remember)
      .def_property_readonly("complete", &Arrivals::complete)
      .def_property_readonly("expects_any", &Arrivals::expects_any)
      .def("has_gradient", &Arrivals::has_gradient)
      .def_property_readonly("reduced", &Arrivals::reduced)
      .def_property_readonly("late", &Arrivals::late);
}

}  // namespace

void bind_for_tests(py::module_& m) {
  bind_residency(m);
  bind_arrivals(m);
  bind_pass_order(m);
  bind_host_routes(m);
  bind_shared_host_transport(m);
  bind_functions(m);
}

}  // namespace zero_ext
