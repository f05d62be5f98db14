# SPDX-License-Identifier: Apache-2.0
"""Which elements of a flat shard belong to which parameter: the table that kernels walk.

Imports torch only, like `_common`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

MAX_ALIGN_NUMEL = 64


@dataclass(frozen=True)
class FragmentTable:
    """The fragments of one rank's flat shard, in elements: what `norm` and `adam` walk.

    Attributes:
        starts: First element of each fragment in the shard.
        stops: One past its last element; never equal to the start (`build` drops empty fragments).
        rows: The row of each fragment in the coefficient table.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    rows: tuple[int, ...]
    _cache: dict[tuple[int, torch.device], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not len(self.starts) == len(self.stops) == len(self.rows):
            lengths = (len(self.starts), len(self.stops), len(self.rows))
            raise ValueError(
                f"FragmentTable: expected three tuples of one length, got {lengths}. Use build()."
            )
        last = 0
        for start, stop, row in sorted(zip(self.starts, self.stops, self.rows, strict=True)):
            if not last <= start < stop or row < 0:
                raise ValueError(
                    "FragmentTable: expected disjoint non-empty fragments with rows >= 0, "
                    f"got [{start}, {stop}) of row {row} where the previous one ends at {last}. "
                    "Use build() with a layout's fragments."
                )
            last = stop

    @classmethod
    def build(cls, fragments: Iterable[tuple[int, int, int]]) -> "FragmentTable":
        """Build a table from (start, stop, row) triples; empty fragments are dropped."""
        kept = [
            (int(start), int(stop), int(row)) for start, stop, row in fragments if start != stop
        ]
        return cls(tuple(f[0] for f in kept), tuple(f[1] for f in kept), tuple(f[2] for f in kept))

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def end(self) -> int:
        """One past the last element of any fragment; 0 for an empty table."""
        return max(self.stops, default=0)

    @cached_property
    def n_rows(self) -> int:
        """One past the highest row; 0 for an empty table."""
        return max(self.rows, default=-1) + 1

    @cached_property
    def max_numel(self) -> int:
        """The number of elements of the longest fragment."""
        return max(
            (stop - start for start, stop in zip(self.starts, self.stops, strict=True)), default=0
        )

    @cached_property
    def align_numel(self) -> int:
        """The largest power of two, at most MAX_ALIGN_NUMEL, that divides every start."""
        bits = MAX_ALIGN_NUMEL
        for start in self.starts:
            bits |= start
        return bits & -bits

    @cached_property
    def _host(self) -> Tensor:
        columns = [torch.tensor(c, dtype=torch.int64) for c in (self.starts, self.stops, self.rows)]
        return torch.stack(columns, dim=1).contiguous()

    def host(self) -> Tensor:
        """Return int64 [n_fragments, 3] of (start, stop, row) on the CPU; cached."""
        return self._host

    def chunks(self, block_numel: int, device: torch.device | str) -> Tensor:
        """Split the fragments into chunks of at most ``block_numel`` elements.

        Chunk starts keep the fragments' alignment, since a block is a power of two.

        Args:
            block_numel: Elements per chunk, a power of two.
            device: Where the table is wanted.

        Returns:
            int64 [n_chunks, 3] of (start, stop, row) on ``device``; cached per block and device.
        """
        if block_numel < 1 or block_numel & (block_numel - 1):
            raise ValueError(
                f"FragmentTable.chunks: expected a power of two, got {block_numel}. Round it up."
            )
        key = (block_numel, torch.device(device))
        if key not in self._cache:
            host = self.host()
            counts = (host[:, 1] - host[:, 0] + block_numel - 1) // block_numel
            owner = torch.repeat_interleave(torch.arange(len(self)), counts)
            first = torch.cumsum(counts, 0) - counts  # index of each fragment's first chunk
            starts = host[owner, 0] + (torch.arange(len(owner)) - first[owner]) * block_numel
            stops = torch.minimum(starts + block_numel, host[owner, 1])
            self._cache[key] = (
                torch.stack((starts, stops, host[owner, 2]), dim=1).contiguous().to(device)
            )
        return self._cache[key]
