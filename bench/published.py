# SPDX-License-Identifier: Apache-2.0
"""What others have measured with torch's FSDP, beside what `fsdp-kernels plan --time` says.

    python bench/published.py    # prints the table of docs/time.md

Nothing is fitted: every row is simulated twice, with an efficiency of 0.5 of the peak for all, and
with one efficiency for each device, read off one row of one source (marked; its own error is small
by construction). Links are what the sources say (1,600 and 3,200 Gb/s a node of eight), and NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_kernels.plan import devices
from fsdp_kernels.plan.network import Link, Network
from fsdp_kernels.plan.time_command import BETWEEN_S, INSIDE_S, LINK_SHARE
from fsdp_kernels.plan.timing import Machine, Mesh, Timing, UnitWork, Workload, time_step

FOUNDRY = "LLM Foundry"
TITAN_A100 = "torchtitan, A100"
TITAN_H100 = "torchtitan, H100"
IBM = "IBM and Meta"

SAME = 0.5
READ_OFF = {"A100": 0.642, "H100": 0.464}
"""LLM Foundry's 7B on one node, without recomputation: what one GPU computes at, all in all."""


@dataclass(frozen=True)
class Model:
    """A decoder, by its published shape."""

    name: str
    params: int
    layers: int
    width: int
    vocabulary: int
    tied: bool = False

    def units(self) -> tuple[UnitWork, ...]:
        head = self.vocabulary * self.width
        tables = head if self.tied else 2 * head
        each = (self.params - tables) // self.layers
        blocks = (UnitWork(f"layers.{i}", each, each, self.width) for i in range(self.layers))
        return (UnitWork("", self.params - each * self.layers, head), *blocks)


MPT_3B = Model("MPT 3B", 2_651_837_440, 32, 2560, 50432, tied=True)
MPT_7B = Model("MPT 7B", 6_658_859_008, 32, 4096, 50432, tied=True)
MPT_13B = Model("MPT 13B", 12_853_954_560, 40, 5120, 50432, tied=True)
MPT_30B = Model("MPT 30B", 29_975_214_080, 48, 7168, 50432, tied=True)
MPT_70B = Model("MPT 70B", 64_862_437_376, 80, 8192, 50432, tied=True)
LLAMA2_7B = Model("Llama 2 7B", 6_738_415_616, 32, 4096, 32000)
LLAMA2_13B = Model("Llama 2 13B", 13_015_864_320, 40, 5120, 32000)
LLAMA2_70B = Model("Llama 2 70B", 68_976_648_192, 80, 8192, 32000)
LLAMA3_8B = Model("Llama 3 8B", 8_030_261_248, 32, 4096, 128256)
LLAMA3_70B = Model("Llama 3 70B", 70_553_706_496, 80, 8192, 128256)


@dataclass(frozen=True)
class Row:
    """One published measurement; `tokens` are per second and GPU."""

    source: str
    device: str
    world: int
    model: Model
    batch: int
    sequence: int
    micro_batches: int
    recompute: bool
    reduce_bytes: int
    tokens: int

    def simulate(self, efficiency: float) -> Timing:
        """Simulate ZeRO-3 over all GPUs, prefetch 1."""
        device = devices.find(self.device)
        network = Network(
            Link(device.nvlink_bytes_per_s * LINK_SHARE, INSIDE_S),
            Link(device.network_bytes_per_s * LINK_SHARE, BETWEEN_S),
        )
        machine = Machine(device.flops["bf16"], device.memory_bytes_per_s, network, efficiency)
        workload = Workload(
            self.model.units(),
            self.batch,
            self.sequence,
            self.micro_batches,
            float(self.recompute),
            reduce_bytes=self.reduce_bytes,
        )
        return time_step(workload, machine, Mesh(self.world, self.world))


ROWS = (
    Row(FOUNDRY, "A100", 8, MPT_7B, 6, 2048, 2, False, 2, 4641),
    Row(FOUNDRY, "A100", 8, MPT_13B, 2, 2048, 3, False, 2, 2262),
    Row(FOUNDRY, "A100", 8, MPT_30B, 3, 2048, 21, True, 2, 916),
    Row(FOUNDRY, "A100", 32, MPT_70B, 2, 2048, 16, True, 2, 373),
    Row(FOUNDRY, "A100", 64, MPT_70B, 8, 2048, 4, True, 2, 410),
    Row(FOUNDRY, "A100-40GB", 64, MPT_70B, 2, 2048, 1, True, 2, 276),
    Row(FOUNDRY, "A100-40GB", 128, MPT_70B, 4, 2048, 1, True, 2, 376),
    Row(FOUNDRY, "A100-40GB", 128, MPT_7B, 18, 2048, 1, True, 2, 3623),
    Row(FOUNDRY, "H100", 8, MPT_7B, 6, 2048, 1, False, 2, 10643),
    Row(FOUNDRY, "H100", 64, MPT_3B, 6, 2048, 3, False, 2, 22525),
    Row(FOUNDRY, "H100", 8, MPT_13B, 2, 2048, 1, False, 2, 4792),
    Row(FOUNDRY, "H100", 64, MPT_13B, 2, 2048, 1, False, 2, 4800),
    Row(FOUNDRY, "H100", 64, MPT_70B, 8, 2048, 4, True, 2, 1039),
    Row(TITAN_A100, "A100", 64, LLAMA2_13B, 2, 4096, 1, False, 4, 2162),
    Row(TITAN_A100, "A100", 64, LLAMA2_70B, 2, 4096, 1, True, 4, 353),
    Row(TITAN_A100, "A100", 64, LLAMA3_70B, 1, 8192, 1, True, 4, 331),
    Row(TITAN_H100, "H100", 8, LLAMA3_8B, 2, 8192, 1, False, 4, 6667),
    Row(TITAN_H100, "H100", 128, LLAMA3_8B, 2, 8192, 1, False, 4, 6514),
    Row(IBM, "A100", 128, LLAMA2_7B, 2, 4096, 1, False, 2, 3700),
)

SOURCE_OF_EFFICIENCY = (ROWS[0], ROWS[8])


def table() -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| source | GPUs | model | measured | 0.5 for all | error | by device | error | waiting |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in ROWS:
        same = row.simulate(SAME)
        own = row.simulate(READ_OFF[row.device.removesuffix("-40GB")])
        recompute = ", recomputed" if row.recompute else ""
        mark = " (read off)" if row in SOURCE_OF_EFFICIENCY else ""
        cells = [
            row.source + mark,
            f"{row.world} {row.device}",
            f"{row.model.name}, {row.batch} x {row.sequence}{recompute}",
            f"{row.tokens:,}",
            f"{same.tokens_per_s:,.0f}",
            f"{same.tokens_per_s / row.tokens - 1:+.0%}",
            f"{own.tokens_per_s:,.0f}",
            f"{own.tokens_per_s / row.tokens - 1:+.0%}",
            f"{own.step.exposed_s / own.step.seconds:.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
