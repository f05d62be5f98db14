# SPDX-License-Identifier: Apache-2.0
"""What `adam.py` and `reduce_adam.py` share: AdamW's settings, for our kernels and for torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_kernels import ops
from triton_ops import COEF_COLUMNS

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
MOMENTS = 2 * 2 * 4  # bytes an element: both moments read and written
STATE = MOMENTS + 2 * 4  # and the master


class Coefficients:
    """Those of one parameter, which the kernels read: its step count moves on at every call."""

    def __init__(self, device: torch.device) -> None:
        hyper = [[LR, *BETAS, EPS, WEIGHT_DECAY]]
        self.hyper = torch.tensor(hyper, dtype=torch.float64, device=device)
        self.step = torch.zeros(1, device=device)
        self.used = torch.ones(1, dtype=torch.bool, device=device)
        self.coefs = torch.empty(1, COEF_COLUMNS, dtype=torch.float64, device=device)

    def __call__(self) -> Tensor:
        ops.adam_coefs(self.hyper, self.step, self.used, None, self.coefs, decoupled=True)
        return self.coefs


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return what gradients of that norm are multiplied by, as torch's `clip_grad_norm_` does."""
    return (limit / (norm + 1e-6)).clamp_max(1.0)


def adamw(master: Tensor, **form: bool) -> torch.optim.AdamW:
    """Make torch's AdamW over one tensor, in one of its forms."""
    return torch.optim.AdamW(
        [master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **form
    )
