"""A learner's model as fragments: tensor specifications, and copies between parameters and flat float32 buffers.

Here: everything that knows a torch module's insides. Not here: when fragments are copied (learner.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import increment_version

from ..core.layout import Layout, Segment, TensorSpec
from ..errors import ConfigError

__all__ = ["Replica", "tensor_specs"]

_NO_COUNTERS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """All parameters and persistent buffers with their roles, in the model's order, tied ones under every name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = prefix + "." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                role = "embedding" if isinstance(module, _EMBEDDINGS) else "parameter"
                yield dot + name, parameter, role if parameter.requires_grad else "frozen"
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, buffer, "buffer" if buffer.is_floating_point() else "counter"


def tensor_specs(model: nn.Module) -> tuple[list[TensorSpec], list[torch.Tensor]]:
    """The tensors of a model, each once, and the tensors themselves in the same order.

    Tied tensors count once, under their first name; they are embeddings if one of their modules is.

    Raises:
        ConfigError: if a tensor is not on the CPU, or is sparse.
    """
    order: dict[int, list[tuple[str, torch.Tensor, str]]] = {}
    for name, tensor, role in _named_tensors(model):
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"the model must be on the CPU; {name} is on {tensor.device}: learners on CUDA devices are not built "
                "in this version, move the model with model.cpu()"
            )
        if tensor.layout != torch.strided:
            raise ConfigError(f"tensors must be dense; {name} has the layout {tensor.layout}: make it dense")
        order.setdefault(id(tensor), []).append((name, tensor, role))
    specs, tensors = [], []
    for uses in order.values():
        roles = {role for _, _, role in uses}
        role = "embedding" if "embedding" in roles else uses[0][2]
        name, tensor, _ = uses[0]
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, role, tuple(u[0] for u in uses[1:])))
        tensors.append(tensor)
    return specs, tensors


@dataclass
class _Views:
    """Numpy arrays that share memory with a fragment's tensors."""

    tensors: list[torch.Tensor]
    pointers: list[int]
    arrays: list[NDArray[np.float32]]
    starts: list[int]  # of each array in the fragment


class Replica:
    """Copies between a model's tensors and the fragments of a layout.

    Args:
        tensors: as :func:`tensor_specs` gives them; their values are read and written, the objects are kept.
        layout: of the run.
    """

    def __init__(self, tensors: list[torch.Tensor], layout: Layout) -> None:
        self._tensors = tensors
        self._fragments = layout.fragments
        self._exact = [
            all(tensors[s.tensor].dtype == torch.float32 for s in fragment.segments) for fragment in self._fragments
        ]
        self._views: list[_Views | None] = [None] * len(self._fragments)

    def copy_out(self, fragment: int, out: NDArray[np.float32], low: int = 0) -> None:
        """Copy elements ``low`` to ``low + len(out)`` of a fragment into ``out``, float32."""
        views = self._numpy_views(fragment)
        if views is not None:
            high = low + len(out)
            for array, at in zip(views.arrays, views.starts, strict=True):
                first, last = max(at, low), min(at + len(array), high)
                if first < last:
                    out[first - low : last - low] = array[first - at : last - at]
            return
        target = torch.from_numpy(out)
        for tensor, start, stop, at in self._pieces(fragment, low, low + len(out)):
            target[at : at + stop - start].copy_(tensor.reshape(-1)[start:stop])

    def copy_in(self, fragment: int, floats: NDArray[np.float32]) -> None:
        """Set a fragment's parameters. Where a dtype is narrower, ``floats`` becomes what the tensor then holds."""
        views = self._numpy_views(fragment)
        if views is not None:
            for array, at in zip(views.arrays, views.starts, strict=True):
                array[:] = floats[at : at + len(array)]
            for tensor in views.tensors:
                increment_version(tensor)  # so that autograd still notices a graph that needs the old values
            return
        source = torch.from_numpy(floats)
        for tensor, start, stop, at in self._pieces(fragment, 0, len(floats)):
            value = source[at : at + stop - start]
            if tensor.is_contiguous():
                tensor.view(-1)[start:stop].copy_(value)
            else:
                whole = tensor.reshape(-1)  # a copy in logical order
                whole[start:stop] = value
                tensor.copy_(whole.view(tensor.shape))
        if not self._exact[fragment]:
            self.copy_out(fragment, floats)

    def counters(self, fragment: int) -> NDArray[np.int64]:
        """The integer buffers of a fragment, [c] int64."""
        parts = [self._tensors[t].detach().reshape(-1).to(torch.int64) for t, _ in self._fragments[fragment].counters]
        return torch.cat(parts).numpy() if parts else _NO_COUNTERS

    def set_counters(self, fragment: int, values: NDArray[np.int64]) -> None:
        """Set the integer buffers of a fragment."""
        at = 0
        for index, count in self._fragments[fragment].counters:
            tensor = self._tensors[index].detach()
            tensor.copy_(torch.from_numpy(values[at : at + count]).view(tensor.shape))
            at += count

    def _numpy_views(self, fragment: int) -> _Views | None:
        """The segments of a plain float32 fragment as numpy arrays; None if it holds anything else.

        Kept, since making them anew costs as much as copying 50 kB; made again if a tensor's storage was exchanged.
        """
        known = self._views[fragment]
        if known is not None and known.pointers == [t.data_ptr() for t in known.tensors]:
            return known
        segments = self._fragments[fragment].segments
        tensors = [self._tensors[s.tensor].detach() for s in segments]
        if not self._exact[fragment] or not all(t.is_contiguous() for t in tensors):
            return None
        arrays = [t.view(-1)[s.start : s.stop].numpy() for t, s in zip(tensors, segments, strict=True)]
        own = list(dict.fromkeys(s.tensor for s in segments))
        kept = [self._tensors[index] for index in own]
        views = _Views(kept, [t.data_ptr() for t in kept], arrays, [s.offset for s in segments])
        self._views[fragment] = views
        return views

    def _pieces(self, fragment: int, low: int, high: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """(tensor, start, stop, position in the buffer) of what lies between ``low`` and ``high``."""
        segments: tuple[Segment, ...] = self._fragments[fragment].segments
        for s in segments:
            end = s.offset + s.stop - s.start
            first, last = max(s.offset, low), min(end, high)
            if first < last:
                start = s.start + first - s.offset
                yield self._tensors[s.tensor].detach(), start, start + last - first, first - low
