# SPDX-License-Identifier: Apache-2.0
"""`NcclComm` over simulated devices: the contract, training in any order of streams, and failures.

The compiled communicator is the real one; the CUDA and NCCL calls under it are simulated, and the
simulation runs what is queued on its streams in an order as unkind as CUDA allows.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import device_cases
import nccl_sim
import pytest
import torch
import torch.distributed as dist
from comm_contract import CommContract
from device_cases import Where
from harness import run_ranks, run_ranks_outcomes
from models import Block, Net, Scenario, Turn, build, check_all, mse, sharded_adamw
from nccl_side import HOST_STREAM, HostSide
from test_failure import Fragile, LopsidedFragile, failing_oracle_safe, failing_unevenly
from test_mixed_precision import fp32_master
from torch import nn

from fsdp_kernels import NcclComm, _ext, environment, fully_shard, record_schedule, trace
from fsdp_kernels.comm import Comm, NcclOptions, Ticket, _nccl_end, pick

GATHER = "fk.gather[layers.3/0]"
ADVICE = (
    "Another rank died or fell out of step: read the first error of the other ranks. What was "
    "computed since is undefined: restart from the last checkpoint."
)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Build before the ranks' time runs; they inherit the module."""
    nccl_sim.load()


def simulated(policy: str = "lazy", seed: int = 0, **settings: Any) -> Any:
    """Return the module, set as named and otherwise as by default."""
    module: Any = nccl_sim.load()
    module.torch_side = HostSide()
    module.configure(policy, seed, **settings)
    return module


def make(timeout_s: float = 20.0, **settings: Any) -> NcclComm:
    return NcclComm(options=NcclOptions(timeout_s=timeout_s), module=simulated(**settings))


class TestNcclComm(CommContract):
    """Over streams that run as late as they may."""

    @staticmethod
    def make_comm(rank: int, world: int) -> Comm:
        return make()

    def test_a_dead_rank_is_an_error_on_the_others(self, operation: str) -> None:
        # Nothing but the time limit can tell: a peer that died looks like one that is late.
        self.make_comm = impatient  # type: ignore[method-assign]
        super().test_a_dead_rank_is_an_error_on_the_others(operation)

    test_a_dead_rank_is_an_error_on_the_others.pytestmark = (  # type: ignore[attr-defined]
        CommContract.test_a_dead_rank_is_an_error_on_the_others.pytestmark  # type: ignore
    )


def impatient(rank: int, world: int) -> Comm:
    return make(timeout_s=2.0)


# -- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulated(Where):
    """Simulated devices whose streams run by a policy."""

    device: str = "cpu"
    policy: str = "lazy"
    seed: int = 0

    def comm(self, rank: int, world: int) -> NcclComm:
        self.enter(rank)
        options = NcclOptions(**{"timeout_s": 20.0, **self.options})
        return NcclComm(options=options, module=simulated(self.policy, self.seed))


def _train_by(rank: int, world: int, where: Simulated, names: list[str]) -> list[str]:
    device_cases.train_like_the_plain_model(rank, world, where, names)
    violations: list[str] = nccl_sim.load().violations()
    return violations


@pytest.mark.parametrize(
    ("world", "policy", "name"),
    [
        (1, "random", "no_sync"),
        (2, "lazy", "clipping"),
        (2, "round_robin", "no_sync"),
        (3, "eager", "far prefetch"),
        (3, "random", "clipping"),
    ],
)
def test_training_in_any_order_of_streams(world: int, policy: str, name: str) -> None:
    where = Simulated(policy=policy, seed=world)
    assert run_ranks(_train_by, world, where, [name], timeout=120) == [[]] * world


def over_nccl(rank: int, world: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call another test's function where `comm=None` means `NcclComm`."""
    module = simulated("random", seed=world)
    _ext.load = lambda name: module if name == "_nccl" else _ext.NOT_BUILT  # type: ignore
    pick.choose = lambda *_: pick.Choice("nccl", "a test says so")  # type: ignore
    result = function(rank, world, *args)
    assert environment()["comm"] == "nccl"
    assert module.violations() == []
    return result


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bf16_compute_over_fp32_parameters(world: int) -> None:
    run_ranks(over_nccl, world, fp32_master, sharded_adamw)


def test_symmetric_memory_and_copy_engines() -> None:
    options = {"registration": "symmetric", "gather_cta_policy": "zero"}
    where = Simulated(options=options, policy="random")
    assert run_ranks(_train_by, 2, where, ["float64", "no_sync"]) == [[], []]
    assert run_ranks(device_cases.registered_buffers, 2, where) == ["symmetric"] * 2


def _failing(rank: int, world: int, policy: str) -> list[str]:
    shard = partial(fully_shard, units=Fragile, comm=make(policy=policy, seed=3))
    uneven = partial(fully_shard, units=LopsidedFragile, comm=make(policy=policy, seed=3))
    check_all(
        *(rank, world),
        Scenario(partial(Net, block=Fragile), failing_oracle_safe, steps=4, shard=shard),
        Scenario(partial(Net, block=LopsidedFragile), failing_unevenly, steps=6, shard=uneven),
    )
    violations: list[str] = nccl_sim.load().violations()
    return violations


@pytest.mark.parametrize("policy", ["lazy", "round_robin"])
def test_a_failed_backward_and_then_good_steps(policy: str) -> None:
    assert run_ranks(_failing, 3, policy, timeout=120) == [[]] * 3


def _dies_in_training(rank: int, world: int) -> str | None:
    comm = make(timeout_s=2.0)
    model = fully_shard(build(Net), units=Block, comm=comm)
    optimizer = sharded_adamw(model.parameters())

    def die(module: nn.Module, inputs: Any) -> None:
        os._exit(1)

    try:
        for step in range(4):
            if (rank, step) == (1, 2):
                model.blocks[1].register_forward_pre_hook(die)
            mse(model, Turn(rank, world, step, torch.float32))
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return None


def test_a_rank_that_dies_in_training_is_an_error_on_the_others() -> None:
    outcomes = run_ranks_outcomes(_dies_in_training, 3)
    assert outcomes[1].died
    for rank in (0, 2):
        message = outcomes[rank].value
        assert message is not None, outcomes[rank].traceback
        assert message.startswith("fk.gather[blocks.")
        assert f": expected all_gather to complete on all 3 ranks (nccl), got on rank {rank}" in (
            message
        )
        assert ADVICE in message


def _by_name(rank: int, world: int) -> tuple[str, dict[str, int], list[str]]:
    module = simulated()
    _ext.load = lambda name: module if name == "_nccl" else _ext.NOT_BUILT  # type: ignore
    model = build(Net)
    for block in model.blocks:
        fully_shard(block, comm="nccl")
    fully_shard(model, comm="nccl")
    mse(model, Turn(rank, world, 0, torch.float32))
    comm = model._fk_unit.runtime.comm
    live: dict[str, int] = module.live()
    assert live["comms"] == 2
    comm.close()
    del model, block
    gc.collect()
    live = module.live()
    return environment()["comm"], live, module.violations()


def test_by_name_one_pair_of_communicators_and_nothing_left_behind() -> None:
    nothing = dict.fromkeys(("streams", "events", "comms", "memory", "registrations"), 0)
    assert run_ranks(_by_name, 2) == [("nccl", nothing, [])] * 2


# -- tickets --------------------------------------------------------------------------------------


def _unwaited(rank: int, world: int) -> None:
    comm = make()
    full, shard = torch.zeros(2 * world), torch.full((2,), rank + 1.0)
    expected = [float(r) for r in range(1, world + 1) for _ in range(2)]
    ticket = comm.all_gather(full, shard, label=GATHER)
    dist.barrier()
    assert full.isnan().all(), "a device that runs as late as it may has run before the wait"
    dist.barrier()
    ticket.wait()
    assert full.tolist() == expected

    with pytest.warns(ResourceWarning, match=r"^fk\.gather\[layers\.3/0\]: expected every ticket"):
        comm.all_gather(full, shard, label=GATHER)
    assert full.tolist() == expected, "its memory may be written under the collective"
    comm.close()


def test_a_ticket_dropped_unwaited_is_waited_for() -> None:
    run_ranks(_unwaited, 2)


def _cancelled(rank: int, world: int) -> str:
    comm = make()
    full, shard = torch.zeros(2 * world), torch.full((2,), rank + 1.0)
    tickets: list[Ticket] = []
    with pytest.raises(ArithmeticError):
        _fails_in_a_group(comm, full, shard, tickets)
    with pytest.raises(RuntimeError) as info:
        tickets[0].wait()
    comm.all_gather(full, shard, label=GATHER).wait()  # nobody is out of step
    assert full[-1] == world
    with pytest.raises(RuntimeError, match="Groups do not nest"), comm.grouped():
        _nest(comm)
    comm.close()
    return str(info.value)


def _fails_in_a_group(
    comm: NcclComm, full: torch.Tensor, shard: torch.Tensor, tickets: list[Ticket]
) -> None:
    with comm.grouped():
        tickets.append(comm.all_gather(full, shard, label=GATHER))
        raise ArithmeticError


def _nest(comm: NcclComm) -> None:
    with comm.grouped():
        pass


def test_a_group_that_failed_was_never_issued() -> None:
    messages = run_ranks(_cancelled, 2)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{GATHER}: expected ")


def _recorded(rank: int, world: int) -> tuple[list[Any], list[Any]]:
    """Return the events of a recorded schedule, and those of the table below."""
    comm = make(policy="random")
    full, shard = torch.zeros(8 * world), torch.zeros(8)
    comm.all_gather(full, shard, label="fk.gather[before]").wait()
    module = nccl_sim.load()
    module.clear_log()
    with record_schedule() as schedule:
        comm.reduce_scatter(shard, full, label="fk.reduce[a/0]").wait()  # no stream of its own yet
        comm.prepare_reductions()
        first = comm.all_gather(full, shard, label=GATHER)
        with comm.grouped():
            tickets = [
                comm.reduce_scatter(shard, full, label="fk.reduce[a/0]"),
                comm.all_gather(full[:0], shard[:0], label="fk.gather[nothing]"),
                comm.all_gather(full, shard, label="fk.gather[b/0]"),
                comm.all_gather(full, shard, label="fk.gather[b/1]"),
            ]
        comm.broadcast(full[:0], label="fk.broadcast[nothing]").wait()
        for ticket in (*tickets, first):
            ticket.wait()
    handles = {
        "compute": HOST_STREAM,
        "gather": comm._native.gather_stream,
        "reduce": comm._native.reduce_stream,
    }
    kinds = {trace.Recorded: "cudaEventRecord", trace.Waited: "cudaStreamWaitEvent"}
    noted = [
        (kinds[type(entry)], handles[entry.stream], entry.event)
        for entry in schedule.log
        if not isinstance(entry, trace.Access)
    ]
    own = [e for e in schedule.log if isinstance(e, trace.Access) and e.stream != "compute"]
    assert [(entry.label, entry.stream) for entry in own] == [
        ("fk.reduce[a/0]", "gather"),
        (GATHER, "gather"),
        ("fk.reduce[a/0]", "reduce"),
        ("fk.gather[b/0]", "gather"),
        ("fk.gather[b/1]", "gather"),
    ]
    called = [entry for entry in module.log() if entry[0] in kinds.values()]
    comm.close()
    return noted, called


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_recorded_is_what_the_table_was_called_with(world: int) -> None:
    for noted, called in run_ranks(_recorded, world):
        assert len(noted) >= 14
        # Sorted: of the two streams of a group, either may be spoken of first.
        assert sorted(noted) == sorted(called)


# -- failures -------------------------------------------------------------------------------------


def message_of(call: Callable[[], object]) -> str:
    """Return the message of the RuntimeError that a call raises."""
    with pytest.raises(RuntimeError) as info:
        call()
    return str(info.value)


def _late(rank: int, world: int) -> list[str]:
    comm = make(timeout_s=1.0)
    if rank == 1:
        return []
    full, shard = torch.ones(16), torch.ones(8)
    messages = [message_of(lambda: comm.reduce_scatter(shard, full, label="fk.reduce[a/0]").wait())]
    messages.append(message_of(lambda: comm.all_gather(full, shard, label=GATHER)))
    messages.append(message_of(lambda: comm.agree(torch.ones(1).double(), label="fk.agree[a]")))
    assert comm.failure == messages[0]
    comm.close()
    messages.append(message_of(lambda: comm.all_gather(full, shard, label=GATHER)))
    return messages


def test_a_rank_that_does_not_come() -> None:
    first, second, third, fourth = run_ranks(_late, 2)[0]
    head = (
        "fk.reduce[a/0]: expected reduce_scatter to complete on all 2 ranks (nccl), got on rank 0: "
    )
    tail = rf"no completion after 1(\.\d+)? s \(time limit 1 s\)\. {re.escape(ADVICE)}"
    assert re.fullmatch(re.escape(head) + tail, first)
    assert second == (
        f"{GATHER}: expected all_gather to complete on all 2 ranks (nccl), got on rank 0 an "
        f"earlier failure: {first}"
    )
    assert third == (
        "fk.agree[a]: expected agree to complete on all 2 ranks (nccl), got on rank 0 an earlier "
        f"failure: {first}"
    )
    assert fourth == (
        f"{GATHER}: expected an open communicator, got one that was closed. Create a new NcclComm."
    )


UNHANDLED = 1  # ncclUnhandledCudaError


def _faults(rank: int, world: int) -> dict[str, str]:
    full, shard = torch.ones(8), torch.ones(8)
    messages = {}
    for call, issue in (
        ("ncclAllGather", lambda comm: comm.all_gather(full, shard, label=GATHER).wait()),
        ("ncclReduceScatter", lambda comm: comm.reduce_scatter(shard, full, label="r").wait()),
        ("ncclAllReduce", lambda comm: comm.all_reduce(full, label="s").wait()),
        ("ncclBroadcast", lambda comm: comm.broadcast(full, label="b").wait()),
    ):
        comm = make()
        comm._meeting._module.inject(call, UNHANDLED, text="the words of NCCL")
        messages[call] = message_of(partial(issue, comm))
        comm.close()
        nccl_sim.load().reset()
    return messages


def test_an_error_of_nccl_has_its_words() -> None:
    (messages,) = run_ranks(_faults, 1)
    for call, (label, operation) in {
        "ncclAllGather": (GATHER, "all_gather"),
        "ncclReduceScatter": ("r", "reduce_scatter"),
        "ncclAllReduce": ("s", "all_reduce"),
        "ncclBroadcast": ("b", "broadcast"),
    }.items():
        head = f"{label}: expected {operation} to complete on all 1 ranks (nccl), got on rank 0: "
        assert messages[call].startswith(head)
        assert "the words of NCCL" in messages[call]


def _old(rank: int, world: int) -> str:
    return message_of(lambda: make(version=22602))


def test_an_old_nccl_is_refused() -> None:
    (message,) = run_ranks(_old, 1)
    assert message.startswith("communicator 'fk0': expected NCCL 2.27.0 or newer at run time, got")
    assert "2.26.2" in message


def _fallbacks(rank: int, world: int, everywhere: bool, setting: str) -> tuple[list[str], bool]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_kernels").addHandler(handler)
    module = simulated(**({setting: False} if everywhere or rank == 0 else {}))
    comm = NcclComm(options=NcclOptions(registration="symmetric", timeout_s=20.0), module=module)
    for _ in range(3):
        buffer = comm.allocate(64 * world, torch.device("cpu"), collective=True)
        full = buffer.view(torch.float32)
        comm.all_gather(full, torch.full((16,), float(rank)), label=GATHER).wait()
        assert full.view(world, 16)[:, 0].tolist() == [0.0, 1.0]
    assert module.violations() == []
    comm.close()
    return lines, comm.symmetric


@pytest.mark.parametrize(
    ("setting", "everywhere"), [("mem_alloc", False), ("mem_alloc", True), ("windows", True)]
)
def test_memory_falls_back_on_all_ranks_with_one_line(setting: str, everywhere: bool) -> None:
    results = run_ranks(_fallbacks, 2, everywhere, setting)
    assert [symmetric for _, symmetric in results] == [False, False]
    for rank, (lines, _) in enumerate(results):
        assert len(lines) == (1 if everywhere or rank == 0 else 0), lines


def _mismatch(rank: int, world: int) -> str:
    comm = make(timeout_s=5.0)
    full, shard = torch.ones(16), torch.ones(8)
    if rank == 0:
        return message_of(lambda: comm.all_gather(full, shard, label="fk.gather[a/0]").wait())
    return message_of(lambda: comm.all_reduce(full, label="fk.step[a]").wait())


def test_ranks_out_of_step_are_told_on_both_sides() -> None:
    first, second = run_ranks(_mismatch, 2)
    assert first.startswith("fk.gather[a/0]: expected all_gather to complete on all 2 ranks (nccl)")
    assert second.startswith("fk.step[a]: expected all_reduce to complete on all 2 ranks (nccl)")


def _forgotten(rank: int, world: int) -> dict[str, int]:
    comm = make()
    comm.prepare_reductions()
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del comm
        gc.collect()
    live: dict[str, int] = nccl_sim.load().live()
    return live


def test_a_communicator_that_nobody_closed_leaves_nothing() -> None:
    nothing = dict.fromkeys(("streams", "events", "comms", "memory", "registrations"), 0)
    assert run_ranks(_forgotten, 2) == [nothing] * 2


def _ends_with_work_under_way(rank: int, world: int) -> list[str]:
    comm = make(timeout_s=600.0)
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    if rank == 1:
        store.wait(["rank 0 has ended"])
        comm.abort("on purpose")
        return []
    ticket = comm.all_gather(torch.ones(2 * world), torch.ones(2), label=GATHER)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_kernels").addHandler(handler)
    _nccl_end._PATIENCE_S = 0.5
    _nccl_end._end_all()
    store.set("rank 0 has ended", "")
    ticket.cancel()
    return lines


def test_a_program_that_ends_with_work_under_way_does_not_wait_for_its_peers() -> None:
    (line,) = run_ranks(_ends_with_work_under_way, 2, timeout=60)[0]
    assert line == (
        "communicator 'fk0': expected what is under way to complete within 0.5 s, got more on rank "
        "0. It was aborted; wait for it before the program ends."
    )


def test_the_simulation_and_the_real_module_may_share_a_process() -> None:
    real = _ext.nccl()
    if real is None:
        pytest.skip("the NCCL module is not built")
    assert real.Communicator is not nccl_sim.load().Communicator
    assert len(real.unique_id()) == 128
    run_ranks(_unwaited, 2)
