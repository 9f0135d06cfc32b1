"""Codecs, checksum, untorn words and the choice of a backend, against published values and definitions."""

import logging

import numpy as np
import pytest

from pyddl.core import kernels
from pyddl.core.kernels import OuterStep
from pyddl.errors import ConfigError, KernelUnavailable, ShapeError

BACKENDS = ("cpu", "reference")
SGD = OuterStep("sgd", 1.0)
NESTEROV = OuterStep("nesterov", 0.7, 0.9)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(7)


# ---- codecs ------------------------------------------------------------------------------------------------


def test_bf16_round_trip_of_every_code_is_exact(backend):
    codes = np.arange(1 << 16, dtype=np.uint16)
    values, back = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.uint16)
    kernels.decode_bf16(codes, values, backend=backend)
    kernels.encode_bf16(values, None, back, backend=backend)
    is_nan = np.isnan(values)
    assert is_nan.sum() == 254
    np.testing.assert_array_equal(back[~is_nan], codes[~is_nan])
    kernels.decode_bf16(back, values, backend=backend)
    assert np.isnan(values[is_nan]).all()


def test_encode_bf16_rounds_to_nearest_even_as_torch_does(backend, rng):
    torch = pytest.importorskip("torch")
    bits = rng.integers(0, 1 << 32, 50_001, dtype=np.uint32)
    bits[:4] = (
        0x3F808000,
        0x3F818000,
        0x7F7FFFFF,
        0x7F800001,
    )  # two ties, the largest float, a NaN with low bits only
    values = bits.view(np.float32)
    out = np.empty(len(values), np.uint16)
    kernels.encode_bf16(values, None, out, backend=backend)
    want = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(out[~is_nan], want[~is_nan])
    assert ((out[is_nan] & 0x7FFF) > 0x7F80).all()


@pytest.mark.parametrize("n", [0, 1, 9, 1000])
def test_encode_bf16_with_error_feedback_loses_nothing_over_time(n, backend, rng):
    values = rng.normal(size=n).astype(np.float32)
    residual, bits, decoded = np.zeros(n, np.float32), np.empty(n, np.uint16), np.empty(n, np.float32)
    sent = np.zeros(n)
    for _ in range(64):
        kernels.encode_bf16(values, residual, bits, backend=backend)
        kernels.decode_bf16(bits, decoded, backend=backend)
        sent += decoded
    np.testing.assert_allclose(sent + residual, 64.0 * values, rtol=1e-5)
    np.testing.assert_allclose(sent, 64.0 * values, rtol=2**-8 / 32)  # without feedback: off by up to 2**-9 of all


def test_encode_bf16_leaves_no_residual_where_the_code_is_not_finite(backend):
    largest = np.finfo(np.float32).max
    values = np.array([np.nan, np.inf, -np.inf, largest, 1.0, 1.00390625], np.float32)
    residual, bits, decoded = np.zeros(6, np.float32), np.empty(6, np.uint16), np.empty(6, np.float32)
    kernels.encode_bf16(values, residual, bits, backend=backend)
    kernels.decode_bf16(bits, decoded, backend=backend)
    assert np.isnan(decoded[0])
    assert decoded[1:4].tolist() == [np.inf, -np.inf, np.inf]  # the largest float rounds up
    assert residual.tolist() == [0, 0, 0, 0, 0, 0.00390625]


def test_codecs_of_both_backends_agree_bit_for_bit(rng):
    values, residual = (rng.normal(size=5003) * 10.0 ** rng.integers(-30, 30, 5003)).astype(np.float32), None
    results = []
    for name in BACKENDS:
        residual, bits = values[::-1].copy(), np.empty(5003, np.uint16)
        kernels.encode_bf16(values, residual, bits, backend=name)
        results.append((bits.tobytes(), residual.tobytes()))
    assert results[0] == results[1]


def test_codecs_with_wrong_arrays_refuse(backend):
    f32, u16 = np.zeros(8, np.float32), np.zeros(8, np.uint16)
    with pytest.raises(ShapeError, match="values must be"):
        kernels.encode_bf16(f32.astype(np.float64), None, u16, backend=backend)
    with pytest.raises(ShapeError, match="residual must be"):
        kernels.encode_bf16(f32, np.zeros(7, np.float32), u16, backend=backend)
    with pytest.raises(ShapeError, match="residual must not overlap values"):
        kernels.encode_bf16(f32, f32, u16, backend=backend)
    with pytest.raises(ShapeError, match="out must be"):
        kernels.decode_bf16(u16, np.zeros(9, np.float32), backend=backend)
    with pytest.raises(ShapeError, match="out must not overlap bits"):
        kernels.decode_bf16(f32.view(np.uint16)[:8], f32, backend=backend)


@pytest.mark.parametrize(("codec", "size"), [("f32", 4000), ("bf16", 2000), ("int8", 4 * 260), ("int4", 4 * 132)])
def test_encoded_bytes_are_those_of_the_format(codec, size):
    assert kernels.encoded_bytes(codec, 1000) == size
    assert kernels.encoded_bytes(codec, 0) == 0


def round_trip(codec, values, residual, backend):
    n = len(values)
    blocks = np.empty(kernels.encoded_bytes(codec, n), np.uint8)
    kernels.encode_blocks(codec, values, residual, blocks, backend=backend)
    out = np.empty(n, np.float32)
    kernels.decode_blocks(codec, blocks, out, backend=backend)
    return out


def test_int4_values_are_nought_and_seven_powers_of_two(backend):
    values = np.array([64, -64, 32, 16, 8, 4, 2, 1, -1, 0, -0.0, 48, 47.9, 1.5, 1.49, 0.5, 0.49, -3], np.float32) * 0.25
    want = np.array([64, -64, 32, 16, 8, 4, 2, 1, -1, 0, 0, 64, 32, 2, 1, 1, 0, -4], np.float32) * 0.25
    np.testing.assert_array_equal(round_trip("int4", values, None, backend), want)


def test_int8_values_are_within_half_a_step_of_a_127th_of_the_largest(backend, rng):
    values = rng.normal(size=1000).astype(np.float32)
    out = round_trip("int8", values, None, backend)
    for at in range(0, 1000, 256):
        block = values[at : at + 256]
        step = np.abs(block).max() / 127
        assert np.abs(out[at : at + 256] - block).max() <= step / 2 * 1.0001
        largest = np.abs(block).argmax()
        assert out[at + largest] == pytest.approx(block[largest], rel=1e-6)


@pytest.mark.parametrize("codec", kernels.BLOCK_CODECS)
@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 5003])
def test_encode_blocks_with_error_feedback_loses_nothing_over_time(codec, n, backend, rng):
    values = rng.normal(size=n).astype(np.float32)
    residual, sent = np.zeros(n, np.float32), np.zeros(n)
    for _ in range(64):
        sent += round_trip(codec, values, residual, backend)
    np.testing.assert_allclose(sent + residual, 64.0 * values, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_less(np.abs(residual), 4.0)  # bounded by a step of the codec, whatever the number of rounds


@pytest.mark.parametrize("codec", kernels.BLOCK_CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encode_blocks_of_a_nonfinite_value_spoils_its_block_alone(codec, bad, backend):
    values = np.ones(700, np.float32)
    values[300] = bad
    residual = np.full(700, 0.25, np.float32)
    out = round_trip(codec, values, residual, backend)
    assert np.isnan(out[256:512]).all()
    assert np.isfinite(out[:256]).all()
    assert np.isfinite(out[512:]).all()
    assert not residual[256:512].any()


@pytest.mark.parametrize("codec", kernels.BLOCK_CODECS)
def test_encode_blocks_of_denormals_keeps_them_as_residual(codec, backend):
    values = np.full(300, 1e-40, np.float32)
    residual = np.zeros(300, np.float32)
    assert not round_trip(codec, values, residual, backend).any()
    np.testing.assert_array_equal(residual, values)


@pytest.mark.parametrize("codec", kernels.BLOCK_CODECS)
def test_codecs_of_blocks_of_both_backends_agree_bit_for_bit(codec, rng):
    values = (rng.normal(size=5003) * 10.0 ** rng.integers(-30, 30, 5003)).astype(np.float32)
    values[:256] = 0
    values[2000], values[3000] = np.nan, np.finfo(np.float32).max
    values[4100:4200] = np.ldexp(np.float32(1.5), np.arange(100) % 9 - 4)  # ties of int4
    results = []
    for name in BACKENDS:
        residual, blocks = values[::-1].copy(), np.empty(kernels.encoded_bytes(codec, 5003), np.uint8)
        residual[:] = np.where(np.isfinite(residual), residual * 1e-3, 0)
        kernels.encode_blocks(codec, values, residual, blocks, backend=name)
        results.append((blocks.tobytes(), residual.tobytes()))
    assert results[0][1] == results[1][1]
    size = len(results[0][0]) // -(-5003 // 256)
    for at in range(0, len(results[0][0]), size):  # the codes of a block without a scale stand for nothing
        ours, theirs = (np.frombuffer(r[0][at : at + size], np.uint8) for r in results)
        if not np.isnan(ours[:4].view(np.float32)[0]):
            np.testing.assert_array_equal(ours, theirs)


def test_codecs_of_blocks_with_wrong_arrays_refuse(backend):
    f32, u8 = np.zeros(300, np.float32), np.zeros(264, np.uint8)
    with pytest.raises(ConfigError, match="int8, int4; got 'int2'"):
        kernels.encode_blocks("int2", f32, None, u8, backend=backend)
    with pytest.raises(ConfigError, match="f32, bf16, int8, int4; got 'int2'"):
        kernels.encoded_bytes("int2", 3)
    with pytest.raises(ShapeError, match="out must be"):
        kernels.encode_blocks("int4", f32, None, u8[:-1], backend=backend)
    with pytest.raises(ShapeError, match="residual must be"):
        kernels.encode_blocks("int4", f32, f32[1:], u8, backend=backend)
    with pytest.raises(ShapeError, match="residual must not overlap values"):
        kernels.encode_blocks("int4", f32, f32, u8, backend=backend)
    with pytest.raises(ShapeError, match="blocks must be"):
        kernels.decode_blocks("int8", u8, f32, backend=backend)


# ---- checksum ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # the next three: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksum_of_known_vectors_equals_the_published_values(data, value, backend):
    assert kernels.checksum(data, backend=backend) == value
    assert kernels._C.checksum(data, 0, by_tables=True) == value


def bitwise_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_checksum_of_every_length_and_alignment_equals_the_definition(rng):
    data = rng.integers(0, 256, 2000, dtype=np.uint8)
    for n in [*range(40), 255, 767, 768, 769, 1543, 1990]:
        for start in (0, 1, 7):
            piece = data[start : start + n]
            want = bitwise_crc32c(piece.tobytes())
            assert kernels.checksum(piece, backend="cpu") == want
            assert kernels.checksum(piece, backend="reference") == want
            assert kernels._C.checksum(piece, 0, by_tables=True) == want


@pytest.mark.parametrize("n", [12_287, 12_288, 12_289, 100_003])
def test_checksum_of_long_buffers_agrees_between_all_ways(n, rng):
    data = rng.integers(0, 256, n, dtype=np.uint8)
    want = kernels._C.checksum(data, 5, by_tables=True)
    assert kernels.checksum(data, 5, backend="cpu") == want
    assert kernels.checksum(data, 5, backend="reference") == want


def test_checksum_in_pieces_equals_that_of_the_whole(backend, rng):
    data = rng.integers(0, 256, 50_000, dtype=np.uint8)
    whole = kernels.checksum(data, backend=backend)
    for cut in (0, 1, 777, 16_384, 49_999, 50_000):
        assert kernels.checksum(data[cut:], kernels.checksum(data[:cut], backend=backend), backend=backend) == whole


def test_checksum_changes_with_every_single_bit(backend):
    data = np.zeros(64, np.uint8)
    seen = {kernels.checksum(data, backend=backend)}
    for bit in range(512):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(kernels.checksum(data, backend=backend))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 513


def test_checksum_takes_any_contiguous_buffer_and_refuses_others(backend):
    array = np.arange(12, dtype=np.float64).reshape(3, 4)
    want = kernels.checksum(array.tobytes(), backend=backend)
    for same in (array, memoryview(array), bytearray(array.tobytes())):
        assert kernels.checksum(same, backend=backend) == want
    for bad in (array[:, ::2], array.T, "text", 3):
        with pytest.raises(ShapeError, match="C-contiguous"):
            kernels.checksum(bad, backend=backend)
    with pytest.raises(ShapeError, match="2\\*\\*32"):
        kernels.checksum(array, -1, backend=backend)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 767, 769, 12_289, (1 << 20) - 1, (1 << 20) + 5, 3_000_001])
@pytest.mark.parametrize("shift", [0, 3])
def test_copy_with_checksum_copies_all_and_nothing_else(n, shift, backend, rng):
    if backend == "reference" and n > 1 << 20:
        pytest.skip("the numpy version has no second way for much")
    source = rng.integers(0, 256, n + 8, dtype=np.uint8)[shift : shift + n]
    room = np.full(n + 32, 0xA5, np.uint8)
    target = room[8 + shift : 8 + shift + n]
    assert kernels.copy_with_checksum(source, target, 77, backend=backend) == kernels.checksum(source, 77)
    np.testing.assert_array_equal(target, source)
    assert (room[: 8 + shift] == 0xA5).all()
    assert (room[8 + shift + n :] == 0xA5).all()


def test_copy_with_checksum_of_wrong_arrays_refuses(backend):
    room = np.zeros(64, np.uint8)
    with pytest.raises(ShapeError, match="target must be"):
        kernels.copy_with_checksum(room[:8], room[8:15], backend=backend)
    with pytest.raises(ShapeError, match="target must not overlap source"):
        kernels.copy_with_checksum(room[:8], room[4:12], backend=backend)
    with pytest.raises(ShapeError, match="go on from"):
        kernels.copy_with_checksum(room[:8], room[8:16], 1 << 32, backend=backend)


@pytest.mark.parametrize("n", [0, 1, 15, (1 << 16) - 1, 1 << 16, (1 << 16) + 17, 1_000_003])
@pytest.mark.parametrize(("from_", "to"), [(0, 0), (1, 0), (0, 1), (3, 14)])
def test_copy_copies_all_and_nothing_else(n, from_, to, backend, rng):
    source = rng.standard_normal(n + 16, dtype=np.float32)[from_ : from_ + n]
    room = np.full(n + 48, np.nan, np.float32)
    target = room[16 + to : 16 + to + n]
    kernels.copy(source, target, backend=backend)
    np.testing.assert_array_equal(target, source)
    assert np.isnan(room[: 16 + to]).all()
    assert np.isnan(room[16 + to + n :]).all()


def test_copy_of_wrong_arrays_refuses(backend):
    room = np.zeros(64, np.float32)
    with pytest.raises(ShapeError, match="target must "):
        kernels.copy(room[:8], room[8:15], backend=backend)
    with pytest.raises(ShapeError, match="source must be a C-contiguous"):
        kernels.copy(room[:16:2], room[16:24], backend=backend)
    with pytest.raises(ShapeError, match="target must be"):
        kernels.copy(room[:8], room[16:32:2], backend=backend)
    room.flags.writeable = False
    with pytest.raises(ShapeError, match=r"target (must be a C-contiguous|is written to and must be) writable"):
        kernels.copy(room[:8], room[8:16], backend=backend)
    room.flags.writeable = True
    with pytest.raises(ShapeError, match="target must not overlap source"):
        kernels.copy(room[:8], room[4:12], backend=backend)


# ---- words -------------------------------------------------------------------------------------------------


def test_words_stored_are_loaded_back_and_touch_nothing_else():
    memory = np.zeros(64, np.uint8)
    kernels.store_word(memory, 8, 0x0123456789ABCDEF)
    kernels.store_word(memory, 56, 2**64 - 1)
    assert kernels.load_word(memory, 8) == 0x0123456789ABCDEF
    assert memory.view(np.uint64).tolist() == [0, 0x0123456789ABCDEF, 0, 0, 0, 0, 0, 2**64 - 1]
    out = np.zeros(3, np.uint64)
    kernels.load_words(memory, np.array([56, 0, 8]), out)
    assert out.tolist() == [2**64 - 1, 0, 0x0123456789ABCDEF]


def test_words_are_read_from_read_only_memory_but_not_written():
    memory = np.zeros(16, np.uint8)
    memory.flags.writeable = False
    assert kernels.load_word(memory, 8) == 0
    with pytest.raises(ShapeError, match="writable"):
        kernels.store_word(memory, 8, 1)


@pytest.mark.parametrize("offset", [-8, 57, 64, 2**62, -(2**63)])
def test_words_outside_the_buffer_are_refused(offset):
    memory = np.zeros(64, np.uint8)
    out = np.zeros(1, np.uint64)
    for call in (
        lambda: kernels.load_word(memory, offset),
        lambda: kernels.store_word(memory, offset, 1),
        lambda: kernels.load_words(memory, np.array([offset]), out),
    ):
        with pytest.raises(ShapeError, match="within the buffer"):
            call()
    assert not memory.any()


def test_words_not_aligned_or_too_wide_are_refused():
    memory = np.zeros(64, np.uint8)
    with pytest.raises(ShapeError, match="multiple of 8"):
        kernels.load_word(memory, 4)
    with pytest.raises(ShapeError, match="multiple of 8"):
        kernels.load_word(memory[4:], 0)
    with pytest.raises(ShapeError, match="within the buffer"):
        kernels.load_word(memory[:4], 0)
    for value in (-1, 2**64):
        with pytest.raises(ShapeError, match="2\\*\\*64"):
            kernels.store_word(memory, 0, value)
    with pytest.raises(ShapeError, match="out must be"):
        kernels.load_words(memory, np.array([0, 8]), np.zeros(1, np.uint64))


# ---- choice of the backend ---------------------------------------------------------------------------------


@pytest.fixture
def without_native(monkeypatch):
    monkeypatch.setattr(kernels, "_C", None)
    monkeypatch.setattr(kernels, "_MISSING", "never built")
    monkeypatch.setattr(kernels, "_has_warned", False)


@pytest.mark.usefixtures("without_native")
def test_auto_without_the_compiled_module_falls_back_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert kernels.checksum(b"123456789") == 0xE3069283
    assert [r.name for r in caplog.records] == ["pyddl.core.kernels"]
    assert "never built" in caplog.text
    assert "pip install" in caplog.text


@pytest.mark.usefixtures("without_native")
def test_cpu_without_the_compiled_module_is_refused_and_names_the_rebuild():
    for call in (
        lambda: kernels.checksum(b"", backend="cpu"),
        lambda: kernels.load_word(np.zeros(8, np.uint8), 0),
        lambda: kernels.store_word(np.zeros(8, np.uint8), 0, 1),
        lambda: kernels.load_words(np.zeros(8, np.uint8), np.zeros(1, np.int64), np.zeros(1, np.uint64)),
    ):
        with pytest.raises(KernelUnavailable, match=r"never built.*pip install"):
            call()


@pytest.mark.usefixtures("without_native")
def test_describe_backends_without_the_compiled_module_says_why():
    assert kernels.describe_backends()["cpu"] == "missing: never built"


def test_describe_backends_with_the_compiled_module_names_its_loops():
    assert kernels._C.instruction_set() in kernels.describe_backends()["cpu"]


def test_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="auto, cpu, reference"):
        kernels.checksum(b"", backend="gpu")
