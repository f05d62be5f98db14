// SPDX-License-Identifier: Apache-2.0
// The bindings of shared memory; fsdp_kernels/comm/_arena.py is the interface.
//
// Memory is exported as Python buffers, and a tensor over a buffer keeps the mapping alive. Epochs
// are named by a segment and an offset.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "cpu/peers.h"
#include "cpu/process.h"
#include "cpu/protocol.h"
#include "cpu/segment.h"

namespace fk::shm {

namespace py = pybind11;

inline py::buffer_info bytes_of(std::byte* data, size_t nbytes) {
  return {reinterpret_cast<uint8_t*>(data), static_cast<py::ssize_t>(nbytes)};
}

// The place of `nbytes` bytes in a segment.
inline std::byte* place(const Segment& segment, size_t offset, size_t nbytes) {
  if (offset % kEpochBytes != 0 || offset > segment.nbytes() ||
      nbytes > segment.nbytes() - offset) {
    throw std::invalid_argument("_cpu: expected " + std::to_string(nbytes) + " bytes inside [0, " +
                                std::to_string(segment.nbytes()) + ") at a multiple of " +
                                std::to_string(kEpochBytes) + ", got offset " +
                                std::to_string(offset) + ". Allocate them first.");
  }
  return segment.data() + offset;
}

inline Epoch* epochs_at(const Segment& segment, size_t offset, size_t count) {
  return reinterpret_cast<Epoch*>(place(segment, offset, count * sizeof(Epoch)));
}

inline Hooks python_hooks() {
  return {[](const std::function<void()>& body) {
            const py::gil_scoped_release released;
            body();
          },
          [] {
            const py::gil_scoped_acquire acquired;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
          }};
}

// One number of each rank, for protocols of the caller's own.
class RankEpochs {
 public:
  RankEpochs(Peers& peers, Epoch* epochs) : peers_(peers), epochs_(epochs) {
    peers.wake_at_end(&epochs[peers.rank()]);
  }

  void set(uint32_t number) { epochs_[peers_.rank()].set(number); }

  uint32_t get(int rank) const {
    if (rank < 0 || rank >= peers_.world()) throw py::index_error("expected a rank of the group");
    return epochs_[rank].get();
  }

  void wait(uint32_t number, std::string_view label, std::string_view operation) {
    peers_.wait(epochs_, number, {label, operation});
  }

 private:
  Peers& peers_;
  Epoch* epochs_;
};

inline void bind_segment(py::module_& m) {
  py::register_exception<NoSpace>(m, "NoSpace", PyExc_RuntimeError);
  py::class_<Mapping, std::shared_ptr<Mapping>>(m, "Mapping", py::buffer_protocol())
      .def_buffer([](Mapping& self) { return bytes_of(self.data(), self.nbytes()); })
      .def("revert", &Mapping::revert)
      .def("is_written", &Mapping::is_written);
  using py::call_guard, py::gil_scoped_release;
  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment", py::buffer_protocol())
      .def_static("create", &Segment::create, call_guard<gil_scoped_release>())
      .def_static("open", &Segment::open, call_guard<gil_scoped_release>())
      .def_buffer([](Segment& self) { return bytes_of(self.data(), self.nbytes()); })
      .def_property_readonly("nbytes", &Segment::nbytes)
      .def("private_view", &Segment::private_view, py::arg("offset"), py::arg("nbytes"));
  m.def("check_space", &check_space);
  m.def("unlink", &unlink);
  m.def("sweep", &sweep);
}

inline void bind_peers(py::module_& m) {
  using Processes = std::vector<std::pair<int32_t, uint64_t>>;
  m.def("this_process", [] {
    const ProcessId self = this_process();
    return std::pair(self.pid, self.start);
  });
  const auto make = [](const Segment& segment, size_t offset, const Processes& processes, int rank,
                       double timeout_s) {
    std::vector<ProcessId> ids;
    for (const auto& [pid, start] : processes) ids.push_back({pid, start});
    const size_t nbytes = Peers::control_bytes(static_cast<int>(ids.size()));
    return std::make_unique<Peers>(place(segment, offset, nbytes), std::move(ids),
                                   PeersOptions{rank, timeout_s, python_hooks()});
  };
  py::class_<Peers>(m, "Peers")
      .def(py::init(make), py::keep_alive<1, 2>(), py::arg("segment"), py::arg("offset"),
           py::arg("processes"), py::arg("rank"), py::arg("timeout_s"))
      .def_static("control_bytes", &Peers::control_bytes)
      .def("abort", &Peers::abort)
      .def("close", &Peers::close)
      .def_property_readonly("failure", &Peers::failure);
}

// Every object keeps its peers, and the peers every segment in which they wake sleepers.
template <class T>
auto bind_epochs(py::module_& m, const char* name, size_t (*count)(int)) {
  const auto make = [count](Peers& peers, const Segment& segment, size_t offset) {
    return std::make_unique<T>(peers, epochs_at(segment, offset, count(peers.world())));
  };
  return py::class_<T>(m, name)
      .def(py::init(make), py::keep_alive<1, 2>(), py::keep_alive<2, 3>())
      .def_static("epochs", count);
}

inline void bind_protocol(py::module_& m) {
  bind_epochs<RankEpochs>(m, "Epochs", [](int world) { return static_cast<size_t>(world); })
      .def("set", &RankEpochs::set)
      .def("get", &RankEpochs::get)
      .def("wait", &RankEpochs::wait);
  bind_epochs<ParamEpochs>(m, "ParamEpochs", &ParamEpochs::epochs)
      .def("gather", &ParamEpochs::gather)
      .def("wait_ready", &ParamEpochs::wait_ready)
      .def("release", &ParamEpochs::release)
      .def("wait_released", &ParamEpochs::wait_released)
      .def_property_readonly("held", &ParamEpochs::is_held)
      .def_property_readonly("number", &ParamEpochs::number);
  const auto make_grads = [](Peers& peers, const Segment& segment, size_t offset, int slots) {
    Epoch* epochs = epochs_at(segment, offset, GradEpochs::epochs(peers.world()));
    return std::make_unique<GradEpochs>(peers, epochs, slots);
  };
  py::class_<GradEpochs>(m, "GradEpochs")
      .def(py::init(make_grads), py::keep_alive<1, 2>(), py::keep_alive<2, 3>())
      .def_static("epochs", &GradEpochs::epochs)
      .def("begin", &GradEpochs::begin)
      .def("post", &GradEpochs::post)
      .def("wait_posted", &GradEpochs::wait_posted)
      .def("consume", &GradEpochs::consume)
      .def("skip", &GradEpochs::skip)
      .def_property_readonly("outstanding", &GradEpochs::outstanding);
  const auto make_exchange = [](Peers& peers, const Segment& segment, size_t offset) {
    return std::make_unique<Exchange>(peers,
                                      place(segment, offset, Exchange::bytes(peers.world())));
  };
  const auto all_gather = [](Exchange& self, uintptr_t in, size_t nbytes, uintptr_t out,
                             std::string_view label, std::string_view operation) {
    self.all_gather({reinterpret_cast<const std::byte*>(in), nbytes},
                    reinterpret_cast<std::byte*>(out), {label, operation});
  };
  py::class_<Exchange>(m, "Exchange")
      .def(py::init(make_exchange), py::keep_alive<1, 2>(), py::keep_alive<2, 3>())
      .def_static("bytes", &Exchange::bytes)
      .def("all_gather", all_gather);
}

inline void bind_arena(py::module_& m) {
  bind_segment(m);
  bind_peers(m);
  bind_protocol(m);
}

}  // namespace fk::shm
