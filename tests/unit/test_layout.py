"""core/layout.py: cutting, fingerprint, JSON, comparison, slices."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyddl.core import kernels
from pyddl.core.layout import (
    ALIGNMENT,
    POLICIES,
    Layout,
    Segment,
    TensorSpec,
    build_layout,
    slice_bounds,
)
from pyddl.core.layout_difference import describe_difference
from pyddl.errors import ConfigError, LayoutMismatch, ShapeError


def parameter(name: str, *shape: int, role: str = "parameter", dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype, role)


def counter(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "int64", "counter")


def names_by_fragment(layout: Layout) -> list[list[str]]:
    return [[layout.tensors[s.tensor].name for s in f.segments] for f in layout.fragments]


SMALL = (
    TensorSpec("embed.weight", (7, 3), "bfloat16", "embedding", ("head.weight",)),
    parameter("blocks.0.weight", 40, 3),
    counter("blocks.0.norm.count"),
    parameter("blocks.0.norm.mean", 5, role="buffer"),
    parameter("blocks.1.weight", 40, 3),
    parameter("blocks.1.bias", 3),
    parameter("adapter.base", 4, role="frozen"),
    parameter("scale"),
    parameter("nothing", 0, 4),
)


# ---------------------------------------------------------------- tensors


def test_tensor_spec_scalar_is_one_element() -> None:
    assert (parameter("s").num_elements, parameter("s").num_bytes) == (1, 4)
    assert parameter("m", 3, 4, dtype="bfloat16").num_bytes == 24
    assert counter("c", 2).num_bytes == 16
    assert parameter("z", 3, 0).num_elements == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "role", "words"),
    [
        ((2,), "float32", "weight", "role"),
        ((2, -1), "float32", "parameter", "dimensions"),
        ((2,), "int64", "parameter", "freeze it"),
        ((2,), "complex64", "embedding", "freeze it"),
        ((2,), "int32", "buffer", "freeze it"),
        ((2,), "float32", "counter", "only integer and bool"),
        ((2,), "quint4", "frozen", "convert it"),
    ],
)
def test_tensor_spec_that_cannot_be_merged_is_refused(shape, dtype, role, words) -> None:
    with pytest.raises(ConfigError, match=words):
        TensorSpec("w", shape, dtype, role)


def test_tensor_spec_frozen_may_be_complex() -> None:
    assert TensorSpec("w", (2,), "complex64", "frozen").num_bytes == 16


# ---------------------------------------------------------------- policies


def test_build_layout_balanced_packs_largest_first_into_the_smallest() -> None:
    layout = build_layout(
        [parameter("d", 4), parameter("c", 6), parameter("b", 8), parameter("a", 10)], num_fragments=2
    )
    # a 10 -> 0, b 8 -> 1, c 6 -> 1 (8 < 10), d 4 -> 0 (10 < 14); within a fragment in the model's order
    assert names_by_fragment(layout) == [["d", "a"], ["c", "b"]]
    assert layout.fragments[0].segments == (Segment(0, 0, 4, 0), Segment(3, 0, 10, 4))


def test_build_layout_balanced_breaks_ties_by_name_then_by_fragment() -> None:
    layout = build_layout([parameter(name, 8) for name in "cabd"], num_fragments=2)
    assert names_by_fragment(layout) == [["c", "a"], ["b", "d"]]


def test_build_layout_balanced_splits_a_tensor_beyond_its_fair_share() -> None:
    layout = build_layout([parameter("big", 1000), parameter("small", 200)], num_fragments=3)
    # fair share 400: three pieces of 21 blocks of 16, then the small one into the smallest
    assert [[(x.tensor, x.start, x.stop) for x in f.segments] for f in layout.fragments] == [
        [(0, 0, 336)],
        [(0, 336, 672)],
        [(0, 672, 1000), (1, 0, 200)],
    ]


def test_build_layout_balanced_leaves_a_tensor_of_exactly_its_fair_share_whole() -> None:
    layout = build_layout([parameter("a", 500), parameter("b", 501), parameter("c", 500)], num_fragments=3)
    assert [len(f.segments) for f in layout.fragments] == [1, 1, 1]


def test_build_layout_balanced_joins_neighbouring_pieces_of_one_fragment() -> None:
    # 7 pieces of at most 16 over 4 fragments: wherever two neighbours meet, they are one segment.
    layout = build_layout([parameter("w", 100)], num_fragments=4)
    assert layout.num_elements == 100
    for fragment in layout.fragments:
        stops = {s.stop for s in fragment.segments}
        assert not stops & {s.start for s in fragment.segments}


@pytest.mark.parametrize("num_fragments", [1, 2, 7, 24, 100])
def test_build_layout_balanced_single_tensor_fills_every_fragment(num_fragments) -> None:
    layout = build_layout([parameter("w", 3101)], num_fragments=num_fragments)
    assert len(layout.fragments) == num_fragments
    assert layout.num_elements == 3101


def test_build_layout_tensor_deals_whole_tensors_out_by_size() -> None:
    specs = [
        parameter("a", 1),
        parameter("b", 900),
        parameter("c", 30),
        parameter("d", 30),
        parameter("e", 2),
    ]
    layout = build_layout(specs, num_fragments=2, policy="tensor")
    # order by size: b c d e a
    assert names_by_fragment(layout) == [["a", "b", "d"], ["c", "e"]]


def test_build_layout_layer_keeps_layers_whole_and_in_order() -> None:
    specs = [parameter("embed.weight", 50)]
    specs += [parameter(f"enc.blocks.{i}.{part}", 2) for i in range(4) for part in ("attn.w", "mlp.0.w")]
    specs += [parameter("norm.weight", 2), parameter("norm.bias", 2)]
    layout = build_layout(specs, policy="layer")
    assert names_by_fragment(layout) == [
        ["embed.weight"],
        *([f"enc.blocks.{i}.attn.w", f"enc.blocks.{i}.mlp.0.w"] for i in range(4)),
        ["norm.weight", "norm.bias"],
    ]
    halves = build_layout(specs, policy="layer", num_fragments=2)
    assert [len(f.segments) for f in halves.fragments] == [5, 6]
    assert names_by_fragment(halves)[1][0] == "enc.blocks.2.attn.w"


def test_build_layout_layer_separates_stacks_of_the_same_number() -> None:
    layout = build_layout([parameter("enc.0.w", 2), parameter("dec.0.w", 2), parameter("1", 2)], policy="layer")
    assert names_by_fragment(layout) == [["enc.0.w"], ["dec.0.w"], ["1"]]


def test_build_layout_layer_sends_counters_with_their_layer() -> None:
    specs = [
        counter("0.steps", 2),
        parameter("1.w", 4),
        counter("1.count"),
        counter("2.count", 3),
        parameter("3.w", 4),
        counter("3.count"),
    ]
    layout = build_layout(specs, policy="layer")
    # A layer of counters alone makes no fragment; it goes with the one before, the first with the first.
    assert [f.counters for f in layout.fragments] == [((0, 2), (2, 1), (3, 3)), ((5, 1),)]


# ---------------------------------------------------------------- number of fragments


@pytest.mark.parametrize("policy", ["balanced", "tensor"])
@pytest.mark.parametrize(("num_tensors", "expected"), [(1, 1), (23, 23), (24, 24), (60, 24)])
def test_build_layout_default_number_is_at_most_24(policy, num_tensors, expected) -> None:
    specs = [parameter(f"w{i}", 3) for i in range(num_tensors)]
    specs += [parameter(f"m{i}", 3, role="buffer") for i in range(5)]  # not trainable: they do not count
    assert len(build_layout(specs, policy=policy).fragments) == expected


def test_build_layout_default_number_by_layer_is_at_most_24() -> None:
    specs = [parameter(f"blocks.{i}.{part}", 3) for i in range(30) for part in "ab"]
    assert len(build_layout(specs[:10], policy="layer").fragments) == 5
    assert len(build_layout(specs, policy="layer").fragments) == 24


@pytest.mark.parametrize(
    ("policy", "num_fragments", "most", "what"),
    [("balanced", 9, 8, "pieces of tensors"), ("tensor", 4, 3, "tensors"), ("layer", 3, 2, "layers")],
)
def test_build_layout_number_that_cannot_be_filled_is_refused(policy, num_fragments, most, what) -> None:
    specs = [parameter("b.0.w", 100), parameter("b.0.b", 1), parameter("b.1.w", 1), parameter("b.1.z", 0)]
    if policy == "balanced":
        specs = [parameter("w", 128)]
    assert len(build_layout(specs, policy=policy, num_fragments=most).fragments) == most
    with pytest.raises(ConfigError, match=rf"{what} fill at most {most}; got {num_fragments} .*set sync"):
        build_layout(specs, policy=policy, num_fragments=num_fragments)


@pytest.mark.parametrize("num_fragments", [-1, 65536])
def test_build_layout_number_out_of_range_is_refused(num_fragments) -> None:
    with pytest.raises(ConfigError, match=r"0 .* to 65535"):
        build_layout(SMALL, num_fragments=num_fragments)


# ---------------------------------------------------------------- what is in them


@pytest.mark.parametrize("policy", POLICIES)
def test_build_layout_leaves_frozen_and_empty_tensors_out_of_fragments(policy) -> None:
    layout = build_layout(SMALL, policy=policy)
    inside = {name for names in names_by_fragment(layout) for name in names}
    assert inside == {spec.name for spec in SMALL if spec.role not in ("frozen", "counter") and spec.num_elements}
    assert layout.tensors == SMALL
    assert layout.num_elements == 7 * 3 + 120 + 5 + 120 + 3 + 1
    assert layout.largest_counters == 1


def test_build_layout_spreads_counters() -> None:
    specs = [parameter(f"w{i}", 100) for i in range(2)] + [counter(f"n{i}", n) for i, n in enumerate((1, 1, 3, 1))]
    layout = build_layout(specs)
    # largest first into the fragment with the fewest: n2 -> 0, then n0, n1, n3 -> 1
    assert [f.counters for f in layout.fragments] == [((4, 3),), ((2, 1), (3, 1), (5, 1))]
    assert [f.num_counters for f in layout.fragments] == [3, 3]


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [parameter("w", 3, role="frozen")],
        [parameter("w", 0), parameter("m", 3, role="buffer")],
    ],
)
def test_build_layout_nothing_to_train_is_refused(specs) -> None:
    with pytest.raises(ConfigError, match="at least one trainable"):
        build_layout(specs)


def test_build_layout_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' came twice"):
        build_layout([parameter("a", 1), parameter("a", 1)])
    with pytest.raises(ConfigError, match=r"'head\.weight' came twice.*aliases"):
        build_layout([*SMALL, parameter("head.weight", 7, 3)])


def test_build_layout_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"balanced, layer, tensor; got 'even'; set sync\.fragmentation"):
        build_layout(SMALL, policy="even")


def test_fragment_offsets_and_rules_feed_the_kernel() -> None:
    layout = build_layout(SMALL, num_fragments=1)
    (fragment,) = layout.fragments
    offsets = fragment.offsets()
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 21, 141, 146, 266, 269, 270]
    rda, mean, buffer = kernels.RULE_RDA, kernels.RULE_MEAN, kernels.RULE_BUFFER
    rules = fragment.rules(layout, "rda")
    assert rules.dtype == np.uint8
    assert rules.tolist() == [mean, rda, buffer, rda, rda, rda]
    assert fragment.rules(layout, "mean").tolist() == [mean, mean, buffer, mean, mean, mean]
    with pytest.raises(ConfigError, match="rda or mean; got 'sum'"):
        fragment.rules(layout, "sum")


# ---------------------------------------------------------------- properties

_FLOATING = ("parameter", "embedding", "buffer")


@st.composite
def models(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    """Models of 1 to 12 tensors of any role, with at least one to train."""
    shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    roles = st.sampled_from(["parameter", "parameter", "embedding", "buffer", "counter", "frozen"])
    prefixes = st.sampled_from(["", "embed.", "blocks.0.", "blocks.1.", "blocks.12.attn.", "norm."])
    specs = [parameter("first.weight", draw(st.integers(1, 3000)))]
    for i in range(draw(st.integers(0, 11))):
        role = draw(roles)
        dtype = draw(st.sampled_from(["int64", "bool"] if role == "counter" else ["float32", "bfloat16"]))
        specs.append(TensorSpec(f"{draw(prefixes)}t{i}", draw(shapes), dtype, role))
    return tuple(draw(st.permutations(specs)))


def build_if_filled(specs, policy, num_fragments) -> Layout | None:
    try:
        return build_layout(specs, policy=policy, num_fragments=num_fragments)
    except ConfigError as error:
        if "every fragment must hold something" not in str(error):
            raise
        return None


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(models(), st.sampled_from(POLICIES), st.integers(0, 9))
def test_build_layout_any_model_holds_every_element_once(specs, policy, num_fragments) -> None:
    layout = build_if_filled(specs, policy, num_fragments)
    if layout is None:
        assert num_fragments > 1  # the default and 1 always fit
        return
    held = [np.zeros(spec.num_elements, dtype=int) for spec in specs]
    counted = [0] * len(specs)
    for index, fragment in enumerate(layout.fragments):
        assert fragment.index == index
        assert fragment.num_elements == sum(s.num_elements for s in fragment.segments) > 0
        assert fragment.offsets().tolist() == [*(s.offset for s in fragment.segments), fragment.num_elements]
        assert [(s.tensor, s.start) for s in fragment.segments] == sorted(
            (s.tensor, s.start) for s in fragment.segments
        )
        position = 0
        for s in fragment.segments:
            assert s.offset == position
            assert s.start % ALIGNMENT == 0
            position += s.num_elements
            held[s.tensor][s.start : s.stop] += 1
        for tensor, count in fragment.counters:
            counted[tensor] += count
    for spec, marks, count in zip(specs, held, counted, strict=True):
        assert (marks == (spec.role in _FLOATING)).all(), spec
        assert count == (spec.num_elements if spec.role == "counter" else 0), spec
    if num_fragments:
        assert len(layout.fragments) == num_fragments
    again = build_layout(list(specs), policy=policy, num_fragments=num_fragments)
    assert again.to_json() == layout.to_json()
    assert Layout.from_json(layout.to_json()) == layout


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(models(), st.integers(1, 9))
def test_build_layout_balanced_any_model_is_within_one_piece_of_the_mean(specs, num_fragments) -> None:
    sizes = [spec.num_elements for spec in specs if spec.role in _FLOATING]
    layout = build_if_filled(specs, "balanced", num_fragments)
    if layout is None:
        return
    mean = sum(sizes) / num_fragments
    largest_piece = min(max(sizes), max(math.ceil(mean), ALIGNMENT))
    assert layout.largest_fragment_elements <= mean + largest_piece


def test_fingerprint_is_the_same_in_another_process() -> None:
    # Hash seeds differ from process to process; one that leaned on them would differ among learners.
    code = (
        "from pyddl.core.layout import TensorSpec, build_layout\n"
        "specs = [TensorSpec(f'b.{i}.w', (i + 1, 7), 'float32', 'parameter') for i in range(40)]\n"
        "print(build_layout(specs, num_fragments=5).fingerprint)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    specs = [parameter(f"b.{i}.w", i + 1, 7) for i in range(40)]
    assert seen == {build_layout(specs, num_fragments=5).fingerprint}


# ---------------------------------------------------------------- fingerprint, JSON


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"shape": (3, 40)},
        {"dtype": "float16"},
        {"role": "embedding"},
        {"aliases": ("twin",)},
    ],
)
def test_fingerprint_changes_with_every_attribute_of_a_tensor(change) -> None:
    specs = list(SMALL)
    specs[4] = dataclasses.replace(specs[4], **change)
    assert build_layout(specs).fingerprint != build_layout(SMALL).fingerprint


def test_fingerprint_changes_with_order_frozen_tensors_and_fragments() -> None:
    base = build_layout(SMALL, num_fragments=2)
    others = [
        build_layout(SMALL[::-1], num_fragments=2),
        build_layout([s for s in SMALL if s.role != "frozen"], num_fragments=2),
        build_layout(SMALL, num_fragments=3),
        build_layout(SMALL, num_fragments=2, policy="layer"),
    ]
    assert len({layout.fingerprint for layout in (base, *others)}) == 5


def test_from_json_reads_back_an_equal_layout() -> None:
    for policy in POLICIES:
        layout = build_layout(SMALL, policy=policy, num_fragments=2)
        copy = Layout.from_json(layout.to_json())
        assert copy == layout
        assert copy.fingerprint == layout.fingerprint


def _set(document, *path_and_value):
    *path, last, value = path_and_value
    for key in path:
        document = document[key]
    document[last] = value


@pytest.mark.parametrize(
    ("path_and_value", "words"),
    [
        (("format", "pyddl layout 0"), "format"),
        (("policy", "even"), "policy"),
        (("fingerprint", "0" * 64), "fingerprint"),
        (("tensors", 0, "name", "other"), "fingerprint"),
        (("tensors", 0, "name", 7), "a word was expected"),
        (("tensors", 0, "name", "scale"), "came twice"),
        (("tensors", 0, "role", "weight"), "role"),
        (("tensors", 0, "shape", [7, 3.0]), "numbers"),
        (("tensors", 0, "shape", [7, True]), "numbers"),
        (("tensors", 0, "shape", [7, 4]), "the fragments hold 21 elements of 'embed.weight'"),
        (("tensors", 0, "role", "frozen"), "the fragments hold 21 elements"),
        (("tensors", 0, {}), "KeyError"),
        (("tensors", 2, "role", "frozen"), "counters of 'blocks.0.norm.count'"),
        (("fragments", []), "0 fragments"),
        (("fragments", 0, "segments", 0, [0, 0, 21]), "4 numbers"),
        (("fragments", 0, "segments", 0, [0, 0, 20, 0]), "do not follow"),
        (("fragments", 0, "segments", 0, 1, 1), "do not follow"),
        (("fragments", 0, "segments", []), "missing"),
        (("fragments", 0, "counters", [[2, 1], [2, 1]]), "counted twice"),
        (("fragments", 0, "counters", []), "not all there"),
        (("fragments", 0, "counters", [[2, 1], [99, 1]]), "does not exist"),
        (("fragments", 0, "counters", [[2, 1, 0]]), "2 numbers"),
        (("fragments", None), "TypeError"),
    ],
)
def test_from_json_damaged_text_is_refused_with_the_reason(path_and_value, words) -> None:
    document = json.loads(build_layout(SMALL, num_fragments=1).to_json())
    _set(document, *path_and_value)
    with pytest.raises(LayoutMismatch) as caught:
        Layout.from_json(json.dumps(document))
    assert words in str(caught.value)
    assert "use the same version of pyddl" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"pyddl layout 1"', "{}"])
def test_from_json_text_that_is_no_layout_is_refused(text) -> None:
    with pytest.raises(LayoutMismatch, match="a layout must be"):
        Layout.from_json(text)


def test_from_json_element_in_two_fragments_is_refused() -> None:
    document = json.loads(build_layout([parameter("w", 64)], num_fragments=2).to_json())
    document["fragments"][1] = document["fragments"][0]
    with pytest.raises(LayoutMismatch, match="in no fragment or in two"):
        Layout.from_json(json.dumps(document))


def test_from_json_segments_out_of_order_are_refused() -> None:
    document = json.loads(build_layout([parameter("a", 3), parameter("b", 3)], num_fragments=1).to_json())
    document["fragments"][0]["segments"] = [[1, 0, 3, 0], [0, 0, 3, 3]]
    with pytest.raises(LayoutMismatch, match="out of order"):
        Layout.from_json(json.dumps(document))


# ---------------------------------------------------------------- differences


def difference(specs_a, specs_b, **options) -> list[str]:
    return describe_difference(
        build_layout(specs_a, num_fragments=1), build_layout(specs_b, num_fragments=1), **options
    ).splitlines()


def test_describe_difference_equal_layouts_is_empty() -> None:
    assert describe_difference(build_layout(SMALL), build_layout(list(SMALL))) == ""


def test_describe_difference_names_missing_and_extra() -> None:
    assert difference(SMALL, SMALL[:5] + SMALL[6:]) == [
        "missing: blocks.1.bias (parameter, float32 [3])",
    ]
    assert difference(SMALL[:5] + SMALL[6:], SMALL) == ["extra: blocks.1.bias (parameter, float32 [3])"]


def test_describe_difference_pairs_a_renamed_tensor() -> None:
    renamed = [dataclasses.replace(s, name="gain") if s.name == "scale" else s for s in SMALL]
    assert difference(SMALL, renamed) == ["renamed: scale required, gain came, both (parameter, float32 [])"]


def test_describe_difference_same_tensors_in_another_order_says_so() -> None:
    lines = difference(SMALL, [SMALL[0], SMALL[4], *SMALL[1:4], *SMALL[5:]])
    assert lines == ["order: blocks.1.weight came where blocks.0.weight was required; the order must be the same"]


def test_describe_difference_renamed_tensors_alone_are_no_other_order() -> None:
    specs = [parameter("a", 2), parameter("b", 3), parameter("c", 2)]
    prefixed = [dataclasses.replace(s, name=f"module.{s.name}") for s in specs]
    assert [line.split(":")[0] for line in difference(specs, prefixed)] == ["renamed"] * 3


def test_describe_difference_names_each_changed_attribute() -> None:
    changed = list(SMALL)
    changed[1] = dataclasses.replace(SMALL[1], shape=(3, 40), dtype="float16")
    changed[6] = dataclasses.replace(SMALL[6], role="parameter")
    assert difference(SMALL, changed) == [
        "changed: blocks.0.weight: shape (40, 3) required, (3, 40) came, dtype 'float32' required, 'float16' came",
        "changed: adapter.base: role 'frozen' required, 'parameter' came",
    ]


def test_describe_difference_untied_weight_names_the_tie() -> None:
    untied = [
        dataclasses.replace(SMALL[0], aliases=()),
        *SMALL[1:],
        dataclasses.replace(SMALL[0], name="head.weight", aliases=()),
    ]
    lines = difference(SMALL, untied)
    assert lines[0].endswith("; the other side has it tied to embed.weight")
    assert lines[1] == "changed: embed.weight: aliases ('head.weight',) required, () came"


def test_describe_difference_many_are_counted() -> None:
    lines = difference(SMALL, [parameter("other", 9, 9, 9)])
    assert len(lines) == 6
    assert lines[-1] == f"and {len(SMALL) + 1 - 5} more"
    assert difference(SMALL, [parameter("other", 9, 9, 9)], max_lines=1)[-1] == f"and {len(SMALL)} more"


def test_describe_difference_says_policy_and_number_of_fragments() -> None:
    a = build_layout(SMALL, num_fragments=3)
    b = build_layout(SMALL[:-1], num_fragments=2, policy="tensor")
    assert describe_difference(a, b).splitlines() == [
        "missing: nothing (parameter, float32 [0, 4])",
        "fragments: policy balanced required, tensor came; 3 fragments required, 2 came",
    ]


def test_describe_difference_same_tensors_cut_differently_says_where() -> None:
    specs = [parameter("a", 1), parameter("b", 1), parameter("c", 1)]
    a = build_layout(specs, num_fragments=2)
    b = dataclasses.replace(build_layout(specs, num_fragments=2, policy="layer"), policy="balanced")
    assert a.fingerprint != b.fingerprint
    assert describe_difference(a, b) == "fragments: the same tensors are cut differently, first in fragment 0"


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(models(), models())
def test_describe_difference_any_two_models_never_fails(specs_a, specs_b) -> None:
    a, b = build_layout(specs_a), build_layout(specs_b)
    text = describe_difference(a, b)
    assert bool(text) == (a.fingerprint != b.fingerprint)
    assert len(text.splitlines()) <= 7


# ---------------------------------------------------------------- slices


@pytest.mark.parametrize("num_elements", [0, 1, 15, 16, 17, 160, 1000, 12345])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_slice_bounds_cover_a_fragment_exactly(num_elements, num_ranks) -> None:
    bounds = [slice_bounds(num_elements, num_ranks, rank) for rank in range(num_ranks)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements
    for (_, stop), (start, _) in itertools.pairwise(bounds):
        assert stop == start
    sizes = [stop - start for start, stop in bounds]
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) < 2 * ALIGNMENT
    assert all(start % ALIGNMENT == 0 or start == stop for start, stop in bounds)


def test_slice_bounds_few_elements_leave_ranks_empty() -> None:
    assert [slice_bounds(17, 4, rank) for rank in range(4)] == [(0, 0), (0, 16), (16, 16), (16, 17)]


@pytest.mark.parametrize("arguments", [(-1, 1, 0), (5, 0, 0), (5, 2, 2), (5, 2, -1)])
def test_slice_bounds_out_of_range_is_refused(arguments) -> None:
    with pytest.raises(ShapeError, match="rank within its learner"):
        slice_bounds(*arguments)
