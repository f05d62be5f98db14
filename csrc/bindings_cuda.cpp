// SPDX-License-Identifier: Apache-2.0
// Tensors come as addresses, counts and dtype codes; Python keeps them alive until the stream has
// passed the kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cuda/kernels.h"

#ifndef FK_CUDA_MODULE
#define FK_CUDA_MODULE _cuda
#endif

namespace py = pybind11;
namespace cuda = fk::cuda;

namespace {

using Address = uintptr_t;
using Typed = std::pair<Address, int>;  // address and dtype code
using Shape = std::optional<std::vector<int64_t>>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

cuda::DType dtype(int code) {
  if (code < 0 || code > 2) {
    throw std::invalid_argument("_cuda: expected a dtype code from 0 to 2, got " +
                                std::to_string(code) + ". Use float32, bfloat16 or float16.");
  }
  return static_cast<cuda::DType>(code);
}

// sources: (address, dtype, start, numel, sizes, strides) of each gradient; sizes and strides are
// None where it is contiguous.
void pack(const std::vector<std::tuple<Address, int, int64_t, int64_t, Shape, Shape>>& sources,
          const Typed& out, int64_t numel, bool accumulate, Address stream) {
  std::vector<cuda::Source> list;
  list.reserve(sources.size());
  for (const auto& [address, code, start, count, sizes, strides] : sources) {
    list.push_back({pointer<const void>(address), dtype(code), start, count,
                    sizes.value_or(std::vector<int64_t>{}),
                    strides.value_or(std::vector<int64_t>{})});
  }
  const cuda::Bucket to{pointer<void>(out.first), dtype(out.second), numel};
  const py::gil_scoped_release released;
  cuda::pack(list, to, accumulate, pointer<void>(stream));
}

void norm(const Typed& grads, std::pair<Address, int64_t> chunks, Address partials, Address out,
          Address stream) {
  const cuda::NormInput input{pointer<const void>(grads.first), dtype(grads.second),
                              pointer<const int64_t>(chunks.first), chunks.second};
  const py::gil_scoped_release released;
  cuda::norm(input, pointer<double>(partials), pointer<double>(out), pointer<void>(stream));
}

}  // namespace

PYBIND11_MODULE(FK_CUDA_MODULE, m) {
  m.doc() = "The kernels for CUDA memory; fsdp_kernels/ops.py is the interface.";
  m.def("pack", &pack);
  m.def("norm", &norm);
  m.def("norm_partials", &cuda::norm_partials,
        "The float64 numbers of scratch memory that `norm` needs for so many chunks.");
  m.attr("NORM_CHUNK_NUMEL") = cuda::norm_chunk_numel();
  m.def("cuda_version", &cuda::cuda_version,
        "The toolkit that the kernels were compiled with: 13000 is 13.0.");
  m.def("architectures", &cuda::architectures,
        "What the kernels were compiled for, worst first; compute_ is PTX, for newer devices.");
}
