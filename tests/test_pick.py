# SPDX-License-Identifier: Apache-2.0
"""What `comm=` means: names, what None picks and why, and how that is shown."""

from __future__ import annotations

import logging
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Net, build

from fsdp_kernels import ProcessGroupComm, _ext, _nvml, environment, fully_shard
from fsdp_kernels.comm import _arena, pick


class FakeNccl(ModuleType):
    """Answers what picking asks for."""

    def __init__(self, version: int = 23007) -> None:
        super().__init__("_nccl")
        self.version = version

    def runtime_version(self) -> int:
        return self.version


def loads(monkeypatch: pytest.MonkeyPatch, module: ModuleType | str) -> None:
    monkeypatch.setattr(_ext, "load", lambda name: module)


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        (FakeNccl(), "nccl", "built, and NCCL 2.30.7 is loaded"),
        (FakeNccl(22703), "nccl", "built, and NCCL 2.27.3 is loaded"),
        (FakeNccl(23100), "nccl", "built, and NCCL 2.31.0 is loaded"),
        (
            FakeNccl(22602),
            "process_group",
            "NCCL 2.26.2 is loaded, too old: 2.27 or later is needed",
        ),
        (_ext.NOT_BUILT, "process_group", "the NCCL module is not built"),
        (
            "built, but does not load: libnccl.so.2",
            "process_group",
            "the NCCL module is built, but does not load: libnccl.so.2",
        ),
    ],
)
def test_none_on_cuda(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | str, name: str, reason: str
) -> None:
    loads(monkeypatch, module)
    assert pick.choose("cuda") == (name, reason, name != "nccl")


def test_an_nccl_without_the_functions_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old(name: str) -> None:
        raise ImportError("_nccl.so: undefined symbol: ncclCommWindowRegister")

    monkeypatch.setattr(_ext.importlib, "import_module", too_old)
    _ext.load.cache_clear()
    try:
        name, reason, lacking = pick.choose("cuda")
    finally:
        _ext.load.cache_clear()
    assert (name, lacking) == ("process_group", True)
    assert "does not load: NCCL 2.27 or later is needed: _nccl.so: undefined" in reason


def test_the_oldest_nccl_is_that_of_the_module() -> None:
    pytest.importorskip("ninja", reason="the build tools are not installed")
    root = Path(__file__).parents[1]
    options = (root / "csrc" / "nccl" / "options.cpp").read_text()
    (oldest,) = re.findall(r"kOldest = (\d+)", options)
    assert int(oldest) == pick._OLDEST_NCCL
    major, minor = runpy.run_path(str(root / "setup.py"))["OLDEST_NCCL"]
    assert major * 10000 + minor * 100 == pick._OLDEST_NCCL


def test_without_gloo_the_hosts_cannot_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, FakeNccl())
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    name, reason, lacking = pick.choose("cuda")
    assert (name, lacking) == ("process_group", True)
    assert "gloo" in reason


def test_none_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, ModuleType("_cpu"))
    assert pick.choose("cpu") == ("shared_memory", "built, for ranks of one host", False)
    assert pick.choose("cpu", 1) == ("process_group", "one rank has nothing to share", False)
    loads(monkeypatch, _ext.NOT_BUILT)
    assert pick.choose("cpu") == ("process_group", "the C++ module is not built", True)


def test_none_elsewhere_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ext, "load", lambda name: pytest.fail(f"loaded {name}"))
    assert pick.choose("xpu") == ("process_group", "the only backend for tensors on xpu", False)


@pytest.mark.parametrize(
    ("version", "text"),
    [(22602, "too old"), (22700, "in the tested range"), (23099, "in the"), (23100, "newer than")],
)
def test_the_range_of_nccl(version: int, text: str) -> None:
    assert pick.nccl_range(version).startswith(text)


def test_the_environment_says_what_none_would_pick_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, _ext.NOT_BUILT)
    assert environment()["comm_if_none"] == {
        "cuda": "process_group (the NCCL module is not built)",
        "cpu": "process_group (the C++ module is not built)",
    }


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def _names(rank: int, world: int) -> list[tuple[str, str]]:
    log = Log()
    logger = logging.getLogger("fsdp_kernels")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    for comm in (None, "process_group", ProcessGroupComm(), "shared_memory"):
        model = fully_shard(build(Net), comm=comm)
        shares = comm is None or comm == "shared_memory"
        assert environment()["comm"] == ("shared_memory" if shares else "process_group")
        model(torch.ones(2, 3)).sum().backward()
    names = "'process_group', 'shared_memory', 'nccl', 'peer'"
    text = (
        rf"^fully_shard\(Net\): expected comm to be None, {names} or a Comm, got 'carrier pigeon'"
    )
    with pytest.raises(ValueError, match=text):
        fully_shard(build(Net), comm="carrier pigeon")
    if _ext.nccl() is not None:
        with pytest.raises(ValueError, match=r"^NcclComm: expected a CUDA device, got cpu\."):
            fully_shard(build(Net), comm="nccl")
    loaded, _ext.load = _ext.load, lambda name: _ext.NOT_BUILT  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"^NcclComm: expected the NCCL module, got an install"):
        fully_shard(build(Net), comm="nccl")
    _ext.load = loaded
    return log.lines


def test_names_are_taken_and_rank_0_says_which() -> None:
    first, second = run_ranks(_names, 2)
    over = "over 2 ranks on cpu"
    assert first == [
        ("INFO", f"fully_shard(Net): shared_memory {over} (built, for ranks of one host)"),
        ("INFO", f"fully_shard(Net): process_group {over} (as asked for)"),
        ("INFO", f"fully_shard(Net): shared_memory {over} (as asked for)"),
    ]
    assert second == []


def _apart(rank: int, world: int) -> list[tuple[str, str]]:
    """Ranks on two hosts, and units sharded one by one."""
    log = Log()
    logger = logging.getLogger("fsdp_kernels")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    real = _arena.identity
    _arena.identity = lambda module: replace(real(module), host=(f"host {rank}",))
    model: Any = build(Net)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert environment()["comm"] == "process_group"
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="ranks 0 and 1 are on different hosts"):
        fully_shard(build(Net), comm="shared_memory")
    return log.lines


def test_ranks_on_several_hosts_take_the_process_group_and_say_why_once() -> None:
    first, second = run_ranks(_apart, 2)
    assert [level for level, _ in first] == ["WARNING", "INFO", "INFO", "INFO"]
    assert first[0][1] == (
        "fully_shard(Block): process_group over 2 ranks on cpu (no shared memory: ranks 0 and 1 "
        "are on different hosts, or in different containers)"
    )
    assert second == []


def _too_little(rank: int, world: int) -> list[tuple[str, str]]:
    log = Log()
    logging.getLogger("fsdp_kernels").addHandler(log)
    real = _arena.Arena.reserve

    def reserve(self: Any, nbytes: int, *, spare_nbytes: int = 0) -> None:
        real(self, nbytes, spare_nbytes=1 << 60)

    _arena.Arena.reserve = reserve  # type: ignore[method-assign]
    model = fully_shard(build(Net))
    assert environment()["comm"] == "process_group"
    model(torch.ones(2, 3)).sum().backward()
    return log.lines


def test_too_little_shared_memory_says_how_much_is_needed_and_there() -> None:
    ((level, text),), second = run_ranks(_too_little, 2)
    assert level == "WARNING"
    assert "process_group over 2 ranks on cpu (no shared memory: shared memory: expected" in text
    assert " MiB free in /dev/shm, got " in text
    assert second == []


def _lacking(rank: int, world: int) -> list[tuple[str, str]]:
    log = Log()
    logging.getLogger("fsdp_kernels").addHandler(log)
    pick.choose = lambda kind, world: pick.Choice("process_group", "for a test", True)  # type: ignore
    fully_shard(build(Net))
    return log.lines


def test_a_slower_backend_than_there_could_be_is_a_warning() -> None:
    ((level, text),) = run_ranks(_lacking, 1)[0]
    assert (level, text.endswith("(for a test)")) == ("WARNING", True)


# -- GPUs and the links between them --------------------------------------------------------------


class NVMLError(Exception):
    pass


def fake_nvml(links: dict[int, list[int | None]], peers: set[tuple[int, int]]) -> Any:
    """Two GPUs; `links` has the kind of the other end of each link, None where it is down."""

    def state(gpu: int, link: int) -> bool:
        if link >= len(links[gpu]):
            raise NVMLError("not supported")
        return links[gpu][link] is not None

    def remote(gpu: int, link: int) -> int | None:
        if links[gpu][link] == -1:
            raise NVMLError("not permitted")
        return links[gpu][link]

    def status(a: int, b: int, index: int) -> int:
        assert index == "nvlink"
        return 0 if (a, b) in peers else 3

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_P2P_CAPS_INDEX_NVLINK="nvlink",
        NVML_P2P_STATUS_OK=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(links),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda gpu: f"GPU {gpu}",
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=80 << 30),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: (9, 0),
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=remote,
        nvmlDeviceGetP2PStatus=status,
    )


def test_links_and_peers_come_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml({0: [2, 2, None, 0], 1: [2, -1], 2: []}, {(0, 1), (1, 0)})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = environment()["gpus"]
    assert found[0] == {
        "name": "GPU 0",
        "memory_bytes": 80 << 30,
        "compute_capability": "9.0",
        "driver": "580.1",
        "nvlinks": {"to_switch": 2, "to_gpu": 1},
        "nvlink_peers": [1],
    }
    assert (found[1]["nvlinks"], found[1]["nvlink_peers"]) == (
        {"to_switch": 1, "to_unknown": 1},
        [0],
    )
    assert (found[2]["nvlinks"], found[2]["nvlink_peers"]) == ({}, [])


def test_without_nvml_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml({}, set())

    def fails() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    nvml.nvmlInit = fails
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert _nvml.gpus() == "none: NVML Shared Library Not Found"
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = fails
    assert _nvml.gpus() == "unknown: NVML Shared Library Not Found"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _nvml.gpus() == "unknown: the package nvidia-ml-py is not installed"
