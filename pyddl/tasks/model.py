"""A small decoder-only language model over bytes.

Here: :class:`ByteLM`, its configuration and presets. Not here: data, training, anything distributed. The
pieces are the usual ones of today: RMSNorm before each block (Zhang and Sennrich, 2019), rotary positions (Su
et al., 2021), SwiGLU (Shazeer, 2020), one matrix for embedding and output. There are no buffers: all state is
in the parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import require

__all__ = ["PRESETS", "ByteLM", "ModelConfig", "rotate"]

_ROTARY_BASE = 10_000.0
_INIT_STD = 0.02


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a :class:`ByteLM`.

    Attributes:
        layers: number of blocks, >= 1.
        heads: attention heads per block, >= 1.
        width: size of the residual stream, a multiple of 2 * heads (rotary turns pairs).
        context: longest input in bytes, >= 1.
        vocab: number of symbols; 256 for bytes.
    """

    layers: int
    heads: int
    width: int
    context: int
    vocab: int = 256

    def __post_init__(self) -> None:
        """Check every range."""
        for name in ("layers", "heads", "width", "context", "vocab"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(
            self.width % (2 * self.heads) == 0,
            "width",
            f"a multiple of 2 * heads ({2 * self.heads})",
            self.width,
        )

    @property
    def hidden(self) -> int:
        """Inner size of SwiGLU: 8/3 of the width, rounded up to a multiple of 8."""
        return 8 * math.ceil(self.width / 3)


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(layers=2, heads=2, width=32, context=32),  # 0.03 M parameters: tests
    "demo": ModelConfig(layers=4, heads=4, width=96, context=64),  # 0.47 M: trains on one core
    "small": ModelConfig(layers=6, heads=6, width=384, context=256),  # 10.7 M
    "base": ModelConfig(layers=12, heads=12, width=768, context=1024),  # 85 M
}


class ByteLM(nn.Module):
    """Decoder-only transformer over bytes; the output matrix is the embedding's."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        """Build the model on the CPU; ``seed`` alone decides its parameters, not torch's generator."""
        super().__init__()
        self.config = config
        # Built on the meta device: the modules' own initialisation would draw from the global generator.
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab, config.width)
            self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.to_empty(device="cpu")
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Predict each next byte.

        Args:
            x: [batch, time] int64, time <= context.
            y: [batch, time] int64, the bytes that follow; None: no loss.

        Returns: logits [batch, time, vocab], and the mean loss in nats per byte (0-d, float32) or None.
        """
        time = x.shape[1]
        require(time <= self.config.context, "length of the input", f"at most {self.config.context}", time)
        cos, sin = _rotary_angles(time, self.config.width // self.config.heads, x.device)
        hidden = self.embedding(x)  # [batch, time, width]
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        logits = F.linear(self.norm(hidden), self.embedding.weight)  # [batch, time, vocab]
        if y is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    @property
    def num_parameters(self) -> int:
        """Number of parameters, the shared matrix counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        residual_std = _INIT_STD / math.sqrt(2 * self.config.layers)  # the sum over all blocks keeps its size
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = residual_std if name.endswith("out.weight") else _INIT_STD
                parameter.normal_(0.0, std, generator=generator)


class _Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.mlp_out = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # each [batch, time, hidden]
        out: Tensor = x + self.mlp_out(F.silu(gate) * up)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + size/2) of each head by an angle that grows with position (RoPE).

    Args:
        x: [..., time, size], size even.
        cos: [time, size/2].
        sin: [time, size/2].

    Returns: [..., time, size]; the product of two rotated vectors depends on their distance alone.
    """
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def _rotary_angles(time: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [time, size/2] float32 each; recomputed per call, so that no buffer is ever merged."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(time, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()
