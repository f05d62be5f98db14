# SPDX-License-Identifier: Apache-2.0
"""Communication backends: the only place that calls a collective."""

from fsdp_kernels.comm._nccl_setup import NcclOptions
from fsdp_kernels.comm.base import Comm, Ticket
from fsdp_kernels.comm.hybrid import HybridComm
from fsdp_kernels.comm.nccl import NcclComm
from fsdp_kernels.comm.process_group import ProcessGroupComm
from fsdp_kernels.comm.shared_memory import SharedMemoryComm

__all__ = [
    "Comm",
    "HybridComm",
    "NcclComm",
    "NcclOptions",
    "ProcessGroupComm",
    "SharedMemoryComm",
    "Ticket",
]
