// SPDX-License-Identifier: Apache-2.0
// Tensors come as addresses, counts and dtype codes; Python keeps them alive during the call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>

#include "bindings_arena.h"
#include "cpu/kernels.h"
#include "cpu/level.h"

namespace py = pybind11;
namespace cpu = fk::cpu;

namespace {

using Address = uintptr_t;
using Typed = std::pair<Address, int>;  // address and dtype code

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

cpu::Buffer buffer(const Typed& typed) {
  if (typed.second < 0 || typed.second > 3) {
    throw std::invalid_argument("_cpu: expected a dtype code from 0 to 3, got " +
                                std::to_string(typed.second) + ". Use a float dtype.");
  }
  return {pointer<void>(typed.first), static_cast<cpu::DType>(typed.second)};
}

template <class T>
std::span<const T> view(Address address, int64_t count) {
  return {pointer<const T>(address), static_cast<size_t>(count)};
}

// shard: (grads, grads' dtype, master, master's dtype, exp_avg, exp_avg_sq, max_exp_avg_sq or 0,
// params or 0, params' dtype, numel); the tables: (address, rows).
using ShardNumbers = std::array<int64_t, 10>;
using Table = std::pair<Address, int64_t>;

cpu::Shard shard_of(const ShardNumbers& shard) {
  const auto address = [&](int i) { return static_cast<Address>(shard[i]); };
  return {buffer({address(0), static_cast<int>(shard[1])}),
          buffer({address(2), static_cast<int>(shard[3])}),
          pointer<void>(address(4)),
          pointer<void>(address(5)),
          pointer<void>(address(6)),
          buffer({address(7), static_cast<int>(shard[8])}),
          shard[9]};
}

void adam(const ShardNumbers& shard, Table table, Table coefs, double grad_scale, bool decoupled,
          int threads) {
  const cpu::Shard buffers = shard_of(shard);
  const py::gil_scoped_release released;
  cpu::adam(buffers, view<cpu::Fragment>(table.first, table.second),
            view<cpu::CoefRow>(coefs.first, coefs.second), {grad_scale, decoupled}, threads);
}

// The addresses of the ranks' memory, and its dtype code.
struct Ranks {
  explicit Ranks(const std::pair<std::vector<Address>, int>& typed)
      : dtype(buffer({0, typed.second}).dtype) {
    for (Address address : typed.first) addresses.push_back(pointer<void>(address));
  }
  cpu::Peers peers() const { return {addresses, dtype}; }
  std::vector<void*> addresses;
  cpu::DType dtype;
};

std::pair<double, double> reduce(const std::pair<std::vector<Address>, int>& peers,
                                 const Typed& out, int64_t numel, Table table, bool accumulate,
                                 int threads) {
  const Ranks from(peers);
  const cpu::Buffer to = buffer(out);
  const py::gil_scoped_release released;
  return cpu::reduce(from.peers(), to, numel, view<cpu::Fragment>(table.first, table.second),
                     accumulate, threads);
}

void reduce_adam(const std::pair<std::vector<Address>, int>& peers, const ShardNumbers& shard,
                 const std::pair<std::vector<Address>, int>& copies, Table table, Table coefs,
                 std::pair<double, bool> options, int threads) {
  const Ranks from(peers), to(copies);
  const cpu::Shard buffers = shard_of(shard);
  const py::gil_scoped_release released;
  cpu::reduce_adam(
      from.peers(), buffers, to.peers(), view<cpu::Fragment>(table.first, table.second),
      view<cpu::CoefRow>(coefs.first, coefs.second), {options.first, options.second}, threads);
}

std::pair<double, double> norm(const Typed& grads, int64_t numel, std::pair<Address, int64_t> table,
                               int threads) {
  const cpu::Buffer in = buffer(grads);
  const py::gil_scoped_release released;
  return cpu::norm(in, numel, view<cpu::Fragment>(table.first, table.second), threads);
}

void adam_coefs(std::pair<Address, int64_t> hyper, Address step, Address used, bool skip,
                Address out, bool decoupled) {
  cpu::adam_coefs(view<cpu::HyperRow>(hyper.first, hyper.second), pointer<float>(step),
                  pointer<const bool>(used), skip, pointer<cpu::CoefRow>(out), decoupled);
}

// sources: (address, dtype, start, numel) of each gradient.
void pack(const std::vector<std::array<int64_t, 4>>& sources, const Typed& out, int64_t numel,
          bool accumulate, int threads) {
  std::vector<cpu::Source> list;
  list.reserve(sources.size());
  for (const auto& [address, dtype, start, count] : sources) {
    const Typed grad{static_cast<Address>(address), static_cast<int>(dtype)};
    list.push_back({buffer(grad), start, count});
  }
  const cpu::Buffer to = buffer(out);
  const py::gil_scoped_release released;
  cpu::pack(list, to, numel, accumulate, threads);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "The kernels for CPU memory; fsdp_kernels/ops.py is the interface.";
  m.def("adam", &adam);
  m.def("norm", &norm);
  m.def("reduce", &reduce);
  m.def("reduce_adam", &reduce_adam);
  m.def("adam_coefs", &adam_coefs);
  m.def("pack", &pack);
  m.def("level", [] { return cpu::level().name; }, "The instruction set in use.");
  m.def("levels", &cpu::levels, "The instruction sets that this processor has, worst first.");
  m.def("set_level", &cpu::set_level);
  fk::shm::bind_arena(m);
}
