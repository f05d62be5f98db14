# SPDX-License-Identifier: Apache-2.0
"""Run every kernel of a step once or twice on small ragged data, and compare with the reference.

Made for compute-sanitizer, under which a test suite would take minutes: ranges that end inside a
vector, gradients that start inside one, strides, gaps, nothing at all. Without a device the kernels
of the CPU run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_kernels import ops
from triton_ops import COEF_COLUMNS, AdamShard, FragmentTable, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMELS = (1, 7, 128, 1021, 3000)


def implementations(device: str) -> dict[str, Any]:
    """Return what `ops` picks on this device, and Triton's kernels where they can run."""
    found: dict[str, Any] = {"ops": ops}
    if device == "cuda":
        from triton_ops import norm, pack

        found["triton"] = type("Triton", (), {"pack": pack.pack, "norm": norm.norm})
    return found


def gradients(dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """Make aligned, unaligned, strided and missing gradients."""
    flat = [
        torch.randn(numel + 3, device=device).to(dtype)[numel % 4 :][:numel] for numel in NUMELS
    ]
    wide = torch.randn(17, 40, device=device).to(dtype)
    return [*flat, None, wide.t(), wide[:, 1::3], wide[3], wide.new_empty(0)]


def check_pack(pack: Callable[..., None], device: str) -> int:
    """Pack into buckets of every dtype, writing and accumulating."""
    count = 0
    for source in DTYPES:
        for target in DTYPES:
            grads = gradients(source, device)
            starts, end = [], 0
            for grad in grads:
                starts.append(end)
                end += 9 + (0 if grad is None else grad.numel())
            for accumulate in (False, True):
                got = torch.randn(end, device=device).to(target)
                want = got.cpu()
                hosts = [None if grad is None else grad.cpu() for grad in grads]
                reference.pack(hosts, starts, want, accumulate=accumulate)
                pack(grads, starts, got, accumulate=accumulate)
                assert torch.equal(got.cpu(), want), f"pack of {source} to {target}"
                count += 1
    return count


def check_norm(norm: Callable[..., Tensor], device: str) -> int:
    """Take the norm of fragments with gaps, which hold NaN."""
    for dtype in DTYPES:
        fragments, start = [], 0
        flat = torch.full((sum(NUMELS) + 99,), float("nan"), device=device, dtype=dtype)
        for row, numel in enumerate(NUMELS):
            fragments.append((start, start + numel, row))
            flat[start : start + numel] = torch.randn(numel, device=device).to(dtype)
            start += numel + 8 * (row + 1) - numel % 8
        table = FragmentTable.build(fragments)
        got, want = norm(flat, table).cpu(), reference.norm(flat.cpu(), table)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)
    return len(DTYPES)


def check_adam(device: str) -> int:
    """Take a step of Adam over two parameters, one of which nobody used."""
    numel, table = 2100, FragmentTable.build([(0, 1000, 0), (1008, 2077, 1)])
    hyper = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.1]] * 2, dtype=torch.float64)
    grads, master = torch.randn(numel).bfloat16(), torch.randn(numel)
    steps = []
    for kernels, place in ((reference, "cpu"), (ops, device)):
        moments = [torch.zeros(numel, device=place) for _ in range(2)]
        params = torch.zeros(numel, dtype=torch.bfloat16, device=place)
        shard = AdamShard(grads.to(place), master.clone().to(place), *moments, params=params)
        used = torch.tensor([True, False], device=place)
        coefs = torch.empty(2, COEF_COLUMNS, dtype=torch.float64, device=place)
        step, one = torch.zeros(2, device=place), torch.ones(1, dtype=torch.float64, device=place)
        kernels.adam_coefs(hyper.to(place), step, used, None, coefs, decoupled=True)
        kernels.adam(shard, table, coefs, one)
        steps.append((shard.master.cpu(), params.cpu()))
    (want, _), (got, params) = steps
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert torch.equal(params[:1000], got[:1000].bfloat16())
    assert torch.equal(got[1000:], master[1000:]), "a gap or an unused parameter was written"
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    counts = {"adam": check_adam(device)}
    for name, kernels in implementations(device).items():
        counts[f"{name} pack"] = check_pack(kernels.pack, device)
        counts[f"{name} norm"] = check_norm(kernels.norm, device)
    if device == "cuda":
        torch.cuda.synchronize()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
