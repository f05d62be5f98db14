// SPDX-License-Identifier: Apache-2.0
// What nearly every file here and in csrc/nccl includes: read once, it halves the time to build.
// The files include what they use all the same. (No include guard: it is read as a main file.)

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>
