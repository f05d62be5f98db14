# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the kernels shares: buffers, columns, block sizes, launch checks.

Imports torch only: a host without triton uses this module too.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops._fragments import MAX_ALIGN_NUMEL, FragmentTable

# Columns of the coefficient table, float64 [n_params, COEF_COLUMNS]: `adam_coefs` fills it and
# `adam` reads it.
ACTIVE = 0  # 1.0: this parameter takes a step; 0.0: none of its bytes change
BETA1 = 1
ONE_MINUS_BETA1 = 2
BETA2 = 3
ONE_MINUS_BETA2 = 4
STEP_SIZE = 5  # lr / (1 - beta1**step)
BIAS_CORRECTION2_SQRT = 6  # sqrt(1 - beta2**step)
EPS = 7
DECAY = 8  # AdamW: 1 - lr * weight_decay, a factor; Adam: weight_decay itself
COEF_COLUMNS = 9

# Columns of the hyper-parameter table, float64: lr, beta1, beta2, eps, weight_decay.
HYPER_COLUMNS = 5

VECTOR_BYTES = 16  # one 128-bit access
BLOCK_NUMEL = 1024  # elements a program of a device launch: 8 per thread with 4 warps
NUM_WARPS = 4
# Every launch says this explicitly: a contracted multiply-add rounds once where the reference
# rounds twice, and triton's default differs by version.
LAUNCH_OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
INTERPRETER_BLOCK_NUMEL = 1 << 16  # the interpreter pays per program, hardly per element

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASTER_DTYPES = (torch.float32, torch.float64)


def interpreted() -> bool:
    """Tell whether this process runs Triton kernels in the interpreter, on CPU tensors.

    NOTE: triton reads ``TRITON_INTERPRET`` when a kernel's module is imported: set it before.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def block_numel(longest: int, *, blocks: int = 1) -> int:
    """Pick the elements per program, a power of two, for ranges of at most ``longest`` elements."""
    if interpreted():
        return min(max(1 << (longest - 1).bit_length(), MAX_ALIGN_NUMEL), INTERPRETER_BLOCK_NUMEL)
    return BLOCK_NUMEL * blocks


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: triton launches on the current one."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


@dataclass(frozen=True)
class AdamShard:
    """One rank's flat buffers of one bucket, each 1-D contiguous [shard_numel] on one device.

    Attributes:
        grads: Reduced gradients, fp32, bf16 or fp16 (fp64 with an fp64 master); None for
            `reduce_adam`, which reads those of the ranks.
        master: Parameters in fp32 (fp64 on CPU: reference and C++).
        exp_avg: First moment, in master's dtype.
        exp_avg_sq: Second moment, in master's dtype.
        max_exp_avg_sq: Its running maximum (amsgrad), in master's dtype, or None.
        params: The shard that the next gather sends, any float dtype, written only; or None.
    """

    grads: Tensor | None
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    params: Tensor | None = None

    def __post_init__(self) -> None:
        master = self.master
        for name, tensor in self.named().items():
            check_flat(f"AdamShard.{name}", tensor, master.numel(), master.device)
        if master.dtype not in MASTER_DTYPES:
            raise ValueError(
                f"AdamShard.master: expected float32 or float64, got {master.dtype}. "
                "Keep a float32 master."
            )
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype != master.dtype:
                raise ValueError(
                    f"AdamShard.{name}: expected master's {master.dtype}, got {tensor.dtype}. "
                    "Convert the state."
                )
        if self.grads is not None:
            check_grads("AdamShard.grads", self.grads, master)

    def named(self) -> dict[str, Tensor]:
        """Return the buffers that are present, by name."""
        names = ("grads", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "params")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def check_flat(where: str, tensor: Tensor, numel: int, device: torch.device) -> None:
    """Raise ValueError unless ``tensor`` is 1-D contiguous [numel], floating, on ``device``."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != numel:
        got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(
            f"{where}: expected a contiguous [{numel}], got {got}. Pass the bucket's flat buffer."
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{where}: expected a float dtype, got {tensor.dtype}. Cast it first.")
    if tensor.device != device:
        raise ValueError(f"{where}: expected {device}, got {tensor.device}. Move it first.")


def check_grads(where: str, grads: Tensor, master: Tensor) -> None:
    """Raise ValueError if the gradients are wider than the state that they update."""
    if grads.dtype == torch.float64 and master.dtype != torch.float64:
        raise ValueError(f"{where}: expected at most float32, got float64. Reduce in float32.")


def adam_grads(where: str, shard: AdamShard) -> Tensor:
    """Return the shard's gradients; raise ValueError if it has none."""
    if shard.grads is None:
        raise ValueError(
            f"{where}: expected a shard with gradients, got None. Pass grads, or use reduce_adam."
        )
    return shard.grads


def check_device(where: str, tensor: Tensor) -> None:
    """Raise RuntimeError unless this process's Triton kernels can work on the tensor's device."""
    if tensor.is_cuda or (tensor.device.type == "cpu" and interpreted()):
        return
    raise RuntimeError(
        f"{where}: expected a CUDA tensor, got {tensor.device}. Use fsdp_kernels.ops, which "
        "picks by device, or set TRITON_INTERPRET=1 before triton is imported."
    )


def check_table(where: str, table: FragmentTable, numel: int) -> None:
    """Raise ValueError unless every fragment lies inside a shard of ``numel`` elements."""
    if table.end > numel:
        raise ValueError(
            f"{where}: expected fragments inside [0, {numel}), got one ending at {table.end}. "
            "Rebuild the table."
        )


def check_adam(
    where: str, shard: AdamShard, table: FragmentTable, coefs: Tensor, factor: Tensor
) -> None:
    """Raise ValueError unless the arguments of `adam` fit together; looks at no value."""
    check_table(where, table, shard.master.numel())
    if (
        coefs.dtype != torch.float64
        or coefs.dim() != 2
        or coefs.shape[1] != COEF_COLUMNS
        or not coefs.is_contiguous()
    ):
        got = f"{coefs.dtype} {tuple(coefs.shape)}"
        raise ValueError(
            f"{where}: expected coefs float64 [n_params, {COEF_COLUMNS}], got {got}. "
            "Fill them with adam_coefs()."
        )
    if coefs.shape[0] < table.n_rows:
        raise ValueError(
            f"{where}: expected at least {table.n_rows} rows of coefs, got {coefs.shape[0]}. "
            "Rebuild them."
        )
    if factor.dtype != torch.float64 or factor.numel() != 1:
        raise ValueError(
            f"{where}: expected factor float64 [1], got {factor.dtype} {tuple(factor.shape)}. "
            "Cast it first."
        )
    if coefs.device != shard.master.device or factor.device != shard.master.device:
        got = f"coefs on {coefs.device}, factor on {factor.device}"
        raise ValueError(f"{where}: expected {shard.master.device}, got {got}. Move them first.")


def check_coefs(
    where: str, hyper: Tensor, step: Tensor, used: Tensor, skip: Tensor | None, out: Tensor
) -> None:
    """Raise ValueError unless the arguments of `adam_coefs` fit together; looks at no value."""
    rows = hyper.shape[0] if hyper.dim() == 2 else -1
    wanted: list[tuple[str, Tensor, torch.dtype, tuple[int, ...]]] = [
        ("hyper", hyper, torch.float64, (rows, HYPER_COLUMNS)),
        ("step", step, torch.float32, (rows,)),
        ("used", used, torch.bool, (rows,)),
        ("out", out, torch.float64, (rows, COEF_COLUMNS)),
    ]
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(
                f"{where}: expected {name} contiguous {dtype} {list(shape)}, got {got}. "
                "Cast it first."
            )
    if skip is not None and (skip.numel() != 1 or not skip.dtype.is_floating_point):
        raise ValueError(
            f"{where}: expected skip float [1], got {skip.dtype} {tuple(skip.shape)}. "
            "Cast it first."
        )
    devices = {t.device for t in (hyper, step, used, out, *([] if skip is None else [skip]))}
    if len(devices) != 1:
        raise ValueError(
            f"{where}: expected one device, got {sorted(map(str, devices))}. Move them first."
        )


def check_pack(
    where: str, grads: Sequence[Tensor | None], starts: Sequence[int], out: Tensor
) -> None:
    """Raise ValueError unless every gradient has its own range inside the flat ``out``."""
    check_flat(f"{where} out", out, out.numel(), out.device)
    if len(grads) != len(starts):
        raise ValueError(
            f"{where}: expected one start per gradient, got {len(grads)} and {len(starts)}. "
            "Pass None for a missing one."
        )
    last, numel = 0, out.numel()
    for index, (grad, start) in enumerate(zip(grads, starts, strict=True)):
        if grad is None:
            continue
        stop = start + grad.numel()
        if start < last or stop > numel:
            raise ValueError(
                f"{where}: expected gradient {index} inside [{last}, {numel}), "
                f"got [{start}, {stop}). Pass gradients in segment order."
            )
        if grad.dtype not in FLOAT_DTYPES or grad.device != out.device:
            got = f"{grad.dtype} on {grad.device}"
            raise ValueError(
                f"{where}: expected gradient {index} float on {out.device}, got {got}. "
                "Move it first."
            )
        last = stop
