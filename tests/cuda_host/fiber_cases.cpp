// SPDX-License-Identifier: Apache-2.0
// Shows that the host header finds what it is there to find: a missing barrier, and one that some
// threads never reach. Compiled with cuda_on_host.h in front.
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kThreads = 96;
constexpr int kBlocks = 3;

void check(bool good, const char* what) {
  if (good) return;
  std::printf("expected %s\n", what);
  std::exit(1);
}

// Every thread passes its number to the thread across; `synced` leaves the barrier out.
template <bool kSynced>
__global__ void turn_around(int* out) {
  __shared__ int values[kThreads];
  const int self = static_cast<int>(threadIdx.x);
  values[self] = self + static_cast<int>(blockIdx.x) * kThreads;
  if constexpr (kSynced) __syncthreads();
  out[blockIdx.x * kThreads + self] = values[kThreads - 1 - self];
  __syncthreads();
}

template <bool kSynced>
int wrong_after_turning() {
  std::vector<int> out(kBlocks * kThreads, -1);
  fk::host::launch(&turn_around<kSynced>, kBlocks, kThreads, out.data());
  int wrong = 0;
  for (int block = 0; block < kBlocks; ++block) {
    for (int self = 0; self < kThreads; ++self) {
      const int at = block * kThreads;
      wrong += out[at + self] != at + kThreads - 1 - self;
    }
  }
  return wrong;
}

__global__ void sum_of_warps(double* out) {
  double sum = threadIdx.x;
  for (unsigned lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = sum;
}

__global__ void barrier_in_a_branch(int) {
  if (threadIdx.x < 50) __syncthreads();
}

__global__ void shuffle_in_a_branch(int* out) {
  if (threadIdx.x < 50) *out = __shfl_down_sync(~0u, 1, 1);
}

template <class... Parameters, class... Arguments>
bool refuses(void (*kernel)(Parameters...), Arguments... arguments) {
  try {
    fk::host::launch(kernel, 1, kThreads, arguments...);
  } catch (const std::logic_error& error) {
    return std::string(error.what()).find("Move it out of the branch") != std::string::npos;
  }
  return false;
}

}  // namespace

int main() {
  check(wrong_after_turning<true>() == 0, "the right values with a barrier");
  check(wrong_after_turning<false>() > 0, "wrong values without the barrier");
  double sums[3] = {};
  fk::host::launch(&sum_of_warps, 1, kThreads, static_cast<double*>(sums));
  check(sums[0] == 496 && sums[1] == 1520 && sums[2] == 2544, "the sums of each warp's numbers");
  check(refuses(&barrier_in_a_branch, 0), "an error for a barrier in a branch");
  int out = 0;
  check(refuses(&shuffle_in_a_branch, &out), "an error for a shuffle in a branch");
  check(wrong_after_turning<true>() == 0, "the right values after an error");
  std::printf("checked fibers\n");
}
