"""A learner's model as fragments: tensor specifications, and copies between parameters and flat float32 buffers.

Here: everything that knows a torch module's insides. Not here: when fragments are copied (exchange.py).

Tensors are looked up in the model by name at every copy, since training replaces some of them: a buffer that forward
assigns anew, or that ``model.to()`` converts, is another object afterwards. What attach() has not seen is refused then:
another dtype, device or shape, a parameter that the optimizer does not know, a frozen tensor that is trained.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from ..core.kernels import checksum, copy
from ..core.layout import Layout, Segment, TensorSpec
from ..errors import ConfigError

__all__ = ["CopyOut", "Replica", "tensor_specs"]

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


def tensor_specs(model: nn.Module) -> list[TensorSpec]:
    """The tensors of a model, each once, in the model's order.

    Tied tensors count once, under their first name; they are embeddings if one of their modules is.

    Raises:
        ConfigError: if a tensor is not on the CPU, or is sparse.
    """
    order: dict[int, list[tuple[str, torch.Tensor, str]]] = {}
    for name, tensor, role in _named_tensors(model):
        if is_lazy(tensor):
            raise ConfigError(
                f"the model must have all of its parameters; {name} of a lazy module has no shape yet: run one forward "
                "pass before session.attach()"
            )
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"the model must be on the CPU; {name} is on {tensor.device}: learners on CUDA devices are not built "
                "in this version, move the model with model.cpu()"
            )
        if tensor.layout != torch.strided:
            raise ConfigError(f"tensors must be dense; {name} has the layout {tensor.layout}: make it dense")
        order.setdefault(id(tensor), []).append((name, tensor, role))
    specs = []
    for uses in order.values():
        roles = {role for _, _, role in uses}
        role = "embedding" if "embedding" in roles else uses[0][2]
        name, tensor, _ = uses[0]
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, role, tuple(u[0] for u in uses[1:])))
    return specs


def _changed_by_forward(model: nn.Module) -> set[str]:
    """Names of tensors that a forward pass may change: buffers (BatchNorm), embeddings that it renormalises."""
    names = {name for name, _, role in _named_tensors(model) if role == "buffer"}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _EMBEDDINGS) and module.max_norm is not None:
            names.add(f"{prefix}.weight" if prefix else "weight")
    return names


@dataclass(frozen=True)
class _Mark:
    """By what a tensor is recognised whose views are kept; ``tensor`` is a detached alias, no graph hangs on it."""

    tensor: torch.Tensor
    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Mark:
        return cls(tensor, tensor.data_ptr(), tensor.shape, tensor.stride())


class _Place:
    """Where the model keeps one tensor of the layout, under one name or, tied, under several."""

    def __init__(self, model: nn.Module, spec: TensorSpec) -> None:
        self.spec = spec
        self._model = model
        self._names = (spec.name, *spec.aliases)
        self._paths = [tuple(name.split(".")) for name in self._names]
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._parameter = self._find(self._paths[0]) if spec.role in ("parameter", "embedding") else None

    def look_up(self) -> torch.Tensor:
        """The tensor that the model has there now, detached.

        Raises:
            ConfigError: if it is not as it was when the model was attached.
        """
        tensor = self._find(self._paths[0])
        wanted = tensor if self._parameter is None else self._parameter
        for name, path in zip(self._names, self._paths, strict=True):
            found = tensor if path is self._paths[0] else self._find(path)
            if found is None or found is not wanted:
                raise ConfigError(self._replaced(name, found))
        assert tensor is not None
        if tensor.dtype != self._dtype or tensor.shape != self.spec.shape or not tensor.is_cpu:
            raise ConfigError(
                f"an attached model must keep its tensors' dtype, shape and device; {self.spec.name} was "
                f"{self.spec.dtype} {list(self.spec.shape)} on cpu and is now "
                f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}: convert or move "
                "the model before session.attach()"
            )
        return tensor.detach()

    def still_has(self, mark: _Mark) -> bool:
        """Whether :meth:`look_up` would find what it found when the mark was made; in a quarter of its time."""
        tensor = self._find(self._paths[0])
        if tensor is None or (self._parameter is not None and tensor is not self._parameter):
            return False
        for path in self._paths[1:]:
            if self._find(path) is not tensor:
                return False
        return (
            tensor.data_ptr() == mark.pointer
            and tensor.dtype is self._dtype
            and tensor.shape == mark.shape
            and tensor.stride() == mark.stride
        )

    def require_frozen(self) -> None:
        """Refuse a frozen parameter that has become one to train: no fragment holds it."""
        tensor = self._find(self._paths[0])
        if tensor is not None and tensor.requires_grad:
            raise ConfigError(
                f"a parameter that was frozen when the model was attached must stay so; {self.spec.name} has "
                "requires_grad=True now, and no fragment holds it: attach with it unfrozen, and give it a learning "
                "rate of 0 until it is to be trained"
            )

    def _find(self, path: tuple[str, ...]) -> torch.Tensor | None:
        module = self._model
        for name in path[:-1]:
            child = module._modules.get(name)
            if child is None:
                return None
            module = child
        parameter = module._parameters.get(path[-1])
        return module._buffers.get(path[-1]) if parameter is None else parameter

    def _replaced(self, name: str, found: torch.Tensor | None) -> str:
        if found is None:
            return (
                f"an attached model must keep its tensors; {name} is no longer there: change the model's structure "
                "before session.attach()"
            )
        if self._parameter is None:
            return (
                f"tied buffers must stay tied; {name} and {self._names[0]} were one tensor when the model was attached "
                "and are two now: assign the new tensor under both names, or attach them untied"
            )
        return (
            f"an attached model must keep its parameters; {name} has been replaced by another tensor, which the "
            "optimizer does not know: change its values in place (p.data.copy_(...)) before learner.step(), "
            "or replace it before session.attach()"
        )


@dataclass
class _Views:
    """Numpy arrays that share memory with a fragment's tensors."""

    marks: list[_Mark]  # of the tensors; the arrays keep the memory, so no other tensor can come to lie there
    arrays: list[NDArray[np.float32]]
    starts: list[int]  # of each array in the fragment
    moves: list[bool]  # of each array, whether a forward pass may change it
    still: list[torch.Tensor]  # of the tensors those that none changes


class CopyOut:
    """A part of a fragment on its way into a buffer: copied once, by the first thread that asks for it.

    A learner's link thread copies while the next step computes its gradients; the training thread asks before the
    parameters change (the pre-hook of its optimizer), and copies itself what has not been begun.

    Args:
        pairs: (to, from), arrays [k] float32 of equal length.
        tensors: those that are copied from; none may change before :meth:`finish` has returned.
    """

    def __init__(
        self, pairs: list[tuple[NDArray[np.float32], NDArray[np.float32]]], tensors: list[torch.Tensor]
    ) -> None:
        self._pairs = pairs
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Return when the buffer holds its part; any thread."""
        with self._lock:
            for target, source in self._pairs:
                target[:] = source
            self._pairs = []

    def is_overtaken(self) -> bool:
        """Whether a tensor has been changed in place since (as far as autograd has seen it: not through ``.data``)."""
        return any(tensor._version != version for tensor, version in self._versions)


class Replica:
    """Copies between a model's tensors and the fragments of a layout.

    Args:
        model: whose tensors are read and written.
        layout: of the run, built from this model's :func:`tensor_specs`.

    Copying raises ConfigError if the model is no longer the one that was attached; see the module's docstring.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._places = [_Place(model, spec) for spec in layout.tensors]
        self._frozen = [place for place in self._places if place.spec.role == "frozen"]
        self._fragments = layout.fragments
        self._own = [list(dict.fromkeys(s.tensor for s in fragment.segments)) for fragment in self._fragments]
        self._exact = [all(layout.tensors[index].dtype == "float32" for index in own) for own in self._own]
        self._views: list[_Views | None] = [None] * len(self._fragments)
        moving = _changed_by_forward(model)
        self._moving = {i for i, spec in enumerate(layout.tensors) if {spec.name, *spec.aliases} & moving}

    def copy_out(self, fragment: int, out: NDArray[np.float32], low: int = 0) -> None:
        """Copy elements ``low`` to ``low + len(out)`` of a fragment into ``out``, float32."""
        self.begin_copy_out(fragment, out, low).finish()

    def begin_copy_out(self, fragment: int, out: NDArray[np.float32], low: int = 0) -> CopyOut:
        """:meth:`copy_out`, of which the rest may be done in any thread before a parameter changes.

        All checks are made now, and what the next forward pass may change (buffers) is copied now.

        Args:
            fragment: index.
            out: [k] float32, written.
            low: first element of the fragment.

        Raises:
            ConfigError: if the model is no longer the one that was attached.
        """
        if fragment == 0:  # once in H steps is often enough for what no copy comes across
            for place in self._frozen:
                place.require_frozen()
        views, high = self._numpy_views(fragment), low + len(out)
        if views is None:
            target = torch.from_numpy(out)
            for tensor, start, stop, at in self._pieces(fragment, low, high):
                target[at : at + stop - start].copy_(tensor.reshape(-1)[start:stop])
            return CopyOut([], [])
        later = []
        for array, at, moves in zip(views.arrays, views.starts, views.moves, strict=True):
            first, last = max(at, low), min(at + len(array), high)
            if first < last:
                pair = (out[first - low : last - low], array[first - at : last - at])
                if moves:
                    pair[0][:] = pair[1]
                else:
                    later.append(pair)
        return CopyOut(later, views.still)

    def copy_in(self, fragment: int, floats: NDArray[np.float32]) -> None:
        """Set a fragment's parameters. Where a dtype is narrower, ``floats`` becomes what the tensor then holds."""
        views = self._numpy_views(fragment)
        if views is not None:
            for array, at in zip(views.arrays, views.starts, strict=True):
                copy(floats[at : at + len(array)], array)
            for mark in views.marks:  # so that autograd still notices a graph that needs the old values
                increment_version(mark.tensor)
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
        tensors = [self._places[index].look_up() for index, _ in self._fragments[fragment].counters]
        parts = [tensor.reshape(-1).to(torch.int64) for tensor in tensors]
        return torch.cat(parts).numpy() if parts else _NO_COUNTERS

    def set_counters(self, fragment: int, values: NDArray[np.int64]) -> None:
        """Set the integer buffers of a fragment."""
        at = 0
        for index, count in self._fragments[fragment].counters:
            tensor = self._places[index].look_up()
            tensor.copy_(torch.from_numpy(values[at : at + count]).view(tensor.shape))
            at += count

    def frozen_checksums(self) -> dict[str, int]:
        """CRC32C of each frozen tensor's bytes by its name: they are compared at the start, and never sent."""
        return {
            place.spec.name: checksum(place.look_up().reshape(-1).contiguous().view(torch.uint8).numpy())
            for place in self._frozen
        }

    def _numpy_views(self, fragment: int) -> _Views | None:
        """The segments of a plain float32 fragment as numpy arrays; None if it holds anything else.

        Kept, since making them anew costs as much as copying 50 kB; made again if anything about a tensor has changed.
        """
        if not self._exact[fragment]:
            return None
        known, places = self._views[fragment], [self._places[index] for index in self._own[fragment]]
        if known is not None and all(map(_Place.still_has, places, known.marks)):
            return known
        self._views[fragment] = None
        tensors = {index: self._places[index].look_up() for index in self._own[fragment]}
        if not all(t.is_contiguous() for t in tensors.values()):
            return None
        segments = self._fragments[fragment].segments
        arrays = [tensors[s.tensor].view(-1)[s.start : s.stop].numpy() for s in segments]
        views = _Views(
            marks=[_Mark.of(tensor) for tensor in tensors.values()],
            arrays=arrays,
            starts=[s.offset for s in segments],
            moves=[s.tensor in self._moving for s in segments],
            still=[tensor for index, tensor in tensors.items() if index not in self._moving],
        )
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
                yield self._places[s.tensor].look_up(), start, start + last - first, first - low
