// SPDX-License-Identifier: Apache-2.0
#include "sim/training.h"

#include <string>
#include <utility>

#include "sim/process.h"

namespace fk::sim {

using namespace maths;

std::vector<Outcome> oracle(const Shape& s) {
  const size_t ranks = s.ranks(), buckets = static_cast<size_t>(2 * s.units);
  std::vector<Values> full(buckets), totals(buckets);
  for (size_t b = 0; b < buckets; ++b) {
    const int unit = static_cast<int>(b / 2), bucket = static_cast<int>(b % 2);
    totals[b].resize(s.full(unit, bucket));
    for (size_t i = 0; i < totals[b].size(); ++i) full[b].push_back(initial(unit, bucket, i));
  }
  std::vector<Outcome> outcomes(ranks);
  for (int step = 0; step < s.steps; ++step) {
    for (int micro = 0; micro < s.micro_batches; ++micro)
      for (size_t r = 0; r < ranks; ++r) {
        float x = input(static_cast<int>(r), step, micro);
        for (const Values& each : full) x = maths::forward(x, each.data(), each.size());
        outcomes[r].loss = std::fmod(outcomes[r].loss + x, kPrime);
        for (int unit = s.units - 1; unit >= 0; --unit) {
          for (size_t b = 2 * static_cast<size_t>(unit); b <= 2 * static_cast<size_t>(unit) + 1;
               ++b) {
            Values grads(full[b].size());
            maths::backward(x, full[b].data(), grads.data(), grads.size());
            for (size_t i = 0; i < grads.size(); ++i) totals[b][i] += grads[i];
          }
          x = maths::forward(x, full[2 * static_cast<size_t>(unit)].data(), 1);
        }
      }
    float norm = 0;
    for (size_t r = 0; r < ranks; ++r) {
      float mine = 0;
      for (size_t b = 0; b < buckets; ++b) {
        const size_t n = totals[b].size() / ranks;
        for (size_t i = r * n; i < (r + 1) * n; ++i) mine += totals[b][i];
      }
      norm += std::fmod(mine, kPrime);
    }
    for (size_t b = 0; b < buckets; ++b)
      for (size_t i = 0; i < full[b].size(); ++i)
        full[b][i] = maths::step(full[b][i], std::exchange(totals[b][i], 0.0f), scale(norm));
  }
  for (size_t r = 0; r < ranks; ++r)
    for (const Values& each : full) {
      const auto n = static_cast<std::ptrdiff_t>(each.size() / ranks);
      const auto first = each.begin() + static_cast<std::ptrdiff_t>(r) * n;
      outcomes[r].shards.emplace_back(first, first + n);
    }
  return outcomes;
}

Trainer::Trainer(const Shape& shape, int rank, nccl::Communicator& comm)
    : shape_(shape),
      rank_(rank),
      comm_(comm),
      device_(Process::get().device()),
      compute_(device_.make_stream(0)),
      side_(device_.make_stream(0)) {
  for (int unit = 0; unit < shape.units; ++unit)
    for (int bucket = 0; bucket < 2; ++bucket) {
      shards_.emplace_back(shape.shard(unit, bucket), NAN);
      reduced_.emplace_back(shape.shard(unit, bucket), NAN);
      totals_.emplace_back(shape.shard(unit, bucket), 0.0f);
    }
  for (int i = 0; i < 4; ++i) {
    slots_.emplace_back(shape.full(shape.units, 1), NAN);
    grads_.emplace_back(shape.full(shape.units, 1), NAN);
  }
  gathers_.resize(static_cast<size_t>(shape.units));
  reductions_.resize(static_cast<size_t>(shape.units));
}

Trainer::~Trainer() {
  device_.destroy_stream(compute_);
  device_.destroy_stream(side_);
}

void Trainer::wait(Ticket& ticket) {
  if (ticket != nullptr) std::exchange(ticket, nullptr)->wait(compute());
}

void Trainer::gather(int unit) {
  for (int bucket = 0; bucket < 2; ++bucket) {
    const Values& shard = shards_[at(unit, bucket)];
    const std::string label = "unit " + std::to_string(unit) + "/" + std::to_string(bucket);
    // The group has one event: the first ticket stands for both.
    Ticket ticket = comm_.all_gather(label, slot(unit, bucket), shard.data(),
                                     shard.size() * sizeof(float), compute());
    if (bucket == 0) gathers_[static_cast<size_t>(unit)] = std::move(ticket);
  }
}

void Trainer::reduce(int unit) {
  for (int bucket = 0; bucket < 2; ++bucket) {
    Values& reduced = reduced_[at(unit, bucket)];
    const std::string label = "unit " + std::to_string(unit) + "/" + std::to_string(bucket);
    Ticket ticket = comm_.reduce_scatter(label, reduced.data(), grads(unit, bucket), reduced.size(),
                                         ncclFloat32, compute());
    if (bucket == 0) reductions_[static_cast<size_t>(unit)] = std::move(ticket);
  }
}

void Trainer::run() {
  start();
  for (int step = 0; step < shape_.steps; ++step) {
    for (int micro = 0; micro < shape_.micro_batches; ++micro) micro_batch(step, micro);
    update();
  }
}

void Trainer::finish(First first) {
  const cudaStream_t chosen = first == First::kCompute   ? compute()
                              : first == First::kGathers ? comm_.gather_stream()
                                                         : comm_.reduce_stream();
  // This stream, and of the others what it waits for.
  device_.synchronize(device_.record(reinterpret_cast<Stream*>(chosen)));
  device_.synchronize();
}

// Rank 0's weights for everyone, one bucket after the other through one slot.
void Trainer::start() {
  for (int unit = 0; unit < shape_.units; ++unit)
    for (int bucket = 0; bucket < 2; ++bucket) {
      float* full = slot(0, 0);
      const size_t n = shape_.full(unit, bucket);
      kernel([=, this] {
        for (size_t i = 0; i < n; ++i) full[i] = rank_ == 0 ? initial(unit, bucket, i) : NAN;
      });
      Ticket ticket = comm_.broadcast("start", full, n * sizeof(float), 0, compute());
      wait(ticket);
      Values& shard = shards_[at(unit, bucket)];
      kernel([=, this, &shard] {
        const float* first = full + static_cast<size_t>(rank_) * shard.size();
        shard.assign(first, first + shard.size());
      });
    }
}

void Trainer::micro_batch(int step, int micro) {
  const int units = shape_.units;
  kernel([=, this] { x_ = input(rank_, step, micro); });
  const auto gather_all = [&](int unit) {
    comm_.begin_group();
    gather(unit);
    comm_.end_group(compute());
  };
  gather_all(0);
  for (int unit = 0; unit < units; ++unit) {
    if (unit == 0) kernel([this] { slots_[2].assign(slots_[2].size(), NAN); });  // a freed slot
    if (unit + 1 < units) gather_all(unit + 1);  // into the slot of the unit before this one
    wait(gathers_[static_cast<size_t>(unit)]);
    forward(unit);
  }
  kernel([this] { loss_ = std::fmod(loss_ + x_, kPrime); });
  for (int unit = units - 1; unit >= 0; --unit) {
    // The last two units are still there; the gradient slot, until the one before was reduced.
    wait(gathers_[static_cast<size_t>(unit)]);
    if (unit + 2 < units) accumulate(unit + 2);
    backward(unit);
    comm_.begin_group();
    reduce(unit);
    if (unit >= 2) gather(unit - 2);  // into the slot that this unit has left
    comm_.end_group(compute());
  }
  for (int unit = std::min(1, units - 1); unit >= 0; --unit) accumulate(unit);
}

void Trainer::forward(int unit) {
  kernel([=, this] {
    for (int bucket = 0; bucket < 2; ++bucket)
      x_ = maths::forward(x_, slot(unit, bucket), shape_.full(unit, bucket));
  });
}

void Trainer::backward(int unit) {
  kernel([=, this] {
    for (int bucket = 0; bucket < 2; ++bucket)
      maths::backward(x_, slot(unit, bucket), grads(unit, bucket), shape_.full(unit, bucket));
    x_ = maths::forward(x_, slot(unit, 0), 1);
  });
}

void Trainer::accumulate(int unit) {
  wait(reductions_[static_cast<size_t>(unit)]);
  kernel([=, this] {
    for (int bucket = 0; bucket < 2; ++bucket)
      for (size_t i = 0; i < shape_.shard(unit, bucket); ++i)
        totals_[at(unit, bucket)][i] += reduced_[at(unit, bucket)][i];
  });
}

void Trainer::update() {
  kernel([this] {
    norm_ = 0;
    for (const Values& total : totals_)
      for (const float each : total) norm_ += each;
    norm_ = std::fmod(norm_, kPrime);
  });
  // Another stream waits for the norm, as a user's own may, and the compute stream for that one.
  const Ticket ticket = comm_.all_reduce("norm", &norm_, 1, ncclFloat32, ncclSum, compute());
  ticket->wait(reinterpret_cast<cudaStream_t>(side_));
  device_.launch(side_, [this] { scale_ = scale(norm_); });
  device_.wait(compute_, device_.record(side_));
  kernel([this] {
    for (size_t b = 0; b < shards_.size(); ++b)
      for (size_t i = 0; i < shards_[b].size(); ++i)
        shards_[b][i] = maths::step(shards_[b][i], std::exchange(totals_[b][i], 0.0f), scale_);
  });
}

}  // namespace fk::sim
