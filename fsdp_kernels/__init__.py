# SPDX-License-Identifier: Apache-2.0
"""fsdp_kernels: fully sharded data-parallel training for PyTorch with collective-fused kernels.

    fully_shard(model, units=Block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = ShardedAdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)

Importing does no work: no device is touched, no process group is made.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_kernels import checkpoint
from fsdp_kernels._environment import environment
from fsdp_kernels._version import __version__
from fsdp_kernels.checkpoint import full_state_dict, load_full_state_dict
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.comm.nccl import NcclComm
from fsdp_kernels.comm.process_group import ProcessGroupComm
from fsdp_kernels.comm.shared_memory import SharedMemoryComm
from fsdp_kernels.optim import ShardedAdam, ShardedAdamW
from fsdp_kernels.shard import ShardedModule, fully_shard
from fsdp_kernels.trace import record_schedule

__all__ = [
    "CPUOffloadPolicy",
    "Comm",
    "MixedPrecisionPolicy",
    "NcclComm",
    "OffloadPolicy",
    "ProcessGroupComm",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedModule",
    "SharedMemoryComm",
    "__version__",
    "checkpoint",
    "environment",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "record_schedule",
]
