# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's and Megatron-FSDP's sides of `step.py`, where they are installed.

Neither is needed by anything here, and neither could be tried where this was written: the calls
follow their documentation. The losses of a side are compared with the unsharded model's before it
is timed, as everybody's are, so a wrong adapter fails and does not enter a table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from workloads import ADAMW, Block, Shape, Side, build

DEEPSPEED, MEGATRON = "DeepSpeed ZeRO-3", "Megatron-FSDP"


def missing(device: str) -> dict[str, str]:
    """Say of each that cannot take part why."""
    found = {}
    if importlib.util.find_spec("deepspeed") is None:
        found[DEEPSPEED] = "deepspeed is not installed"
    if importlib.util.find_spec("megatron_fsdp") is None:
        found[MEGATRON] = "megatron_fsdp is not installed"
    elif device != "cuda":
        found[MEGATRON] = "it shards on CUDA devices only"
    return found


def makers(shape: Shape, rank: int, world: int) -> dict[str, Callable[[], Side]]:
    """Return what makes the sides that can take part."""
    every = {DEEPSPEED: partial(_deepspeed, shape, rank), MEGATRON: partial(_megatron, shape, rank)}
    absent = missing(shape.device)
    return {name: make for name, make in every.items() if name not in absent}


@dataclass
class EngineSide(Side):
    """A side whose model does its own backward and step, as DeepSpeed's engine does."""

    def accumulate(self, tokens: Tensor) -> Tensor:
        model: Any = self.model
        loss: Tensor = model(tokens)
        model.backward(loss)
        return loss.detach()

    def finish(self) -> None:
        model: Any = self.model
        model.step()


def _deepspeed(shape: Shape, rank: int) -> Side:
    import deepspeed

    model = build(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "gradient_clipping": shape.max_norm or 0.0,
        "bf16": {"enabled": shape.dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    engine, wrapped, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return EngineSide(engine, wrapped, None, [rank])


def _megatron(shape: Shape, rank: int) -> Side:
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    model = fully_shard_model(module=build(shape), fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(
        optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    )
    clip = None
    if shape.max_norm is not None:
        clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), shape.max_norm)
    low = None if shape.dtype == torch.float32 else shape.dtype
    return Side(model, optimizer, clip, [rank], low)
