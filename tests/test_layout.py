# SPDX-License-Identifier: Apache-2.0
"""Geometry: what must hold for every layout, whatever the sizes and the world."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_kernels.layout import (
    SEGMENT_ALIGN_BYTES,
    SHARD_ALIGN_BYTES,
    BucketLayout,
    Segment,
    group_parameters,
    rectangles,
)

# Zero, one, primes, powers of two and their neighbours: where alignment and division go wrong.
NUMELS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 129, 1021, 4096, 7919]),
    st.integers(0, 5000),
)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def build(numels: list[int], world: int, itemsize: int) -> BucketLayout:
    return BucketLayout.build(
        [f"p{i}" for i in range(len(numels))], numels, world=world, itemsize=itemsize
    )


@st.composite
def layouts(draw: st.DrawFn) -> BucketLayout:
    numels = draw(st.lists(NUMELS, max_size=8))
    return build(numels, draw(st.integers(1, 129)), draw(ITEMSIZES))


@given(layouts())
def test_segments_and_pads_cover_the_bucket_once(layout: BucketLayout) -> None:
    ranges = sorted([(s.start, s.stop) for s in layout.segments if s.numel] + list(layout.pads()))
    end = 0
    for start, stop in ranges:
        assert start == end, "a gap or an overlap"
        assert stop > start
        end = stop
    assert end == layout.full_numel
    assert layout.payload_numel + layout.padding_numel == layout.full_numel
    assert sum(stop - start for start, stop in layout.pads()) == layout.padding_numel


@given(layouts())
def test_segments_and_shards_are_aligned(layout: BucketLayout) -> None:
    for segment in layout.segments:
        assert segment.start * layout.itemsize % SEGMENT_ALIGN_BYTES == 0
    for rank in range(layout.world):
        start, stop = layout.shard_range(rank)
        assert stop - start == layout.shard_numel
        assert start * layout.itemsize % SHARD_ALIGN_BYTES == 0
        for fragment in layout.fragments(rank):
            if (
                fragment.numel
            ):  # what the Adam kernel walks: 128-bit loads from the fragment's start
                assert fragment.shard_start * layout.itemsize % SEGMENT_ALIGN_BYTES == 0


@given(layouts())
def test_padding_is_small(layout: BucketLayout) -> None:
    gaps = len(layout.segments) * (SEGMENT_ALIGN_BYTES - 1)
    shards = layout.world * SHARD_ALIGN_BYTES
    assert layout.padding_numel * layout.itemsize <= gaps + shards
    if not layout.payload_numel:
        assert layout.full_numel == 0


@given(layouts())
def test_fragments_round_trip(layout: BucketLayout) -> None:
    """Shards rebuild every parameter; fragments of all ranks tile it in rank order."""
    full: list[tuple[int, int] | None] = [None] * layout.full_numel
    for index, segment in enumerate(layout.segments):
        full[segment.start : segment.stop] = [(index, element) for element in range(segment.numel)]
    rebuilt: list[list[tuple[int, int] | None]] = [[] for _ in layout.segments]
    for rank in range(layout.world):
        start, stop = layout.shard_range(rank)
        shard = full[start:stop]
        fragments = layout.fragments(rank)
        assert [f.index for f in fragments] == list(range(len(layout.segments)))
        for fragment in fragments:
            assert fragment == layout.fragment(fragment.index, rank)
            assert 0 <= fragment.start <= fragment.stop <= layout.segments[fragment.index].numel
            assert 0 <= fragment.shard_start <= fragment.shard_stop <= layout.shard_numel
            assert fragment.shard_stop - fragment.shard_start == fragment.numel
            part = shard[fragment.shard_start : fragment.shard_stop]
            assert len(rebuilt[fragment.index]) == fragment.start or not fragment.numel
            rebuilt[fragment.index] += part
    for index, segment in enumerate(layout.segments):
        assert rebuilt[index] == [(index, element) for element in range(segment.numel)]


@given(st.lists(NUMELS, max_size=6), st.integers(1, 129), ITEMSIZES)
def test_wider_elements_are_aligned_too(numels: list[int], world: int, itemsize: int) -> None:
    layout = build(numels, world, itemsize)
    wider = BucketLayout(layout.segments, world, min(16, itemsize * 2), layout.shard_numel)
    assert wider.fragments(world - 1) == layout.fragments(world - 1)


def test_unit_smaller_than_the_world() -> None:
    layout = build([1, 0, 3], world=8, itemsize=4)
    assert layout.shard_numel == 32
    assert [f.numel for f in layout.fragments(0)] == [1, 0, 3]
    for rank in range(1, 8):
        assert [f.numel for f in layout.fragments(rank)] == [0, 0, 0]


def test_linear_4096_over_four_ranks_gives_rank_r_rows_1024_r() -> None:
    layout = BucketLayout.build(["weight"], [4096 * 4096], world=4, itemsize=2)
    assert layout.padding_numel == 0
    for rank in range(4):
        fragment = layout.fragment(0, rank)
        assert (fragment.start, fragment.stop) == (1024 * rank * 4096, 1024 * (rank + 1) * 4096)
        assert (fragment.shard_start, fragment.shard_stop) == (0, 1024 * 4096)
        assert rectangles((4096, 4096), fragment.start, fragment.stop) == (
            ((1024 * rank, 0), (1024, 4096)),
        )


def test_layouts_are_frozen_hashable_and_equal_by_value() -> None:
    layout = build([5, 7], world=3, itemsize=4)
    assert layout == build([5, 7], world=3, itemsize=4)
    assert hash(layout) == hash(build([5, 7], world=3, itemsize=4))
    with pytest.raises(AttributeError):
        layout.world = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("segments", "world", "itemsize", "shard_numel", "message"),
    [
        (
            (Segment("a", 0, 5), Segment("b", 4, 6)),
            1,
            4,
            32,
            "'b': expected a start of at least 5, got 4",
        ),
        (
            (Segment("a", 2, 5),),
            1,
            4,
            32,
            "'a': expected a start at a multiple of 16 bytes, got byte 8",
        ),
        ((Segment("a", 8, 4),), 1, 4, 32, "'a': expected start <= stop, got 8 > 4"),
        ((Segment("a", 0, 33),), 1, 4, 32, "within 32 elements, got an end at 33"),
        ((Segment("a", 0, 1), Segment("a", 4, 5)), 1, 4, 32, "'a': expected a name once"),
        ((), 0, 4, 32, "a world of at least 1, got 0"),
        ((), 1, 3, 32, "an itemsize of .*, got 3"),
        ((), 1, 4, 33, "a multiple of 128 bytes, got 132"),
        ((), 1, 4, -32, "a multiple of 128 bytes, got -128"),
        ((), 2**30, 8, 2**40, r"fewer than 2\*\*63 bytes"),
    ],
)
def test_a_wrong_layout_is_refused(
    segments: tuple[Segment, ...], world: int, itemsize: int, shard_numel: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BucketLayout(segments, world, itemsize, shard_numel)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one numel per name \(1\), got 2"):
        BucketLayout.build(["a"], [1, 2], world=1, itemsize=4)
    with pytest.raises(ValueError, match="'a': expected a numel of at least 0, got -1"):
        BucketLayout.build(["a"], [-1], world=1, itemsize=4)
    with pytest.raises(ValueError, match="itemsize"):
        BucketLayout.build(["a"], [1], world=1, itemsize=0)
    with pytest.raises(ValueError, match="world"):
        BucketLayout.build(["a"], [1], world=0, itemsize=4)
    layout = build([4], world=2, itemsize=4)
    with pytest.raises(ValueError, match=r"a rank in \[0, 2\), got 2"):
        layout.shard_range(2)
    with pytest.raises(ValueError, match=r"index in \[0, 1\), got -1"):
        layout.fragment(-1, 0)


def test_describe_draws_the_bucket() -> None:
    layout = BucketLayout.build(["weight", "bias", "empty"], [40, 8, 0], world=2, itemsize=4)
    lines = layout.describe(width=64).splitlines()
    assert lines[0] == "64 elements of at least 4 bytes, 16 of padding, 2 shards of 32"
    assert lines[1] == "       |" + "-" * 31 + "|" + "-" * 31 + "|"
    assert lines[2] == "weight " + "#" * 40 + " " * 25 + " [0, 40) ranks 0-1"
    assert lines[3] == "bias   " + " " * 40 + "#" * 8 + " " * 17 + " [40, 48) rank 1"
    assert lines[4].endswith("[48, 48) none")
    assert BucketLayout.build([], [], world=3, itemsize=4).describe()


def test_group_parameters_keeps_first_seen_order() -> None:
    items = [("a", "bf16", True), ("b", "fp32", True), ("c", "bf16", False), ("d", "bf16", True)]
    groups = group_parameters(items)
    assert groups == {("bf16", True): [0, 3], ("fp32", True): [1], ("bf16", False): [2]}
    assert list(groups) == [("bf16", True), ("fp32", True), ("bf16", False)]
    assert group_parameters([]) == {}


def flat_elements(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> list[int]:
    elements = [0]
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        elements = [base * extent + offset + i for base in elements for i in range(size)]
    return elements


@settings(max_examples=200)
@given(st.lists(st.integers(0, 6), max_size=4), st.data())
def test_rectangles_rebuild_the_range_in_order(dims: list[int], data: st.DataObject) -> None:
    shape = tuple(dims)
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = rectangles(shape, start, stop)
    elements = [e for offsets, sizes in boxes for e in flat_elements(shape, offsets, sizes)]
    assert elements == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for offsets, sizes in boxes:
        assert all(size > 0 for size in sizes)
        assert all(o + s <= e for o, s, e in zip(offsets, sizes, shape, strict=True))


def test_rectangles_by_hand() -> None:
    assert rectangles((), 0, 1) == (((), ()),)
    assert rectangles((), 0, 0) == ()
    assert rectangles((0, 4), 0, 0) == ()
    assert rectangles((4,), 1, 3) == (((1,), (2,)),)
    assert rectangles((3, 4), 0, 12) == (((0, 0), (3, 4)),)
    assert rectangles((3, 4), 2, 10) == (((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 2)))
    assert rectangles((3, 4), 5, 7) == (((1, 1), (1, 2)),)
    with pytest.raises(ValueError, match=r"within \[0, 12\), got \[4, 13\)"):
        rectangles((3, 4), 4, 13)


def test_layout_needs_only_the_standard_library() -> None:
    # By path, so that the package's own import does not bring torch in.
    code = (
        "import sys, importlib.util as u; spec = u.spec_from_file_location('layout', sys.argv[1]); "
        "m = u.module_from_spec(spec); sys.modules['layout'] = m; spec.loader.exec_module(m); "
        "layout = m.BucketLayout.build(['a'], [1], world=2, itemsize=4); "
        "print('torch' in sys.modules, layout.shard_numel)"
    )
    path = Path(__file__).parents[1] / "fsdp_kernels" / "layout.py"
    command = [sys.executable, "-c", code, str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "32"]
