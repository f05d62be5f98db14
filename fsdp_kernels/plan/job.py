# SPDX-License-Identifier: Apache-2.0
"""What is to be trained, and how: the planner's question, checked.

A model is units of buckets. A bucket has either parameters with names, which `layout.py` lays out
as training does, padding included; or a bare number of parameters, which is divided exactly, as on
paper. Bytes of a parameter are fractions, so that sums stay exact whatever the world.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from fsdp_kernels.layout import BucketLayout
from fsdp_kernels.strategy import STRATEGIES, ZERO3, Strategy

NAMES = ("dp", "ddp", "replicate", "zero1", "zero2", "zero3", "hybrid")
"""What `--strategy` takes: ours, and what torch's `DataParallel` and DDP do."""

Offload = Literal["optimizer", "params"]


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one parameter, by what they are kept for.

    Attributes:
        params: In the compute dtype: what a gather moves.
        grads: The rank's gradient, which the step reads.
        reduce: What a reduction moves.
        master: The copy that the step writes, where it is not the one in the compute dtype; else 0.
        state: All that the optimizer remembers.
    """

    params: Fraction
    grads: Fraction
    reduce: Fraction
    master: Fraction
    state: Fraction


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """The parameters of a unit that one collective moves.

    Attributes:
        names: Of the parameters; one may stand for all of them where `itemsize` is 0.
        numels: Their element counts.
        widths: Bytes of each.
        itemsize: Narrowest element of any buffer of the bucket, which decides its padding; 0: the
            parameters are only a number, and nothing is padded.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    widths: Widths
    itemsize: int = 0

    @property
    def numel(self) -> int:
        """Elements that belong to a parameter."""
        return sum(self.numels)

    def shard_numel(self, world: int) -> Fraction:
        """Elements of a rank's shard, padding included."""
        if not self.itemsize:
            return Fraction(self.numel, world)
        return Fraction(_layout(self.names, self.numels, world, self.itemsize).shard_numel)

    def full_numel(self, world: int) -> Fraction:
        """Elements of the whole bucket, padding included."""
        return self.shard_numel(world) * world


@lru_cache(maxsize=4096)
def _layout(
    names: tuple[str, ...], numels: tuple[int, ...], world: int, itemsize: int
) -> BucketLayout:
    return BucketLayout.build(names, numels, world=world, itemsize=itemsize)


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A module whose parameters are gathered, used and freed together.

    Attributes:
        name: Its path; "" is the root.
        buckets: One for each dtype and `requires_grad`.
        saved_bytes: What one micro-batch's forward keeps for its backward.
        input_bytes: Its inputs, which activation checkpointing keeps instead.
        inner_bytes: All of `saved_bytes` but the inputs: what it then computes again in backward.
        multiplied: Parameters that every token is multiplied by (not an embedding's table).
        attention_width: Heads times their width, summed over its attention layers.
    """

    name: str
    buckets: tuple[PlannedBucket, ...]
    saved_bytes: int = 0
    input_bytes: int = 0
    inner_bytes: int = 0
    multiplied: int = 0
    attention_width: int = 0

    @property
    def numel(self) -> int:
        """Its parameters."""
        return sum(bucket.numel for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class Job:
    """One training: the model, and what is done with it.

    Attributes:
        units: The root first; it may have no parameters of its own. The others in forward order.
        strategy: One of `NAMES`.
        shard: Ranks of a shard group; None: all. Beyond a group, replicas.
        prefetch: Units gathered ahead.
        no_sync: Whether micro-batches accumulate in full on each rank before a reduction.
        overlap_backward: Whether units are stepped in backward: `ShardedAdamW`'s option.
        recompute: Activation checkpointing of each unit.
        offload: What lies in host memory between its uses.
        shared_memory: Whether ranks of one host share the full parameters (`SharedMemoryComm`).
        reserve_bytes: What the device needs for everything that is not planned here.
        memory_bytes: Of a device; None: no limit is known.
        batch: Sequences of a micro-batch, on a rank; 0: activations were not asked for.
        sequence: Tokens of each.
        notes: Assumptions, as sentences.
    """

    units: tuple[PlannedUnit, ...]
    strategy: str = "zero3"
    shard: int | None = None
    prefetch: int = 1
    no_sync: bool = False
    overlap_backward: bool = False
    recompute: bool = False
    offload: frozenset[Offload] = frozenset()
    shared_memory: bool = False
    reserve_bytes: int = 0
    memory_bytes: int | None = None
    batch: int = 0
    sequence: int = 0
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.strategy not in NAMES:
            raise ValueError(
                f"--strategy: expected {', '.join(NAMES)}, got {self.strategy!r}. "
                "zero3 keeps the least on a GPU, ddp is what most people start with."
            )
        if not any(unit.numel for unit in self.units):
            raise ValueError("plan: expected at least one parameter, got none. Give --params.")
        if self.prefetch < 0:
            raise ValueError(
                f"--prefetch: expected a number from 0, got {self.prefetch}. 0 gathers each unit "
                "when it is needed."
            )
        self._check_offload()
        self._check_shard()
        self._check_overlap()

    def _check_offload(self) -> None:
        if self.offload and self.strategy in ("dp", "ddp"):
            raise ValueError(
                f"--offload: expected a strategy that shards, got {self.strategy}. Use "
                "--strategy zero3, or leave --offload out."
            )
        if "params" in self.offload and self.strategy not in ("zero3", "hybrid"):
            raise ValueError(
                f"--offload params: expected zero3 or hybrid, got {self.strategy}, which keeps "
                "full parameters on the GPU. Use --strategy zero3, or --offload optimizer."
            )

    def _check_shard(self) -> None:
        if self.shard is None:
            return
        if self.strategy in ("dp", "ddp", "replicate"):
            raise ValueError(
                f"--shard: expected a strategy that shards, got {self.strategy}. Use --strategy "
                "hybrid, or leave --shard out."
            )
        if self.shard < 1:
            raise ValueError(
                f"--shard: expected at least 1 rank, got {self.shard}. Give the GPUs of a host."
            )

    def _check_overlap(self) -> None:
        if not self.overlap_backward:
            return
        if self.strategy in ("dp", "ddp"):
            raise ValueError(
                f"--overlap-backward: expected a strategy of fully_shard, got {self.strategy}, "
                "which steps after backward. Use --strategy replicate, or leave it out."
            )
        if self.no_sync:
            raise ValueError(
                "--overlap-backward: expected a reduction in every backward, got --no-sync, which "
                "accumulates over several. Leave one of them out."
            )

    @property
    def numel(self) -> int:
        """All parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def buckets(self) -> list[PlannedBucket]:
        """All buckets, the root's first."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    @property
    def shards(self) -> bool:
        """Whether anything is sharded."""
        return self.strategy not in ("dp", "ddp") and not self._ours.replicates

    @property
    def keeps_params(self) -> bool:
        """Whether full parameters stay from step to step."""
        return self.shards and self._ours.keeps_params

    @property
    def defers_grads(self) -> bool:
        """Whether full gradients stay until the step."""
        return self.shards and self._ours.defers_grads

    @property
    def steps_in_backward(self) -> bool:
        """Whether gradients go as soon as they are reduced; what defers them steps as ever."""
        return self.overlap_backward and not self.defers_grads

    @property
    def _ours(self) -> Strategy:
        return ZERO3 if self.strategy == "hybrid" else STRATEGIES[self.strategy]

    def group(self, world: int) -> int:
        """Return the ranks of a shard group: 1 where nothing is sharded.

        Raises:
            ValueError: The world cannot be divided so.
        """
        if world < 1:
            raise ValueError(f"--world: expected at least 1 GPU, got {world}. Give --world 8.")
        if not self.shards:
            return 1
        shard = world if self.shard is None else self.shard
        if world % shard:
            raise ValueError(
                f"--world: expected a multiple of the shard group's {shard} GPUs, got {world}. "
                f"Take {world // shard * shard or shard} or {(world // shard + 1) * shard}, or "
                "change --shard."
            )
        return shard

    def change(self, **changes: object) -> Job:
        """Return the same job with something else; checked again."""
        return replace(self, **changes)  # type: ignore[arg-type]
