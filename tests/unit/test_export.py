"""Exports: what other programs load is the model, tensor for tensor."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from pyddl.core.layout import Layout, TensorSpec, build_layout
from pyddl.errors import CheckpointError, ConfigError
from pyddl.store.checkpoint import Checkpoint, FragmentState, write_checkpoint
from pyddl.store.export import export_safetensors

SPECS = [
    TensorSpec("embed.weight", (50, 8), "float32", "embedding", aliases=("head.weight", "lm.weight")),
    TensorSpec("frozen.weight", (4, 4), "float32", "frozen", aliases=("frozen.alias",)),
    TensorSpec("blocks.0.weight", (8, 20), "bfloat16", "parameter"),
    TensorSpec("blocks.0.half", (3, 5, 2), "float16", "parameter"),
    TensorSpec("blocks.0.double", (7,), "float64", "parameter"),
    TensorSpec("scale", (), "float32", "parameter"),
    TensorSpec("none", (0, 3), "float32", "parameter"),
    TensorSpec("norm.running_mean", (8,), "float32", "buffer"),
    TensorSpec("norm.num_batches", (), "int64", "counter"),
    TensorSpec("norm.mask", (5,), "bool", "counter"),
    TensorSpec("norm.small", (3,), "uint8", "counter"),
    TensorSpec("tiny", (6,), "float8_e4m3fn", "parameter"),
]


def cut(layout: Layout, values: dict[str, np.ndarray], step: int = 3) -> Checkpoint:
    """A checkpoint of a model with these values, cut by hand: float32 for floats, int64 for counters."""
    states = []
    for fragment in layout.fragments:
        theta = np.empty(fragment.num_elements, np.float32)
        for s in fragment.segments:
            flat = values[layout.tensors[s.tensor].name].reshape(-1)
            theta[s.offset : s.offset + s.stop - s.start] = flat[s.start : s.stop]
        counters = [values[layout.tensors[i].name].reshape(-1) for i, _ in fragment.counters]
        states.append(FragmentState(1, theta, None, np.concatenate([np.zeros(0, np.int64), *counters])))
    return Checkpoint(step, layout, tuple(states), {}, "", {})


def make_values(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    for spec in SPECS:
        if spec.role == "counter":
            values[spec.name] = random.integers(0, 2, spec.shape).astype(np.int64)
        else:
            values[spec.name] = random.standard_normal(spec.shape).astype(np.float32)
    values["norm.num_batches"] = np.array(1 << 40, np.int64)
    values["norm.small"] = np.array([0, 7, 255], np.int64)
    return values


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    layout = build_layout(SPECS, num_fragments=5)  # tensors are split: fragments hold about 120 elements
    assert any(s.start > 0 for fragment in layout.fragments for s in fragment.segments)
    write_checkpoint(folder, cut(layout, make_values()), keep=2)
    return folder


def test_export_of_a_run_holds_every_tensor_in_its_own_shape_and_dtype(run: Path, tmp_path: Path) -> None:
    out = export_safetensors(run, tmp_path / "model.safetensors")
    found = safetensors.torch.load_file(out)
    values = make_values()
    assert set(found) == {spec.name for spec in SPECS} - {"frozen.weight"}
    for spec in SPECS:
        if spec.role == "frozen":
            continue
        dtype = torch.float32 if spec.name == "tiny" else getattr(torch, spec.dtype)
        # torch's own cast is the judge, that of bfloat16 included.
        wanted = torch.from_numpy(values[spec.name]).to(dtype)
        assert found[spec.name].dtype == dtype, spec.name
        assert tuple(found[spec.name].shape) == spec.shape, spec.name
        assert torch.equal(found[spec.name], wanted), spec.name
    assert os.listdir(tmp_path / "run") == ["checkpoint-0000000003.h5"]
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "run"]


def test_export_metadata_names_aliases_frozen_and_widened(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = export_safetensors(run, tmp_path / "model.safetensors")
    with safetensors.safe_open(out, "numpy") as file:
        metadata = file.metadata()
    assert json.loads(metadata["pyddl.aliases"]) == {
        "head.weight": "embed.weight",
        "lm.weight": "embed.weight",
    }
    assert json.loads(metadata["pyddl.frozen"]) == ["frozen.weight", "frozen.alias"]
    assert json.loads(metadata["pyddl.widened"]) == ["tiny"]
    assert metadata["pyddl.step"] == "3"
    assert metadata["pyddl.fingerprint"] == build_layout(SPECS, num_fragments=5).fingerprint
    assert metadata["format"] == "pt"
    assert "2 frozen tensors" in caplog.text


def test_export_tensors_are_aligned_and_without_gaps(run: Path, tmp_path: Path) -> None:
    data = export_safetensors(run, tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    end = 0
    for name, item in header.items():
        if name != "__metadata__":
            assert item["data_offsets"][0] == end
            width = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2, "BOOL": 1, "U8": 1}[item["dtype"]]
            assert end % width == 0
            end = item["data_offsets"][1]
    assert len(data) == 8 + length + end


def test_export_values_beyond_the_narrow_types_become_infinite_without_a_warning(tmp_path: Path) -> None:
    layout = build_layout([TensorSpec("half", (4,), "float16", "parameter")])
    values = {"half": np.array([1e6, -1e6, 65504.0, np.nan], np.float32)}
    write_checkpoint(tmp_path, cut(layout, values), keep=2)
    found = safetensors.numpy.load_file(export_safetensors(tmp_path, tmp_path / "m.safetensors"))["half"]
    np.testing.assert_array_equal(found, np.array([np.inf, -np.inf, 65504.0, np.nan], np.float16))


def test_export_of_one_checkpoint_takes_that_one(run: Path, tmp_path: Path) -> None:
    layout = build_layout(SPECS, num_fragments=5)
    write_checkpoint(run, cut(layout, make_values(seed=9), step=8), keep=2)
    old = export_safetensors(run / "checkpoint-0000000003.h5", tmp_path / "old.safetensors")
    new = export_safetensors(run, tmp_path / "new.safetensors")
    scales = [float(safetensors.torch.load_file(file)["scale"]) for file in (old, new)]
    assert scales == [float(make_values(seed)["scale"]) for seed in (0, 9)]


def test_export_with_a_damaged_newest_checkpoint_uses_the_one_before_and_says_so(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(run / "checkpoint-0000000003.h5", run / "checkpoint-0000000004.h5")
    os.truncate(run / "checkpoint-0000000004.h5", 3000)
    out = export_safetensors(run, tmp_path / "model.safetensors")
    assert float(safetensors.torch.load_file(out)["scale"]) == float(make_values()["scale"])
    assert "0004.h5" in caplog.text
    with pytest.raises(CheckpointError, match=r"0004\.h5.*truncated"):
        export_safetensors(run / "checkpoint-0000000004.h5", out)


def test_export_with_wrong_paths_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing does not exist"):
        export_safetensors(tmp_path / "missing", tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match="that is a folder"):
        export_safetensors(run, tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        export_safetensors(run, tmp_path / "missing" / "m.safetensors")
    checkpoint = run / "checkpoint-0000000003.h5"
    with pytest.raises(ConfigError, match="its own checkpoint"):
        export_safetensors(run, checkpoint)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="found none"):
        export_safetensors(tmp_path / "empty", tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()
    export_safetensors(checkpoint, tmp_path / "m.safetensors")


def test_export_on_a_full_disk_leaves_the_one_before(run: Path, tmp_path: Path) -> None:
    out = export_safetensors(run, tmp_path / "model.safetensors")
    before = out.read_bytes()
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model\.safetensors must be written in whole; File too large"):
            export_safetensors(run, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_handler)
    assert out.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "run"]
