# SPDX-License-Identifier: Apache-2.0
"""Memory, time limits and compute streams of training over `NcclComm`, for one rank.

Like `device_cases.py`, for CUDA and for a simulated device, where what only CUDA has is left out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from device_cases import Where
from device_tools import without_waiting
from models import Block, Net, assert_close, build, full_params, storage_bytes
from test_memory import peak_bytes as host_peak_bytes
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import MixedPrecisionPolicy, NcclComm, ShardedAdamW, fully_shard
from fsdp_kernels.comm import Comm

MIB = 1 << 20
SLEEP_CYCLES = 2_000_000  # about a millisecond


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def buffers_are_given_back(rank: int, world: int, where: Where) -> None:
    """A buffer is the device's memory, not torch's, and is free again once nobody holds it."""
    comm = where.comm(rank, world)
    device, nbytes = comm.device, 256 * MIB if where.device == "cuda" else MIB
    comm.allocate(MIB, device, collective=True).fill_(1)  # what NCCL sets up once
    gc.collect()
    before = _free_bytes(device)
    kept = comm.allocate(nbytes, device, collective=True)
    kept.fill_(1)
    during = _free_bytes(device)
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    assert held < nbytes, "the buffer came from torch's allocator"
    view = kept[:8]
    del kept
    gc.collect()
    while_viewed = _free_bytes(device)
    assert view.tolist() == [1] * 8
    del view
    gc.collect()
    after = _free_bytes(device)
    if before is not None and during is not None and while_viewed is not None and after is not None:
        assert before - during >= nbytes
        assert before - while_viewed >= nbytes, "memory was freed under a view"
        assert before - after < nbytes // 2, "memory was not given back"
    comm.close()


def outlasts_the_limit(rank: int, world: int, where: Where) -> str:
    """Hold up the compute stream for longer than a collective may take; return the message.

    For CUDA only: a simulated stream is not held up.
    """
    comm = where.comm(rank, world)
    full, shard = torch.ones(8 * world, device="cuda"), torch.ones(8, device="cuda")
    comm.all_gather(full, shard, label="fk.gather[layers.0/0]").wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # two seconds and more
    comm.all_gather(full, shard, label="fk.gather[layers.3/0]").wait()
    deadline = time.monotonic() + 40
    while comm.failure is None and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        comm.all_gather(full, shard, label="fk.gather[layers.4/0]").wait()
    except RuntimeError as error:
        message = str(error)
        assert message.startswith("fk.gather[layers.4/0]: expected all_gather to complete")
    else:
        raise AssertionError("a call after the failure was taken")
    failure = comm.failure
    comm.close()
    torch.cuda.synchronize()
    assert failure is not None
    return failure


# -- a training step, over and over ---------------------------------------------------------------


class Trainer:
    """A sharded model with its optimizer and data that lie on the device already."""

    def __init__(
        self, model: nn.Module, comm: Comm, device: str, policy: MixedPrecisionPolicy | None = None
    ) -> None:
        self.model = fully_shard(
            model.to(device), units=Block, comm=comm, mp_policy=policy or MixedPrecisionPolicy()
        )
        self.optimizer = ShardedAdamW(self.model.parameters(), lr=1e-2, max_grad_norm=0.5)
        generator = torch.Generator().manual_seed(7)
        draws = [torch.randn(4, 8, generator=generator) for _ in range(8)]
        self.data = [(draw[:, :3].to(device), draw[:, 3:].to(device)) for draw in draws]
        self.losses: list[Tensor] = []

    def step(self, number: int, *, accumulate: bool = False) -> None:
        """Take a step, of two micro-batches if it accumulates."""
        x, y = self.data[number % len(self.data)]
        if accumulate:
            with self.model.no_sync():
                F.mse_loss(self.model(x), y).backward()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()


def step_without_waiting(rank: int, world: int, where: Where) -> None:
    """From the third step on, the host only queues work."""
    comm = where.comm(rank, world)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in (None, low):
        trainer = Trainer(build(Net), comm, where.device, policy)
        for number in range(3):
            trainer.step(number, accumulate=number > 0)

        def more(trainer: Trainer = trainer) -> None:
            for number in range(3, 6):
                trainer.step(number, accumulate=number == 4)

        if where.device == "cuda":
            without_waiting(more)
        else:
            more()
        assert torch.stack(trainer.losses).isfinite().all()
    comm.close()


# -- memory at the peak ---------------------------------------------------------------------------


def _device_peak_bytes(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_bytes(rank: int, world: int, where: Where, prefetch: int, low: bool) -> None:
    """The bound of `test_memory.py`, with full buffers outside of torch's memory."""
    dim, depth, batch = (1024, 8, 2) if where.device == "cuda" else (192, 8, 2)
    layer, slack = dim * dim, dim * dim // 2  # elements, bytes
    dtype = torch.bfloat16 if low else torch.float32
    comm = where.comm(rank, world)
    assert comm._native.allocate(1, True) is not None, "NCCL gave no memory"
    layers = [nn.Linear(dim, dim, bias=False) for _ in range(depth)]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = nn.Sequential(*layers).to(where.device)
    x = torch.ones(batch, dim, device=where.device)
    model.to(dtype)(x.to(dtype)).sum().backward()  # workspaces of the libraries
    model.zero_grad()
    model.float()
    fully_shard(model, units=nn.Linear, prefetch=prefetch, mp_policy=policy, comm=comm)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-3)

    def steps() -> None:
        for _ in range(3):
            model(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    peak = _device_peak_bytes(steps) if where.device == "cuda" else host_peak_bytes(steps)[0]
    params = list(model.parameters())
    pools = params[0].bucket.resources
    assert pools.params.peak_bytes == (1 + prefetch) * layer * dtype.itemsize
    assert pools.grads.peak_bytes == layer * 4
    moments = [
        optimizer.state[p][key].to_local() for p in params for key in ("exp_avg", "exp_avg_sq")
    ]
    assert storage_bytes(moments) == 8 * layer * depth // world
    shard_grads = 4 * layer * depth // world
    reduced = layer * 4 // world  # a reduction's target where it cannot be the gradient itself
    # What autograd hands over, before it is packed: the last units wait for the end of backward,
    # since no gather tells the ranks before that whether all have come that far.
    weight_grads = (2 + prefetch) * layer * dtype.itemsize
    activations = 3 * (depth + 2) * batch * dim * 4
    bound = storage_bytes(moments) + shard_grads + reduced + weight_grads + activations + slack
    assert peak <= bound, f"{peak} bytes of torch's at the peak, {bound} allowed"
    comm.close()


# -- several compute streams ----------------------------------------------------------------------


def _on(stream: Any) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class Hopping(Net):
    """Runs its blocks on two streams in turn, each held up for a while first.

    Memory that passes between streams is kept until the step is over: it is the model's business.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[Any] = []
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = self.hop(index, block, x) if self.sides else block(x)
        return self.head(x) + self.offset

    def hop(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        side, home = self.sides[index % len(self.sides)], torch.cuda.current_stream()
        self.kept.append(x)
        side.wait_stream(home)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            x = block(x)
        self.kept.append(x)
        home.wait_stream(side)
        return x


def _losses_and_params(trainer: Trainer, steps: int, home: Any = None) -> list[Tensor]:
    for number in range(steps):
        with _on(home):
            trainer.step(number, accumulate=number == 2)
        if home is not None or getattr(trainer.model, "sides", None):
            torch.cuda.synchronize()
            trainer.model.kept.clear()
    return [torch.stack(trainer.losses), *full_params(trainer.model).values()]


def _compare(got: list[Tensor], want: list[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_close(one, other, f"result {number}", rtol=1e-5)


def two_compute_streams(rank: int, world: int, where: Where) -> None:
    """Pool slots pass between two compute streams, gathers and reductions; no number changes."""
    comm = where.comm(rank, world)
    want = _losses_and_params(Trainer(build(Hopping), comm, where.device), 5)
    trainer = Trainer(build(Hopping), comm, where.device)
    if where.device == "cuda":
        trainer.model.sides = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
    _compare(_losses_and_params(trainer, 5), want)
    comm.close()


def side_stream(rank: int, world: int, where: Where) -> None:
    """Everything on a stream that is not the default one, which is busy meanwhile."""
    comm: NcclComm = where.comm(rank, world)
    want = _losses_and_params(Trainer(build(Hopping), comm, where.device), 5)
    trainer = Trainer(build(Hopping), comm, where.device)
    home = None
    if where.device == "cuda":
        home = torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(50 * SLEEP_CYCLES)
    _compare(_losses_and_params(trainer, 5, home), want)
    comm.close()
