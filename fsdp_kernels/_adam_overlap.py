# SPDX-License-Identifier: Apache-2.0
"""What an optimizer that steps in backward refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def check_overlap(optimizer: Any, where: str, closure: Callable[[], Any] | None = None) -> None:
    """Refuse what needs all gradients before the first of them is stepped with.

    Raises:
        ValueError: Clipping, or a closure.
        RuntimeError: A `GradScaler`.
    """
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            f"{where}: expected no clipping with overlap_backward=True, got max_grad_norm="
            f"{optimizer.max_grad_norm}: the norm is known after the last gradient only. Pass "
            "max_grad_norm=None or overlap_backward=False."
        )
    if closure is not None:
        raise ValueError(
            f"{where}: expected no closure with overlap_backward=True, got one: its backward would "
            "step. Pass overlap_backward=False."
        )
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise RuntimeError(
            f"{where}: expected no GradScaler with overlap_backward=True, got one: backward has "
            "stepped with scaled gradients, which are not checked. Start again with "
            "overlap_backward=False, or train in bfloat16."
        )
