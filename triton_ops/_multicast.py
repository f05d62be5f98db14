# SPDX-License-Identifier: Apache-2.0
"""Sums that NVLink switches do: inline PTX, for sm_90 and later.

A load from a multicast address (`multimem.ld_reduce`) returns the sum of what lies there on all
ranks, 16 bytes at a time. The order in which a switch adds is its own, and nothing promises that it
is the same on every run: results are not the bits of the sum in rank order. fp32 is added in fp32.
bf16 and fp16 are added in fp32 (`.acc::f32`) and rounded once, to their own dtype, before the value
travels: a sum that goes to an fp32 shard has that rounding too, which the sum by pointers has not.

Not for Triton's interpreter, which runs no PTX.
"""
# mypy: allow-untyped-decorators

import triton
import triton.language as tl

_LOAD = tl.constexpr(
    """{
    .reg .pred wanted;
    setp.ne.b32 wanted, $5, 0;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    @wanted multimem.ld_reduce.relaxed.sys.global.add"""
)
_FROM = tl.constexpr(
    """ {$0, $1, $2, $3}, [$4];
    }"""
)
# What is written before all operands were read must not share a register with them.
_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,l,r")


@triton.jit
def sum_in_switches(
    address: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Load the elements ``start`` to ``end``, at most BLOCK, summed over the ranks, as fp32.

    Args:
        address: Multicast address of element 0; a multiple of 16.
        start: First element, where 16 bytes begin.
        end: One past the last, where 16 bytes end.
        DTYPE: fp32, bf16 or fp16.
        BLOCK: Number of elements returned: zeros from ``end`` on.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WORD: tl.constexpr = 16 // BYTES
    first = start + tl.arange(0, BLOCK // WORD) * WORD
    KIND: tl.constexpr = (
        ".v4.f32"
        if DTYPE.is_fp32()
        else ".acc::f32.v4.bf16x2"
        if DTYPE.is_bf16()
        else ".acc::f32.v4.f16x2"
    )
    a, b, c, d = tl.inline_asm_elementwise(
        asm=_LOAD + KIND + _FROM,
        constraints=_REGISTERS,
        args=[address + first * BYTES, (first < end).to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    # Each thread holds four registers of one word, in order: to join them moves nothing.
    registers = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK // WORD * 4)
    if DTYPE.is_fp32():
        total = registers.to(tl.float32, bitcast=True)
    else:
        low = registers.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (registers >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        total = tl.join(low, high).reshape(BLOCK)
    return total
