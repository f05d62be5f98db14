// SPDX-License-Identifier: Apache-2.0
#include "nccl/library.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <stdexcept>

namespace fk::nccl {
namespace {

void check(ncclResult_t result, const char* call, const char* advice) {
  if (result == ncclSuccess) return;
  // The last error of no communicator in particular is the one that says more than the code does.
  const char* detail = ncclGetLastError(nullptr);
  std::string text = std::string(call) + ": expected success, got \"" + ncclGetErrorString(result) +
                     "\" (code " + std::to_string(static_cast<int>(result)) + ")";
  if (detail != nullptr && detail[0] != '\0') text += ": " + std::string(detail);
  throw std::runtime_error(text + ". " + advice);
}

}  // namespace

int runtime_version() {
  int version = 0;
  check(ncclGetVersion(&version), "ncclGetVersion", "Reinstall nvidia-nccl-cu13.");
  return version;
}

int header_version() { return NCCL_VERSION_CODE; }

int cuda_version() { return CUDART_VERSION; }

std::string unique_id() {
  ncclUniqueId id{};
  check(ncclGetUniqueId(&id), "ncclGetUniqueId",
        "Set NCCL_SOCKET_IFNAME to a network interface that is up, and NCCL_DEBUG=WARN for more.");
  return {id.internal, sizeof(id.internal)};
}

}  // namespace fk::nccl
