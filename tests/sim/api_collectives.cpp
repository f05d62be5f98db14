// SPDX-License-Identifier: Apache-2.0
// Collectives and groups of them, and the memory that they may use directly.
#include <chrono>

#include "sim/api.h"
#include "sim/process.h"
#include "sim/reduce.h"
#include "sim/settings.h"

namespace fk::sim {
namespace {

// A group that is open on this thread: what ncclGroupEnd will launch, by communicator and stream.
struct Part {
  std::shared_ptr<Comm> comm;
  cudaStream_t stream;
  std::vector<Operation> operations;
};
struct Group {
  int depth = 0;
  std::vector<Part> parts;
  ncclResult_t error = ncclSuccess;
};
thread_local Group group;

void launch(const Part& part) {
  for (const Operation& operation : part.operations) {
    Entry entry{to_string(operation.kind), part.comm->device().ordinal(),
                reinterpret_cast<uintptr_t>(part.stream)};
    entry.comm = part.comm->label();
    entry.read = part.comm->read_span(operation);
    entry.write = part.comm->write_span(operation);
    Control::get().log(entry);
  }
  part.comm->device().launch(reinterpret_cast<Stream*>(part.stream), part.comm, part.operations);
}

// The rest of a call that answers that it is in progress, though all is done here.
ncclResult_t in_progress(const Part& part, int polls) {
  part.comm->answer_in_progress(polls);
  reinterpret_cast<Stream*>(part.stream)->unsettled = part.comm;
  return ncclInProgress;
}

// Null: nothing is wrong with it.
const char* what_is_wrong(Comm& comm, const Operation& o, cudaStream_t stream) {
  if (stream == nullptr) return "the host's stream; collectives have their own";
  if (comm.device().ordinal() != Process::current_device())
    return "another device is current than the communicator's";
  if (comm.in_progress() || comm.state() == ncclInProgress)
    return "the communicator is in progress";
  if (o.target == nullptr || (o.source == nullptr && comm.read_span(o).nbytes > 0))
    return "a null pointer";
  if (itemsize(o.dtype) == 0) return "a data type that is not simulated";
  if (o.op != ncclSum && o.op != ncclMax && o.op != ncclMin)
    return "an operation that is not simulated";
  const Span read = comm.read_span(o), write = comm.write_span(o);
  const bool apart =
      read.data + read.nbytes <= write.data || write.data + write.nbytes <= read.data;
  const auto rank = static_cast<uintptr_t>(comm.meeting().rank());
  const bool in_place = o.kind == Kind::kAllGather ? read.data == write.data + rank * read.nbytes
                        : o.kind == Kind::kReduceScatter
                            ? write.data == read.data + rank * write.nbytes
                            : read.data == write.data;
  return apart || in_place ? nullptr : "source and target overlap, but not in place";
}

// An error within a group is the group's too.
ncclResult_t spoil(ncclResult_t code) {
  if (group.depth > 0) group.error = code;
  return code;
}

ncclResult_t collective(ncclComm_t handle, const Operation& operation, cudaStream_t stream) {
  const char* call = to_string(operation.kind);
  const auto comm = Process::get().find(handle);
  if (comm == nullptr) return spoil(bad_comm(call));
  const Comm::Use use(*comm, call);
  const auto hit = fault(call);
  if (hit && hit->code != ncclInProgress) return spoil(static_cast<ncclResult_t>(hit->code));
  if (const ncclResult_t state = comm->state(); state != ncclSuccess && state != ncclInProgress)
    return spoil(refuse(state, comm->last_error()));
  if (operation.count == 0) return ncclSuccess;
  if (const char* wrong = what_is_wrong(*comm, operation, stream)) {
    Control::get().violation(std::string(call) + ": got " + wrong);
    return spoil(refuse(ncclInvalidArgument, std::string(call) + ": got " + wrong));
  }
  if (group.depth > 0) {
    for (Part& part : group.parts)
      if (part.comm == comm && part.stream == stream)
        return part.operations.push_back(operation), ncclSuccess;
    group.parts.push_back({comm, stream, {operation}});
    return ncclSuccess;
  }
  const Part part{comm, stream, {operation}};
  launch(part);
  return hit ? in_progress(part, hit->polls) : ncclSuccess;
}

ncclResult_t all_gather(const void* send, void* recv, size_t count, ncclDataType_t dtype,
                        ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {Kind::kAllGather, send, recv, count, dtype}, stream);
}

ncclResult_t reduce_scatter(const void* send, void* recv, size_t count, ncclDataType_t dtype,
                            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {Kind::kReduceScatter, send, recv, count, dtype, op}, stream);
}

ncclResult_t all_reduce(const void* send, void* recv, size_t count, ncclDataType_t dtype,
                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {Kind::kAllReduce, send, recv, count, dtype, op}, stream);
}

ncclResult_t broadcast(const void* send, void* recv, size_t count, ncclDataType_t dtype, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {Kind::kBroadcast, send, recv, count, dtype, ncclSum, root}, stream);
}

ncclResult_t group_start() {
  if (const auto hit = fault("ncclGroupStart")) return static_cast<ncclResult_t>(hit->code);
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t group_end() {
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd: no group is open");
  if (--group.depth > 0) return ncclSuccess;
  const Group ended = std::exchange(group, {});
  const auto hit = fault("ncclGroupEnd");
  if (ended.error != ncclSuccess) return ended.error;
  if (hit && hit->code != ncclInProgress) return static_cast<ncclResult_t>(hit->code);
  ncclResult_t result = ncclSuccess;
  for (const Part& part : ended.parts) {
    const Comm::Use use(*part.comm, "ncclGroupEnd");
    launch(part);
    if (hit) result = in_progress(part, hit->polls);
  }
  return result;
}

ncclResult_t mem_alloc(void** data, size_t nbytes) {
  *data = nullptr;
  if (const auto hit = fault("ncclMemAlloc")) return static_cast<ncclResult_t>(hit->code);
  if (!Control::get().settings().mem_alloc)
    return refuse(ncclInvalidUsage, "ncclMemAlloc: not supported here");
  *data = Process::get().allocate(nbytes);
  return *data == nullptr ? refuse(ncclUnhandledCudaError, "out of memory") : ncclSuccess;
}

ncclResult_t mem_free(void* data) {
  if (const auto hit = fault("ncclMemFree")) return static_cast<ncclResult_t>(hit->code);
  if (!Process::get().release(data)) {
    Control::get().violation("ncclMemFree: got memory that is not allocated");
    return refuse(ncclInvalidArgument, "ncclMemFree: not an allocation");
  }
  return ncclSuccess;
}

ncclResult_t comm_register(ncclComm_t handle, void* data, size_t nbytes, void** registration) {
  const auto comm = Process::get().find(handle);
  if (comm == nullptr) return bad_comm("ncclCommRegister");
  const Comm::Use use(*comm, "ncclCommRegister");
  *registration = nullptr;
  if (const auto hit = fault("ncclCommRegister")) return static_cast<ncclResult_t>(hit->code);
  // Memory of other allocators is ignored, as NCCL does.
  if (Process::get().owns(data, nbytes)) *registration = Process::get().add_registration(handle);
  return ncclSuccess;
}

ncclResult_t deregister(ncclComm_t handle, const void* registration, const char* call) {
  const auto comm = Process::get().find(handle);
  if (comm == nullptr) return bad_comm(call);
  const Comm::Use use(*comm, call);
  if (const auto hit = fault(call)) return static_cast<ncclResult_t>(hit->code);
  if (registration == nullptr || Process::get().remove_registration(handle, registration))
    return ncclSuccess;
  Control::get().violation(std::string(call) + ": got a registration that is not alive");
  return refuse(ncclInvalidArgument, std::string(call) + ": not a registration");
}

ncclResult_t comm_deregister(ncclComm_t comm, void* registration) {
  return deregister(comm, registration, "ncclCommDeregister");
}

ncclResult_t window_register(ncclComm_t handle, void* data, size_t nbytes, ncclWindow_t* window,
                             int) {
  const auto comm = Process::get().find(handle);
  if (comm == nullptr) return bad_comm("ncclCommWindowRegister");
  const Comm::Use use(*comm, "ncclCommWindowRegister");
  *window = nullptr;
  if (const auto hit = fault("ncclCommWindowRegister")) return static_cast<ncclResult_t>(hit->code);
  if (!Process::get().owns(data, nbytes))
    return refuse(ncclInvalidArgument, "ncclCommWindowRegister: not memory of ncclMemAlloc");
  if (!Control::get().settings().windows) return ncclSuccess;
  // All ranks do this together.
  Meeting& meeting = comm->meeting();
  const uint64_t number = meeting.mine().windows.fetch_add(1) + 1;
  meeting.ring();
  for (;;) {
    const uint32_t seen = meeting.bell();
    if (comm->state() != ncclSuccess || comm->aborted())
      return refuse(ncclSystemError, comm->last_error());
    if (meeting.least(&Slot::windows) >= number) break;
    meeting.wait(seen, std::chrono::milliseconds(50));
  }
  *window = static_cast<ncclWindow_t>(Process::get().add_registration(handle));
  return ncclSuccess;
}

ncclResult_t window_deregister(ncclComm_t comm, ncclWindow_t window) {
  return deregister(comm, window, "ncclCommWindowDeregister");
}

}  // namespace

std::string& last_error() {
  thread_local std::string text;
  return text;
}

std::optional<Fault> fault(const char* call) {
  const auto hit = Control::get().hit(call, Process::current_device());
  if (hit) last_error() = hit->text;
  return hit;
}

ncclResult_t refuse(ncclResult_t code, const std::string& text) {
  last_error() = text;
  return code;
}

ncclResult_t bad_comm(const char* call) {
  Control::get().violation(std::string(call) + ": got a communicator that is not alive");
  return refuse(ncclInvalidArgument, std::string(call) + ": not a communicator");
}

void fill_collectives(nccl::Api& api) {
  api.ncclGroupStart = group_start;
  api.ncclGroupEnd = group_end;
  api.ncclAllGather = all_gather;
  api.ncclReduceScatter = reduce_scatter;
  api.ncclAllReduce = all_reduce;
  api.ncclBroadcast = broadcast;
  api.ncclMemAlloc = mem_alloc;
  api.ncclMemFree = mem_free;
  api.ncclCommRegister = comm_register;
  api.ncclCommDeregister = comm_deregister;
  api.ncclCommWindowRegister = window_register;
  api.ncclCommWindowDeregister = window_deregister;
}

}  // namespace fk::sim
