# SPDX-License-Identifier: Apache-2.0
"""The sharded optimizers' state, groups, masters and errors; long runs: `test_numbers.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from models import (
    Net,
    Scenario,
    Turn,
    adamw,
    assert_close,
    assert_moments,
    assert_params,
    by_block,
    check_all,
    full,
    full_grads,
    mse,
    sharded_adamw,
    turns,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_kernels import ShardedAdam, ShardedAdamW, SharedMemoryComm, ops
from fsdp_kernels.flat_shard import FlatShard

WORLDS = [1, 2, 3, 4]
BF16 = torch.bfloat16


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a model with a parameter of one element, which most ranks own nothing of."""
    torch.manual_seed(5)
    model = Net(depth=2)
    model.head.register_parameter("gain", nn.Parameter(torch.ones(1)))
    return model.to(dtype)


def pair(dtype: torch.dtype = torch.float64, **policy: Any) -> tuple[nn.Module, nn.Module]:
    """Build the same model sharded and plain."""
    mixed = {"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}
    return by_block(small(dtype), **mixed), small(dtype)


def backward(model: nn.Module, plain: nn.Module, turn: Turn) -> None:
    """Give both models the gradients of one step."""
    mse(model, turn)
    for other in turns(turn.rank, turn.world, turn.step, turn.dtype):
        mse(plain, other)


# State.


def state_is_lazy(rank: int, world: int) -> None:
    model, plain = pair()
    optimizer, oracle = sharded_adamw(model.parameters()), adamw(plain.parameters())
    assert not optimizer.state
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.grad_norm is None
    assert all(not optimizer.state[p] for p in model.parameters())  # reading makes nothing
    assert optimizer.state_dict()["state"] == {}
    backward(model, plain, Turn(rank, world, 0))
    optimizer.step()
    oracle.step()
    assert optimizer.grad_norm is None, "without max_grad_norm nothing is measured"
    assert_moments((model, optimizer), (plain, oracle), "after one step")
    gain = model.head.gain
    assert not optimizer.state[gain], "a parameter that never had a gradient has no state"
    names = {name for name, p in model.named_parameters() if optimizer.state[p]}
    assert names == {name for name, _ in model.named_parameters()} - {"head.gain"}
    for p in model.parameters():
        if p is not gain:
            entry = optimizer.state[p]
            assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
            assert entry["step"].shape == ()
            assert entry["step"].dtype == torch.float32
            assert isinstance(entry["exp_avg"], FlatShard)
            assert entry["exp_avg"].shape == p.shape
            assert entry["exp_avg"].to_local().numel() == p.fragment.numel
    before = optimizer.state[model.inp.weight]["exp_avg"]
    mse(model, Turn(rank, world, 1))
    optimizer.step()
    assert optimizer.state[model.inp.weight]["exp_avg"] is before, "views are made once"
    assert float(optimizer.state[model.inp.weight]["step"]) == 2


@pytest.mark.parametrize("world", WORLDS)
def test_state_is_made_at_the_first_step_and_only_where_used(world: int) -> None:
    run_ranks(state_is_lazy, world)


def moments_can_be_edited(rank: int, world: int) -> None:
    model, plain = pair()
    optimizer, oracle = sharded_adamw(model.parameters()), adamw(plain.parameters())
    for step in range(3):
        backward(model, plain, Turn(rank, world, step))
        optimizer.step()
        oracle.step()
        for opt, m in ((optimizer, model), (oracle, plain)):
            opt.state[m.inp.weight]["exp_avg_sq"].mul_(3.0)
            opt.state[m.head.weight]["step"].fill_(7.0)
            opt.zero_grad()
        assert_params(model, plain, f"step {step}")
    # Dropping the state starts afresh, as in torch.
    optimizer.state.clear()
    oracle.state.clear()
    for step in range(2):
        backward(model, plain, Turn(rank, world, 10 + step))
        optimizer.step()
        oracle.step()
        assert_params(model, plain, f"cleared, step {step}")
        assert_moments((model, optimizer), (plain, oracle), f"cleared, step {step}")
        optimizer.zero_grad()
        oracle.zero_grad()


def test_edits_of_the_state_count() -> None:
    run_ranks(moments_can_be_edited, 3)


def launches(rank: int, world: int) -> None:
    """Many parameters cost no more launches and no more collectives than their buckets do."""
    model, _ = pair(torch.float32, param_dtype=BF16, reduce_dtype=torch.float32)
    optimizer = ShardedAdamW(model.named_parameters(), max_grad_norm=1.0)
    buckets = [bucket for unit in model.units for bucket in unit.buckets]
    assert len(buckets) == 3
    for step in range(3):
        mse(model, Turn(rank, world, step, BF16))
        calls: list[str] = []

        def counted(name: str, real: Any, calls: list[str] = calls) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return real(*args, **kwargs)

            return call

        comm = type(buckets[0].comm)
        with (
            mock.patch.object(ops, "adam", counted("adam", ops.adam)),
            mock.patch.object(ops, "norm", counted("norm", ops.norm)),
            mock.patch.object(ops, "adam_coefs", counted("coefs", ops.adam_coefs)),
            mock.patch.object(comm, "all_reduce", counted("all_reduce", comm.all_reduce)),
        ):
            optimizer.step()
        # Over shared memory reductions measure, once they know that somebody will ask.
        norms = 0 if step and isinstance(buckets[0].comm, SharedMemoryComm) else 3
        assert calls == ["norm"] * norms + ["all_reduce", "coefs"] + ["adam"] * 3
        optimizer.zero_grad()


def test_one_kernel_for_each_bucket_and_one_all_reduce() -> None:
    run_ranks(launches, 2)


def state_bytes(rank: int, world: int) -> None:
    for own, width in ((torch.float32, 8), (BF16, 12), (torch.float64, 16)):
        model, _ = pair(own)
        optimizer = sharded_adamw(model.parameters())
        train(model, optimizer, rank, world, range(1))
        held: dict[int, int] = {}
        for entry in optimizer.state.values():
            for value in entry.values():
                if isinstance(value, FlatShard) and value.fragment.numel:
                    storage = value.to_local().untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
        buckets = [bucket for unit in model.units for bucket in unit.buckets]
        numels = [b.layout.shard_numel for b in buckets if any(p.fragment.numel for p in b.params)]
        assert sum(held.values()) == width * sum(numels), own


def test_state_is_two_moments_and_a_master_for_each_element() -> None:
    run_ranks(state_bytes, 3)


# When it is built.


def built(when: str, rank: int, world: int) -> None:
    plain = small()
    model = small()
    optimizer: Any = None
    if when == "before":
        optimizer = ShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
        optimizer.zero_grad()
        with pytest.raises(
            RuntimeError, match=r"ShardedAdamW\.step: expected sharded .*Call fully_"
        ):
            optimizer.step()
    by_block(model)
    if when == "forward":
        with torch.no_grad():
            model(torch.zeros(2, 3, dtype=torch.float64))
        model(torch.zeros(2, 3, dtype=torch.float64)).sum().backward()
        model.zero_grad()
    if optimizer is None:
        optimizer = ShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
    oracle = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        backward(model, plain, Turn(rank, world, step))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        oracle.step()
        assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-9)
        assert_params(model, plain, f"built {when}, step {step}")
        optimizer.zero_grad()
        oracle.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("when", ["before", "after", "forward"])
def test_built_before_sharding_after_it_or_after_a_forward(when: str) -> None:
    run_ranks(partial(built, when), 2)


# Groups.


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split a model so that single buckets hold parameters of several groups."""
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    norms = [p for name, p in named.items() if name.endswith("norm.weight")]
    rest = [p for name, p in named.items() if not name.endswith(("bias", "norm.weight"))]
    return [
        {"params": rest},
        {"params": biases, "lr": 3e-2, "weight_decay": 0.0, "amsgrad": True},
        {"params": norms, "betas": (0.5, 0.7), "eps": 1e-3, "maximize": True},
    ]


def later_groups(rank: int, world: int) -> None:
    model, plain = pair()
    optimizer = ShardedAdam(groups(model)[:1], lr=1e-2)
    oracle = torch.optim.Adam(groups(plain)[:1], lr=1e-2)
    for step in range(6):
        if step in (2, 4):
            optimizer.add_param_group(groups(model)[step // 2])
            oracle.add_param_group(groups(plain)[step // 2])
        for opt in (optimizer, oracle):
            opt.param_groups[0]["lr"] = 1e-2 / (step + 1)
            opt.param_groups[-1]["amsgrad"] = step >= 4
        backward(model, plain, Turn(rank, world, step))
        if step == 5:
            model.head.weight.grad = plain.head.weight.grad = None
        optimizer.step()
        oracle.step()
        assert_params(model, plain, f"step {step}")
        assert_moments((model, optimizer), (plain, oracle), f"step {step}")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("world", [1, 3])
def test_groups_with_own_flags_that_come_later(world: int) -> None:
    run_ranks(check_all, world, Scenario(params=groups, fed=True))
    run_ranks(later_groups, world)


def two_optimizers(rank: int, world: int, own: torch.dtype, compute: torch.dtype | None) -> None:
    policy = {} if compute is None else {"param_dtype": compute, "reduce_dtype": torch.float32}
    model, plain = pair(own, **policy)
    halves = [(groups(m)[:1], groups(m)[1:]) for m in (model, plain)]
    optimizers = [ShardedAdamW(g, lr=1e-2, max_grad_norm=0.05) for g in halves[0]]
    plain = plain.float() if own != torch.float64 else plain
    oracles = [torch.optim.AdamW(g, lr=1e-2) for g in halves[1]]
    for step in range(4):
        mse(model, Turn(rank, world, step, own))
        for name, grad in full_grads(model).items():
            p = dict(plain.named_parameters())[name]
            p.grad = None if grad is None else grad.to(p.dtype)
        if step == 2:
            with torch.no_grad():
                model.inp.weight.mul_(2.0)
                plain.inp.weight.copy_(plain.inp.weight.to(own)).mul_(2.0)
        for number, (optimizer, oracle) in enumerate(zip(optimizers, oracles, strict=True)):
            own_params = [p for group in oracle.param_groups for p in group["params"]]
            norm = nn.utils.clip_grad_norm_(own_params, 0.05)
            optimizer.step()
            oracle.step()
            where = f"step {step}, optimizer {number}"
            assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-6), where
            want = dict(plain.named_parameters())
            for name, p in model.named_parameters():
                assert_close(full(p), want[name].detach().to(own), f"{where}, {name}", 2e-6)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("own", "compute"),
    [(torch.float64, None), (torch.float32, BF16), (BF16, None), (BF16, torch.float32)],
)
def test_two_optimizers_share_buckets(own: torch.dtype, compute: torch.dtype | None) -> None:
    run_ranks(two_optimizers, 2, own, compute)


def tensor_lr(rank: int, world: int) -> None:
    model, plain = pair()
    rates = [torch.tensor(1e-2, dtype=torch.float64) for _ in range(2)]
    optimizer, oracle = (
        sharded_adamw(model.parameters(), lr=rates[0]),
        torch.optim.AdamW(plain.parameters(), lr=rates[1], weight_decay=0.1, foreach=False),
    )
    for step in range(3):
        backward(model, plain, Turn(rank, world, step))
        for rate in rates:
            rate.mul_(0.5)
        optimizer.step()
        oracle.step()
        assert_params(model, plain, f"step {step}")
        optimizer.zero_grad(set_to_none=False)
        oracle.zero_grad(set_to_none=False)
        grads = full_grads(model)
        assert all(float(g.abs().sum()) == 0 for g in grads.values() if g is not None)
        assert grads["inp.weight"] is not None


def test_a_tensor_learning_rate_and_zeroed_gradients() -> None:
    run_ranks(tensor_lr, 2)


def schedules(rank: int, world: int) -> None:
    model, plain = pair()
    optimizer, oracle = sharded_adamw(model.parameters()), adamw(plain.parameters())
    cycles = [
        torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=6)
        for opt in (optimizer, oracle)
    ]
    for step in range(5):
        backward(model, plain, Turn(rank, world, step))
        optimizer.step()
        oracle.step()
        for cycle in cycles:
            cycle.step()
        assert_params(model, plain, f"step {step}")
        optimizer.zero_grad()
        oracle.zero_grad()
    assert optimizer.param_groups[0]["betas"] == oracle.param_groups[0]["betas"]


def test_a_scheduler_that_moves_lr_and_betas() -> None:
    run_ranks(schedules, 2)


# Clipping, GradScaler, closures.


def scaled(rank: int, world: int) -> None:
    model, plain = pair(torch.float32)
    optimizer = sharded_adamw(model.parameters(), max_grad_norm=0.01)
    oracle = adamw(plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(5):
        loss = model(Turn(rank, world, step, torch.float32).rand(4, 3)).square().mean()
        scaler.scale(loss).backward()
        bad = step == 2
        grads = full_grads(model)
        if bad and rank == world - 1:
            held = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
            next(part for part in held if part.numel())[-1] = float("inf")
        before = [p.to_local().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)
        if bad:
            for p, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(p.to_local(), old)
            assert float(optimizer.state[model.inp.weight]["step"]) == 2
        else:
            scale = 512.0 if step > 2 else 1024.0
            for name, p in plain.named_parameters():
                p.grad = None if grads[name] is None else grads[name] / scale
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            oracle.step()
            assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-5)
            assert_params(model, plain, f"step {step}", 2e-6)
        optimizer.zero_grad()


@pytest.mark.parametrize("world", [1, 3])
def test_grad_scaler_skips_on_every_rank(world: int) -> None:
    run_ranks(scaled, world)


def closure(rank: int, world: int) -> None:
    model, plain = pair()
    optimizer, oracle = sharded_adamw(model.parameters()), adamw(plain.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        return mse(model, Turn(rank, world, 0))

    for _ in range(2):
        with torch.no_grad():
            assert isinstance(optimizer.step(loss), torch.Tensor)
        for turn in turns(rank, world, 0, torch.float64):
            mse(plain, turn)
        oracle.step()
        oracle.zero_grad()
        assert_params(model, plain, "after a closure")


def test_closures_run_with_gradients() -> None:
    run_ranks(closure, 2)


def norms(rank: int, world: int) -> None:
    model, _ = pair()
    optimizer = sharded_adamw(model.parameters(), max_grad_norm=float("inf"))
    mse(model, Turn(rank, world, 0))
    grads = [g for g in full_grads(model).values() if g is not None]
    want = torch.stack([g.norm() for g in grads]).norm().item()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(want, rel=1e-12)
    # What has no gradient does not count, also when it had one a moment ago.
    model.inp.weight.grad = None
    optimizer.step()
    grads = [g for g in full_grads(model).values() if g is not None]
    want = torch.stack([g.norm() for g in grads]).norm().item()
    assert optimizer.grad_norm == pytest.approx(want, rel=1e-12)
    assert float(optimizer.state[model.inp.weight]["step"]) == 1
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm == 0.0


def test_grad_norm_without_clipping() -> None:
    run_ranks(norms, 3)


# Masters.


def masters(rank: int, world: int, compute: torch.dtype, keep: bool) -> None:
    model, plain = pair(BF16, param_dtype=compute, reduce_dtype=torch.float32)
    plain = plain.float()  # the oracle's parameters are the masters
    optimizer = sharded_adamw(model.parameters(), lr=1e-3, master_weights=keep)
    oracle = adamw(plain.parameters(), lr=1e-3)
    want = dict(plain.named_parameters())
    for step in range(6):
        mse(model, Turn(rank, world, step, compute))
        for name, grad in full_grads(model).items():
            want[name].grad = None if grad is None else grad.float()
        if step == 3:
            # Only what is really edited loses the bits below bf16.
            with torch.no_grad():
                model.inp.weight.clamp_(max=0.2)
                edited = full(model.inp.weight)
                same = plain.inp.weight.to(BF16) == edited
                assert same.any()
                assert not same.all()
                plain.inp.weight.copy_(torch.where(same, plain.inp.weight, edited.float()))
        optimizer.step()
        oracle.step()
        for name, p in model.named_parameters():
            entry = optimizer.state[p]
            assert ("master" in entry) == (keep and name != "head.gain")
            if keep and entry:
                assert entry["master"].dtype == torch.float32
                assert_close(full(entry["master"]), want[name].detach(), f"{step} {name}", 2e-6)
                assert torch.equal(full(p), want[name].detach().to(BF16)), f"step {step}, {name}"
            elif not keep:
                with torch.no_grad():
                    want[name].copy_(want[name].to(BF16))
                assert_close(full(p).float(), want[name].detach(), f"{step} {name}", 1e-2)
        if compute != BF16:
            with model.full_params():
                assert model.inp.weight.dtype in (BF16, compute)
        optimizer.zero_grad()


@pytest.mark.parametrize("compute", [BF16, torch.float32])
@pytest.mark.parametrize("keep", [True, False], ids=["masters", "no masters"])
def test_low_precision_parameters(compute: torch.dtype, keep: bool) -> None:
    run_ranks(masters, 2, compute, keep)


def published(rank: int, world: int, own: torch.dtype, compute: torch.dtype) -> None:
    model, _ = pair(own, param_dtype=compute, reduce_dtype=torch.float32)
    optimizer = sharded_adamw(model.parameters())
    for step in range(3):
        mse(model, Turn(rank, world, step, compute))
        with torch.no_grad():
            model.head.gain.fill_(float(step + 3))  # edited, but without a gradient
        optimizer.step()
        optimizer.zero_grad()
        model(Turn(rank, world, step, compute).rand(2, 3))  # gathers what was published
        for unit in model.units:
            for bucket in unit.buckets:
                assert torch.equal(bucket.shard_params, bucket.shard_master.to(compute)), step


@pytest.mark.parametrize(
    ("own", "compute"),
    [
        (torch.float32, torch.float32),
        (torch.float32, BF16),
        (torch.float32, torch.float16),
        (BF16, BF16),
        (BF16, torch.float32),
        (torch.float64, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_next_gather_sends_what_the_step_wrote(own: torch.dtype, compute: torch.dtype) -> None:
    run_ranks(published, 2, own, compute)


# State dicts.


def train(model: nn.Module, optimizer: Any, rank: int, world: int, steps: range) -> None:
    for step in steps:
        mse(model, Turn(rank, world, step, next(model.parameters()).dtype))
        optimizer.step()
        optimizer.zero_grad()


def bits(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return every local byte of model and optimizer."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.to_local().clone()
        for key, value in optimizer.state.get(p, {}).items():
            local = value.to_local() if isinstance(value, FlatShard) else value
            found[f"{name} {key}"] = local.clone()
    return found


def assert_same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def round_trip(rank: int, world: int, dtype: torch.dtype) -> None:
    make = partial(ShardedAdamW, lr=1e-2, amsgrad=True, max_grad_norm=1.0)
    model = by_block(small(dtype))
    optimizer = make(groups(model))
    train(model, optimizer, rank, world, range(3))
    saved = optimizer.state_dict()
    assert sorted(saved) == ["param_groups", "state"]
    assert {key for entry in saved["state"].values() for key in entry} - {"master"} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    }
    other = by_block(small(dtype))
    loaded = make(groups(other), lr=5.0)
    train(other, loaded, rank, world, range(7, 8))
    held = loaded.state[other.inp.weight]["exp_avg"].to_local()
    with torch.no_grad():
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    loaded.load_state_dict(saved)
    assert loaded.param_groups[0]["lr"] == 1e-2
    assert_same_bits(bits(other, loaded), bits(model, optimizer))
    assert held.data_ptr() == loaded.state[other.inp.weight]["exp_avg"].to_local().data_ptr()
    train(model, optimizer, rank, world, range(3, 5))
    train(other, loaded, rank, world, range(3, 5))
    assert_same_bits(bits(other, loaded), bits(model, optimizer))
    optimizer.load_state_dict(optimizer.state_dict())  # onto itself
    assert_same_bits(bits(model, optimizer), bits(other, loaded))
    optimizer.load_state_dict(ShardedAdamW(groups(other)).state_dict())  # of a new one
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_state_dict_round_trip(dtype: torch.dtype) -> None:
    run_ranks(round_trip, 2, dtype)


def from_torch(rank: int, world: int) -> None:
    model, plain = pair()
    oracle = adamw(groups(plain), amsgrad=True)
    optimizer = sharded_adamw(groups(model), lr=1.0, amsgrad=True)
    for step in range(5):
        if step == 2:
            optimizer.load_state_dict(oracle.state_dict())
            assert optimizer.param_groups[0]["lr"] == oracle.param_groups[0]["lr"]
            assert "foreach" not in optimizer.param_groups[0]
            with torch.no_grad():
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    ours.copy_(theirs)
        backward(model, plain, Turn(rank, world, step))
        if step >= 2:
            optimizer.step()
        oracle.step()
        if step >= 2:
            assert_params(model, plain, f"step {step}")
            assert_moments((model, optimizer), (plain, oracle), f"step {step}")
        model.zero_grad()
        plain.zero_grad()


def test_loads_the_state_of_torchs_own_adamw() -> None:
    run_ranks(from_torch, 3)


def load_hooks(rank: int, world: int) -> None:
    model, _ = pair()
    optimizer = sharded_adamw(model.parameters())
    train(model, optimizer, rank, world, range(2))
    calls: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda opt, sd: calls.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("post"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("step"))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, rank, world, range(2, 3))
    assert calls == ["pre", "post", "step"]


def test_hooks_are_called() -> None:
    run_ranks(load_hooks, 1)


def misfits(rank: int, world: int) -> None:
    model, plain = pair()
    optimizer, oracle = sharded_adamw(model.parameters()), adamw(plain.parameters())
    backward(model, plain, Turn(rank, world, 0))
    optimizer.step()
    oracle.step()
    before = bits(model, optimizer)
    saved = oracle.state_dict()

    def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        copy = {
            "state": {k: dict(v) for k, v in saved["state"].items()},
            "param_groups": [dict(g) for g in saved["param_groups"]],
        }
        change(copy)
        return copy

    cases: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda sd: sd["param_groups"].append(sd["param_groups"][0]), r"expected groups of \["),
        (lambda sd: sd["state"][3].pop("exp_avg"), r"state 3: expected .* got no exp_avg"),
        (
            lambda sd: sd["state"][1].update(exp_avg_sq=torch.zeros(2)),
            r"state 1, exp_avg_sq: expected a tensor of shape \(7,\), got shape \(2,\)",
        ),
        (lambda sd: sd["param_groups"][0].update(amsgrad=True), r"got no max_exp_avg_sq"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(broken(change))
        assert_same_bits(bits(model, optimizer), before)


def test_states_that_do_not_fit_change_nothing() -> None:
    run_ranks(misfits, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "expected lr of at least 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"expected betas to be two numbers in \[0, 1\)"),
        ({"eps": -1.0}, ValueError, "expected eps of at least 0"),
        ({"weight_decay": float("nan")}, ValueError, "expected weight_decay of at least 0"),
        ({"eps": -1.0}, ValueError, r"got -1\.0\. The default is 1e-8"),
        ({"lr": "1"}, TypeError, "expected lr to be a number, got '1'"),
        ({"lr": None}, TypeError, "expected lr to be a number, got None"),
        ({"weight_decay": "x"}, TypeError, "expected weight_decay to be a number, got 'x'"),
        ({"betas": 0.9}, TypeError, "expected betas to be two numbers, got 0.9"),
        ({"betas": ("a", 0.9)}, TypeError, "expected betas to be two numbers, got"),
        ({"max_grad_norm": "1"}, TypeError, "expected max_grad_norm above 0, got '1'"),
        ({"lr": torch.ones(2)}, ValueError, "expected lr to be a number or a tensor of one"),
        ({"max_grad_norm": 0.0}, ValueError, "expected max_grad_norm above 0, got 0.0"),
        ({"overlap_backward": True, "max_grad_norm": 1.0}, ValueError, "expected no clipping"),
        ({"overlap_backward": "x"}, TypeError, "overlap_backward to be True or False, got 'x'"),
        ({"master_weights": None}, TypeError, "master_weights to be True or False, got None"),
        ({"foreach": True}, TypeError, "foreach"),
        ({"fused": True}, TypeError, "fused"),
        ({"capturable": True}, TypeError, "capturable"),
    ],
)
def test_arguments_out_of_range(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    for make in (ShardedAdamW, ShardedAdam):
        with pytest.raises(error, match=message):
            make([nn.Parameter(torch.ones(3))], **options)
    if error is ValueError and "max_grad_norm" not in options:
        optimizer = ShardedAdamW([nn.Parameter(torch.ones(3))])
        with pytest.raises(error, match=message):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["max_grad_norm", "overlap_backward", "master_weights"])
def test_a_group_cannot_hold_what_only_the_optimizer_reads(name: str) -> None:
    group = {"params": [nn.Parameter(torch.ones(3))], name: 1.0}
    with pytest.raises(ValueError, match=f"expected {name} to be the optimizer's own argument"):
        ShardedAdamW([group])


def test_torchs_defaults() -> None:
    p = nn.Parameter(torch.ones(3))
    for ours, theirs in ((ShardedAdamW, torch.optim.AdamW), (ShardedAdam, torch.optim.Adam)):
        want = theirs([p]).defaults
        assert all(want[key] == value for key, value in ours([p]).defaults.items())
