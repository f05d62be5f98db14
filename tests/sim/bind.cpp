// SPDX-License-Identifier: Apache-2.0
// What `_nccl_sim` has beyond `_nccl`; see tests/nccl_sim.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "sim/process.h"
#include "sim/settings.h"

namespace py = pybind11;
using namespace py::literals;

namespace fk::sim {
namespace {

py::tuple pair(Span span) { return py::make_tuple(span.data, span.nbytes); }

py::list logged() {
  py::list list;
  for (const Entry& e : Control::get().entries()) {
    if (e.comm.empty())
      list.append(py::make_tuple(e.call, e.stream, e.recording));
    else
      list.append(py::make_tuple(e.call, e.stream, e.comm, pair(e.read), pair(e.write)));
  }
  return list;
}

void configure(const std::string& policy, uint64_t seed, const py::kwargs& others) {
  Settings settings;
  settings.policy = parse_policy(policy);
  settings.seed = seed;
  for (const auto& [name, value] : others) {
    const auto key = name.cast<std::string>();
    if (key == "devices")
      settings.devices = value.cast<int>();
    else if (key == "version")
      settings.version = value.cast<int>();
    else if (key == "chunk_bytes")
      settings.chunk_bytes = value.cast<size_t>();
    else if (key == "poll_patience")
      settings.poll_patience = value.cast<int>();
    else if (key == "mem_alloc")
      settings.mem_alloc = value.cast<bool>();
    else if (key == "windows")
      settings.windows = value.cast<bool>();
    else if (key == "mismatch_hangs")
      settings.mismatch_hangs = value.cast<bool>();
    else if (key == "init_limit_s")
      settings.init_limit_s = value.cast<double>();
    else
      throw std::invalid_argument("configure: there is no setting '" + key + "'");
  }
  Control::get().configure(settings);
}

py::dict live() {
  const Live live = Process::get().live();
  return py::dict("streams"_a = live.streams, "events"_a = live.events, "comms"_a = live.comms,
                  "memory"_a = live.memory, "registrations"_a = live.registrations);
}

}  // namespace
}  // namespace fk::sim

void bind_extra(py::module_& m) {
  using namespace fk::sim;
  using Free = py::call_guard<py::gil_scoped_release>;
  m.def("configure", &configure, "policy"_a = "lazy", "seed"_a = 0,
        "Set every setting of settings.h, those that are not named to their defaults.");
  m.def(
      "inject",
      [](const std::string& call, int code, int nth, int polls, const std::string& text) {
        Control::get().inject({call, code, nth, -1, polls, text});
      },
      "call"_a, "code"_a, "nth"_a = 1, "polls"_a = 0, "text"_a = "",
      "Let the nth call from now on of this entry of the table return `code`; \"async\": let the "
      "communicator fail in the background.");
  m.def("log", &logged,
        "(call, stream, recording) of an event, (call, stream, comm, (read, nbytes), (written, "
        "nbytes)) of a collective, in the order in which the host called them.");
  m.def("clear_log", [] { Control::get().clear_log(); });
  m.def(
      "drop_wait", [](int nth) { Control::get().drop_wait(nth); }, "nth"_a,
      "Let the nth cudaStreamWaitEvent from now on do nothing.");
  m.def(
      "waits", [] { return Control::get().waits(Process::current_device()); },
      "How often cudaStreamWaitEvent was called since the last drop_wait.");
  m.def(
      "configs", [] { return Control::get().configs(); },
      "How each communicator was asked for, in words.");
  m.def(
      "capture", [](uintptr_t stream, bool on) { Control::get().capture(stream, on); }, "stream"_a,
      "on"_a, "Begin or end the capture of a stream, which forbids what CUDA forbids meanwhile.");
  m.def("violations", [] { return Control::get().violations(); });
  m.def("live", &live, "What was made and not destroyed.");
  m.def("reset", [] { Control::get().reset(); });
  m.def("create_stream",
        [] { return reinterpret_cast<uintptr_t>(Process::get().device().make_stream(0)); });
  m.def(
      "copy",
      [](uintptr_t stream, uintptr_t to, uintptr_t from, size_t nbytes) {
        Process::get().device().launch(reinterpret_cast<Stream*>(stream), [=] {
          std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
        });
      },
      "stream"_a, "to"_a, "from"_a, "nbytes"_a, Free(), "Enqueue a kernel that copies bytes.");
  m.def(
      "synchronize",
      [](std::optional<uintptr_t> stream) {
        Device& device = Process::get().device();
        if (!stream) return device.synchronize();
        device.synchronize(device.record(reinterpret_cast<Stream*>(*stream)));
      },
      "stream"_a = py::none(), Free(), "Let the host wait for a stream, or for all of the device.");
}
