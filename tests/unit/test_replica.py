"""A model's tensors to fragments and back: every element, whatever its place, stride and dtype."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from pyddl.core.layout import Layout, build_layout
from pyddl.errors import ConfigError
from pyddl.run.replica import Replica, tensor_specs


def scalar_model() -> nn.Module:
    model = nn.Module()
    model.temperature = nn.Parameter(torch.tensor(2.5))
    model.weight = nn.Parameter(torch.randn(33))
    return model


def transposed_model() -> nn.Module:
    model = nn.Module()
    model.t = nn.Parameter(torch.randn(17, 5).t())
    model.strided = nn.Parameter(torch.randn(40)[::2])
    model.sliced = nn.Parameter(torch.randn(6, 9)[:, 2:7])
    return model


def mixed_model() -> nn.Module:
    model = nn.Module()
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        setattr(model, f"w{i}", nn.Parameter(torch.randn(11, 7).to(dtype)))
    return model


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 13, bias=False))
    model[2].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4)),
    "scalar": scalar_model,
    "transposed": transposed_model,
    "mixed": mixed_model,
    "tied": tied_model,
    "norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)),
    "channels_last": lambda: nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


def cut(model: nn.Module, num_fragments: int = 0) -> tuple[Replica, Layout, list[torch.Tensor]]:
    specs = tensor_specs(model)
    layout = build_layout(specs, num_fragments=num_fragments)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Replica(model, layout), layout, [named[spec.name] for spec in specs]


def floating(layout: Layout, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t, spec in zip(tensors, layout.tensors, strict=True) if spec.role not in ("counter", "frozen")]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_fragments", [1, 3])
def test_replica_every_element_goes_out_and_comes_in_at_its_place(name: str, num_fragments: int):
    """Each element gets a number of its own that bf16 can hold; then all of them are looked for."""
    if name == "scalar":
        num_fragments = min(num_fragments, 2)
    model = MODELS[name]()
    replica, layout, tensors = cut(model, num_fragments)
    expected = []
    for number, tensor in enumerate(floating(layout, tensors)):
        values = torch.arange(tensor.numel(), dtype=torch.float64).remainder(251) - 7 * number
        with torch.no_grad():
            tensor.copy_(values.reshape(tensor.shape))
        expected.append(tensor.detach().clone())
    fragments = []
    for p, fragment in enumerate(layout.fragments):
        out = np.full(fragment.num_elements, np.nan, dtype=np.float32)
        replica.copy_out(p, out)
        fragments.append(out)
    total = sum(t.numel() for t in expected)
    assert sum(map(len, fragments)) == total
    np.testing.assert_array_equal(
        np.sort(np.concatenate(fragments)), np.sort(np.concatenate([t.float().flatten().numpy() for t in expected]))
    )
    with torch.no_grad():
        for tensor in floating(layout, tensors):
            tensor.fill_(-1000)
    for p, values in enumerate(fragments):
        given = values.copy()
        replica.copy_in(p, given)
        np.testing.assert_array_equal(given, values, "exact values stay as they are")
    for tensor, wanted in zip(floating(layout, tensors), expected, strict=True):
        assert tensor.dtype == wanted.dtype
        torch.testing.assert_close(tensor.detach(), wanted, rtol=0, atol=0)


def test_replica_parts_of_a_fragment_are_those_of_the_whole():
    for name in ("plain", "transposed", "mixed"):
        replica, layout, _ = cut(MODELS[name](), 2)
        for p, fragment in enumerate(layout.fragments):
            n = fragment.num_elements
            whole = np.empty(n, dtype=np.float32)
            replica.copy_out(p, whole)
            for low, high in ((0, n), (1, n - 1), (n // 3, n // 2), (n - 1, n), (5, 5)):
                part = np.empty(high - low, dtype=np.float32)
                replica.copy_out(p, part, low)
                np.testing.assert_array_equal(part, whole[low:high])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replica_narrower_dtype_leaves_in_the_buffer_what_the_tensor_holds(dtype: torch.dtype):
    """Else what was rounded off at the receipt would look like progress at the next push."""
    model = nn.Linear(16, 16, bias=False).to(dtype)
    replica, _, _ = cut(model, 1)
    floats = np.linspace(-1, 1, 256, dtype=np.float32)
    given = floats.copy()
    replica.copy_in(0, given)
    assert (given != floats).any()
    np.testing.assert_array_equal(given, model.weight.detach().float().flatten().numpy())
    out = np.empty(256, dtype=np.float32)
    replica.copy_out(0, out)
    np.testing.assert_array_equal(out, given)


def test_replica_tied_weights_are_one_tensor_and_stay_tied():
    model = tied_model()
    specs = tensor_specs(model)
    assert (specs[0].name, specs[0].aliases, specs[0].role) == ("0.weight", ("2.weight",), "embedding")
    assert len(specs) == 3
    replica = Replica(model, build_layout(specs, num_fragments=1))
    floats = np.arange(13 * 6 + 36 + 6, dtype=np.float32)
    replica.copy_in(0, floats)
    assert model[2].weight is model[0].weight
    assert model[2].weight.flatten()[:3].tolist() == [0, 1, 2]


def test_replica_tied_the_other_way_round_is_still_an_embedding():
    model = nn.Sequential(nn.Linear(6, 13, bias=False), nn.Embedding(13, 6))
    model[1].weight = model[0].weight
    specs = tensor_specs(model)
    assert [(s.name, s.role) for s in specs] == [("0.weight", "embedding")]


def test_replica_frozen_parameters_are_named_but_never_touched():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    for p in model[0].parameters():
        p.requires_grad_(False)
    replica, layout, _ = cut(model, 1)
    assert [t.role for t in layout.tensors] == ["frozen", "frozen", "parameter", "parameter"]
    before = model[0].weight.clone()
    replica.copy_in(0, np.zeros(layout.num_elements, dtype=np.float32))
    assert layout.num_elements == 30
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)


def test_replica_batchnorm_statistics_travel_as_buffers_and_counters():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    replica, layout, _ = cut(model, 1)
    roles = {t.name: t.role for t in layout.tensors}
    assert roles["1.running_mean"] == roles["1.running_var"] == "buffer"
    assert roles["1.num_batches_tracked"] == "counter"
    for _ in range(3):
        model(torch.randn(8, 4))
    assert replica.counters(0).tolist() == [3]
    replica.set_counters(0, np.array([2**40], dtype=np.int64))
    assert model[1].num_batches_tracked.item() == 2**40
    floats = np.empty(layout.num_elements, dtype=np.float32)
    replica.copy_out(0, floats)
    mean = model[1].running_mean.clone()
    model[1].reset_running_stats()
    replica.copy_in(0, floats)
    torch.testing.assert_close(model[1].running_mean, mean, rtol=0, atol=0)


def test_replica_counters_of_any_integer_dtype_come_back():
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.tensor([[True, False], [False, True]]))
    model.register_buffer("small", torch.tensor([-3, 7], dtype=torch.int8))
    replica, layout, _ = cut(model, 1)
    values = replica.counters(0)
    assert sorted(values.tolist()) == [-3, 0, 0, 1, 1, 7]
    assert layout.fragments[0].num_counters == 6
    model.seen.fill_(False)
    model.small.zero_()
    replica.set_counters(0, values)
    assert model.seen.tolist() == [[True, False], [False, True]]
    assert model.small.tolist() == [-3, 7]


def test_replica_fragment_without_counters_has_an_empty_array():
    replica, _, _ = cut(nn.Linear(2, 2), 1)
    assert replica.counters(0).shape == (0,)
    assert replica.counters(0).dtype == np.int64
    replica.set_counters(0, np.zeros(0, dtype=np.int64))


def test_replica_buffers_that_are_not_saved_are_not_exchanged():
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    assert [s.name for s in tensor_specs(model)] == ["weight", "bias"]


def test_replica_tensor_whose_storage_was_exchanged_is_read_and_written_in_its_new_place():
    """``p.data = ...``, as load_state_dict(assign) or casting tools do, keeps the object."""
    model = nn.Linear(4, 4, bias=False)
    replica, _, _ = cut(model, 1)
    out = np.empty(16, dtype=np.float32)
    replica.copy_out(0, out)
    model.weight.data = torch.full((4, 4), 3.0)
    replica.copy_out(0, out)
    assert set(out.tolist()) == {3.0}
    model.weight.data = torch.zeros(4, 4).t()
    replica.copy_in(0, np.arange(16, dtype=np.float32))
    assert model.weight.flatten().tolist() == list(range(16))


def test_replica_copy_in_under_a_living_graph_is_noticed_by_autograd():
    """step() must come when no graph needs the parameters; a wrong gradient must not come out silently."""
    model = nn.Linear(3, 3, bias=False)
    replica, _, _ = cut(model, 1)
    loss = model(model(torch.ones(1, 3))).square().sum()
    replica.copy_in(0, np.zeros(9, dtype=np.float32))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_replica_optimizer_goes_on_after_a_receipt():
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    replica, _, _ = cut(model, 1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        replica.copy_in(0, np.array([5, 6, 7], dtype=np.float32))
        assert model.weight.requires_grad
        assert model.weight.tolist() == [[5, 6, 7]]


def test_replica_model_that_is_sparse_or_elsewhere_is_refused_by_name():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"mask has the layout torch\.sparse_coo"):
        tensor_specs(model)
    with pytest.raises(ConfigError, match=r"weight is on meta.*model\.cpu\(\)"):
        tensor_specs(nn.Linear(2, 2, device="meta"))


def test_replica_copy_that_two_threads_ask_for_is_whole_when_either_has_it():
    model = nn.Linear(2048, 1024, bias=False)
    layout = build_layout(tensor_specs(model), num_fragments=1)
    replica = Replica(model, layout)
    with ThreadPoolExecutor(1) as other:
        for value in range(1, 40):
            nn.init.constant_(model.weight, value)
            out = np.zeros(layout.fragments[0].num_elements, dtype=np.float32)
            copy = replica.begin_copy_out(0, out)
            future = other.submit(copy.finish)
            if value % 2:
                time.sleep(0.0002)  # in the midst of the other's copy
            copy.finish()
            nn.init.constant_(model.weight, -1)  # the next step
            future.result(10)
            assert (out == value).all()


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_replica_copy_that_is_finished_after_a_forward_pass_is_of_before_it(num_fragments: int):
    """A forward pass changes what is no parameter of an optimizer's: statistics, embeddings that it renormalises."""
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6))
    layout = build_layout(tensor_specs(model), num_fragments=num_fragments)
    replica = Replica(model, layout)
    wanted, late, copies = [], [], []
    for p, fragment in enumerate(layout.fragments):
        wanted.append(np.empty(fragment.num_elements, dtype=np.float32))
        replica.copy_out(p, wanted[-1])
        late.append(np.empty(fragment.num_elements, dtype=np.float32))
        copies.append(replica.begin_copy_out(p, late[-1]))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model(torch.tensor([[0, 1], [2, 3]]))
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {"0.weight", "3.running_mean", "3.running_var", "3.num_batches_tracked"}
    for copy, got, want in zip(copies, late, wanted, strict=True):
        assert not copy.is_overtaken()
        copy.finish()
        np.testing.assert_array_equal(got, want)


def test_replica_copy_knows_when_a_parameter_was_changed_before_it_was_finished():
    model = nn.Linear(3, 2)
    layout = build_layout(tensor_specs(model), num_fragments=1)
    copy = Replica(model, layout).begin_copy_out(0, np.empty(8, dtype=np.float32))
    model(torch.ones(3)).sum().backward()
    assert not copy.is_overtaken()
    with torch.no_grad():
        model.bias.add_(1)
    assert copy.is_overtaken()
