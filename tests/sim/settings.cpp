// SPDX-License-Identifier: Apache-2.0
#include "sim/settings.h"

#include <stdexcept>

namespace fk::sim {

Policy parse_policy(const std::string& name) {
  if (name == "lazy") return Policy::kLazy;
  if (name == "eager") return Policy::kEager;
  if (name == "random") return Policy::kRandom;
  if (name == "round_robin") return Policy::kRoundRobin;
  throw std::invalid_argument("policy: expected lazy, eager, random or round_robin, got " + name);
}

Control& Control::get() {
  static Control control;
  return control;
}

Settings Control::settings() const {
  const std::lock_guard lock(mutex_);
  return settings_;
}

void Control::configure(const Settings& settings) {
  const std::lock_guard lock(mutex_);
  settings_ = settings;
}

void Control::inject(const Fault& fault) {
  const std::lock_guard lock(mutex_);
  faults_.push_back(fault);
}

std::optional<Fault> Control::hit(const std::string& call, int device) {
  const std::lock_guard lock(mutex_);
  std::optional<Fault> found;
  for (auto fault = faults_.begin(); fault != faults_.end();) {
    const bool counts = fault->call == call && (fault->device < 0 || fault->device == device);
    if (counts && --fault->nth == 0 && !found) {
      found = *fault;
      fault = faults_.erase(fault);
    } else {
      ++fault;
    }
  }
  return found;
}

void Control::log(const Entry& entry) {
  const std::lock_guard lock(mutex_);
  entries_.push_back(entry);
}

std::vector<Entry> Control::entries() const {
  const std::lock_guard lock(mutex_);
  return entries_;
}

void Control::drop_wait(int nth) {
  const std::lock_guard lock(mutex_);
  drop_ = nth;
  waits_.clear();
}

bool Control::dropped(int device) {
  const std::lock_guard lock(mutex_);
  const auto at = static_cast<size_t>(device);
  if (waits_.size() <= at) waits_.resize(at + 1);
  return ++waits_[at] == drop_;
}

int Control::waits(int device) const {
  const std::lock_guard lock(mutex_);
  const auto at = static_cast<size_t>(device);
  return at < waits_.size() ? waits_[at] : 0;
}

void Control::add_config(const std::string& text) {
  const std::lock_guard lock(mutex_);
  configs_.push_back(text);
}

std::vector<std::string> Control::configs() const {
  const std::lock_guard lock(mutex_);
  return configs_;
}

void Control::capture(uintptr_t stream, bool on) {
  const std::lock_guard lock(mutex_);
  on ? void(captured_.insert(stream)) : void(captured_.erase(stream));
}

bool Control::capturing(uintptr_t stream) const {
  const std::lock_guard lock(mutex_);
  return captured_.contains(stream);
}

bool Control::capturing() const {
  const std::lock_guard lock(mutex_);
  return !captured_.empty();
}

void Control::violation(const std::string& text) {
  const std::lock_guard lock(mutex_);
  violations_.push_back(text);
}

std::vector<std::string> Control::violations() const {
  const std::lock_guard lock(mutex_);
  return violations_;
}

void Control::clear_log() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

void Control::reset() {
  const std::lock_guard lock(mutex_);
  settings_ = {};
  faults_.clear();
  entries_.clear();
  waits_.clear();
  drop_ = 0;
  captured_.clear();
  configs_.clear();
  violations_.clear();
}

}  // namespace fk::sim
