// Errors that need Python: Ctrl-C while a thread waits, and what an access to released parameters
// was meant for.
#include <torch/csrc/Exceptions.h>

#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "comm/current_call.h"
#include "comm/interruptible_wait.h"
#include "comm/local/shared_host_transport.h"
#include "core/gil.h"
#include "core/interrupts.h"
#include "core/torch_internals.h"
#include "python/bindings.h"

namespace py = pybind11;

extern PyObject* ParameterClass;  // torch's: tensors of this class are what its profiler reads

namespace zero_ext {
namespace {

// Runs the handlers of the signals that have arrived. Only the main thread can.
void check_signals(unsigned long main_thread) {
  if (PyThread_get_thread_ident() != main_thread || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error raised;  // torch's, which autograd passes on as it is
  raised.persist();
  throw raised;
}

// What `explain(operator)` says of an access to released parameters becomes the error; "" leaves
// the storage's own.
void explain_access(const py::function& explain, const std::string& op) {
  if (Py_IsInitialized() == 0) return;
  std::string text;
  {
    const py::gil_scoped_acquire gil;
    try {
      text = explain(op, is_inside_node()).cast<std::string>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("zero_ext: explaining an access to released parameters");
    }
  }
  TORCH_CHECK(text.empty(), text);
}

}  // namespace

void bind_errors(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (python_error& error) {
      error.restore();
    }
  });
  const auto main_thread =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  set_interrupt_hooks({.check = [main_thread] { check_signals(main_thread); },
                       .is_thrown =
                           [](const std::exception& error) {
                             return dynamic_cast<const python_error*>(&error) != nullptr;
                           }});
  set_gil_hook([] { return PyGILState_Check() != 0; });
  m.def("wait_interruptibly", [](const Message& message) { wait_interruptibly(message); }, NoGil());
  // See current_call.h.
  m.def("enter_call", &enter_call);
  m.def("leave_call", &leave_call);
  m.def("current_call", &current_call);
  m.def("calls_of_local_peers", &SharedHostTransport::calls_of_peers);
  m.def("parameters_after_this_node", &parameters_after_this_node);
  m.def("show_parameters_to_profiler",
        [own = ParameterClass](bool shown) { ParameterClass = shown ? own : nullptr; });
  m.def("explain_released_accesses", [](py::function explain) {
    // Never destroyed: an access may raise while the process exits.
    const auto* kept = new py::function(std::move(explain));
    explain_forbidden_accesses([kept](const std::string& op) { explain_access(*kept, op); });
  });
}

}  // namespace zero_ext
