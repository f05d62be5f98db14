// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "The kernels for CPU tensors.";
  m.def("level", [] { return "none"; });
}
