# SPDX-License-Identifier: Apache-2.0
"""What this installation is made of and runs on, for bug reports and for rows of benches."""

from __future__ import annotations

import platform
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from fsdp_kernels import _ext
from fsdp_kernels._version import __version__

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
        "nccl": _nccl(),
        "gpus": _gpus(),
        "comm": _picked_comm,
    }


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_kernels() -> str:
    module = _ext.load("_cpu")
    return f"C++, {module.level()}" if isinstance(module, ModuleType) else f"reference ({module})"


def _nccl() -> dict[str, Any] | str:
    module = _ext.load("_nccl")
    if isinstance(module, str):
        return module
    return {
        "version": _dotted(module.runtime_version()),
        "built_with": _dotted(module.header_version()),
        "built_with_cuda": f"{module.cuda_version() // 1000}.{module.cuda_version() % 1000 // 10}",
    }


def _dotted(version: int) -> str:
    """Spell NCCL's number (23007) as a version ("2.30.7")."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def _gpus() -> list[dict[str, Any]] | str:
    try:
        import pynvml
    except ImportError:
        return "unknown: the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"none: {error}"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError as error:
        return f"unknown: {error}"
    finally:
        pynvml.nvmlShutdown()
