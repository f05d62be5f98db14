# SPDX-License-Identifier: Apache-2.0
"""`PeerMemory` over a stand-in for symmetric memory: the contract of `Comm`, training, refusals."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import peer_side
import pytest
import torch
from comm_contract import CommContract
from device_cases import SCENARIOS
from harness import run_ranks
from models import Block, Net, build, check, varied
from peer_side import MappedRegion, MappedSide
from peer_sim import Devices, Owner, Side, Stream
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp_kernels import ProcessGroupComm, _nvml, environment, fully_shard
from fsdp_kernels.comm import Comm, _peer_setup, pick
from fsdp_kernels.comm._peer_grads import PeerGrads
from fsdp_kernels.comm._peer_setup import PeerUnavailable, SymmetricRegion, Whereabouts
from fsdp_kernels.comm.peer import PeerMemory


class TestPeerMemory(CommContract):
    """Reductions through slots, which some of the contract's buffers do not fit in."""

    @staticmethod
    def make_comm(rank: int, world: int) -> Comm:
        return peer_side.make(1 << 14)


def sum_in_rank_order(rank: int, world: int) -> None:
    """In float32, sums of these in any other order differ."""
    comm = peer_side.make(1 << 10)
    assert comm.grads_nbytes == 2 << 10
    for values, expected in (
        ([1e8, 1.0, -1e8], 0.0),
        ([1.0, 1e8, -1e8], 0.0),
        ([1e8, -1e8, 1.0], 1.0),
    ):
        full = comm.grads_buffer(2 * world, torch.float32, label="fk.reduce[a/0]")
        assert full is not None
        again = comm.grads_buffer(2 * world, torch.float32, label="fk.reduce[a/0]")
        assert again is not None
        assert full.data_ptr() == again.data_ptr()
        shard = torch.zeros(2)
        version = shard._version
        comm.reduce_scatter(shard, full.fill_(values[rank]), label="fk.reduce[a/0]").wait()
        assert shard.tolist() == [expected] * 2
        assert shard._version > version
    assert comm.grads_buffer(1, torch.int32, label="fk.reduce[a/0]") is None
    assert comm.grads_buffer(1 << 10, torch.float32, label="fk.reduce[a/0]") is None
    comm.prepare_reductions(1 << 12)  # more than there was
    full = torch.full((1 << 10,), 1.0)[: 340 * world]
    comm.reduce_scatter(shard.new_zeros(340), full, label="fk.reduce[b/0]").wait()
    assert comm.grads_nbytes == 2 << 12


def test_sums_are_in_rank_order_on_every_rank() -> None:
    run_ranks(sum_in_rank_order, 3)


def trains(rank: int, world: int, names: list[str]) -> None:
    """Compare with the unsharded model at every step; gradients never pass the other backend."""
    comm = peer_side.make()
    seen: list[str] = []
    inner = comm._base.reduce_scatter
    comm._base.reduce_scatter = lambda *a, label: seen.append(label) or inner(*a, label=label)  # type: ignore
    for name in names:
        shard = partial(fully_shard, units=Block, comm=comm)
        check(rank, world, varied(SCENARIOS[name], shard=shard))
    assert comm.grads_nbytes > 0
    assert seen == []
    comm.close()


@pytest.mark.parametrize(("world", "names"), [(2, ["float64", "no_sync"]), (3, ["float32"])])
def test_training_equals_the_plain_model(world: int, names: list[str]) -> None:
    run_ranks(trains, world, names)


def trains_replicas(rank: int, world: int) -> None:
    """Peers inside a shard group; what `comm=None` means across the groups."""
    pick.CudaSide = MappedSide  # type: ignore[assignment,misc]
    pick.choose = lambda kind, world=2: pick.Choice("process_group", "for a test")  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard = partial(fully_shard, units=Block, comm="peer", mesh=mesh)
    check(rank, world, varied(SCENARIOS["float64"], shard=shard, steps=2))
    assert environment()["comm"] == "peer+process_group"


def test_peers_inside_a_shard_group() -> None:
    run_ranks(trains_replicas, 4)


# -- what stands in the way -----------------------------------------------------------------------


class FailingSide(MappedSide):
    """Something is wrong on rank 1."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def _at_fault(self, fault: str) -> bool:
        return fault == self.fault and torch.distributed.get_rank() == 1

    def whereabouts(self, device: torch.device) -> Whereabouts:
        found = super().whereabouts(device)
        if self._at_fault("torch"):
            return replace(found, refusal="this torch has no symmetric memory")
        return replace(found, host=("that host",)) if self._at_fault("host") else found

    def why_unlinked(self, gpu: str, others: Sequence[str]) -> str:
        return f"no NVLink joins {gpu} and {others[0]}" if self._at_fault("link") else ""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        if self._at_fault("memory") or (nbytes > 1024 and self._at_fault("more memory")):
            raise RuntimeError("CUDA driver error: out of memory\nat line 3")
        return super().allocate(nbytes, device)

    def rendezvous(self, memory: Tensor, group: Any) -> Any:
        region = super().rendezvous(memory, group)
        if self._at_fault("rendezvous"):
            raise RuntimeError("Inconsistent clique ids")
        if self._at_fault("reading"):
            assert isinstance(region, MappedRegion)
            region._files = [torch.zeros_like(region._files[0]), region._files[1]]
        return region


REASONS = {
    "torch": "this torch has no symmetric memory (rank 1)",
    "host": "ranks 0 and 1 are on different hosts, in different containers, or of different users",
    "link": "no NVLink joins GPU-1 and GPU-0 (rank 1)",
    "memory": "no 128 bytes of symmetric memory: CUDA driver error: out of memory (rank 1)",
    "rendezvous": "torch's rendezvous failed: Inconsistent clique ids (rank 1)",
    "reading": "the memory of rank 0 holds 0, where it wrote 1592590336 (rank 1)",
}


def refusals(rank: int, world: int) -> dict[str, str]:
    found = {}
    for fault in REASONS:
        with pytest.raises(PeerUnavailable) as caught:
            PeerMemory(base=ProcessGroupComm(), side=FailingSide(fault))
        found[fault] = str(caught.value)
    return found


def test_every_rank_refuses_with_the_same_reason() -> None:
    first, second = run_ranks(refusals, 2)
    assert first == second
    for fault, reason in REASONS.items():
        assert first[fault] == (
            "PeerMemory: expected ranks that address one another's memory (one host, GPUs linked "
            f"by NVLink), got: {reason}. Use comm=None."
        )


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("fsdp_kernels").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def without_room(rank: int, world: int) -> list[str]:
    """Too little memory for the slots: gradients take the other backend."""
    log = Log()
    comm = PeerMemory(base=ProcessGroupComm(), side=FailingSide("more memory"))
    for _ in range(2):
        comm.prepare_reductions(1 << 12)
    assert comm.grads_buffer(4, torch.float32, label="fk.reduce[a/0]") is None
    shard = torch.zeros(2)
    comm.reduce_scatter(shard, torch.ones(2 * world), label="fk.reduce[a/0]").wait()
    assert shard.tolist() == [2.0, 2.0]
    return log.lines


def test_without_room_for_slots_a_line_says_so() -> None:
    (line,), nothing = run_ranks(without_room, 2)
    assert nothing == []
    assert line.startswith("fk.reduce: gradients take process_group: PeerMemory: expected ranks")
    assert "no 8192 bytes of symmetric memory: CUDA driver error: out of memory (rank 1)" in line


def by_name(rank: int, world: int, fault: str) -> tuple[list[str], list[str]]:
    log = Log()
    pick.CudaSide = lambda: FailingSide(fault)  # type: ignore[assignment,misc]
    pick.choose = lambda kind, world=2: pick.Choice("process_group", "for a test")  # type: ignore[assignment]
    models: list[Any] = [fully_shard(build(Net), comm="peer") for _ in range(2)]
    names = [environment()["comm"]]
    for model in models:
        model(torch.ones(2, 3)).sum().backward()
    comms = {id(model._fk_unit.runtime.comm) for model in models}
    names.append(f"{len(comms)} communicator")
    if fault:
        return names, log.lines
    models[0]._fk_unit.runtime.comm.close()
    again: Any = fully_shard(build(Net), comm="peer")
    again(torch.ones(2, 3)).sum().backward()
    return names, log.lines


def test_the_name_gives_one_communicator_for_a_group() -> None:
    for names, lines in run_ranks(by_name, 2, ""):
        assert names == ["peer", "1 communicator"]
        assert lines == []


def test_the_name_falls_back_with_one_line() -> None:
    (names, lines), (_, nothing) = run_ranks(by_name, 2, "link")
    assert names[0] == "process_group"
    assert nothing == []
    (line,) = lines
    assert line.startswith("comm='peer': process_group takes its place: PeerMemory: expected")
    assert "no NVLink joins GPU-1 and GPU-0 (rank 1)" in line


def test_none_never_picks_it() -> None:
    assert "peer" in pick.NAMES
    assert pick.choose("cuda").name != "peer"


def alone(rank: int, world: int) -> None:
    comm = PeerMemory(base=ProcessGroupComm(), side=FailingSide("link"))  # nobody to reach
    comm.prepare_reductions(1 << 10)
    assert comm.grads_nbytes == 0
    with pytest.raises(ValueError, match=r"^PeerMemory: expected a CUDA device, got cpu\."):
        pick.make("peer", None, torch.device("cpu"))


def test_one_rank_needs_no_peers() -> None:
    run_ranks(alone, 1)


def outlives_its_group(rank: int, world: int) -> None:
    comm = peer_side.make(1 << 10)
    assert comm.process_group is torch.distributed.group.WORLD
    comm.barrier("fk.x")
    torch.distributed.destroy_process_group()
    gc.collect()
    assert comm.process_group is None, "it keeps the group and its threads alive"
    with pytest.raises(RuntimeError, match=r"^fk\.reduce: .* whose process group was destroyed"):
        comm.prepare_reductions(1 << 12)


def test_a_destroyed_group_is_let_go() -> None:
    run_ranks(outlives_its_group, 2)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built for CUDA")
def test_a_torch_without_cuda_is_told_from_one_that_has_it() -> None:
    reason = "this torch has no symmetric memory for CUDA"
    assert _peer_setup.why_no_symmetric_memory("cuda") == reason
    assert environment()["peer_memory"] == f"no: {reason}"


def test_another_kind_of_symmetric_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory as symmetric

    monkeypatch.setattr(symmetric, "get_backend", lambda device: "NVSHMEM")
    assert "is that of NVSHMEM" in _peer_setup.why_no_symmetric_memory("cuda")
    monkeypatch.setattr(symmetric, "get_backend", lambda device: "CUDA")
    assert _peer_setup.why_no_symmetric_memory("cuda") == ""
    assert environment()["peer_memory"].startswith("where NVLink joins the ranks' GPUs")


# -- torch's side ---------------------------------------------------------------------------------


def test_links_are_asked_for_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    linked = {("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")}
    shut: list[int] = []

    def handle(uuid: str) -> str:
        if uuid == "GPU-gone":
            raise NVMLError("Not Found")
        return uuid

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_P2P_CAPS_INDEX_NVLINK="nvlink",
        NVML_P2P_STATUS_OK=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: shut.append(1),
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetP2PStatus=lambda a, b, what: 0 if (a, b) in linked else 3,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    ask = _peer_setup.CudaSide().why_unlinked
    assert ask("GPU-a", ["GPU-b"]) == ""
    assert ask("GPU-a", ["GPU-b", "GPU-c"]) == "no NVLink joins GPU-a and GPU-c"
    assert ask("GPU-a", ["GPU-gone"]).endswith("is unknown: Not Found")
    assert len(shut) == 3
    variable = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    monkeypatch.delenv(variable, raising=False)
    assert ask("GPU-a", ["GPU-a"]) == (
        f"two ranks share GPU-a, which torch allows with {variable}=1 only"
    )
    monkeypatch.setenv(variable, "1")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ask("GPU-a", ["GPU-a"]) == ""  # nothing to ask
    assert _nvml.why_unlinked("GPU-a", ["GPU-b"]).endswith("nvidia-ml-py is not installed")


class Handle:
    """What torch's rendezvous returns, of rank 1."""

    rank = 1
    multicast_ptr = 1 << 40

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def get_buffer(self, *args: Any) -> str:
        self.calls.append(args)
        return "theirs"

    def barrier(self, *args: Any) -> None:
        self.calls.append(args)


def test_a_region_of_torchs() -> None:
    memory, handle = torch.arange(256, dtype=torch.uint8), Handle()
    region = SymmetricRegion(memory, handle)
    assert region.multicast == 1 << 40
    assert region.part(1, 128, 4, torch.float32).data_ptr() == memory.data_ptr() + 128
    assert region.part(0, 128, 4, torch.bfloat16) == "theirs"
    region.barrier(1, 20_000)
    # torch counts offsets in elements, and time in ms.
    assert handle.calls == [(0, (4,), torch.bfloat16, 64), (1, 20_000)]


def test_memory_is_an_allocation_by_itself_and_is_tried_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._C import _distributed_c10d as c10d

    calls: list[Any] = []

    def empty(*args: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return torch.zeros(3, dtype=torch.uint8)

    monkeypatch.setattr(c10d, "_SymmetricMemory", SimpleNamespace(empty_strided_p2p=empty))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    device = torch.device("cuda", 0)
    _peer_setup.CudaSide().allocate(3, device)
    wanted = ((3,), (1,), torch.uint8, device)
    assert calls == [wanted, "emptied", wanted]


def test_switches_sum_what_they_can() -> None:
    """At the address of this rank's part of the slot; else by pointers, and only that is lent."""
    used: list[int] = []

    class Seen(Side):
        def reduce(self, peers: Sequence[Tensor], shard: Tensor, multicast: int) -> None:
            used.append(multicast)

    class Switched:
        multicast = 1 << 40

        def part(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(numel, dtype=dtype)

        def barrier(self, channel: int, timeout_ms: int) -> None:
            pass

    from peer_sim import Cuda

    devices = Devices(2)
    for multicast in (True, False):
        side = Seen(Cuda(devices, 1))
        stream, owner = Stream(devices, "reduce"), Owner(1, 2)
        grads = PeerGrads(owner, side, Switched(), 256, stream, multicast=multicast)  # type: ignore[arg-type]
        shards = [
            torch.zeros(8),
            torch.zeros(8, dtype=torch.bfloat16),
            torch.zeros(8, dtype=torch.float64),  # switches have no sum of these in words
            torch.zeros(6),  # 24 bytes
        ]
        for number, shard in enumerate(shards):
            grads.post(shard, f"fk.reduce[{number}/0]").wait()
        base = 1 << 40
        expected = [base + 32, base + 256 + 16, 0, 0] if multicast else [0] * 4
        assert used == expected
        for number, shard in enumerate(shards):
            ticket = grads.post(shard, f"fk.reduce[{number}/0]", lend=True)
            lent = ticket.peers() is not None
            assert lent == (not expected[number]), "a switch's sum has bits of its own"
            ticket.wait()
        used.clear()


def test_what_switches_cannot_sum_is_refused() -> None:
    from triton_ops._peers import check_multicast

    out = torch.zeros(8)
    check_multicast("here", 64, out)
    with pytest.raises(ValueError, match=r"^here out: expected fp32, bf16 or fp16.*float64"):
        check_multicast("here", 64, out.double())
    with pytest.raises(ValueError, match=r"^here address: expected a multiple of 16, got 72"):
        check_multicast("here", 72, out)
    with pytest.raises(ValueError, match=r"^here bytes: expected a multiple of 16, got 28"):
        check_multicast("here", 64, out[:7])


def closes_early(rank: int, world: int) -> None:
    """Rank 0 closes before it waits for what it had put off: rank 1 need not wait for it."""
    comm = peer_side.make(1 << 10, timeout_s=20.0)
    shard, full = torch.zeros(2), torch.ones(2 * world)
    ticket = comm.reduce_scatter(shard, full, label="fk.reduce[a/0]", lend=rank == 0)
    grads = comm._grads
    assert grads is not None
    if rank == 0:
        assert grads._consumed[0] is None
        comm.close()
    consumed = grads._consumed[0]
    assert consumed is not None, "the others' barrier waits for this rank's"
    consumed[0].wait()
    ticket.wait()
    assert shard.tolist() == [world] * 2


def test_who_closes_holds_up_nobody() -> None:
    run_ranks(closes_early, 2)


def oldest_is_named(rank: int, world: int) -> str | None:
    """Rank 1 leaves out a reduction that rank 0 waits for; the next one finds out."""
    comm = peer_side.make(1 << 10, timeout_s=1.0)
    shard, full = torch.zeros(2), torch.ones(2 * world)
    comm.reduce_scatter(shard, full, label="fk.reduce[first/0]").wait()
    message = None
    if rank == 0:
        tickets = [
            comm.reduce_scatter(shard, full, label=f"fk.reduce[{name}/0]")
            for name in ("second", "third")
        ]
        with pytest.raises(RuntimeError) as caught:
            tickets[1].wait()
        message = str(caught.value)
        with pytest.raises(RuntimeError, match=r"^fk\.reduce\[second/0\]: .* not come to barrier"):
            tickets[0].wait()
        with pytest.raises(RuntimeError, match=r"^fk\.reduce\[last/0\]: .* an earlier failure: fk"):
            comm.reduce_scatter(shard, full, label="fk.reduce[last/0]")
        assert not comm.is_usable
    torch.distributed.barrier()
    return message


def test_an_error_names_the_oldest_reduction_that_did_not_end() -> None:
    message, _ = run_ranks(oldest_is_named, 2)
    assert message.startswith("fk.reduce[third/0]: expected reduce_scatter to complete on all 2")
    assert "(peer), got on rank 0: rank 1 did not come to barrier 2" in message
    assert message.endswith("The oldest that was not seen to end is fk.reduce[second/0].")
