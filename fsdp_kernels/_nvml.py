# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this host and the links between them, as NVML knows them: no CUDA context is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REMOTE_KINDS = {0: "gpu", 1: "npu", 2: "switch"}  # nvmlIntNvLinkDeviceType_t


def gpus() -> list[dict[str, Any]] | str:
    """Describe every GPU, or say why there is nothing to describe.

    Returns:
        For each GPU its name, memory, compute capability, driver, NVLinks (how many are up, what
        is at their other ends) and the indices of the GPUs that it reaches over NVLink.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return "unknown: the package nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"none: {error}"
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, handles, index) for index in range(len(handles))]
    except nvml.NVMLError as error:
        return f"unknown: {error}"
    finally:
        nvml.nvmlShutdown()


def why_unlinked(gpu: str, others: Sequence[str]) -> str:
    """Return why a GPU does not reach others over NVLink, as far as NVML can tell; "" if it does.

    Args:
        gpu: Its UUID, as NVML spells it ("GPU-...").
        others: Those of the others.
    """
    if not others:
        return ""
    try:
        import pynvml as nvml
    except ImportError:
        return "whether NVLink joins the GPUs is unknown: the package nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"whether NVLink joins the GPUs is unknown: {error}"
    try:
        own = nvml.nvmlDeviceGetHandleByUUID(gpu)
        for other in others:
            peer = nvml.nvmlDeviceGetHandleByUUID(other)
            status = nvml.nvmlDeviceGetP2PStatus(own, peer, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status != nvml.NVML_P2P_STATUS_OK:
                return f"no NVLink joins {gpu} and {other}"
    except nvml.NVMLError as error:
        return f"whether NVLink joins {gpu} and {', '.join(others)} is unknown: {error}"
    finally:
        nvml.nvmlShutdown()
    return ""


def _gpu(nvml: Any, handles: list[Any], index: int) -> dict[str, Any]:
    handle = handles[index]
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "compute_capability": f"{major}.{minor}",
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "nvlinks": _links(nvml, handle),
        "nvlink_peers": _peers(nvml, handles, index),
    }


def _links(nvml: Any, handle: Any) -> dict[str, int]:
    """Count the NVLinks that are up, by what is at their other end; {} where there is none."""
    found: dict[str, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except nvml.NVMLError:
            continue  # this GPU has no such link, or no NVLink at all
        try:
            kind = _REMOTE_KINDS.get(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
        except nvml.NVMLError:
            kind = None  # a virtual machine may not see the other end
        to = f"to_{kind or 'unknown'}"
        found[to] = found.get(to, 0) + 1
    return found


def _peers(nvml: Any, handles: list[Any], index: int) -> list[int]:
    """List the other GPUs to which NVML calls peer access over NVLink possible."""
    peers = []
    for other in range(len(handles)):
        if other == index:
            continue
        try:
            status = nvml.nvmlDeviceGetP2PStatus(
                handles[index], handles[other], nvml.NVML_P2P_CAPS_INDEX_NVLINK
            )
        except nvml.NVMLError:
            continue  # not told: says nothing of a link
        if status == nvml.NVML_P2P_STATUS_OK:
            peers.append(other)
    return peers
