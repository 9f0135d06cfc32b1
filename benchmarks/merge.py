"""The merge kernel against the speed of memory and against torch, as ratios within one run. See benchmarks/README.md.

    python benchmarks/merge.py [--json] [--quick] [--threads 1 2]

One fragment of one tensor, the Nesterov step, no copy for the wire. Contenders, in alternation, with as many threads:

    pyddl    kernels.merge_outer_step
    list     torch, a loop over the M outer gradients, as the formula is written
    inplace  torch, the same loop without temporaries
    stack    torch, operations on one [M, n] tensor
    matvec   torch, norms of the rows of [M, n], then one matrix-vector product
    triad    a = b + s * c by torch on arrays that no cache holds: this machine's bandwidth, by three streams

Of int8 and int4 torch gets the codes unpacked, one to a byte.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pyddl.core import kernels
from pyddl.core.kernels import BLOCK, BLOCK_CODECS, RULE_MEAN, RULE_RDA, Blocks, OuterStep

CODECS = ("f32", "bf16", *BLOCK_CODECS)
TORCH = ("list", "inplace", "stack", "matvec")
LR, MU = 0.7, 0.9
TRIAD_ELEMENTS = 1 << 25
ROUNDS = 7
SLICE_S = 0.05  # at least so long does each contender run in each round
MEMORY_BYTES = 18 << 30  # of this process, at most; what needs more is reported as such


class Case:
    """The arrays of one cell of the table, and the contenders on them."""

    def __init__(self, num: int, n: int, rule: str, codec: str) -> None:
        self.num, self.n, self.rule, self.codec = num, n, rule, codec
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.linspace(1.0, 2.0, num, dtype=torch.float64)
        self.theta = torch.empty(n).normal_(0.0, 0.05, generator=generator)
        self.momentum = torch.empty(n).normal_(0.0, 1e-3, generator=generator)
        self.theta_out, self.momentum_out = torch.empty(n), torch.empty(n)
        self.inputs: list[Any] = []
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}.get(codec, torch.int8)
        self.stacked = torch.empty(num, n, dtype=dtype)
        self.scales = torch.empty(num, n // BLOCK)
        values = torch.empty(n)
        for i in range(num):
            values.normal_(0.0, 1e-3, generator=generator)
            if codec in BLOCK_CODECS:
                self._add_blocks(i, values)
            else:
                self.stacked[i] = values
                row = self.stacked[i]
                self.inputs.append(row.numpy() if codec == "f32" else row.view(torch.int16).numpy().view(np.uint16))
        self._arguments = (
            self.weights.numpy(),
            np.array([0, n]),
            np.array([RULE_RDA if rule == "rda" else RULE_MEAN], np.uint8),
            self.theta.numpy(),
            self.momentum.numpy(),
        )

    def _add_blocks(self, i: int, values: torch.Tensor) -> None:
        data = np.empty(kernels.encoded_bytes(self.codec, self.n), np.uint8)
        kernels.encode_blocks(self.codec, values.numpy(), None, data)
        self.inputs.append(Blocks(self.codec, data))
        decoded = torch.empty(self.n)
        kernels.decode_blocks(self.codec, data, decoded.numpy())
        self.scales[i] = torch.from_numpy(data.reshape(self.n // BLOCK, -1)[:, :4].copy().view(np.float32)[:, 0])
        self.stacked[i] = (decoded.view(-1, BLOCK) / self.scales[i][:, None]).round().view(-1).to(torch.int8)

    @property
    def fewest_bytes(self) -> int:
        """What must cross the memory bus: the inputs once (mean) or twice (RDA), theta and momentum in and out."""
        sweeps = 2 if self.rule == "rda" else 1
        return sweeps * self.num * kernels.encoded_bytes(self.codec, self.n) + 16 * self.n

    def pyddl(self) -> None:
        """By pyddl's kernel."""
        kernels.merge_outer_step(
            self.inputs,
            *self._arguments,
            outer=OuterStep("nesterov", LR, MU),
            theta_out=self.theta_out.numpy(),
            momentum_out=self.momentum_out.numpy(),
            backend="cpu",
        )

    def _rows(self) -> torch.Tensor:
        """[M, n], float32 or as stored; a temporary where there are blocks."""
        if self.codec not in BLOCK_CODECS:
            return self.stacked
        blocks = self.stacked.view(self.num, -1, BLOCK)
        return (blocks.float() * self.scales[:, :, None]).view(self.num, self.n)

    def _row(self, i: int) -> torch.Tensor:
        if self.codec not in BLOCK_CODECS:
            return self.stacked[i]
        return (self.stacked[i].view(-1, BLOCK).float() * self.scales[i][:, None]).view(-1)

    def list(self) -> None:
        """By a loop over the contributions, as the formula is written."""
        shares = (self.weights / self.weights.sum()).tolist()
        merged = torch.zeros(self.n)
        if self.rule == "mean":
            for i, share in enumerate(shares):
                merged = merged + share * self._row(i).float()
        else:
            mean_norm = 0.0
            for i, share in enumerate(shares):
                row = self._row(i).float()
                norm = float(row.norm())
                merged = merged + share * (row / norm)
                mean_norm += share * norm
            merged = merged / float(merged.norm()) * mean_norm
        self._step(merged)

    def inplace(self) -> None:
        """By a loop over the contributions without temporaries."""
        shares = (self.weights / self.weights.sum()).tolist()
        merged = torch.zeros(self.n)
        if self.rule == "mean":
            for i, share in enumerate(shares):
                merged.add_(self._row(i), alpha=share)
        else:
            mean_norm = 0.0
            for i, share in enumerate(shares):
                row = self._row(i)
                norm = float(torch.linalg.vector_norm(row, dtype=torch.float32))
                merged.add_(row, alpha=share / norm)
                mean_norm += share * norm
            merged.mul_(mean_norm / float(torch.linalg.vector_norm(merged)))
        self._step(merged)

    def stack(self) -> None:
        """By operations on all contributions at once."""
        shares = (self.weights / self.weights.sum()).float()
        rows = self._rows().float()
        if self.rule == "mean":
            merged = (shares[:, None] * rows).sum(0)
        else:
            norms = torch.linalg.vector_norm(rows, dim=1)
            direction = (shares[:, None] * (rows / norms[:, None])).sum(0)
            merged = direction * ((shares * norms).sum() / torch.linalg.vector_norm(direction))
        self._step(merged)

    def matvec(self) -> None:
        """By norms and one matrix-vector product."""
        shares = (self.weights / self.weights.sum()).float()
        rows = self._rows()
        if self.rule == "mean":
            merged = (shares.to(rows.dtype) @ rows).float()
        else:
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
            merged = ((shares / norms).to(rows.dtype) @ rows).float()
            merged.mul_((shares * norms).sum() / torch.linalg.vector_norm(merged))
        self._step(merged)

    def _step(self, merged: torch.Tensor) -> None:
        torch.add(merged, self.momentum, alpha=MU, out=self.momentum_out)
        merged.add_(self.momentum_out, alpha=MU)
        torch.sub(self.theta, merged, alpha=LR, out=self.theta_out)

    def count_wrong(self) -> int:
        """Elements that are further from the float64 result than two roundings to float32 explain."""
        self.pyddl()
        share = (self.weights / self.weights.sum())[:, None]
        step = max(BLOCK, (1 << 24) // self.num // BLOCK * BLOCK)
        parts = [slice(at, min(at + step, self.n)) for at in range(0, self.n, step)]
        if self.rule == "rda":
            norms = sum(self._exact(p).square().sum(1) for p in parts).sqrt()[:, None]
            square = sum((share / norms * self._exact(p)).sum(0).square().sum() for p in parts)
            share = share / norms * (float((share * norms).sum()) / float(square.sqrt()))
        wrong = 0
        for p in parts:
            g = (share * self._exact(p)).sum(0)
            b = MU * self.momentum[p].double() + g
            exact = self.theta[p].double() - LR * (g + MU * b)
            scale = torch.finfo(torch.float32).eps * (exact.abs() + LR * 2 * g.abs())
            wrong += int(((self.theta_out[p].double() - exact).abs() > scale).sum())
        return wrong

    def _exact(self, part: slice) -> torch.Tensor:
        rows = self.stacked[:, part].double()
        if self.codec in BLOCK_CODECS:
            scales = self.scales[:, part.start // BLOCK : -(-part.stop // BLOCK)].double()
            rows = (rows.view(self.num, -1, BLOCK) * scales[:, :, None]).view(self.num, -1)
        return rows


def time_all(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of one call by contender and round; they take turns."""
    counts = {}
    for name, call in contenders.items():
        call()
        started_s = time.perf_counter()
        call()
        counts[name] = max(1, round(SLICE_S / (time.perf_counter() - started_s)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started_s = time.perf_counter()
            for _ in range(counts[name]):
                contenders[name]()
            seconds[name].append((time.perf_counter() - started_s) / counts[name])
    return seconds


def set_threads(count: int) -> None:
    """For both torch and pyddl."""
    torch.set_num_threads(count)
    kernels.set_num_threads(count)


def measure(case: Case, threads: int) -> dict[str, Any]:
    """One row of the table."""
    set_threads(threads)
    b, c, a = (torch.ones(TRIAD_ELEMENTS) for _ in range(3))
    contenders: dict[str, Callable[[], object]] = {
        "triad": lambda: torch.add(b, c, alpha=0.5, out=a),
        "pyddl": case.pyddl,
        "list": case.list,
        "inplace": case.inplace,
    }
    skipped = []
    temporaries = {"matvec": 4 if case.codec in BLOCK_CODECS else 0, "stack": 12}  # bytes an element of [M, n]
    for name, size in temporaries.items():
        if case.num * case.n * (size + 4) <= MEMORY_BYTES:
            contenders[name] = getattr(case, name)
        else:
            skipped.append(f"{name}: does not fit in memory")
    seconds = time_all(contenders)
    triad = [12 * TRIAD_ELEMENTS / s / 1e9 for s in seconds["triad"]]
    speed = [case.fewest_bytes / s / 1e9 for s in seconds["pyddl"]]
    return {
        "M": case.num,
        "n": case.n,
        "rule": case.rule,
        "codec": case.codec,
        "threads": threads,
        "ms": statistics.median(seconds["pyddl"]) * 1e3,
        "gb_per_s": statistics.median(speed),
        "triad_gb_per_s": statistics.median(triad),
        "of_triad": _quartiles([s / t for s, t in zip(speed, triad, strict=True)]),
        "speed_up": {
            name: _quartiles([o / s for o, s in zip(seconds[name], seconds["pyddl"], strict=True)])
            for name in TORCH
            if name in contenders
        },
        "skipped": skipped,
        "wrong_elements": case.count_wrong(),
    }


def measure_bytes(n: int) -> dict[str, Any]:
    """Encoders, GB/s of input on one thread, and the copy with a checksum against a plain copy."""
    set_threads(1)
    values = np.random.default_rng(1).normal(size=n).astype(np.float32)
    residual = np.zeros(n, np.float32)
    outs = {codec: np.empty(kernels.encoded_bytes(codec, n), np.uint8) for codec in BLOCK_CODECS}
    bits = np.empty(n, np.uint16)
    source, target = values.view(np.uint8), np.empty(4 * n, np.uint8)
    to, origin = torch.from_numpy(target), torch.from_numpy(source)
    contenders: dict[str, Callable[[], object]] = {
        "encode int8": lambda: kernels.encode_blocks("int8", values, residual, outs["int8"]),
        "encode int4": lambda: kernels.encode_blocks("int4", values, residual, outs["int4"]),
        "encode bf16": lambda: kernels.encode_bf16(values, residual, bits),
        "memcpy": lambda: to.copy_(origin),
        "copy with checksum": lambda: kernels.copy_with_checksum(source, target),
        "copy, then checksum": lambda: (to.copy_(origin), kernels.checksum(target)),
    }
    seconds = time_all(contenders)
    copies = ("copy with checksum", "copy, then checksum")
    return {
        "n": n,
        "gb_per_s": {name: 4 * n / statistics.median(s) / 1e9 for name, s in seconds.items()},
        "of_memcpy": {
            name: _quartiles([m / s for m, s in zip(seconds["memcpy"], seconds[name], strict=True)]) for name in copies
        },
    }


def _quartiles(values: list[float]) -> list[float]:
    """Median, first and third quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(middle, 3), round(low, 3), round(high, 3)]


def _show(row: dict[str, Any]) -> None:
    ups = [f"{row['speed_up'][k][0]:7.2f}" if k in row["speed_up"] else "      -" for k in TORCH]
    print(
        f"{row['M']:3} {row['n']:9} {row['rule']:4} {row['codec']:5} {row['threads']:3} {row['ms']:9.3f} "
        f"{row['gb_per_s']:6.1f} {row['of_triad'][0]:7.2f} {' '.join(ups)} {row['wrong_elements']:6}",
        flush=True,
    )


def main() -> int:
    """Measure the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="M = 8, n = 4 Mi only")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    sizes = [1 << 22] if arguments.quick else [1 << 16, 1 << 22, 1 << 26]
    numbers = [8] if arguments.quick else [2, 8, 32]
    rows, skipped = [], []
    print("  M         n rule codec thr        ms   GB/s  /triad  x list xinplce x stack xmatvec  wrong")
    for num in numbers:
        for n in sizes:
            for codec in CODECS:
                for rule in ("mean", "rda"):
                    if num * n * (4 if codec == "f32" else 3) + 4 * 4 * n > MEMORY_BYTES:
                        skipped.append(f"M = {num}, n = {n}, {rule}, {codec}: does not fit in memory")
                        continue
                    case = Case(num, n, rule, codec)
                    for threads in arguments.threads:
                        rows.append(measure(case, threads))
                        _show(rows[-1])
    print("\n".join(skipped))
    others = [measure_bytes(n) for n in sizes]
    for row in others:
        print(f"n = {row['n']}, 1 thread, GB/s of input: {row['gb_per_s']}; of memcpy: {row['of_memcpy']}")
    if arguments.json:
        result = {"rows": rows, "skipped": skipped, "bytes": others, "kernels": kernels.describe_backends()}
        print(json.dumps({**result, "platform": platform.platform()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
