// SPDX-License-Identifier: Apache-2.0
#include "sim/comm.h"

#include <algorithm>
#include <cstring>

#include "sim/device.h"
#include "sim/reduce.h"

namespace fk::sim {
namespace {

using std::chrono::milliseconds;

constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in every signed integer

char* at(void* data, size_t offset) { return static_cast<char*>(data) + offset; }
const char* at(const void* data, size_t offset) { return static_cast<const char*>(data) + offset; }

// Bytes that each rank gets of a result, and how many such parts a rank's source has.
size_t part_bytes(const Operation& o) { return o.count * itemsize(o.dtype); }
size_t source_parts(const Operation& o, int world) {
  return o.kind == Kind::kReduceScatter ? static_cast<size_t>(world) : 1;
}
size_t target_parts(const Operation& o, int world) {
  return o.kind == Kind::kAllGather ? static_cast<size_t>(world) : 1;
}

// NaN over `target`, but for what lies in `kept`.
void fill_around(Span target, Span kept) {
  const uintptr_t end = target.data + target.nbytes;
  const uintptr_t first = std::clamp(kept.data, target.data, end);
  const uintptr_t second = std::clamp(kept.data + kept.nbytes, first, end);
  std::memset(reinterpret_cast<void*>(target.data), kPoison, first - target.data);
  std::memset(reinterpret_cast<void*>(second), kPoison, end - second);
}

}  // namespace

const char* to_string(Kind kind) {
  constexpr const char* kNames[] = {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce",
                                    "ncclBroadcast"};
  return kNames[static_cast<int>(kind)];
}

Comm::Comm(Device& device, const std::string& name, int world, int rank, const ncclConfig_t& config)
    : device_(device),
      meeting_(name, world, rank),
      label_(config.commName != nullptr ? config.commName : name),
      blocking_(config.blocking != 0),  // undefined is blocking, as in NCCL
      chunk_(std::min(Control::get().settings().chunk_bytes, kAreaBytes)) {}

Comm::~Comm() { stop_service(); }

uint64_t Comm::add(Stream* stream) {
  queue_.push_back(stream);
  meeting_.ring();  // peers may have waited for this
  return launched_++;
}

Span Comm::read_span(const Operation& o) const {
  if (o.kind == Kind::kBroadcast && o.root != meeting_.rank()) return {};
  return {reinterpret_cast<uintptr_t>(o.source), part_bytes(o) * source_parts(o, meeting_.world())};
}

Span Comm::write_span(const Operation& o) const {
  return {reinterpret_cast<uintptr_t>(o.target), part_bytes(o) * target_parts(o, meeting_.world())};
}

void Comm::poison(Operation& o) {
  if (!o.poisoned) fill_around(write_span(o), read_span(o));
  o.poisoned = true;
}

Offer Comm::offer(const Operation& o) const {
  return {o.number,
          o.round,
          o.count,
          static_cast<int32_t>(o.kind),
          static_cast<int32_t>(o.dtype),
          static_cast<int32_t>(o.op),
          o.root};
}

Step Comm::step(Operation& o) {
  if (aborted_) {
    complete();
    return Step::kDone;
  }
  Slot& mine = meeting_.mine();
  if (mine.wanted.load() <= o.number) {
    mine.wanted.store(o.number + 1);
    meeting_.ring();
  }
  if (state() != ncclSuccess) return Step::kBlocked;
  poison(o);

  const size_t parts = source_parts(o, meeting_.world());
  const size_t item = itemsize(o.dtype);
  const size_t piece = std::max(chunk_ / parts / item, size_t{1}) * item;
  const size_t offset = o.round * piece;
  const size_t nbytes = std::min(piece, part_bytes(o) - offset);
  if (!o.posted) {
    if (meeting_.least(&Slot::taken) < rounds_) return Step::kBlocked;
    post(o, offset, nbytes);
  }
  if (meeting_.least(&Slot::posted) <= rounds_) return Step::kBlocked;
  if (!offers_agree(o)) return Step::kBlocked;
  take(o, offset, nbytes);
  if (offset + nbytes < part_bytes(o)) return Step::kProgress;
  complete();
  return Step::kDone;
}

void Comm::post(Operation& o, size_t offset, size_t nbytes) {
  const size_t parts = source_parts(o, meeting_.world());
  char* area = meeting_.area(meeting_.rank());
  if (o.kind != Kind::kBroadcast || o.root == meeting_.rank())
    for (size_t part = 0; part < parts; ++part)
      std::memcpy(area + part * nbytes, at(o.source, part * part_bytes(o) + offset), nbytes);
  // In place: what was read is what will be written, and until then it is nobody's.
  if (o.kind == Kind::kAllReduce && o.source == o.target)
    std::memset(at(o.target, offset), kPoison, nbytes);
  meeting_.mine().offer = offer(o);
  meeting_.mine().posted.store(rounds_ + 1);
  meeting_.ring();
  o.posted = true;
}

bool Comm::offers_agree(const Operation& o) {
  for (int r = 0; r < meeting_.world(); ++r) {
    const Offer& theirs = meeting_.slot(r).offer;
    if (theirs == offer(o)) continue;
    if (!Control::get().settings().mismatch_hangs)
      fail(ncclInvalidUsage, "collective " + std::to_string(o.number) + ": rank " +
                                 std::to_string(meeting_.rank()) + " has " + to_string(o.kind) +
                                 " of " + std::to_string(o.count) + ", rank " + std::to_string(r) +
                                 " has " + to_string(static_cast<Kind>(theirs.kind)) + " of " +
                                 std::to_string(theirs.count));
    return false;
  }
  return true;
}

void Comm::take(Operation& o, size_t offset, size_t nbytes) {
  const int world = meeting_.world();
  if (o.kind == Kind::kAllGather) {
    for (int r = 0; r < world; ++r)
      std::memcpy(at(o.target, static_cast<size_t>(r) * part_bytes(o) + offset), meeting_.area(r),
                  nbytes);
  } else if (o.kind == Kind::kBroadcast) {
    std::memcpy(at(o.target, offset), meeting_.area(o.root), nbytes);
  } else {
    const size_t mine = o.kind == Kind::kReduceScatter ? static_cast<size_t>(meeting_.rank()) : 0;
    std::vector<const void*> sources;
    for (int r = 0; r < world; ++r) sources.push_back(meeting_.area(r) + mine * nbytes);
    reduce(sources, at(o.target, offset), nbytes / itemsize(o.dtype), o.dtype, o.op);
  }
  meeting_.mine().taken.store(++rounds_);
  meeting_.ring();
  o.posted = false;
  ++o.round;
}

void Comm::complete() {
  queue_.pop_front();
  ++completed_;
}

void Comm::abandon(Operation& o) {
  const bool begun = o.posted || o.round > 0;
  if (begun) fill_around(write_span(o), o.kind == Kind::kAllGather ? read_span(o) : Span{});
}

ncclResult_t Comm::state() {
  {
    const std::lock_guard lock(error_mutex_);
    if (error_ != ncclSuccess) return error_;
  }
  return meeting_.all_here() ? ncclSuccess : ncclInProgress;
}

void Comm::fail(ncclResult_t code, const std::string& text) {
  const std::lock_guard lock(error_mutex_);
  if (error_ != ncclSuccess) return;
  error_ = code;
  error_text_ = text;
}

std::string Comm::last_error() const {
  const std::lock_guard lock(error_mutex_);
  return error_text_;
}

void Comm::abort() {
  aborted_ = true;
  meeting_.mine().aborted.store(1);
  meeting_.ring();
}

void Comm::start_service() {
  service_ = std::thread([this] { serve(); });
}

void Comm::stop_service() {
  stopping_ = true;
  meeting_.ring();
  if (service_.joinable()) service_.join();
}

void Comm::serve() {
  while (!stopping_) {
    const uint32_t seen = meeting_.bell();
    const auto blocked = device_.work_for(*this, meeting_.others_most(&Slot::wanted));
    if (stopping_) return;
    if (blocked && blocked->comm.get() != this)
      blocked->comm->meeting().wait(blocked->seen, milliseconds(20));  // then look at both bells
    else
      meeting_.wait(seen, milliseconds(1000));
  }
}

Comm::Use::Use(Comm& comm, const char* call) : comm_(comm) {
  if (comm_.users_.fetch_add(1) != 0)
    Control::get().violation(std::string(call) + ": another thread is in communicator " +
                             comm_.label() + "; NCCL allows one at a time");
  ++comm_.touched_;
}

}  // namespace fk::sim
