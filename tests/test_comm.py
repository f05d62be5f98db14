# SPDX-License-Identifier: Apache-2.0
"""The communication backends: the contract over each, and what is particular to one."""

from __future__ import annotations

import gc
import importlib
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_contract import CommContract
from harness import run_ranks

from fsdp_kernels.comm import Comm, ProcessGroupComm, Ticket, _group_ticket, process_group


class TestProcessGroupComm(CommContract):
    """Over gloo on the CPU."""

    @staticmethod
    def make_comm(rank: int, world: int) -> Comm:
        return ProcessGroupComm()


class TestProcessGroupCommOverTorchReduceScatter(CommContract):
    """With torch's own reduce-scatter instead of gloo's detour: what other backends take."""

    @staticmethod
    def make_comm(rank: int, world: int) -> Comm:
        comm = ProcessGroupComm()
        comm._gloo_on_cpu = False
        comm._lent = (
            _group_ticket.unheld
        )  # it is gloo all the same, whose thread would hold what it was given
        return comm


class FakeTicket(Ticket):
    """Counts its waits, and fails when told to."""

    def __init__(self, label: str, error: RuntimeError | None = None) -> None:
        super().__init__(label)
        self.waits = 0
        self.error = error

    def _finish(self) -> None:
        self.waits += 1
        if self.error:
            raise self.error


def test_a_ticket_waits_once() -> None:
    ticket = FakeTicket("fk.gather[a/0]")
    ticket.wait()
    ticket.wait()
    assert ticket.waits == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del ticket
        gc.collect()


def test_a_ticket_dropped_unwaited_warns_with_its_label() -> None:
    tickets = [FakeTicket("fk.gather[a/0]")]
    with pytest.warns(ResourceWarning, match=r"^fk\.gather\[a/0\]: expected every ticket"):
        tickets.clear()


def test_a_failed_wait_does_not_warn_too() -> None:
    ticket = FakeTicket("fk.gather[a/0]", RuntimeError("on purpose"))
    with pytest.raises(RuntimeError, match="on purpose"):
        ticket.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del ticket
        gc.collect()


def test_a_process_group_is_needed() -> None:
    with pytest.raises(RuntimeError, match=r"expected torch\.distributed to be init"):
        ProcessGroupComm()


def _subgroup(rank: int, world: int) -> tuple[int, int] | str:
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(RuntimeError, match="expected this rank to be in the group"):
            ProcessGroupComm(group)
        return "outside"
    comm = ProcessGroupComm(group)
    value = torch.full((3,), float(rank))
    comm.broadcast(value, src=1, label="fk.gather[a/0]").wait()  # rank 2 of the job
    assert value.tolist() == [2.0] * 3
    full = torch.zeros(2)
    comm.all_gather(full, torch.tensor([float(rank)]), label="fk.gather[a/0]").wait()
    assert full.tolist() == [1.0, 2.0]
    return comm.rank, comm.world


def test_ranks_are_those_of_the_group() -> None:
    assert run_ranks(_subgroup, 3) == ["outside", (0, 2), (1, 2)]


def _late(rank: int, world: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    comm = ProcessGroupComm(group)
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    if rank == 1:
        store.wait(["rank 0 has given up"])
        return "late"
    start = time.monotonic()
    shard = torch.ones(4)
    with pytest.raises(RuntimeError) as info:
        comm.reduce_scatter(shard, torch.ones(8), label="fk.reduce[layers.3/0]").wait()
    assert time.monotonic() - start < 3
    store.set("rank 0 has given up", "")
    return str(info.value)


def test_a_late_rank_is_an_error_within_the_time_limit() -> None:
    message = run_ranks(_late, 2)[0]
    assert message.startswith("fk.reduce[layers.3/0]: expected reduce_scatter to complete on all 2")
    assert "on rank 0:" in message
    assert "read the first error of the other ranks" in message


def _reuse(rank: int, world: int) -> None:
    comm = ProcessGroupComm()
    pointers = set()
    for numel in (5000, 64, 5000, 320):
        shard, full = torch.zeros(numel), torch.full((world * numel,), float(rank + 1))
        comm.reduce_scatter(shard, full, label="fk.reduce[a/0]").wait()
        assert shard.tolist() == [3.0] * numel
        spare = comm._scratch._spare
        assert spare is not None
        assert spare.nbytes == world * 5000 * 4
        pointers.add(spare.data_ptr())
    assert len(pointers) == 1, "the receive buffer was allocated again"
    comm.reduce_scatter(
        torch.zeros(64, dtype=torch.bfloat16),
        torch.ones(64 * world, dtype=torch.bfloat16),
        label="fk.reduce[a/0]",
    ).wait()
    comm.close()
    assert comm._scratch._spare is None


def test_the_receive_buffer_of_reductions_is_reused() -> None:
    run_ranks(_reuse, 2)


def _sum_in_rank_order(rank: int, world: int) -> None:
    # In float32, (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1: the three tell all orders apart.
    comm = ProcessGroupComm()
    for values, expected in (
        ([1e8, 1.0, -1e8], 0.0),
        ([1.0, 1e8, -1e8], 0.0),
        ([1e8, -1e8, 1.0], 1.0),
    ):
        shard, full = torch.zeros(2), torch.full((2 * world,), values[rank])
        comm.reduce_scatter(shard, full, label="fk.reduce[a/0]").wait()
        assert shard.tolist() == [expected] * 2


def test_gloo_sums_in_rank_order_on_every_rank() -> None:
    run_ranks(_sum_in_rank_order, 3)


def _holds_nothing(rank: int, world: int) -> None:
    comm = ProcessGroupComm()
    full, shard = torch.zeros(world * 4), torch.ones(4)
    uses = torch._C._storage_Use_Count

    def holders() -> list[int]:
        return [uses(tensor.untyped_storage()._cdata) for tensor in (full, shard)]

    before = holders()
    for _ in range(50):
        comm.all_gather(full, shard, label="fk.gather[a/0]").wait()
        assert holders() == before, "gloo's thread still holds what the wait has returned"
        comm.reduce_scatter(shard, full, label="fk.reduce[a/0]").wait()
        assert holders() == before, "gloo's thread still holds what the wait has returned"
    assert not _group_ticket.in_flight


def test_what_was_waited_for_is_held_by_nobody() -> None:
    run_ranks(_holds_nothing, 2)


def _ends_with_its_group(rank: int, world: int) -> None:
    comm = ProcessGroupComm()
    comm.prepare_reductions()
    with torch.inference_mode():
        comm.all_reduce(torch.ones(1), label="fk.norm[a/0]").wait()
    full, shard = torch.zeros(world * 4), torch.ones(4)
    comm.all_gather(full, shard, label="fk.gather[a/0]").wait()
    comm.reduce_scatter(shard, full, label="fk.reduce[a/0]").wait()
    groups = [comm._group_of, comm._reduce_group_of]
    assert None not in [group() for group in groups]
    dist.barrier()
    dist.destroy_process_group()
    assert [group() for group in groups] == [None, None]
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name], "its threads live on"
    with pytest.raises(RuntimeError, match="whose process group was destroyed"):
        comm.all_reduce(shard, label="fk.norm[a/0]")


def test_gloo_threads_end_when_the_group_is_destroyed() -> None:
    """One that lets a tensor go while Python is ending kills the process."""
    run_ranks(_ends_with_its_group, 2)


def test_torch_before_2_13_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old names are taken where the new ones are missing."""
    try:
        with monkeypatch.context() as patch:
            for name in ("all_gather_single", "reduce_scatter_single"):
                patch.delattr(dist, name, raising=False)
            module = importlib.reload(process_group)
            assert module._all_gather is dist.all_gather_into_tensor
            assert module._reduce_scatter is dist.reduce_scatter_tensor
    finally:
        importlib.reload(process_group)
    if hasattr(dist, "all_gather_single"):
        assert process_group._all_gather is dist.all_gather_single
        assert process_group._reduce_scatter is dist.reduce_scatter_single


def _agrees_on_its_device(rank: int, world: int) -> None:
    comm = ProcessGroupComm()
    comm._joins_hosts = False
    process_group._backend_of = lambda group, device: "nccl"
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    device = torch.device("cuda", 3)
    comm.streams(device)
    asked: list[torch.device] = []
    words: Any = SimpleNamespace(to=lambda where: asked.append(where) or torch.ones(1).double())
    assert comm.agree(words, label="fk.agree[a]").tolist() == [1.0]
    assert asked == [device], "the current device may be another one"


def test_agreeing_without_a_channel_of_hosts_is_done_where_the_tensors_are() -> None:
    run_ranks(_agrees_on_its_device, 1)


def a_rank_misses_the_meeting(rank: int, world: int) -> None:
    comm = ProcessGroupComm()

    def late(group: Any) -> Any:
        raise dist.DistStoreError("wait timeout")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "twin", late)
        with pytest.raises(
            RuntimeError, match=rf"^fk\.reduce: expected meeting .*rank {rank}: wait"
        ):
            comm.prepare_reductions()


def test_a_second_group_that_cannot_be_made_is_named() -> None:
    run_ranks(a_rank_misses_the_meeting, 2)
