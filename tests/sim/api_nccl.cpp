// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "sim/api.h"
#include "sim/process.h"
#include "sim/reduce.h"
#include "sim/settings.h"

namespace fk::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

ncclResult_t simple(const char* call) {
  const auto hit = fault(call);
  return hit ? static_cast<ncclResult_t>(hit->code) : ncclSuccess;
}

ncclResult_t get_version(int* version) {
  *version = Control::get().settings().version;
  return simple("ncclGetVersion");
}

ncclResult_t get_unique_id(ncclUniqueId* id) {
  const std::string name = Meeting::fresh_name();
  std::memset(id->internal, 0, sizeof(id->internal));
  std::memcpy(id->internal, name.data(), name.size());
  return simple("ncclGetUniqueId");
}

const char* error_string(ncclResult_t result) {
  constexpr const char* kTexts[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress",
  };
  return result >= 0 && result < static_cast<int>(std::size(kTexts)) ? kTexts[result]
                                                                     : "unknown result code";
}

const char* get_last_error(ncclComm_t handle) {
  thread_local std::string text;
  const auto comm = handle == nullptr ? nullptr : Process::get().find(handle);
  text = comm == nullptr || comm->last_error().empty() ? last_error() : comm->last_error();
  return text.c_str();
}

std::string describe(const ncclConfig_t& config, int rank, int world) {
  const auto text = [](int value) {
    return value == NCCL_CONFIG_UNDEF_INT ? std::string("default") : std::to_string(value);
  };
  return std::string(config.commName == nullptr ? "" : config.commName) + " " +
         std::to_string(rank) + "/" + std::to_string(world) + ": blocking " +
         text(config.blocking) + ", CTAs " + text(config.minCTAs) + " to " + text(config.maxCTAs) +
         ", policy " + text(config.CTAPolicy) + ", share " + text(config.splitShare);
}

ncclResult_t comm_init(ncclComm_t* handle, int world, ncclUniqueId id, int rank,
                       ncclConfig_t* config) {
  *handle = nullptr;
  const auto hit = fault("ncclCommInitRankConfig");
  if (hit && hit->code != ncclInProgress) return static_cast<ncclResult_t>(hit->code);
  if (config == nullptr || config->magic != NCCL_API_MAGIC || config->size != sizeof(*config))
    return refuse(ncclInvalidArgument, "a config that NCCL_CONFIG_INITIALIZER did not make");
  const bool bounded =
      config->minCTAs != NCCL_CONFIG_UNDEF_INT && config->maxCTAs != NCCL_CONFIG_UNDEF_INT;
  if (bounded && config->minCTAs > config->maxCTAs)
    return refuse(ncclInvalidArgument, "minCTAs is greater than maxCTAs");
  if (world < 1 || world > kMaxWorld || rank < 0 || rank >= world)
    return refuse(ncclInvalidArgument, "rank is not in the world");
  Control::get().add_config(describe(*config, rank, world));
  std::shared_ptr<Comm> comm;
  try {
    comm = std::make_shared<Comm>(Process::get().device(), id.internal, world, rank, *config);
  } catch (const std::runtime_error& error) {
    return refuse(ncclSystemError, error.what());
  }
  if (hit) comm->answer_in_progress(hit->polls);
  comm->start_service();
  if (comm->blocking()) {
    const std::chrono::duration<double> limit(Control::get().settings().init_limit_s);
    for (const auto start = steady_clock::now(); comm->state() == ncclInProgress;) {
      if (steady_clock::now() - start > limit)
        return refuse(ncclSystemError, "not all ranks have come");
      const uint32_t seen = comm->meeting().bell();
      if (comm->state() == ncclInProgress) comm->meeting().wait(seen, milliseconds(50));
    }
  }
  *handle = Process::get().add(comm);
  return comm->blocking() ? ncclSuccess : ncclInProgress;
}

// In progress until what this rank has launched is through and every rank has said so.
bool quiescent(Comm& comm) {
  comm.device().work_for(comm, ~uint64_t{0});
  if (!comm.finalizing() || comm.aborted()) return true;
  if (comm.device().launched(comm) > 0) return false;
  if (comm.meeting().mine().finalized.exchange(1) == 0) comm.meeting().ring();
  return comm.meeting().least(&Slot::finalized) == 1;
}

ncclResult_t get_async_error(ncclComm_t handle, ncclResult_t* error) {
  const auto comm = Process::get().find(handle);
  if (comm == nullptr) return bad_comm("ncclCommGetAsyncError");
  const Comm::Use use(*comm, "ncclCommGetAsyncError");
  if (const auto hit = fault("ncclCommGetAsyncError")) return static_cast<ncclResult_t>(hit->code);
  if (const auto hit = Control::get().hit("async", comm->device().ordinal()))
    comm->fail(static_cast<ncclResult_t>(hit->code), hit->text);
  *error = comm->state();
  if (*error == ncclSuccess && comm->count_poll()) *error = ncclInProgress;
  if (*error == ncclSuccess && comm->finalizing() && !quiescent(*comm)) *error = ncclInProgress;
  return ncclSuccess;
}

ncclResult_t comm_finalize(ncclComm_t handle) {
  const auto comm = Process::get().find(handle);
  if (comm == nullptr) return bad_comm("ncclCommFinalize");
  const Comm::Use use(*comm, "ncclCommFinalize");
  if (const auto hit = fault("ncclCommFinalize")) return static_cast<ncclResult_t>(hit->code);
  comm->finalize();
  if (!comm->blocking()) return ncclInProgress;
  for (;;) {
    const uint32_t seen = comm->meeting().bell();
    if (quiescent(*comm)) return ncclSuccess;
    comm->meeting().wait(seen, milliseconds(50));
  }
}

// Waits as NCCL's commDestroySync does, on which both ends depend: for the communicator's last
// kernel on its stream, and so for what that kernel comes after, which may be another
// communicator's.
void await_stream(Comm& comm) {
  while (comm.device().launched(comm) > 0) {
    const auto blocked = comm.device().work_for(comm, ~uint64_t{0});
    if (blocked) blocked->comm->meeting().wait(blocked->seen, milliseconds(50));
  }
}

ncclResult_t let_go(ncclComm_t handle, const char* call, bool abort) {
  const auto comm = Process::get().find(handle);
  if (comm == nullptr) return bad_comm(call);
  // Whoever hangs in a call of a blocking communicator is set free by another thread's abort.
  std::optional<Comm::Use> use;
  if (!abort || !comm->blocking()) use.emplace(*comm, call);
  const auto hit = fault(call);
  if (!abort && !quiescent(*comm)) {
    Control::get().violation(std::string(call) + ": communicator " + comm->label() +
                             " has work in flight");
  }
  comm->device().abort(*comm);  // after a clean end nothing is left that this could touch
  await_stream(*comm);
  comm->stop_service();
  Process::get().remove(handle);
  return hit ? static_cast<ncclResult_t>(hit->code) : ncclSuccess;
}

ncclResult_t comm_destroy(ncclComm_t comm) { return let_go(comm, "ncclCommDestroy", false); }
ncclResult_t comm_abort(ncclComm_t comm) { return let_go(comm, "ncclCommAbort", true); }

}  // namespace

void fill_nccl(nccl::Api& api) {
  api.ncclGetVersion = get_version;
  api.ncclGetUniqueId = get_unique_id;
  api.ncclGetErrorString = error_string;
  api.ncclGetLastError = get_last_error;
  api.ncclCommInitRankConfig = comm_init;
  api.ncclCommGetAsyncError = get_async_error;
  api.ncclCommFinalize = comm_finalize;
  api.ncclCommDestroy = comm_destroy;
  api.ncclCommAbort = comm_abort;
}

}  // namespace fk::sim
