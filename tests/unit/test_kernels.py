"""Kernels against a float64 oracle, against the numpy reference, and what the paper promises of RDA."""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pyddl.core import kernels
from pyddl.core.kernels import BLOCK_CODECS, RULE_BUFFER, RULE_MEAN, RULE_RDA, Blocks, OuterStep
from pyddl.errors import ConfigError, ShapeError

BACKENDS = ("cpu", "reference")
SGD = OuterStep("sgd", 1.0)
NESTEROV = OuterStep("nesterov", 0.7, 0.9)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def to_bf16(values):
    bits = np.empty(len(values), np.uint16)
    kernels.encode_bf16(values.astype(np.float32), None, bits, backend="reference")
    return bits


def encode(values, kind):
    if kind == "f32":
        return values
    return to_bf16(values) if kind == "bf16" else to_blocks(kind, values)


def to_blocks(codec, values):
    data = np.empty(kernels.encoded_bytes(codec, len(values)), np.uint8)
    kernels.encode_blocks(codec, values.astype(np.float32), None, data, backend="reference")
    return Blocks(codec, data)


def widen(contribution, n=None):
    """The values of n elements in float64, by the definition of each codec."""
    if isinstance(contribution, Blocks):
        values = []
        size = {"int8": 260, "int4": 132}[contribution.codec]
        for at in range(0, len(contribution.data), size):
            block = contribution.data[at : at + size]
            scale = float(block[:4].view(np.float32)[0])
            if contribution.codec == "int8":
                values += [scale * int(code) for code in block[4:].view(np.int8)]
            else:
                for code in [*(block[4:] & 15), *(block[4:] >> 4)]:
                    exponent = int(code & 7)
                    values.append(scale * (2.0 ** (exponent - 1) if exponent else 0.0) * (-1 if code & 8 else 1))
        return np.array(values)[:n]
    if contribution.dtype == np.uint16:
        return (contribution.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return contribution.astype(np.float64)


def rda(vectors, weights):
    """The formula of App. D, word for word, in float64."""
    share = weights / weights.sum()
    norms = [np.linalg.norm(v) for v in vectors]
    direction = sum(w * v / n for w, v, n in zip(share, vectors, norms, strict=True) if n > 0)
    length = np.linalg.norm(direction)
    return sum(share * norms) * (direction / length if length > 0 else direction)


def oracle(contributions, weights, segments, rules, theta, momentum, outer):
    """Merged outer gradient, theta and momentum after the step, in float64."""
    vectors = [widen(c, len(theta)) for c in contributions]
    merged, theta_out = np.zeros(len(theta)), np.zeros(len(theta))
    momentum_out = momentum.astype(np.float64)
    for begin, end, rule in zip(segments[:-1], segments[1:], rules, strict=True):
        pieces = [v[begin:end] for v in vectors]
        g = rda(pieces, weights) if rule == RULE_RDA else sum(w * p for w, p in zip(weights, pieces, strict=True))
        g = g if rule == RULE_RDA else g / weights.sum()
        merged[begin:end] = g
        if rule == RULE_BUFFER:
            theta_out[begin:end] = theta[begin:end] - g
        elif outer.optimizer == "sgd":
            theta_out[begin:end] = theta[begin:end] - outer.lr * g
        else:
            b = outer.momentum * momentum_out[begin:end] + g
            momentum_out[begin:end] = b
            theta_out[begin:end] = theta[begin:end] - outer.lr * (g + outer.momentum * b)
    return merged, theta_out, momentum_out


def merge(contributions, weights=None, *, segments=None, rules=None, theta=None, momentum=None, outer=SGD, **options):
    """Call the kernel, filling in what a test leaves out; returns report, theta, momentum, wire."""
    n = len(contributions[0]) if theta is None else len(theta)
    theta = np.zeros(n, np.float32) if theta is None else theta
    momentum = np.zeros(n, np.float32) if momentum is None else momentum
    weights = np.ones(len(contributions)) if weights is None else np.asarray(weights, np.float64)
    segments = np.array([0, n] if segments is None else segments, np.int64)
    rules = np.array([RULE_RDA] * (len(segments) - 1) if rules is None else rules, np.uint8)
    theta_out, momentum_out = np.full(n, np.nan, np.float32), np.full(n, np.nan, np.float32)
    wire = np.zeros(n, options.pop("wire", np.float32))
    report = kernels.merge_outer_step(
        contributions,
        weights,
        segments,
        rules,
        theta,
        momentum,
        outer=outer,
        theta_out=theta_out,
        momentum_out=momentum_out,
        wire_out=wire,
        **options,
    )
    return report, theta_out, momentum_out, wire


# ---- merge and outer step ----------------------------------------------------------------------------------

MANY = 4  # contributors, for which the C++ takes another plan
CASES = list(itertools.product((1, 2, 3, 5, 9), (1, 7, 255, 256, 257, 1031), ("f32", "bf16", "int8", "int4", "mixed")))


@pytest.mark.parametrize(
    ("num", "n", "kind"),
    [
        *CASES,
        (4, 100_000, "f32"),
        (3, 100_003, "bf16"),
        (MANY - 1, 70_001, "mixed"),
        (MANY, 70_001, "mixed"),
        (64, 40_007, "f32"),
        (64, 5, "bf16"),
    ],
)
def test_merge_any_size_equals_the_float64_oracle(num, n, kind, backend, rng):
    # A common part keeps the mean direction long: through a Gram matrix its error is eps / length^2.
    common = rng.normal(size=n) + 5
    vectors = [((common + rng.normal(size=n)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for _ in range(num)]
    kinds = [["bf16", "f32", "int8", "int4", "int4"][i % 5] if kind == "mixed" else kind for i in range(num)]
    contributions = [encode(v, k) for v, k in zip(vectors, kinds, strict=True)]
    weights = rng.uniform(0.1, 10, num)
    segments = np.unique(np.concatenate([[0, n], rng.integers(0, n + 1, 4)])).astype(np.int64)
    rules = np.resize([RULE_RDA, RULE_MEAN, RULE_BUFFER], len(segments) - 1).astype(np.uint8)
    theta, momentum = rng.normal(size=(2, n)).astype(np.float32)
    report, theta_out, momentum_out, wire = merge(
        contributions,
        weights,
        segments=segments,
        rules=rules,
        theta=theta,
        momentum=momentum,
        outer=NESTEROV,
        backend=backend,
    )
    merged, want_theta, want_momentum = oracle(contributions, weights, segments, rules, theta, momentum, NESTEROV)
    # Each result is rounded to float32 once; what is summed before is in double. From MANY on the mean direction of RDA
    # is rounded once before.
    rounding = (1.2e-7, 1e-12) if num < MANY or backend == "reference" else (2.4e-7, 1.2e-7)
    for got, want in ((theta_out, want_theta), (momentum_out, want_momentum)):
        np.testing.assert_allclose(got, want, rtol=rounding[0], atol=rounding[1] * abs(merged).max())
    np.testing.assert_array_equal(wire, theta_out)
    np.testing.assert_allclose(report.norms, [np.linalg.norm(widen(c, n)) for c in contributions], rtol=1e-12)
    assert report.merged_norm == pytest.approx(np.linalg.norm(merged), rel=1e-12)
    assert report.finite.all()
    assert report.theta_finite
    assert report.cancelled == 0


def test_merge_of_an_empty_fragment_writes_nothing(backend):
    report, theta_out, _, _ = merge([np.zeros(0, np.float32)] * 2, backend=backend)
    assert len(theta_out) == 0
    assert report.norms.tolist() == [0, 0]
    assert report.merged_norm == 0


def test_merge_with_empty_tensors_between_skips_them(backend, rng):
    v = rng.normal(size=(2, 10)).astype(np.float32)
    _, split, _, _ = merge(list(v), segments=[0, 0, 4, 4, 10, 10], backend=backend)
    _, plain, _, _ = merge(list(v), segments=[0, 4, 10], backend=backend)
    np.testing.assert_array_equal(split, plain)


def test_merge_sgd_without_momentum_needs_no_buffers(backend, rng):
    g, theta = rng.normal(size=(2, 300)).astype(np.float32)
    out = np.empty_like(theta)
    kernels.merge_outer_step(
        [g],
        np.ones(1),
        np.array([0, 300]),
        np.array([RULE_MEAN], np.uint8),
        theta,
        None,
        outer=OuterStep("sgd", 0.5),
        theta_out=out,
        momentum_out=None,
        backend=backend,
    )
    np.testing.assert_array_equal(out, (theta - 0.5 * g.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize(("outer", "rule"), [(SGD, RULE_RDA), (SGD, RULE_MEAN), (NESTEROV, RULE_BUFFER)])
def test_merge_where_no_momentum_applies_passes_the_buffer_through(outer, rule, backend, rng):
    g, momentum = rng.normal(size=(2, 300)).astype(np.float32)
    _, _, momentum_out, _ = merge([g], rules=[rule], momentum=momentum, outer=outer, backend=backend)
    np.testing.assert_array_equal(momentum_out, momentum)


def test_merge_buffers_under_nesterov_stay_within_the_contributors(backend):
    # Under an outer step with momentum running_var became negative; it must be the mean of the learners'.
    anchor = np.full(8, 1.0, np.float32)
    mine, yours = np.full(8, 0.01, np.float32), np.full(8, 0.03, np.float32)
    momentum = np.full(8, 5.0, np.float32)
    contributions = [anchor - mine, anchor - yours]
    _, merged, _, _ = merge(
        contributions, rules=[RULE_BUFFER], theta=anchor, momentum=momentum, outer=NESTEROV, backend=backend
    )
    np.testing.assert_allclose(merged, 0.02, rtol=1e-5)


def test_merge_one_contributor_with_sgd_lr_1_returns_its_own_parameters(backend, rng):
    anchor = rng.normal(size=999).astype(np.float32)
    theta_m = anchor + np.float32(2**-6) * rng.integers(-4, 4, 999).astype(np.float32)
    gradient = anchor - theta_m
    _, out, _, _ = merge([gradient], [123.4], theta=anchor, backend=backend)
    np.testing.assert_array_equal(out, (anchor.astype(np.float64) - gradient).astype(np.float32))


def test_merge_nesterov_trajectory_equals_torch_sgd(backend, rng):
    torch = pytest.importorskip("torch")
    theta, momentum = rng.normal(size=500).astype(np.float32), np.zeros(500, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(6):
        g = rng.normal(size=500).astype(np.float32)
        parameter.grad = torch.from_numpy(g.copy())
        optimizer.step()
        _, theta, momentum, _ = merge([g], theta=theta, momentum=momentum, outer=NESTEROV, backend=backend)
        np.testing.assert_allclose(theta, parameter.detach().numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("num", [2, 4, 8])
def test_merge_of_orthogonal_gradients_keeps_the_norm_under_rda_and_shrinks_it_under_mean(num, backend):
    rows = np.zeros((num, 64 * num), np.float32)
    for i in range(num):
        rows[i, 64 * i : 64 * (i + 1)] = 0.5  # norm 4, mutually orthogonal
    by_rda, _, _, _ = merge(list(rows), backend=backend)
    by_mean, _, _, _ = merge(list(rows), rules=[RULE_MEAN], backend=backend)
    assert by_rda.merged_norm == pytest.approx(4.0, rel=1e-12)
    assert by_mean.merged_norm == pytest.approx(4.0 / np.sqrt(num), rel=1e-12)


def test_merge_rda_is_per_tensor_not_per_fragment(backend):
    # Tensor 0 agrees in direction, tensor 1 is orthogonal; over the whole fragment the norms would be mixed.
    a = np.array([3, 0, 1, 0], np.float32)
    b = np.array([1, 0, 0, 1], np.float32)
    _, out, _, _ = merge([a, b], segments=[0, 2, 4], backend=backend)
    np.testing.assert_allclose(out, -np.array([2, 0, 2**-0.5, 2**-0.5]), rtol=1e-6)


def test_merge_with_a_zero_gradient_counts_its_weight_but_not_its_direction(backend):
    v = np.array([3, 4], np.float32)
    report, out, _, _ = merge([v, np.zeros(2, np.float32)], [1, 3], backend=backend)
    np.testing.assert_allclose(out, -v / 4, rtol=1e-6)  # mean norm 5/4 in v's direction
    assert report.norms.tolist() == [5, 0]
    assert report.cancelled == 0


def test_merge_of_zero_gradients_only_changes_nothing_and_cancels_nothing(backend, rng):
    theta = rng.normal(size=20).astype(np.float32)
    report, out, _, _ = merge([np.zeros(20, np.float32)] * 3, theta=theta, backend=backend)
    np.testing.assert_array_equal(out, theta)
    assert report.cancelled == 0
    assert report.merged_norm == 0


@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_merge_of_cancelling_directions_falls_back_to_the_mean_and_is_never_nan(kind, backend, rng):
    for trial in range(60):
        n = int(rng.integers(1, 700))
        v = rng.normal(size=n).astype(np.float32) * np.float32(10.0 ** rng.integers(-12, 12))
        v = v if kind is np.float32 else to_bf16(v)
        opposite = -v if kind is np.float32 else v ^ np.uint16(0x8000)
        weight = rng.uniform(0.5, 2)
        pair = [v, opposite] if trial % 2 else [v, v, opposite, opposite]
        report, out, _, _ = merge(pair, [weight] * len(pair), backend=backend)
        scale = abs(widen(v)).max()
        assert np.isfinite(report.merged_norm)
        assert report.cancelled == 1
        assert abs(out).max() <= 1e-9 * scale


def test_merge_of_opposite_directions_with_unequal_lengths_yields_the_weighted_mean(backend, rng):
    v = rng.normal(size=333).astype(np.float32)
    report, out, _, _ = merge([v, -3 * v], [1, 1], backend=backend)
    np.testing.assert_allclose(out, v, rtol=1e-6)  # theta 0 - mean(v, -3 v)
    assert report.cancelled == 1


def test_merge_counts_cancellation_per_tensor(backend, rng):
    v = rng.normal(size=30).astype(np.float32)
    w = -v
    w[10:20] = v[10:20]
    report, _, _, _ = merge([v, w], segments=[0, 10, 20, 30], backend=backend)
    assert report.cancelled == 2


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("rule", [RULE_MEAN, RULE_RDA])
def test_merge_with_a_nonfinite_block_names_its_contributor(rule, codec, backend, rng):
    v = rng.normal(size=(3, 700)).astype(np.float32)
    v[1, 600] = np.inf
    report, *_ = merge([to_blocks(codec, row) for row in v], rules=[rule], theta=v[0], backend=backend)
    assert report.finite.tolist() == [True, False, True]


@pytest.mark.parametrize("rule", [RULE_MEAN, RULE_RDA, RULE_BUFFER])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 299, 1000])
def test_merge_with_a_nonfinite_contribution_names_it_alone(rule, bad, position, backend, rng):
    v = [rng.normal(size=1001).astype(np.float32) for _ in range(4)]
    v[2][position] = bad
    contributions = [v[0], to_bf16(v[1]), to_bf16(v[2]) if position else v[2], v[3]]
    report, _, _, _ = merge(contributions, segments=[0, 300, 1001], rules=[rule, RULE_RDA], backend=backend)
    assert report.finite.tolist() == [True, True, False, True]


def test_merge_with_two_nonfinite_contributions_in_different_tensors_names_both(backend, rng):
    v = rng.normal(size=(3, 900)).astype(np.float32)
    v[0, 5], v[2, 899] = np.inf, np.nan
    for rules in (
        [RULE_MEAN, RULE_MEAN],
        [RULE_RDA, RULE_RDA],
        [RULE_MEAN, RULE_RDA],
        [RULE_RDA, RULE_BUFFER],
    ):
        report, _, _, _ = merge(list(v), segments=[0, 400, 900], rules=rules, backend=backend)
        assert report.finite.tolist() == [False, True, False]


def test_merge_with_the_largest_floats_is_finite_but_a_result_beyond_them_is_reported(backend):
    huge = np.full(300, np.finfo(np.float32).max, np.float32)
    report, out, _, _ = merge([huge, huge], backend=backend)
    assert report.finite.all()
    assert report.theta_finite
    np.testing.assert_array_equal(out, -huge)
    report, _, _, _ = merge([huge, huge], theta=-huge, outer=OuterStep("sgd", 2.0), backend=backend)
    assert report.finite.all()
    assert not report.theta_finite


def test_merge_with_denormals_keeps_their_norm(backend):
    tiny = np.zeros((2, 16), np.float32)
    tiny[0, 0] = tiny[1, 1] = np.float32(1e-44)
    report, _, _, _ = merge(list(tiny), backend=backend)
    assert report.merged_norm == pytest.approx(float(tiny[0, 0]), rel=1e-9)
    assert report.cancelled == 0


def test_merge_with_weights_over_twelve_orders_of_magnitude_follows_the_formula(backend, rng):
    v = rng.normal(size=(4, 500)).astype(np.float32)
    weights = np.array([1e-6, 1.0, 1e3, 1e6])
    for rule in (RULE_RDA, RULE_MEAN):
        report, out, _, _ = merge(list(v), weights, rules=[rule], backend=backend)
        merged, want, _ = oracle(
            list(v),
            weights,
            np.array([0, 500]),
            [rule],
            np.zeros(500, np.float32),
            np.zeros(500, np.float32),
            SGD,
        )
        np.testing.assert_allclose(out, want, rtol=1.2e-7, atol=1e-12)
        assert report.merged_norm == pytest.approx(np.linalg.norm(merged), rel=1e-10)


def test_merge_scales_weights_away_even_where_their_sum_overflows(backend, rng):
    v = rng.normal(size=(2, 100)).astype(np.float32)
    _, small, _, _ = merge(list(v), [1, 2], backend=backend)
    _, large, _, _ = merge(list(v), [0.75e308, 1.5e308], backend=backend)
    np.testing.assert_allclose(large, small, rtol=1e-6)
    assert np.isfinite(large).all()


def test_merge_writes_the_wire_copy_as_rounded_bf16(backend, rng):
    v = rng.normal(size=(3, 777)).astype(np.float32)
    _, out, _, wire = merge(list(v), wire=np.uint16, backend=backend)
    np.testing.assert_array_equal(wire, to_bf16(out))


def test_merge_repeated_is_bit_equal(backend, rng):
    v = rng.normal(size=(5, 10_007)).astype(np.float32)
    first = merge(list(v), rng.uniform(1, 2, 5), outer=NESTEROV, backend=backend)
    rng = np.random.default_rng(7)
    again = merge(
        list(rng.normal(size=(5, 10_007)).astype(np.float32)),
        rng.uniform(1, 2, 5),
        outer=NESTEROV,
        backend=backend,
    )
    assert first[1].tobytes() == again[1].tobytes()
    assert first[2].tobytes() == again[2].tobytes()
    assert first[0].norms.tobytes() == again[0].norms.tobytes()
    assert first[0].merged_norm == again[0].merged_norm


def everything(rng_seed, num):
    """The bytes of all that a merge of tensors small and large gives, for M contributors of both dtypes."""
    rng = np.random.default_rng(rng_seed)
    edges = [0, 9_999, 10_000, 10_000, 10_700, 100_000, 160_000, 200_011]  # one is empty, three are cut into chunks
    v = rng.normal(size=(num + 2, edges[-1])).astype(np.float32)
    contributions = [encode(v[i], ["f32", "bf16", "int8", "int4"][i % 4]) for i in range(num)]
    report, *arrays = merge(
        contributions,
        rng.uniform(0.1, 10, num),
        segments=edges,
        rules=np.resize([RULE_RDA, RULE_MEAN, RULE_RDA, RULE_RDA, RULE_RDA, RULE_BUFFER, RULE_MEAN], len(edges) - 1),
        theta=v[num],
        momentum=v[num + 1],
        outer=NESTEROV,
        wire=np.uint16,
        backend="cpu",
    )
    residual, bits = v[num].copy(), np.empty(edges[-1], np.uint16)
    kernels.encode_bf16(v[0], residual, bits, backend="cpu")
    for codec in BLOCK_CODECS:
        blocks = np.empty(kernels.encoded_bytes(codec, edges[-1]), np.uint8)
        kernels.encode_blocks(codec, v[1], residual, blocks, backend="cpu")
        arrays += [blocks, residual.copy()]
    return [report.merged_norm, report.cancelled, *(a.tobytes() for a in (*arrays, report.norms, residual, bits))]


@pytest.mark.parametrize("num", [1, 2, MANY - 1, MANY, 9, 20])
def test_merge_and_codecs_are_bit_equal_on_every_instruction_set(num):
    native = kernels._C
    best = native.instruction_set()
    names = [name for name in ("baseline", "avx2", "avx512") if native.select_instruction_set(name)]
    try:
        if len(names) == 1:
            pytest.skip("this processor or build has the baseline loops only")
        results = []
        for name in names:
            native.select_instruction_set(name)
            results.append(everything(7, num))
    finally:
        native.select_instruction_set(best)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("num", [1, 2, MANY - 1, MANY, 9, 20])
def test_merge_is_bit_equal_for_any_number_of_threads(num):
    results = []
    try:
        for threads in (1, 2, 3, 7, 7):
            kernels.set_num_threads(threads)
            results.append(everything(8, num))
    finally:
        kernels.set_num_threads(0)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("num", [2, MANY, 9])
def test_merge_by_either_plan_gives_the_same_up_to_one_rounding(num, rng):
    n = 50_001
    common = rng.normal(size=n) + 3
    v = [(common + rng.normal(size=n)).astype(np.float32) for _ in range(num)]
    theta, results = rng.normal(size=n).astype(np.float32), []
    for plan in (1, 2):  # through the Gram matrix, through the mean direction
        out = np.empty(n, np.float32)
        arrays = (np.array([0, 700, n]), np.array([RULE_RDA] * 2, np.uint8), theta, None, out, None, None)
        found = kernels._C.merge_outer_step(v, [0] * num, [1.0] * num, n, *arrays, False, False, 1.0, 0.0, plan)
        results.append((found, out))
    (by_gram, ours), (by_direction, theirs) = results
    np.testing.assert_allclose(ours, theirs, rtol=2.4e-7, atol=2.4e-7 * max(np.abs(x).max() for x in v))
    np.testing.assert_allclose(by_gram[1], by_direction[1], rtol=1e-12)
    assert by_gram[2] == pytest.approx(by_direction[2], rel=1e-9)


def test_merges_of_several_threads_at_once_do_not_meet():
    """One has the pool, the others do all of it by themselves."""
    kernels.set_num_threads(3)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda num: everything(9, num), [3, 5, 3, 5, 3, 5, 3, 5]))
    finally:
        kernels.set_num_threads(0)
    assert all(result == results[i % 2] for i, result in enumerate(results))


def test_merge_after_a_fork_makes_threads_of_its_own():
    text = """
import os, sys
import numpy as np
from pyddl.core import kernels
def merge():
    n = 1 << 20
    v, out = [np.full(n, i + 1.0, np.float32) for i in range(3)], np.empty(n, np.float32)
    kernels.merge_outer_step(v, np.ones(3), np.array([0, n]), np.array([0], np.uint8), v[0], None,
        outer=kernels.OuterStep("sgd", 1.0), theta_out=out, momentum_out=None, backend="cpu")
    return float(out.sum()) == -float(n)
kernels.set_num_threads(3)
assert merge()
pid = os.fork()
if pid == 0:
    os._exit(0 if merge() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or not merge())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("variable", "wanted"), [("3", 3), ("2,4", 2), ("0", None), ("many", None), (None, None)])
def test_num_threads_follows_the_environment_then_the_affinity(variable, wanted):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if variable is not None:
        environment["OMP_NUM_THREADS"] = variable
    one = min(os.sched_getaffinity(0))
    text = (
        f"import os; os.sched_setaffinity(0, {{{one}}})\nfrom pyddl.core import kernels; print(kernels.num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, timeout=60)
    assert int(done.stdout) == (wanted or 1), done.stderr


def test_set_num_threads_below_zero_is_refused():
    with pytest.raises(ShapeError, match="at least 0"):
        kernels.set_num_threads(-1)


def test_select_instruction_set_of_an_unknown_name_changes_nothing():
    before = kernels._C.instruction_set()
    assert not kernels._C.select_instruction_set("abacus")
    assert kernels._C.instruction_set() == before


# ---- what a merge refuses ----------------------------------------------------------------------------------


def valid_arguments(n=64):
    return {
        "contributions": [np.ones(n, np.float32), np.ones(n, np.uint16)],
        "weights": np.ones(2),
        "segments": np.array([0, n // 2, n]),
        "rules": np.zeros(2, np.uint8),
        "theta": np.zeros(n, np.float32),
        "momentum": np.zeros(n, np.float32),
        "outer": SGD,
        "theta_out": np.zeros(n, np.float32),
        "momentum_out": np.zeros(n, np.float32),
        "wire_out": np.zeros(n, np.uint16),
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"contributions": []}, "at least one contribution"),
        ({"contributions": [np.ones(64, np.float64)], "weights": np.ones(1)}, r"contributions\[0\].*float64"),
        ({"contributions": [np.ones(63, np.float32)], "weights": np.ones(1)}, r"contributions\[0\].*\[63\]"),
        ({"contributions": [np.ones(128, np.float32)[::2]], "weights": np.ones(1)}, "strided"),
        (
            {"contributions": [np.ones(257, np.uint8)[1:].view(np.float32)], "weights": np.ones(1)},
            "misaligned",
        ),
        ({"contributions": [[1.0] * 64], "weights": np.ones(1)}, r"got list"),
        ({"weights": np.ones(3)}, "weights must be"),
        ({"weights": np.array([1.0, 0.0])}, "positive and finite"),
        ({"weights": np.array([1.0, -1.0])}, "positive and finite"),
        ({"weights": np.array([1.0, np.nan])}, "positive and finite"),
        ({"weights": np.array([1.0, np.inf])}, "positive and finite"),
        ({"segments": np.array([0, 32, 63])}, "segments must ascend"),
        ({"segments": np.array([1, 32, 64])}, "segments must ascend"),
        ({"segments": np.array([0, 65, 64])}, "segments must ascend"),
        ({"segments": np.array([0, 64])}, "segments must be"),
        ({"segments": np.array([0, 32, 64], np.int32)}, "segments must be"),
        ({"rules": np.array([0, 3], np.uint8)}, "rules must be"),
        ({"theta": np.zeros((8, 8), np.float32)}, "theta must be"),
        ({"theta_out": np.zeros(64, np.float16)}, "theta_out must be"),
        ({"momentum": None}, "both be given"),
        ({"momentum_out": None}, "both be given"),
        ({"momentum": None, "momentum_out": None, "outer": NESTEROV}, "both be given"),
        ({"wire_out": np.zeros(64, np.int16)}, "wire_out must be"),
    ],
)
def test_merge_of_wrong_arguments_is_refused_by_name(changes, named, backend):
    arguments = valid_arguments()
    kernels.merge_outer_step(**arguments, backend=backend)  # valid before the change
    with pytest.raises(ShapeError, match=named):
        kernels.merge_outer_step(**{**arguments, **changes}, backend=backend)


@pytest.mark.parametrize("output", ["theta_out", "momentum_out"])
@pytest.mark.parametrize("other", ["theta", "momentum", "contribution", "output"])
def test_merge_with_overlapping_arrays_is_refused(output, other, backend):
    arguments = valid_arguments()
    shared = np.zeros(100, np.float32)
    arguments[output] = shared[:64]
    late = shared[63 : 63 + 64] if 63 + 64 <= 100 else shared[36:100]
    if other == "contribution":
        arguments["contributions"] = [late, late]  # inputs may well overlap each other
    elif other == "output":
        arguments["wire_out"] = late
    else:
        arguments[other] = late
    with pytest.raises(ShapeError, match="must not overlap"):
        kernels.merge_outer_step(**arguments, backend=backend)


def test_merge_into_neighbouring_memory_is_accepted(backend):
    arguments = valid_arguments()
    shared = np.zeros(128, np.float32)
    arguments["theta"], arguments["theta_out"] = shared[:64], shared[64:]
    kernels.merge_outer_step(**arguments, backend=backend)


def test_merge_into_a_read_only_array_is_refused_but_reads_from_one(backend):
    arguments = valid_arguments()
    arguments["theta"].flags.writeable = False
    kernels.merge_outer_step(**arguments, backend=backend)
    arguments["theta_out"].flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        kernels.merge_outer_step(**arguments, backend=backend)


@pytest.mark.parametrize(
    "arguments",
    [
        ("adam", 1.0, 0.0),
        ("sgd", 0.0, 0.0),
        ("sgd", float("nan"), 0.0),
        ("nesterov", 1.0, 1.0),
        ("sgd", 1.0, -0.1),
    ],
)
def test_outer_step_out_of_range_is_refused(arguments):
    with pytest.raises(ConfigError, match="must be"):
        OuterStep(*arguments)
