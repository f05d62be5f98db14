# SPDX-License-Identifier: Apache-2.0
"""What every `Comm` must do, as one class of tests; each backend's test file inherits it."""

from __future__ import annotations

import gc
import math
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from harness import run_ranks, run_ranks_outcomes

from fsdp_kernels.comm import Comm, Ticket

MakeComm = Callable[[int, int], Comm]
WORLDS = [1, 2, 3, 4]
MOVED = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.float8_e4m3fn,
]
SUMMED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int32]


def random_bytes(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return elements of any bit pattern, NaNs of every kind included (bools stay 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    count = numel * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def small_integers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return integers whose sums over a few ranks are exact in every float dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 9, (numel,), generator=generator)
    return torch.complex(values.float(), -values.float()) if dtype.is_complex else values.to(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors agree in every bit."""
    return torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8))


def poisoned(numel: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a buffer whose content nobody may read."""
    return random_bytes(numel, dtype, seed=999).to(device)


class CommContract:
    """Subclasses define `make_comm`, and `device` where it is not the CPU."""

    device: ClassVar[str] = "cpu"

    @staticmethod
    def make_comm(rank: int, world: int) -> Comm:
        """Return the backend under test, over all ranks; called on each."""
        raise NotImplementedError

    def run(self, world: int, check: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `check(comm, device, *args)` on every rank over this backend."""
        return run_ranks(_with_comm, world, self.make_comm, check, self.device, *args)

    @pytest.mark.parametrize("world", WORLDS)
    def test_gather(self, world: int) -> None:
        self.run(world, check_gather)

    @pytest.mark.parametrize("world", WORLDS)
    def test_reduce_scatter(self, world: int) -> None:
        self.run(world, check_reduce_scatter)

    @pytest.mark.parametrize("world", WORLDS)
    def test_all_reduce_and_broadcast(self, world: int) -> None:
        results = self.run(world, check_all_reduce_and_broadcast)
        assert all(same_bytes(result, results[0]) for result in results)

    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_grouped(self, world: int) -> None:
        self.run(world, check_grouped)

    @pytest.mark.parametrize("world", WORLDS)
    def test_hosts_agree_on_the_maximum(self, world: int) -> None:
        self.run(world, check_agree)

    @pytest.mark.parametrize("world", [1, 2])
    def test_allocated_memory_is_memory(self, world: int) -> None:
        self.run(world, check_allocate)

    def test_gather_of_ab_and_cd_gives_abcd(self) -> None:
        shards = [[1.0, 2.0], [3.0, 4.0]]
        assert self.run(2, gather_lists, shards) == [[1.0, 2.0, 3.0, 4.0]] * 2

    def test_reduce_scatter_sums_and_splits(self) -> None:
        fulls = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]
        assert self.run(2, reduce_lists, fulls) == [[11.0, 22.0], [33.0, 44.0]]

    @pytest.mark.parametrize("world", [1, 3])
    def test_several_at_once(self, world: int) -> None:
        self.run(world, check_several_at_once)

    @pytest.mark.parametrize("world", [1, 2])
    def test_tickets(self, world: int) -> None:
        self.run(world, check_tickets)

    @pytest.mark.parametrize("world", [1, 2])
    def test_gathers_and_reductions_may_be_issued_in_different_orders(self, world: int) -> None:
        self.run(world, check_two_orders)

    @pytest.mark.parametrize("world", [1, 2])
    def test_wrong_arguments(self, world: int) -> None:
        self.run(world, check_wrong_arguments)

    @pytest.mark.parametrize("world", [1, 2])
    def test_close(self, world: int) -> None:
        self.run(world, check_close)

    @pytest.mark.parametrize(
        "operation", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"]
    )
    def test_a_dead_rank_is_an_error_on_the_others(self, operation: str) -> None:
        outcomes = run_ranks_outcomes(
            _with_comm, 3, self.make_comm, outlive_rank_1, self.device, operation
        )
        assert outcomes[1].died
        for rank in (0, 2):
            message = outcomes[rank].value
            assert message is not None, outcomes[rank].traceback
            assert message.startswith(f"fk.gather[layers.3/0]: expected {operation} to complete on")
            assert f"on rank {rank}:" in message


def _with_comm(
    rank: int, world: int, make_comm: MakeComm, check: Callable[..., Any], *args: Any
) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        comm = make_comm(rank, world)
        assert isinstance(comm, Comm)
        assert (comm.rank, comm.world) == (rank, world)
        assert comm.name
        result = check(comm, *args)
        comm.close()
        return result


def gather_lists(comm: Comm, device: str, shards: list[list[float]]) -> list[float]:
    shard = torch.tensor(shards[comm.rank], device=device)
    full = shard.new_full((comm.world * shard.numel(),), float("nan"))
    comm.all_gather(full, shard, label="fk.gather[root/0]").wait()
    return [float(value) for value in full.tolist()]


def reduce_lists(comm: Comm, device: str, fulls: list[list[float]]) -> list[float]:
    full = torch.tensor(fulls[comm.rank], device=device)
    shard = full.new_full((full.numel() // comm.world,), float("nan"))
    comm.reduce_scatter(shard, full, label="fk.reduce[root/0]").wait()
    return [float(value) for value in shard.tolist()]


def check_gather(comm: Comm, device: str) -> None:
    for dtype in MOVED:
        for numel in (1, 37, 1024, 0):
            shards = [random_bytes(numel, dtype, seed=rank) for rank in range(comm.world)]
            expected = torch.cat([shard.view(torch.uint8) for shard in shards])
            mine = shards[comm.rank].to(device)

            full = poisoned(comm.world * numel, dtype, device)
            version = full._version
            comm.all_gather(full, mine, label="fk.gather[a/0]").wait()
            assert same_bytes(full.view(torch.uint8), expected), f"{dtype}, {numel} elements"
            assert full._version == version, "a gather moved the version counter"
            assert same_bytes(mine, shards[comm.rank]), "a gather wrote to the shard"

            full = poisoned(comm.world * numel, dtype, device)
            slot = full[comm.rank * numel : (comm.rank + 1) * numel]
            slot.copy_(mine)
            if numel:
                assert slot.data_ptr() == full.data_ptr() + comm.rank * numel * full.element_size()
            comm.all_gather(full, slot, label="fk.gather[a/0]").wait()
            assert same_bytes(full.view(torch.uint8), expected), f"in place: {dtype}, {numel}"


def check_reduce_scatter(comm: Comm, device: str) -> None:
    for dtype in SUMMED:
        for numel in (1, 37, 4096, 0):
            fulls = [small_integers(comm.world * numel, dtype, rank) for rank in range(comm.world)]
            expected = torch.stack(fulls).sum(0).to(dtype)
            mine = fulls[comm.rank].to(device)
            shard = poisoned(numel, dtype, device)
            comm.reduce_scatter(shard, mine, label="fk.reduce[a/0]").wait()
            own = expected[comm.rank * numel : (comm.rank + 1) * numel]
            assert torch.equal(shard.cpu(), own), f"{dtype}, {numel} elements"
            assert same_bytes(mine, fulls[comm.rank]), "a reduction wrote to the full buffer"
    _check_rounding(comm, device)
    _check_peers(comm, device)


def _check_peers(comm: Comm, device: str) -> None:
    """Where a ticket lends the ranks' memory, it is what they gave; a wait then sums nothing."""
    numel = 37
    comm.prepare_reductions(comm.world * numel * 4)
    tickets, shards = [], []
    for number in range(2):
        fulls = [
            small_integers(comm.world * numel, torch.float32, 7 * number + rank)
            for rank in range(comm.world)
        ]
        label = f"fk.reduce[layers.{number}/0]"
        mine = comm.grads_buffer(comm.world * numel, torch.float32, label=label)
        mine = torch.empty(comm.world * numel, device=device) if mine is None else mine
        mine.copy_(fulls[comm.rank])
        shards.append(poisoned(numel, torch.float32, device))
        lend = number == 1
        tickets.append(comm.reduce_scatter(shards[-1], mine, label=label, lend=lend))
    own = slice(comm.rank * numel, (comm.rank + 1) * numel)
    peers = tickets[1].peers()
    if peers is not None:
        assert [peer.tolist() for peer in peers] == [full[own].tolist() for full in fulls]
        assert tickets[1].peers() is peers
    before = shards[1].clone()
    for ticket in tickets:
        ticket.wait()
    if peers is None:
        before = torch.stack(fulls).sum(0)[own]
    assert same_bytes(shards[1].cpu(), before.cpu())


def _check_rounding(comm: Comm, device: str) -> None:
    """Sums of arbitrary values: at most one rounding per addition away from the exact sum."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        numel = 500
        fulls = [
            torch.randn(comm.world * numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(comm.world)
        ]
        exact = torch.stack([full.double() for full in fulls])
        shard = poisoned(numel, dtype, device)
        comm.reduce_scatter(shard, fulls[comm.rank].to(device), label="fk.reduce[a/0]").wait()
        own = slice(comm.rank * numel, (comm.rank + 1) * numel)
        bound = exact[:, own].abs().sum(0) * torch.finfo(dtype).eps * max(1, comm.world - 1)
        assert bool(((shard.cpu().double() - exact[:, own].sum(0)).abs() <= bound).all()), dtype


def check_all_reduce_and_broadcast(comm: Comm, device: str) -> torch.Tensor:
    label = "fk.step[root]"
    for dtype in (torch.float32, torch.float64, torch.int32, torch.bfloat16):
        parts = [small_integers(6, dtype, seed=rank) for rank in range(comm.world)]
        stacked = torch.stack(parts)
        for op, expected in (
            ("sum", stacked.sum(0)),
            ("max", stacked.amax(0)),
            ("min", stacked.amin(0)),
        ):
            for shape in ((6,), (2, 3)):
                mine = parts[comm.rank].clone().to(device).reshape(shape)
                ticket = comm.all_reduce(mine, op, label=label)  # type: ignore[arg-type]
                ticket.wait()
                assert torch.equal(mine.cpu().reshape(-1), expected.to(dtype)), f"{op} of {dtype}"
    for dtype in MOVED:
        for src in range(comm.world):
            shapes: list[tuple[int, ...]] = [(5,), (), (2, 3), (0,)]
            for dims in shapes:
                numel = math.prod(dims)
                sent = random_bytes(numel, dtype, seed=src).reshape(dims)
                mine = sent if comm.rank == src else poisoned(numel, dtype, "cpu").reshape(dims)
                mine = mine.to(device).clone()
                comm.broadcast(mine, src=src, label=label).wait()
                assert same_bytes(mine, sent), f"{dtype} of shape {dims} from {src}"
    comm.barrier(label)
    scalar = torch.tensor(0.1 * (comm.rank + 1), device=device)
    comm.all_reduce(scalar, label=label).wait()  # not exact: every rank must round alike
    return scalar.cpu()


def check_grouped(comm: Comm, device: str) -> None:
    """Collectives of two kinds and several dtypes in one group; a failed group leaves no trace."""
    comm.prepare_reductions()
    dtypes = (torch.float32, torch.bfloat16, torch.int32)
    for _ in range(2):
        moved, summed, tickets = [], [], []
        with comm.grouped():
            for i, dtype in enumerate(dtypes):
                label = f"fk.gather[layers.0/{i}]"
                shards = [random_bytes(33 + i, dtype, seed=rank) for rank in range(comm.world)]
                full = poisoned(comm.world * (33 + i), dtype, device)
                mine = shards[comm.rank].to(device)
                tickets.append(comm.all_gather(full, mine, label=label))
                moved.append((full, torch.cat([s.view(torch.uint8) for s in shards])))
                fulls = [small_integers(comm.world * 8, dtype, rank) for rank in range(comm.world)]
                shard, sent = poisoned(8, dtype, device), fulls[comm.rank].to(device)
                tickets.append(comm.reduce_scatter(shard, sent, label=f"fk.reduce[layers.0/{i}]"))
                own = slice(comm.rank * 8, (comm.rank + 1) * 8)
                summed.append((shard, torch.stack(fulls).sum(0).to(dtype)[own]))
        for ticket in tickets:
            ticket.wait()
        for full, expected in moved:
            assert same_bytes(full.view(torch.uint8), expected)
        for shard, expected in summed:
            assert torch.equal(shard.cpu(), expected)
    with pytest.raises(ValueError, match="world x shard"), comm.grouped():
        comm.all_gather(torch.zeros(3, device=device), torch.zeros(2, device=device), label="fk.x")


def check_agree(comm: Comm, device: str) -> None:
    comm.prepare_reductions()
    for _ in range(2):
        values = [float(comm.rank), -float(comm.rank), 0.0, 2.0**40]
        mine = torch.tensor(values, dtype=torch.float64)
        agreed = comm.agree(mine, label="fk.agree[used parameters]")
        assert agreed.device.type == "cpu"
        assert agreed.tolist() == [comm.world - 1.0, 0.0, 0.0, 2.0**40]
        assert mine.tolist() == values, "it wrote to the caller's words"
    assert comm.agree(torch.zeros(0, dtype=torch.float64), label="fk.agree[a]").tolist() == []


def check_allocate(comm: Comm, device: str) -> None:
    on = torch.device(device)
    buffers = [comm.allocate(n, on, collective=c) for n in (1, 4096, 0) for c in (True, False)]
    for i, buffer in enumerate(buffers):
        assert (buffer.dtype, buffer.dim(), buffer.device.type) == (torch.uint8, 1, on.type)
        buffer.fill_(i)
    for i, buffer in enumerate(buffers):
        assert buffer.unique().tolist() == ([i] if buffer.numel() else []), "two share memory"
    assert [b.numel() for b in buffers] == [1, 1, 4096, 4096, 0, 0]
    full = comm.allocate(64 * comm.world, on, collective=True).view(torch.float32)
    shard = torch.full((16,), float(comm.rank), device=device)
    comm.all_gather(full, shard, label="fk.gather[a/0]").wait()
    assert full.view(comm.world, 16)[:, 0].tolist() == list(range(comm.world))


def check_several_at_once(comm: Comm, device: str) -> None:
    """Tickets in flight together, of several kinds, waited on in another order than launched."""
    for numel in (300, 200):  # again: now the backend has buffers of its own to reuse
        _launch_and_wait(comm, device, numel, rounds=4)


def _launch_and_wait(comm: Comm, device: str, numel: int, rounds: int) -> None:
    tickets: list[Ticket] = []
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in range(rounds):
        shards = [random_bytes(numel, torch.int32, 10 * index + r) for r in range(comm.world)]
        full = poisoned(comm.world * numel, torch.int32, device)
        mine = shards[comm.rank].to(device)
        tickets.append(comm.all_gather(full, mine, label=f"fk.gather[layers.{index}/0]"))
        results.append((full, torch.cat(shards)))
        grads = [
            small_integers(comm.world * numel, torch.float32, index + r) for r in range(comm.world)
        ]
        shard = poisoned(numel, torch.float32, device)
        given = grads[comm.rank].to(device)
        tickets.append(comm.reduce_scatter(shard, given, label=f"fk.reduce[layers.{index}/0]"))
        own = torch.stack(grads).sum(0)[comm.rank * numel : (comm.rank + 1) * numel]
        results.append((shard, own))
        del mine, given  # the ticket keeps them
    for ticket in reversed(tickets):
        ticket.wait()
    for got, expected in results:
        assert torch.equal(got.cpu(), expected)


def check_two_orders(comm: Comm, device: str) -> None:
    """Rank 0 reduces before it gathers, the others after: each kind has an order of its own."""
    comm.prepare_reductions()
    comm.prepare_reductions()  # again: nothing
    numel = 32
    full, shard = (
        poisoned(comm.world * numel, torch.float32, device),
        poisoned(numel, torch.float32, device),
    )
    grads = torch.full((comm.world * numel,), comm.rank + 1.0, device=device)
    mine = torch.full((numel,), float(comm.rank), device=device)

    def gather() -> Ticket:
        return comm.all_gather(full, mine, label="fk.gather[a/0]")

    def reduce() -> Ticket:
        return comm.reduce_scatter(shard, grads, label="fk.reduce[b/0]")

    tickets = [f() for f in ((reduce, gather) if comm.rank == 0 else (gather, reduce))]
    for ticket in tickets:
        ticket.wait()
    assert shard.tolist() == [comm.world * (comm.world + 1) / 2] * numel
    assert full.view(comm.world, numel)[:, 0].tolist() == list(range(comm.world))


def check_tickets(comm: Comm, device: str) -> None:
    shard = torch.ones(32, device=device)
    full = torch.empty(32 * comm.world, device=device)
    ticket = comm.all_gather(full, shard, label="fk.gather[layers.3/0]")
    assert isinstance(ticket, Ticket)
    assert ticket.label == "fk.gather[layers.3/0]"
    ticket.wait()
    ticket.wait()  # again: nothing

    storage = weakref.ref(full.untyped_storage())
    del full
    assert storage() is None, "a ticket kept its tensors after the wait"

    _check_unwaited(comm, torch.empty(32 * comm.world, device=device), shard)


def _check_unwaited(comm: Comm, full: torch.Tensor, shard: torch.Tensor) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.all_gather(full, shard, label="fk.gather[layers.7/1]")
        gc.collect()
    messages = [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)]
    assert len(messages) == 1
    assert messages[0].startswith("fk.gather[layers.7/1]: expected every ticket to be waited on")
    comm.barrier("fk.wait[layers.7/1]")


def check_wrong_arguments(comm: Comm, device: str) -> None:
    """Every mistake is a ValueError that names the label, and the group still works after it."""
    label = "fk.gather[layers.3/0]"
    world = comm.world
    full, shard = torch.zeros(8 * world, device=device), torch.zeros(8, device=device)
    pairs: list[tuple[torch.Tensor, torch.Tensor, str]] = [
        (full, shard[:4], rf"{world} x 4 elements.*, got {8 * world}"),
        (full, shard.half(), "one dtype, got torch.float32 .* torch.float16"),
        (full.view(world, 8), shard, "1-D"),
        (torch.zeros(16 * world, device=device)[::2], shard, "contiguous"),
        (full, torch.zeros(16, device=device)[::2], "contiguous"),
        (full, shard.to("meta"), "one device"),
    ]
    where = r"^fk\.gather\[layers\.3/0\]: expected .*"
    for wrong_full, wrong_shard, message in pairs:
        with pytest.raises(ValueError, match=where + message):
            comm.all_gather(wrong_full, wrong_shard, label=label)
        with pytest.raises(ValueError, match=where + message):
            comm.reduce_scatter(wrong_shard, wrong_full, label=label)
    with pytest.raises(ValueError, match=where + r"a dtype that has a sum, got torch\.bool"):
        comm.reduce_scatter(shard.bool(), full.bool(), label=label)
    with pytest.raises(ValueError, match=where + r"a dtype that has a max, got torch\.complex64"):
        comm.all_reduce(shard.to(torch.complex64), "max", label=label)
    with pytest.raises(ValueError, match=where + "'sum', 'max' or 'min', got 'avg'"):
        comm.all_reduce(shard, "avg", label=label)  # type: ignore[arg-type]
    for src in (-1, world):
        with pytest.raises(ValueError, match=where + rf"a source rank in \[0, {world}\), got"):
            comm.broadcast(shard, src=src, label=label)
    strided = torch.zeros(4, 4, device=device).t()
    with pytest.raises(ValueError, match=where + "a contiguous tensor"):
        comm.broadcast(strided, label=label)
    with pytest.raises(ValueError, match=where + "a contiguous tensor"):
        comm.all_reduce(strided, label=label)
    comm.all_gather(full, shard + comm.rank, label=label).wait()
    assert full[-1].item() == world - 1


def check_close(comm: Comm, device: str) -> None:
    full, shard = torch.zeros(8 * comm.world, device=device), torch.zeros(8, device=device)
    comm.close()
    comm.close()
    calls: list[Callable[[], object]] = [
        lambda: comm.all_gather(full, shard, label="fk.gather[a/0]"),
        lambda: comm.reduce_scatter(shard, full, label="fk.gather[a/0]"),
        lambda: comm.all_reduce(shard, label="fk.gather[a/0]"),
        lambda: comm.broadcast(shard, label="fk.gather[a/0]"),
        lambda: comm.barrier("fk.gather[a/0]"),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^fk\.gather\[a/0\]: expected an open comm"):
            call()


def outlive_rank_1(comm: Comm, device: str, operation: str) -> str | None:
    """Return the message of the error that a dead rank leads to."""
    full, shard = torch.ones(8 * comm.world, device=device), torch.ones(8, device=device)
    comm.all_gather(full, shard, label="fk.gather[layers.0/0]").wait()
    if comm.rank == 1:
        os._exit(1)
    label = "fk.gather[layers.3/0]"
    try:
        # Some steps more than one: the first may leave before the death is known.
        for _ in range(3):
            if operation == "all_gather":
                comm.all_gather(full, shard, label=label).wait()
            elif operation == "reduce_scatter":
                comm.reduce_scatter(shard, full, label=label).wait()
            elif operation == "all_reduce":
                comm.all_reduce(shard, label=label).wait()
            elif operation == "broadcast":
                comm.broadcast(shard, src=1, label=label).wait()
            else:
                comm.barrier(label)
    except RuntimeError as error:
        return str(error) if error.__cause__ is not None else f"without its cause: {error}"
    return None
