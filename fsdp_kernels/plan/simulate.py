# SPDX-License-Identifier: Apache-2.0
"""One simulated step: the host's program on streams, its times, its bytes, its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_kernels.plan.engine import Engine, Ran
from fsdp_kernels.plan.network import Phase
from fsdp_kernels.plan.program import Op, Piece, Policy, settled
from fsdp_kernels.trace import label
from fsdp_kernels.trace_file import Slice, TraceFile, count

COMPUTE = "compute"
_START = 0  # the mark of the step's beginning


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What a unit's verbs cost.

    Attributes:
        name: Its path; "" is the root.
        gather: Of its full parameters.
        reduce: Of its full gradients, inside a shard group (or across replicas, where a rank keeps
            whole parameters).
        across: Of its shard, across replicas, where there are both levels; else None.
        pack_s: To move its gradients into one buffer.
        step_s: To update its shard.
        full_bytes: Of its full parameters.
        grads_bytes: Of its full gradients, in the reduce dtype.
        shard_grads_bytes: Of a rank's part of them.
    """

    name: str
    gather: Phase
    reduce: Phase
    across: Phase | None
    pack_s: float
    step_s: float
    full_bytes: int
    grads_bytes: int
    shard_grads_bytes: int


@dataclass(frozen=True, slots=True)
class PieceCost:
    """What a piece of the model costs, for one micro-batch.

    Attributes:
        piece: Whose it is.
        forward_s: Its forward.
        backward_s: Its backward, with what is computed again.
        saved_bytes: What its forward keeps for its backward.
        again_bytes: What backward keeps beside it while it runs: activations computed again.
    """

    piece: Piece
    forward_s: float
    backward_s: float
    saved_bytes: int = 0
    again_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What a simulated step came to.

    Attributes:
        ops: What the host did, in order.
        ran: What the streams did, in the order in which it ended.
        seconds: Of the step.
        compute_s: What the compute stream was busy for.
        memory: (kind, time in seconds, change in bytes), in no order.
    """

    ops: list[Op]
    ran: list[Ran]
    seconds: float
    memory: list[tuple[str, float, int]]

    @property
    def compute_s(self) -> float:
        """Seconds for which the compute stream was busy."""
        return sum(one.stop_s - one.start_s for one in self.ran if one.stream == COMPUTE)

    @property
    def exposed_s(self) -> float:
        """Seconds for which the compute stream waited for communication."""
        return self.seconds - self.compute_s

    def trace(self, name: str) -> TraceFile:
        """Draw the step as a recorded one is drawn."""
        rows = [COMPUTE, "gather", "reduce"]
        slices = [
            Slice(one.stream, one.label, _ns(one.start_s), _ns(one.stop_s))
            for one in self.ran
            if one.stop_s > one.start_s
        ]
        samples = count((kind, _ns(time_s), change) for kind, time_s, change in self.memory)
        return TraceFile(name, rows, slices, samples)

    def peak_bytes(self) -> int:
        """Return the most that all kinds of memory came to at one time."""
        changes = [("all", _ns(time_s), change) for _, time_s, change in self.memory]
        return max((sample.value for sample in count(changes)), default=0)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def simulate(
    pieces: Sequence[PieceCost],
    units: Sequence[UnitCost],
    policy: Policy,
    *,
    norm: Phase,
    micro_batches: int = 1,
) -> Step:
    """Simulate one step, after those from which the runtime learns its order.

    Args:
        pieces: The model, in the order of its forward.
        units: Its units, the root first.
        policy: How they are sharded.
        norm: The all-reduce of the squared norm, where gradients are clipped.
        micro_batches: Forwards and backwards of a step.
    """
    ops = settled([cost.piece for cost in pieces], policy, micro_batches)
    device = _Device(pieces, units, norm)
    for op in ops:
        device.queue(op)
    seconds = device.engine.run()
    return Step(ops, device.engine.ran, seconds, device.memory())


class _Device:
    """Queues what the host does on the streams that the runtime uses for it."""

    def __init__(self, pieces: Sequence[PieceCost], units: Sequence[UnitCost], norm: Phase) -> None:
        self.engine = Engine(marks={_START: 0.0})
        self._pieces = pieces
        self._units = units
        self._norm = norm
        self._gathered: dict[int, int] = {}  # marks, by unit
        self._reduced: dict[int, int] = {}
        self._changes: list[tuple[str, int, int]] = []  # kind, mark, bytes
        self._with_grads: set[int] = set()
        self._packed: set[int] = set()

    def queue(self, op: Op) -> None:
        """Queue one thing that the host does."""
        unit = self._units[op.unit]
        match op.verb:
            case "gather":
                self._gather(op.unit, unit)
            case "wait":
                if op.unit in self._gathered:
                    self.engine.wait(COMPUTE, self._gathered[op.unit])
            case "free":
                if op.unit not in self._gathered:  # kept from the step before
                    self._changes.append(("full_params", _START, unit.full_bytes))
                self._hold("full_params", COMPUTE, -unit.full_bytes)
            case "forward" | "backward":
                self._run(op, unit)
            case "pack":
                if op.unit not in self._packed:
                    self._packed.add(op.unit)
                    self._hold("full_grads", COMPUTE, unit.grads_bytes)
                self.engine.compute(label("pack", unit.name, 0), unit.pack_s)
            case "reduce":
                self._reduce(op.unit, unit)
            case "finish":
                self._finish(op.unit, unit)
            case "norm":
                self._collective("gather", label("norm", ""), self._norm)
            case "step":
                self.engine.compute(label("step", unit.name, 0), unit.step_s)
                if op.unit in self._with_grads:
                    self._hold("shard_grads", COMPUTE, -unit.shard_grads_bytes)

    def memory(self) -> list[tuple[str, float, int]]:
        """Return when how many bytes of which kind were taken and let go, after the run."""
        return [(kind, self.engine.marks[mark], change) for kind, mark, change in self._changes]

    def _hold(self, kind: str, stream: str, change: int) -> None:
        self._changes.append((kind, self.engine.mark(stream), change))

    def _start(self, stream: str) -> None:
        """Let a stream's next collective wait for what is queued on the compute stream by now."""
        self.engine.wait(stream, self.engine.mark(COMPUTE))

    def _gather(self, index: int, unit: UnitCost) -> None:
        self._start("gather")
        self._hold("full_params", "gather", unit.full_bytes)
        self.engine.transfer("gather", label("gather", unit.name, 0), unit.gather)
        self._gathered[index] = self.engine.mark("gather")

    def _collective(self, stream: str, name: str, phase: Phase) -> None:
        """Queue a collective that is waited for at once."""
        self._start(stream)
        self.engine.transfer(stream, name, phase)
        self.engine.wait(COMPUTE, self.engine.mark(stream))

    def _run(self, op: Op, unit: UnitCost) -> None:
        cost = self._pieces[op.piece]
        seconds = cost.forward_s if op.verb == "forward" else cost.backward_s
        forward = op.verb == "forward"
        self._hold("activations", COMPUTE, cost.saved_bytes if forward else cost.again_bytes)
        self.engine.compute(label(op.verb, unit.name), seconds)
        if not forward:
            self._hold("activations", COMPUTE, -cost.saved_bytes - cost.again_bytes)

    def _reduce(self, index: int, unit: UnitCost) -> None:
        self._start("reduce")
        if index not in self._with_grads:
            self._with_grads.add(index)
            self._hold("shard_grads", "reduce", unit.shard_grads_bytes)
        self.engine.transfer("reduce", label("reduce", unit.name, 0), unit.reduce)
        self._reduced[index] = self.engine.mark("reduce")

    def _finish(self, index: int, unit: UnitCost) -> None:
        self.engine.wait(COMPUTE, self._reduced[index])
        if unit.across is not None:
            self._collective("replicas", label("reduce", unit.name, 0), unit.across)
        self._packed.remove(index)
        self._hold("full_grads", COMPUTE, -unit.grads_bytes)
