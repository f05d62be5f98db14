# SPDX-License-Identifier: Apache-2.0
"""The house rules that imports can show: layers, one home for collectives and for compiled modules.

A file imports only from layers below its own; `docs/design.md` describes the layers. Imports under
`if TYPE_CHECKING` are free: they do not exist when the program runs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("fsdp_kernels", "triton_ops")

LAYERS: dict[int, tuple[str, ...]] = {
    0: (
        "triton_ops._common",
        "triton_ops._fragments",
        "triton_ops._peers",
        "triton_ops.reference",
        "fsdp_kernels._ext",
        "fsdp_kernels._nvml",
        "fsdp_kernels._version",
        "fsdp_kernels.layout",
        "fsdp_kernels.schedule",
        "fsdp_kernels.strategy",
        "fsdp_kernels.streams",
        "fsdp_kernels.timeline",
        "fsdp_kernels.trace",
        "fsdp_kernels.trace_file",
        "fsdp_kernels.trace_picture",
    ),
    1: (
        "triton_ops",
        "triton_ops._cast",
        "triton_ops._multicast",
        "triton_ops.adam",
        "triton_ops.norm",
        "triton_ops.pack",
        "triton_ops.reduce",
        "triton_ops.reduce_adam",
        "fsdp_kernels._environment",
        "fsdp_kernels.accesses",
        "fsdp_kernels.comm",
        "fsdp_kernels.comm._arena",
        "fsdp_kernels.comm._arena_setup",
        "fsdp_kernels.comm._checks",
        "fsdp_kernels.comm._group_ticket",
        "fsdp_kernels.comm._groups",
        "fsdp_kernels.comm._nccl_end",
        "fsdp_kernels.comm._grad_buckets",
        "fsdp_kernels.comm._grid",
        "fsdp_kernels.comm._nccl_memory",
        "fsdp_kernels.comm._nccl_setup",
        "fsdp_kernels.comm._nccl_ticket",
        "fsdp_kernels.comm._peer_grads",
        "fsdp_kernels.comm._peer_log",
        "fsdp_kernels.comm._peer_setup",
        "fsdp_kernels.comm._peer_ticket",
        "fsdp_kernels.comm.base",
        "fsdp_kernels.comm.hybrid",
        "fsdp_kernels.comm.nccl",
        "fsdp_kernels.comm.peer",
        "fsdp_kernels.comm.pick",
        "fsdp_kernels.comm.process_group",
        "fsdp_kernels.comm.shared_memory",
        "fsdp_kernels.comm.solo",
        "fsdp_kernels.ops",
    ),
    2: (
        "fsdp_kernels._checkpoint_io",
        "fsdp_kernels.bucket",
        "fsdp_kernels.bucket_shards",
        "fsdp_kernels.flat_ops",
        "fsdp_kernels.flat_shard",
        "fsdp_kernels.grads",
        "fsdp_kernels.leaves",
        "fsdp_kernels.pool",
        "fsdp_kernels.shard_grads",
    ),
    3: (
        "fsdp_kernels._adam_load",
        "fsdp_kernels._adam_norm",
        "fsdp_kernels._adam_overlap",
        "fsdp_kernels._adam_plan",
        "fsdp_kernels._adam_state",
        "fsdp_kernels.rounds",
        "fsdp_kernels.saved_tensors",
        "fsdp_kernels.stepping",
        "fsdp_kernels.unit",
    ),
    4: (
        "fsdp_kernels._sharded_adam",
        "fsdp_kernels._unit_plan",
        "fsdp_kernels._alike",
        "fsdp_kernels._wrap",
        "fsdp_kernels.backward",
        "fsdp_kernels.gathers",
        "fsdp_kernels.reductions",
        "fsdp_kernels.runtime",
    ),
    5: (
        "fsdp_kernels._full_state",
        "fsdp_kernels._optim_names",
        "fsdp_kernels.full_params",
        "fsdp_kernels.optim",
        "fsdp_kernels.shard",
    ),
    6: (
        "fsdp_kernels._benches",
        "fsdp_kernels.checkpoint",
        "fsdp_kernels.cli",
        "fsdp_kernels.plan",
        "fsdp_kernels.plan.argument_types",
        "fsdp_kernels.plan.buffers",
        "fsdp_kernels.plan.command",
        "fsdp_kernels.plan.devices",
        "fsdp_kernels.plan.engine",
        "fsdp_kernels.plan.formulas",
        "fsdp_kernels.plan.job",
        "fsdp_kernels.plan.memory",
        "fsdp_kernels.plan.model",
        "fsdp_kernels.plan.network",
        "fsdp_kernels.plan.options",
        "fsdp_kernels.plan.plot",
        "fsdp_kernels.plan.program",
        "fsdp_kernels.plan.saved",
        "fsdp_kernels.plan.sharded",
        "fsdp_kernels.plan.simulate",
        "fsdp_kernels.plan.sizes",
        "fsdp_kernels.plan.sources",
        "fsdp_kernels.plan.table",
        "fsdp_kernels.plan.time_command",
        "fsdp_kernels.plan.time_plot",
        "fsdp_kernels.plan.timed_job",
        "fsdp_kernels.plan.timing",
        "fsdp_kernels.plan.transformer",
        "fsdp_kernels.plan.widths",
    ),
    7: (
        "fsdp_kernels",
        "fsdp_kernels.__main__",
    ),
}

SAME_LAYER: dict[str, tuple[str, ...]] = {
    "fsdp_kernels.streams": ("fsdp_kernels.trace",),
    "fsdp_kernels.trace": ("fsdp_kernels.timeline",),
    "fsdp_kernels.timeline": ("fsdp_kernels.trace_file",),
    "fsdp_kernels.trace_picture": ("fsdp_kernels.trace_file",),
    # Helpers of one file, split off so that both stay readable; never the other way round.
    "triton_ops._common": ("triton_ops._fragments",),
    "triton_ops._peers": ("triton_ops._common", "triton_ops._fragments"),
    "triton_ops.reference": ("triton_ops._common", "triton_ops._fragments", "triton_ops._peers"),
    "triton_ops.adam": ("triton_ops._cast",),
    "triton_ops.norm": ("triton_ops._cast",),
    "triton_ops.pack": ("triton_ops._cast",),
    "triton_ops.reduce": ("triton_ops._cast", "triton_ops._multicast", "triton_ops.norm"),
    "triton_ops.reduce_adam": ("triton_ops._cast", "triton_ops.adam", "triton_ops.reduce"),
    "fsdp_kernels.grads": ("fsdp_kernels.pool", "fsdp_kernels.shard_grads"),
    "fsdp_kernels.shard_grads": ("fsdp_kernels.flat_shard",),
    "fsdp_kernels.leaves": ("fsdp_kernels.flat_shard",),
    "fsdp_kernels.bucket_shards": ("fsdp_kernels.pool",),
    "fsdp_kernels.bucket": (
        "fsdp_kernels.bucket_shards",
        "fsdp_kernels.flat_shard",
        "fsdp_kernels.grads",
        "fsdp_kernels.leaves",
        "fsdp_kernels.leaves",
        "fsdp_kernels.pool",
    ),
    "fsdp_kernels._adam_norm": ("fsdp_kernels._adam_plan",),
    "fsdp_kernels.rounds": ("fsdp_kernels.unit",),
    "fsdp_kernels.stepping": ("fsdp_kernels.rounds", "fsdp_kernels.unit"),
    "fsdp_kernels._wrap": ("fsdp_kernels._alike", "fsdp_kernels._unit_plan"),
    "fsdp_kernels.gathers": ("fsdp_kernels.reductions",),
    "fsdp_kernels.backward": ("fsdp_kernels.gathers", "fsdp_kernels.reductions"),
    "fsdp_kernels.runtime": (
        "fsdp_kernels.backward",
        "fsdp_kernels.gathers",
        "fsdp_kernels.reductions",
    ),
    "fsdp_kernels.shard": ("fsdp_kernels.full_params",),
    "fsdp_kernels.plan.engine": ("fsdp_kernels.plan.network",),
    "fsdp_kernels.plan.simulate": (
        "fsdp_kernels.plan.engine",
        "fsdp_kernels.plan.network",
        "fsdp_kernels.plan.program",
    ),
    "fsdp_kernels.plan.argument_types": ("fsdp_kernels.plan.job", "fsdp_kernels.plan.sizes"),
    "fsdp_kernels.plan.time_command": (
        "fsdp_kernels.plan",
        "fsdp_kernels.plan.argument_types",
        "fsdp_kernels.plan.devices",
        "fsdp_kernels.plan.job",
        "fsdp_kernels.plan.network",
        "fsdp_kernels.plan.sizes",
        "fsdp_kernels.plan.time_plot",
        "fsdp_kernels.plan.timed_job",
        "fsdp_kernels.plan.timing",
    ),
    "fsdp_kernels.plan.timed_job": ("fsdp_kernels.plan.job", "fsdp_kernels.plan.timing"),
    "fsdp_kernels.plan.time_plot": ("fsdp_kernels.plan.timing",),
    "fsdp_kernels.plan.timing": (
        "fsdp_kernels.plan.network",
        "fsdp_kernels.plan.program",
        "fsdp_kernels.plan.simulate",
    ),
    "fsdp_kernels.cli": (
        "fsdp_kernels._benches",
        "fsdp_kernels.plan",
        "fsdp_kernels.plan.command",
    ),
    "fsdp_kernels.plan.command": (
        "fsdp_kernels.plan",
        "fsdp_kernels.plan.job",
        "fsdp_kernels.plan.memory",
        "fsdp_kernels.plan.options",
        "fsdp_kernels.plan.plot",
        "fsdp_kernels.plan.table",
        "fsdp_kernels.plan.time_command",
    ),
    "fsdp_kernels.plan.buffers": ("fsdp_kernels.plan.program",),
    "fsdp_kernels.plan.formulas": ("fsdp_kernels.plan.job", "fsdp_kernels.plan.sizes"),
    "fsdp_kernels.plan.memory": (
        "fsdp_kernels.plan.buffers",
        "fsdp_kernels.plan.formulas",
        "fsdp_kernels.plan.job",
        "fsdp_kernels.plan.program",
        "fsdp_kernels.plan.sizes",
    ),
    "fsdp_kernels.plan.model": (
        "fsdp_kernels.plan",
        "fsdp_kernels.plan.job",
        "fsdp_kernels.plan.saved",
        "fsdp_kernels.plan.sources",
        "fsdp_kernels.plan.widths",
    ),
    "fsdp_kernels.plan.plot": ("fsdp_kernels.plan.memory",),
    "fsdp_kernels.plan.sharded": (
        "fsdp_kernels.plan.job",
        "fsdp_kernels.plan.memory",
        "fsdp_kernels.plan.model",
    ),
    "fsdp_kernels.plan.options": (
        "fsdp_kernels.plan",
        "fsdp_kernels.plan.argument_types",
        "fsdp_kernels.plan.devices",
        "fsdp_kernels.plan.job",
        "fsdp_kernels.plan.model",
        "fsdp_kernels.plan.sizes",
        "fsdp_kernels.plan.sources",
        "fsdp_kernels.plan.transformer",
        "fsdp_kernels.plan.widths",
    ),
    "fsdp_kernels.plan.table": (
        "fsdp_kernels.plan.formulas",
        "fsdp_kernels.plan.job",
        "fsdp_kernels.plan.memory",
        "fsdp_kernels.plan.sizes",
    ),
    "fsdp_kernels.plan.transformer": ("fsdp_kernels.plan.job", "fsdp_kernels.plan.sizes"),
    "fsdp_kernels.plan.widths": ("fsdp_kernels.plan.job", "fsdp_kernels.plan.sizes"),
    # Backends share the protocol and its checks.
    "fsdp_kernels.comm": (
        "fsdp_kernels.comm._nccl_setup",
        "fsdp_kernels.comm.base",
        "fsdp_kernels.comm.hybrid",
        "fsdp_kernels.comm.nccl",
        "fsdp_kernels.comm.process_group",
        "fsdp_kernels.comm.shared_memory",
    ),
    "fsdp_kernels.comm._nccl_end": ("fsdp_kernels.comm._groups",),
    "fsdp_kernels.comm._nccl_setup": ("fsdp_kernels.comm._groups",),
    "fsdp_kernels.comm._group_ticket": ("fsdp_kernels.comm.base",),
    "fsdp_kernels.comm._nccl_memory": (
        "fsdp_kernels.comm._nccl_end",
        "fsdp_kernels.comm._nccl_setup",
    ),
    "fsdp_kernels.comm._nccl_ticket": ("fsdp_kernels.comm.base",),
    "fsdp_kernels.comm.nccl": (
        "fsdp_kernels.comm._checks",
        "fsdp_kernels.comm._nccl_end",
        "fsdp_kernels.comm._nccl_memory",
        "fsdp_kernels.comm._nccl_setup",
        "fsdp_kernels.comm._nccl_ticket",
        "fsdp_kernels.comm.base",
    ),
    "fsdp_kernels.comm._grid": (
        "fsdp_kernels.comm._groups",
        "fsdp_kernels.comm.base",
        "fsdp_kernels.comm.hybrid",
        "fsdp_kernels.comm.pick",
        "fsdp_kernels.comm.solo",
    ),
    "fsdp_kernels.comm.hybrid": ("fsdp_kernels.comm.base",),
    "fsdp_kernels.comm.solo": ("fsdp_kernels.comm._checks", "fsdp_kernels.comm.base"),
    "fsdp_kernels.comm.pick": (
        "fsdp_kernels.comm._arena_setup",
        "fsdp_kernels.comm._peer_setup",
        "fsdp_kernels.comm.peer",
        "fsdp_kernels.comm.base",
        "fsdp_kernels.comm.nccl",
        "fsdp_kernels.comm.process_group",
        "fsdp_kernels.comm.shared_memory",
    ),
    "fsdp_kernels.comm.process_group": (
        "fsdp_kernels.comm._checks",
        "fsdp_kernels.comm._group_ticket",
        "fsdp_kernels.comm._groups",
        "fsdp_kernels.comm.base",
    ),
    "fsdp_kernels._environment": ("fsdp_kernels.comm.peer", "fsdp_kernels.comm.pick"),
    "fsdp_kernels.comm._peer_setup": (
        "fsdp_kernels.comm._arena_setup",
        "fsdp_kernels.comm._nccl_setup",
        "fsdp_kernels.ops",
    ),
    "fsdp_kernels.comm._peer_ticket": ("fsdp_kernels.comm._peer_log", "fsdp_kernels.comm.base"),
    "fsdp_kernels.comm._peer_grads": (
        "fsdp_kernels.comm._peer_log",
        "fsdp_kernels.comm._peer_setup",
        "fsdp_kernels.comm._peer_ticket",
        "fsdp_kernels.comm.base",
    ),
    "fsdp_kernels.comm.peer": (
        "fsdp_kernels.comm._arena_setup",
        "fsdp_kernels.comm._checks",
        "fsdp_kernels.comm._groups",
        "fsdp_kernels.comm._peer_grads",
        "fsdp_kernels.comm._peer_setup",
        "fsdp_kernels.comm.base",
        "fsdp_kernels.comm.nccl",
        "fsdp_kernels.comm.process_group",
    ),
    "fsdp_kernels.comm._arena": ("fsdp_kernels.comm._arena_setup",),
    "fsdp_kernels.comm._grad_buckets": (
        "fsdp_kernels.comm._arena",
        "fsdp_kernels.comm.base",
        "fsdp_kernels.ops",
    ),
    "fsdp_kernels.comm.shared_memory": (
        "fsdp_kernels.comm._arena",
        "fsdp_kernels.comm._arena_setup",
        "fsdp_kernels.comm._checks",
        "fsdp_kernels.comm._grad_buckets",
        "fsdp_kernels.comm.base",
        "fsdp_kernels.comm.process_group",
    ),
    # `ops` picks one of several implementations of each kernel, and loads only that one.
    "fsdp_kernels.ops": (
        "triton_ops.adam",
        "triton_ops.norm",
        "triton_ops.pack",
        "triton_ops.reduce",
        "triton_ops.reduce_adam",
    ),
    # The tensor and its table of operations need each other; the table is loaded at the first use.
    "fsdp_kernels.flat_ops": ("fsdp_kernels.flat_shard",),
    "fsdp_kernels.flat_shard": ("fsdp_kernels.flat_ops",),
}

LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}

COLLECTIVES = frozenset(
    (
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
        *("all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all"),
        *("all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"),
        *("broadcast_object_list", "gather", "gather_object", "irecv", "isend"),
        *("monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter"),
        *("reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
        *("send", "send_object_list"),
    )
)
DISTRIBUTED = "torch.distributed"
BEHIND_ITS_BACK = (
    "torch.distributed._functional_collectives",
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn",
    "torch.ops.c10d",
    "torch.ops._c10d_functional",
)


@dataclass(frozen=True)
class Import:
    """One import statement's target, with the names taken from it."""

    target: str
    names: tuple[str, ...]
    line: int


def module_name(path: Path) -> str:
    """Return the dotted name of a source file of this repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    """Return the source of every module of both packages."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {module_name(path): path.read_text() for path in paths}


def is_type_checking(node: ast.AST) -> bool:
    """Tell whether a node is an `if TYPE_CHECKING:` statement."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that exists at run time, so not what only type checkers see."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and is_type_checking(child):
            for statement in child.orelse:
                yield from walk(statement)
        else:
            yield from walk(child)


def imports(module: str, tree: ast.AST, *, package: bool = False) -> Iterator[Import]:
    """Yield the imports of a module, relative ones resolved, those in functions included."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            target = node.module or ""
            if node.level:
                up = node.level - (1 if package else 0)
                base = module.split(".")[: -up or None]
                target = ".".join([*base, target] if target else base)
            yield Import(target, tuple(alias.name for alias in node.names), node.lineno)


def own_targets(found: Import, known: frozenset[str]) -> Iterator[str]:
    """Yield the modules of the two packages that an import loads by name."""
    if found.target.split(".")[0] not in PACKAGES:
        return
    submodules = [name for name in found.names if f"{found.target}.{name}" in known]
    yield from (f"{found.target}.{name}" for name in submodules)
    if len(submodules) < len(found.names) or not found.names:
        yield found.target


def layer_violations(module: str, source: str, known: frozenset[str]) -> list[str]:
    """Return what a module imports that its layer may not."""
    if module not in LAYER_OF:
        return [f"{module}: expected a layer, got a file that LAYERS does not list"]
    wrong: list[str] = []
    package = any(name.startswith(f"{module}.") for name in known)
    for found in imports(module, ast.parse(source), package=package):
        for target in own_targets(found, known):
            where = f"{module}, line {found.line}: imports {target}"
            if module.startswith("triton_ops") and target.startswith("fsdp_kernels"):
                wrong.append(f"{where}: triton_ops knows nothing of fsdp_kernels")
            elif target not in LAYER_OF:
                if target in known or module != "fsdp_kernels._ext":
                    wrong.append(f"{where}: it has no layer (compiled modules: only in _ext.py)")
            elif LAYER_OF[target] > LAYER_OF[module]:
                wrong.append(f"{where}: layer {LAYER_OF[target]} from layer {LAYER_OF[module]}")
            elif (
                LAYER_OF[target] == LAYER_OF[module]
                and target != module
                and target not in SAME_LAYER.get(module, ())
            ):
                wrong.append(f"{where}: the same layer, and SAME_LAYER does not allow it")
    return wrong


def collective_violations(module: str, source: str) -> list[str]:
    """Return where a module outside `comm/` could call a collective of torch.distributed."""
    if module.startswith("fsdp_kernels.comm"):
        return []
    tree = ast.parse(source)
    aliases = {DISTRIBUTED: DISTRIBUTED, **dict.fromkeys(BEHIND_ITS_BACK, DISTRIBUTED)}
    wrong: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith(DISTRIBUTED):
                    aliases[alias.asname] = DISTRIBUTED
                if alias.name.startswith(BEHIND_ITS_BACK):
                    wrong.append(f"{module}, line {node.lineno}: imports {alias.name}")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name == DISTRIBUTED:
                    aliases[alias.asname or alias.name] = DISTRIBUTED
                if name.startswith(BEHIND_ITS_BACK) or (
                    node.module == DISTRIBUTED and alias.name in COLLECTIVES
                ):
                    wrong.append(f"{module}, line {node.lineno}: imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner in aliases and node.attr in COLLECTIVES) or (
                f"{owner}.{node.attr}".startswith(BEHIND_ITS_BACK)
            ):
                wrong.append(f"{module}, line {node.lineno}: uses {owner}.{node.attr}")
    return wrong


def loader_violations(module: str, source: str) -> list[str]:
    """Return where a module other than `_ext` loads code by a computed name or path."""
    if module == "fsdp_kernels._ext":
        return []
    wrong: list[str] = []
    for found in imports(module, ast.parse(source)):
        names = {f"{found.target}.{name}" for name in found.names} | {found.target}
        for name in names & {"ctypes", "importlib", "importlib.import_module", "importlib.util"}:
            if not (name == "importlib" and found.names):  # `from importlib import metadata`
                wrong.append(f"{module}, line {found.line}: imports {name}")
        wrong += [
            f"{module}, line {found.line}: imports {name}"
            for name in names
            if name in ("fsdp_kernels._cpu", "fsdp_kernels._nccl", "fsdp_kernels._cuda")
        ]
    return wrong


SOURCES = sources()
KNOWN = frozenset(SOURCES)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_keeps_the_house_rules(module: str) -> None:
    source = SOURCES[module]
    assert layer_violations(module, source, KNOWN) == []
    assert collective_violations(module, source) == []
    assert loader_violations(module, source) == []


def test_the_old_collective_names_stand_in_one_file() -> None:
    old = ("all_gather_into_tensor", "reduce_scatter_tensor")
    users = {module for module, source in SOURCES.items() if any(name in source for name in old)}
    assert users == {"fsdp_kernels.comm.process_group"}


def test_layout_is_pure() -> None:
    """Geometry is integers: standard library only."""
    for found in imports("fsdp_kernels.layout", ast.parse(SOURCES["fsdp_kernels.layout"])):
        assert found.target.split(".")[0] in sys.stdlib_module_names


def test_exceptions_are_of_one_layer_and_have_no_cycles_but_the_documented_one() -> None:
    for module, targets in SAME_LAYER.items():
        for target in targets:
            assert LAYER_OF[module] == LAYER_OF[target], f"{module} -> {target}"
            if {module, target} != {"fsdp_kernels.flat_ops", "fsdp_kernels.flat_shard"}:
                assert module not in SAME_LAYER.get(target, ()), f"{module} <-> {target}"


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("fsdp_kernels.layout", "from fsdp_kernels.unit import Unit", "layer 3 from layer 0"),
        ("fsdp_kernels.layout", "import fsdp_kernels.trace", "the same layer"),
        ("fsdp_kernels.layout", "from . import trace", "the same layer"),
        ("fsdp_kernels.trace", "def f():\n    from fsdp_kernels import comm", "layer 1 from"),
        ("fsdp_kernels.comm.base", "from ..unit import Unit", "layer 3 from layer 1"),
        ("fsdp_kernels.comm", "from .process_group import x\nfrom ..shard import y", "layer 5"),
        ("fsdp_kernels.shard", "from fsdp_kernels import __version__", "layer 7 from layer 5"),
        ("triton_ops.adam", "from fsdp_kernels.layout import Segment", "knows nothing"),
        ("fsdp_kernels.ops", "from fsdp_kernels import _cpu", "layer 7 from layer 1"),
        ("fsdp_kernels.ops", "import fsdp_kernels._cpu", "has no layer"),
        ("fsdp_kernels.new", "", "LAYERS does not list"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, message: str) -> None:
    known = KNOWN | LAYER_OF.keys()
    (violation,) = layer_violations(module, source, known)
    assert message in violation


def test_imports_for_type_checkers_are_free() -> None:
    source = "if TYPE_CHECKING:\n    from fsdp_kernels.runtime import Runtime\n"
    assert layer_violations("fsdp_kernels.bucket", source, KNOWN) == []
    source += "else:\n    from fsdp_kernels.runtime import Runtime\n"
    assert len(layer_violations("fsdp_kernels.bucket", source, KNOWN | LAYER_OF.keys())) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed\ndistributed.broadcast(x)",
        "from torch.distributed import all_gather_object",
        "from torch.distributed.distributed_c10d import all_gather",
        "import torch.distributed._functional_collectives as funcol",
        "import torch\ntorch.ops._c10d_functional.all_reduce(x)",
        "def f():\n    import torch.distributed as d\n    return d.reduce_scatter_single",
    ],
)
def test_a_collective_outside_comm_is_found(source: str) -> None:
    assert collective_violations("fsdp_kernels.runtime", source)
    assert not collective_violations("fsdp_kernels.comm.nccl", source)


def test_what_is_no_collective_of_torch_is_left_alone() -> None:
    source = "import torch.distributed as dist\ndist.get_rank()\ncomm.all_reduce(x)\nlist.reduce()"
    assert collective_violations("fsdp_kernels.runtime", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import ctypes",
        "import importlib",
        "from importlib import import_module",
        "from fsdp_kernels import _nccl",
        "import fsdp_kernels._cpu",
    ],
)
def test_a_loader_outside_ext_is_found(source: str) -> None:
    assert loader_violations("fsdp_kernels.ops", source)
    assert not loader_violations("fsdp_kernels._ext", source)
    assert loader_violations("fsdp_kernels.cli", "from importlib import metadata") == []


IMPORT_AND_LOOK = """
import os, sys, threading
import torch, torch.distributed
children = lambda: open(f"/proc/self/task/{os.getpid()}/children").read().split()
before = set(threading.enumerate()), children(), dict(os.environ), torch.get_num_threads()
import fsdp_kernels
after = set(threading.enumerate()), children(), dict(os.environ), torch.get_num_threads()
assert before == after, (before, after)
assert not torch.cuda.is_initialized(), "CUDA"
assert not torch.distributed.is_initialized(), "torch.distributed"
assert "fsdp_kernels._nccl" not in sys.modules, "the NCCL module"
"""


def test_importing_does_nothing_else() -> None:
    """No CUDA context, no process group, no process, no thread, no print, no changed setting."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LOOK], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""
