# SPDX-License-Identifier: Apache-2.0
"""How the hosts of an `NcclComm` meet, agree and part, and the second group of `ProcessGroupComm`.

Over gloo, and over a module that moves nothing.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from fake_nccl import FakeNccl
from harness import run_ranks, run_ranks_outcomes

from fsdp_kernels import NcclComm, ProcessGroupComm
from fsdp_kernels.comm import _groups


def _uneven(rank: int, world: int) -> list[float]:
    dist.new_group([0])  # of which rank 1 knows nothing
    comm = NcclComm(module=FakeNccl())
    agreed = comm.agree(torch.tensor([float(rank), -1.0]).double(), label="fk.agree[a]")
    comm.barrier("fk.barrier")
    before = dict(dist.distributed_c10d._world.pg_names)
    plain = ProcessGroupComm()
    for other in (plain, ProcessGroupComm()):
        other.prepare_reductions()
        shard = torch.zeros(2)
        other.reduce_scatter(shard, torch.ones(2 * world), label="fk.reduce[a/0]").wait()
        assert shard.tolist() == [world, world]
        assert dist.get_process_group_ranks(other._reduce_group_of()) == [*range(world)]
    limit = _groups.timeout_of(plain._reduce_group_of(), "cpu")
    assert limit == _groups.timeout_of(dist.group.WORLD, "cpu")
    assert len(dist.distributed_c10d._world.pg_names) == len(before) + 2
    return agreed.tolist()


def test_ranks_that_know_different_numbers_of_groups_meet() -> None:
    assert run_ranks(_uneven, 2, timeout=20) == [[1.0, -1.0]] * 2


def _hosts_end(rank: int, world: int) -> None:
    before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        comm = NcclComm(module=FakeNccl())
        comm.barrier("fk.barrier")
        comm.close()
    dist.barrier()
    assert (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))) == before


def test_a_closed_communicator_leaves_no_thread_and_no_connection() -> None:
    run_ranks(_hosts_end, 3)


def _unreachable(rank: int, world: int) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    with pytest.raises(RuntimeError) as info:
        NcclComm(module=(module := FakeNccl()))
    assert module.made[0].failure is not None, "the others wait for this rank"
    assert module.made[0].closed_in == [os.getpid()]
    return str(info.value)


def test_hosts_that_cannot_connect_say_what_to_set() -> None:
    for rank, message in enumerate(run_ranks(_unreachable, 2)):
        assert message.startswith(
            "NcclComm: expected the hosts of all 2 ranks to connect over gloo within 60 s, got on "
            f"rank {rank}: "
        )
        assert "set GLOO_SOCKET_IFNAME to the network interface" in message


def _fails_while_agreeing(rank: int, world: int) -> list[str]:
    comm = NcclComm(module=(module := FakeNccl()))
    dist.barrier()
    messages = []
    if rank == 0:
        words = torch.ones(1).double()
        first = "fk.gather[a/0]: expected all_gather to complete on all 2 ranks (nccl), got ..."
        threading.Timer(0.1, setattr, (module.made[0], "failure", first)).start()
        for call in (comm.agree, lambda words, label: comm.barrier(label)):
            with pytest.raises(RuntimeError) as info:
                call(words, label="fk.agree[a]")
            messages.append(str(info.value))
        comm.close()  # does not wait for what is under way
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    store.set(f"rank {rank} is through", "")
    store.wait(["rank 0 is through"])
    return messages


def test_hosts_that_agree_see_the_failure_of_the_device() -> None:
    first, second = run_ranks(_fails_while_agreeing, 2, timeout=30)[0]
    text = (
        "fk.agree[a]: expected {} to complete on all 2 ranks (nccl), got on rank 0 an earlier "
        "failure: fk.gather[a/0]: expected all_gather to complete on all 2 ranks (nccl), got ..."
    )
    assert (first, second) == (text.format("agree"), text.format("barrier"))


def _peer_gone(rank: int, world: int) -> str | None:
    comm = NcclComm(module=FakeNccl())
    dist.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as info:
        comm.agree(torch.ones(1).double(), label="fk.agree[a]")
    return str(info.value)


def test_a_host_that_is_gone_is_an_error_of_the_call() -> None:
    message = run_ranks_outcomes(_peer_gone, 2, timeout=30)[0].value
    assert message.startswith("fk.agree[a]: expected agree to complete on all 2 ranks (nccl), got ")
    assert message.endswith("read the first error of the other ranks.")
