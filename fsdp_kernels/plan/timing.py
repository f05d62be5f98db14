# SPDX-License-Identifier: Apache-2.0
"""From a model, a machine and a mesh to what a step costs.

A forward is two operations for each parameter that a token is multiplied by, and attention
4 x sequence x width for each layer and token (scores and values; that causal kernels skip half is
not counted, as MFU is counted elsewhere). A backward is twice that, and the forward once more for
what is computed again. Time is operations over the device's peak times one efficiency, the same for
everything. Packing and stepping are bound by memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from fsdp_kernels.plan.network import Network, Phase, place
from fsdp_kernels.plan.program import Piece, Policy
from fsdp_kernels.plan.simulate import PieceCost, Step, UnitCost, simulate

COPY_SHARE = 0.8  # of the memory's bandwidth that a kernel reaches which only moves bytes
_STEP_BYTES = 28  # read gradient, master, two moments; write master, two moments: all in fp32


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and its links.

    Attributes:
        peak_flops: Operations per second, dense, in the compute dtype.
        memory_bytes_per_s: Of the device's own memory.
        network: Its links.
        efficiency: Share of `peak_flops` that a model reaches which waits for nobody.
    """

    peak_flops: float
    memory_bytes_per_s: float
    network: Network
    efficiency: float

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(
                f"--efficiency: expected a share above 0 and up to 1, got {self.efficiency}. "
                "Measure one device: 6 x parameters x tokens per second / peak."
            )


@dataclass(frozen=True, slots=True)
class UnitWork:
    """A unit of the model.

    Attributes:
        name: Its path; "" is the root.
        params: Its parameters.
        multiplied: Those that every token is multiplied by: without an embedding's table.
        attention_width: Heads times their width, summed over its layers of attention.
        saved_bytes: What one micro-batch's forward keeps for its backward.
        again_bytes: What backward keeps while it computes the forward again.
    """

    name: str
    params: int
    multiplied: int
    attention_width: int = 0
    saved_bytes: int = 0
    again_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """What a rank does in a step.

    Attributes:
        units: The root first; it runs before and after the others.
        batch: Sequences of a micro-batch.
        sequence: Tokens of a sequence.
        micro_batches: Forwards and backwards of a step.
        recompute: Share of a forward that backward computes again: 1 with activation checkpointing.
        compute_bytes: Of a parameter as it is gathered.
        reduce_bytes: Of a gradient as it is reduced.
        grads_bytes: Of a gradient as a rank keeps it.
    """

    units: tuple[UnitWork, ...]
    batch: int
    sequence: int
    micro_batches: int = 1
    recompute: float = 0.0
    compute_bytes: float = 2
    reduce_bytes: float = 4
    grads_bytes: float = 4

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch * self.sequence

    def forward_flops(self, unit: UnitWork) -> float:
        """Operations of a unit's forward, for a micro-batch."""
        each = 2 * unit.multiplied + 4 * self.sequence * unit.attention_width
        return float(each * self.tokens)

    def model_flops(self) -> float:
        """Operations of a step without what is computed again: three forwards."""
        return 3 * self.micro_batches * sum(self.forward_flops(unit) for unit in self.units)

    def all_flops(self) -> float:
        """Operations of a step with what is computed again."""
        return self.model_flops() * (3 + self.recompute) / 3


@dataclass(frozen=True, slots=True)
class Mesh:
    """How the ranks share the model.

    Attributes:
        world: All ranks.
        shard: Ranks of a shard group; 1 replicates.
        strategy: "zero3", "zero2", "zero1" or "replicate".
        prefetch: Units gathered ahead.
        clips: Gradients are clipped by their norm.
        no_sync: All micro-batches but the last leave their gradients to it.
    """

    world: int
    shard: int
    strategy: str = "zero3"
    prefetch: int = 1
    clips: bool = True
    no_sync: bool = False

    def policy(self) -> Policy:
        """What the runtime does."""
        return Policy(
            prefetch=self.prefetch,
            keeps_params=self.strategy in ("zero2", "zero1"),
            defers_grads=self.strategy == "zero1",
            no_sync=self.no_sync,
            sharded=self.shard > 1,
            two_levels=1 < self.shard < self.world,
            clips=self.clips,
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """A simulated step, and what it is worth.

    Attributes:
        workload: What a rank did.
        machine: With what.
        mesh: With whom.
        step: How it went.
    """

    workload: Workload
    machine: Machine
    mesh: Mesh
    step: Step

    @property
    def tokens_per_s(self) -> float:
        """Of one rank."""
        return self.workload.tokens * self.workload.micro_batches / self.step.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the peak, without what is computed again."""
        return self.workload.model_flops() / (self.step.seconds * self.machine.peak_flops)

    @property
    def hfu(self) -> float:
        """The same with what is computed again."""
        return self.workload.all_flops() / (self.step.seconds * self.machine.peak_flops)


def time_step(workload: Workload, machine: Machine, mesh: Mesh) -> Timing:
    """Simulate a step."""
    shard, replicas = place(mesh.world, mesh.shard, machine.network.node_ranks)
    network = machine.network
    memory = COPY_SHARE * machine.memory_bytes_per_s
    units: list[UnitCost] = []
    for unit in workload.units:
        full_bytes = ceil(unit.params * workload.compute_bytes)
        grads_bytes = ceil(unit.params * workload.reduce_bytes)
        held = -(-unit.params // mesh.shard)  # a rank's part, rounded up
        alone, across = mesh.shard == 1, None
        if 1 < mesh.shard < mesh.world:
            across = network.all_reduce(ceil(held * workload.reduce_bytes), replicas)
        units.append(
            UnitCost(
                name=unit.name,
                gather=network.gather(full_bytes, shard),
                reduce=(
                    network.all_reduce(grads_bytes, replicas)
                    if alone
                    else network.gather(grads_bytes, shard)
                ),
                across=across,
                pack_s=(full_bytes + grads_bytes) / memory,
                step_s=held * (_STEP_BYTES + workload.compute_bytes) / memory,
                full_bytes=0 if alone else full_bytes,
                grads_bytes=grads_bytes,
                shard_grads_bytes=ceil(held * workload.grads_bytes),
            )
        )
    # A norm is one number: its transfer takes no time beside its latencies.
    norm = network.all_reduce(8, shard) if mesh.clips else Phase("inside", 0.0, 0.0)
    step = simulate(
        _pieces(workload, machine),
        units,
        mesh.policy(),
        norm=norm,
        micro_batches=workload.micro_batches,
    )
    return Timing(workload, machine, mesh, step)


def calibrated(machine: Machine, workload: Workload, tokens_per_s: float) -> Machine:
    """Return the machine with the efficiency that one device alone was measured to have.

    Args:
        machine: Its own efficiency does not count.
        workload: What was measured.
        tokens_per_s: Of one device that waits for no other, packing and stepping included.

    Raises:
        ValueError: No efficiency up to 1 is as fast, or it is no speed.
    """
    perfect = replace(machine, efficiency=1.0)
    flops_s = workload.all_flops() / machine.peak_flops
    other_s = time_step(workload, perfect, Mesh(1, 1)).step.seconds - flops_s
    tokens = workload.tokens * workload.micro_batches
    most = tokens / (flops_s + other_s)
    if not 0 < tokens_per_s <= most:
        raise ValueError(
            f"--measured: expected above 0 and up to {most:,.0f} tokens/s, which the device's peak "
            f"allows, got {tokens_per_s:,.0f}. Measure one GPU with this model, batch and dtype."
        )
    return replace(machine, efficiency=flops_s / (tokens / tokens_per_s - other_s))


def _pieces(workload: Workload, machine: Machine) -> list[PieceCost]:
    """The root before the other units (a table that backward does not read) and after them."""
    speed = machine.peak_flops * machine.efficiency
    root, *others = workload.units

    def piece(index: int, unit: UnitWork) -> PieceCost:
        forward_s = workload.forward_flops(unit) / speed
        backward_s = forward_s * (2 + workload.recompute)
        return PieceCost(Piece(index), forward_s, backward_s, unit.saved_bytes, unit.again_bytes)

    pieces = [piece(index, unit) for index, unit in enumerate(others, start=1)]
    if pieces:
        pieces.insert(0, PieceCost(Piece(0, reads=False), 0.0, 0.0))
    return [*pieces, piece(0, root)]


def totals(timings: Sequence[Timing]) -> list[dict[str, float]]:
    """Return one row for each world, with the names that `--json` has."""
    return [
        {
            "world": timing.mesh.world,
            "shard": timing.mesh.shard,
            "step_s": timing.step.seconds,
            "compute_s": timing.step.compute_s,
            "exposed_s": timing.step.exposed_s,
            "tokens_per_s": timing.tokens_per_s * timing.mesh.world,
            "tokens_per_s_per_gpu": timing.tokens_per_s,
            "mfu": timing.mfu,
            "hfu": timing.hfu,
        }
        for timing in timings
    ]
