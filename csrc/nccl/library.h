// SPDX-License-Identifier: Apache-2.0
// What can be asked of NCCL without a device: its version, and the id by which ranks find each
// other.
#pragma once

#include <string>

#include "nccl/api.h"

namespace fk::nccl {

// The version of the library that is loaded, as NCCL counts (23007 is 2.30.7); it may be older or
// newer than the headers. Throws std::runtime_error.
int runtime_version(const Api& api);

// The versions of the headers that this file was compiled with.
int header_version();
int cuda_version();

// "2.30.7".
std::string version_text(int version);

// The bytes that rank 0 hands to the other ranks before they make a communicator together. Throws
// std::runtime_error.
std::string unique_id(const Api& api);

}  // namespace fk::nccl
