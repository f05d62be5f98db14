// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "nccl/library.h"

namespace py = pybind11;

PYBIND11_MODULE(_nccl, m) {
  m.doc() = "NCCL, as far as it answers without a device.";
  m.attr("header_version") = fk::nccl::header_version();
  m.attr("cuda_version") = fk::nccl::cuda_version();
  m.def("runtime_version", &fk::nccl::runtime_version);
  m.def("unique_id", [] { return py::bytes(fk::nccl::unique_id()); });
}
