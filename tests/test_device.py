# SPDX-License-Identifier: Apache-2.0
"""Training on one CUDA device: streams, Triton kernels and NCCL's process group, world 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_kernels import MixedPrecisionPolicy, ShardedAdamW, fully_shard


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(129, 129), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(129, 7)).cuda()


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True])
def test_training_on_a_device_equals_plain_training(nccl: None, low: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low else MixedPrecisionPolicy()
    model, plain = _model(), _model()
    fully_shard(model, units=nn.Linear, mp_policy=policy)
    ours = ShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    tolerance = 5e-2 if low else 1e-5
    for step in range(5):
        draw = torch.Generator(device="cuda").manual_seed(step)
        x = torch.randn(32, 129, device="cuda", generator=draw)
        loss = model(x).float().square().mean()
        expected = plain(x).square().mean()
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        loss.backward()
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert {unit.state for unit in model.units} == {"SHARDED"}
