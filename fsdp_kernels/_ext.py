# SPDX-License-Identifier: Apache-2.0
"""The only place that knows of compiled modules: loads them, and tells why one is absent."""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from types import ModuleType

NOT_BUILT = "not built"


@cache
def load(name: str) -> ModuleType | str:
    """Import one compiled module.

    Args:
        name: ``"_cpu"``, ``"_cuda"`` or ``"_nccl"``.

    Returns:
        The module; or, where it was not built or a library that it needs is absent, why not.
    """
    try:
        return importlib.import_module(f"fsdp_kernels.{name}")
    except ModuleNotFoundError:
        return NOT_BUILT
    except ImportError as error:
        why = "undefined symbol: nccl" in str(error) and "NCCL 2.27 or later is needed: "
        return f"built, but does not load: {why or ''}{error}"


def cpu() -> ModuleType | None:
    """Return the CPU kernels, or None where they were not built (`ops` then uses the reference).

    Raises:
        ImportError: If they were built but do not load. Going on without them would be slow
            without a word.
    """
    return _required("_cpu")


def cuda() -> ModuleType | None:
    """Return the CUDA kernels, or None where they were not built (`ops` then uses Triton).

    Raises:
        ImportError: If they were built but do not load.
    """
    return _required("_cuda")


def nccl() -> ModuleType | None:
    """Return the NCCL module, or None where it was not built. The first call loads libnccl.

    Raises:
        ImportError: If it was built but does not load.
    """
    return _required("_nccl")


def never_destroy(thing: object) -> None:
    """Leave an object to the end of the process, since its destructor would wait for others."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _required(name: str) -> ModuleType | None:
    module = load(name)
    if isinstance(module, ModuleType):
        return module
    if module == NOT_BUILT:
        return None
    raise ImportError(
        f"fsdp_kernels.{name}: expected the module built for this Python, got {module}. Build it "
        "again: pip install --no-build-isolation --force-reinstall --no-deps fsdp-kernels."
    )
