// SPDX-License-Identifier: Apache-2.0
#include "nccl/api.h"

namespace fk::nccl {

const Api& default_api() {
  // By name: an entry that is missing here would be null, and is a compile error instead.
  static const Api api{
      .cudaGetDevice = ::cudaGetDevice,
      .cudaSetDevice = ::cudaSetDevice,
      .cudaDeviceSynchronize = ::cudaDeviceSynchronize,
      .cudaDeviceGetStreamPriorityRange = ::cudaDeviceGetStreamPriorityRange,
      .cudaGetErrorString = ::cudaGetErrorString,
      .cudaStreamCreateWithPriority = ::cudaStreamCreateWithPriority,
      .cudaStreamDestroy = ::cudaStreamDestroy,
      .cudaStreamWaitEvent = ::cudaStreamWaitEvent,
      .cudaStreamIsCapturing = ::cudaStreamIsCapturing,
      .cudaThreadExchangeStreamCaptureMode = ::cudaThreadExchangeStreamCaptureMode,
      .cudaEventCreateWithFlags = ::cudaEventCreateWithFlags,
      .cudaEventDestroy = ::cudaEventDestroy,
      .cudaEventRecord = ::cudaEventRecord,
      .cudaEventQuery = ::cudaEventQuery,
      .ncclGetVersion = ::ncclGetVersion,
      .ncclGetUniqueId = ::ncclGetUniqueId,
      .ncclGetErrorString = ::ncclGetErrorString,
      .ncclGetLastError = ::ncclGetLastError,
      .ncclCommInitRankConfig = ::ncclCommInitRankConfig,
      .ncclCommGetAsyncError = ::ncclCommGetAsyncError,
      .ncclCommFinalize = ::ncclCommFinalize,
      .ncclCommDestroy = ::ncclCommDestroy,
      .ncclCommAbort = ::ncclCommAbort,
      .ncclGroupStart = ::ncclGroupStart,
      .ncclGroupEnd = ::ncclGroupEnd,
      .ncclAllGather = ::ncclAllGather,
      .ncclReduceScatter = ::ncclReduceScatter,
      .ncclAllReduce = ::ncclAllReduce,
      .ncclBroadcast = ::ncclBroadcast,
      .ncclMemAlloc = ::ncclMemAlloc,
      .ncclMemFree = ::ncclMemFree,
      .ncclCommRegister = ::ncclCommRegister,
      .ncclCommDeregister = ::ncclCommDeregister,
      .ncclCommWindowRegister = ::ncclCommWindowRegister,
      .ncclCommWindowDeregister = ::ncclCommWindowDeregister,
  };
  return api;
}

}  // namespace fk::nccl
