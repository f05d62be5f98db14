# SPDX-License-Identifier: Apache-2.0
"""What this installation is made of and runs on, for bug reports and for rows of benches."""

from __future__ import annotations

import platform
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from fsdp_kernels import _ext, _nvml
from fsdp_kernels._version import __version__
from fsdp_kernels.comm.peer import availability
from fsdp_kernels.comm.pick import choose, dotted, nccl_range

_picked_comm: str | None = None


def note_comm(name: str) -> None:
    """Remember the communication backend that was picked last, for `environment`."""
    global _picked_comm
    _picked_comm = name


def environment() -> dict[str, Any]:
    """Describe versions, what was built, devices and the communication backend.

    Works on any host; asks NVML, not CUDA, for the GPUs, so no CUDA context is made. Loads libnccl
    where the NCCL module was built.

    Returns:
        Strings, numbers, None, lists and dicts only: `json.dumps` takes it.
    """
    return {
        "fsdp_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _distribution("triton"),
        "torch_cuda": torch.version.cuda,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "cpu_kernels": _cpu_kernels(),
        "cuda_kernels": _cuda_kernels(),
        "nccl": _nccl(),
        "peer_memory": availability(),
        "gpus": _nvml.gpus(),
        "comm": _picked_comm,
        "comm_if_none": {kind: _would_pick(kind) for kind in ("cuda", "cpu")},
    }


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_kernels() -> str:
    module = _ext.load("_cpu")
    return f"C++, {module.level()}" if isinstance(module, ModuleType) else f"reference ({module})"


def _cuda_kernels() -> str:
    module = _ext.load("_cuda")
    if isinstance(module, str):
        return f"Triton (the CUDA module is {module})"
    return f"CUDA C++ for {', '.join(module.architectures())}"


def _would_pick(device_type: str) -> str:
    choice = choose(device_type)
    return f"{choice.name} ({choice.reason})"


def _nccl() -> dict[str, Any] | str:
    module = _ext.load("_nccl")
    if isinstance(module, str):
        return module
    version = module.runtime_version()
    return {
        "version": dotted(version),
        "range": nccl_range(version),
        "built_with": dotted(module.header_version()),
        "built_with_cuda": f"{module.cuda_version() // 1000}.{module.cuda_version() % 1000 // 10}",
    }
