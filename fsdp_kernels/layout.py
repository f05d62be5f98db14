# SPDX-License-Identifier: Apache-2.0
"""Geometry of flat buckets: pure integers, computed once, frozen and self-checking.

A bucket is one flat padded 1-D buffer. Its parameters fill segments of it, one after the other, and
every rank owns an equal slice of it, its shard. A fragment is what a rank's shard holds of one
parameter::

    element     0                     shard_numel           2 * shard_numel
    segments    |---- weight ----|..|-- bias --|............|
    shards      |------- rank 0 -------|------- rank 1 -----|

Nothing here knows about tensors, so the planner, the runtime, the kernels' tables and the
checkpoints share one truth.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

SEGMENT_ALIGN_BYTES = 16
"""Every parameter starts at a multiple of this, so that kernels move 128 bits at a time."""

SHARD_ALIGN_BYTES = 128
"""Every shard starts at a multiple of this: below 16 bytes NCCL falls back to a slow copy path."""

_MAX_BYTES = 2**63 - 1
_ITEMSIZES = (1, 2, 4, 8, 16)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""An axis-aligned box of a tensor: (offsets, sizes), one number per dimension."""

DTypeT = TypeVar("DTypeT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Segment:
    """The half-open element range that one parameter fills in a bucket."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Fragment:
    """Segment ∩ shard on one rank: the part of one parameter that the rank owns.

    Attributes:
        index: The parameter's index in the bucket.
        start: First element, in the flattened parameter.
        stop: One past the last element, in the flattened parameter.
        shard_start: The same first element, in the rank's shard.
        shard_stop: The same end, in the rank's shard.
    """

    index: int
    start: int
    stop: int
    shard_start: int
    shard_stop: int

    @property
    def numel(self) -> int:
        """Elements of the fragment; 0 where the rank owns nothing of the parameter."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketLayout:
    """Where every parameter of a bucket lies, and which part of it every rank owns.

    Attributes:
        segments: One per parameter, in order, disjoint, each aligned to `SEGMENT_ALIGN_BYTES`.
        world: Number of shards.
        itemsize: Smallest element size, in bytes, of any buffer that uses this layout. Buffers of
            wider elements are then aligned too, since all element sizes are powers of two.
        shard_numel: Elements of each shard, padding included.
    """

    segments: tuple[Segment, ...]
    world: int
    itemsize: int
    shard_numel: int

    def __post_init__(self) -> None:
        """Reject a layout that any buffer or kernel could trip over."""
        if self.world < 1:
            raise ValueError(
                f"layout: expected a world of at least 1, got {self.world}. "
                "Pass the number of ranks."
            )
        if self.itemsize not in _ITEMSIZES:
            raise ValueError(
                f"layout: expected an itemsize of {_ITEMSIZES}, got {self.itemsize}. "
                "Pass the element size in bytes of the narrowest buffer."
            )
        shard_bytes = self.shard_numel * self.itemsize
        if self.shard_numel < 0 or shard_bytes % SHARD_ALIGN_BYTES:
            raise ValueError(
                f"layout: expected shards of a multiple of {SHARD_ALIGN_BYTES} bytes, "
                f"got {shard_bytes}. Use BucketLayout.build."
            )
        if self.full_numel * self.itemsize > _MAX_BYTES:
            raise ValueError(
                f"layout: expected fewer than 2**63 bytes, got {self.full_numel * self.itemsize}. "
                "Shard smaller units."
            )
        self._check_segments()

    def _check_segments(self) -> None:
        end = 0
        seen: set[str] = set()
        for segment in self.segments:
            where = f"layout: segment '{segment.name}'"
            if segment.name in seen:
                raise ValueError(
                    f"{where}: expected a name once, got it twice. Pass each parameter once."
                )
            seen.add(segment.name)
            if segment.stop < segment.start:
                raise ValueError(
                    f"{where}: expected start <= stop, got {segment.start} > {segment.stop}."
                )
            if segment.start < end:
                raise ValueError(
                    f"{where}: expected a start of at least {end}, got {segment.start}. "
                    "Segments must not overlap."
                )
            if segment.start * self.itemsize % SEGMENT_ALIGN_BYTES:
                raise ValueError(
                    f"{where}: expected a start at a multiple of {SEGMENT_ALIGN_BYTES} bytes, "
                    f"got byte {segment.start * self.itemsize}. Use BucketLayout.build."
                )
            end = segment.stop
        if end > self.full_numel:
            raise ValueError(
                f"layout: expected segments within {self.full_numel} elements, "
                f"got an end at {end}. Use BucketLayout.build."
            )

    @classmethod
    def build(
        cls, names: Sequence[str], numels: Sequence[int], *, world: int, itemsize: int
    ) -> BucketLayout:
        """Lay parameters out one after the other, aligned, and cut the bucket into equal shards.

        Args:
            names: The parameters' names, unique.
            numels: Their element counts; 0 is allowed.
            world: Number of ranks.
            itemsize: Smallest element size in bytes of any buffer that will use the layout.

        Raises:
            ValueError: Names and counts do not match, or a value is out of range.
        """
        if len(names) != len(numels):
            raise ValueError(
                f"layout: expected one numel per name ({len(names)}), got {len(numels)}."
            )
        if itemsize not in _ITEMSIZES or world < 1:
            return cls((), world, itemsize, 0)  # its own check says what is wrong
        align = max(1, SEGMENT_ALIGN_BYTES // itemsize)
        segments: list[Segment] = []
        end = 0
        for name, numel in zip(names, numels, strict=True):
            if numel < 0:
                raise ValueError(
                    f"layout: segment '{name}': expected a numel of at least 0, got {numel}."
                )
            start = _round_up(end, align)
            end = start + numel
            segments.append(Segment(name, start, end))
        shard_numel = _round_up(-(-end // world), SHARD_ALIGN_BYTES // itemsize)
        return cls(tuple(segments), world, itemsize, shard_numel)

    @property
    def full_numel(self) -> int:
        """Elements of the whole bucket, padding included."""
        return self.world * self.shard_numel

    @property
    def payload_numel(self) -> int:
        """Elements that belong to a parameter."""
        return sum(segment.numel for segment in self.segments)

    @property
    def padding_numel(self) -> int:
        """Elements that belong to none."""
        return self.full_numel - self.payload_numel

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the element range of `rank`'s shard in the bucket."""
        if not 0 <= rank < self.world:
            raise ValueError(f"layout: expected a rank in [0, {self.world}), got {rank}.")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def fragment(self, index: int, rank: int) -> Fragment:
        """Return what `rank` owns of parameter `index`; an empty fragment where it owns nothing."""
        first, last = self.shard_range(rank)
        if not 0 <= index < len(self.segments):
            raise ValueError(
                f"layout: expected a parameter index in [0, {len(self.segments)}), got {index}."
            )
        segment = self.segments[index]
        start = min(max(segment.start, first), segment.stop)
        stop = max(min(segment.stop, last), start)
        # An empty fragment still lies inside both ranges, so that slicing with it is always legal.
        shard_start = min(max(start - first, 0), self.shard_numel)
        return Fragment(
            index,
            start - segment.start,
            stop - segment.start,
            shard_start,
            shard_start + stop - start,
        )

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """Return one fragment per parameter, in order, empty ones included."""
        return tuple(self.fragment(index, rank) for index in range(len(self.segments)))

    def pads(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the bucket that no segment covers, in order."""
        ranges: list[tuple[int, int]] = []
        end = 0
        for segment in self.segments:
            if segment.start > end:
                ranges.append((end, segment.start))
            end = segment.stop
        if self.full_numel > end:
            ranges.append((end, self.full_numel))
        return tuple(ranges)

    def describe(self, width: int = 60) -> str:
        """Draw the bucket: a ruler of shards, one bar per parameter, and the ranks that own it."""
        scale = max(self.full_numel, 1)
        name_width = max((len(segment.name) for segment in self.segments), default=4)
        cuts = {rank * self.shard_numel * width // scale for rank in range(self.world + 1)}
        ruler = "".join("|" if column in cuts else "-" for column in range(width + 1))
        lines = [
            f"{self.full_numel} elements of at least {self.itemsize} bytes, "
            f"{self.padding_numel} of padding, {self.world} shards of {self.shard_numel}",
            f"{'':{name_width}} {ruler}",
        ]
        for segment in self.segments:
            left = segment.start * width // scale
            right = max(-(-segment.stop * width // scale), left)
            owners = "none"
            if segment.numel:
                low, high = (
                    segment.start // self.shard_numel,
                    (segment.stop - 1) // self.shard_numel,
                )
                owners = f"rank {low}" if low == high else f"ranks {low}-{high}"
            bar = " " * left + "#" * (right - left)
            lines.append(
                f"{segment.name:{name_width}} {bar:{width + 1}} "
                f"[{segment.start}, {segment.stop}) {owners}"
            )
        return "\n".join(lines)


def group_parameters(
    items: Iterable[tuple[str, DTypeT, bool]],
) -> dict[tuple[DTypeT, bool], list[int]]:
    """Group a unit's parameters into buckets by (dtype, requires_grad), in first-seen order.

    Args:
        items: (name, dtype, requires_grad) of each parameter.

    Returns:
        For each bucket its parameters' indices into `items`, in order.
    """
    groups: dict[tuple[DTypeT, bool], list[int]] = {}
    for index, (_name, dtype, requires_grad) in enumerate(items):
        groups.setdefault((dtype, requires_grad), []).append(index)
    return groups


def rectangles(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cut the flat row-major range [start, stop) of a tensor into boxes, in flat order.

    A range is, per dimension, the rest of a first row, whole rows, and the beginning of a last row;
    so at most `2 * ndim - 1` boxes. Each box is itself contiguous in the flattened tensor.

    Args:
        shape: The tensor's shape; `()` is one element, a zero anywhere is none.
        start: First element of the range.
        stop: One past its last element.

    Returns:
        (offsets, sizes) of each box; none for an empty range.
    """
    numel = prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(
            f"rectangles: expected a range within [0, {numel}), got [{start}, {stop})."
        )
    if start == stop:
        return ()
    if not shape:
        return (((), ()),)
    rest = tuple(shape[1:])
    row_numel = numel // shape[0]
    first, first_offset = divmod(start, row_numel)
    last, last_offset = divmod(stop, row_numel)
    boxes: list[Box] = []
    if first_offset:
        head_stop = row_numel if first < last else last_offset
        boxes += _in_row(first, rectangles(rest, first_offset, head_stop))
        if first == last:
            return tuple(boxes)
        first += 1
    if first < last:
        boxes.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    if last_offset:
        boxes += _in_row(last, rectangles(rest, 0, last_offset))
    return tuple(boxes)


def _in_row(row: int, boxes: tuple[Box, ...]) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
