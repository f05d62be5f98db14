// SPDX-License-Identifier: Apache-2.0
#include "nccl/operation.h"

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string_view>

namespace fk::nccl {
namespace {

struct DType {
  std::string_view name;
  ncclDataType_t code;
  size_t nbytes;
};

constexpr std::array<DType, 8> kDTypes{{{"float32", ncclFloat32, 4},
                                        {"bfloat16", ncclBfloat16, 2},
                                        {"float16", ncclFloat16, 2},
                                        {"float64", ncclFloat64, 8},
                                        {"int32", ncclInt32, 4},
                                        {"int64", ncclInt64, 8},
                                        {"uint8", ncclUint8, 1},
                                        {"int8", ncclInt8, 1}}};

struct RedOp {
  std::string_view name;
  ncclRedOp_t code;
};

constexpr std::array<RedOp, 3> kRedOps{{{"sum", ncclSum}, {"max", ncclMax}, {"min", ncclMin}}};

template <class Table>
auto parse(const Table& table, const char* what, const std::string& label,
           const std::string& name) {
  std::string names;
  for (const auto& entry : table) {
    if (entry.name == name) return entry.code;
    names += cat(names.empty() ? "" : ", ", entry.name);
  }
  throw std::invalid_argument(
      cat(label, ": expected a ", what, " of ", names, ", got '", name, "'. Convert before."));
}

size_t itemsize(ncclDataType_t dtype) {
  for (const DType& entry : kDTypes) {
    if (entry.code == dtype) return entry.nbytes;
  }
  return 1;
}

// NCCL works in place on a rank's own slot; any other overlap would be read while it is written.
void check_overlap(const std::string& label, const void* full, const void* shard, size_t nbytes,
                   int rank, int world) {
  const auto full_start = reinterpret_cast<uintptr_t>(full);
  const auto start = reinterpret_cast<uintptr_t>(shard);
  const bool apart = start + nbytes <= full_start || full_start + world * nbytes <= start;
  if (apart || start == full_start + rank * nbytes) return;
  throw std::invalid_argument(cat(label, ": expected a shard apart from the full buffer, or slot ",
                                  rank, " of it, got one at byte ",
                                  static_cast<int64_t>(start - full_start), " of slots of ", nbytes,
                                  " bytes. Pass that slot."));
}

}  // namespace

void Operation::check(const std::string& label, int rank, int world) const {
  if (count == 0) return;
  if (send == nullptr || recv == nullptr) {
    throw std::invalid_argument(cat(label, ": expected the addresses of ", count,
                                    " elements, got a null one. Pass allocated tensors."));
  }
  const size_t nbytes = count * itemsize(dtype);
  if (kind == Kind::kAllGather) check_overlap(label, recv, send, nbytes, rank, world);
  if (kind == Kind::kReduceScatter) check_overlap(label, send, recv, nbytes, rank, world);
  if (kind == Kind::kBroadcast && (root < 0 || root >= world)) {
    throw std::invalid_argument(cat(label, ": expected a source rank in [0, ", world, "), got ",
                                    root, ". Pass a rank of the group, not of the job."));
  }
}

ncclResult_t Operation::enqueue(const Api& api, ncclComm_t comm, cudaStream_t stream) const {
  switch (kind) {
    case Kind::kAllGather:
      return api.ncclAllGather(send, recv, count, dtype, comm, stream);
    case Kind::kReduceScatter:
      return api.ncclReduceScatter(send, recv, count, dtype, op, comm, stream);
    case Kind::kAllReduce:
      return api.ncclAllReduce(send, recv, count, dtype, op, comm, stream);
    case Kind::kBroadcast:
      return api.ncclBroadcast(send, recv, count, dtype, root, comm, stream);
  }
  return ncclInternalError;
}

const char* to_string(Operation::Kind kind) {
  switch (kind) {
    case Operation::Kind::kAllGather:
      return "all_gather";
    case Operation::Kind::kReduceScatter:
      return "reduce_scatter";
    case Operation::Kind::kAllReduce:
      return "all_reduce";
    case Operation::Kind::kBroadcast:
      return "broadcast";
  }
  return "collective";
}

ncclDataType_t parse_dtype(const std::string& label, const std::string& name) {
  return parse(kDTypes, "dtype", label, name);
}

ncclRedOp_t parse_op(const std::string& label, const std::string& name) {
  return parse(kRedOps, "reduction", label, name);
}

}  // namespace fk::nccl
