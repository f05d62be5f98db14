# SPDX-License-Identifier: Apache-2.0
"""Runs a function as every rank of a small world, in real processes over gloo on loopback."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers do, and each rank would take half a second for it
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore


class RankError(RuntimeError):
    """A rank failed; the message is its traceback, or how its process ended."""


class _Skip(Exception):
    """Stands for pytest's own skip, which does not pickle."""


@dataclass
class Outcome:
    """What became of one rank: it returned a value, raised, or its process died."""

    rank: int
    value: Any = None
    exception: BaseException | None = None
    traceback: str = ""
    died: bool = False

    @property
    def failed(self) -> bool:
        return self.exception is not None or self.died

    def reraise(self) -> None:
        """Raise what the rank raised, as its own type, with its traceback as the cause."""
        cause = RankError(f"rank {self.rank} failed:\n{self.traceback}")
        if self.exception is None:
            raise cause
        if isinstance(self.exception, _Skip):
            pytest.skip(str(self.exception))
        raise self.exception from cause


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60,
    fresh: bool = False,
    enter: Callable[[int], None] | None = None,
) -> list[Any]:  # of what `fn` returned, in rank order
    """Call `fn(rank, world, *args)` on `world` forked ranks and return their results.

    The first failure is raised here, with the rank's own type and traceback, and the other ranks
    are killed. No process outlives the call. Results must pickle; with `fresh`, for ranks that use
    CUDA, so must `fn` and `args`: the ranks then inherit nothing of this process, CUDA included.
    Each rank calls `enter(rank)` first of all, before there is a process group or any thread.

    Raises:
        TimeoutError: After `timeout` seconds; the message has the Python stacks of the slow ranks.
    """
    call = (fn, args, enter)
    outcomes = _run(call, world, timeout, stop_at_failure=True, fresh=fresh)
    return [outcome.value for outcome in outcomes]


def run_ranks_outcomes(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60, fresh: bool = False
) -> list[Outcome]:
    """Do the same, but let every rank end by itself and return what became of each.

    For tests in which a rank is meant to fail or die.
    """
    return _run((fn, args, None), world, timeout, stop_at_failure=False, fresh=fresh)


_Call = tuple[Callable[..., Any], tuple[Any, ...], Callable[[int], None] | None]
"""What a rank calls, with which arguments, and where it goes first."""


def _context(fresh: bool) -> Any:
    """Return how to start a rank: by a fork of this process, unless CUDA forbids that.

    A process that has used CUDA cannot be forked. The fork server is a process of its own that has
    imported torch and never uses CUDA: from it a rank starts in a fraction of a second, too.
    """
    if not fresh and not _cuda_is_live():
        return mp.get_context("fork")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "fsdp_kernels"])
    return context


def _run(
    call: _Call,
    world: int,
    timeout: float,
    *,
    stop_at_failure: bool,
    fresh: bool,
) -> list[Outcome]:
    context = _context(fresh)
    ranks: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        collecting = gc.isenabled()
        gc.disable()  # until the child has frozen what it inherited: see _rank_main
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                setup = (rank, world, timeout, folder)
                process = context.Process(
                    target=_rank_main, args=(setup, theirs, *call), daemon=True
                )
                process.start()
                theirs.close()  # so that the rank's death reads as the end of the pipe
                ranks.append((process, ours))
            if collecting:
                gc.enable()
            return _collect(ranks, timeout, stop_at_failure, Path(folder))
        finally:
            if collecting:
                gc.enable()
            for _, ours in ranks:
                with suppress(OSError):
                    ours.send_bytes(b"")  # releases a rank that succeeded
                ours.close()
            deadline = time.monotonic() + 5
            for process, _ in ranks:
                process.join(max(0.0, deadline - time.monotonic()) if not stop_at_failure else 1)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


def _cuda_is_live() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _collect(
    ranks: list[tuple[BaseProcess, Connection]],
    timeout: float,
    stop_at_failure: bool,
    stacks: Path,
) -> list[Outcome]:
    deadline = time.monotonic() + timeout
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    outcomes: dict[int, Outcome] = {}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            _raise_timeout(ranks, sorted(pending.values()), timeout, stacks)
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            outcome = outcomes[rank] = _read(rank, ranks[rank][0], connection)
            if outcome.failed and stop_at_failure:
                for process, _ in ranks:
                    process.kill()
                outcome.reraise()
    return [outcomes[rank] for rank in range(len(ranks))]


def _read(rank: int, process: BaseProcess, connection: Connection) -> Outcome:
    try:
        value, exception, text = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(5)
        text = f"its process ended without a result, exit code {process.exitcode}"
        return Outcome(rank, died=True, traceback=text)
    return Outcome(rank, value, exception, text)


def _raise_timeout(
    ranks: list[tuple[BaseProcess, Connection]], slow: list[int], timeout: float, stacks: Path
) -> None:
    for rank in slow:
        pid = ranks[rank][0].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # see _rank_main
    time.sleep(0.3)
    dumps = [f"rank {rank}:\n{_text(stacks / str(rank))}" for rank in slow]
    for process, _ in ranks:
        process.kill()
    raise TimeoutError(
        f"run_ranks: expected all of {len(ranks)} ranks to finish in {timeout} s, "
        f"got none from {slow}. They were in\n" + "\n".join(dumps)
    )


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "(no stack)"


def _rank_main(
    setup: tuple[int, int, float, str],
    connection: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    enter: Callable[[int], None] | None,
) -> None:
    # What the parent left for its collector must not be destroyed here: destructors of stores and
    # pools join threads that a fork does not copy, and hang.
    gc.freeze()
    gc.enable()
    rank, world, timeout, folder = setup
    with open(Path(folder) / str(rank), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            if enter is not None:
                enter(rank)
            torch.set_num_threads(1)
            limit = timedelta(seconds=timeout)
            # A file needs no port, no server that a dead rank could take along, and no thread in
            # the parent, which forks.
            store = FileStore(str(Path(folder) / "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
            message = pickle.dumps((fn(rank, world, *args), None, ""))
        except BaseException as error:  # pytest.skip and SystemExit too: the parent raises them
            connection.send_bytes(_pickled(error, traceback.format_exc()))
            # Without a goodbye, as a failed rank leaves in real life: peers must not wait for it.
            os._exit(1)
        connection.send_bytes(message)
        # Peers may still be in the last collective: keep the connections until the parent has heard
        # from everyone.
        with suppress(EOFError, OSError):
            connection.recv_bytes()
        os._exit(0)


def _pickled(error: BaseException, text: str) -> bytes:
    try:
        message = pickle.dumps((None, error, text))
        pickle.loads(message)  # some exceptions pickle and then do not load
        return message
    except Exception:
        reason = str(error) if isinstance(error, pytest.skip.Exception) else None
        return pickle.dumps((None, _Skip(reason) if reason else RankError(text), text))
