// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include <vector>

namespace fk::sim {

size_t itemsize(ncclDataType_t dtype);

// target[i] = sources[0][i] op sources[1][i] ..., in the order of the ranks; 16-bit floats in fp32
// and rounded once. Returns false for a type or an operation that is not simulated.
bool reduce(const std::vector<const void*>& sources, void* target, size_t count,
            ncclDataType_t dtype, ncclRedOp_t op);

}  // namespace fk::sim
