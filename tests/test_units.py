# SPDX-License-Identifier: Apache-2.0
"""Which modules become units, how nested calls compose, and what a unit's state may do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    Block,
    Net,
    Scenario,
    Turn,
    assert_close,
    build,
    by_block,
    check_all,
    mse,
    sharded_adamw,
    states,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_kernels import ShardedModule, full_state_dict, fully_shard


def names(model: nn.Module) -> list[str]:
    return sorted(unit.name for unit in model.units)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
BY: dict[str, tuple[Any, list[str]]] = {
    "none": (None, [""]),
    "class": (Block, ["", *BLOCKS]),
    "tuple": ((Block, nn.Embedding), ["", *BLOCKS]),
    "predicate": (lambda m: isinstance(m, nn.Linear) and m.bias is None, ["", "head"]),
    # A block has 7+7 + 7*13+13 + 13*7+7 = 216 parameters, its layers fewer than 105.
    "count": (150, ["", *BLOCKS]),
    "nested": (
        (Block, nn.Linear),
        ["", *BLOCKS, "head", "inp"] + [f"{b}.{layer}" for b in BLOCKS for layer in ("down", "up")],
    ),
}


def chosen(rank: int, world: int) -> None:
    for how, (units, expected) in BY.items():
        model = fully_shard(build(Net), units=units)
        assert names(model) == sorted(expected), f"{how}: {names(model)}"
        assert states(model) == {"SHARDED"}
        assert isinstance(model, ShardedModule)
        assert isinstance(model, Net)
        assert type(model).__name__ == "FSDPNet"


def test_units_by_class_tuple_predicate_and_count() -> None:
    run_ranks(chosen, 2)


def bottom_up(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def one_by_one(model: nn.Module) -> nn.Module:
    """Nest three levels, with the inner calls first, and an odd one by predicate."""
    fully_shard(model.blocks[0].up)
    fully_shard(model.blocks[0])
    fully_shard(model.blocks, units=Block)
    return fully_shard(model, units=lambda m: m is model.head)


@pytest.mark.parametrize("world", [2, 3])
def test_nested_units_train_alike(world: int) -> None:
    ways = [*(partial(fully_shard, units=units) for units, _ in BY.values()), bottom_up, one_by_one]
    run_ranks(check_all, world, *(Scenario(shard=way, steps=3) for way in ways))


def refusals(rank: int, world: int) -> None:
    model = by_block(build(Net))
    with pytest.raises((ValueError, RuntimeError), match="not sharded yet"):
        fully_shard(model)
    with pytest.raises((ValueError, RuntimeError), match="not sharded yet"):
        fully_shard(model.blocks[0])
    with pytest.raises((TypeError, ValueError), match="units"):
        fully_shard(build(Net), units="Block")
    for strategy in ("zero4", ["zero3"]):
        with pytest.raises(ValueError, match="strategy"):
            fully_shard(build(Net), strategy=strategy)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected mesh to be a DeviceMesh, got int"):
        fully_shard(build(Net), mesh=3)  # type: ignore[arg-type]
    dtypes: dict[str, Any] = {"param_dtype": "bf16", "reduce_dtype": torch.int8, "output_dtype": 3}
    for name, wrong in dtypes.items():
        with pytest.raises(ValueError, match=f"expected {name} to be None, torch.float64"):
            fully_shard(build(Net), mp_policy=MixedPrecisionPolicy(**{name: wrong}))
    for prefetch in (-1, True):
        with pytest.raises(ValueError, match="prefetch"):
            fully_shard(build(Net), prefetch=prefetch)
    with pytest.raises(TypeError, match="sync_module_states to be True or False, got 'no'"):
        fully_shard(build(Net), sync_module_states="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"full_state_dict: expected a model .*, got int"):
        full_state_dict(3)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="comm"):
        fully_shard(build(Net), comm="carrier pigeon")
    with pytest.raises(TypeError, match=r"nn\.Module"):
        fully_shard(torch.ones(3))
    with pytest.raises(ValueError, match="units"):
        fully_shard(build(Net), units=nn.LSTM)  # nothing matches: surely a mistake


def test_mistakes_are_refused_by_name() -> None:
    run_ranks(refusals, 2)


class Watched(Block):
    """Records the states that the root's units have while this block computes."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.seen: list[str] = []
        self.root: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.root:
            mine = {unit.name: unit.state for unit in self.root[0].units}
            self.seen.append(" ".join(mine[name] for name in BLOCKS))
        return super().forward(x)


def watched(rank: int, world: int) -> None:
    model = build(partial(Net, block=Watched), torch.float64)
    fully_shard(model, units=Watched, prefetch=0)
    for block in model.blocks:
        block.root.append(model)
    mse(model, Turn(rank, world, 0))
    seen = [block.seen for block in model.blocks]
    assert seen == [["FULL SHARDED SHARDED"], ["SHARDED FULL SHARDED"], ["SHARDED SHARDED FULL"]]
    assert states(model) == {"SHARDED"}


def test_only_the_computing_unit_is_full() -> None:
    run_ranks(watched, 2)


def by_hand(rank: int, world: int) -> None:
    """`unshard` and `reshard` by hand change no number, and a unit is never freed in use."""
    model = by_block(build(Net, torch.float64))
    x = torch.ones(2, 3, dtype=torch.float64)
    want = build(Net, torch.float64)(x)
    model.unshard()
    model.blocks[1].unshard()
    assert_close(model(x), want, "after unshard()")
    model.reshard()
    model.blocks[1].reshard()
    assert states(model) == {"SHARDED"}
    optimizer = sharded_adamw(model.parameters())
    mse(model, Turn(rank, world, 0))
    optimizer.step()
    optimizer.zero_grad()
    model.unshard()
    model.reshard()
    assert not torch.equal(model(x), want)


def test_unshard_and_reshard_by_hand() -> None:
    run_ranks(by_hand, 2)
