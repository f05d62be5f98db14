// SPDX-License-Identifier: Apache-2.0
// What the programs of this directory share: checks that throw, ranks as threads, cases by name.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "sim/process.h"
#include "sim/settings.h"

namespace fk::sim {

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

template <class A, class B>
void check_equal(const char* file, int line, const A& got, const B& expected) {
  if (got == expected) return;
  std::ostringstream text;
  text << "expected\n  " << expected << "\ngot\n  " << got;
  fail(file, line, text.str());
}

#define CHECK(condition) \
  if (!(condition)) fk::sim::fail(__FILE__, __LINE__, "expected " #condition)
#define CHECK_EQUAL(got, expected) fk::sim::check_equal(__FILE__, __LINE__, got, expected)

// The text of what the call throws.
inline std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::logic_error& error) {
    if (dynamic_cast<const std::invalid_argument*>(&error) == nullptr) throw;
    return error.what();
  } catch (const std::exception& error) {
    return error.what();
  }
  throw std::logic_error("expected an exception, got none");
}

// Calls fn(rank) on as many threads, each on the device of its rank. Throws the first failure.
inline void run_ranks(int world, const std::function<void(int)>& fn) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      Process::set_current_device(rank);
      try {
        fn(rank);
      } catch (const std::exception& error) {
        // Now: the other ranks may hang for want of this one.
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

struct Case {
  const char* name;
  std::function<void()> run;
};

#define CASE(name) {#name, name}

// A case that hangs ends the program, with its name.
inline std::string running;
inline void give_up(int) {
  const std::string text = "FAILED " + running + ": hangs\n";
  const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
  _exit(written > 0 ? 1 : 2);
}
constexpr unsigned kPatience = 60;  // seconds, of a case

// A case leaves nothing alive, and has not done what NCCL forbids.
inline int run_cases(const std::vector<Case>& cases, int count, char** names) {
  int failures = 0, ran = 0;
  signal(SIGALRM, give_up);
  for (const Case& each : cases) {
    bool chosen = count == 0;
    for (int i = 0; i < count; ++i) chosen |= std::strcmp(names[i], each.name) == 0;
    if (!chosen) continue;
    ++ran;
    Control::get().reset();
    running = each.name;
    alarm(kPatience);
    try {
      each.run();
      for (const std::string& text : Control::get().violations()) fail(each.name, 0, text);
      const Live live = Process::get().live();
      if (live != Live{})
        fail(each.name, 0,
             "left over: streams " + std::to_string(live.streams) + ", events " +
                 std::to_string(live.events) + ", comms " + std::to_string(live.comms) +
                 ", memory " + std::to_string(live.memory) + ", registrations " +
                 std::to_string(live.registrations));
      std::printf("ok %s\n", each.name);
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", each.name, error.what());
      ++failures;
    }
    std::fflush(stdout);
  }
  std::printf("%d cases, %d failed\n", ran, failures);
  return failures == 0 && ran > 0 ? 0 : 1;
}

}  // namespace fk::sim
