"""The global model and one outer step on a fragment, with numbers by hand (paper, syncer, sec. 3.2, App. D)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pyddl.core.kernels import OuterStep, decode_bf16, encode_bf16
from pyddl.core.layout import TensorSpec, build_layout
from pyddl.core.state import GlobalState, Input
from pyddl.errors import LayoutMismatch

BACKENDS = ["cpu", "reference"]
SGD = OuterStep("sgd", 1.0, 0.9)
NESTEROV = OuterStep("nesterov", 0.5, 0.5)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def no_counters() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


def given(learner_id: int, *values: float, weight: float = 1.0, step: int = 0, counters: Any = ()) -> Input:
    return Input(learner_id, weight, step, f32(*values), np.array(counters, dtype=np.int64))


def state(
    *theta: float,
    outer: OuterStep = SGD,
    rule: str = "mean",
    wire: str = "f32",
    backend: str = "cpu",
    role: str = "parameter",
    counters: int = 0,
) -> GlobalState:
    """One fragment: half of it one tensor, half another, so that RDA has two directions to tell apart."""
    half = len(theta) // 2 or 1
    specs = [TensorSpec("a", (half,), "float32", role)]
    if len(theta) > half:
        specs.append(TensorSpec("b", (len(theta) - half,), "float32", "parameter"))
    if counters:
        specs.append(TensorSpec("n", (counters,), "int64", "counter"))
    s = GlobalState(build_layout(specs, num_fragments=1), outer=outer, merge_rule=rule, wire=wire, backend=backend)
    s.load(0, f32(*theta), np.zeros(counters, dtype=np.int64))
    return s


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_mean_step_moves_theta_by_the_weighted_mean(backend: str):
    """Theta 10, 20; outer gradients (1, 2) with weight 3 and (5, -2) with weight 1: mean (2, 1)."""
    s = state(10, 20, backend=backend)
    result = s.step(0, 1, [given(0, 1, 2, weight=3), given(1, 5, -2, weight=1)])
    assert result.new is not None
    assert result.new.theta.tolist() == [8, 19]
    assert result.new.version == 1
    assert result.rejected == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_rda_step_keeps_the_mean_norm_and_the_mean_direction_per_tensor(backend: str):
    """Tensor a: (3, 0) and (0, 1), equal weights. Norms 3 and 1, mean 2; directions (1, 0), (0, 1): (1, 1)/sqrt 2.
    Tensor b: (4, 0) twice: as it is."""
    s = state(0, 0, 0, 0, rule="rda", backend=backend)
    result = s.step(0, 1, [given(0, 3, 0, 4, 0), given(1, 0, 1, 4, 0)])
    assert result.new is not None
    np.testing.assert_allclose(result.new.theta, [-math.sqrt(2), -math.sqrt(2), -4, 0], rtol=1e-6)
    assert result.report is not None
    assert result.report.norms.tolist() == pytest.approx([5, math.sqrt(17)])


def test_state_rda_of_embeddings_is_the_mean():
    s = state(0, 0, 0, 0, rule="rda", role="embedding")
    result = s.step(0, 1, [given(0, 3, 0, 4, 0), given(1, 0, 1, 4, 0)])
    assert result.new is not None
    np.testing.assert_allclose(result.new.theta, [-1.5, -0.5, -4, 0], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_nesterov_carries_its_momentum_from_version_to_version(backend: str):
    """lr 1/2, mu 1/2, outer gradient 4 each time, Theta 100.
    1: buffer 4, Theta 100 - (4 + 2)/2 = 97. 2: buffer 2 + 4 = 6, Theta 97 - (4 + 3)/2 = 93.5.
    3: buffer 3 + 4 = 7, Theta 93.5 - (4 + 3.5)/2 = 89.75."""
    s = state(100, outer=NESTEROV, backend=backend)
    seen = []
    for version in (1, 2, 3):
        result = s.step(0, version, [given(0, 4)])
        s.commit(result)
        momentum = s[0].momentum
        assert momentum is not None
        seen.append((s[0].version, s[0].theta.item(), momentum.item()))
    assert seen == [(1, 97, 4), (2, 93.5, 6), (3, 89.75, 7)]


def test_state_sgd_has_no_momentum_even_if_a_checkpoint_brings_one():
    s = state(1)
    s.load(0, f32(1), no_counters(), momentum=f32(9))
    assert s[0].momentum is None
    n = state(1, outer=NESTEROV)
    n.load(0, f32(1), no_counters(), momentum=f32(9))
    assert n[0].momentum.tolist() == [9]
    n.load(0, f32(1), no_counters())
    assert n[0].momentum.tolist() == [0]


def test_state_floating_buffers_are_merged_by_mean_without_outer_lr_or_momentum():
    """Rule 22: under Nesterov a running variance became negative."""
    s = state(10, 10, outer=NESTEROV, rule="rda", role="buffer")
    for version in (1, 2):
        result = s.step(0, version, [given(0, 1, 1), given(1, 3, 1)])
        s.commit(result)
    assert s[0].theta[0] == 6, "10 - 2 - 2, however the optimizer is set"


def test_state_counters_come_from_the_contributor_that_is_furthest_the_first_if_equal():
    s = state(0, counters=1)
    result = s.step(
        0,
        1,
        [
            given(0, 0, step=5, counters=[50]),
            given(1, 0, step=9, counters=[90]),
            given(2, 0, step=9, counters=[91]),
        ],
    )
    assert result.new is not None
    assert result.new.counters.tolist() == [90]


def test_state_step_does_not_change_the_present_version_before_commit():
    """Rule 21: out of place. Who holds the old version keeps reading what it was."""
    s = state(1, 2, outer=NESTEROV)
    before = s[0]
    result = s.step(0, 7, [given(0, 1, 1)])
    assert s[0] is before
    assert before.theta.tolist() == [1, 2]
    s.commit(result)
    assert s[0].version == 7
    assert before.theta.tolist() == [1, 2]
    assert before.momentum.tolist() == [0, 0]
    assert not np.shares_memory(before.theta, s[0].theta)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_state_contribution_that_is_not_finite_is_left_out_named_and_the_rest_is_merged(bad: float, backend: str):
    s = state(10, 10, backend=backend)
    result = s.step(0, 1, [given(0, 2, 2), given(3, 1, bad), given(5, 4, 4)])
    assert result.new is not None
    assert result.new.theta.tolist() == [7, 7], "the mean of learners 0 and 5"
    assert result.rejected == ((3, "a NaN or Inf in its outer gradient"),)


def test_state_when_no_contribution_is_finite_nothing_is_merged():
    s = state(10, 10)
    result = s.step(0, 1, [given(0, math.nan, 0), given(1, 0, math.inf)])
    assert result.new is None
    assert [m for m, _ in result.rejected] == [0, 1]
    s.commit(result)
    assert s[0].version == 0


def test_state_merge_that_leaves_the_range_of_float32_is_refused_as_a_whole():
    s = state(-3e38, -3e38)
    result = s.step(0, 1, [given(0, 3e38, 0), given(1, 3e38, 0)])
    assert result.new is None
    assert result.rejected == tuple((m, "the merged fragment left the range of float32") for m in (0, 1))


def test_state_contribution_of_the_wrong_length_is_left_out_and_named():
    s = state(10, 10)
    result = s.step(0, 1, [given(0, 1, 1), given(1, 1), given(2, 1, 1, counters=[3])])
    assert result.new is not None
    assert result.new.theta.tolist() == [9, 9]
    assert [m for m, _ in result.rejected] == [1, 2]


def test_state_without_contributions_nothing_happens():
    assert state(1).step(0, 1, []).new is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_bf16_wire_is_the_rounded_theta_and_inputs_may_be_bf16(backend: str):
    s = state(1.001, 100.3, wire="bf16", backend=backend)
    bits = np.empty(2, dtype=np.uint16)
    encode_bf16(f32(0.25, 0.5), None, bits)
    assert s[0].wire.dtype == np.uint16
    result = s.step(0, 1, [Input(0, 1.0, 0, bits, no_counters())])
    assert result.new is not None
    np.testing.assert_array_equal(result.new.theta, f32(1.001, 100.3) - f32(0.25, 0.5))
    decoded = np.empty(2, dtype=np.float32)
    decode_bf16(result.new.wire, decoded)
    wanted = np.empty(2, dtype=np.uint16)
    encode_bf16(result.new.theta, None, wanted)
    np.testing.assert_array_equal(result.new.wire, wanted)
    np.testing.assert_allclose(decoded, result.new.theta, rtol=2**-8)


def test_state_f32_wire_is_theta_itself():
    s = state(1, 2)
    assert s[0].wire is s[0].theta
    result = s.step(0, 1, [given(0, 1, 1)])
    assert result.new is not None
    assert result.new.wire is result.new.theta


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["mean", "rda"])
def test_state_equal_inputs_give_bit_equal_results(rule: str, backend: str):
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(2000).astype(np.float32)
    inputs = [
        Input(m, float(rng.integers(1, 9)), 0, rng.standard_normal(2000).astype(np.float32), no_counters())
        for m in range(5)
    ]
    results = []
    for _ in range(2):
        s = state(*theta, rule=rule, outer=NESTEROV, backend=backend)
        result = s.step(0, 1, inputs)
        assert result.new is not None
        results.append((result.new.theta.tobytes(), result.new.momentum.tobytes()))
    assert results[0] == results[1]


def test_state_load_of_the_wrong_length_is_refused():
    s = state(1, 2)
    with pytest.raises(LayoutMismatch, match="must have 2 floats and 0 counters; got 3 and 0"):
        s.load(0, f32(1, 2, 3), no_counters())
    with pytest.raises(LayoutMismatch, match="got 2 and 1"):
        s.load(0, f32(1, 2), np.zeros(1, dtype=np.int64))


def test_state_versions_are_a_cut_that_later_merges_do_not_change():
    specs = [TensorSpec("a", (1,), "float32", "parameter"), TensorSpec("b", (1,), "float32", "parameter")]
    s = GlobalState(build_layout(specs, num_fragments=2), outer=SGD, merge_rule="mean", wire="f32", backend="cpu")
    for p in (0, 1):
        s.load(p, f32(p), no_counters(), version=3)
    cut = s.versions()
    s.commit(s.step(0, 4, [given(0, 1)]))
    assert [v.version for v in cut] == [3, 3]
    assert [v.theta.item() for v in cut] == [0, 1]
    assert [v.version for v in s.versions()] == [4, 3]


def test_state_used_before_it_is_loaded_is_our_own_bug():
    specs = [TensorSpec("a", (1,), "float32", "parameter")]
    s = GlobalState(build_layout(specs), outer=SGD, merge_rule="mean", wire="f32", backend="cpu")
    with pytest.raises(AssertionError, match="before load"):
        s[0]
