# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: one thread, no hypothesis deadlines, skips that say why."""

from __future__ import annotations

import os

# Before torch: with more threads, ranks fight for the cores, and a forked child of a process that
# has used OpenMP threads hangs in its first parallel region.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Asks NVML instead of the CUDA runtime, so that `torch.cuda.is_available()` leaves this process
# fit for forking.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest
import torch

torch.set_num_threads(1)

# So that a failed assert of the kernel contract shows its values too.
pytest.register_assert_rewrite("kernel_adam_cases", "kernel_move_cases", "kernel_problems")
pytest.register_assert_rewrite("kernel_reduce_cases", "kernel_reduce_adam_cases")

# Triton reads this when the module of a kernel is imported. Without a device its kernels run in
# the interpreter, on CPU tensors; `test_triton_aot.py` compiles them in a process of its own.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from hypothesis import settings
except ModuleNotFoundError:  # as may be on a GPU host; the tests that need it say so
    pass
else:
    # Shared machines stall for longer than any deadline; a slow example is not a wrong one.
    settings.register_profile("fsdp_kernels", deadline=None, max_examples=60, print_blob=True)
    settings.load_profile("fsdp_kernels")

_DEVICES_NEEDED = {"gpu": 1, "multigpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine lacks the devices for, and say so."""
    for name, needed in _DEVICES_NEEDED.items():
        marked = [item for item in items if item.get_closest_marker(name)]
        if not marked:
            continue
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < needed:
            reason = f"needs {needed} CUDA device(s), found {found}"
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
