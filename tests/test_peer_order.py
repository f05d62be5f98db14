# SPDX-License-Identifier: Apache-2.0
"""What waits for what between the ranks of `PeerMemory`: in every order that devices may take."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import peer_sim
import pytest
import torch
from peer_sim import Cuda, Devices, Owner, Region, Side, Stream
from torch import Tensor

from fsdp_kernels import record_schedule
from fsdp_kernels.comm._peer_grads import CONSUMED, POSTED, SLOTS, PeerGrads
from fsdp_kernels.trace import Recorded, Waited

NUMEL = 12  # of a full bucket
REDUCTIONS = 5
Order = Callable[[Sequence[Stream]], Sequence[Stream]]


def orders(world: int) -> Iterator[Order]:
    """Streams by every fixed priority, or at random: for more ranks only some of both."""
    permutations = itertools.permutations(range(2 * world))
    for fixed in itertools.islice(permutations, 0, None, 1 if world == 2 else 31):
        yield lambda streams, fixed=fixed: [streams[i] for i in fixed]
    for seed in range(30):
        generator = random.Random(seed)
        yield lambda streams, generator=generator: generator.sample(streams, len(streams))


def gradient(rank: int, number: int) -> Tensor:
    return torch.arange(NUMEL, dtype=torch.float32) + 100 * number + 10 * rank


def wrong_sums(world: int, order: Order, left_out: str = "", late: bool = False) -> int:
    """Reduce some buckets on every rank; return how many shards are wrong.

    Args:
        world: Number of ranks.
        order: In which order the devices work.
        left_out: See `Devices`.
        late: Whether a ticket is waited on only after the next reduction was issued.
    """
    devices, results = Devices(world, left_out), []
    memory = [torch.full((SLOTS * 4 * NUMEL,), 0x7F, dtype=torch.uint8) for _ in range(world)]
    for rank in range(world):
        cuda = Cuda(devices, rank)
        region, stream = Region(devices, rank, memory, cuda), Stream(devices, f"reduce of {rank}")
        grads = PeerGrads(Owner(rank, world), Side(cuda), region, 4 * NUMEL, stream)  # type: ignore[arg-type]
        program(cuda, grads, rank, world, late, results)
    devices.drain(order)
    return sum(not torch.equal(got, expected) for got, expected in results)


def program(
    cuda: Cuda, grads: PeerGrads, rank: int, world: int, late: bool, results: list[Any]
) -> None:
    """What one rank's host queues."""
    before: list[Callable[[], None]] = []
    for number in range(REDUCTIONS):
        label = f"fk.reduce[{number}/0]"
        buffer = grads.begin(NUMEL, torch.float32, label)
        cuda.compute.launch(lambda b=buffer, n=number: b.copy_(gradient(rank, n)))
        shard = torch.full((NUMEL // world,), float("nan"))
        ticket = grads.post(shard, label)
        read = torch.empty_like(shard)
        total = torch.stack([gradient(r, number) for r in range(world)]).sum(0)
        results.append((read, total[rank * len(shard) : (rank + 1) * len(shard)]))

        def use(ticket: Any = ticket, shard: Tensor = shard, read: Tensor = read) -> None:
            ticket.wait()
            cuda.compute.launch(lambda: read.copy_(shard))
            cuda.compute.launch(lambda: shard.fill_(float("nan")))  # its memory is used again

        before.append(use)
        if not late or number:
            before.pop(0)()
    for use in before:
        use()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_every_order_gives_the_sums(world: int, late: bool) -> None:
    assert all(wrong_sums(world, order, late=late) == 0 for order in orders(world))


@pytest.mark.parametrize(
    "left_out",
    [f"barrier {POSTED}", f"barrier {CONSUMED}", *(f"wait {role}" for role in peer_sim.EVENTS)],
)
def test_each_wait_is_needed(left_out: str) -> None:
    assert any(wrong_sums(2, order, left_out, late=True) for order in orders(2)), left_out


def test_a_rank_that_does_not_come_holds_up_the_others() -> None:
    """The check of the checker: queues that can never be drained are an error."""
    devices = Devices(2)
    cuda = Cuda(devices, 0)
    Region(devices, 0, [], cuda).barrier(POSTED, 0)
    with pytest.raises(AssertionError, match="compute of rank 0"):
        devices.drain(lambda streams: streams)


def test_the_log_has_every_event_and_wait() -> None:
    devices = Devices(1)
    cuda = Cuda(devices, 0)
    cuda.compute.cuda_stream = 7
    memory = [torch.zeros(SLOTS * 4 * NUMEL, dtype=torch.uint8)]
    region, stream = Region(devices, 0, memory, cuda), Stream(devices, "reduce")
    grads = PeerGrads(Owner(0, 1), Side(cuda), region, 4 * NUMEL, stream)  # type: ignore[arg-type]
    with record_schedule() as schedule:
        for number in range(3):
            grads.begin(NUMEL, torch.float32, "fk.reduce[a/0]")
            grads.post(torch.zeros(NUMEL), f"fk.reduce[{number}/0]").wait()
    entries = [e for e in schedule.log if isinstance(e, (Recorded, Waited))]
    numbers: dict[int, int] = {}
    found = [
        (type(e).__name__, e.stream, numbers.setdefault(e.event, len(numbers))) for e in entries
    ]
    one = [  # started, done, consumed
        [
            ("Recorded", "compute", n),
            ("Waited", "reduce", n),
            ("Recorded", "reduce", n + 1),
            ("Recorded", "reduce", n + 2),
            ("Waited", "compute", n + 1),
        ]
        for n in (0, 3, 6)
    ]
    assert found == [*one[0], *one[1], ("Waited", "compute", 2), *one[2]]
