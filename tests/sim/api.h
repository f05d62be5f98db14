// SPDX-License-Identifier: Apache-2.0
// The simulated entries of fk::nccl::Api.
#pragma once

#include <optional>
#include <string>

#include "nccl/api.h"
#include "sim/settings.h"

namespace fk::sim {

void fill_cuda(nccl::Api& api);
void fill_nccl(nccl::Api& api);
void fill_collectives(nccl::Api& api);

// Shared by the two parts of NCCL. What ncclGetLastError says where the communicator has no text of
// its own: of this thread's calls.
std::string& last_error();
// The fault that was injected for this call, whose text is now the last error.
std::optional<Fault> fault(const char* call);
// Sets the last error and returns the code.
ncclResult_t refuse(ncclResult_t code, const std::string& text);
ncclResult_t bad_comm(const char* call);

}  // namespace fk::sim
