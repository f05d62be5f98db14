# SPDX-License-Identifier: Apache-2.0
"""Training on one CUDA device by each backend, world 1; real streams; what importing leaves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_kernels import MixedPrecisionPolicy, ShardedAdamW, _ext, environment, fully_shard
from fsdp_kernels.streams import CudaStreams

SLEEP_CYCLES = 20_000_000  # about ten milliseconds


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
@pytest.mark.parametrize("comm", [None, "nccl", "process_group"])
def test_training_on_a_device_equals_plain_training(
    nccl: None, comm: str | None, low: bool
) -> None:
    module = _ext.load("_nccl")
    if comm == "nccl" and isinstance(module, str):
        pytest.skip(f"fsdp_kernels._nccl is {module}")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low else MixedPrecisionPolicy()
    model, plain = _model(), _model()
    fully_shard(model, units=nn.Linear, mp_policy=policy, comm=comm)
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
    built = not isinstance(module, str)
    assert environment()["comm"] == (comm or ("nccl" if built else "process_group"))


@pytest.mark.gpu
@pytest.mark.parametrize("role", ["compute", "gather", "reduce"])
def test_a_role_waits_for_another_stream(role: Literal["compute", "gather", "reduce"]) -> None:
    """What the other stream has written by then is there, however late it was."""
    gather, reduce, first, second = (torch.cuda.Stream() for _ in range(4))
    streams = CudaStreams(gather, reduce)
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.fill_(1)
        written = streams.here()
    with torch.cuda.stream(second):
        streams.wait(role, written)
    with torch.cuda.stream({"compute": second, "gather": gather, "reduce": reduce}[role]):
        seen = x.clone()
    torch.cuda.synchronize()
    assert seen.sum().item() == 1 << 20


@pytest.mark.gpu
def test_memory_is_let_go_on_its_own_stream_after_another_ones_use() -> None:
    streams, home, other = CudaStreams(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(home):
        place = streams.here()
        x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(SLEEP_CYCLES)
        seen = x.clone()
        streams.wait_at(place, streams.here())
    with torch.cuda.stream(home):
        x.zero_()  # what the next owner of the memory would do
    torch.cuda.synchronize()
    assert seen.sum().item() == 1 << 20


IMPORTING = """
import ctypes, os, sys
import torch
import torch.distributed
before = len(os.listdir("/proc/self/task"))
import fsdp_kernels
from fsdp_kernels import _ext
for name in ("_cpu", "_cuda", "_nccl"):
    _ext.load(name)
fsdp_kernels.environment()
assert not torch.cuda.is_initialized()
assert len(os.listdir("/proc/self/task")) == before, "importing started a thread"
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit()
assert driver.cuInit(0) in (0, 100), "the driver does not start"
flags, active, count = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
driver.cuDeviceGetCount(ctypes.byref(count))
for device in range(count.value):
    driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    assert not active.value, f"importing made a context on device {device}"
print("devices:", count.value)
"""


def importing() -> str:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_starts_no_thread_and_prints_nothing() -> None:
    assert importing().removeprefix("devices:").strip() in ("", *map(str, range(99)))


@pytest.mark.gpu
def test_importing_makes_no_context() -> None:
    assert importing() == f"devices: {torch.cuda.device_count()}\n"
