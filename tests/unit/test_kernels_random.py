"""The merge on shapes that nobody thought of: contributors, tensors, codecs, weights and starts in memory at random."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyddl.core import kernels
from pyddl.core.kernels import BLOCK_CODECS, RULE_BUFFER, RULE_MEAN, RULE_RDA, Blocks, OuterStep

CODECS = ("f32", "bf16", *BLOCK_CODECS)


def unaligned(array, shift):
    """A copy that begins ``shift`` elements into its memory."""
    room = np.empty(len(array) + shift, array.dtype)
    room[shift:] = array
    return room[shift:]


def encode(values, codec, shift):
    if codec == "f32":
        return unaligned(values, shift)
    if codec == "bf16":
        bits = np.empty(len(values), np.uint16)
        kernels.encode_bf16(values, None, bits, backend="reference")
        return unaligned(bits, shift)
    data = np.empty(kernels.encoded_bytes(codec, len(values)), np.uint8)
    kernels.encode_blocks(codec, values, None, data, backend="reference")
    return Blocks(codec, unaligned(data, shift))


@st.composite
def merges(draw):
    num, n = draw(st.integers(1, 18)), draw(st.integers(0, 2_000))
    edges = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    seed = draw(st.integers(0, 1 << 30))
    codecs = draw(st.lists(st.sampled_from(CODECS), min_size=num, max_size=num))
    powers = draw(st.lists(st.integers(-6, 6), min_size=num, max_size=num))
    rules = draw(st.lists(st.sampled_from([RULE_MEAN, RULE_RDA, RULE_BUFFER]), min_size=7, max_size=7))
    shifts = draw(st.lists(st.integers(0, 3), min_size=num + 4, max_size=num + 4))
    outer = draw(st.sampled_from([OuterStep("sgd", 1.0), OuterStep("nesterov", 0.7, 0.9)]))
    return num, n, np.array([0, *edges, n]), seed, codecs, powers, rules[: len(edges) + 1], shifts, outer


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(merges(), st.sampled_from([1, 2, 5]))
def test_merge_of_any_shape_equals_the_reference(case, threads):
    num, n, segments, seed, codecs, powers, rules, shifts, outer = case
    rng = np.random.default_rng(seed)
    common = rng.normal(size=n) + 3  # directions that do not cancel: those have tests of their own
    vectors = [(common + rng.normal(size=n)).astype(np.float32) for _ in range(num)]
    contributions = [encode(v, c, s) for v, c, s in zip(vectors, codecs, shifts, strict=False)]
    theta, momentum = (unaligned(rng.normal(size=n).astype(np.float32), s) for s in shifts[num : num + 2])
    results = []
    kernels.set_num_threads(threads)
    try:
        for backend in ("cpu", "reference"):
            outs = [unaligned(np.full(n, np.nan, np.float32), s) for s in shifts[num + 2 :]]
            report = kernels.merge_outer_step(
                contributions,
                10.0 ** np.array(powers, np.float64),
                segments,
                np.array(rules, np.uint8),
                theta,
                momentum,
                outer=outer,
                theta_out=outs[0],
                momentum_out=outs[1],
                backend=backend,
            )
            results.append((report, *outs))
    finally:
        kernels.set_num_threads(0)
    (ours, *outs), (theirs, *wanted) = results
    largest = max((float(np.abs(v).max(initial=0.0)) for v in vectors), default=0.0)
    for out, want in zip(outs, wanted, strict=True):
        np.testing.assert_allclose(out, want, rtol=2.4e-7, atol=2.4e-7 * largest)
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-12)
    assert ours.merged_norm == pytest.approx(theirs.merged_norm, rel=1e-9)
    assert (ours.finite == theirs.finite).all()
    assert ours.cancelled == theirs.cancelled
    assert ours.theta_finite == theirs.theta_finite
