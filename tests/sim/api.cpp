// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/nccl/api.cpp.
#include "sim/api.h"

namespace fk::nccl {

const Api& default_api() {
  static const Api api = [] {
    Api table{};
    sim::fill_cuda(table);
    sim::fill_nccl(table);
    sim::fill_collectives(table);
    return table;
  }();
  return api;
}

}  // namespace fk::nccl
