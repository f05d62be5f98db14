# SPDX-License-Identifier: Apache-2.0
"""The examples that sharded data parallelism is taught with, as they stand in tutorials."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import run_ranks
from models import storage_bytes
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp_kernels import ProcessGroupComm, ShardedAdamW, fully_shard


def gather_letters(rank: int, world: int) -> list[float]:
    comm = ProcessGroupComm()
    a, b, c, d = 1.0, 2.0, 3.0, 4.0
    shard = torch.tensor([a, b] if rank == 0 else [c, d])
    full = torch.full((4,), float("nan"))
    comm.all_gather(full, shard, label="example").wait()
    return full.tolist()


def test_all_gather_of_ab_and_cd_gives_abcd_on_both_ranks() -> None:
    assert run_ranks(gather_letters, 2) == [[1.0, 2.0, 3.0, 4.0]] * 2


def reduce_letters(rank: int, world: int) -> list[float]:
    comm = ProcessGroupComm()
    full = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (1 if rank == 0 else 100)
    shard = torch.full((2,), float("nan"))
    comm.reduce_scatter(shard, full, label="example").wait()
    return shard.tolist()


def test_reduce_scatter_sums_slices() -> None:
    assert run_ranks(reduce_letters, 2) == [[101.0, 202.0], [303.0, 404.0]]


def rows_of_linear(rank: int, world: int) -> None:
    layer = nn.Linear(4096, 4096, bias=False, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(torch.arange(4096.0)[:, None].expand(-1, 4096))
    fully_shard(layer, sync_module_states=False)
    local = layer.weight.to_local().view(1024, 4096)
    assert layer.weight.shape == (4096, 4096)
    assert local[:, 0].tolist() == [float(row) for row in range(1024 * rank, 1024 * (rank + 1))]
    assert (local == local[:, :1]).all()


def test_linear_4096_over_four_ranks_puts_1024_rows_on_each() -> None:
    run_ranks(rows_of_linear, 4)


def steady_bytes(rank: int, world: int) -> None:
    """16 bytes a parameter of fp32 training, divided by the world: P/N + G/N + Adam/N."""
    numel = 64 * 48 * 3  # three layers without biases: no padding, so the arithmetic is exact
    layers = [nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False)]
    model = nn.Sequential(*layers, nn.Linear(64, 48, bias=False))
    fully_shard(model, units=nn.Linear)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    params = list(model.parameters())
    p, g, adam = 4 * numel, 4 * numel, 8 * numel
    assert storage_bytes([q.to_local() for q in params]) == p // world
    assert storage_bytes([q.grad.to_local() for q in params]) == g // world
    moments = [
        optimizer.state[q][key].to_local() for q in params for key in ("exp_avg", "exp_avg_sq")
    ]
    assert storage_bytes(moments) == adam // world


def test_steady_bytes_are_everything_divided_by_the_world() -> None:
    for world in (1, 2, 4):
        run_ranks(steady_bytes, world)


def disjoint_data(rank: int, world: int) -> list[int]:
    data = TensorDataset(torch.arange(20))
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    return [int(x) for (batch,) in loader for x in batch]


def test_ranks_see_disjoint_parts_of_the_data() -> None:
    seen = run_ranks(disjoint_data, 2)
    assert not set(seen[0]) & set(seen[1])
    assert sorted(seen[0] + seen[1]) == list(range(20))


def mean_gradient(rank: int, world: int) -> None:
    """Two ranks with gradients 1 and 3 step with 2."""
    layer = fully_shard(nn.Linear(1, 1, bias=False))
    layer(torch.tensor([[1.0 + 2.0 * rank]])).sum().backward()
    assert layer.weight.grad.full_tensor().item() == 2.0
    before = layer.weight.full_tensor()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert torch.equal(layer.weight.full_tensor(), before - 2.0)
    assert dist.get_world_size() == 2


def test_gradients_are_averaged() -> None:
    run_ranks(mean_gradient, 2)
