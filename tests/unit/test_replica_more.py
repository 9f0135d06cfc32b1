"""A model that changes after it was attached: what is followed, and what is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from pyddl.core.layout import Layout, build_layout
from pyddl.errors import ConfigError
from pyddl.run.replica import Replica, tensor_specs


def attached(model: nn.Module, num_fragments: int = 1) -> tuple[Replica, Layout]:
    layout = build_layout(tensor_specs(model), num_fragments=num_fragments)
    return Replica(model, layout), layout


def copied_out(replica: Replica, layout: Layout, fragment: int = 0) -> np.ndarray:
    out = np.empty(layout.fragments[fragment].num_elements, dtype=np.float32)
    replica.copy_out(fragment, out)
    return out


class Averaging(nn.Module):
    """Assigns its buffers anew, as many hand-written layers do."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("ema", torch.zeros(3, dtype=dtype))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ema = 0.5 * self.ema + 0.5 * (x * self.weight)  # with its graph, as is easily written
        self.seen = self.seen + 1
        return (x * self.weight).sum()


# ---------------------------------------------------------------- followed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replica_buffer_that_forward_assigns_anew_is_read_and_written_where_it_is_now(dtype: torch.dtype):
    model = Averaging(dtype)
    replica, layout = attached(model)
    at = next(s.offset for s in layout.fragments[0].segments if layout.tensors[s.tensor].name == "ema")
    for step in (1, 2):  # the second time what is remembered of the first must not be used
        model(torch.full((3,), 8.0, dtype=dtype)).backward()
        floats = copied_out(replica, layout)
        assert floats[at : at + 3].tolist() == [8 - 8 / 2**step] * 3
        assert replica.counters(0).tolist() == [step]
    floats[at : at + 3] = [1, 2, 3]
    replica.copy_in(0, floats)
    replica.set_counters(0, np.array([40]))
    assert model.ema.tolist() == [1, 2, 3]
    assert model.seen.item() == 40
    model(torch.zeros(3, dtype=dtype))
    assert model.ema.tolist() == [0.5, 1, 1.5]
    assert model.seen.item() == 41


def test_replica_keeps_no_graph_of_a_buffer_alive():
    model = Averaging()
    replica, layout = attached(model)
    model(torch.ones(3)).backward()
    copied_out(replica, layout)
    freed: list[bool] = []
    model.ema.grad_fn.register_prehook(_Noted(freed))  # type: ignore[union-attr]
    model.ema = model.ema.detach()
    assert freed == [True]


class _Noted:
    def __init__(self, freed: list[bool]) -> None:
        self.freed = freed

    def __call__(self, *_: object) -> None: ...

    def __del__(self) -> None:
        self.freed.append(True)


def test_replica_buffers_that_a_conversion_to_the_same_dtype_replaces_are_followed():
    model = nn.BatchNorm1d(3)
    replica, layout = attached(model)
    model._apply(lambda t: t.clone())  # what model.to() does with every tensor
    model.running_mean.fill_(5)
    model.num_batches_tracked.fill_(9)
    assert np.sum(copied_out(replica, layout) == 5) == 3
    assert replica.counters(0).tolist() == [9]
    replica.set_counters(0, np.array([11]))
    assert model.num_batches_tracked.item() == 11


def test_replica_module_without_parameters_that_is_replaced_is_followed():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    replica, layout = attached(model)
    model[1] = nn.BatchNorm1d(2, affine=False)
    model[1].running_mean.fill_(5)
    assert np.sum(copied_out(replica, layout) == 5) == 2


def test_replica_square_parameter_whose_memory_is_turned_keeps_its_logical_order():
    model = nn.Linear(3, 3, bias=False)
    replica, layout = attached(model)
    copied_out(replica, layout)
    model.weight.data = model.weight.data.t()  # the same memory, the same shape
    np.testing.assert_array_equal(copied_out(replica, layout), model.weight.detach().flatten().numpy())


# ---------------------------------------------------------------- refused


def half_of_a_layer(model: nn.Sequential) -> None:
    model[0].half()


def replaced_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(4, 4))


def replaced_layer(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 4)


def removed_layer(model: nn.Sequential) -> None:
    del model[2]


def untied(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "half": (lambda model: model.half(), r"0\.weight was float32 \[4, 4\] on cpu and is now float16 \[4, 4\] on cpu"),
    "bfloat16": (lambda model: model.bfloat16(), "is now bfloat16.*convert or move the model before"),
    "half of a layer": (half_of_a_layer, "0.weight was float32"),
    "double": (lambda model: model.double(), "is now float64"),
    "meta": (lambda model: model.to("meta"), "on meta"),
    "replaced parameter": (replaced_parameter, r"0\.weight has been replaced.*optimizer does not know"),
    "replaced layer": (replaced_layer, r"0\.weight has been replaced.*optimizer does not know"),
    "removed layer": (removed_layer, r"2\.weight is no longer there"),
    "untied": (untied, r"1\.weight has been replaced"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("num_fragments", [1, 3])
def test_replica_model_changed_after_attach_is_refused_by_name(name: str, num_fragments: int):
    """Once copied, so that what is remembered of the tensors is not taken for what they are."""
    change, sentence = CHANGES[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    replica, layout = attached(model, num_fragments)
    fragments = [copied_out(replica, layout, p) for p in range(num_fragments)]
    if name == "meta":
        torch.__future__.set_swap_module_params_on_conversion(True)  # as cuda() does: the same object elsewhere
    try:
        change(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for copy in (lambda p: copied_out(replica, layout, p), lambda p: replica.copy_in(p, fragments[p])):
        with pytest.raises(ConfigError, match=sentence):
            list(map(copy, range(num_fragments)))


def test_replica_buffer_of_another_shape_is_refused():
    model = Averaging()
    replica, layout = attached(model)
    model.ema = torch.zeros(3, 1)
    with pytest.raises(ConfigError, match=r"ema was float32 \[3\] on cpu and is now float32 \[3, 1\]"):
        copied_out(replica, layout)
    model.ema = torch.zeros(3)
    model.seen = torch.tensor(1.0)
    with pytest.raises(ConfigError, match=r"seen was int64 \[\] on cpu and is now float32"):
        replica.counters(0)
    with pytest.raises(ConfigError, match="seen was int64"):
        replica.set_counters(0, np.array([1]))


def test_replica_tied_buffers_of_which_one_is_assigned_anew_are_refused():
    model = nn.Module()
    shared = torch.zeros(2)
    for name in ("a", "b"):
        part = nn.Linear(1, 1)
        part.register_buffer("scale", shared)
        model.add_module(name, part)
    replica, layout = attached(model)
    model.a.scale = torch.ones(2)
    with pytest.raises(ConfigError, match=r"b\.scale and a\.scale were one tensor"):
        copied_out(replica, layout)
    model.b.scale = model.a.scale
    assert np.sum(copied_out(replica, layout) == 1) >= 2


def test_replica_layer_that_is_unfrozen_after_attach_is_refused():
    """It would train on its own in every learner: no fragment holds it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    replica, layout = attached(model)
    copied_out(replica, layout)
    model[0].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"0\.weight has requires_grad=True now, and no fragment holds it"):
        copied_out(replica, layout)


def test_replica_layer_that_is_frozen_after_attach_still_travels():
    """Freezing for a while is common (alternating training), and loses nothing: others may go on to train it."""
    model = nn.Linear(2, 2)
    replica, layout = attached(model)
    model.requires_grad_(False)
    floats = copied_out(replica, layout)
    replica.copy_in(0, floats + 1)
    np.testing.assert_array_equal(copied_out(replica, layout), floats + 1)


# ---------------------------------------------------------------- frozen tensors


def frozen_model(dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    model.head = nn.Parameter(torch.ones(2))
    model.base = nn.Parameter(torch.arange(24).reshape(4, 6).to(dtype), requires_grad=False)
    model.scalar = nn.Parameter(torch.tensor(3).to(dtype), requires_grad=False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_replica_frozen_checksums_see_every_element_of_any_dtype(dtype: torch.dtype):
    model = frozen_model(dtype)
    before = attached(model)[0].frozen_checksums()
    assert list(before) == ["base", "scalar"], "what is trained is not compared"
    assert attached(frozen_model(dtype))[0].frozen_checksums() == before
    for row, column in ((0, 0), (3, 5), (2, 1)):
        model = frozen_model(dtype)
        model.base[row, column] = not model.base[row, column]
        after = attached(model)[0].frozen_checksums()
        assert after["base"] != before["base"]
        assert after["scalar"] == before["scalar"]


def test_replica_frozen_checksums_do_not_depend_on_strides():
    model = frozen_model(torch.float32)
    before = attached(model)[0].frozen_checksums()
    model.base.data = model.base.data.t().contiguous().t()
    assert not model.base.is_contiguous()
    assert attached(model)[0].frozen_checksums() == before


def test_replica_model_without_frozen_tensors_has_no_checksums():
    assert attached(nn.BatchNorm1d(2))[0].frozen_checksums() == {}
