# SPDX-License-Identifier: Apache-2.0
"""What waits for what between the ranks of `PeerMemory`: in every order that devices may take."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Play:
    """How the ranks use their tickets.

    Attributes:
        late: The ranks on which one is waited on only after the next reduction was issued.
        lend: Which reductions are lent, of which ranks: the ticket is asked for the peers.
        shy: Whether a ticket that could be asked for the peers is only waited on.
        group: How many reductions are posted as a group.
    """

    late: tuple[int, ...] = ()
    lend: Callable[[int, int], bool] = lambda rank, number: False
    shy: bool = False
    group: int = 1


def lend_all(rank: int, number: int) -> bool:
    return True


def lend_some(rank: int, number: int) -> bool:
    return (rank + number) % 2 == 0


def wrong_sums(world: int, order: Order, play: Play, left_out: str = "") -> int:
    """Reduce some buckets on every rank; return how many shards are wrong.

    Args:
        world: Number of ranks.
        order: In which order the devices work.
        play: What the ranks do.
        left_out: See `Devices`.
    """
    devices, results = Devices(world, left_out), []
    memory = [torch.full((SLOTS * 4 * NUMEL,), 0x7F, dtype=torch.uint8) for _ in range(world)]
    for rank in range(world):
        cuda = Cuda(devices, rank)
        region, stream = Region(devices, rank, memory, cuda), Stream(devices, f"reduce of {rank}")
        grads = PeerGrads(Owner(rank, world), Side(cuda), region, 4 * NUMEL, stream)  # type: ignore[arg-type]
        program(cuda, grads, rank, world, play, results)
    devices.drain(order)
    return sum(not torch.equal(got, expected) for got, expected in results)


def program(
    cuda: Cuda, grads: PeerGrads, rank: int, world: int, play: Play, results: list[Any]
) -> None:
    """What one rank's host queues."""
    before: list[Callable[[], None]] = []
    for first in range(0, REDUCTIONS, play.group):
        numbers = range(first, min(first + play.group, REDUCTIONS))
        with grads.grouped() if play.group > 1 else nullcontext():
            for number in numbers:
                before.append(reduce(cuda, grads, rank, world, play, number, results))
        while len(before) > (len(numbers) if rank in play.late else 0):
            before.pop(0)()
    for use in before:
        use()


def reduce(
    cuda: Cuda,
    grads: PeerGrads,
    rank: int,
    world: int,
    play: Play,
    number: int,
    results: list[Any],
) -> Callable[[], None]:
    """Queue one reduction; return what uses its ticket."""
    label = f"fk.reduce[{number}/0]"
    buffer = grads.begin(NUMEL, torch.float32, label)
    cuda.compute.launch(lambda: buffer.copy_(gradient(rank, number)))
    shard = torch.full((NUMEL // world,), float("nan"))
    ticket = grads.post(shard, label, lend=play.lend(rank, number))
    read = torch.zeros_like(shard)
    total = torch.stack([gradient(r, number) for r in range(world)]).sum(0)
    results.append((read, total[rank * len(shard) : (rank + 1) * len(shard)]))

    def use() -> None:
        peers = None if play.shy else ticket.peers()
        for peer in peers or ():  # a kernel of the caller's, one rank after the other
            cuda.compute.launch(lambda peer=peer: read.add_(peer))
        ticket.wait()
        if peers is None:
            cuda.compute.launch(lambda: read.copy_(shard))
            cuda.compute.launch(lambda: shard.fill_(float("nan")))  # its memory is used again

    return use


ALL = (0, 1, 2)
PLAYS = {
    "at once": Play(),
    "late": Play(ALL),
    "lent": Play(lend=lend_all),
    "lent, late": Play(ALL, lend_all),  # summed when the next is posted
    "lent, late on one rank": Play((0,), lend_all),
    "lent on some ranks": Play((0,), lend_some),
    "lent and only waited on": Play(lend=lend_all, shy=True),
    "a group": Play(group=2),
    "a group, lent": Play(lend=lend_all, group=2),
    "a group, lent, late on one rank": Play((0,), lend_all, group=2),
    "a group of three, lent in part": Play((1,), lend_some, group=3),
}


@pytest.mark.parametrize("name", PLAYS)
def test_every_order_gives_the_sums(name: str) -> None:
    assert all(wrong_sums(2, order, PLAYS[name]) == 0 for order in orders(2))


@pytest.mark.parametrize("name", ["late", "lent", "a group of three, lent in part"])
def test_every_order_of_three_ranks_gives_the_sums(name: str) -> None:
    assert all(wrong_sums(3, order, PLAYS[name]) == 0 for order in orders(3))


NEEDED = {
    f"barrier {POSTED}": ["late", "lent", "a group, lent"],
    # Whoever reads on the compute stream packs the next bucket after that, on every rank.
    f"barrier {CONSUMED}": ["late", "a group, lent"],
    "wait in begin": ["late", "a group, lent"],  # all ranks have consumed
    "wait in post": ["late", "lent", "a group, lent"],  # the gradients are packed
    "wait in finish": ["late", "lent and only waited on"],  # the sum is there
    "wait in lend": ["lent", "a group, lent"],  # all ranks have packed
    "wait in _give_back_oldest": ["a group, lent"],  # the caller has read
}


@pytest.mark.parametrize("left_out", NEEDED)
def test_each_wait_is_needed(left_out: str) -> None:
    for name in NEEDED[left_out]:
        wrong = (wrong_sums(2, order, PLAYS[name], left_out) for order in orders(2))
        assert any(wrong), f"{left_out}: {name}"


@pytest.mark.parametrize("name", ["lent, late on one rank", "a group, lent, late on one rank"])
def test_ranks_that_wait_at_different_points_need_one_order_of_barriers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerGrads, "give_back_all", lambda *_: None)
    with pytest.raises(AssertionError, match="these wait for each other"):
        wrong_sums(2, next(orders(2)), PLAYS[name])


def test_what_was_lent_is_not_summed() -> None:
    """Until the next reduction, which takes back what nobody has asked for."""
    devices = Devices(1)
    cuda = Cuda(devices, 0)
    memory = [torch.zeros(SLOTS * 4 * NUMEL, dtype=torch.uint8)]
    region, stream = Region(devices, 0, memory, cuda), Stream(devices, "reduce")
    grads = PeerGrads(Owner(0, 1), Side(cuda), region, 4 * NUMEL, stream)  # type: ignore[arg-type]

    def post(*, lend: bool) -> tuple[Tensor, Any]:
        grads.begin(NUMEL, torch.float32, "fk.reduce[a/0]").fill_(1.0)
        shard = torch.zeros(NUMEL)
        return shard, grads.post(shard, "fk.reduce[a/0]", lend=lend)

    shard, ticket = post(lend=True)
    peers = ticket.peers()
    assert [peer.tolist() for peer in peers] == [[1.0] * NUMEL]
    assert ticket.peers() is peers
    ticket.wait()
    assert ticket.peers() is None
    devices.drain(lambda streams: streams)
    assert shard.tolist() == [0.0] * NUMEL
    shard, ticket = post(lend=True)
    post(lend=False)[1].wait()
    assert ticket.peers() is None
    ticket.wait()
    devices.drain(lambda streams: streams)
    assert shard.tolist() == [1.0] * NUMEL
    _, ticket = post(lend=False)
    assert ticket.peers() is None
    ticket.wait()
    with pytest.warns(ResourceWarning, match="expected every ticket to be waited on"):
        post(lend=True)
    assert len(grads._held) == 0, "a dropped ticket keeps the slots of all ranks"


def test_a_rank_that_does_not_come_holds_up_the_others() -> None:
    """The check of the checker: queues that can never be drained are an error."""
    devices = Devices(2)
    cuda = Cuda(devices, 0)
    Region(devices, 0, [], cuda).barrier(POSTED, 0)
    with pytest.raises(AssertionError, match="compute of rank 0"):
        devices.drain(lambda streams: streams)


@pytest.mark.parametrize("lend", [False, True])
def test_the_log_has_every_event_and_wait(lend: bool) -> None:
    devices = Devices(1)
    cuda = Cuda(devices, 0)
    cuda.compute.cuda_stream = 7
    memory = [torch.zeros(SLOTS * 4 * NUMEL, dtype=torch.uint8)]
    region, stream = Region(devices, 0, memory, cuda), Stream(devices, "reduce")
    grads = PeerGrads(Owner(0, 1), Side(cuda), region, 4 * NUMEL, stream)  # type: ignore[arg-type]
    with record_schedule() as schedule:
        for number in range(3):
            grads.begin(NUMEL, torch.float32, "fk.reduce[a/0]")
            ticket = grads.post(torch.zeros(NUMEL), f"fk.reduce[{number}/0]", lend=lend)
            ticket.peers()
            ticket.wait()
    entries = [e for e in schedule.log if isinstance(e, (Recorded, Waited))]
    numbers: dict[int, int] = {}
    found = [
        (type(e).__name__[0], e.stream, numbers.setdefault(e.event, len(numbers))) for e in entries
    ]
    compute, both = [("R", "compute"), ("W", "reduce")], [("W", "peers"), ("W", "reduce")]
    barrier = [("R", "reduce"), ("R", "peers"), *both]
    consumed = [("R", "reduce")]
    if lend:  # ready; read
        one = [*compute, *barrier, ("R", "reduce"), ("W", "compute"), *compute, *barrier, *consumed]
    else:  # done
        one = [*compute, *barrier, ("R", "reduce"), *barrier, *consumed, ("W", "compute")]
    assert [entry[:2] for entry in found] == [*one, *one, ("W", "compute"), *one]
    waited = [number for kind, _, number in found if kind == "W"]
    assert len(waited) == len(set(waited)) == len(numbers) - 2, "all but the last two consumed"
