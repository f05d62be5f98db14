# SPDX-License-Identifier: Apache-2.0
"""Conversions between a kernel's storage dtypes and the dtype that it computes in.

Triton's interpreter truncates float32 to bfloat16 and loses bfloat16 subnormals, where a device
rounds to nearest even. These helpers spell both conversions in integers there, so that the
interpreter gives the device's bits.
"""
# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl

from triton_ops._common import interpreted

TL_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def widen(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Convert ``x`` exactly to the compute dtype (float32 or float64)."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def narrow(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round ``x`` once, to nearest even, to a storage dtype."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet_nan).to(tl.uint16).to(dtype, bitcast=True)
    else:
        return x.to(dtype)
