# SPDX-License-Identifier: Apache-2.0
"""What ranks of `PeerMemory` do in tests, on one CUDA device or, where there is none, on memory.

The functions run in processes of their own and are passed by name.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import comm_contract
import peer_side
import torch
import torch.distributed as dist
from device_cases import CHECKS, SCENARIOS
from models import Block, Net, Turn, build, check, mse, varied
from torch import Tensor

from fsdp_kernels import ProcessGroupComm, ShardedAdamW, fully_shard, ops
from fsdp_kernels.comm._checks import check_shards
from fsdp_kernels.comm._peer_setup import PeerUnavailable
from fsdp_kernels.comm.base import DoneTicket, ReduceName, Ticket
from fsdp_kernels.comm.peer import PeerMemory


class ThroughHost(ProcessGroupComm):
    """Moves tensors of a device over gloo by way of the host, at once."""

    def all_gather(self, full: Tensor, shard: Tensor, *, label: str) -> Ticket:
        check_shards(full, shard, self.world, label)
        host = full.cpu()
        super().all_gather(host, shard.cpu(), label=label).wait()
        full.data.copy_(host)  # the counter stays
        return DoneTicket(label)

    def reduce_scatter(
        self, shard: Tensor, full: Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        check_shards(full, shard, self.world, label)
        host = shard.cpu()
        super().reduce_scatter(host, full.cpu(), label=label).wait()
        shard.copy_(host)
        return DoneTicket(label)

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        host = tensor.detach().cpu()
        super().all_reduce(host, op, label=label).wait()
        tensor.copy_(host)
        return DoneTicket(label)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> Ticket:
        host = tensor.detach().cpu()
        super().broadcast(host, src=src, label=label).wait()
        tensor.detach().copy_(host)
        return DoneTicket(label)


def make(device: str, largest_bytes: int = 0, timeout_s: float = 20.0) -> PeerMemory:
    """Make a communicator over all ranks, on one device or on memory (collective)."""
    if device == "cpu":
        comm = PeerMemory(base=ThroughHost(), timeout_s=timeout_s, side=peer_side.MappedSide())
    else:
        # Read once, by the first rendezvous of the process.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(0)
        comm = PeerMemory(base=ThroughHost(), timeout_s=timeout_s)
    if largest_bytes:
        comm.prepare_reductions(largest_bytes)
        assert comm.grads_nbytes >= 2 * largest_bytes
    return comm


def run_contract(rank: int, world: int, device: str) -> None:
    """Run the checks of `Comm`'s contract one after the other; last the one that closes."""
    comm = make(device, 1 << 14)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for name in sorted(CHECKS, key=lambda name: name == "check_close"):
            try:
                CHECKS[name](comm, device)
            except Exception as error:
                error.add_note(f"in {name}")
                raise


def sum_in_rank_order(rank: int, world: int, device: str) -> None:
    """Many reductions of random numbers, in slots and from elsewhere: the bits of a loop."""
    comm = make(device, 1 << 16)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for number in range(24):
        dtype, numel = kinds[number % 4], 1 + 317 * number % 1000
        fulls = [
            comm_contract.small_integers(world * numel, torch.float32, 99 * number + r)
            for r in range(world)
        ]
        fulls = [(full * 0.37 * (r + 1)).to(dtype) for r, full in enumerate(fulls)]
        label = f"fk.reduce[{number}/0]"
        sent = fulls[rank].to(device)
        if number % 3:
            given = comm.grads_buffer(world * numel, dtype, label=label)
            assert given is not None
            sent = given.copy_(sent)
        shard = torch.empty(numel, dtype=dtype, device=device)
        comm.reduce_scatter(shard, sent, label=label).wait()
        own = slice(rank * numel, (rank + 1) * numel)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        total = fulls[0][own].to(wide)
        for full in fulls[1:]:
            total += full[own].to(wide)
        assert comm_contract.same_bytes(shard, total.to(dtype)), label
    comm.close()


def sums_and_contract(rank: int, world: int, device: str) -> None:
    """Both in one set of processes, which on a device take seconds to start."""
    sum_in_rank_order(rank, world, device)
    run_contract(rank, world, device)


def train(rank: int, world: int, device: str) -> None:
    """Compare with the unsharded model at every step; steps in backward with those at the end."""
    comm = make(device)
    for name in ("float64", "float32", "no_sync"):
        shard = partial(fully_shard, units=Block, comm=comm)
        check(rank, world, varied(SCENARIOS[name], shard=shard, device=device))
    assert comm.grads_nbytes > 0
    _step_in_backward(rank, world, device, comm)
    comm.close()


def steps_in_backward(rank: int, world: int, device: str) -> None:
    """Only the last part of `train`."""
    comm = make(device)
    _step_in_backward(rank, world, device, comm)
    comm.close()


def _step_in_backward(rank: int, world: int, device: str, comm: PeerMemory) -> None:
    """The fused kernel reads the ranks' slots: the bits of sums that a step at the end reads."""
    models: list[Any] = [
        fully_shard(build(Net, torch.float32).to(device), units=Block, comm=comm) for _ in range(2)
    ]
    optimizers = [
        ShardedAdamW(model.parameters(), lr=1e-2, overlap_backward=overlap)
        for model, overlap in zip(models, (False, True), strict=True)
    ]
    fused, reduce_adam = [], ops.reduce_adam
    ops.reduce_adam = lambda *args, **kwargs: fused.append(1) or reduce_adam(*args, **kwargs)
    try:
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                mse(model, Turn(rank, world, step, torch.float32, device=device))
                optimizer.step()
                optimizer.zero_grad()
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(p.to_local(), q.to_local()), f"step {step}"
    finally:
        ops.reduce_adam = reduce_adam
    assert len(fused) == 4 * len(models[1].units), "no step read the ranks' slots"


def misses_a_reduction(rank: int, world: int, device: str) -> list[str]:
    """The last rank leaves one out; return what the others are told: a trap on a CUDA device."""
    comm = make(device, 1 << 10, timeout_s=1.0)
    shard, full = torch.zeros(2, device=device), torch.ones(2 * world, device=device)
    comm.reduce_scatter(shard, full, label="fk.reduce[first/0]").wait()
    assert shard.tolist() == [world] * 2
    told = []
    if rank != world - 1:
        try:
            comm.reduce_scatter(shard, full, label="fk.reduce[second/0]").wait()
            if device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            told.append(str(error))
        try:
            comm.reduce_scatter(shard, full, label="fk.reduce[third/0]").wait()
        except RuntimeError as error:
            told.append(str(error))
    dist.barrier()
    return told


def over_nvlink(rank: int, world: int, switches: bool) -> str:
    """Each rank on a device of its own; return why they do not reach each other, or ""."""
    torch.cuda.set_device(rank)
    try:
        comm = PeerMemory(base=ThroughHost(), multicast=switches, timeout_s=20.0)
    except PeerUnavailable as error:
        return str(error)
    comm.prepare_reductions(1 << 16)
    assert comm._grads is not None
    if switches and not comm._grads.sums_in_switches:
        return "no switch sums for these GPUs"
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 3):
        numel = 1024 + 8 * number
        fulls = [
            torch.randn(world * numel, generator=torch.Generator().manual_seed(99 * number + r))
            for r in range(world)
        ]
        fulls = [full.to(dtype) for full in fulls]
        shard = torch.empty(numel, dtype=dtype, device=comm.device)
        full = fulls[rank].to(comm.device)
        comm.reduce_scatter(shard, full, label=f"fk.reduce[{number}/0]").wait()
        parts = [full[rank * numel : (rank + 1) * numel].float() for full in fulls]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        if switches:
            bound = sum(part.abs() for part in parts) * torch.finfo(dtype).eps * world
            assert bool(((shard.cpu().float() - total).abs() <= bound).all()), dtype
        else:
            assert comm_contract.same_bytes(shard, total.to(dtype)), dtype
    for name in ("float64", "float32"):
        shard_with = partial(fully_shard, units=Block, comm=comm)
        check(rank, world, varied(SCENARIOS[name], shard=shard_with, device="cuda"))
    if not switches:
        _step_in_backward(rank, world, "cuda", comm)
    comm.close()
    return ""
