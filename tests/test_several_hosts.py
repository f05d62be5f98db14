# SPDX-License-Identifier: Apache-2.0
"""Two hosts with two ranks each: memory shared inside a host, a process group between them.

What tells a rank its host is `comm._arena.identity`; here it says what the test wants. One test has
hosts whose network and `/dev/shm` really are their own, where Linux lets it make them.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import separate_hosts
import torch
from harness import run_ranks
from models import Block, Net, Scenario, Turn, build, check_all, mse
from test_numbers import clipping
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_kernels import ShardedAdamW, _ext, environment, fully_shard
from fsdp_kernels.comm import HybridComm, _arena

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")


def on_host(name: str) -> list[str]:
    """Put this rank on a host; what is logged from now on."""
    real = _arena.identity
    _arena.identity = lambda module: replace(real(module), host=(name,))
    return logged()


def logged() -> list[str]:
    """What is logged from now on."""
    lines: list[str] = []

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("fsdp_kernels")
    logger.addHandler(Log())
    logger.setLevel(logging.INFO)
    return lines


def hybrid(rank: int, world: int, real: bool = False) -> list[str]:
    lines = logged() if real else on_host(f"host {rank // 2}")
    mesh = init_device_mesh("cpu", (2, 2))
    shard = partial(fully_shard, units=Block, mesh=mesh)
    clipped = Scenario(steps=3, shard=shard, optimizer=clipping, oracle=clipping)
    check_all(rank, world, clipped, Scenario(steps=3, shard=partial(shard, strategy="zero2")))
    assert environment()["comm"] == "shared_memory+process_group"
    return lines


def test_hosts_share_memory_and_a_process_group_joins_them() -> None:
    first, *others = run_ranks(hybrid, 4)
    assert first[0] == (
        "fully_shard(Net): shared_memory+process_group over 2 x 2 ranks on cpu (built, for ranks "
        "of one host)"
    )
    assert others == [[], [], []]


def trained_apart(rank: int, world: int) -> tuple[list[str], list[str], str]:
    """Lines logged over a mesh, those over a flat group, and the host's name."""
    names = set(os.listdir("/dev/shm"))
    lines = hybrid(rank, world, real=True)
    assert set(os.listdir("/dev/shm")) == names
    before = len(lines)
    mse(fully_shard(build(Net), units=Block), Turn(rank, world, 0, torch.float32))
    return lines[:before], lines[before:], os.uname().nodename


def test_hosts_with_networks_and_memory_of_their_own() -> None:
    """As above, but nothing is pretended: /dev/shm differs, and gloo goes over a cable."""
    if why := separate_hosts.why_not():
        pytest.skip(f"no namespaces of our own here: {why}")
    found = run_ranks(trained_apart, 4, enter=separate_hosts.Hosts(4).enter)
    assert [name for *_, name in found] == ["host0", "host0", "host1", "host1"]
    (mesh, flat, _), *others = found
    assert "shared_memory+process_group over 2 x 2 ranks on cpu" in mesh[0]
    assert "(no shared memory: ranks 0 and 2 are on different hosts" in flat[0]
    assert [lines for *lines, _ in others] == [[[], []]] * 3


def one_row_cannot(rank: int, world: int) -> list[str]:
    """Ranks 2 and 3 are on hosts of their own: then nobody shares, whatever is kept."""
    lines = on_host("a host" if rank < 2 else f"host {rank}")
    mesh = init_device_mesh("cpu", (2, 2))
    model: Any = fully_shard(build(Net), units=Block, mesh=mesh, strategy="zero2")
    assert isinstance(model.units[0].buckets[0].comm, HybridComm)
    assert environment()["comm"] == "process_group"
    optimizer = ShardedAdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        mse(model, Turn(rank, world, step, torch.float32))
        optimizer.step()
    with pytest.raises(RuntimeError, match="ranks 0 and 1 are on different hosts"):
        fully_shard(build(Net), mesh=mesh, comm="shared_memory")
    return lines


def test_where_one_replica_cannot_share_none_does() -> None:
    first, *others = run_ranks(one_row_cannot, 4, timeout=30)
    assert len(first) == 1
    assert "zero2 with process_group over 2 x 2 ranks on cpu (no shared memory: ranks" in first[0]
    assert others == [[], [], []]


def flat(rank: int, world: int) -> list[str]:
    lines = on_host(f"host {rank // 2}")
    model: nn.Module = fully_shard(build(Net), units=Block)
    mse(model, Turn(rank, world, 0, torch.float32))
    return lines


def test_one_shard_group_over_two_hosts_takes_the_process_group() -> None:
    first, *others = run_ranks(flat, 4)
    assert len(first) == 1
    assert "(no shared memory: ranks 0 and 2 are on different hosts" in first[0]
    assert others == [[], [], []]
