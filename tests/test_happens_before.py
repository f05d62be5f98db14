# SPDX-License-Identifier: Apache-2.0
"""Everything that the runtime queues is ordered, and every wait that orders it is needed."""

from __future__ import annotations

import ast
import warnings
from functools import cache
from pathlib import Path

import nccl_sim
import pytest
import streamed_nccl
from happens_before import Analysis, Site, SitedLog, analyse, races
from harness import run_ranks
from stream_scenarios import SCENARIOS
from stream_stage import Stage
from streamed_comm import Cuda, StreamedComm
from streamed_nccl import by_stream, called, noted

import fsdp_kernels
from fsdp_kernels import pool
from fsdp_kernels.comm.process_group import ProcessGroupComm
from fsdp_kernels.streams import CudaStreams, Users
from fsdp_kernels.trace import Access, record_schedule

SITES: dict[Site, str] = {
    # A collective starts after what the compute stream has ...
    ("bucket.py", "gather", "issue"): "the shard was cast or stepped, the slot freed or made",
    ("unit.py", "gather", "issue"): "the same, for a group",
    ("grads.py", "reduce", "issue"): "the gradients were packed",
    ("unit.py", "reduce", "issue"): "the same, for a group",
    ("_wrap.py", "_build_bucket", "issue"): "rank 0's parameters were copied",
    ("_wrap.py", "sync_buffers", "issue"): "a buffer was copied",
    ("_adam_norm.py", "sum_of_squares", "issue"): "this rank's norm was computed",
    ("flat_ops.py", "_global_norms", "issue"): "the same, for torch's own clipping",
    ("flat_shard.py", "full_tensor", "issue"): "the fragment was padded",
    ("full_params.py", "__init__", "issue"): "the master was stepped",
    ("full_params.py", "_write_back", "issue"): "the flags were made",
    ("_full_state.py", "full_state_dict", "issue"): "the memory was made",
    ("_checkpoint_io.py", "check", "issue"): "the words were made",
    ("_checkpoint_io.py", "who", "issue"): "the words were made",
    # ... and whoever reads its result, or reuses its memory, waits for it.
    ("bucket.py", "wait", "ticket"): "forward or backward reads the weights",
    ("bucket.py", "free", "ticket"): "the slot of a gather that nobody used is given back",
    ("grads.py", "finish", "ticket"): "the gradients are accumulated, the full ones let go",
    ("grads.py", "discard", "ticket"): "memory of a failed backward is let go",
    ("_wrap.py", "_build_bucket", "ticket"): "the shard is cut out",
    ("_wrap.py", "sync_buffers", "ticket"): "the buffer is read",
    ("_adam_norm.py", "sum_of_squares", "ticket"): "the clip factor is computed",
    ("flat_ops.py", "_global_norms", "ticket"): "the clip factor is computed",
    ("flat_shard.py", "full_tensor", "ticket"): "the parts are put together",
    ("full_params.py", "__init__", "ticket"): "the user reads",
    ("full_params.py", "_write_back", "ticket"): "the host reads",
    ("_full_state.py", "full_state_dict", "ticket"): "the host copies",
    ("_checkpoint_io.py", "check", "ticket"): "the host reads",
    ("_checkpoint_io.py", "who", "ticket"): "the host reads",
    # Between compute streams, where there are several.
    ("bucket.py", "gather", "wait"): "the slot was freed on another one",
    ("bucket.py", "use", "join"): "another one has waited for the gather",
    ("bucket.py", "_end_use", "join"): "another one still reads the weights",
    ("grads.py", "pack", "join"): "gradients came on another one",
    ("grads.py", "pack", "release"): "the memory of those gradients is another one's",
    ("grads.py", "_let_target_go", "precede"): "the memory of the sum is another one's",
    ("shard_grads.py", "let_go", "precede"): "the memory of the gradients is another one's",
    ("pool.py", "_drop", "wait_at"): "the memory of the slot is another one's",
}
"""Where the runtime waits, and for whom or what."""

REDUNDANT: dict[Site, str] = {
    ("grads.py", "pack", "wait"): (
        "A slot of gradients is freed where a unit was used or a gradient came, which the stream "
        "of the next packing has followed. The wait costs nothing and does not rely on that."
    ),
    ("stepping.py", "end", "join"): (
        "A stream that stepped has come to a unit, too, whose freeing the end has followed."
    ),
}
"""Sites that may not be needed; the checker shows for each wait that it orders nothing new."""

GUARDS: dict[Site, str] = {
    ("stepping.py", "_step", "join"): (
        "A step writes what gathers have read, on another stream than the one that freed the unit. "
        "Gradients pass between the two in every program here. `test_streams.py` looks at it."
    ),
}
"""Sites that no program here needs, though one could be thought of that does."""

TEST: Site = ("the test", "", "")


def play(rank: int, world: int, name: str) -> SitedLog:
    """Play a scenario over a communicator that only notes what a device would do."""
    cuda = Cuda()
    with record_schedule() as schedule:
        schedule.log = log = SitedLog()
        _play(name, Stage(rank, world, StreamedComm(ProcessGroupComm(), cuda), cuda))
    return log


def _play(name: str, stage: Stage) -> None:
    with warnings.catch_warnings(), stage.exits:
        warnings.simplefilter("ignore")
        SCENARIOS[name](stage)


def analysed(rank: int, world: int, name: str) -> Analysis:
    return analyse(play(rank, world, name))


@cache
def of_one_rank(name: str) -> Analysis:
    analysis: Analysis = run_ranks(analysed, 1, name)[0]
    return analysis


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races(name: str) -> None:
    assert not of_one_rank(name).races, "\n".join(of_one_rank(name).races)


def raced(rank: int, world: int, name: str) -> list[str]:
    return [str(race) for race in races(play(rank, world, name))]


TWO_RANKS = [
    "accumulate",
    "failed backward",
    "routed",
    "three streams at once, left over",
]
"""Where ranks differ in what they use, issue and lose."""


@pytest.mark.parametrize("name", TWO_RANKS)
def test_nothing_races_on_two_ranks(name: str) -> None:
    assert run_ranks(raced, 2, name) == [[], []]


def poisoned(rank: int, world: int, name: str) -> list[str]:
    pool._POISON = True
    return raced(rank, world, name)


@pytest.mark.parametrize("begin", ["plain, prefetch 1", "two streams at once, uneven", "failed"])
def test_nothing_races_where_freed_memory_is_poisoned(begin: str) -> None:
    name = next(name for name in SCENARIOS if name.startswith(begin))
    assert run_ranks(poisoned, 1, name) == [[]]


# -- mutations ------------------------------------------------------------------------------------


def test_every_site_is_known_and_found_when_it_does_not_wait() -> None:
    """Each site left out as a whole leaves a race, and so does at least one of its waits alone."""
    everything = [of_one_rank(name) for name in SCENARIOS]
    sites = {site for analysis in everything for site in analysis.found} - {TEST}
    assert sites == SITES.keys() | REDUNDANT.keys() | GUARDS.keys()
    for site in SITES:
        assert any(analysis.found.get(site) for analysis in everything), site
        assert any(analysis.needed[site] for analysis in everything), site


def test_a_wait_that_is_not_found_is_redundant() -> None:
    """Left out alone it leaves everything ordered: by others already, or by another one in time.

    Where it orders nothing new this is said of the log as it is. The rest is counted, so that a
    buffer that the log no longer names shows here.
    """
    total = {"needed": 0, "implied": 0, "unneeded": 0}
    for name in SCENARIOS:
        analysis = of_one_rank(name)
        for kind in total:
            total[kind] += sum(n for s, n in getattr(analysis, kind).items() if s != TEST)
        for site in REDUNDANT:
            assert not analysis.needed[site], (name, site)
            assert not analysis.unneeded[site], (name, site)
    assert total["needed"] > 3 * total["unneeded"], total
    tickets = [s for s in SITES if s[2] == "ticket" and s != ("grads.py", "finish", "ticket")]
    for name in SCENARIOS:
        for site in tickets:
            assert not of_one_rank(name).unneeded[site], (name, site)


BROKEN: dict[str, tuple[type, str, str]] = {
    "users of weights are not joined": (Users, "join", "two streams at once"),
    "leaves' memory goes back at once": (Users, "release", "branches of a unit on two streams"),
    "sums' memory goes back at once": (CudaStreams, "precede", "a branch that ends"),
    "slots' memory goes back at once": (CudaStreams, "wait_at", "two streams at once, uneven"),
    "a slot is filled while it is read": (CudaStreams, "wait", "three streams at once"),
}


def broken(rank: int, world: int, owner: type, method: str, name: str) -> int:
    setattr(owner, method, lambda *_: None)
    return len(raced(rank, world, name))


@pytest.mark.parametrize("what", BROKEN)
def test_code_that_does_not_wait_is_found(what: str) -> None:
    """The same in the code itself, for the waits between compute streams."""
    owner, method, begin = BROKEN[what]
    name = next(name for name in SCENARIOS if name.startswith(begin))
    assert run_ranks(broken, 1, owner, method, name) > [0]


# -- collectives whose ticket is not kept ---------------------------------------------------------

COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}
KEPT = {("bucket.py", "gather"), ("grads.py", "reduce")}


def test_a_ticket_that_is_not_kept_is_waited_on_at_once() -> None:
    """The log takes such a collective's operands as read right after the wait."""
    kept = set()
    for path in sorted(Path(fsdp_kernels.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for statement in [s for s in ast.walk(function) if isinstance(s, ast.stmt)]:
                    if _issues(statement) and not _waits(statement, function):
                        kept.add((path.name, function.name))
    assert kept == KEPT


def _issues(statement: ast.stmt) -> bool:
    if not isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return)):
        return False
    return any(_calls(node, COLLECTIVES) for node in ast.walk(statement))


def _calls(node: ast.AST, names: set[str]) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
        and not ast.unparse(node.func.value).endswith("peers")  # waits inside
    )


def _waits(statement: ast.stmt, function: ast.FunctionDef) -> bool:
    """Whether the statement ends in `.wait()`, or the next one is `ticket.wait()`."""
    if any(
        _calls(node, {"wait"}) and any(_calls(inner, COLLECTIVES) for inner in ast.walk(node))
        for node in ast.walk(statement)
    ):
        return True
    following = [
        body[place + 1]
        for block in ast.walk(function)
        for body in [getattr(block, "body", None)]
        if isinstance(body, list)
        for place, other in enumerate(body[:-1])
        if other is statement
    ]
    return bool(following) and ast.unparse(following[0]) == "ticket.wait()"


# -- NcclComm, and what CUDA was really asked for -------------------------------------------------


@pytest.fixture(scope="module")
def _simulation() -> None:
    nccl_sim.load()  # before the ranks, which would each wait for it


def compared(rank: int, world: int, name: str) -> list[str]:
    """Play over the compiled communicator; compare its log, the simulation's and the stand-in's."""
    cuda = Cuda()
    with record_schedule() as schedule:
        schedule.log = log = SitedLog()
        comm = streamed_nccl.make(cuda)
        _play(name, Stage(rank, world, comm, cuda))
    assert by_stream(noted(log)) == by_stream(called(comm))
    assert by_stream(noted(log)) == by_stream(noted(play(rank, world, name)))
    _check_buffers(log)
    found = [str(race) for race in races(log)]
    assert not nccl_sim.load().violations()
    comm.close()
    return found


def _check_buffers(log: SitedLog) -> None:
    """Slots are what the log calls them: one name, one address, and the other way round."""
    noted = [e for e in log if isinstance(e, Access) and e.stream in ("gather", "reduce")]
    moved = [entry[3:] for entry in nccl_sim.load().log() if len(entry) == 5]
    assert len(noted) == len(moved)
    addresses: dict[str, set[int]] = {}
    for access, (read, written) in zip(noted, moved, strict=True):
        for names, (address, _) in ((access.reads, read), (access.writes, written)):
            for slot in (name for name in names if " slot " in name):
                addresses.setdefault(slot, set()).add(address)
    assert any(slot.startswith("params slot") for slot in addresses)
    assert any(slot.startswith("grads slot") for slot in addresses)
    assert {len(each) for each in addresses.values()} == {1}, addresses


COMPARED = [
    "plain, prefetch 1",
    "accumulate",
    "failed forward",
    "failed backward",
    "kept full",
    "cast",
    "edits",
    "several buckets",
    "steps in backward, prefetch 1",
    "two streams at once, uneven",
    "three streams at once, left over",
    "loop and step on other streams",
]
"""Every kind of collective, alone and in a group, from one compute stream and from several."""


@pytest.mark.usefixtures("_simulation")
@pytest.mark.parametrize("name", COMPARED)
def test_the_log_is_what_cuda_was_asked_for(name: str) -> None:
    assert run_ranks(compared, 1, name) == [[]]


@pytest.mark.usefixtures("_simulation")
@pytest.mark.parametrize("name", ["routed", "several buckets"])
def test_the_log_is_what_cuda_was_asked_for_on_two_ranks(name: str) -> None:
    assert run_ranks(compared, 2, name) == [[], []]
