# SPDX-License-Identifier: Apache-2.0
"""Freezes the public names and signatures: a change here is a change for every user."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import fsdp_kernels

NAMES = {
    "CPUOffloadPolicy",
    "Comm",
    "MixedPrecisionPolicy",
    "NcclComm",
    "OffloadPolicy",
    "ProcessGroupComm",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedModule",
    "SharedMemoryComm",
    "__version__",
    "checkpoint",
    "environment",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "record_schedule",
}

FULLY_SHARD = [
    ("module", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
    ("units", "KEYWORD_ONLY", None),
    ("mesh", "KEYWORD_ONLY", None),
    ("strategy", "KEYWORD_ONLY", "zero3"),
    ("mp_policy", "KEYWORD_ONLY", ...),
    ("offload_policy", "KEYWORD_ONLY", ...),
    ("comm", "KEYWORD_ONLY", None),
    ("prefetch", "KEYWORD_ONLY", 1),
    ("sync_module_states", "KEYWORD_ONLY", True),
]

ADAM = [
    ("params", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
    ("lr", "POSITIONAL_OR_KEYWORD", 1e-3),
    ("betas", "POSITIONAL_OR_KEYWORD", (0.9, 0.999)),
    ("eps", "POSITIONAL_OR_KEYWORD", 1e-8),
    ("weight_decay", "POSITIONAL_OR_KEYWORD", 0),
    ("amsgrad", "POSITIONAL_OR_KEYWORD", False),
    ("maximize", "KEYWORD_ONLY", False),
    ("max_grad_norm", "KEYWORD_ONLY", None),
    ("overlap_backward", "KEYWORD_ONLY", False),
    ("master_weights", "KEYWORD_ONLY", True),
]
ADAMW = [(n, k, 1e-2 if n == "weight_decay" else d) for n, k, d in ADAM]


def signature(function: object) -> list[tuple[str, str, object]]:
    """List (name, kind, default); an Ellipsis stands for a default that is an object."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    simple = (type(None), bool, int, float, str, tuple, type)
    return [
        (p.name, p.kind.name, p.default if isinstance(p.default, simple) else ...)
        for p in parameters
        if p.name != "self"
    ]


def test_names() -> None:
    assert set(fsdp_kernels.__all__) == NAMES
    for name in NAMES:
        assert getattr(fsdp_kernels, name) is not None


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("fully_shard", FULLY_SHARD),
        ("ShardedAdamW", ADAMW),
        ("ShardedAdam", ADAM),
        (
            "full_state_dict",
            [
                ("model", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
                ("rank0_only", "KEYWORD_ONLY", True),
            ],
        ),
        ("record_schedule", []),
        ("environment", []),
    ],
)
def test_signatures(function: str, expected: list[tuple[str, str, object]]) -> None:
    assert signature(getattr(fsdp_kernels, function)) == expected


METHODS = {
    "no_sync": [],
    "set_requires_gradient_sync": ["requires_gradient_sync"],
    "unshard": [],
    "reshard": [],
    "full_params": [],
    "clip_grad_norm_": ["max_norm", "norm_type"],
    "zero_grad": ["set_to_none"],
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_a_sharded_module(method: str) -> None:
    function = getattr(fsdp_kernels.ShardedModule, method)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    assert names == METHODS[method]


def test_units_is_read_only() -> None:
    with pytest.raises(AttributeError):
        fsdp_kernels.ShardedModule.__new__(fsdp_kernels.ShardedModule).units = []


def test_policies_are_torchs_own() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    assert fsdp_kernels.MixedPrecisionPolicy is MixedPrecisionPolicy
    assert fsdp_kernels.CPUOffloadPolicy is CPUOffloadPolicy
    assert fsdp_kernels.OffloadPolicy is OffloadPolicy


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises((RuntimeError, ValueError), match="init_process_group"):
        fsdp_kernels.fully_shard(nn.Linear(2, 2))


def test_versions_agree() -> None:
    from fsdp_kernels._version import __version__

    assert fsdp_kernels.__version__ == __version__
    assert torch.__version__
