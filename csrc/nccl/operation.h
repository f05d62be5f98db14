// SPDX-License-Identifier: Apache-2.0
// One collective as it was asked for, checked, and not yet issued.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "nccl/ticket.h"

namespace fk::nccl {

struct Operation {
  enum class Kind { kAllGather, kReduceScatter, kAllReduce, kBroadcast };

  Kind kind;
  size_t channel;  // which communicator runs it
  // As NCCL takes them: the count is of what is sent for a gather, received for a reduce-scatter.
  const void* send;
  void* recv;
  size_t count;
  ncclDataType_t dtype;
  ncclRedOp_t op = ncclSum;
  int root = 0;
  std::shared_ptr<Ticket> ticket{};

  // Throws std::invalid_argument that starts with `label`.
  void check(const std::string& label, int rank, int world) const;
  ncclResult_t enqueue(const Api& api, ncclComm_t comm, cudaStream_t stream) const;
};

const char* to_string(Operation::Kind kind);

// Names as torch has them. Throw std::invalid_argument that starts with `label`.
ncclDataType_t parse_dtype(const std::string& label, const std::string& name);
ncclRedOp_t parse_op(const std::string& label, const std::string& name);

}  // namespace fk::nccl
