# SPDX-License-Identifier: Apache-2.0
"""Whole state dicts, and checkpoints that resume bit for bit and survive a crash."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Block, Net, Turn, build, full_params, mse
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_kernels import (
    ProcessGroupComm,
    ShardedAdamW,
    _checkpoint_io,
    checkpoint,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from fsdp_kernels.flat_shard import FlatShard

BF16 = torch.bfloat16


class Centre(nn.Module):
    """Subtracts a running mean of this rank's own data, as batch norms do, in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
            self.count.add_(1)
        return x - self.mean.to(x.dtype)


class Odd(nn.Module):
    """Tied, empty, 0-dim and frozen parameters; buffers that differ between ranks; extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 7)
        self.centre = Centre()
        self.block = Block(7, 13)
        self.head = nn.Linear(7, 5)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.head.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.arange(11.0), requires_grad=False)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.note = "first"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.centre(self.inp(x)))
        x = self.head(x) + self.tied(x) * self.gain + self.cube.mean() * self.frozen.mean()
        return x + self.empty.sum()


def shard(make: Callable[[], nn.Module], **kwargs: Any) -> nn.Module:
    return fully_shard(build(make), units=Block, **kwargs)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        losses.append(float(mse(model, Turn(rank, world, step, torch.float32))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bits(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, bytes]:
    """Return every local byte of a model, its buffers and its optimizer's state."""
    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        if isinstance(value, FlatShard) and optimizer is not None:
            for key, entry in optimizer.state.get(value, {}).items():
                found[f"{name} {key}"] = entry
    return {name: raw(value) for name, value in found.items()}


def raw(value: torch.Tensor) -> bytes:
    local = value.to_local() if isinstance(value, FlatShard) else value
    return local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# Whole state dicts.


def whole(rank: int, world: int) -> None:
    plain, model = build(Odd), shard(Odd)
    want = plain.state_dict()
    got = full_state_dict(model)
    if rank != 0:
        assert got == {}
    everywhere = full_state_dict(model, rank0_only=False)
    for found in (everywhere, got) if rank == 0 else (everywhere,):
        assert list(found) == list(want)
        for name, value in want.items():
            if name == "_extra_state":
                assert found[name] == value
                continue
            assert type(found[name]) is torch.Tensor
            assert found[name].device.type == "cpu"
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
        assert found["head.weight"] is found["tied.weight"]
        plain.load_state_dict(found)
    everywhere["inp.weight"].zero_()  # new tensors
    everywhere["centre.mean"].fill_(9.0)
    assert float(model.inp.weight.full_tensor().abs().sum()) > 0
    assert float(model.centre.mean.sum()) == 0


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_full_state_dict_is_the_unsharded_models(world: int) -> None:
    run_ranks(whole, world)


def loads(rank: int, world: int, own: torch.dtype, compute: torch.dtype) -> None:
    other = build(Odd)
    other.note = "second"
    with torch.no_grad():
        for value in other.state_dict().values():
            if isinstance(value, torch.Tensor):
                value.copy_(torch.randn(value.shape) * 3)
    sd = other.state_dict()
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for everywhere in (True, False):
        model = fully_shard(build(Odd).to(own), units=Block, mp_policy=policy)
        x = torch.ones(2, 3, dtype=own)
        model(x)
        load_full_state_dict(model, sd if everywhere or rank == 0 else {})
        assert model.note == "second"
        found = full_state_dict(model, rank0_only=False)
        for name, value in sd.items():
            if isinstance(value, torch.Tensor):
                lowered = value.to(found[name].dtype)
                assert torch.equal(found[name], lowered), name
        assert model.head.weight is model.tied.weight
        plain = build(Odd).to(own)
        plain.load_state_dict(found)
        if own == compute:
            assert torch.allclose(model.eval()(x), plain.eval()(x), rtol=1e-2), "the next forward"
        # One of a tied parameter's names is enough.
        load_full_state_dict(model, {k: v for k, v in sd.items() if k != "tied.weight"})


@pytest.mark.parametrize(
    ("own", "compute"), [(torch.float32, torch.float32), (torch.float32, BF16)]
)
def test_load_full_state_dict(own: torch.dtype, compute: torch.dtype) -> None:
    run_ranks(loads, 3, own, compute)


def refused(rank: int, world: int) -> None:
    model = shard(Odd)
    sd = build(Odd).state_dict()
    before = bits(model)

    def without(name: str) -> dict[str, Any]:
        return {k: v for k, v in sd.items() if k != name}

    twice = sd | {"head.weight": sd["head.weight"] + 1}
    cases: list[tuple[dict[str, Any], str]] = [
        (without("inp.bias"), "missing: inp.bias"),
        (without("centre.count"), "missing: centre.count"),
        (without("_extra_state"), "missing: _extra_state"),
        (sd | {"inp.more": torch.ones(2)}, "unexpected: inp.more"),
        (sd | {"inp.bias": torch.ones(2)}, r"wrong: inp.bias is \(2,\), not \(7,\)"),
        (sd | {"inp.bias": 3.0}, "wrong: inp.bias is a float"),
        (sd | {"inp.bias": model.state_dict()["inp.bias"]}, "inp.bias is sharded"),
        (twice, "head.weight and tied.weight are one parameter but differ"),
    ]
    for bad, message in cases:
        for given in (bad, bad if rank == 0 else {}, bad if rank == world - 1 else sd):
            with pytest.raises(ValueError, match=message):
                load_full_state_dict(model, given)
            assert bits(model) == before
    with pytest.raises(ValueError, match=r"on rank 0 and {} on the others, got it on ranks \[1\]"):
        load_full_state_dict(model, sd if rank == 1 else {})
    for call in (full_state_dict, partial(load_full_state_dict, sd=sd)):
        with pytest.raises(ValueError, match=r"got a Odd without sharded .* Call fully_shard"):
            call(build(Odd))
    load_full_state_dict(model, sd)


def test_state_dicts_that_do_not_fit_change_nothing() -> None:
    run_ranks(refused, 2)


# Checkpoints.

Maker = Callable[[nn.Module], torch.optim.Optimizer]


def sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0, "amsgrad": True}]
    return ShardedAdamW(groups, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def torch_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def resumes(
    rank: int, world: int, folder: str, make: Maker, own: torch.dtype, compute: torch.dtype
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = fully_shard(build(Odd).to(own), units=Block, mp_policy=policy)
        optimizer = make(model)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    model, optimizer, schedule = fresh()
    path = Path(folder) / "deep" / "step-4"
    train(model, optimizer, rank, world, range(3))
    schedule.step()
    schedule.step()
    torch.manual_seed(rank)
    extra = {"schedule": schedule.state_dict(), "rng": torch.get_rng_state(), "rank": rank}
    checkpoint.save(path, model, optimizer, extra)
    kept = bits(model, optimizer)
    drawn = torch.rand(3)
    losses = train(model, optimizer, rank, world, range(3, 6))

    other, loaded, again = fresh()
    train(other, loaded, rank, world, range(20, 22))
    got = checkpoint.load(path, other, loaded)
    assert bits(other, loaded) == kept
    assert got["rank"] == rank
    torch.set_rng_state(got["rng"])
    assert torch.equal(torch.rand(3), drawn)
    again.load_state_dict(got["schedule"])
    assert loaded.param_groups[0]["lr"] == 5e-3
    assert train(other, loaded, rank, world, range(3, 6)) == losses
    assert bits(other, loaded) == bits(model, optimizer)
    assert other.note == "first"

    fourth, stateless, _ = fresh()
    checkpoint.load(path, fourth)  # the model alone
    assert bits(fourth) == {k: v for k, v in kept.items() if " " not in k}
    assert not stateless.state
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-4"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_resume_is_bit_exact(world: int, tmp_path: Path) -> None:
    run_ranks(resumes, world, str(tmp_path), sharded_adamw, torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("make", "own", "compute"),
    [
        (sharded_adamw, torch.float32, BF16),
        (sharded_adamw, BF16, BF16),
        (torch_adamw, torch.float32, torch.float32),
        (torch_adamw, BF16, BF16),
        (torch_sgd, torch.float32, BF16),
    ],
)
def test_resume_with_other_optimizers_and_dtypes(
    make: Maker, own: torch.dtype, compute: torch.dtype, tmp_path: Path
) -> None:
    run_ranks(resumes, 2, str(tmp_path), make, own, compute)


def write_one(rank: int, world: int, folder: str) -> dict[str, Any]:
    model = shard(Odd)
    optimizer = sharded_adamw(model)
    train(model, optimizer, rank, world, range(3))
    checkpoint.save(Path(folder) / "c", model, optimizer, {"rank": rank})
    state = {name: full_moments(optimizer, p) for name, p in model.named_parameters()}
    return {"params": full_params(model), "state": state}


def full_moments(optimizer: Any, p: Any) -> dict[str, torch.Tensor]:
    entry = optimizer.state.get(p, {})
    return {k: v.full_tensor() if isinstance(v, FlatShard) else v for k, v in entry.items()}


def read_one(rank: int, world: int, folder: str, want: dict[str, Any]) -> None:
    model = shard(Odd)
    optimizer = sharded_adamw(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = checkpoint.load(Path(folder) / "c", model, optimizer)
    assert extra["rank"] == (rank if rank < 2 else 0)
    assert any("rank 0's extra" in str(w.message) for w in caught) == (rank >= 2)
    for name, value in full_params(model).items():
        assert torch.equal(value, want["params"][name]), name
    for name, p in model.named_parameters():
        got = full_moments(optimizer, p)
        assert got.keys() == want["state"][name].keys()
        assert all(torch.equal(got[k], v) for k, v in want["state"][name].items()), name
    train(model, optimizer, rank, world, range(3, 5))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_another_number_of_ranks_loads_the_same_values(world: int, tmp_path: Path) -> None:
    want = run_ranks(write_one, 2, str(tmp_path))[0]
    run_ranks(read_one, world, str(tmp_path), want)


# Crashes.


class Crash(RuntimeError):
    """Stands for whatever may end a save."""


def crashes(rank: int, world: int, folder: str) -> None:
    path = Path(folder) / "latest"
    model = shard(Net)
    optimizer = sharded_adamw(model)
    train(model, optimizer, rank, world, range(1))
    checkpoint.save(path, model, optimizer, {"step": 1})
    kept = bits(model, optimizer)
    train(model, optimizer, rank, world, range(1, 2))

    def check(want: dict[str, bytes], step: int) -> None:
        other = shard(Net)
        loaded = sharded_adamw(other)
        assert checkpoint.load(path, other, loaded) == {"step": step}
        assert bits(other, loaded) == want
        dist.barrier()

    def crash(*args: Any, **kwargs: Any) -> None:
        raise Crash("the disk is full")

    # One rank fails while tensors are written; while the small files are; at the very end.
    places: list[tuple[Any, str, Any]] = [
        (FileSystemWriter, "write_data", crash),
        (_checkpoint_io, "write", mock.Mock(side_effect=OSError("the disk is full"))),
        (FileSystemWriter, "finish", crash),
    ]
    for where, name, failure in places:
        guilty = 0 if name == "finish" else world - 1
        original = getattr(where, name)
        with (
            mock.patch.object(where, name, failure if rank == guilty else original),
            pytest.raises(RuntimeError, match="the disk is full"),
        ):
            checkpoint.save(path, model, optimizer, {"step": 2})
        dist.barrier()
        assert [p.name for p in path.parent.iterdir()] == ["latest"], "nothing is left behind"
        dist.barrier()
        check(kept, 1)

    # The second rename fails: the first is undone.
    rename = os.rename

    def no_rename(source: Any, target: Any) -> None:
        if ".saving-" in Path(source).name:
            raise OSError("no rename today")
        rename(source, target)

    with (
        mock.patch.object(os, "rename", no_rename),
        pytest.raises(RuntimeError, match=r"expected to rename .* got no rename today"),
    ):
        checkpoint.save(path, model, optimizer, {"step": 2})
    check(kept, 1)

    # The job dies between the two renames: a load takes the newer of the two complete siblings.
    class Dead(BaseException):
        pass

    def die(source: Any, target: Any) -> None:
        if ".saving-" in Path(source).name:
            raise Dead
        rename(source, target)

    newer = bits(model, optimizer)
    publish = _checkpoint_io.publish
    with mock.patch.object(os, "rename", die), mock.patch.object(_checkpoint_io, "discard"):
        staged = None

        def remember(source: Path, target: Path) -> None:
            nonlocal staged
            staged = source
            raise OSError("stop here")

        with (
            mock.patch.object(_checkpoint_io, "publish", remember),
            pytest.raises(RuntimeError, match="stop here"),
        ):
            checkpoint.save(path, model, optimizer, {"step": 2})
        if rank == 0:
            assert staged is not None
            with pytest.raises(Dead):
                publish(staged, path)
    dist.barrier()
    assert not path.exists()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(newer, 2)
    assert any("a save was interrupted" in str(w.message) for w in caught) == (rank == 0)
    if rank == 0:
        shutil.rmtree(staged)  # as if that one had not been complete
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(kept, 1)

    # The next save works and tidies up.
    checkpoint.save(path, model, optimizer, {"step": 2})
    check(newer, 2)
    assert [p.name for p in path.parent.iterdir()] == ["latest"]


def test_a_crash_leaves_the_previous_checkpoint_loadable(tmp_path: Path) -> None:
    run_ranks(crashes, 2, str(tmp_path))


# Wrong inputs.


def wrong_saves(rank: int, world: int, folder: str) -> None:
    model, base = shard(Net), Path(folder)
    optimizer = sharded_adamw(model)

    def refuse(message: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=message):
            checkpoint.save(*args, **kwargs)
        dist.barrier()

    if rank == 0:
        (base / "file").write_text("mine")
        (base / "other").mkdir()
        (base / "other" / "file").write_text("mine")
        (base / "empty").mkdir()
    dist.barrier()
    refuse("got a file at", base / "file", model)
    refuse("got a directory with other files at", base / "other", model)
    assert (base / "other" / "file").read_text() == "mine"
    refuse("without sharded parameters", base / "a", build(Net))
    refuse("expected an optimizer of this model's", base / "a", model, torch_sgd(build(Net)))
    refuse(
        "expected extra to hold tensors, numbers",
        base / "a",
        model,
        extra={"bad": random.Random()} if rank == world - 1 else None,
    )
    assert not (base / "a").exists()
    checkpoint.save(base / "empty", model, optimizer)
    assert checkpoint.load(base / "empty", model, optimizer) is None
    (base / "link").symlink_to("empty") if rank == 0 else None
    dist.barrier()
    checkpoint.save(base / "link", model, extra=(1, [2.0, "x"], {"t": torch.ones(2, dtype=BF16)}))
    assert (base / "link").is_symlink()
    got = checkpoint.load(base / "empty", model)
    assert got[:2] == (1, [2.0, "x"])
    assert torch.equal(got[2]["t"], torch.ones(2, dtype=BF16))


def test_saves_that_cannot_work_say_why(tmp_path: Path) -> None:
    run_ranks(wrong_saves, 2, str(tmp_path))


def wrong_loads(rank: int, world: int, folder: str) -> None:
    model, base = shard(Net), Path(folder)
    optimizer = sharded_adamw(model)
    train(model, optimizer, rank, world, range(1))
    checkpoint.save(base / "c", model, optimizer)
    checkpoint.save(base / "alone", model)

    def refuse(message: str, path: Path, model: nn.Module, make: Maker | None = None) -> None:
        own = None if make is None else make(model)
        before = bits(model, own)
        with pytest.raises(ValueError, match=message):
            checkpoint.load(path, model, own)
        assert bits(model, own) == before
        dist.barrier()

    refuse("got nothing there", base / "missing", model)
    refuse("got an incomplete one", base, model)
    refuse("expected a checkpoint with an optimizer", base / "alone", model, sharded_adamw)
    refuse(r"missing: .*block\.", base / "c", shard(Odd))
    wide = fully_shard(build(partial(Net, dim=9)), units=Block)
    refuse(r"wrong: .*inp\.weight is \(7, 3\), not \(9, 3\)", base / "c", wide)
    deep = fully_shard(build(partial(Net, depth=2)), units=Block)
    refuse(r"unexpected: blocks\.2", base / "c", deep)
    refuse("expected 2 parameter groups, as were saved, got 1", base / "c", model, torch_adamw)
    if rank == 0:
        (base / "c" / "rank1.pt").unlink()
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"expected to read .*rank1\.pt"):
        checkpoint.load(base / "c", model, optimizer)


def test_loads_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    run_ranks(wrong_loads, 2, str(tmp_path))


def test_buffers_that_are_on_no_rank_alike_come_back(tmp_path: Path) -> None:
    run_ranks(own_buffers, 3, str(tmp_path))


def own_buffers(rank: int, world: int, folder: str) -> None:
    model = shard(Odd)
    optimizer = sharded_adamw(model)
    train(model, optimizer, rank, world, range(2))
    means = [torch.zeros(7) for _ in range(world)]
    dist.all_gather(means, model.centre.mean)
    assert not torch.equal(means[0], means[1]), "the ranks' statistics must differ for this test"
    checkpoint.save(Path(folder) / "c", model)
    other = shard(Odd)
    checkpoint.load(Path(folder) / "c", other)
    assert torch.equal(other.centre.mean, means[rank])
    assert int(other.centre.count) == 2


def in_a_subgroup(rank: int, world: int, folder: str) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    comm = ProcessGroupComm(group)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = shard(Odd, comm=comm)
        return model, sharded_adamw(model)

    model, optimizer = fresh()
    train(model, optimizer, comm.rank, comm.world, range(2))
    checkpoint.save(Path(folder) / "c", model, optimizer, {"rank": rank})
    other, loaded = fresh()
    assert checkpoint.load(Path(folder) / "c", other, loaded) == {"rank": rank}
    assert bits(other, loaded) == bits(model, optimizer)
    whole = full_state_dict(model)
    assert bool(whole) == (comm.rank == 0)
    load_full_state_dict(other, whole)
    want = bits(model)
    assert {k: v for k, v in bits(other).items() if v != want[k]}.keys() <= {"centre.mean"}


def test_a_model_on_some_of_the_ranks(tmp_path: Path) -> None:
    run_ranks(in_a_subgroup, 3, str(tmp_path))


def test_dcps_own_tools_read_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    want = run_ranks(write_one, 2, str(tmp_path))[0]
    dcp_to_torch_save(tmp_path / "c", tmp_path / "whole.pt")
    got = torch.load(tmp_path / "whole.pt")
    for name, value in want["params"].items():
        if value.numel():
            assert torch.equal(got["model"][name], value), name
    moment = got["optimizer"]["cube"]["exp_avg"]
    assert torch.equal(moment, want["state"]["cube"]["exp_avg"])
