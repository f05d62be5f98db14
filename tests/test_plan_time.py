# SPDX-License-Identifier: Apache-2.0
"""Simulated steps against what can be said in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fsdp_kernels.plan.engine import Engine, Ran
from fsdp_kernels.plan.network import Algorithm, Group, Link, Network, Phase, place
from fsdp_kernels.plan.timing import (
    Machine,
    Mesh,
    Timing,
    UnitWork,
    Workload,
    calibrated,
    time_step,
)

FAST = Link(math.inf, 0.0)
INSIDE, BETWEEN = Link(300e9, 3e-6), Link(50e9, 14e-6)
NETWORK = Network(INSIDE, BETWEEN)
NOTHING = Phase("inside", 0.0, 0.0)
TABLE, LAYER = 32000 * 4096, 210_000_000
MODEL = (
    UnitWork("", 2 * TABLE, TABLE),
    *(UnitWork(f"layers.{i}", LAYER, LAYER, 4096) for i in range(32)),
)
WORK = Workload(MODEL, batch=1, sequence=4096)


def machine(network: Network = NETWORK, memory: float = 3e12) -> Machine:
    return Machine(1e15, memory, network, efficiency=0.5)


# -- collectives ----------------------------------------------------------------------------------


def test_a_ring_inside_a_node() -> None:
    """(N-1)/N of the bytes over one link, and N-1 latencies."""
    for ranks in (2, 4, 8):
        phase = NETWORK.gather(8 << 30, Group(ranks))
        assert phase.where == "inside"
        assert phase.transfer_s == pytest.approx((ranks - 1) / ranks * (8 << 30) / 300e9)
        assert phase.latency_s == pytest.approx((ranks - 1) * 3e-6)
    assert NETWORK.gather(8 << 30, Group(1)) == NOTHING
    assert NETWORK.gather(0, Group(8)) == NOTHING


def test_a_ring_over_nodes_is_bound_by_its_slowest_link() -> None:
    nbytes = 1 << 30
    slow = Network(INSIDE, Link(25e9, 14e-6)).gather(nbytes, Group(8, 4))
    assert slow.where == "between"  # 8 x 25 GB/s leave a node, a rank has 300 GB/s inside
    assert slow.transfer_s == pytest.approx(31 / 32 * nbytes / 200e9)
    assert slow.latency_s == pytest.approx(3 * 14e-6 + 28 * 3e-6)
    fast = NETWORK.gather(nbytes, Group(8, 4))
    assert fast.where == "inside"
    assert fast.transfer_s == pytest.approx(31 / 32 * nbytes / 300e9)
    alone = NETWORK.gather(nbytes, Group(1, 4))
    assert alone == Phase("between", 3 * 14e-6, pytest.approx(3 / 4 * nbytes / 50e9))


@pytest.mark.parametrize(
    ("algorithm", "latencies"),
    [("ring", 2 * (15 * 14 + 112 * 3)), ("tree", 2 * (4 * 14 + 7 * 3)), ("auto", 154)],
)
def test_an_all_reduce_is_a_scatter_and_a_gather(algorithm: Algorithm, latencies: float) -> None:
    group = Group(8, 16)
    network = replace(NETWORK, algorithm=algorithm)
    phase = network.all_reduce(1 << 30, group)
    assert phase.transfer_s == pytest.approx(2 * network.gather(1 << 30, group).transfer_s)
    assert phase.latency_s == pytest.approx(latencies * 1e-6)


@pytest.mark.parametrize(
    ("world", "shard", "groups"),
    [
        (64, 64, (Group(8, 8), Group(1, 1))),
        (64, 8, (Group(8, 1), Group(1, 8))),
        (64, 16, (Group(8, 2), Group(1, 4))),
        (64, 2, (Group(2, 1), Group(4, 8))),
        (64, 1, (Group(1, 1), Group(8, 8))),
        (4, 4, (Group(4, 1), Group(1, 1))),
        (12, 12, (Group(6, 2), Group(1, 1))),
        (20, 20, (Group(5, 4), Group(1, 1))),
    ],
)
def test_where_the_ranks_of_a_mesh_are(world: int, shard: int, groups: tuple[Group, Group]) -> None:
    assert place(world, shard, 8) == groups


@pytest.mark.parametrize(("world", "shard"), [(64, 48), (13, 13), (48, 3)])
def test_meshes_that_do_not_fit_nodes_are_refused(world: int, shard: int) -> None:
    with pytest.raises(ValueError, match=r"^mesh: expected .* divide"):
        place(world, shard, 8)


# -- streams --------------------------------------------------------------------------------------


def test_transfers_share_their_links_and_nothing_else() -> None:
    engine = Engine()
    engine.transfer("a", "first", Phase("inside", 1.0, 4.0))
    engine.transfer("b", "second", Phase("inside", 3.0, 2.0))
    engine.transfer("c", "elsewhere", Phase("between", 0.0, 5.0))
    engine.compute("work", 9.5)
    # The first is alone from 1 to 3, then both halve the link: 2 left each, until 7.
    assert engine.run() == 9.5
    assert sorted(engine.ran, key=lambda ran: ran.stream) == [
        Ran("a", "first", 0.0, 7.0),
        Ran("b", "second", 0.0, 7.0),
        Ran("c", "elsewhere", 0.0, 5.0),
        Ran("compute", "work", 0.0, 9.5),
    ]


def test_streams_wait_for_marks() -> None:
    engine = Engine()
    engine.compute("a", 2.0)
    mark = engine.mark("compute")
    engine.compute("b", 3.0)
    engine.wait("gather", mark)
    engine.transfer("gather", "c", Phase("inside", 0.0, 4.0))
    engine.wait("compute", engine.mark("gather"))
    engine.compute("d", 1.0)
    assert engine.run() == 7.0
    assert engine.marks[mark] == 2.0


def test_streams_that_wait_for_ever_are_a_fault() -> None:
    engine = Engine()
    engine.wait("compute", 99)
    with pytest.raises(RuntimeError, match="compute waiting for marks that nobody reaches"):
        engine.run()


# -- steps ----------------------------------------------------------------------------------------


def compute_s(workload: Workload, machine: Machine, shard: int) -> float:
    """Operations and bytes of a step over what the machine does in a second."""
    params = sum(unit.params for unit in workload.units)
    pack = params * (workload.compute_bytes + workload.reduce_bytes) * workload.micro_batches
    step = sum(math.ceil(unit.params / shard) for unit in workload.units) * 30
    flops = workload.all_flops() / (machine.peak_flops * machine.efficiency)
    return flops + (pack + step) / (0.8 * machine.memory_bytes_per_s)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "replicate"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_alone_a_step_is_its_computation(strategy: str, micro_batches: int) -> None:
    workload = replace(WORK, micro_batches=micro_batches, recompute=1.0)
    found = time_step(workload, machine(), Mesh(1, 1, strategy))
    assert found.step.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert found.step.seconds == pytest.approx(compute_s(workload, machine(), 1))


@pytest.mark.parametrize("mesh", [Mesh(64, 64, prefetch=0), Mesh(64, 8), Mesh(64, 1, "replicate")])
def test_over_a_network_without_limits_a_step_is_its_computation(mesh: Mesh) -> None:
    free = machine(Network(FAST, FAST))
    found = time_step(WORK, free, mesh)
    assert found.step.seconds == pytest.approx(compute_s(WORK, free, mesh.shard))


def test_one_unit_hides_nothing() -> None:
    work = replace(WORK, units=(UnitWork("", 10**9, 10**9),))
    found = time_step(work, machine(), Mesh(16, 16))
    group = Group(8, 2)
    gather, reduce = NETWORK.gather(2 * 10**9, group), NETWORK.gather(4 * 10**9, group)
    norm = NETWORK.all_reduce(8, group)
    phases = (gather, reduce, norm)
    exposed = sum(phase.latency_s + phase.transfer_s for phase in phases)
    assert found.step.exposed_s == pytest.approx(exposed)


def gathers(found: Timing, phase_of: dict[int, Phase]) -> float:
    """Seconds of all gathers of a step, one after another."""
    ops = [op for op in found.step.ops if op.verb == "gather"]
    return sum(phase_of[op.unit].latency_s + phase_of[op.unit].transfer_s for op in ops)


def phases(group: Group, width: int = 2) -> dict[int, Phase]:
    units = enumerate(MODEL)
    return {index: NETWORK.gather(unit.params * width, group) for index, unit in units}


def test_without_prefetch_every_gather_is_waited_for() -> None:
    """Reductions take no time here, so that nothing else is waited for."""
    work = replace(WORK, reduce_bytes=0)
    found = time_step(work, machine(), Mesh(32, 32, prefetch=0, clips=False))
    assert sum(op.verb == "gather" for op in found.step.ops) == 33 + 31
    assert found.step.exposed_s == pytest.approx(gathers(found, phases(Group(8, 4))))


def test_with_prefetch_the_first_gathers_alone_are_waited_for() -> None:
    work = replace(WORK, reduce_bytes=0, batch=4)
    found = time_step(work, machine(), Mesh(32, 32, prefetch=1, clips=False))
    each = phases(Group(8, 4))
    first = [each[0], each[1]]  # the root's table takes no time to look up
    exposed = sum(phase.latency_s + phase.transfer_s for phase in first)
    assert found.step.exposed_s == pytest.approx(exposed)


def test_where_the_network_is_the_limit_a_forward_lasts_as_long_as_its_gathers() -> None:
    """The last unit's own computation follows its gather, and so does the head's."""
    slow = machine(Network(Link(3e9, 0.0), Link(1e9, 0.0)))
    work = replace(WORK, reduce_bytes=0)
    found = time_step(work, slow, Mesh(8, 8, clips=False))
    backward = min(r.start_s for r in found.step.ran if r.label == "fk.backward[root]")
    nbytes = 2 * sum(unit.params for unit in MODEL)
    layer, head = (work.forward_flops(MODEL[i]) / 0.5e15 for i in (1, 0))
    assert backward == pytest.approx(7 / 8 * nbytes / 3e9 + layer + head)


def test_the_sum_across_replicas_is_waited_for() -> None:
    """As the runtime is: it begins when the reduction inside the shard group is waited for."""
    network = Network(FAST, BETWEEN)
    found = time_step(WORK, machine(network), Mesh(64, 8))
    across = [network.all_reduce(math.ceil(unit.params / 8) * 4, Group(1, 8)) for unit in MODEL]
    exposed = sum(phase.latency_s + phase.transfer_s for phase in across)
    assert found.step.exposed_s == pytest.approx(exposed)
    rows = found.step.trace("").all_rows()
    assert rows == ["compute", "gather", "reduce", "replicas"]


def test_memory_of_a_simulated_step() -> None:
    units = tuple(replace(unit, saved_bytes=10**6 if unit.name else 0) for unit in MODEL)
    found = time_step(replace(WORK, units=units, batch=4), machine(), Mesh(32, 32, prefetch=2))
    trace = found.step.trace("step")
    trace.check()
    peaks: dict[str, int] = {}
    rest: dict[str, int] = {}
    for sample in trace.samples:
        peaks[sample.counter] = max(peaks.get(sample.counter, 0), sample.value)
        rest[sample.counter] = sample.value
    root, layer = MODEL[0].params, MODEL[1].params
    assert set(rest.values()) == {0}
    assert peaks["full_params"] == 2 * (root + 3 * layer)
    assert peaks["full_grads"] == 4 * max(root, layer)
    assert peaks["activations"] == 32 * 10**6
    assert peaks["shard_grads"] == 4 * sum(math.ceil(unit.params / 32) for unit in MODEL)
    assert max(peaks.values()) < found.step.peak_bytes() <= sum(peaks.values())


def test_kept_parameters_are_held_until_they_are_stale() -> None:
    found = time_step(WORK, machine(), Mesh(8, 8, "zero2"))
    samples = [s for s in found.step.trace("").samples if s.counter == "full_params"]
    whole = 2 * sum(unit.params for unit in MODEL)
    assert samples[-1].value == whole
    assert max(sample.value for sample in samples) == whole


def test_utilisation() -> None:
    """Bound by computation alone, utilisation is the efficiency; what is recomputed is not."""
    free = machine(Network(FAST, FAST), memory=math.inf)
    work = replace(WORK, recompute=1.0)
    found = time_step(work, free, Mesh(512, 512))
    assert found.hfu == pytest.approx(0.5)
    assert found.mfu == pytest.approx(0.375)
    forward = 2 * (32 * LAYER + TABLE) + 4 * 4096 * 4096 * 32
    assert work.model_flops() == pytest.approx(3 * 4096 * forward, rel=1e-6)
    assert found.tokens_per_s == pytest.approx(0.5e15 / (4 * forward), rel=1e-6)


def test_sharding_inside_nodes_hides_what_one_ring_over_all_cannot() -> None:
    """At 16,384 ranks the latencies of one ring exceed a layer's computation."""
    flat = time_step(WORK, machine(), Mesh(16384, 16384))
    hybrid = time_step(WORK, machine(), Mesh(16384, 8))
    small = time_step(WORK, machine(), Mesh(64, 64))
    assert small.mfu > 0.45
    assert flat.mfu < 0.1
    assert hybrid.mfu > 2 * flat.mfu


def test_a_measured_speed_is_what_one_device_then_has() -> None:
    found = calibrated(machine(), WORK, 9000.0)
    assert time_step(WORK, found, Mesh(1, 1)).tokens_per_s == pytest.approx(9000.0)
    for speed in (0.0, -1.0, 1e6):
        with pytest.raises(ValueError, match="--measured: expected above 0 and up to"):
            calibrated(machine(), WORK, speed)


@pytest.mark.parametrize("efficiency", [0.0, 1.5])
def test_impossible_efficiencies_are_refused(efficiency: float) -> None:
    with pytest.raises(ValueError, match="--efficiency: expected a share above 0 and up to 1"):
        Machine(1e15, 3e12, NETWORK, efficiency)
    with pytest.raises(ValueError, match="link: expected a bandwidth above 0"):
        Link(0.0, 1e-6)
