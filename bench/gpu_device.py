# SPDX-License-Identifier: Apache-2.0
"""Print what the device, the driver and the libraries are, as one line of JSON."""

from __future__ import annotations

import ctypes
import json
import platform
import sys
from importlib import metadata
from typing import Any

import torch


def nccl_version() -> int | str:
    """Ask the library that torch has loaded; `torch.cuda.nccl` knows what torch was built with."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return f"unknown: {error}"
    return number.value


def driver_version() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # of an optional package, or of the driver
        return f"unknown: {error}"


def distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, Any]:
    """List the versions; nothing here needs a device."""
    names = ("triton", "numpy", "pybind11", "ninja", "pytest", "pytest-xdist", "hypothesis")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        **{name: distribution(name) for name in names},
        "nccl": nccl_version(),
        "driver": driver_version(),
        "platform": platform.platform(),
    }


def main() -> int:
    found = versions()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        x = torch.ones(1024, device="cuda")
        found |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": total,
            "free_bytes": free,
            "works": x.sum().item() == 1024,
        }
    print(json.dumps(found))
    return 0 if found.get("works") else 1


if __name__ == "__main__":
    sys.exit(main())
