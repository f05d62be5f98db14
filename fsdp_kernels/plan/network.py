# SPDX-License-Identifier: Apache-2.0
"""How long collectives take: a bandwidth and a latency for each hop, inside a node and between.

A ring sends each of N parts over N - 1 hops, one after another on every rank at once: (N-1)/N of
the bytes over a rank's link, and N - 1 latencies. Over several nodes, ranks are in node order, so a
part crosses between nodes once for each node but its own. The k ranks of a node cut the bytes into
k rings, each of which leaves the node over another rank's network link: what a node sends shares k
of them, while every rank's link inside the node carries it all. A tree sends the same bytes and
needs log2 of the nodes instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

Where = Literal["inside", "between"]
Algorithm = Literal["ring", "tree", "auto"]


@dataclass(frozen=True, slots=True)
class Link:
    """A rank's link, in one direction.

    Attributes:
        bytes_per_s: What a collective reaches on it.
        latency_s: Of one hop.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(
                f"link: expected a bandwidth above 0 and a latency from 0, got {self}. "
                "Give bytes per second of one rank in one direction, and seconds."
            )


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective: so many on each of so many nodes."""

    node_ranks: int
    nodes: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.node_ranks * self.nodes


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a collective that one kind of link bounds.

    Attributes:
        where: Which links.
        latency_s: Time that passes whatever else uses them.
        transfer_s: Time if nothing else uses them.
    """

    where: Where
    latency_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Network:
    """The links of the ranks.

    Attributes:
        inside: Between the ranks of a node.
        between: Of one rank, between nodes.
        node_ranks: Ranks of a full node.
        algorithm: "auto" takes a ring to gather and reduce-scatter, and the faster of both to
            all-reduce, as NCCL does.
    """

    inside: Link
    between: Link
    node_ranks: int = 8
    algorithm: Algorithm = "auto"

    def gather(self, nbytes: int, group: Group) -> Phase:
        """Return the time to gather, or to reduce-scatter, `nbytes` of full buffer."""
        if group.ranks == 1 or nbytes == 0:
            return Phase("inside", 0.0, 0.0)
        share = (group.ranks - 1) / group.ranks * nbytes
        tree = self.algorithm == "tree"
        inside_s = share / self.inside.bytes_per_s if group.node_ranks > 1 else 0.0
        if group.nodes == 1:
            return Phase("inside", self._latency(group, tree), inside_s)
        between_s = share / (group.node_ranks * self.between.bytes_per_s)
        where: Where = "between" if between_s >= inside_s else "inside"
        return Phase(where, self._latency(group, tree), max(inside_s, between_s))

    def all_reduce(self, nbytes: int, group: Group) -> Phase:
        """Return the time to sum `nbytes` into every rank's buffer: a scatter and a gather."""
        once = self.gather(nbytes, group)
        latencies = [2 * self._latency(group, tree) for tree in (False, True)]
        if group.ranks == 1 or nbytes == 0:
            return once
        latency = {"ring": latencies[0], "tree": latencies[1], "auto": min(latencies)}
        return Phase(once.where, latency[self.algorithm], 2 * once.transfer_s)

    def _latency(self, group: Group, tree: bool) -> float:
        between = ceil(log2(group.nodes)) if tree else group.nodes - 1
        # A part that crosses into a node visits its other ranks; a tree does so in one node only.
        inside = (group.node_ranks - 1) * (1 if tree else group.nodes)
        return between * self.between.latency_s + inside * self.inside.latency_s


def place(world: int, shard: int, node_ranks: int) -> tuple[Group, Group]:
    """Lay a mesh of replicas x shards over nodes, ranks of a shard group side by side.

    Args:
        world: All ranks.
        shard: Ranks of a shard group.
        node_ranks: Ranks of a full node.

    Returns:
        A shard group, and a group of the ranks that hold the same shard.

    Raises:
        ValueError: They do not divide one another.
    """
    if world % shard:
        raise ValueError(
            f"mesh: expected shard groups that divide {world} ranks, got groups of {shard}. "
            "Change --shard or --world."
        )
    return _spread(shard, 1, node_ranks), _spread(world // shard, shard, node_ranks)


def _spread(ranks: int, stride: int, node_ranks: int) -> Group:
    """Return the group of every `stride`-th rank, in as few nodes as share it evenly."""
    in_node = max(1, node_ranks // stride)
    fewest = -(-ranks // in_node)
    even = (nodes for nodes in range(fewest, 2 * fewest + 1) if ranks % nodes == 0)
    nodes = next(even, 0) if stride == 1 else fewest * (ranks % fewest == 0)
    if not nodes or (ranks > in_node and node_ranks % stride and stride % node_ranks):
        raise ValueError(
            f"mesh: expected groups that share nodes of up to {node_ranks} ranks evenly, got every "
            f"{stride}-th of {ranks * stride}. Choose sizes that divide one another."
        )
    return Group(ranks // nodes, nodes)
