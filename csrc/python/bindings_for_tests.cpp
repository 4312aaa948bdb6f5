#include "python/bindings_for_tests.h"

#include <cstdint>

#include "units/arrivals.h"

namespace py = pybind11;

namespace zero_ext {
namespace {

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

void bind_for_tests(py::module_& m) { bind_arrivals(m); }

}  // namespace zero_ext
