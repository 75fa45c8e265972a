"""Output sizes as expressions of input sizes, if the expression is certain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from winml.modelkit.models.output_shapes import Observation, explain_output_shapes, output_specs_of
from winml.modelkit.onnx.specs import DynamicDimension

Size = Callable[[dict[str, int]], int]

TRACED = {"batch": 2, "height": 224, "width": 192}


def observe(size: Size, sizes: dict[str, int]) -> Observation:
    """Return the observation of a model with one output of one axis."""
    return Observation(sizes, {"out": (size(sizes),)})


def explain(size: Size, *, can_ask: bool = True) -> int | str:
    """Explain the output from the observations an export makes."""
    others = [
        {**TRACED, name: other} for name, traced in TRACED.items() for other in (traced // 2, traced * 9 // 8 + 1)
    ]
    observations = [observe(size, sizes) for sizes in (TRACED, *others, {name: s + 3 for name, s in TRACED.items()})]
    ask = (lambda sizes: observe(size, dict(sizes))) if can_ask else None
    return explain_output_shapes(observations, ask)["out"][0]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (lambda s: 5 * len(s), 15),
        (lambda s: s["height"], "height"),
        (lambda s: 4 * s["batch"], "4*batch"),
        (lambda s: s["width"] + 1, "width + 1"),
        (lambda s: 2 * s["width"] - 3, "2*width - 3"),
        (lambda s: s["batch"] * s["width"], "batch*width"),
        (lambda s: 6 * s["batch"] * s["width"], "6*batch*width"),
        (lambda s: s["height"] + s["width"], "height + width"),
        (lambda s: s["height"] // 16, "height//16"),
        (lambda s: -(-s["height"] // 32), "(height + 31)//32"),
        (lambda s: (s["height"] - 1) // 2, "(height - 1)//2"),
    ],
)
def test_size_is_explained_by_the_only_fitting_expression(size: Size, expected: int | str) -> None:
    """Floor and ceiling are distinguished."""
    assert expected == explain(size)


def test_unexplained_size_gets_a_readable_name() -> None:
    """The generated name contains the name of the output."""
    assert "out_dim_0" == explain(lambda s: (s["height"] // 16) * (s["width"] // 16))


def test_division_that_observations_leave_open_is_not_claimed() -> None:
    """Several offsets stay possible if no further observation can be made."""
    assert "out_dim_0" == explain(lambda s: -(-s["height"] // 32), can_ask=False)


def test_unexplained_sizes_that_always_agree_share_a_name() -> None:
    """Two outputs of one unexplained size have the same dimension name."""
    strange = {2: 7, 3: 5, 4: 11}
    observations = [
        Observation({"batch": size}, {"a.b": (odd, size), "c": (odd,), "d": (odd + 1,)})
        for size, odd in strange.items()
    ]
    assert {"a.b": ("a_b_dim_0", "batch"), "c": ("a_b_dim_0",), "d": ("d_dim_0",)} == explain_output_shapes(
        observations
    )


def test_stride_of_stacked_convolutions_is_exact() -> None:
    """A stack of seven convolutions is one division; a refused question is followed by another."""

    def frames(sizes: dict[str, int]) -> int:
        length = sizes["samples"]
        for kernel, stride in ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)):
            length = (length - kernel) // stride + 1
        return length

    asked_sizes: list[int] = []

    def ask(sizes: object) -> Observation | None:
        asked_sizes.append(dict(sizes)["samples"])  # type: ignore[call-overload]
        return None if len(asked_sizes) == 1 else observe(frames, dict(sizes))  # type: ignore[call-overload]

    observations = [observe(frames, {"samples": size}) for size in (16_000, 400, 18_001)]
    assert ("(samples - 80)//320",) == explain_output_shapes(observations, ask)["out"]
    assert 24 >= len(asked_sizes)


_DIMENSIONS = (
    DynamicDimension(name="batch", min=1, max=None, example=2),
    DynamicDimension(name="sequence", min=1, max=None, example=5),
    DynamicDimension(name="past", min=0, max=None, example=7),
)


@pytest.mark.parametrize(
    ("axes", "expected", "runs"),
    [
        pytest.param(
            lambda s: (s["batch"], 4, s["past"] + s["sequence"]), ("batch", 4, "sequence + past"), 1, id="plain"
        ),
        pytest.param(lambda s: (s["batch"], s["sequence"] // 2), ("batch", "sequence//2"), 5, id="a division"),
        pytest.param(lambda s: (s["batch"] * s["sequence"],), ("batch*sequence",), 5, id="a product"),
    ],
)
def test_outputs_of_plain_sizes_take_one_run_more(
    axes: Callable[[dict[str, int]], tuple[int, ...]], expected: tuple[int | str, ...], runs: int
) -> None:
    """One run changes all dimensions; further runs, one for each, are needed only for unexplained axes."""
    asked: list[dict[str, int]] = []

    def run(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        asked.append(dict(sizes))
        return {"output": torch.empty(axes(dict(sizes)), device="meta")}

    outputs = {"output": torch.empty(axes({"batch": 2, "sequence": 5, "past": 7}), device="meta")}
    (spec,) = output_specs_of(outputs, _DIMENSIONS, run)
    assert expected == spec.shape
    assert runs <= len(asked)
    assert len(asked) == 1 or runs > 1


def test_ambiguous_sizes_are_observed_separately() -> None:
    """A dimension is distinguished from the sum of two others, even if both sizes are equal in the trace."""
    dimensions = (
        DynamicDimension(name="left", min=1, max=None, example=3),
        DynamicDimension(name="right", min=1, max=None, example=4),
        DynamicDimension(name="whole", min=1, max=None, example=7),
    )

    def run(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        return {"output": torch.empty(sizes["whole"], device="meta")}

    (spec,) = output_specs_of({"output": torch.empty(7, device="meta")}, dimensions, run)
    assert ("whole",) == spec.shape
