// SPDX-License-Identifier: Apache-2.0
// The memory that a communicator hands out, and where it goes.
#include "sim/open.h"

using namespace fk::sim;
namespace nccl = fk::nccl;
using nccl::Registration;

namespace {

size_t registrations() { return Process::get().live().registrations; }

void memory_is_registered_with_both() {
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  auto early = comm.allocate(1000, true);
  CHECK_EQUAL(registrations(), size_t{1});
  comm.open_reductions(fresh_id());
  CHECK_EQUAL(registrations(), size_t{2});
  auto late = comm.allocate(10, false);
  CHECK_EQUAL(registrations(), size_t{4});
  CHECK(late->registration() == Registration::kLocal);
  CHECK_EQUAL(late->nbytes(), size_t{10});
  CHECK(comm.allocate(0, false) == nullptr);
  comm.limit_registration(Registration::kNone);
  CHECK(comm.allocate(10, false)->registration() == Registration::kNone);
  CHECK(comm.take_messages().empty());
  late = nullptr;
  comm.close();
  CHECK_EQUAL(Process::get().live().memory, size_t{1});
  std::memset(early->data(), 0, early->nbytes());  // outlives the communicator
}

void symmetric_memory() {
  const std::string id = fresh_id();
  run_ranks(2, [&](int rank) {
    auto wanted = options(rank, 2);
    wanted.registration = Registration::kSymmetric;
    nccl::Communicator comm(api, wanted, id);
    const auto full = comm.allocate(1000, true), own = comm.allocate(1000, false);
    CHECK(full->registration() == Registration::kSymmetric);
    CHECK(own->registration() == Registration::kLocal);
    CHECK(comm.take_messages().empty());
    comm.close();
  });
}

void no_symmetric_memory() {
  Settings settings;
  settings.windows = false;
  Control::get().configure(settings);
  auto wanted = options(0, 1);
  wanted.registration = Registration::kSymmetric;
  nccl::Communicator comm(api, wanted, fresh_id());
  for (int i = 0; i < 2; ++i)
    CHECK(comm.allocate(1000, true)->registration() == Registration::kLocal);
  check_message(comm,
                "communicator 'test': expected a symmetric window, got none: not all ranks reach "
                "each other's memory (or NCCL_WIN_ENABLE=0). Buffers are registered by each rank "
                "alone.");
  comm.close();
}

void a_window_fails() {
  auto wanted = options(0, 1);
  wanted.registration = Registration::kSymmetric;
  nccl::Communicator comm(api, wanted, fresh_id());
  inject({"ncclCommWindowRegister", ncclSystemError, 1, -1, 0, "mmap"});
  const std::string text = failed("communicator 'test'", "ncclCommWindowRegister", 0, 1,
                                  "\"unhandled system error\" from NCCL: mmap (for 1000 bytes)");
  CHECK_EQUAL(thrown([&] { comm.allocate(1000, true); }), text);
  CHECK_EQUAL(comm.failure(), text);  // the peers are in the collective
}

// Once all ranks have a window, this one cannot go on with less.
void a_window_is_missing_later() {
  auto wanted = options(0, 1);
  wanted.registration = Registration::kSymmetric;
  nccl::Communicator comm(api, wanted, fresh_id());
  const auto before = comm.allocate(1000, true);
  Settings settings;
  settings.windows = false;
  Control::get().configure(settings);
  const std::string text =
      failed("communicator 'test'", "ncclCommWindowRegister", 0, 1, "no window (for 2000 bytes)");
  CHECK_EQUAL(thrown([&] { comm.allocate(2000, true); }), text);
  CHECK_EQUAL(comm.failure(), text);
}

constexpr const char* kTooMany = "\"unhandled system error\" from NCCL: too many";

void registration_fails() {
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  comm.open_reductions(fresh_id());
  inject({"ncclCommRegister", ncclSystemError, 2, -1, 0, "too many"});  // with the reductions
  CHECK(comm.allocate(1000, true)->registration() == Registration::kNone);
  CHECK_EQUAL(registrations(), size_t{0});
  check_message(
      comm,
      nccl::cat("communicator 'test': expected ncclCommRegister to take 1000 bytes, got ", kTooMany,
                ". Buffers are not registered; collectives copy through NCCL's own."));
  comm.close();
}

void registration_fails_later() {
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  comm.open_reductions(fresh_id());
  const auto before = comm.allocate(1000, true);
  inject({"ncclCommRegister", ncclSystemError, 2, -1, 0, "too many"});
  CHECK_EQUAL(
      thrown([&] { comm.allocate(2000, true); }),
      nccl::cat("communicator 'test': expected ncclCommRegister to take 2000 bytes, got ", kTooMany,
                ". Other buffers are registered, on all ranks: free memory, or choose no "
                "registration (none) for all."));
  CHECK(comm.failure().empty());
  CHECK(comm.take_messages().empty());
  CHECK(comm.allocate(2000, true)->registration() == Registration::kLocal);  // nothing is left
  gather_works(comm, 1);
  comm.close();
}

void registration_with_the_reductions_fails() {
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  const auto before = comm.allocate(1000, true);
  inject({"ncclCommRegister", ncclSystemError, 1, -1, 0, "too many"});
  const std::string text = nccl::cat(
      "communicator 'test': expected ncclCommRegister to take 1000 bytes for reductions "
      "too, got on rank 0: ",
      kTooMany,
      ". Other ranks have theirs: restart, with no registration (none) if it fails "
      "again.");
  CHECK_EQUAL(thrown([&] { comm.open_reductions(fresh_id()); }), text);
  CHECK_EQUAL(comm.failure(), text);
}

void no_memory_of_nccl() {
  const auto text = [](size_t nbytes, const std::string& got) {
    return "communicator 'test': expected ncclMemAlloc to give " + std::to_string(nbytes) +
           " bytes on device 0, got " + got +
           ". Such buffers come from torch's allocator instead, unregistered.";
  };
  Settings settings;
  settings.mem_alloc = false;
  Control::get().configure(settings);
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  CHECK(comm.allocate(1000, true) == nullptr);
  CHECK(comm.allocate(2000, true) == nullptr);
  check_message(comm, text(1000, "\"invalid usage\" from NCCL: ncclMemAlloc: not supported here"));
  gather_works(comm, 1);
  comm.close();
}

// What NCCL has given once, it is out of when it gives no more: told apart, and nothing else
// changes.
void out_of_memory() {
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  const auto before = comm.allocate(1000, true);
  inject({"ncclMemAlloc", ncclUnhandledCudaError, 1, -1, 0, "out of memory"});
  std::string text;
  try {
    comm.allocate(2000, true);
  } catch (const nccl::OutOfMemory& error) {
    text = error.what();
  }
  CHECK_EQUAL(text,
              "communicator 'test': expected ncclMemAlloc to give 2000 bytes on device 0, got "
              "\"unhandled cuda error\" from NCCL: out of memory. Free device memory: "
              "torch.cuda.empty_cache() gives back what torch keeps without using it.");
  CHECK(comm.failure().empty());
  CHECK(comm.take_messages().empty());
  CHECK(comm.allocate(2000, true) != nullptr);
  gather_works(comm, 1);
  comm.close();
}

size_t pieces() { return Process::get().live().memory; }

// Whoever drops a buffer touches neither the device nor NCCL; the communicator's next call does,
// when what uses the buffer is through.
void dropped_memory_goes_at_the_next_call() {
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  Device& device = Process::get().device();
  Stream* stream = device.make_stream(0);
  auto buffer = comm.allocate(1000, true);
  float seen = 0;
  auto* data = static_cast<float*>(buffer->data());
  device.launch(stream, [=] { *data = 5; });
  device.launch(stream, [data, &seen] { seen = *data; });
  std::thread([&] { buffer = nullptr; }).join();
  CHECK_EQUAL(seen, 0.0f);
  CHECK_EQUAL(registrations(), size_t{1});
  CHECK_EQUAL(pieces(), size_t{1});
  buffer = comm.allocate(10, true);
  CHECK_EQUAL(seen, 5.0f);
  CHECK_EQUAL(pieces(), size_t{1});
  CHECK_EQUAL(registrations(), size_t{1});
  buffer = nullptr;
  gather_works(comm, 1);
  CHECK_EQUAL(pieces(), size_t{0});
  CHECK_EQUAL(registrations(), size_t{0});
  buffer = comm.allocate(10, true);
  comm.close();
  buffer = nullptr;  // now nobody else would
  CHECK_EQUAL(pieces(), size_t{0});
  device.destroy_stream(stream);
}

}  // namespace

int main(int count, char** names) {
  return run_cases(
      {CASE(memory_is_registered_with_both), CASE(symmetric_memory), CASE(no_symmetric_memory),
       CASE(a_window_fails), CASE(a_window_is_missing_later), CASE(registration_fails),
       CASE(registration_fails_later), CASE(registration_with_the_reductions_fails),
       CASE(no_memory_of_nccl), CASE(out_of_memory), CASE(dropped_memory_goes_at_the_next_call)},
      count - 1, names + 1);
}
