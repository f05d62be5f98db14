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
        overlap_backward: Step each unit in backward, as soon as its gradients are complete on all
            ranks and its weights are no longer wanted; see below.
        master_weights: Keep an fp32 copy of bf16 and fp16 parameters. Without it every step rounds
            the update to the parameter's precision.

    Raises:
        ValueError: On a hyper-parameter out of range, or clipping with `overlap_backward`.

    **`overlap_backward=True`**: a unit's gradients live from its backward to its step, so a rank
    holds those of a few units at a time, and not all shards. The parameters get the bits that a
    step at the end would give them. `step()` is still called after every backward: it ends the
    step, for schedulers and hooks too, and steps what could not be stepped before (`"zero1"`
    units, and buckets that this optimizer shares with another).

    - The rates and other settings that count are those at the time of the backward. What is
      written into a parameter between backward and `step()` comes after the update.
    - Units are stepped at the end of the backward where ranks use different parameters of them,
      where gradients come from a re-entrant checkpoint, and where a graph still holds their
      weights.
    - From backward to `step()`, gradients are gone: reading, clipping or dropping them raises.
      After `step()` they are None.
    - Refused: `max_grad_norm`, `clip_grad_norm_`, `GradScaler`, closures, `no_sync`, a second
      backward before `step()`, and so `retain_graph` for one.
    - A backward that fails after it has stepped units leaves parameters of two steps. Forwards,
      backwards and `step()` raise then, with the units' names, until a state is loaded into this
      optimizer (load the model's with it: `checkpoint.load`), or `accept_failed_backward()` is
      called.
    - Every rank must make the same choice. A dropped optimizer steps no more.

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
