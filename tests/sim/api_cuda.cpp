// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "sim/api.h"
#include "sim/process.h"
#include "sim/settings.h"

namespace fk::sim {
namespace {

cudaError_t bad_handle(const char* call) {
  Control::get().violation(std::string(call) + ": got a handle that is not alive");
  return cudaErrorInvalidResourceHandle;
}

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// Whether some capture forbids this call; the call then ends the capture.
bool breaks_capture(const char* call, bool in_every_mode = false) {
  if (!Control::get().capturing()) return false;
  if (capture_mode == cudaStreamCaptureModeRelaxed && !in_every_mode) return false;
  Control::get().violation(std::string(call) + ": breaks the capture of a stream");
  return true;
}

Device& device_of(cudaStream_t stream) {
  if (stream == nullptr) return Process::get().device();
  return *reinterpret_cast<Stream*>(stream)->device;
}

void log(const char* call, cudaStream_t stream, const Mark& mark) {
  Entry entry{call, Process::current_device(), reinterpret_cast<uintptr_t>(stream)};
  entry.recording = mark == nullptr ? 0 : mark->number;
  Control::get().log(entry);
}

cudaError_t get_device(int* device) {
  if (const auto hit = fault("cudaGetDevice")) return static_cast<cudaError_t>(hit->code);
  *device = Process::current_device();
  return cudaSuccess;
}

cudaError_t set_device(int device) {
  if (const auto hit = fault("cudaSetDevice")) return static_cast<cudaError_t>(hit->code);
  if (device < 0 || device >= Control::get().settings().devices) return cudaErrorInvalidDevice;
  Process::set_current_device(device);
  return cudaSuccess;
}

cudaError_t device_synchronize() {
  if (const auto hit = fault("cudaDeviceSynchronize")) return static_cast<cudaError_t>(hit->code);
  if (breaks_capture("cudaDeviceSynchronize", true)) return cudaErrorStreamCaptureUnsupported;
  Process::get().device().synchronize();
  return cudaSuccess;
}

cudaError_t priorities(int* least, int* greatest) {
  if (const auto hit = fault("cudaDeviceGetStreamPriorityRange"))
    return static_cast<cudaError_t>(hit->code);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

const char* error_string(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    default:
      return "unrecognized error code";
  }
}

cudaError_t stream_create(cudaStream_t* stream, unsigned flags, int priority) {
  if (const auto hit = fault("cudaStreamCreateWithPriority"))
    return static_cast<cudaError_t>(hit->code);
  if (flags != cudaStreamNonBlocking)
    Control::get().violation("a stream that waits for the legacy default stream");
  *stream = reinterpret_cast<cudaStream_t>(Process::get().device().make_stream(priority));
  return cudaSuccess;
}

cudaError_t stream_destroy(cudaStream_t stream) {
  if (const auto hit = fault("cudaStreamDestroy")) return static_cast<cudaError_t>(hit->code);
  Process& process = Process::get();
  if (!process.device().destroy_stream(reinterpret_cast<Stream*>(stream)))
    return bad_handle("cudaStreamDestroy");
  return cudaSuccess;
}

cudaError_t stream_wait_event(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const auto hit = fault("cudaStreamWaitEvent")) return static_cast<cudaError_t>(hit->code);
  Process& process = Process::get();
  const Event* found = process.find(event);
  if (found == nullptr) return bad_handle("cudaStreamWaitEvent");
  const Mark mark = found->last;  // the event may be recorded again while the host waits
  log("cudaStreamWaitEvent", stream, mark);
  if (Control::get().dropped(Process::current_device())) return cudaSuccess;
  device_of(stream).wait(reinterpret_cast<Stream*>(stream), mark);
  return cudaSuccess;
}

cudaError_t is_capturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (const auto hit = fault("cudaStreamIsCapturing")) return static_cast<cudaError_t>(hit->code);
  *status = Control::get().capturing(reinterpret_cast<uintptr_t>(stream))
                ? cudaStreamCaptureStatusActive
                : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t exchange_capture_mode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t event_create(cudaEvent_t* event, unsigned flags) {
  if (const auto hit = fault("cudaEventCreateWithFlags"))
    return static_cast<cudaError_t>(hit->code);
  if ((flags & cudaEventDisableTiming) == 0)
    Control::get().violation("an event with timing: it costs more");
  *event = reinterpret_cast<cudaEvent_t>(Process::get().make_event());
  return cudaSuccess;
}

cudaError_t event_destroy(cudaEvent_t event) {
  if (const auto hit = fault("cudaEventDestroy")) return static_cast<cudaError_t>(hit->code);
  return Process::get().destroy_event(event) ? cudaSuccess : bad_handle("cudaEventDestroy");
}

cudaError_t event_record(cudaEvent_t event, cudaStream_t stream) {
  if (const auto hit = fault("cudaEventRecord")) return static_cast<cudaError_t>(hit->code);
  Process& process = Process::get();
  Event* found = process.find(event);
  if (found == nullptr) return bad_handle("cudaEventRecord");
  if (Control::get().capturing(reinterpret_cast<uintptr_t>(stream)))
    Control::get().violation("cudaEventRecord: an event of ours in a capture");
  found->last = device_of(stream).record(reinterpret_cast<Stream*>(stream));
  log("cudaEventRecord", stream, found->last);
  return cudaSuccess;
}

cudaError_t event_query(cudaEvent_t event) {
  if (const auto hit = fault("cudaEventQuery")) return static_cast<cudaError_t>(hit->code);
  if (breaks_capture("cudaEventQuery")) return cudaErrorStreamCaptureUnsupported;
  Process& process = Process::get();
  const Event* found = process.find(event);
  if (found == nullptr) return bad_handle("cudaEventQuery");
  const Mark mark = found->last;  // of whatever device
  return mark == nullptr || mark->device->query(mark) ? cudaSuccess : cudaErrorNotReady;
}

}  // namespace

void fill_cuda(nccl::Api& api) {
  api.cudaGetDevice = get_device;
  api.cudaSetDevice = set_device;
  api.cudaDeviceSynchronize = device_synchronize;
  api.cudaDeviceGetStreamPriorityRange = priorities;
  api.cudaGetErrorString = error_string;
  api.cudaStreamCreateWithPriority = stream_create;
  api.cudaStreamDestroy = stream_destroy;
  api.cudaStreamWaitEvent = stream_wait_event;
  api.cudaStreamIsCapturing = is_capturing;
  api.cudaThreadExchangeStreamCaptureMode = exchange_capture_mode;
  api.cudaEventCreateWithFlags = event_create;
  api.cudaEventDestroy = event_destroy;
  api.cudaEventRecord = event_record;
  api.cudaEventQuery = event_query;
}

}  // namespace fk::sim
