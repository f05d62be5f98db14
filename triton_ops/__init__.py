# SPDX-License-Identifier: Apache-2.0
"""Kernels of the sharded optimizer step: pack, norm and Adam over flat shards.

``triton_ops.reference`` is the same maths in plain PyTorch. The modules ``pack``, ``norm`` and
``adam`` hold the Triton kernels. They alone import triton: this package imports without it.
Nothing here imports ``fsdp_kernels``.
"""

from triton_ops._common import (
    ACTIVE,
    BETA1,
    BETA2,
    BIAS_CORRECTION2_SQRT,
    COEF_COLUMNS,
    DECAY,
    EPS,
    HYPER_COLUMNS,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    STEP_SIZE,
    AdamShard,
)
from triton_ops._fragments import FragmentTable

__all__ = [
    "ACTIVE",
    "BETA1",
    "BETA2",
    "BIAS_CORRECTION2_SQRT",
    "COEF_COLUMNS",
    "DECAY",
    "EPS",
    "HYPER_COLUMNS",
    "ONE_MINUS_BETA1",
    "ONE_MINUS_BETA2",
    "STEP_SIZE",
    "AdamShard",
    "FragmentTable",
]
