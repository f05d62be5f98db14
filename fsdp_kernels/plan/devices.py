# SPDX-License-Identifier: Apache-2.0
"""Devices and links by name, with the figures of their makers' data sheets.

Operations per second are dense (data sheets also quote twice as much "with sparsity"). Bandwidths
of links are per GPU and direction (NVIDIA quotes the sum of both for NVLink). Memory is what the
name says, in powers of ten; a device shows a little more.

Sources:
    A100: NVIDIA A100 Tensor Core GPU data sheet (SXM4, 40 and 80 GB): 312 TFLOPS BF16, 1,555 and
        2,039 GB/s, NVLink 600 GB/s. DGX A100: one HDR InfiniBand port (200 Gb/s) for each GPU.
    H100: NVIDIA H100 Tensor Core GPU data sheet (SXM5): 1,979 TFLOPS BF16 with sparsity, 3.35 TB/s,
        NVLink 900 GB/s. DGX H100: one NDR port (400 Gb/s) for each GPU.
    H200: NVIDIA H200 Tensor Core GPU data sheet (SXM): 141 GB, 4.8 TB/s, otherwise as H100.
    B200: NVIDIA DGX B200 data sheet, an eighth of it: 1,440 GB, 64 TB/s, 72 PFLOPS FP8 (training)
        with sparsity, NVLink 14.4 TB/s; one 400 Gb/s port for each GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as its data sheet has it, in a host with eight of them.

    Attributes:
        name: What the user writes.
        memory_bytes: Device memory.
        memory_bytes_per_s: Its bandwidth.
        flops: Dense operations per second of matrix products, by dtype.
        nvlink_bytes_per_s: To the other GPUs of the host, per direction.
        network_bytes_per_s: To other hosts, per direction.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops: dict[str, float]
    nvlink_bytes_per_s: float
    network_bytes_per_s: float


_A100 = {"fp64": 19.5e12, "fp32": 156e12, "bf16": 312e12, "fp16": 312e12, "int8": 624e12}
_H100 = {"fp64": 67e12, "fp32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12}
_B200 = {"fp64": 37e12, "fp32": 1125e12, "bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12}

DEVICES = {
    device.name: device
    for device in (
        # Products of fp32 matrices are counted as TF32, as tensor cores do them.
        Device("A100-40GB", 40 * 10**9, 1.555e12, _A100, 300e9, 25e9),
        Device("A100", 80 * 10**9, 2.039e12, _A100, 300e9, 25e9),
        Device("H100", 80 * 10**9, 3.35e12, _H100, 450e9, 50e9),
        Device("H200", 141 * 10**9, 4.8e12, _H100, 450e9, 50e9),
        Device("B200", 180 * 10**9, 8.0e12, _B200, 900e9, 50e9),
    )
}

GPUS_PER_HOST = 8


def find(name: str) -> Device:
    """Look a device up, whatever the case of its name.

    Raises:
        ValueError: There is none of that name.
    """
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise ValueError(
        f"--device: expected {', '.join(DEVICES)}, got {name!r}. Give another one's memory with "
        "--hbm."
    )
