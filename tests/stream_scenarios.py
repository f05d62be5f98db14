# SPDX-License-Identifier: Apache-2.0
"""What a training program may do, played on recorded streams for the happens-before check."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from models import Block, Net, Routed
from several_streams import SEVERAL
from stream_stage import Scenario, Stage
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import full_state_dict, load_full_state_dict


def plain(stage: Stage, prefetch: int) -> None:
    stage.shard(partial(Net, depth=4), prefetch=prefetch)
    stage.train(4)
    stage.model.eval()
    with torch.no_grad():
        stage.loss()
    stage.train(1)


def accumulate(stage: Stage) -> None:
    """Several backwards a step, some of them under `no_sync`, and left over for the step."""
    stage.shard()
    for quiet in [(0, 0), (1, 0), (1, 1), (0, 1), (1, 0, 1)]:
        for under in quiet:
            if under:
                with stage.model.no_sync():
                    stage.forward_backward()
            else:
                stage.forward_backward()
        stage.step()


def accumulate_low_precision(stage: Stage) -> None:
    """Sums of bf16 reductions in the parameters' fp32: reduced into memory of its own."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    stage.shard(mp_policy=policy)
    for _ in range(3):
        stage.forward_backward()
        stage.forward_backward()
        stage.step()


class Reusing(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 1, 0, 2, 0):
            x = self.blocks[index](x)
        return self.head(x)


def reuse(stage: Stage) -> None:
    stage.shard(Reusing)
    stage.train(3)


class Recomputing(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def recompute(stage: Stage, reentrant: bool) -> None:
    stage.shard(Recomputing)
    stage.model.reentrant = reentrant
    stage.train(3)


class Failing(Net):
    fail_in: str = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            if number == 1 and self.fail_in == "backward":
                x = x * 1.0
                x.register_hook(_fail)
            x = block(x)
            if number == 1 and self.fail_in == "forward":
                _fail(x)
        return self.head(x)


def _fail(_: Tensor) -> None:
    raise ArithmeticError("told to fail")


def fail(stage: Stage, where: str) -> None:
    """Fail at once, in a settled run and before a step, and go on."""
    stage.shard(Failing, prefetch=2)
    for settled in (0, 1, 3):
        stage.train(settled)
        stage.model.fail_in = where
        with suppress(ArithmeticError):
            stage.forward_backward()
        stage.cuda.rest()
        stage.model.fail_in = ""
        if settled == 1:
            for p in stage.model.parameters():
                p.grad = torch.ones_like(p)
        else:
            stage.forward_backward()
        stage.step()


def keep(stage: Stage) -> None:
    """Units that stay full: unsharded early, edited while full, forwards without backwards."""
    stage.shard()
    stage.train(2)
    stage.model.unshard()
    for block in stage.model.blocks:
        block.unshard()
    stage.train(1)
    stage.loss()
    stage.loss()
    with torch.no_grad():
        stage.model.blocks[2].up.bias.mul_(0.5)  # full for a backward that does not come
    stage.train(1)
    stage.model.unshard()
    stage.model.reshard()
    stage.train(1)


def cast(stage: Stage) -> None:
    """Masters in fp32, computation in bf16, edits between the steps and other optimizers."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stage.shard(mp_policy=policy)
    stage.train(2)
    with torch.no_grad():
        stage.model.blocks[1].up.weight.clamp_(-0.1, 0.1)
    stage.train(1)
    stage.optimizer = torch.optim.AdamW(stage.model.parameters())
    stage.train(2)


def low_precision(stage: Stage) -> None:
    """Parameters in bf16, with masters that the optimizer keeps."""
    stage.shard(dtype=torch.bfloat16)
    stage.train(2, dtype=torch.bfloat16)
    with torch.no_grad():
        stage.model.blocks[1].up.weight.clamp_(-0.1, 0.1)
    stage.train(1, dtype=torch.bfloat16)


def gradients(stage: Stage) -> None:
    """Whoever reads, clips, clears or replaces gradients between backward and step."""
    stage.shard()
    stage.optimizer = torch.optim.SGD(stage.model.parameters(), lr=0.1, foreach=True)
    for number in range(4):
        stage.forward_backward()
        stage.model.clip_grad_norm_(1.0)
        up = stage.model.blocks[0].up
        if number == 1:
            up.weight.grad = None
        if number == 2:
            up.weight.grad = torch.ones_like(up.weight)
            stage.forward_backward()
        stage.optimizer.step()
        stage.model.zero_grad(set_to_none=number % 2 == 0)


def edit(stage: Stage) -> None:
    stage.shard(prefetch=0)
    stage.train(1)
    with stage.model.full_params() as params, torch.no_grad():
        params["head.weight"].mul_(2.0)
    stage.train(1)
    state = full_state_dict(stage.model, rank0_only=False)
    stage.model.head.weight.full_tensor()
    stage.train(1)
    load_full_state_dict(stage.model, state)
    stage.train(1)


class Uneven(Net):
    """Each block larger than the one before: slots are dropped for larger ones."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(Block(hidden=8 * 2**i) for i in range(4))


def uneven(stage: Stage) -> None:
    stage.shard(Uneven, prefetch=0)
    stage.train(3)


def several_dtypes(stage: Stage) -> None:
    """Two buckets a unit: their collectives travel as a group."""

    def mixed() -> Net:
        model = Net()
        for block in model.blocks:
            block.norm.requires_grad_(False)
        return model

    stage.shard(mixed)
    stage.train(3)
    for block in stage.model.blocks:
        block.norm.requires_grad_(True)
    stage.train(2)


def routed(stage: Stage) -> None:
    """Ranks that use different parameters, and others at each step."""
    stage.shard(Routed, units=lambda module: False)
    for step in range(4):
        stage.forward_backward((stage.rank + step) % 3)
        stage.step()


def overlapped(stage: Stage, prefetch: int, **kwargs: Any) -> None:
    """Steps in backward, one of which fails half-way."""
    stage.shard(partial(Failing, depth=5), overlap=True, prefetch=prefetch, **kwargs)
    stage.train(3)
    stage.model.fail_in = "backward"
    with suppress(ArithmeticError):
        stage.forward_backward()
    stage.cuda.rest()
    stage.model.fail_in = ""
    stage.optimizer.accept_failed_backward()
    stage.train(2)


SCENARIOS: dict[str, Scenario] = {
    **{f"plain, prefetch {n}": partial(plain, prefetch=n) for n in (0, 1, 2, 9)},
    "accumulate": accumulate,
    "accumulate in low precision": accumulate_low_precision,
    "reuse": reuse,
    "checkpoint": partial(recompute, reentrant=False),
    "checkpoint, reentrant": partial(recompute, reentrant=True),
    "failed forward": partial(fail, where="forward"),
    "failed backward": partial(fail, where="backward"),
    "kept full": keep,
    "cast": cast,
    "low precision": low_precision,
    "gradients": gradients,
    "edits": edit,
    "uneven": uneven,
    "several buckets": several_dtypes,
    "routed": routed,
    **{f"steps in backward, prefetch {n}": partial(overlapped, prefetch=n) for n in (0, 1)},
    "steps in backward, cast": partial(
        overlapped, prefetch=1, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    ),
    **SEVERAL,
}
