// SPDX-License-Identifier: Apache-2.0
// Tensors and streams come as addresses, counts and handles; Python keeps them alive until it has
// waited on the ticket. Everything that may wait does so without the interpreter's lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <utility>

#include "nccl/communicator.h"
#include "nccl/library.h"
#include "nccl/operation.h"

// Tests compile this file a second time, over a simulated table.
#ifndef FK_NCCL_MODULE
#define FK_NCCL_MODULE _nccl
#endif

namespace py = pybind11;
namespace nccl = fk::nccl;
using namespace pybind11::literals;

#ifdef FK_SIM
void bind_extra(py::module_& m);
#endif

namespace {

using Address = uintptr_t;
using Unlocked = py::call_guard<py::gil_scoped_release>;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

cudaStream_t stream(Address handle) { return reinterpret_cast<cudaStream_t>(handle); }

template <class T>
Address address(T* handle) {
  return reinterpret_cast<Address>(handle);
}

// Destructors here may wait for the device, or for NCCL; Python calls them with its lock held.
template <class T>
std::shared_ptr<T> freed_unlocked(std::shared_ptr<T> owner) {
  T* const object = owner.get();
  return {object, [owner = std::move(owner)](T*) mutable {
            const py::gil_scoped_release released;
            owner.reset();
          }};
}

std::shared_ptr<nccl::Communicator> make_communicator(const nccl::Options& options,
                                                      const std::string& unique_id) {
  std::shared_ptr<nccl::Communicator> made;
  {
    const py::gil_scoped_release released;
    made = std::make_shared<nccl::Communicator>(nccl::default_api(), options, unique_id);
  }
  return freed_unlocked(std::move(made));
}

void bind_library(py::module_& m) {
  m.def(
      "runtime_version", [] { return nccl::runtime_version(nccl::default_api()); },
      "The version of the library that is loaded, as NCCL counts: 23007 is 2.30.7.");
  m.def("header_version", &nccl::header_version);
  m.def("cuda_version", &nccl::cuda_version);
  m.def(
      "unique_id", [] { return py::bytes(nccl::unique_id(nccl::default_api())); },
      "The 128 bytes by which the ranks of one communicator find each other.");
}

void bind_ticket(py::module_& m) {
  using nccl::Ticket;
  // Local, here and below: `_nccl_sim` has the same types, and may live in the same process.
  py::class_<Ticket, std::shared_ptr<Ticket>>(m, "Ticket", py::module_local())
      .def(
          "wait", [](const Ticket& self, Address on) { self.wait(stream(on)); }, "stream"_a,
          Unlocked(), "Let the stream wait; raise if the communicator has failed.")
      .def_property_readonly("label", &Ticket::label)
      .def_property_readonly("event_id", &Ticket::event_id)
      .def_property_readonly("started_id", &Ticket::started_id)
      .def_property_readonly("stream", [](const Ticket& self) { return address(self.stream()); });
}

void bind_buffer(py::module_& m) {
  using nccl::Buffer;
  py::class_<Buffer, std::shared_ptr<Buffer>>(m, "Buffer", py::module_local())
      .def_property_readonly("ptr", [](const Buffer& self) { return address(self.data()); })
      .def_property_readonly("nbytes", &Buffer::nbytes)
      .def_property_readonly("registration",
                             [](const Buffer& self) { return to_string(self.registration()); })
      .def_property_readonly("__cuda_array_interface__", [](const Buffer& self) {
        return py::dict("shape"_a = py::make_tuple(self.nbytes()), "typestr"_a = "|u1",
                        "data"_a = py::make_tuple(address(self.data()), false), "version"_a = 3);
      });
}

// `class_` is not const: pybind11 adds to it.
void bind_collectives(py::class_<nccl::Communicator, std::shared_ptr<nccl::Communicator>>& c) {
  using nccl::Communicator;
  c.def(
      "all_gather",
      [](Communicator& self, const std::string& label, Address full, Address shard, size_t nbytes,
         Address compute) {
        return self.all_gather(label, pointer(full), pointer(shard), nbytes, stream(compute));
      },
      "label"_a, "full_ptr"_a, "shard_ptr"_a, "shard_nbytes"_a, "stream"_a, Unlocked());
  c.def(
      "reduce_scatter",
      [](Communicator& self, const std::string& label, Address shard, Address full, size_t numel,
         const std::string& dtype, Address compute) {
        const ncclDataType_t type = nccl::parse_dtype(label, dtype);
        return self.reduce_scatter(label, pointer(shard), pointer(full), numel, type,
                                   stream(compute));
      },
      "label"_a, "shard_ptr"_a, "full_ptr"_a, "shard_numel"_a, "dtype"_a, "stream"_a, Unlocked());
  c.def(
      "all_reduce",
      [](Communicator& self, const std::string& label, Address data, size_t numel,
         const std::string& dtype, const std::string& op, Address compute) {
        const ncclDataType_t type = nccl::parse_dtype(label, dtype);
        return self.all_reduce(label, pointer(data), numel, type, nccl::parse_op(label, op),
                               stream(compute));
      },
      "label"_a, "ptr"_a, "numel"_a, "dtype"_a, "op"_a, "stream"_a, Unlocked());
  c.def(
      "broadcast",
      [](Communicator& self, const std::string& label, Address data, size_t nbytes, int src,
         Address compute) {
        return self.broadcast(label, pointer(data), nbytes, src, stream(compute));
      },
      "label"_a, "ptr"_a, "nbytes"_a, "src"_a, "stream"_a, Unlocked());
  c.def("begin_group", &Communicator::begin_group, Unlocked());
  c.def(
      "end_group", [](Communicator& self, Address compute) { self.end_group(stream(compute)); },
      "stream"_a, Unlocked());
  c.def("cancel_group", &Communicator::cancel_group, Unlocked());
}

void bind_communicator(py::module_& m) {
  using nccl::Communicator;
  py::class_<Communicator, std::shared_ptr<Communicator>> c(m, "Communicator", py::module_local());
  c.def(py::init([](int rank, int world, const py::bytes& unique_id, int device,
                    const std::string& name, double timeout_s, double init_timeout_s, bool blocking,
                    int min_ctas, int max_ctas, int cta_policy, const std::string& registration) {
          return make_communicator(
              {rank, world, device, name, timeout_s, init_timeout_s, blocking, min_ctas, max_ctas,
               cta_policy, nccl::parse_registration(registration)},
              unique_id);
        }),
        "rank"_a, "world"_a, "unique_id"_a, py::kw_only(), "device"_a, "name"_a, "timeout_s"_a,
        "init_timeout_s"_a, "blocking"_a, "min_ctas"_a, "max_ctas"_a, "cta_policy"_a,
        "registration"_a);
  c.def(
      "open_reductions",
      [](Communicator& self, const py::bytes& unique_id) {
        const std::string id = unique_id;
        const py::gil_scoped_release released;
        self.open_reductions(id);
      },
      "unique_id"_a);
  c.def_property_readonly("has_reductions", &Communicator::has_reductions);
  c.def_property_readonly("gather_stream",
                          [](const Communicator& self) { return address(self.gather_stream()); });
  c.def_property_readonly("reduce_stream",
                          [](const Communicator& self) { return address(self.reduce_stream()); });
  bind_collectives(c);
  c.def(
      "allocate",
      [](Communicator& self, size_t nbytes, bool collective) -> std::shared_ptr<nccl::Buffer> {
        std::shared_ptr<nccl::Buffer> buffer;
        {
          const py::gil_scoped_release released;
          buffer = self.allocate(nbytes, collective);
        }
        return buffer == nullptr ? nullptr : freed_unlocked(std::move(buffer));
      },
      "nbytes"_a, "collective"_a);
  c.def(
      "limit_registration",
      [](Communicator& self, const std::string& most) {
        self.limit_registration(nccl::parse_registration(most));
      },
      "most"_a);
  c.def("take_messages", &Communicator::take_messages);
  c.def_property_readonly("failure", [](const Communicator& self) -> std::optional<std::string> {
    std::string text = self.failure();
    return text.empty() ? std::nullopt : std::optional(std::move(text));
  });
  c.def("abort", &Communicator::abort, "why"_a, Unlocked());
  c.def("close", &Communicator::close, "within_s"_a = std::numeric_limits<double>::infinity(),
        Unlocked());
}

}  // namespace

PYBIND11_MODULE(FK_NCCL_MODULE, m) {
  // Local too, as the types are.
  py::register_local_exception<nccl::OutOfMemory>(m, "OutOfMemoryError", PyExc_RuntimeError);
  m.doc() = "Communicators of NCCL, and what it answers without a device.";
  bind_library(m);
  bind_ticket(m);
  bind_buffer(m);
  bind_communicator(m);
#ifdef FK_SIM
  bind_extra(m);
#endif
}
