"""Train the byte-level language model: the script that a user of pyddl would write.

Here: the section ``[lm]``, the training loop of a learner, the same training without pyddl as a reference
(:func:`baseline`), and the evaluation of a run's global model. Not here: the model, the data, and everything
that moves parameters between learners.

    mpiexec -n 5 python -m pyddl.tasks.lm train --config run.toml run.max_steps=1000
    python -m pyddl.tasks.lm evaluate RUN
    python -m pyddl.tasks.lm baseline --data-parallel 4 run.max_steps=1000

Losses are in nats per byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import pyddl

from ..commands import CommandParser, exit_status_of
from ..config import Config, load_config, require, require_one_of
from ..errors import CheckpointError, ConfigError
from .corpus import Batches, Corpus
from .model import PRESETS, ByteLM, ModelConfig

__all__ = ["RECOMMENDED", "LMConfig", "baseline", "evaluate", "evaluate_run", "learning_rate", "main"]

_log = logging.getLogger(__name__)

_EVALUATION_BATCH = 64

RECOMMENDED = (
    "sync.interval=2:0%,4:60%",
    "sync.receipt=rebase",
    "sync.merge_rule=mean",
    "sync.num_fragments=4",
)
"""Settings that train this small model well in short runs (docs/results.md); below the file and the command line."""


@dataclass(frozen=True)
class LMConfig:
    """Section ``[lm]``: data, model and inner optimizer of the language model.

    Attributes:
        data: files or folders of text, separated by commas or the system's path separator; empty: the source
            of Python's standard library.
        preset: shape of the model: tiny, demo, small or base (model.py); the next four override parts of it.
        layers: number of blocks; 0: the preset's.
        heads: attention heads; 0: the preset's.
        width: size of the residual stream; 0: the preset's.
        context: bytes per training window; 0: the preset's.
        batch_size: windows per step and rank, >= 1.
        lr: peak learning rate of AdamW, > 0.
        warmup_share: share of the run over which the rate rises to its peak, 0..1.
        warmup_steps: the same in steps, for a run without an end, >= 0.
        min_lr_ratio: the rate at the end as a share of the peak, 0..1; in between it follows a cosine.
        weight_decay: of the matrices (gains are not decayed), >= 0.
        grad_clip: largest norm of the gradient; 0: not clipped.
        beta1: AdamW's decay of the first moment, 0 <= beta1 < 1.
        beta2: AdamW's decay of the second moment, 0 <= beta2 < 1.
        validation_bytes: size of the held-out sample; 0: all held-out text.
        threads: torch's CPU threads per rank, >= 1.
    """

    data: str = ""
    preset: str = "demo"
    layers: int = 0
    heads: int = 0
    width: int = 0
    context: int = 0
    batch_size: int = 8
    lr: float = 8e-3
    warmup_share: float = 0.35
    warmup_steps: int = 100
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    validation_bytes: int = 131_072
    threads: int = 1

    def __post_init__(self) -> None:
        """Check every range."""
        require_one_of("lm.preset", self.preset, PRESETS)
        for name in ("layers", "heads", "width", "context"):
            value = getattr(self, name)
            require(value >= 0, f"lm.{name}", "0 (the preset's) or more", value)
        require(self.batch_size >= 1, "lm.batch_size", "at least 1", self.batch_size)
        require(math.isfinite(self.lr) and self.lr > 0, "lm.lr", "positive and finite", self.lr)
        require(0 <= self.warmup_share <= 1, "lm.warmup_share", "0 to 1", self.warmup_share)
        require(self.warmup_steps >= 0, "lm.warmup_steps", "0 or more", self.warmup_steps)
        require(0 <= self.min_lr_ratio <= 1, "lm.min_lr_ratio", "0 to 1", self.min_lr_ratio)
        require(0 <= self.weight_decay < math.inf, "lm.weight_decay", "0 or more, and finite", self.weight_decay)
        require(0 <= self.grad_clip < math.inf, "lm.grad_clip", "0 (off) or more, and finite", self.grad_clip)
        require(0 <= self.beta1 < 1, "lm.beta1", "at least 0 and below 1", self.beta1)
        require(0 <= self.beta2 < 1, "lm.beta2", "at least 0 and below 1", self.beta2)
        require(self.validation_bytes >= 0, "lm.validation_bytes", "0 (all) or more", self.validation_bytes)
        require(self.threads >= 1, "lm.threads", "at least 1", self.threads)
        _ = self.model  # checks that width and heads fit

    @property
    def model(self) -> ModelConfig:
        """Shape of the model: the preset with its overrides."""
        overrides = {name: getattr(self, name) for name in ("layers", "heads", "width", "context")}
        return dataclasses.replace(PRESETS[self.preset], **{name: n for name, n in overrides.items() if n})

    @property
    def data_paths(self) -> list[Path] | None:
        """What :meth:`Corpus.open` takes."""
        words = self.data.replace(os.pathsep, ",").split(",")
        return [Path(word.strip()).expanduser() for word in words if word.strip()] or None


def main(config: Config, lm: LMConfig) -> None:
    """Train one learner's rank, or serve as the syncer: which of them, :func:`pyddl.init` finds out.

    Args:
        config: the run.
        lm: the task.
    """
    corpus = Corpus.open(lm.data_paths)  # first, so that a wrong path is found before anything is started
    session = pyddl.init(config, task={"lm": lm})  # the sync rank serves inside and never comes back
    torch.set_num_threads(lm.threads)

    model = ByteLM(lm.model, seed=config.run.seed)
    optimizer = _adamw(model, lm)
    learner = session.attach(model, optimizer)
    text = corpus.train_bytes(learner.learner_id, learner.num_learners)  # [n] uint8, nobody else's
    stream = (learner.learner_id, learner.rank)
    batches = Batches(text, lm.batch_size, lm.model.context, config.run.seed, stream=stream)

    has_end = bool(config.run.max_steps or config.run.max_tokens)

    for x, y in learner.shard(batches):  # [batch, context] int64 each; ends when the run ends
        _set_lr(optimizer, learning_rate(lm, learner.step_count, learner.progress if has_end else None))
        loss = model(x, y)[1]
        loss.backward()
        learner.average_gradients()
        if lm.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), lm.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        learner.step(tokens=x.numel(), loss=loss.detach())
    learner.close()


def baseline(
    lm: LMConfig,
    *,
    total_tokens: int,
    data_parallel: int = 1,
    seed: int = 0,
    evaluate_every_steps: int = 0,
) -> dict[str, Any]:
    """Train the same model on the same data without pyddl: what a run is to be compared with.

    One process and one plain loop. With ``data_parallel`` = M it is the data-parallel reference of M learners
    at equal tokens: each batch joins what M learners would have read in that step, so the batch is M times as
    large and the gradient is the one that an all-reduce over M replicas gives.

    Args:
        lm: the task.
        total_tokens: bytes to train on; rounded down to whole steps, at least one.
        data_parallel: M, >= 1.
        seed: of parameters and data order, as ``run.seed``.
        evaluate_every_steps: measure the held-out loss so often; 0: at the end only.

    Returns: ``loss`` (held-out, at the end), ``losses`` (list of [step, held-out loss]), ``train_loss`` (mean
        of the last 5 % of the steps), ``steps``, ``tokens``, ``num_parameters``, ``time_s`` (of training,
        evaluations not counted).
    """
    require(data_parallel >= 1, "data_parallel", "at least 1", data_parallel)
    tokens_per_step = data_parallel * lm.batch_size * lm.model.context
    steps = total_tokens // tokens_per_step
    require(steps >= 1, "total_tokens", f"enough for one step of {tokens_per_step} tokens", total_tokens)
    torch.set_num_threads(lm.threads)
    corpus = Corpus.open(lm.data_paths)
    held_out = corpus.validation_bytes(lm.validation_bytes)
    model = ByteLM(lm.model, seed=seed)
    optimizer = _adamw(model, lm)
    sources = [
        Batches(corpus.train_bytes(m, data_parallel), lm.batch_size, lm.model.context, seed, stream=(m, 0))
        for m in range(data_parallel)
    ]

    losses: list[tuple[int, float]] = []
    tail: list[float] = []
    training_s = 0.0
    for step in range(steps):
        start_s = time.monotonic()
        pairs = [next(source) for source in sources]
        x, y = (
            torch.cat([pair[0] for pair in pairs]),
            torch.cat([pair[1] for pair in pairs]),
        )  # [M * batch, context]
        _set_lr(optimizer, learning_rate(lm, step, step / steps))
        loss = model(x, y)[1]
        loss.backward()
        if lm.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), lm.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= 0.95 * (steps - 1):
            tail.append(loss.item())
        training_s += time.monotonic() - start_s
        last = step == steps - 1
        if last or (evaluate_every_steps and (step + 1) % evaluate_every_steps == 0):
            losses.append((step + 1, evaluate(model, held_out)))
            _log.info("baseline: step %d of %d, held-out loss %.4f", step + 1, steps, losses[-1][1])
    return {
        "loss": losses[-1][1],
        "losses": losses,
        "train_loss": sum(tail) / len(tail),
        "steps": steps,
        "tokens": steps * tokens_per_step,
        "num_parameters": model.num_parameters,
        "time_s": training_s,
    }


@torch.inference_mode()
def evaluate(model: ByteLM, data: NDArray[np.uint8], *, context: int = 0, batch_size: int = _EVALUATION_BATCH) -> float:
    """Mean loss over a text, in nats per byte; the same for equal parameters and text.

    The text is read in windows that do not overlap, so a byte is predicted from at most ``context`` and on
    average from half as many bytes before it. A rest shorter than a window is left out.

    Args:
        model: in any mode; its mode is kept.
        data: [n] uint8, n > ``context``.
        context: length of a window; 0: the model's.
        batch_size: windows at a time; changes the speed only (up to rounding).
    """
    context = context or model.config.context
    num_windows = (data.size - 1) // context
    require(num_windows >= 1, "the held-out text", f"longer than one window ({context} bytes)", int(data.size))
    text = torch.from_numpy(data[: num_windows * context + 1].astype(np.int64))
    x, y = text[:-1].view(num_windows, context), text[1:].view(num_windows, context)
    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, num_windows, batch_size):
        piece = slice(start, start + batch_size)
        total += float(model(x[piece], y[piece])[1]) * x[piece].shape[0]
    model.train(was_training)
    return total / num_windows


def evaluate_run(run: str | Path, lm: LMConfig) -> float:
    """Held-out loss of a run's **global** model, the syncer's, not that of any learner; in nats per byte.

    Args:
        run: a run's folder (its newest good checkpoint counts), a checkpoint, or an exported ``.safetensors``
            file.
        lm: the task that the run was trained with.

    Raises: CheckpointError if there is no good checkpoint, or it holds another model than ``lm`` describes.
    """
    torch.set_num_threads(lm.threads)
    model = ByteLM(lm.model)
    _load_parameters(model, Path(run))
    return evaluate(model, Corpus.open(lm.data_paths).validation_bytes(lm.validation_bytes))


def learning_rate(lm: LMConfig, step: int, progress: float | None) -> float:
    """The learning rate of a step: a linear rise, then a cosine that begins with the run.

    Args:
        lm: the task.
        step: steps done before this one, >= 0.
        progress: position in the run, 0..1; None: the run has no end, and the rate stays at its peak after
            ``warmup_steps``.
    """
    if progress is None:
        return lm.lr * (min(1.0, (step + 1) / lm.warmup_steps) if lm.warmup_steps else 1.0)
    rise = min(1.0, (progress + 1e-3) / lm.warmup_share) if lm.warmup_share else 1.0  # never quite 0
    fall = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return lm.lr * rise * (lm.min_lr_ratio + (1 - lm.min_lr_ratio) * fall)


def _adamw(model: ByteLM, lm: LMConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": lm.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lm.lr, betas=(lm.beta1, lm.beta2), fused=True)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _load_parameters(model: ByteLM, run: Path) -> None:
    from safetensors.torch import load_file  # here, since learners do not need it

    if run.suffix == ".safetensors":
        if not run.is_file():
            raise CheckpointError(f"an exported model must exist; {run} does not; give a run's folder or another file")
        tensors = load_file(run)
    else:
        from ..store.export import export_safetensors  # here, since it brings h5py

        with tempfile.TemporaryDirectory() as folder:
            tensors = load_file(export_safetensors(run, Path(folder) / "model.safetensors"))
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        name = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        there, here = (str(shapes.get(name, "none")) for shapes in (found, wanted))
        raise CheckpointError(
            f"a checkpoint must hold the model that [lm] describes; {name} has the shape {there} in {run} "
            f"and {here} by [lm]; use the settings of the run (lm.preset, lm.layers, lm.width)"
        )
    model.load_state_dict(tensors)


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m pyddl.tasks.lm", description="A byte-level language model.")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, help="TOML file (evaluate: config.toml of the run, if it is there)")
    common.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that override the file's"
    )
    commands.add_parser("train", parents=[common], help="one learner's rank or the syncer; start it under mpiexec")
    # RUN must come before the open-ended list of settings, so it belongs to a parent that is listed first.
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("run", type=Path, metavar="RUN", help="folder of a run, checkpoint, or .safetensors file")
    commands.add_parser("evaluate", parents=[run, common], help="held-out loss of a run's global model")
    single = commands.add_parser("baseline", parents=[common], help="the same training in one process, without pyddl")
    single.add_argument("--data-parallel", type=int, default=1, metavar="M", help="batch of M learners (default 1)")
    single.add_argument("--every", type=int, default=0, metavar="STEPS", help="held-out loss every so many steps")
    return parser


def _command(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands; results go to standard output as JSON."""
    return exit_status_of(lambda: _run(_parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    file = arguments.config
    if arguments.command == "evaluate" and file is None and (arguments.run / "config.toml").is_file():
        file = arguments.run / "config.toml"
    # Only a run exchanges anything; the others must not fail for a schedule that needs a run's length.
    defaults = RECOMMENDED if arguments.command == "train" else ()
    config, sections = load_config(file, arguments.settings, sections={"lm": LMConfig}, defaults=defaults)
    lm: LMConfig = sections["lm"]
    if arguments.command == "train":
        main(config, lm)
        return 0
    if arguments.command == "evaluate":
        result: dict[str, Any] = {"loss": evaluate_run(arguments.run, lm)}
    else:
        tokens = config.run.max_tokens
        if not tokens:
            tokens = config.run.max_steps * arguments.data_parallel * lm.batch_size * lm.model.context
        if not tokens:
            raise ConfigError("a baseline must know where to end; neither is set; set run.max_tokens or run.max_steps")
        result = baseline(
            lm,
            total_tokens=tokens,
            data_parallel=arguments.data_parallel,
            seed=config.run.seed,
            evaluate_every_steps=arguments.every,
        )
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_command())
