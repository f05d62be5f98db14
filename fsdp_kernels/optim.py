# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW over sharded parameters; `_sharded_adam.py` tells the algorithm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdp_kernels._sharded_adam import Params, ShardedAdamBase

Betas = tuple[float | Tensor, float | Tensor]


class ShardedAdamW(ShardedAdamBase):
    """AdamW over sharded parameters, with clipping and casts in the same kernel.

    Built before or after `fully_shard`. Takes the place of `torch.optim.AdamW` with the same
    arguments, parameter groups, schedulers and `GradScaler`.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, a number or a tensor.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the running maximum of the second moment.
        maximize: Ascend.
        max_grad_norm: Clip the global norm of this optimizer's gradients to it, inside the step.
        overlap_backward: Not available yet.
        master_weights: Keep an fp32 copy of bf16 and fp16 parameters. Without it every step rounds
            the update to the parameter's precision.

    Raises:
        ValueError: On a hyper-parameter out of range.
        NotImplementedError: For `overlap_backward=True`.

    Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019).
    """

    _decoupled = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        overlap_backward: bool = False,
        master_weights: bool = True,
    ) -> None:
        super().__init__(
            params,
            _defaults(lr, betas, eps, weight_decay, amsgrad=amsgrad, maximize=maximize),
            max_grad_norm=max_grad_norm,
            overlap_backward=overlap_backward,
            master_weights=master_weights,
        )


class ShardedAdam(ShardedAdamBase):
    """Adam over sharded parameters: `ShardedAdamW` with weight decay added to the gradient.

    Args and errors as `ShardedAdamW`; `weight_decay` is an L2 penalty and 0 by default.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization (2015).
    """

    _decoupled = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        overlap_backward: bool = False,
        master_weights: bool = True,
    ) -> None:
        super().__init__(
            params,
            _defaults(lr, betas, eps, weight_decay, amsgrad=amsgrad, maximize=maximize),
            max_grad_norm=max_grad_norm,
            overlap_backward=overlap_backward,
            master_weights=master_weights,
        )


def _defaults(
    lr: float | Tensor,
    betas: Betas,
    eps: float,
    weight_decay: float,
    *,
    amsgrad: bool,
    maximize: bool,
) -> dict[str, Any]:
    return {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
