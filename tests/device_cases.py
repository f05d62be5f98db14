# SPDX-License-Identifier: Apache-2.0
"""What ranks of `NcclComm` do in tests: on CUDA devices, or on simulated ones where there are none.

The functions run in processes of their own and are passed by name, so they take only what pickles.
`Where` says how a rank gets its communicator and which device its tensors are on.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import comm_contract
import torch
import torch.distributed as dist
from models import (
    Block,
    Net,
    Scenario,
    Turn,
    build,
    check,
    full_params,
    mse,
    sharded_adamw,
    varied,
)
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import (
    MixedPrecisionPolicy,
    NcclComm,
    ProcessGroupComm,
    ShardedAdamW,
    fully_shard,
)
from fsdp_kernels.comm import Comm
from fsdp_kernels.comm.nccl import NcclOptions

# What a host may need to reach the others.
NETWORK = ("NCCL_SOCKET_", "NCCL_IB_", "NCCL_NET")


@dataclass(frozen=True)
class Where:
    """Where ranks run.

    Attributes:
        device: "cuda", or "cpu" for the simulation.
        environ: What NCCL reads of the environment; "{rank}" stands for the rank.
        options: Fields of `NcclOptions`.
    """

    device: str = "cuda"
    environ: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def enter(self, rank: int) -> None:
        """Prepare the process; ranks share devices where there are fewer."""
        for name in [name for name in os.environ if name.startswith("NCCL_")]:
            if not name.startswith(NETWORK):
                del os.environ[name]  # NCCL prefers it to what a test asks for
        os.environ.update({key: value.format(rank=rank) for key, value in self.environ.items()})
        if self.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())

    def comm(self, rank: int, world: int, kind: type[NcclComm] = NcclComm) -> NcclComm:
        """Make a communicator over all ranks (collective)."""
        self.enter(rank)
        options = NcclOptions(**{"timeout_s": 20.0, **self.options})
        if self.device == "cuda":
            return kind(options=options)
        import nccl_sim
        from nccl_side import HostSide

        module = nccl_sim.load()
        module.torch_side = HostSide()
        return kind(options=options, module=module)

    def process_group(self) -> ProcessGroupComm:
        """Make torch's own communicator over the same ranks (collective)."""
        group = dist.new_group(backend="nccl") if self.device == "cuda" else None
        return ProcessGroupComm(group)


SIMULATED = Where("cpu")


# -- the contract of Comm, many checks in one set of processes ------------------------------------

CHECKS: dict[str, Callable[..., Any]] = {
    name: value for name, value in vars(comm_contract).items() if name.startswith("check_")
}


def run_checks(rank: int, world: int, where: Where, names: list[str]) -> dict[str, str]:
    """Run checks of the contract one after the other; return the tracebacks of those that fail.

    They share a communicator until one closes it, or fails: on several ranks, others may then wait
    for this one, and fail too when their time is up.
    """
    failed: dict[str, str] = {}
    comm: Comm | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for name in names:
            try:
                if comm is None or comm.closed:
                    comm = where.comm(rank, world)
                assert (comm.rank, comm.world, comm.name) == (rank, world, "nccl")
                CHECKS[name](comm, where.device)
            except Exception:
                failed[name] = traceback.format_exc()
                if world > 1:
                    break
                comm = None
    if comm is not None and not failed:
        comm.close()
    return failed


# -- training -------------------------------------------------------------------------------------


class Clipped(torch.optim.AdamW):
    """The oracle of clipping: torch's own before the step, which leaves the gradients alone."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad.clone() for p in params]
        nn.utils.clip_grad_norm_(params, 0.05)
        super().step(closure)
        for p, grad in zip(params, grads, strict=True):
            p.grad.copy_(grad)


class Checkpointed(Net):
    """Recomputes every block in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x) + self.offset


class Mixed(Block):
    """Has parameters of two dtypes: two buckets of a unit, moved in one group."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.up = self.up.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x).double())).float())


def delayed(model: nn.Module, turn: Turn) -> Tensor:
    """Play three micro-batches, the first two under no_sync."""
    losses = []
    for number in range(3):
        x, y = turn.rand(4, 3, salt=2 * number), turn.rand(4, 5, salt=2 * number + 1)
        if number < 2:
            with turn.no_sync(model):
                losses.append(turn.backward(F.mse_loss(model(x), y)))
        else:
            losses.append(turn.backward(F.mse_loss(model(x), y)))
    return torch.stack(losses).sum()


SCENARIOS: dict[str, Scenario] = {
    "float64": Scenario(),
    "float32": Scenario(dtype=torch.float32, fed=True, rtol=2e-6),
    "clipping": Scenario(
        optimizer=partial(sharded_adamw, max_grad_norm=0.05),
        oracle=partial(Clipped, lr=1e-2, weight_decay=0.1),
    ),
    "no_sync": Scenario(play=delayed, steps=3),
    "checkpointing": Scenario(build=Checkpointed, steps=3),
    "two dtypes": Scenario(
        build=partial(Net, block=Mixed), dtype=None, fed=True, rtol=2e-6, steps=3
    ),
    "no prefetch": Scenario(steps=3),
    "far prefetch": Scenario(steps=3),
}
_PREFETCH = {"no prefetch": 0, "far prefetch": 2}


def train_like_the_plain_model(rank: int, world: int, where: Where, names: list[str]) -> None:
    """Compare with the unsharded model at every step, one scenario after the other."""
    comm = where.comm(rank, world)
    for name in names:
        prefetch = _PREFETCH.get(name, 1)
        shard = partial(fully_shard, units=Block, comm=comm, prefetch=prefetch)
        try:
            check(rank, world, varied(SCENARIOS[name], shard=shard, device=where.device))
        except Exception as error:
            error.add_note(f"in scenario '{name}'")
            raise
    comm.close()


def _train(rank: int, world: int, device: str, comm: Comm, low: bool) -> dict[str, Tensor]:
    """Train five steps; return the losses and the parameters, on the host."""
    dtype = torch.bfloat16 if low else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = build(Net).to(device)
    fully_shard(model, units=Block, comm=comm, mp_policy=policy)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    losses = []
    for step in range(5):
        turn = Turn(rank, world, step, dtype, device=device)
        losses.append(mse(model, turn))
        optimizer.step()
        optimizer.zero_grad()
    full = {name: value.cpu() for name, value in full_params(model).items()}
    return {"losses": torch.stack(losses).cpu(), **full}


def train_like_over_a_process_group(rank: int, world: int, where: Where, low: bool) -> None:
    """The backend must not change a bit. For one rank or two, whose sums have one order."""
    comm = where.comm(rank, world)
    ours = _train(rank, world, where.device, comm, low)
    theirs = _train(rank, world, where.device, where.process_group(), low)
    assert ours["losses"][-1] < ours["losses"][0]
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), f"{name} differs"
    comm.close()


# -- memory, and the end --------------------------------------------------------------------------


def registered_buffers(rank: int, world: int, where: Where) -> str:
    """Return what became of the registration; the memory outlives the communicator."""
    comm = where.comm(rank, world)
    buffer = comm._native.allocate(1 << 20, True)
    assert buffer is not None, f"NCCL gave no memory: {comm._native.take_messages()}"
    registration: str = buffer.registration
    device = comm.device
    kept = comm.allocate(1 << 20, device, collective=True)
    full = kept.view(torch.float32)[: 64 * world]
    comm.all_gather(full, torch.full((64,), rank + 1.0, device=device), label="fk.gather[a]").wait()
    assert full.view(world, 64)[:, 0].tolist() == [r + 1.0 for r in range(world)]
    comm.close()
    kept.fill_(7)
    assert kept.unique().tolist() == [7]
    return registration


def aborted(rank: int, world: int, where: Where) -> list[str]:
    """Return what later calls say after an abort; closing is still possible, twice."""
    comm = where.comm(rank, world)
    device = comm.device
    full, shard = torch.zeros(8 * world, device=device), torch.zeros(8, device=device)
    comm.all_gather(full, shard, label="fk.gather[a/0]").wait()
    comm.abort("the test says so")
    messages = []
    calls: list[Callable[[], object]] = [
        lambda: comm.all_gather(full, shard, label="fk.gather[layers.3/0]").wait(),
        lambda: comm.reduce_scatter(shard, full, label="fk.reduce[layers.3/0]").wait(),
        lambda: comm.agree(torch.zeros(1, dtype=torch.float64), label="fk.agree[used]"),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
        else:
            messages.append("no error")
    comm.close()
    comm.close()
    return messages


def stops_after_a_gather(rank: int, world: int, where: Where) -> str | None:
    """As in a backward: a gather behind a reduction, to which the last rank does not come.

    They run on communicators of their own, and for either to end both must be aborted. Return what
    a rank is told, None on the last; closing is still possible.
    """
    comm = where.comm(rank, world)
    device = comm.device
    synchronize: Callable[[], None] = torch.cuda.synchronize
    if device.type != "cuda":
        module = comm._meeting._module
        compute: int = module.create_stream()  # a wait on the host's own stream would block
        comm.current_stream, synchronize = lambda: compute, module.synchronize
    comm.prepare_reductions()
    full, shard = torch.ones(8 * world, device=device), torch.ones(8, device=device)
    comm.reduce_scatter(shard, full, label="fk.reduce[layers.3/0]").wait()
    comm.all_gather(full, shard, label="fk.gather[layers.2/0]").wait()
    synchronize()
    store = distributed_c10d._get_default_store()
    if rank == world - 1:
        store.wait([f"told {other}" for other in range(rank)])
        comm.abort("the test is over")
        return None
    message = None
    try:
        comm.reduce_scatter(shard, full, label="fk.reduce[layers.2/0]").wait()
        comm.all_gather(full, shard, label="fk.gather[layers.1/0]").wait()
        synchronize()
        comm.all_gather(full, shard, label="fk.gather[layers.0/0]").wait()
    except RuntimeError as error:
        message = str(error)
    comm.close()
    store.set(f"told {rank}", "")
    return message


def outlives_the_last_rank(rank: int, world: int, where: Where) -> str | None:
    """The last rank dies between two collectives; return what the others are told."""
    comm = where.comm(rank, world)
    device = comm.device
    full, shard = torch.ones(8 * world, device=device), torch.ones(8, device=device)
    comm.all_gather(full, shard, label="fk.gather[layers.0/0]").wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if rank == world - 1:
        os._exit(1)
    try:
        for _ in range(3):
            comm.all_gather(full, shard, label="fk.gather[layers.3/0]").wait()
            if device.type == "cuda":
                torch.cuda.synchronize()  # on CUDA a wait returns at once
    except RuntimeError as error:
        return str(error)
    return None
