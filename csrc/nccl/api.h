// SPDX-License-Identifier: Apache-2.0
// The table of the CUDA and NCCL calls that this directory makes. Nothing else in it names one of
// them, so that a test can put a simulated device and simulated peers in their place.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace fk::nccl {

// Each entry has the name and the contract of the function that it stands for. Entries may be
// called from several threads at once, as far as the real function may be.
struct Api {
  cudaError_t (*cudaGetDevice)(int* device);
  cudaError_t (*cudaSetDevice)(int device);
  cudaError_t (*cudaDeviceSynchronize)();
  cudaError_t (*cudaDeviceGetStreamPriorityRange)(int* least, int* greatest);
  const char* (*cudaGetErrorString)(cudaError_t error);
  cudaError_t (*cudaStreamCreateWithPriority)(cudaStream_t* stream, unsigned flags, int priority);
  cudaError_t (*cudaStreamDestroy)(cudaStream_t stream);
  cudaError_t (*cudaStreamWaitEvent)(cudaStream_t stream, cudaEvent_t event, unsigned flags);
  cudaError_t (*cudaStreamIsCapturing)(cudaStream_t stream, cudaStreamCaptureStatus* status);
  cudaError_t (*cudaThreadExchangeStreamCaptureMode)(cudaStreamCaptureMode* mode);
  cudaError_t (*cudaEventCreateWithFlags)(cudaEvent_t* event, unsigned flags);
  cudaError_t (*cudaEventDestroy)(cudaEvent_t event);
  cudaError_t (*cudaEventRecord)(cudaEvent_t event, cudaStream_t stream);
  cudaError_t (*cudaEventQuery)(cudaEvent_t event);

  ncclResult_t (*ncclGetVersion)(int* version);
  ncclResult_t (*ncclGetUniqueId)(ncclUniqueId* id);
  const char* (*ncclGetErrorString)(ncclResult_t result);
  const char* (*ncclGetLastError)(ncclComm_t comm);
  ncclResult_t (*ncclCommInitRankConfig)(ncclComm_t* comm, int world, ncclUniqueId id, int rank,
                                         ncclConfig_t* config);
  ncclResult_t (*ncclCommGetAsyncError)(ncclComm_t comm, ncclResult_t* error);
  ncclResult_t (*ncclCommFinalize)(ncclComm_t comm);
  ncclResult_t (*ncclCommDestroy)(ncclComm_t comm);
  ncclResult_t (*ncclCommAbort)(ncclComm_t comm);
  ncclResult_t (*ncclGroupStart)();
  ncclResult_t (*ncclGroupEnd)();
  ncclResult_t (*ncclAllGather)(const void* send, void* recv, size_t send_count,
                                ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*ncclReduceScatter)(const void* send, void* recv, size_t recv_count,
                                    ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                    cudaStream_t stream);
  ncclResult_t (*ncclAllReduce)(const void* send, void* recv, size_t count, ncclDataType_t dtype,
                                ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*ncclBroadcast)(const void* send, void* recv, size_t count, ncclDataType_t dtype,
                                int root, ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*ncclMemAlloc)(void** data, size_t nbytes);
  ncclResult_t (*ncclMemFree)(void* data);
  ncclResult_t (*ncclCommRegister)(ncclComm_t comm, void* data, size_t nbytes, void** handle);
  ncclResult_t (*ncclCommDeregister)(ncclComm_t comm, void* handle);
  ncclResult_t (*ncclCommWindowRegister)(ncclComm_t comm, void* data, size_t nbytes,
                                         ncclWindow_t* window, int flags);
  ncclResult_t (*ncclCommWindowDeregister)(ncclComm_t comm, ncclWindow_t window);
};

// The real ones. A simulation links its own definition instead of api.cpp.
const Api& default_api();

}  // namespace fk::nccl
