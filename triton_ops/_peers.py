# SPDX-License-Identifier: Apache-2.0
"""What the kernels over several ranks' memory share: launch checks, and tables of addresses.

Imports torch only, like `_common`.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from triton_ops import _common as common
from triton_ops._common import AdamShard
from triton_ops._fragments import FragmentTable


def sum_dtype(peers: torch.dtype, out: torch.dtype) -> torch.dtype:
    """Return the dtype that a sum over ranks is taken in."""
    return torch.float64 if torch.float64 in (peers, out) else torch.float32


def check_reduce(
    where: str, peers: Sequence[Tensor], out: Tensor, table: FragmentTable | None
) -> None:
    """Raise ValueError unless the arguments of `reduce` fit together; looks at no value."""
    common.check_flat(f"{where} out", out, out.numel(), out.device)
    _check_alike(f"{where} peers", peers, out, at_least=1)
    if table is not None:
        common.check_table(where, table, out.numel())
    for rank, peer in enumerate(peers):
        if peer.data_ptr() != out.data_ptr() or peer.dtype != out.dtype:
            _check_apart(f"{where} out", f"peers[{rank}]", peer, out)


def check_reduce_adam(
    where: str, peers: Sequence[Tensor], shard: AdamShard, publish: Sequence[Tensor]
) -> None:
    """Raise ValueError unless the ranks' tensors fit the shard; looks at no value."""
    _check_alike(f"{where} peers", peers, shard.master, at_least=1)
    common.check_grads(f"{where} peers", peers[0], shard.master)
    _check_alike(f"{where} publish", copies(shard, publish), shard.master, at_least=0)


def check_multicast(where: str, address: int, out: Tensor) -> None:
    """Raise ValueError unless switches can sum a shard of this dtype and length."""
    if out.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{where} out: expected fp32, bf16 or fp16, which switches sum, got {out.dtype}. Sum "
            "by the peers' pointers: `reduce`."
        )
    for what, number in (("address", address), ("out", out.data_ptr()), ("bytes", out.nbytes)):
        if number % common.VECTOR_BYTES:
            raise ValueError(
                f"{where} {what}: expected a multiple of {common.VECTOR_BYTES}, got {number}. Sum "
                "by the peers' pointers: `reduce`."
            )


def copies(shard: AdamShard, publish: Sequence[Tensor]) -> list[Tensor]:
    """List every tensor that takes the new parameters in the compute dtype."""
    return [*([] if shard.params is None else [shard.params]), *publish]


def _check_alike(where: str, tensors: Sequence[Tensor], like: Tensor, at_least: int) -> None:
    """Raise ValueError unless the tensors are flat, as long as ``like``, and of one dtype."""
    if len(tensors) < at_least:
        raise ValueError(
            f"{where}: expected one tensor for each rank, got none. Pass this rank's own too."
        )
    for index, tensor in enumerate(tensors):
        common.check_flat(f"{where}[{index}]", tensor, like.numel(), like.device)
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"{where}[{index}]: expected {tensors[0].dtype} as [0], got {tensor.dtype}. "
                "Give every rank's memory the same dtype."
            )


def _check_apart(where: str, name: str, one: Tensor, other: Tensor) -> None:
    """Raise ValueError if two flat tensors share a byte."""
    first, second = one.data_ptr(), other.data_ptr()
    if first < second + other.nbytes and second < first + one.nbytes:
        raise ValueError(
            f"{where}: expected memory of its own or exactly that of one rank, got an overlap "
            f"with {name} at another offset or dtype. Pass another buffer."
        )


@lru_cache(maxsize=4096)
def address_table(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Upload addresses without waiting; ``stream`` is in the key, since it orders the copy."""
    host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def current_stream(device: torch.device) -> int:
    """Return the handle of the device's current stream; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)
