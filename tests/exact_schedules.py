# SPDX-License-Identifier: Apache-2.0
"""Random legal schedules of the public interface, beside an oracle that has the same bits.

What would round differently in another order is made exact: each use of a parameter rounds its
gradient to a few multiples of a power of two times the number of ranks, so sums over ranks, uses
and micro-batches, and their means, are exact in whatever order and at whatever time they are taken.
Everything else is element-wise, or the reference of the Adam kernel. So any difference is a fault:
a stale weight, a gradient taken twice, a step that one rank sees half.

`python tests/exact_schedules.py WORLD ROWS SEED` plays one schedule alone.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from streamed_comm import Cuda, StreamedComm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import MixedPrecisionPolicy, ProcessGroupComm, ShardedAdamW, fully_shard, ops
from fsdp_kernels.comm import Comm, HybridComm, SharedMemoryComm
from fsdp_kernels.comm.base import Ticket
from fsdp_kernels.comm.solo import SoloComm
from triton_ops import reference
from triton_ops._common import COEF_COLUMNS, AdamShard
from triton_ops._fragments import FragmentTable

WIDTH = 37  # two such parameters lie on three ranks
PARTS = 3
ACTIONS = [3, 5, 12]
LR, BETAS, EPS, DECAY = 0.0625, (0.5, 0.75), 1e-6, 0.125


class _Exact(torch.autograd.Function):
    """Pass a parameter on; round its gradient to at most `most` multiples of a grid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: float, most: float) -> Tensor:
        ctx.grid, ctx.most = grid, most
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return (grad / ctx.grid).round().clamp(-ctx.most, ctx.most) * ctx.grid, None, None


class Part(nn.Module):
    """A unit that multiplies and, on ranks that are told to, adds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = nn.Parameter(1.0 + 0.25 * torch.randn(WIDTH, generator=generator))
        self.shift = nn.Parameter(0.25 * torch.randn(WIDTH, generator=generator))

    def forward(self, x: Tensor, exact: Callable[[Tensor], Tensor], shifts: bool) -> Tensor:
        x = x * exact(self.scale)
        return x + exact(self.shift) if shifts else x


class Model(nn.Module):
    """Parts in any order, each once or more or not at all, and a weight of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(number) for number in range(PARTS))
        self.out = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(
        self, x: Tensor, exact: Callable[[Tensor], Tensor], calls: Sequence[Call], fails: str = ""
    ) -> Tensor:
        for number, (index, kind, shifts) in enumerate(calls):
            if fails and number == len(calls) - 1:
                _fail_in(fails, x)
            part = self.parts[index]
            if kind == "plain":
                x = part(x, exact, shifts)
            else:
                x = checkpoint(part, x, exact, shifts, use_reentrant=kind == "reentrant")
        return x * exact(self.out)


Call = tuple[int, str, bool]


def _fail_in(where: str, x: Tensor) -> None:
    if where == "forward":
        raise ArithmeticError("told to fail")
    if x.requires_grad:
        x.register_hook(_raise)


def _raise(_: Tensor) -> None:
    raise ArithmeticError("told to fail")


# -- ranks ----------------------------------------------------------------------------------------


class Copied(SharedMemoryComm):
    """Full parameters in the pool's own slots, filled through shared memory: gloo, but faster."""

    name = "copied"

    places: dict[str, Any]  # by label; emptied for each model

    def place_params(self, nbytes: int, device: torch.device) -> None:
        return None

    def all_gather(self, full: Tensor, shard: Tensor, *, label: str) -> Ticket:
        if label not in self.places:
            self.places[label] = super().place_params(full.nbytes, full.device)
        place = self.places[label]
        place.wait_released(label=label)
        place.shard.copy_(shard.detach().view(torch.uint8))
        return _Copying(label, place.gather(label=label), place, full)


class _Copying(Ticket):
    def __init__(self, label: str, ticket: Ticket, place: Any, full: Tensor) -> None:
        super().__init__(label)
        self.ticket, self.place, self.full = ticket, place, full

    def _finish(self) -> None:
        self.ticket.wait()
        self.full.data.view(torch.uint8).copy_(self.place.full)
        self.place.release()


class Ranks:
    """The communicators of a world, made once: each lives through many schedules."""

    NAMES = ("shared_memory", "copied", "streamed", "process_group")

    def __init__(self, world: int, rows: int) -> None:
        self.rows = rows
        mesh = init_device_mesh("cpu", (rows, world // rows))
        self.row, self.column = mesh.get_group(1), mesh.get_group(0)
        self.slow = ProcessGroupComm(self.row), ProcessGroupComm(self.column), ProcessGroupComm()
        self.made: dict[str, tuple[Comm, Comm, Comm]] = {"process_group": self.slow}
        if world == 1:
            return
        across, everyone = self.shared(self.column), self.shared(None)
        for name, kind in (("shared_memory", SharedMemoryComm), ("copied", Copied)):
            inside = self.shared(self.row, kind) if rows < world else SoloComm()
            self.made[name] = inside, across, everyone

    @staticmethod
    def shared(group: Any, kind: type[SharedMemoryComm] = SharedMemoryComm) -> SharedMemoryComm:
        comm = kind(group)
        comm.reserve([1 << 23], 0)  # for all the models to come
        comm.prepare_reductions(1 << 13)
        return comm

    def comm(self, name: str, replicates: bool) -> Comm:
        """Return the ranks of one schedule; a Cuda of its own where it is streamed."""
        inside, across, everyone = self.made["copied" if name == "streamed" else name]
        if isinstance(inside, Copied):
            inside.places = {}
        if name == "streamed":
            inside = StreamedComm(inside, Cuda())
        if replicates:
            return HybridComm(SoloComm(), everyone, everyone)
        return inside if self.rows == 1 else HybridComm(inside, across, everyone)


# -- the oracle -----------------------------------------------------------------------------------


class Oracle:
    """The unsharded model: masters, a model that computes with them, exact sums of gradients.

    Attributes:
        model: In the compute dtype; its parameters are rounded from `masters`.
        sums: By parameter, the sum over ranks and micro-batches in float64, or None.
    """

    def __init__(self, dtype: torch.dtype, compute: torch.dtype) -> None:
        self.model = Model().to(compute)
        self.params = dict(self.model.named_parameters())
        self.masters = {n: p.detach().clone() for n, p in Model().to(dtype).named_parameters()}
        self.sums: dict[str, Tensor | None] = dict.fromkeys(self.params)
        self.moments: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def changed(self) -> None:
        """Compute with the masters as they are now."""
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(self.masters[name])

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Add every rank's gradients."""
        for loss in losses:
            loss.backward()
            for name, p in self.params.items():
                if p.grad is not None:
                    before = self.sums[name]
                    wide = p.grad.double()
                    self.sums[name] = wide if before is None else before + wide
                    p.grad = None

    def grad(self, name: str, world: int) -> Tensor | None:
        """Return a mean gradient in the parameter's own dtype."""
        total = self.sums[name]
        return None if total is None else (total / world).to(self.masters[name].dtype)

    def norm(self, world: int) -> float:
        """Return the norm of all mean gradients."""
        squares = [(s / world).square().sum() for s in self.sums.values() if s is not None]
        return float(sum(squares)) ** 0.5

    def adam(self, world: int, factor: float) -> None:
        """Step as `ShardedAdamW` does, by the reference of its kernels."""
        hyper = torch.tensor([[LR, *BETAS, EPS, DECAY]], dtype=torch.float64)
        coefs = torch.zeros(1, COEF_COLUMNS, dtype=torch.float64)
        table = FragmentTable.build([(0, WIDTH, 0)])
        for name, master in self.masters.items():
            grad = self.grad(name, world)
            if grad is None:
                continue
            zeros = torch.zeros_like(master)
            state = self.moments.setdefault(name, (torch.zeros(1), zeros, zeros.clone()))
            step, *moments = state
            used = torch.ones(1, dtype=torch.bool)
            ops.adam_coefs(hyper, step, used, None, coefs, decoupled=True)
            factors = torch.tensor([factor], dtype=torch.float64)
            reference.adam(AdamShard(grad, master, *moments), table, coefs, factors)
        self.changed()

    def sgd(self, world: int) -> None:
        """Step as `torch.optim.SGD` does; the rate is a power of two."""
        for name, master in self.masters.items():
            grad = self.grad(name, world)
            if grad is not None:
                master.sub_(grad * LR)
        self.changed()


# -- the player -----------------------------------------------------------------------------------


class Session:
    """One schedule: what is drawn is drawn alike on every rank."""

    def __init__(self, rank: int, world: int, ranks: Ranks, seed: int) -> None:
        self.rank, self.world = rank, world
        self.draw = draw = random.Random(f"{world} {ranks.rows} {seed}")
        backends = [name for name in Ranks.NAMES if name in ranks.made or world > 1]
        # gloo costs ten times as much as shared memory.
        backend = backends[seed % 32] if seed % 32 < len(backends) else draw.choice(backends[:3])
        strategy = draw.choice(["zero3", "zero2", "zero1", "replicate"])
        kind = draw.choice(["fp32", "fp32", "fp64", "bf16"])
        self.dtype = torch.float64 if kind == "fp64" else torch.float32
        self.compute = torch.bfloat16 if kind == "bf16" else self.dtype
        policy = MixedPrecisionPolicy(
            param_dtype=self.compute if kind == "bf16" else None, reduce_dtype=self.dtype
        )
        units = draw.choice([Part, Part, None])
        prefetch = draw.choice([0, 1, 2])
        self.comm = ranks.comm(backend, strategy == "replicate")
        self.where = f"{backend} {strategy} {kind} {units} prefetch {prefetch}"
        self.sharded: Any = fully_shard(
            Model().to(self.dtype), units=units, strategy=strategy, comm=self.comm,
            prefetch=prefetch, mp_policy=policy, sync_module_states=False,
        )  # fmt: skip
        self.params: dict[str, Any] = dict(self.sharded.named_parameters())
        self.oracle = Oracle(self.dtype, self.compute)
        self.sgd = draw.random() < 0.25
        # A third rounds: there it matters whether a mean is taken before or after clipping, and
        # whether sums or means are added, so what was shown must be cleared.
        self.thirds = world == 3
        self.clip = draw.choice([None, float("inf") if self.thirds else 0.5])
        self.where += f" sgd {self.sgd} clip {self.clip}"
        self.optimizer = self.make_optimizer()
        self.waiting: list[tuple[Tensor, list[Tensor]]] = []
        self.grid = (1.0 if kind == "bf16" else 2.0**-9) * world
        self.most = 16.0 if kind == "bf16" else 4096.0

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.sgd:
            return torch.optim.SGD(self.sharded.parameters(), lr=LR)
        return ShardedAdamW(
            self.sharded.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY,
            max_grad_norm=self.clip,
        )  # fmt: skip

    def run(self) -> None:
        weighted = {
            self.forward: 5, self.backward: 8, self.evaluate: 2, self.edit: 2, self.read: 1,
            self.step: 5, self.clear: 2, self.freeze: 1, self.by_hand: 2, self.fail: 1,
            self.spoil: 1,
        }  # fmt: skip
        count = self.draw.choice(ACTIONS)
        actions = self.draw.choices(list(weighted), list(weighted.values()), k=count)
        for number, action in enumerate([*actions, self.backward, self.step, self.evaluate]):
            self.where += f"\n{number}: {action.__name__}"
            action()
        self.same_params()

    # -- comparing --

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's fragment of a whole tensor."""
        fragment = self.params[name].fragment
        return whole.reshape(-1)[fragment.start : fragment.stop]

    def same(self, got: Tensor, want: Tensor, what: str) -> None:
        assert torch.equal(got, want), f"{what}: off by {(got - want).abs().max().item()}"

    def same_params(self) -> None:
        for name, p in self.params.items():
            self.same(p.to_local(), self.own(name, self.oracle.masters[name]), name)

    def read(self) -> None:
        for name, p in self.params.items():
            got, want = p.grad, self.oracle.grad(name, self.world)
            assert (got is None) == (want is None), f"{name}.grad is {got}"
            if got is not None and want is not None:
                self.same(got.to_local(), self.own(name, want), f"gradient of {name}")
        if self.thirds:
            self.clear()

    # -- forward and backward --

    def exact(self, x: Tensor) -> Tensor:
        rounded: Tensor = _Exact.apply(x, self.grid, self.most)  # type: ignore[no-untyped-call]
        return rounded

    def input(self, rank: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(2, WIDTH, generator=generator).to(self.compute)

    def calls(self) -> list[list[Call]]:
        """Draw each rank's calls: the same parts, but not all of their parameters.

        Whether a part takes part in a backward must be the same on all ranks.
        """
        order = self.draw.choice([[0, 1, 2], [0, 1, 2], [2, 0], [0, 1, 0], [1]])
        kind = self.draw.choice(["plain", "plain", "checkpoint", "reentrant"])
        self.where += f" {order} {kind}"
        uneven = self.draw.random() < 0.3
        free = [uneven and self.params[f"parts.{i}.scale"].requires_grad for i in range(PARTS)]
        return [
            [(i, kind, not free[i] or self.draw.random() < 0.5) for i in order]
            for _ in range(self.world)
        ]

    def forward(self) -> None:
        if len(self.waiting) == 2:
            return
        number, calls = self.draw.randrange(1000), self.calls()
        got = self.sharded(self.input(self.rank, number), self.exact, calls[self.rank])
        outputs = [
            self.oracle.model(self.input(r, number), self.exact, calls[r])
            for r in range(self.world)
        ]
        self.same(got, outputs[self.rank], "output")
        losses = [output.float().square().sum() for output in (got, *outputs)]
        self.waiting.append((losses[0], losses[1:]))

    def backward(self) -> None:
        if not self.waiting:
            self.forward()
        mine, theirs = self.waiting.pop(self.draw.randrange(len(self.waiting)))
        if not all(loss.requires_grad for loss in theirs):
            return  # some rank has nothing to run backward
        if self.draw.random() < 0.3:
            self.where += " no_sync"
            with self.sharded.no_sync():
                mine.backward()
        else:
            mine.backward()
        self.oracle.backward(theirs)

    def evaluate(self) -> None:
        mode = self.draw.choice([torch.no_grad, torch.inference_mode])
        calls, x = self.calls()[0], self.input(9, self.draw.randrange(1000))
        with mode():
            got = self.sharded(x, self.exact, calls)
            self.same(got, self.oracle.model(x, self.exact, calls), "output")

    def fail(self) -> None:
        """Fail on every rank at the same point; earlier gradients go with a backward that fails."""
        where = self.draw.choice(["forward", "backward"])
        number, calls = self.draw.randrange(1000), self.calls()[0]
        self.where += f" in {where}"
        try:
            got = self.sharded(self.input(self.rank, number), self.exact, calls, where)
            if got.requires_grad:
                got.float().sum().backward()
        except ArithmeticError:
            if where == "backward":
                self.oracle.sums = dict.fromkeys(self.oracle.sums)
            return
        # Nothing before that point needs a gradient.
        inputs = [self.input(rank, number) for rank in range(self.world)]
        outputs = [self.oracle.model(x, self.exact, calls) for x in inputs]
        if got.requires_grad:
            self.oracle.backward([output.float().sum() for output in outputs])

    # -- between steps --

    def step(self) -> None:
        self.waiting.clear()
        oracle, world = self.oracle, self.world
        self.optimizer.step()
        if self.sgd:
            oracle.sgd(world)
        else:
            factor = 1.0
            if self.clip is not None:
                norm = self.optimizer.grad_norm  # type: ignore[attr-defined]
                assert abs(norm - oracle.norm(world)) <= 1e-12 * norm, (norm, oracle.norm(world))
                factor = min(1.0, self.clip / (norm + 1e-6))
            oracle.adam(world, factor)
        self.same_params()
        if self.draw.random() < 0.8 or (self.sgd and self.thirds):
            self.clear()

    def clear(self) -> None:
        # torch's zero_grad leaves what has no gradient alone, so a bucket may stay half shown.
        ways = ["model", *([] if self.thirds and self.sgd else ["optimizer"])]
        how = self.draw.choice(ways if self.thirds else [*ways, "zeros", "one"])
        self.where += f" {how}"
        sums = self.oracle.sums
        if how == "one":
            name = self.draw.choice(list(self.params))
            self.params[name].grad = sums[name] = None
        elif how == "zeros":
            self.sharded.zero_grad(set_to_none=False)
            self.oracle.sums = {n: None if s is None else s * 0.0 for n, s in sums.items()}
        else:
            (self.optimizer if how == "optimizer" else self.sharded).zero_grad()
            self.oracle.sums = dict.fromkeys(sums)

    def edit(self) -> None:
        self.waiting.clear()
        name = self.draw.choice(list(self.params))
        how = self.draw.choice(["in place", "data", "full", "local", "alone"])
        self.where += f" {name} {how}"
        p, master = self.params[name], self.oracle.masters[name]
        part = self.own(name, master)
        with torch.no_grad():
            if how == "in place":
                p.mul_(0.75).add_(0.125)
            elif how == "data":
                p.data.mul_(0.75).add_(0.125)
            elif how == "full":
                with self.sharded.full_params() as params:
                    params[name].mul_(0.75).add_(0.125)
            elif how == "local":
                p.to_local().mul_(0.75).add_(0.125)
            else:
                self.alone(name)
                return
            master.mul_(0.75).add_(0.125)
            self.same(p.to_local(), part, name)
        self.oracle.changed()

    def alone(self, name: str) -> None:
        """Edit on one rank only, or on the ranks that hold the same shard.

        Not while a unit is full by hand: only that rank would know that it is stale.
        """
        for unit in self.sharded.units:
            if not unit.is_hidden():
                unit.module.reshard()
        shard = self.draw.randrange(self.comm.world)
        p = self.params[name]
        if self.comm.rank == shard:
            p.to_local().neg_()
        fragment = p.bucket.layout.fragment(p.index, shard)
        self.oracle.masters[name][fragment.start : fragment.stop].neg_()
        self.oracle.changed()

    def freeze(self) -> None:
        self.waiting.clear()
        name = self.draw.choice(list(self.params))
        self.where += f" {name}"
        for p in (self.params[name], self.oracle.params[name]):
            p.requires_grad_(not p.requires_grad)

    def by_hand(self) -> None:
        module = self.draw.choice([self.sharded, *self.sharded.parts])
        if hasattr(module, "unshard"):
            module.unshard()
            if self.draw.random() < 0.5:
                module.reshard()

    def spoil(self) -> None:
        """Write into gathered parameters on one rank, which is refused and leaves nothing."""
        if self.comm.world == 1:
            return  # they are the parameters themselves
        self.waiting.clear()
        part = self.draw.choice(self.sharded.parts)
        module = part if hasattr(part, "unshard") else self.sharded
        module.unshard()
        if self.rank == self.draw.randrange(self.world):
            with torch.no_grad():
                part.scale.mul_(2.0)
            with pytest.raises(RuntimeError, match="expected no in-place change"):
                module.reshard()
        else:
            module.reshard()


def play(rank: int, world: int, rows: int, seeds: range) -> None:
    warnings.filterwarnings("ignore")
    ranks = Ranks(world, rows)
    for seed in seeds:
        session = None
        try:
            session = Session(rank, world, ranks, seed)
            session.run()
        except Exception as error:
            place = "" if session is None else session.where
            error.add_note(
                f"rank {rank}, seed {seed}. python tests/exact_schedules.py {world} {rows} {seed} "
                f"plays it alone:\n{place}"
            )
            raise


if __name__ == "__main__":
    from harness import run_ranks

    world, rows, first = map(int, sys.argv[1:4])
    run_ranks(play, world, rows, range(first, int(sys.argv[4]) if sys.argv[4:] else first + 1))
