# SPDX-License-Identifier: Apache-2.0
"""Small models, and the unsharded oracle that the contract tests compare training with.

A scenario says how a model is built and what one rank does in one step (its `play`). `check` trains
it sharded on every rank and, in each process, unsharded with all ranks' data, and compares losses,
gradients, parameters and moments at every step. The oracle plays the ranks' turns one after the
other with losses divided by the world size, so its gradients are what sharding must give: the mean
over ranks of the sum over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo  # every rank's first optimizer does, and would take half a second for it
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import ShardedAdamW, fully_shard, record_schedule

RTOL = 1e-6
"""Of the norm of what is compared; the contract's tolerance for float64 and for fed fp32."""


class Block(nn.Module):
    """A pre-norm residual MLP whose sizes no world from 2 to 4 divides."""

    def __init__(self, dim: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An input layer, blocks and a head: the root keeps the first and the last."""

    def __init__(self, depth: int = 3, dim: int = 7, block: Callable[[int], nn.Module] = Block):
        super().__init__()
        self.inp = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 5, bias=False)
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.offset


class Routed(nn.Module):
    """A unit with one branch per route: what a rank does not take, it does not use."""

    def __init__(self, dim: int = 7, branches: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(3, dim)
        self.branches = nn.ModuleList(nn.Linear(dim, dim) for _ in range(branches))
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor, route: int) -> Tensor:
        return self.head(torch.tanh(self.branches[route](self.inp(x))))


class Sided(Block):
    """Has a layer that some ranks use: the others' units are complete later."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.extra = nn.Linear(dim, dim)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.extra(x) if self.use else 0.0)


@dataclass(frozen=True)
class Turn:
    """One rank's turn in one step: its own data, and how it calls backward."""

    rank: int
    world: int
    step: int
    dtype: torch.dtype = torch.float64
    scale: float = 1.0
    sharded: bool = True
    device: str = "cpu"

    def rand(self, *shape: int, salt: int = 0) -> Tensor:
        """Return the same numbers whenever this rank asks for them in this step."""
        seed = 1_000_003 * salt + 1009 * self.step + self.rank + 1
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(
            self.device, self.dtype
        )

    def backward(self, loss: Tensor, **kwargs: Any) -> Tensor:
        """Run backward, and return the loss as the whole batch sees it."""
        (loss * self.scale).backward(**kwargs)
        return loss.detach().double() * self.scale

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Enter the model's `no_sync`; the unsharded model has nothing to delay."""
        return model.no_sync() if self.sharded else nullcontext()


Play = Callable[[nn.Module, Turn], Tensor]


def mse(model: nn.Module, turn: Turn) -> Tensor:
    """Play one forward and one backward of a regression."""
    loss = F.mse_loss(model(turn.rand(4, 3)), turn.rand(4, 5, salt=1))
    return turn.backward(loss)


def lopsided(model: nn.Module, turn: Turn) -> Tensor:
    """Each rank leaves out another block's extra layer, and another one at each step."""
    for index, block in enumerate(model.blocks):
        block.use = (index + turn.rank + turn.step) % 3 != 0
    return mse(model, turn)


by_block = partial(fully_shard, units=Block)
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
sharded_adamw = partial(ShardedAdamW, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Scenario:
    """How to build, shard, train and compare.

    Attributes:
        device: Where both models and the data are; ranks compare on the host, over gloo.
        build: Makes the model; called under a fixed seed.
        play: One rank's turn in one step.
        dtype: Of the whole model and its data; None leaves the model as it is built.
        before: Done to both models before each step (edits, freezing).
        fed: Copy the sharded run's gradients into the oracle after comparing them, so that fp32
            rounding noise in a gradient is not turned into a full Adam step.
        optimizer, oracle: Make the optimizers from a model's parameters.
    """

    build: Callable[[], nn.Module] = Net
    play: Play = mse
    steps: int = 5
    dtype: torch.dtype | None = torch.float64
    shard: Callable[[nn.Module], nn.Module] = by_block
    optimizer: Callable[[Any], torch.optim.Optimizer] = sharded_adamw
    oracle: Callable[[Any], torch.optim.Optimizer] = adamw
    before: Callable[[nn.Module, int], None] | None = None
    fed: bool = False
    params: Callable[[nn.Module], Any] = lambda model: model.parameters()
    rtol: float = RTOL
    device: str = "cpu"


def build(factory: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """Build the same model on every rank and in every process."""
    torch.manual_seed(1234)
    model = factory()
    return model if dtype is None else model.to(dtype)


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached; collective for sharded ones."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def full_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return many whole tensors with two collectives, which is what makes the oracle cheap.

    A sharded tensor is its ranks' fragments, one after the other.
    """
    if not any(hasattr(t, "to_local") for t in tensors):
        return [t.detach().clone() for t in tensors]
    local = [t.to_local() if hasattr(t, "to_local") else t.new_empty(0) for t in tensors]
    world = dist.get_world_size()
    lengths = torch.tensor([t.numel() for t in local])
    every_length = [torch.empty_like(lengths) for _ in range(world)]
    dist.all_gather(every_length, lengths)
    longest = int(max(each.sum() for each in every_length))
    flat = torch.zeros(longest, dtype=torch.float64)
    flat[: int(lengths.sum())] = torch.cat([t.detach().double().cpu() for t in local])
    every_flat = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(every_flat, flat)
    pieces = [
        each[: int(length.sum())].split(length.tolist())
        for each, length in zip(every_flat, every_length, strict=True)
    ]
    # Of several replicas each has all fragments: this rank looks at its own.
    shards = next(t.geometry.comm.world for t in tensors if hasattr(t, "to_local"))
    first = dist.get_rank() // shards * shards
    pieces = pieces[first : first + shards]
    return [
        torch.cat([piece[i] for piece in pieces]).to(t.dtype).view(t.shape)
        if hasattr(t, "to_local")
        else t.detach().clone()
        for i, t in enumerate(tensors)
    ]


def full_params(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters by name; collective for a sharded model."""
    named = dict(model.named_parameters())
    return dict(zip(named, full_all(list(named.values())), strict=True))


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return whole gradients by name; collective for a sharded model."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    present = {name: grad for name, grad in grads.items() if grad is not None}
    whole = dict(zip(present, full_all(list(present.values())), strict=True))
    return {name: whole.get(name) for name in grads}


def states(model: nn.Module) -> set[str]:
    """Return the states that the model's units are in."""
    return {unit.state for unit in model.units}


def storage_bytes(tensors: list[Tensor]) -> int:
    """Count the bytes of the distinct storages behind some tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def assert_close(got: Tensor, want: Tensor, what: str, rtol: float = RTOL, floor: float = 0.0):
    """Check that a difference is within rtol of the expected norm (or of the floor)."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.cpu(), want.cpu()
    error = (got.double() - want.double()).norm().item()
    bound = rtol * max(want.double().norm().item(), floor)
    assert error <= bound, f"{what}: off by {error:.3e}, at most {bound:.3e} allowed"


def assert_grads(sharded: nn.Module, plain: nn.Module, where: str, rtol: float = RTOL) -> None:
    """Check gradients by name; what is None on one side must be None on the other."""
    got, want = full_grads(sharded), full_grads(plain)
    assert list(got) == list(want), f"{where}: names changed"
    total = sum(g.double().norm().item() ** 2 for g in want.values() if g is not None) ** 0.5
    for name, grad in want.items():
        assert (got[name] is None) == (grad is None), f"{where}: {name}.grad is {got[name]}"
        if grad is not None:
            # Rounding noise of a gradient that is zero in exact arithmetic has no norm of its own;
            # in fp32 the noise of a small gradient is that of the large terms that it is a sum of.
            floor = total if grad.dtype == torch.float32 else 1e-3 * total
            assert_close(got[name], grad, f"{where}: gradient of {name}", rtol, floor)


def assert_params(sharded: nn.Module, plain: nn.Module, where: str, rtol: float = RTOL) -> None:
    """Check whole parameters by name."""
    want = full_params(plain)
    for name, got in full_params(sharded).items():
        assert_close(got, want[name], f"{where}: parameter {name}", rtol)


def assert_moments(
    pair: tuple[nn.Module, torch.optim.Optimizer],
    oracle: tuple[nn.Module, torch.optim.Optimizer],
    where: str,
    rtol: float = RTOL,
) -> None:
    """Check every state tensor of every parameter, and its step count."""
    plain = dict(oracle[0].named_parameters())
    shards: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, p in pair[0].named_parameters():
        got, want = pair[1].state.get(p, {}), oracle[1].state.get(plain[name], {})
        if not want:
            assert float(got.get("step", 0)) == 0, f"{where}: {name} was never used, yet stepped"
        for key, value in want.items():
            what = f"{where}: {key} of {name}"
            if key == "step":
                assert float(got[key]) == float(value), f"{what} is {got[key]}, not {value}"
            elif isinstance(value, Tensor):
                shards[what], wanted[what] = got[key], value
    for what, value in zip(shards, full_all(list(shards.values())), strict=True):
        assert_close(value, wanted[what], what, rtol)


def mean_loss(loss: Tensor) -> Tensor:
    """Average a loss over ranks."""
    total = loss.detach().double().cpu().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def turns(
    rank: int, world: int, step: int, dtype: torch.dtype, device: str = "cpu"
) -> Iterator[Turn]:
    """Yield the oracle's turns: every rank's, with the loss divided by the world size."""
    for other in range(world):
        yield Turn(other, world, step, dtype, scale=1 / world, sharded=False, device=device)


def check(rank: int, world: int, scenario: Scenario) -> None:
    """Train sharded and unsharded side by side and compare at every step."""
    train(rank, world, scenario)


def train(rank: int, world: int, scenario: Scenario) -> nn.Module:
    """Do the same and return the sharded model."""
    s = scenario
    data = s.dtype or torch.float32
    plain = build(s.build, s.dtype).to(s.device)
    sharded = s.shard(build(s.build, s.dtype).to(s.device))
    optimizer, oracle = s.optimizer(s.params(sharded)), s.oracle(s.params(plain))
    for step in range(s.steps):
        where = f"rank {rank} of {world}, step {step}"
        if s.before is not None:
            s.before(sharded, step)
            s.before(plain, step)
        loss = s.play(sharded, Turn(rank, world, step, data, device=s.device))
        others = turns(rank, world, step, data, s.device)
        want = torch.stack([s.play(plain, turn) for turn in others]).sum()
        assert_close(mean_loss(loss), want, f"{where}: loss", s.rtol)
        assert states(sharded) == {"SHARDED"}, f"{where}: units left {states(sharded)}"
        # Reading a gradient applies the divisor there and then: odd steps leave that to the step.
        early = s.fed or step % 2 == 0
        if early:
            assert_grads(sharded, plain, where, s.rtol)
        if s.fed:
            feed(sharded, plain)
        optimizer.step()
        oracle.step()
        if not early:
            assert_grads(sharded, plain, f"{where}, after step()", s.rtol)
        assert_params(sharded, plain, where, s.rtol)
        assert_moments((sharded, optimizer), (plain, oracle), where, s.rtol)
        optimizer.zero_grad()
        oracle.zero_grad()
    return sharded


def feed(sharded: nn.Module, plain: nn.Module) -> None:
    """Give the oracle the sharded run's own reduced gradients."""
    grads = full_grads(sharded)
    for name, p in plain.named_parameters():
        if p.grad is not None:
            p.grad.copy_(grads[name])


def check_all(rank: int, world: int, *scenarios: Scenario) -> None:
    """Check several scenarios in one set of processes."""
    for number, scenario in enumerate(scenarios):
        try:
            check(rank, world, scenario)
        except Exception as error:
            error.add_note(f"in scenario {number} of {len(scenarios)}")
            raise


def varied(scenario: Scenario, **changes: Any) -> Scenario:
    """Return the scenario with some fields changed."""
    return replace(scenario, **changes)


def schedules(rank: int, world: int, options: dict[str, Any]) -> list[list[str]]:
    """Record four steps of a model with two blocks.

    Args:
        rank, world: See `run_ranks`.
        options: Of `fully_shard`.
    """
    model = build(partial(Net, depth=2))
    fully_shard(model, units=Block, **options)
    optimizer = sharded_adamw(model.parameters())
    steps = []
    for step in range(4):
        with record_schedule() as schedule:
            mse(model, Turn(rank, world, step, torch.float32))
        optimizer.step()
        optimizer.zero_grad()
        steps.append([str(event) for event in schedule])
    return steps
