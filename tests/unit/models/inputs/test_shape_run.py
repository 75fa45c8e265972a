"""Runs of a forward on shapes without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from winml.modelkit.models.inputs.shape_run import RepeatOperators, run_on_shapes
from winml.modelkit.onnx.specs import InputTensorSpec


def _spec(name: str, shape: tuple[int, ...], dtype: str = "float32", **values: Any) -> InputTensorSpec:
    return InputTensorSpec(name=name, shape=shape, dtype=dtype, **values)


class Splitter(torch.nn.Module):
    """Projects a row of patches and splits it by the grids of its images."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(6, 4)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> Any:
        sizes = (grid.prod(-1) // 2).tolist()
        return torch.split(self.project(patches)[: sum(sizes)], sizes)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_shape_run_computes_sizes_that_follow_from_whole_numbers(device: str) -> None:
    """A grid is a value: parts split by the grid have their sizes, with storage and without."""
    with torch.device(device):
        model = Splitter()
    grid = _spec("grid", (2, 3), "int64", first_values=((1, 1), (4, 1), (2, 1)))
    parts = run_on_shapes(model, {"patches": _spec("patches", (9, 6)), "grid": grid})
    assert [(4, 4), (4, 4)] == [tuple(part.shape) for part in parts or ()]


def test_shape_run_selects_by_known_masks() -> None:
    """Selected elements of a mask are counted on every device that the forward uses."""

    def forward(features: torch.Tensor, mask: torch.Tensor) -> Any:
        length = torch.arange(features.shape[1], device=features.device)[None] < mask.sum(-1)[:, None] - 1
        return features[length.to(features.device)], features.flatten(0, 1)[mask.flatten().bool()]

    specs = {
        "features": _spec("features", (2, 5, 3)),
        "mask": _spec("mask", (2, 5), "int64", value_range=(0, 0), first_values=((1, 3),)),
    }
    shorter, shown = run_on_shapes(forward, specs) or (None, None)
    assert ((4, 3), (6, 3)) == (tuple(shorter.shape), tuple(shown.shape))


def test_shape_run_refuses_values_that_do_not_fit_the_places_picked() -> None:
    """The numbers of vectors and of masked positions must be equal."""

    def forward(text: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> Any:
        text[mask.bool()] = features
        return text

    specs = {"text": _spec("text", (1, 8, 3)), "features": _spec("features", (4, 3))}
    for count, runs in ((4, True), (3, False)):
        mask = _spec("mask", (1, 8), "int64", value_range=(0, 0), first_values=((1, count),))
        assert runs == (run_on_shapes(forward, {**specs, "mask": mask}) is not None)


def test_shape_run_of_parameters_alone_is_on_the_device_of_the_forward() -> None:
    """Tensors computed from weights alone and tensors computed from inputs are on one device."""
    query = torch.nn.Parameter(torch.zeros(1, 4, 8))
    project = torch.nn.Linear(8, 8)

    def forward(images: torch.Tensor) -> Any:
        images = images.to(query.device)
        return torch.nn.functional.scaled_dot_product_attention(project(query), images, images)

    made = run_on_shapes(forward, {"images": _spec("images", (1, 9, 8))})
    assert (1, 4, 8) == tuple(getattr(made, "shape", ()))


def test_shape_run_unknown_value_equals_no_other() -> None:
    """An image does not count as padding, and elements selected by a comparison are present."""

    def forward(images: torch.Tensor) -> Any:
        blank = (images == 0.0).sum(dim=(-1, -2)) == images.shape[-1] * images.shape[-2]
        return images[~blank], images[images > 0.5]

    kept, bright = run_on_shapes(forward, {"images": _spec("images", (3, 4, 4))}) or (None, None)
    assert ((3, 4, 4), (48,)) == (tuple(kept.shape), tuple(bright.shape))


def test_shape_run_keeps_values_of_tensors_created_in_the_forward() -> None:
    """Sizes written into a tensor on the model's device can be read back."""

    def forward(images: torch.Tensor) -> Any:
        sizes = torch.tensor([images.shape[-1], 2], device=images.device)
        return images.new_zeros(tuple(sizes.tolist())), torch.zeros(int(sizes.prod()), device=images.device)

    made, flat = run_on_shapes(forward, {"images": _spec("images", (1, 7))}) or (None, None)
    assert ((7, 2), (14,)) == (tuple(made.shape), tuple(flat.shape))


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda x: torch.nn.functional.linear(x, torch.ones(2, 9)), id="another width"),
        pytest.param(lambda x: x[: int(x.sum())], id="a size that is a value"),
        pytest.param(lambda y: y, id="another name"),
    ],
)
def test_shape_run_returns_none_for_a_failed_run(forward: Any) -> None:
    """A failed run returns `None` and raises no error."""
    assert run_on_shapes(forward, {"x": _spec("x", (3, 4))}) is None


def test_shape_run_leaves_the_random_state() -> None:
    """Deciding inputs changes no draw of the caller."""
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    run_on_shapes(lambda x: x + torch.rand(4), {"x": _spec("x", (4,))})
    assert torch.equal(before, torch.random.get_rng_state())


def test_shape_run_accepts_unknown_parts_of_sizes() -> None:
    """Rows that are sorted by expert are divided by counts, which are values: together the parts are all of it."""

    def forward(rows: torch.Tensor) -> Any:
        counts = torch.zeros(rows.shape[0], 3).scatter(1, rows.topk(1).indices, 1).long().sum(0).tolist()
        return torch.cat([part * 2 for part in rows.split(counts, dim=0)]), len(counts)

    answer = run_on_shapes(forward, {"rows": _spec("rows", (5, 3))})
    assert answer is not None
    assert ((5, 3), 3) == (tuple(answer[0].shape), answer[1])


class _Recorder(TorchDispatchMode):
    """Record the operators that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _apply_layers(state: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    """Call operators that create tensors, return views, change their argument, and return several tensors."""
    outputs = []
    for _ in range(3):
        state = torch.nn.functional.layer_norm(state * 2, (4,)).transpose(0, 1).contiguous().transpose(0, 1)
        state[0].add_(1.0)
        outputs += [counts + 1, counts + 1.0, counts + True, state > 0, *state.split(2, 1), *state.max(1)]
    return [state, *outputs]


def test_equal_operators_are_computed_once() -> None:
    """Shapes, strides and types are those of computed operators; other types of a number are other arguments."""
    arguments = torch.empty(3, 4, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    with _Recorder() as every:
        expected = _apply_layers(*arguments)
    with _Recorder() as once, RepeatOperators():
        actual = _apply_layers(*arguments)
    described = [[(value.shape, value.stride(), value.dtype) for value in values] for values in (expected, actual)]
    assert described[0] == described[1]
    assert (9, 3) == (every.names.count("aten::add.Tensor"), once.names.count("aten::add.Tensor"))
    assert 3 == once.names.count("aten::add_.Tensor")
    assert actual[5]._base is not None
