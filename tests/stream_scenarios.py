# SPDX-License-Identifier: Apache-2.0
"""What a training program may do, played on recorded streams for the happens-before check."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from models import Block, Net, Routed, Turn, build, sharded_adamw
from streamed_comm import Cuda, backward, hop, join
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from watched_ops import WatchedOps

from fsdp_kernels import full_state_dict, fully_shard, load_full_state_dict
from fsdp_kernels.comm.base import Comm

Scenario = Callable[["Stage"], None]


class Stage:
    """One rank's streams and communicator, and the usual moves."""

    def __init__(self, rank: int, world: int, comm: Comm, cuda: Cuda) -> None:
        self.rank, self.world, self.comm, self.cuda = rank, world, comm, cuda
        self.exits = ExitStack()
        self.steps = 0
        self.model: Any = None
        self.optimizer: Any = None

    def shard(self, factory: Callable[[], nn.Module] = Net, **kwargs: Any) -> None:
        """Build, shard and get an optimizer that clips."""
        self.model = build(factory, kwargs.pop("dtype", None))
        fully_shard(self.model, **{"units": Block, "comm": self.comm, **kwargs})
        runtime = self.model.units[0].runtime
        self.watched = WatchedOps(runtime, runtime.resources.streams.name)
        self.exits.enter_context(self.watched)
        for leaf in [leaf for bucket in runtime.buckets for leaf in bucket.leaves]:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(self.cuda.note_leaf)
        self.optimizer = sharded_adamw(self.model.parameters(), max_grad_norm=1.0)

    def loss(self, *args: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Run a forward."""
        turn = Turn(self.rank, self.world, self.steps, dtype)
        output = self.model(turn.rand(4, 3), *args)
        return F.mse_loss(output, turn.rand(4, 5, salt=1))

    def forward_backward(self, *args: Any, **kwargs: Any) -> None:
        """Run a forward and a backward."""
        backward(self.loss(*args, **kwargs), self.cuda)

    def step(self) -> None:
        """Step and clear."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def train(self, steps: int = 3, **kwargs: Any) -> None:
        """Run some whole steps."""
        for _ in range(steps):
            self.forward_backward(**kwargs)
            self.step()


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


# -- several compute streams ----------------------------------------------------------------------


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


def ending(stage: Stage) -> None:
    """Others' reductions are waited for on a stream that autograd has no reason to wait for."""

    def made() -> Net:
        model = Ending(depth=4)
        model.blocks[1].requires_grad_(False)
        return model

    stage.shard(made, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), prefetch=0)
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
    "blocks on two streams": partial(spread, streams=2),
    "blocks on three streams": partial(spread, streams=3, prefetch=2),
    "two streams at once": partial(parallel, prefetch=1),
    "two streams at once, no prefetch": partial(parallel, prefetch=0),
    "two streams at once, uneven": partial(parallel, prefetch=0, factory=UnevenParallel),
    "three streams at once, left over": fan,
    "layers of a unit on two streams": partial(split, block=Split),
    "branches of a unit on two streams": partial(split, block=Forked),
    "a branch that ends on its own stream": ending,
    "loop and step on other streams": elsewhere,
}
