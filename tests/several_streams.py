# SPDX-License-Identifier: Apache-2.0
"""Programs that compute on several streams, for the happens-before check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from models import Block, Net
from stream_stage import Scenario, Stage
from streamed_comm import hop, join
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F


class Spread(Net):
    """Blocks on streams in turn; the root's own layers on the first and the last of them."""

    streams: tuple[Any, ...] = ()
    cuda: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            x = block(hop(x, self.cuda, self.streams[number % len(self.streams)]))
        return self.head(x)


def spread(stage: Stage, streams: int, prefetch: int = 1) -> None:
    stage.shard(partial(Spread, depth=4), prefetch=prefetch)
    _give_streams(stage, streams)
    for number in range(4):
        stage.forward_backward()
        stage.cuda.go(stage.cuda.ambient, stage.cuda.current)
        if number == 2:
            stage.forward_backward()
            stage.cuda.go(stage.cuda.ambient, stage.cuda.current)
        stage.step()


def _give_streams(stage: Stage, count: int) -> None:
    stage.model.cuda = stage.cuda
    stage.model.streams = tuple(stage.cuda.stream() for _ in range(count))


class Parallel(Net):
    """One block, and then another, called on two streams that do not wait for one another."""

    streams: tuple[Any, ...] = ()
    cuda: Any = None

    def forward(self, x: Tensor) -> Tensor:
        cuda, home = self.cuda, self.cuda.current
        x = self.inp(x)
        for left, right in ((0, 0), (1, 2)):
            made = [
                (self.blocks[block](hop(x, cuda, stream, home)), stream)
                for block, stream in zip((left, right), self.streams, strict=True)
            ]
            x = torch.stack(join(made, cuda, home)).sum(0)
        return self.head(x)


class UnevenParallel(Parallel):
    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(Block(hidden=hidden) for hidden in (64, 16, 4))


def parallel(stage: Stage, prefetch: int, factory: Callable[[], nn.Module] = Parallel) -> None:
    stage.shard(factory, prefetch=prefetch)
    _give_streams(stage, 2)
    stage.train(4)


class Fan(Net):
    """Blocks side by side, each on a stream of its own; some may be left out."""

    cuda: Any = None
    streams: tuple[Any, ...] = ()
    left_out: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(Block(hidden=hidden) for hidden in (16, 64, 16))

    def forward(self, x: Tensor) -> Tensor:
        cuda, home = self.cuda, self.cuda.current
        x = self.inp(x)
        made = [
            (block(hop(x, cuda, stream, home)), stream)
            for i, (block, stream) in enumerate(zip(self.blocks, self.streams, strict=True))
            if i not in self.left_out
        ]
        return self.head(torch.stack(join(made, cuda, home)).sum(0))


def stepped(stage: Stage, factory: Callable[[], nn.Module], streams: int) -> None:
    """Steps in backward, on whichever stream backward has come to."""
    stage.shard(factory, overlap=True)
    _give_streams(stage, streams)
    for _ in range(4):
        stage.forward_backward()
        stage.cuda.go(stage.cuda.ambient, stage.cuda.current)
        stage.step()


def fan(stage: Stage) -> None:
    """Gradients left over by some blocks; others' then take memory that was freed elsewhere."""
    stage.shard(Fan)
    _give_streams(stage, 3)
    for _ in range(3):
        stage.model.left_out = (0,)
        with stage.model.no_sync():
            stage.forward_backward()
        stage.model.left_out = ()
        stage.forward_backward()
        stage.step()


class Split(Block):
    """A unit whose layers run on two streams."""

    streams: tuple[Any, ...] = ()
    cuda: Any = None

    def forward(self, x: Tensor) -> Tensor:
        cuda, home = self.cuda, self.cuda.current
        y = F.gelu(self.up(self.norm(hop(x, cuda, self.streams[0], home))))
        return x + hop(self.down(hop(y, cuda, self.streams[1])), cuda, home)


def split(stage: Stage, block: Callable[[int], nn.Module]) -> None:
    stage.shard(partial(Net, block=block))
    _give_streams(stage, 2)
    for block in stage.model.blocks:
        block.cuda, block.streams = stage.cuda, stage.model.streams
    stage.train(3)


class Forked(Block):
    """A unit of two branches on two streams, which bring gradients that nothing orders."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim, dim)
        self.norm = nn.Identity()

    streams: tuple[Any, ...] = ()
    cuda: Any = None

    def forward(self, x: Tensor) -> Tensor:
        cuda, home = self.cuda, self.cuda.current
        a = self.up(hop(x, cuda, self.streams[0], home))
        b = self.down(hop(x, cuda, self.streams[1], home))
        a, b = join([(a, self.streams[0]), (b, self.streams[1])], cuda, home)
        return a + b


class _Stop(torch.autograd.Function):
    """Lets no gradient through, though what comes after it has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


class Ending(Net):
    """A frozen block in a branch whose backward ends there, on a stream of its own."""

    cuda: Any = None
    aside: Any = None

    def forward(self, x: Tensor) -> Tensor:
        cuda, home = self.cuda, self.cuda.current
        x = hop(self.blocks[0](self.inp(x)), cuda, home)
        side = self.blocks[1](hop(_Stop.apply(x), cuda, self.aside, home))
        (side,) = join([(side, self.aside)], cuda, home)
        x = x + side
        for block in self.blocks[2:]:
            x = block(x)
        return self.head(x)


def ending(stage: Stage, overlap: bool = False) -> None:
    """Others' reductions are waited for on a stream that autograd has no reason to wait for."""

    def made() -> Net:
        model = Ending(depth=4)
        model.blocks[1].requires_grad_(False)
        return model

    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    stage.shard(made, mp_policy=policy, prefetch=0, overlap=overlap)
    stage.model.cuda, stage.model.aside = stage.cuda, stage.cuda.stream()
    stage.train(3)


def elsewhere(stage: Stage) -> None:
    """A training loop on a stream of its own, and a step on another, which sees the gradients."""
    stage.shard(partial(Net, depth=4))
    own, stepping = stage.cuda.stream(), stage.cuda.stream()
    stage.train(1)
    stage.optimizer = torch.optim.SGD(stage.model.parameters(), lr=0.1)
    for _ in range(3):
        stage.cuda.go(own, stage.cuda.current)
        stage.cuda.ambient = own
        stage.forward_backward()
        stage.cuda.go(stepping, own)
        stage.step()


SEVERAL: dict[str, Scenario] = {
    "blocks on two streams": partial(spread, streams=2),
    "blocks on three streams": partial(spread, streams=3, prefetch=2),
    "two streams at once": partial(parallel, prefetch=1),
    "two streams at once, no prefetch": partial(parallel, prefetch=0),
    "two streams at once, uneven": partial(parallel, prefetch=0, factory=UnevenParallel),
    "three streams at once, left over": fan,
    "steps in backward on two streams": partial(
        stepped, factory=partial(Spread, depth=6), streams=2
    ),
    "steps in backward on three streams": partial(
        stepped, factory=partial(Spread, depth=6), streams=3
    ),
    "steps in backward on two streams at once": partial(stepped, factory=Parallel, streams=2),
    "layers of a unit on two streams": partial(split, block=Split),
    "branches of a unit on two streams": partial(split, block=Forked),
    "a branch that ends on its own stream": ending,
    "steps in backward, in a branch that ends": partial(ending, overlap=True),
    "loop and step on other streams": elsewhere,
}
