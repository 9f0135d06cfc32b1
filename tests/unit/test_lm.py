"""The language model and what surrounds its training loop, as far as it needs no learner."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pyddl.config import load_config, to_toml
from pyddl.errors import CheckpointError, ConfigError
from pyddl.tasks.corpus import Corpus
from pyddl.tasks.lm import LMConfig, _adamw, _command, baseline, evaluate, evaluate_run, learning_rate
from pyddl.tasks.model import PRESETS, ByteLM, ModelConfig, rotate

TINY = LMConfig(preset="tiny", batch_size=2, validation_bytes=4096, warmup_share=0.05)


def some_text(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


@pytest.fixture
def books(tmp_path: Path) -> str:
    for index in range(6):
        (tmp_path / f"book{index}.txt").write_text(f"In the beginning of book {index} there was a word. " * 60)
    return str(tmp_path)


# Model --------------------------------------------------------------------------------------------


def test_model_future_bytes_do_not_change_past_logits() -> None:
    model = ByteLM(PRESETS["tiny"])
    x = torch.from_numpy(some_text(32).astype(np.int64))[None]
    changed = x.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    one, other = model(x)[0], model(changed)[0]
    assert torch.equal(one[:, :20], other[:, :20])
    assert not torch.allclose(one[:, 20:], other[:, 20:])


def test_model_every_past_byte_changes_the_last_logits() -> None:
    model = ByteLM(ModelConfig(layers=1, heads=2, width=32, context=8))
    x = torch.arange(8)[None]
    for position in range(8):
        changed = x.clone()
        changed[0, position] = 99
        assert not torch.equal(model(x)[0][0, -1], model(changed)[0][0, -1])


def test_rotate_product_depends_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 16, generator=generator, dtype=torch.float64)
    angles = torch.outer(torch.arange(40, dtype=torch.float64), 0.3 ** torch.arange(8, dtype=torch.float64))
    turned_q, turned_k = (rotate(v.expand(40, 16), angles.cos(), angles.sin()) for v in (q, k))
    products = turned_q @ turned_k.T  # [40, 40]
    for distance in (0, 1, 7):
        diagonal = torch.diagonal(products, -distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (products[:, 0] - products[0, 0]).abs().max() > 0.1
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1).expand(40))


def test_model_order_of_past_bytes_matters() -> None:
    model = ByteLM(ModelConfig(layers=1, heads=2, width=32, context=8))
    one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(one)[0][0, -1], model(other)[0][0, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("preset", ["tiny", "demo"])
def test_model_initial_loss_is_that_of_a_uniform_guess(preset: str) -> None:
    model = ByteLM(PRESETS[preset])
    assert abs(evaluate(model, some_text(4097)) - math.log(256)) < 0.1


def test_model_seed_decides_the_parameters_and_leaves_the_global_generator() -> None:
    before = torch.get_rng_state()
    one, same, other = (
        ByteLM(PRESETS["tiny"], seed=1),
        ByteLM(PRESETS["tiny"], seed=1),
        ByteLM(PRESETS["tiny"], seed=2),
    )
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_model_has_no_buffers_and_no_shared_tensors() -> None:
    model = ByteLM(PRESETS["tiny"])
    assert not list(model.buffers())
    assert len(list(model.named_parameters())) == len(list(model.named_parameters(remove_duplicate=False)))
    assert all(parameter.device.type == "cpu" and parameter.isfinite().all() for parameter in model.parameters())


def test_model_all_parameters_receive_a_gradient() -> None:
    model = ByteLM(PRESETS["tiny"])
    x = torch.from_numpy(some_text(64).astype(np.int64)).view(2, 32)
    model(x, x)[1].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_model_overfits_a_tiny_text() -> None:
    lm = dataclasses.replace(TINY, lr=1e-2, weight_decay=0.0)
    model = ByteLM(lm.model)
    optimizer = _adamw(model, lm)
    text = torch.from_numpy(some_text(66).astype(np.int64)).view(2, 33)
    for _ in range(120):
        loss = model(text[:, :-1], text[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 0.1


def test_model_input_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 32; got 33"):
        ByteLM(PRESETS["tiny"])(torch.zeros(1, 33, dtype=torch.int64))


def test_model_config_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 2"):
        ModelConfig(layers=1, heads=3, width=32, context=8)


def test_demo_preset_is_small_enough_for_one_core() -> None:
    assert 0.3e6 <= ByteLM(PRESETS["demo"]).num_parameters <= 0.8e6


# Settings -----------------------------------------------------------------------------------------


def test_lm_config_survives_toml(tmp_path: Path) -> None:
    lm = LMConfig(data="a,b", layers=3, lr=1e-3)
    (tmp_path / "c.toml").write_text(to_toml({"lm": lm}))
    assert load_config(tmp_path / "c.toml", sections={"lm": LMConfig})[1]["lm"] == lm


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preset", "huge"),
        ("layers", -1),
        ("batch_size", 0),
        ("lr", 0.0),
        ("lr", math.nan),
        ("warmup_steps", -1),
        ("warmup_share", 1.5),
        ("min_lr_ratio", 1.5),
        ("weight_decay", -0.1),
        ("grad_clip", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("validation_bytes", -1),
        ("threads", 0),
    ],
)
def test_lm_config_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"lm\.{name} must be"):
        LMConfig(**{name: value})


def test_lm_config_overrides_replace_parts_of_the_preset() -> None:
    assert LMConfig(preset="tiny", width=64).model == dataclasses.replace(PRESETS["tiny"], width=64)


def test_lm_config_data_paths_split_at_commas_and_path_separators() -> None:
    assert LMConfig().data_paths is None
    assert LMConfig(data=" , ").data_paths is None
    assert LMConfig(data=f"/a, b{os.pathsep}c").data_paths == [Path("/a"), Path("b"), Path("c")]


def test_learning_rate_rises_then_falls_to_its_floor() -> None:
    lm = LMConfig(lr=1.0, warmup_share=0.25, min_lr_ratio=0.1)
    assert 0 < learning_rate(lm, 0, 0.0) < 0.01
    assert learning_rate(lm, 125, 0.124) == pytest.approx(0.5, rel=0.05)  # half of the way up
    assert learning_rate(lm, 500, 0.5) == pytest.approx(0.55)
    assert learning_rate(lm, 1000, 1.0) == pytest.approx(0.1)
    assert learning_rate(lm, 1100, 1.7) == pytest.approx(0.1)  # a clock may run past the end
    assert learning_rate(dataclasses.replace(lm, warmup_share=0.0), 0, 0.0) == 1.0


def test_learning_rate_of_a_run_without_an_end_rises_in_steps_and_stays() -> None:
    lm = LMConfig(lr=1.0, warmup_steps=10)
    assert learning_rate(lm, 0, None) == pytest.approx(0.1)
    assert learning_rate(lm, 9, None) == pytest.approx(1.0)
    assert learning_rate(lm, 10**6, None) == 1.0


def test_adamw_gains_are_not_decayed() -> None:
    model = ByteLM(PRESETS["tiny"])
    decay = {id(p): group["weight_decay"] for group in _adamw(model, TINY).param_groups for p in group["params"]}
    assert {p.dim(): decay[id(p)] for p in model.parameters()} == {1: 0.0, 2: TINY.weight_decay}


# Evaluation and baseline --------------------------------------------------------------------------


def test_evaluate_is_independent_of_batch_size_and_keeps_the_mode() -> None:
    model = ByteLM(PRESETS["tiny"]).train()
    text = some_text(1000)
    assert evaluate(model, text, batch_size=1) == pytest.approx(evaluate(model, text, batch_size=7), abs=1e-5)
    assert evaluate(model, text) == evaluate(model, text)
    assert model.training
    model.eval()
    evaluate(model, text)
    assert not model.training


def test_evaluate_agrees_with_one_window_by_hand() -> None:
    model = ByteLM(PRESETS["tiny"])
    text = some_text(33)
    logits = model(torch.from_numpy(text[:32].astype(np.int64))[None])[0][0].detach()
    log_p = torch.log_softmax(logits, dim=-1)
    by_hand = -log_p[torch.arange(32), torch.from_numpy(text[1:].astype(np.int64))].mean()
    assert evaluate(model, text) == pytest.approx(float(by_hand), abs=1e-5)


def test_evaluate_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than one window"):
        evaluate(ByteLM(PRESETS["tiny"]), some_text(32))


def test_baseline_learns_and_repeats_bit_for_bit(books: str) -> None:
    lm = dataclasses.replace(TINY, data=books)
    one, other = (baseline(lm, total_tokens=30 * 64, seed=1, evaluate_every_steps=10) for _ in range(2))
    assert one["losses"] == other["losses"]
    assert [step for step, _ in one["losses"]] == [10, 20, 30]
    assert one["tokens"] == 30 * 64
    assert one["losses"][-1][1] == one["loss"] < one["losses"][0][1] < math.log(256)


def test_baseline_data_parallel_takes_larger_and_fewer_steps(books: str) -> None:
    result = baseline(dataclasses.replace(TINY, data=books), total_tokens=10 * 64, data_parallel=2)
    assert (result["steps"], result["tokens"]) == (5, 640)


def test_baseline_fewer_tokens_than_a_step_is_refused(books: str) -> None:
    with pytest.raises(ConfigError, match="one step of 64 tokens"):
        baseline(dataclasses.replace(TINY, data=books), total_tokens=63)


def test_evaluate_run_exported_file_gives_the_loss_of_its_parameters(books: str, tmp_path: Path) -> None:
    lm = dataclasses.replace(TINY, data=books)
    model = ByteLM(lm.model, seed=7)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    held_out = Corpus.open(lm.data_paths).validation_bytes(lm.validation_bytes)
    assert evaluate_run(tmp_path / "model.safetensors", lm) == evaluate(model, held_out)


def test_evaluate_run_other_model_names_the_tensor(books: str, tmp_path: Path) -> None:
    save_file(ByteLM(ModelConfig(2, 2, 64, 32)).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attention_norm\.weight has the shape \(64,\)"):
        evaluate_run(tmp_path / "model.safetensors", dataclasses.replace(TINY, data=books))


def test_evaluate_run_missing_file_is_named(books: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.safetensors does not"):
        evaluate_run(tmp_path / "nothing.safetensors", dataclasses.replace(TINY, data=books))


# Commands -----------------------------------------------------------------------------------------


def test_command_baseline_prints_json(books: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"lm.data={books}", "lm.preset=tiny", "lm.batch_size=2", "run.max_steps=3", "sync.interval=1"]
    assert _command(["baseline", "--data-parallel", "2", *words]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


def test_command_evaluate_reads_the_settings_of_the_run(
    books: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "model.safetensors"
    lm = dataclasses.replace(TINY, data=books)
    save_file(ByteLM(lm.model).state_dict(), exported)
    (tmp_path / "c.toml").write_text(to_toml({"lm": lm}))
    assert _command(["evaluate", str(exported), "--config", str(tmp_path / "c.toml")]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(math.log(256), abs=0.2)


def test_command_without_an_end_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(["baseline", "lm.preset=tiny"]) == 2
    assert "set run.max_tokens or run.max_steps" in capsys.readouterr().err
    assert _command(["train", "lm.preset=tiny"]) == 2
    assert "the run must have an end" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["basline"], "unknown command 'basline'; did you mean baseline?"),
        (["baseline", "--evrey", "5"], "unknown option --evrey; did you mean --every?"),
        (["evaluate"], "the following arguments are required: RUN (see"),
        (["baseline", "run.seed=1", "--every", "3", "run.seed=-2"], "run.seed must be 0 or more; got -2"),
    ],
)
def test_command_mistake_is_one_sentence_and_status_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
