# SPDX-License-Identifier: Apache-2.0
"""The same training without sharding: on one process, or with DistributedDataParallel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lm.report import KINDS, storage_bytes


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the global gradient norm first, as `ShardedAdamW(max_grad_norm=…)` does."""

    def __init__(self, params: Any, *, max_grad_norm: float | None, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self.max_grad_norm = max_grad_norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, then step."""
        params = [p for group in self.param_groups for p in group["params"]]
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        return super().step(closure)


def replicated(model: nn.Module, dtype: torch.dtype, *, ddp: bool) -> nn.Module:
    """Prepare a model for training with all its parameters on every rank."""
    if dtype != torch.float32:
        compute_in(model, dtype)
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if ddp else model


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every module compute with low-precision copies of its fp32 parameters.

    That is what `MixedPrecisionPolicy(param_dtype=dtype)` means, so the numbers can be compared
    (autocast would keep some operations in fp32). Python finds what is in `__dict__` before the
    registered parameter, so the copy stands in for it during the module's call.
    """

    copied: dict[tuple[nn.Module, str], int] = {}
    model.copied_bytes = copied  # type: ignore[assignment]  # for the report

    def cast(module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            copy = module.__dict__[name] = parameter.to(dtype)
            copied[module, name] = copy.nbytes

    def uncast(module: nn.Module, *_: Any) -> None:
        for name in module._parameters:
            module.__dict__.pop(name, None)

    for module in model.modules():
        module.register_forward_pre_hook(cast)
        module.register_forward_hook(uncast, always_call=True)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Any = None) -> None:
    """Write the state once and each rank's `extra`; an earlier checkpoint stays until then."""
    rank, staged = dist.get_rank(), path.with_name(path.name + ".new")
    if rank == 0:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        state = {"model": plain(model).state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, staged / "state.pt")
    dist.barrier()
    torch.save(extra, staged / f"extra{rank}.pt")
    dist.barrier()
    if rank == 0:
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        os.replace(staged, path)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Load a checkpoint in place and return this rank's `extra`."""
    state = torch.load(path / "state.pt", map_location="cpu")
    plain(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return torch.load(path / f"extra{dist.get_rank()}.pt")


def plain(model: nn.Module) -> nn.Module:
    """Take DistributedDataParallel off, so that a checkpoint's names do not depend on it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def measured_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Add up the tensors that this rank holds, by kind. Call it before `zero_grad`."""
    parameters = list(model.parameters())
    own = storage_bytes(parameters)
    copies = sum(getattr(plain(model), "copied_bytes", {}).values())
    states = optimizer.state.values()
    moments = [v for state in states for k, v in state.items() if k.startswith("exp_avg")]
    grads = [p.grad for p in parameters if p.grad is not None]
    return dict.fromkeys(KINDS, 0) | {
        "params": copies or own,
        "master": own if copies else 0,
        "moments": storage_bytes(moments),
        "grads": storage_bytes(grads),
    }
