// SPDX-License-Identifier: Apache-2.0
#include "cpu/level.h"

#include <atomic>
#include <stdexcept>

namespace fk::cpu {

namespace baseline {
extern const Level kLevel;
}
#ifdef __x86_64__
namespace avx2 {
extern const Level kLevel;
}
namespace avx512 {
extern const Level kLevel;
}
#endif

namespace {

std::vector<const Level*> available() {
  std::vector<const Level*> found{&baseline::kLevel};
#ifdef __x86_64__
  const bool fused = __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (__builtin_cpu_supports("avx2") && fused) {
    found.push_back(&avx2::kLevel);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found.push_back(&avx512::kLevel);
    }
  }
#endif
  return found;
}

std::atomic<const Level*>& current() {
  static std::atomic<const Level*> chosen{available().back()};
  return chosen;
}

}  // namespace

const Level& level() { return *current().load(std::memory_order_relaxed); }

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const Level* one : available()) names.emplace_back(one->name);
  return names;
}

void set_level(const std::string& name) {
  std::string names;
  for (const Level* one : available()) {
    if (name == one->name) {
      current().store(one, std::memory_order_relaxed);
      return;
    }
    names += std::string(names.empty() ? "" : ", ") + one->name;
  }
  throw std::invalid_argument("set_level: expected one of " + names + ", got '" + name +
                              "'. Pass a level that this processor has.");
}

}  // namespace fk::cpu
