# SPDX-License-Identifier: Apache-2.0
"""What `NcclComm` asks of the compiled module and refuses before: options, calls."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import FakeNccl
from harness import run_ranks, run_ranks_outcomes
from models import Block, Net, build

from fsdp_kernels import NcclComm, _ext, fully_shard
from fsdp_kernels.comm import Comm, NcclOptions, Ticket, _nccl_end, _nccl_setup, pick
from fsdp_kernels.runtime import Runtime

GATHER = "fk.gather[layers.3/0]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ctas": -1}, r"min_ctas: expected a number from 0, got -1\. 0 leaves it to NCCL\."),
        ({"max_ctas": 1.5}, r"max_ctas: expected a number from 0, got 1\.5"),
        ({"min_ctas": 4, "max_ctas": 2}, r"min_ctas: expected at most max_ctas=2, got 4\."),
        ({"gather_cta_policy": "fast"}, "gather_cta_policy: expected one of .*'zero'.*, got fast"),
        ({"gather_cta_policy": "zero"}, r"'zero' only with registration='symmetric', got 'zero' w"),
        ({"registration": "all"}, "registration: expected one of .*'symmetric'.*, got all"),
        (
            {"timeout_s": 0},
            r"timeout_s: expected finite seconds above 0, got 0\. None: the group's",
        ),
        ({"timeout_s": float("nan")}, "timeout_s: expected finite seconds above 0, got nan"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^NcclOptions\." + ".*" + message):
        NcclOptions(**options)


def test_a_process_group_is_needed() -> None:
    with pytest.raises(RuntimeError, match=r"^NcclComm: expected torch\.distributed to be init"):
        NcclComm(module=FakeNccl())


def _settings(rank: int, world: int) -> tuple[list[bytes], list[dict[str, Any]]]:
    module = FakeNccl()
    first = NcclComm(module=module)
    assert isinstance(first, Comm)
    assert (first.rank, first.world, first.name, first.device.type) == (rank, world, "nccl", "cpu")
    options = NcclOptions(2, 8, "zero", True, 12.5, "symmetric")
    second = NcclComm(dist.group.WORLD, device="cpu", options=options, module=module)
    assert (first.symmetric, second.symmetric) == (False, True)
    first.prepare_reductions()
    first.prepare_reductions()
    made = module.made
    ids = [made[0].unique_id, made[1].unique_id, made[0].reduce_id]
    assert all(len(unique_id) == 128 for unique_id in ids)
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    dist.barrier()
    for name in ("fk0/gather", "fk1/gather", "fk0/reduce"):
        assert not store.check([f"fsdp_kernels/{name}"]), "an id was left in the store"
    return ids, [one.options for one in made]


def test_ranks_meet_over_the_store_and_pass_the_options_on() -> None:
    results = run_ranks(_settings, 2, timeout=33)
    assert results[0] == results[1]
    ids, options = results[0]
    assert len(set(ids)) == 3
    plain = {"blocking": False, "min_ctas": 0, "max_ctas": 0, "cta_policy": -1}
    assert options[0] == {
        **{"device": 0, "name": "fk0", "timeout_s": 33.0, "init_timeout_s": 33.0},
        **{**plain, "registration": "local"},
    }
    assert options[1] == {
        **{"device": 0, "name": "fk1", "timeout_s": 12.5, "init_timeout_s": 12.5},
        **{"blocking": True, "min_ctas": 2, "max_ctas": 8, "cta_policy": 2},
        **{"registration": "symmetric"},
    }


def _subgroup(rank: int, world: int) -> tuple[int, int] | None:
    group = dist.new_group([1, 2], timeout=timedelta(seconds=7))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"^NcclComm: expected this rank to be in the group"):
            NcclComm(group, module=FakeNccl())
        return None
    comm = NcclComm(group, module=FakeNccl(group=group))
    assert comm.timeout_s == 7
    words = comm.agree(torch.tensor([float(rank)], dtype=torch.float64), label="fk.agree[a]")
    assert words.tolist() == [2.0]
    comm.barrier("fk.barrier")
    return comm.rank, comm.world


def test_ranks_and_time_limit_are_those_of_the_group() -> None:
    assert run_ranks(_subgroup, 3) == [None, (0, 2), (1, 2)]


def _options_differ(rank: int, world: int) -> None:
    NcclComm(options=NcclOptions(max_ctas=rank, timeout_s=1.0), module=FakeNccl())


def test_options_that_differ_are_an_error() -> None:
    outcome = run_ranks_outcomes(_options_differ, 2)[1]
    message = str(outcome.exception)
    assert isinstance(outcome.exception, ValueError)
    assert message.startswith("NcclComm: expected rank 0's options on every rank, NcclOptions(min")
    assert "max_ctas=1" in message
    assert message.endswith("on rank 1. Pass equal NcclOptions.")


def _alone(rank: int, world: int) -> None:
    if rank == 1:
        NcclComm(options=NcclOptions(timeout_s=0.2), module=FakeNccl())


def test_rank_0_that_does_not_come_is_an_error_within_the_time_limit() -> None:
    message = str(run_ranks_outcomes(_alone, 2)[1].exception)
    assert message.startswith(
        "NcclComm: expected rank 0's id 'fsdp_kernels/fk0/gather' within 0.2 s, got none on rank 1:"
    )
    assert message.endswith("if rank 0 failed, read its error first.")


# -- the device -----------------------------------------------------------------------------------


def _no_device(rank: int, world: int) -> None:
    module = FakeNccl()
    del module.torch_side
    text = r"^NcclComm: expected a CUDA device, got a torch that finds none\. Use comm='process_"
    with pytest.raises(RuntimeError, match=text):
        NcclComm(module=module)
    with pytest.raises(ValueError, match=r"^NcclComm: expected a CUDA device, got cpu\. Move the"):
        NcclComm(device="cpu", module=module)
    assert module.made == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_is_needed() -> None:
    run_ranks(_no_device, 1)


def test_the_device_must_be_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    side = _nccl_setup.CudaSide()
    assert side.resolve(None) == side.resolve("cuda") == side.resolve("cuda:2")
    text = (
        r"^NcclComm: expected cuda:1 to be the current device, got cuda:2\. Call torch\.cuda\.set"
    )
    with pytest.raises(RuntimeError, match=text):
        side.resolve("cuda:1")


def test_the_module_must_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ext, "load", lambda name: _ext.NOT_BUILT)
    with pytest.raises(RuntimeError, match=r"^NcclComm: expected the NCCL module, got an install"):
        _nccl_setup._built_module()


# -- what the module is asked ---------------------------------------------------------------------


def alone(**kwargs: Any) -> tuple[NcclComm, Any]:
    """One rank's communicator over the fake, and the fake's own."""
    module = FakeNccl(**kwargs)
    comm = NcclComm(module=module)
    made = module.made[0]
    made.calls.clear()
    return comm, made


def _calls(rank: int, world: int) -> None:
    comm, made = alone()
    full, shard = torch.zeros(6), torch.zeros(6)
    comm.all_gather(full, shard, label=GATHER).wait()
    comm.all_gather(full.to(torch.bfloat16), shard.to(torch.bfloat16), label="b").wait()
    comm.reduce_scatter(shard, full, label="fk.reduce[a/0]").wait()
    complex_full, complex_shard = full.to(torch.complex64), shard.to(torch.complex64)
    comm.reduce_scatter(complex_shard, complex_full, label="c").wait()
    table = torch.zeros(2, 3, dtype=torch.int64)
    comm.all_reduce(table, "max", label="d").wait()
    comm.broadcast(table, src=0, label="e").wait()
    a, b = full.data_ptr(), shard.data_ptr()
    assert [(c[0], c[1], *c[-3:]) for c in made.calls[:1]] == [("all_gather", GATHER, b, 24, 0)]
    assert made.calls[0] == ("all_gather", GATHER, a, b, 24, 0)
    assert made.calls[1][-2:] == (12, 0)
    assert made.calls[2] == ("reduce_scatter", "fk.reduce[a/0]", b, a, 6, "float32", 0)
    assert made.calls[3][-3:] == (12, "float32", 0)
    assert made.calls[4] == ("all_reduce", "d", table.data_ptr(), 6, "int64", "max", 0)
    assert made.calls[5] == ("broadcast", "e", table.data_ptr(), 48, 0, 0)
    assert all(ticket.waits == [0] for ticket in made.tickets)
    comm.current_stream = lambda: 77  # torch's current stream, when a collective is issued
    ticket = comm.all_gather(full, shard, label=GATHER)
    comm.current_stream = lambda: 78  # and when it is waited on
    ticket.wait()
    assert (made.calls[-1][-1], made.tickets[-1].waits) == (77, [78])


def test_calls_have_pointers_counts_and_the_current_stream() -> None:
    run_ranks(_calls, 1)


def _versions(rank: int, world: int) -> None:
    comm, _ = alone()
    full, shard = torch.zeros(6), torch.zeros(6)
    before = full._version
    comm.all_gather(full, shard, label=GATHER).wait()
    assert full._version == before
    for call in (
        lambda: comm.reduce_scatter(shard, full, label="fk.reduce[a/0]"),
        lambda: comm.all_reduce(shard, label="fk.reduce[a/0]"),
        lambda: comm.broadcast(shard, label="fk.reduce[a/0]"),
    ):
        before = shard._version
        call().wait()
        assert shard._version == before + 1, "autograd was not told of a write"


def test_autograd_is_told_of_writes_but_gathers() -> None:
    run_ranks(_versions, 1)


def _devices(rank: int, world: int) -> None:
    comm, made = alone()
    text = r": expected tensors on cpu, got meta\. Make the NcclComm with the device that the model"
    full = torch.zeros(6, device="meta")
    with pytest.raises(ValueError, match=r"^fk\.gather\[layers\.3/0\]" + text):
        comm.all_gather(full, full, label=GATHER)
    with pytest.raises(ValueError, match="^x" + text):
        comm.reduce_scatter(full, full, label="x")
    with pytest.raises(ValueError, match="^x" + text):
        comm.all_reduce(full, label="x")
    with pytest.raises(ValueError, match="^x" + text):
        comm.broadcast(full, label="x")
    with pytest.raises(ValueError, match="^allocate" + text):
        comm.allocate(4, torch.device("meta"), collective=True)
    assert made.calls == []


def test_tensors_elsewhere_are_refused() -> None:
    run_ranks(_devices, 1)


# -- tickets --------------------------------------------------------------------------------------


def issue(comm: NcclComm) -> tuple[Ticket, weakref.ref[Any]]:
    full, shard = torch.zeros(6), torch.zeros(6)
    return comm.all_gather(full, shard, label=GATHER), weakref.ref(full.untyped_storage())


def _tickets(rank: int, world: int) -> None:
    comm, made = alone()
    ticket, storage = issue(comm)
    assert storage() is not None
    ticket.wait()
    ticket.wait()
    assert storage() is None
    assert made.tickets[-1].waits == [0]

    comm.current_stream = lambda: 5
    with pytest.warns(ResourceWarning, match=r"^fk\.gather\[layers\.3/0\]: expected every ticket"):
        issue(comm)
    assert made.tickets[-1].waits == [5], "memory could be reused under the collective"
    ticket, _ = issue(comm)
    comm.current_stream = lambda: 6  # of the thread that collects
    with pytest.warns(ResourceWarning):
        del ticket
    assert made.tickets[-1].waits == [5]

    ticket, storage = issue(comm)
    made.failure = f"{GATHER}: expected all_gather to complete on all 1 ranks (nccl), got on rank 0"
    with pytest.raises(RuntimeError) as info:
        ticket.wait()
    assert str(info.value) == made.failure
    assert isinstance(info.value.__cause__, RuntimeError)
    assert storage() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del ticket
        gc.collect()


def test_tickets_keep_tensors_until_the_wait() -> None:
    run_ranks(_tickets, 1)


def _fails_later(rank: int, world: int) -> None:
    comm, made = alone()
    first = "fk.gather[layers.0/0]: expected all_gather to complete on all 1 ranks (nccl), got ..."
    ticket, _ = issue(comm)
    full, shard = torch.zeros(6), torch.zeros(6)
    made.failure = first
    assert comm.failure == first

    def text(label: str, operation: str) -> str:
        return (
            f"{label}: expected {operation} to complete on all 1 ranks (nccl), got on rank 0 an "
            f"earlier failure: {first}"
        )

    for operation, call in (
        ("all_gather", lambda: ticket.wait()),
        ("all_gather", lambda: comm.all_gather(full, shard, label=GATHER)),
        ("reduce_scatter", lambda: comm.reduce_scatter(shard, full, label=GATHER)),
        ("all_reduce", lambda: comm.all_reduce(full, label=GATHER)),
        ("broadcast", lambda: comm.broadcast(full, label=GATHER)),
        ("agree", lambda: comm.agree(full.double(), label=GATHER)),
        ("barrier", lambda: comm.barrier(GATHER)),
    ):
        with pytest.raises(RuntimeError) as info:
            call()
        assert str(info.value) == text(GATHER, operation)


def test_what_fails_after_a_failure_names_both() -> None:
    run_ranks(_fails_later, 1)


def _groups(rank: int, world: int) -> None:
    comm, made = alone()
    full, shard = torch.zeros(6), torch.zeros(6)
    with comm.grouped():
        ticket = comm.all_gather(full, shard, label=GATHER)
        other = comm.reduce_scatter(shard, full, label="fk.reduce[a/0]")
    names = [call[0] for call in made.calls]
    assert names == ["begin_group", "all_gather", "reduce_scatter", "end_group"]
    ticket.wait()
    other.wait()

    made.calls.clear()
    tickets: list[Ticket] = []
    with pytest.raises(ArithmeticError):
        _group_that(comm, tickets, raise_arithmetic_error)
    assert [call[0] for call in made.calls] == ["begin_group", "all_gather", "cancel_group"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # to drop what was never issued is no mistake
        tickets.clear()
        gc.collect()
    assert made.tickets[-1].waits == []
    comm.all_gather(full, shard, label=GATHER).wait()

    def fail() -> None:
        made.failure = f"{GATHER}: expected ..."

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match=r"^fk\.gather\[layers\.3/0\]: expected \.\.\.$"):
            _group_that(comm, tickets, fail)
        tickets.clear()
        gc.collect()


def _group_that(comm: NcclComm, tickets: list[Ticket], does: Callable[[], None]) -> None:
    with comm.grouped():
        tickets.append(issue(comm)[0])
        does()


def raise_arithmetic_error() -> None:
    raise ArithmeticError


def test_groups() -> None:
    run_ranks(_groups, 1)


# -- memory ---------------------------------------------------------------------------------------


def _memory(rank: int, world: int) -> None:
    comm, made = alone()
    cpu = torch.device("cpu")
    buffer = comm.allocate(100, cpu, collective=True)
    assert comm.allocate(0, cpu, collective=True).shape == (0,)
    comm.allocate(7, cpu, collective=False)
    assert made.calls == [("allocate", 100, True), ("allocate", 7, False)]
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (100,))
    buffer.fill_(3)
    log = logged()
    made.messages = ["a window: not here"]
    comm.allocate(7, cpu, collective=False)
    comm.allocate(7, cpu, collective=False)
    assert log == ["a window: not here"]


def logged() -> list[str]:
    """The list that messages go to from now on."""
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_kernels").addHandler(handler)
    return log


def test_memory_comes_from_the_module_and_its_messages_are_logged_once() -> None:
    run_ranks(_memory, 1)


def _short_of_memory(rank: int, world: int) -> None:
    cpu, log = torch.device("cpu"), logged()
    text = r"^NcclComm: expected 9 bytes of NCCL's memory on rank 0, got none even after torch's ca"
    for registration, aborts in (("local", False), ("symmetric", True)):
        options = NcclOptions(registration=registration)  # type: ignore[arg-type]
        comm = NcclComm(options=options, module=(module := FakeNccl()))
        made = module.made[0]
        made.exhausted = True  # until torch's allocator gives it back
        module.torch_side.empty_cache = partial(setattr, made, "exhausted", False)  # type: ignore
        assert comm.allocate(9, cpu, collective=True).shape == (9,)
        made.exhausted = True  # and this time that does not help
        module.torch_side.empty_cache = lambda: None  # type: ignore[method-assign]
        with pytest.raises(torch.OutOfMemoryError, match=text):
            comm.allocate(9, cpu, collective=False)
        assert made.failure is None
        with pytest.raises(torch.OutOfMemoryError, match=text) as info:
            comm.allocate(9, cpu, collective=True)
        assert "the words of the module" in str(info.value)
        assert made.failure == (f"aborted: {info.value}" if aborts else None)

    # Memory that is not registered may come from anywhere.
    comm = NcclComm(options=NcclOptions(registration="none"), module=(module := FakeNccl()))
    module.made[0].exhausted = True
    assert comm.allocate(9, cpu, collective=True).shape == (9,)
    assert log == []


def test_a_rank_that_runs_out_of_memory_does_not_go_on_with_another_kind() -> None:
    run_ranks(_short_of_memory, 1)


def _held_slot(rank: int, world: int) -> None:
    comm = NcclComm(options=NcclOptions(registration="symmetric"), module=(module := FakeNccl()))
    pool = Runtime(comm, torch.device("cpu")).resources.params
    slot = pool.take("a", 64)
    view = slot.view(16, torch.float32)[:2]
    with pytest.raises(RuntimeError, match=r"^bucket 'a': expected nobody to hold") as info:
        pool.give_back(slot)
    assert view.numel() == 2
    assert module.made[0].failure == f"aborted: {info.value}", "the others wait in an allocation"


def test_a_held_slot_of_symmetric_memory_ends_the_communicator() -> None:
    run_ranks(_held_slot, 1)


def _least(rank: int, world: int, registers: list[str | None], asked: str) -> Any:
    module = FakeNccl(registers)
    comm = NcclComm(options=NcclOptions(registration=asked), module=module)  # type: ignore[arg-type]
    comm.allocate(8, torch.device("cpu"), collective=True)
    return comm.symmetric, module.made[0].calls


@pytest.mark.parametrize(
    ("registers", "asked", "limit", "symmetric"),
    [
        (["local", "local"], "local", None, False),
        (["local", "none"], "local", "none", False),
        (["symmetric", "symmetric"], "symmetric", None, True),
        (["symmetric", "local"], "symmetric", "local", False),
        ([None, "symmetric"], "symmetric", "none", False),
        (["none", "none"], "none", None, False),
    ],
)
def test_all_ranks_register_alike(
    registers: list[str | None], asked: str, limit: str | None, symmetric: bool
) -> None:
    expected: list[tuple[Any, ...]] = [("allocate", 1, False)]
    # A registration that all take part in is tried only where every rank has memory at all.
    expected += [("allocate", 1, True)] if asked == "symmetric" and None not in registers else []
    expected += [] if limit is None else [("limit_registration", limit)]
    expected += [] if None in registers else [("allocate", 8, True)]
    results = run_ranks(_least, 2, registers, asked)
    assert results == [(symmetric, expected)] * 2


# -- the end --------------------------------------------------------------------------------------


def _ends(rank: int, world: int) -> None:
    here = [os.getpid()]
    comm, made = alone()
    comm.close()
    comm.close()
    comm.prepare_reductions()  # nothing
    assert comm.closed
    assert made.closed_in == here

    comm, dropped = alone()
    del comm
    gc.collect()
    assert dropped.closed_in == here
    assert made.closed_in == here

    comm, forked = alone()
    child = os.fork()
    if child == 0:
        del comm
        gc.collect()
        os._exit(len(forked.closed_in))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a fork closed its parent's"
    comm.abort("on purpose")
    assert comm.failure == "aborted: on purpose"
    with pytest.raises(RuntimeError, match="on purpose"):
        comm.barrier("fk.barrier")

    closed, _ = alone()
    log = logged()
    native = closed._native
    native.close = lambda: native.messages.append("the other ranks did not close it")
    closed.close()
    assert log == ["the other ranks did not close it"]


def _ends_by_an_exception(rank: int, world: int) -> None:
    comm, made = alone()
    sys.last_value = ArithmeticError()  # what Python sets before it runs what is left for the end
    collected, dropped = alone()
    del collected
    gc.collect()
    assert dropped.failure is None, "an exception that a notebook has shown ends nothing"
    _nccl_end._end_all()
    assert made.failure == "aborted: the program ended by an exception"
    assert not comm.closed
    _nccl_end._end_all()
    for one in (made, dropped):
        assert one.closed_in == [os.getpid()]
        assert one.closed_within == [5.0], "peers may never come"


def test_a_program_that_ends_does_not_wait_for_its_peers() -> None:
    run_ranks(_ends_by_an_exception, 1)


EXITS = """
import sys
sys.path[:0] = sys.argv[1:]
import torch.distributed as dist
from fake_nccl import FakeNccl
from fsdp_kernels import NcclComm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = NcclComm(module=(module := FakeNccl()))
made = module.made[0]
made.close = lambda limit: print("closed", limit, made.failure)
"""


@pytest.mark.parametrize(
    ("ending", "words"),
    [("sys.exit(1)", "None"), ("raise ArithmeticError", "aborted: the program ended by an excep")],
)
def test_the_end_of_a_program_closes(ending: str, words: str) -> None:
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", EXITS + ending, *places]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stdout.startswith(f"closed 5.0 {words}"), ended.stderr


def test_close_once_also_by_the_garbage_collector_and_never_in_a_fork() -> None:
    run_ranks(_ends, 1)


FAILED_BEFORE = (
    r"^comm='nccl': expected the group's NcclComm to work, got one that has failed on rank [01]: "
    r"the first error\. To go on in this process, make a new one on every rank and pass it: fully_"
)


def _shared(rank: int, world: int) -> None:
    _ext.load = lambda name: module  # type: ignore[assignment]
    module = FakeNccl()
    for name in ("fk0", "fk1"):
        group = dist.new_group([0, 1])
        device = torch.device("cpu")
        first = pick.make("nccl", group, device)
        assert pick.make("nccl", group, device) is first
        assert module.made[-1].options["name"] == "fk0"
        first.close()
        second = pick.make("nccl", group, device)
        assert second is not first
        assert module.made[-1].options["name"] == "fk1"
        alive = weakref.ref(second)
        del first, second
        assert alive() is not None, f"{name}: ranks would disagree on whether there is one"
        module.made[-1].failure = "the first error."
        with pytest.raises(RuntimeError, match=FAILED_BEFORE):
            pick.make("nccl", group, device)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert alive() is None


def test_one_communicator_serves_a_group_and_ends_with_it() -> None:
    run_ranks(_shared, 2)


def _bottom_up(rank: int, world: int) -> int:
    module = FakeNccl()
    _ext.load = lambda name: module if name == "_nccl" else _ext.NOT_BUILT  # type: ignore
    model = build(Net)
    for block in model.blocks:
        assert isinstance(block, Block)
        fully_shard(block, comm="nccl", sync_module_states=False)
    fully_shard(model, comm="nccl", sync_module_states=False)
    return len(module.made)


def test_sharding_bottom_up_makes_one_communicator() -> None:
    assert run_ranks(_bottom_up, 2) == [1, 1]
