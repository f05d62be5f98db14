// SPDX-License-Identifier: Apache-2.0
#include "nccl/library.h"

#include <stdexcept>

#include "nccl/errors.h"

namespace fk::nccl {
namespace {

void require(const Api& api, ncclResult_t result, const char* call, const char* advice) {
  if (result == ncclSuccess) return;
  // The last error of no communicator in particular is the one that says more than the code does.
  throw std::runtime_error(
      cat(call, ": expected success, got ", describe(api, result, nullptr), ". ", advice));
}

}  // namespace

int runtime_version(const Api& api) {
  int version = 0;
  require(api, api.ncclGetVersion(&version), "ncclGetVersion", "Reinstall nvidia-nccl-cu13.");
  return version;
}

int header_version() { return NCCL_VERSION_CODE; }

int cuda_version() { return CUDART_VERSION; }

std::string version_text(int version) {
  return cat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::string unique_id(const Api& api) {
  ncclUniqueId id{};
  require(
      api, api.ncclGetUniqueId(&id), "ncclGetUniqueId",
      "Set NCCL_SOCKET_IFNAME to a network interface that is up, and NCCL_DEBUG=WARN for more.");
  return {id.internal, sizeof(id.internal)};
}

}  // namespace fk::nccl
