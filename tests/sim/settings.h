// SPDX-License-Identifier: Apache-2.0
// How the simulation behaves, what it is told to get wrong, and what it has seen. Process-wide: the
// ranks that are threads of one process share it, and tell themselves apart by their device.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fk::sim {

// When queued work runs, of all the moments at which a device might run it.
enum class Policy {
  kLazy,        // as late as it may: when something waits for it, on this rank or on another
  kEager,       // collectives as early as they may, and only what they wait for
  kRandom,      // now and then a stretch of some stream
  kRoundRobin,  // one step of each stream at every call
};

Policy parse_policy(const std::string& name);  // throws std::invalid_argument

struct Settings {
  Policy policy = Policy::kLazy;
  uint64_t seed = 0;
  int devices = 8;
  int version = NCCL_VERSION_CODE;
  size_t chunk_bytes = 64 << 10;  // of a collective that travel at once; the same on all ranks
  int poll_patience = 2;          // cudaEventQuery calls for one event before it is worked for
  bool mem_alloc = true;          // false: ncclMemAlloc is not supported
  bool windows = true;            // false: ncclCommWindowRegister gives a null window
  bool mismatch_hangs = false;    // ranks that issue different collectives: an error, or silence
  double init_limit_s = 60;       // of a blocking initialisation
};

// The nth call from now on of the entry `call` returns `code`.
struct Fault {
  std::string call;  // the entry's name in the table, or "async": see below
  int code = 0;
  int nth = 1;
  int device = -1;        // -1: any
  int polls = 0;          // code ncclInProgress: what ncclCommGetAsyncError then answers so often
  std::string text = "";  // what ncclGetLastError says
};
// "async": the nth ncclCommGetAsyncError finds that the communicator has failed with `code`.

struct Span {
  uintptr_t data = 0;
  size_t nbytes = 0;
};

struct Entry {
  std::string call;
  int device = 0;
  uintptr_t stream = 0;
  uint64_t recording = 0;  // of an event: which call of cudaEventRecord (from 1) in this process
  std::string comm = "";   // its name
  Span read = {}, write = {};
};

class Control {
 public:
  static Control& get();

  Settings settings() const;
  void configure(const Settings& settings);

  void inject(const Fault& fault);
  std::optional<Fault> hit(const std::string& call, int device);  // counts the call

  void log(const Entry& entry);
  std::vector<Entry> entries() const;

  // The nth cudaStreamWaitEvent of each device, counted from here, does nothing. 0: none.
  void drop_wait(int nth);
  bool dropped(int device);  // counts the call
  int waits(int device) const;

  // How each communicator was asked for, in words.
  void add_config(const std::string& text);
  std::vector<std::string> configs() const;

  // A capture that somebody else begins or ends, in the mode that is the default: for all threads.
  void capture(uintptr_t stream, bool on);
  bool capturing(uintptr_t stream) const;
  bool capturing() const;  // any stream

  // What the code under test did that NCCL or CUDA forbid.
  void violation(const std::string& text);
  std::vector<std::string> violations() const;

  void clear_log();
  void reset();  // all of the above

 private:
  mutable std::mutex mutex_;
  Settings settings_;
  std::vector<Fault> faults_;
  std::vector<Entry> entries_;
  std::vector<int> waits_;  // by device
  int drop_ = 0;
  std::set<uintptr_t> captured_;
  std::vector<std::string> configs_, violations_;
};

}  // namespace fk::sim
