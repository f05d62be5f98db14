// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "nccl/library.h"

namespace py = pybind11;

PYBIND11_MODULE(_nccl, m) {
  m.doc() = "NCCL, as far as it answers without a device.";
  m.def(
      "runtime_version", [] { return fk::nccl::runtime_version(fk::nccl::default_api()); },
      "The version of the library that is loaded, as NCCL counts: 23007 is 2.30.7.");
  m.def("header_version", &fk::nccl::header_version);
  m.def("cuda_version", &fk::nccl::cuda_version);
  m.def(
      "unique_id", [] { return py::bytes(fk::nccl::unique_id(fk::nccl::default_api())); },
      "The 128 bytes by which the ranks of one communicator find each other.");
}
