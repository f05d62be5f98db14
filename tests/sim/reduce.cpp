// SPDX-License-Identifier: Apache-2.0
#include "sim/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace fk::sim {
namespace {

// Areas have no alignment to speak of, hence the copies.
template <class T>
T load(const void* from, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + index * sizeof(T), sizeof(T));
  return value;
}

float widen(__half value) { return __half2float(value); }
float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
template <class T>
T widen(T value) {
  return value;
}

void narrow(float value, __half& result) { result = __float2half_rn(value); }
void narrow(float value, __nv_bfloat16& result) { result = __float2bfloat16_rn(value); }
template <class T>
void narrow(T value, T& result) {
  result = value;
}

template <class Wide>
Wide apply(ncclRedOp_t op, Wide a, Wide b) {
  switch (op) {
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<Wide>(a + b);
  }
}

template <class T>
void reduce_as(const std::vector<const void*>& sources, void* target, size_t count,
               ncclRedOp_t op) {
  for (size_t i = 0; i < count; ++i) {
    auto value = widen(load<T>(sources[0], i));
    for (size_t r = 1; r < sources.size(); ++r)
      value = apply(op, value, widen(load<T>(sources[r], i)));
    T result;
    narrow(value, result);
    std::memcpy(static_cast<char*>(target) + i * sizeof(T), &result, sizeof(T));
  }
}

}  // namespace

size_t itemsize(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

bool reduce(const std::vector<const void*>& sources, void* target, size_t count,
            ncclDataType_t dtype, ncclRedOp_t op) {
  if (op != ncclSum && op != ncclMax && op != ncclMin) return false;
  switch (dtype) {
    case ncclInt8:
      reduce_as<int8_t>(sources, target, count, op);
      return true;
    case ncclUint8:
      reduce_as<uint8_t>(sources, target, count, op);
      return true;
    case ncclInt32:
      reduce_as<int32_t>(sources, target, count, op);
      return true;
    case ncclInt64:
      reduce_as<int64_t>(sources, target, count, op);
      return true;
    case ncclFloat16:
      reduce_as<__half>(sources, target, count, op);
      return true;
    case ncclBfloat16:
      reduce_as<__nv_bfloat16>(sources, target, count, op);
      return true;
    case ncclFloat32:
      reduce_as<float>(sources, target, count, op);
      return true;
    case ncclFloat64:
      reduce_as<double>(sources, target, count, op);
      return true;
    default:
      return false;
  }
}

}  // namespace fk::sim
