// The Python face of csrc: addresses and streams as integers, so that no torch is compiled in.
#include <pybind11/pybind11.h>

#include "cuda.h"
#include "reshard/table.h"

namespace py = pybind11;
using namespace mcore_rl;

PYBIND11_MODULE(_csrc, m) {
  using Free = py::call_guard<py::gil_scoped_release>;
  m.attr("has_cuda") = has_cuda;
  py::class_<Table>(m, "Table")
      .def(py::init<int64_t, uintptr_t, int64_t>(), Free())
      .def("run", &Table::run, Free())
      .def("run_cuda", &Table::run_cuda, Free())
      .def("simulate_cuda", [](const Table& table) {
        const Moves moves = table.simulate_cuda();
        return py::make_tuple(moves[0], moves[1], moves[2], moves[3], moves[4]);
      })
      .def_property_readonly("num_tiles", &Table::num_tiles)
      .def("words", [](const Table& table) {
        const auto& words = table.words();
        return py::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
      });
}
