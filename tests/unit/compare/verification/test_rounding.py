"""Draws decided by rounding, which prove nothing and are replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from winml.modelkit.compare.outputs import Rounding, VerificationInfo, compare_outputs
from winml.modelkit.compare.verification.reference_run import PreparedPart, prepared_part, run_reference
from winml.modelkit.compare.verification.rounding import (
    MOST_SET_ASIDE,
    accept_half_precision,
    accept_rounding,
    compare_stable_draws,
)
from winml.modelkit.compare.verification.sizes import Draw
from winml.modelkit.errors import VerificationError
from winml.modelkit.models.live_module import loaded_from_module

Answers = Mapping[str, NDArray[Any]]
Change = Callable[[int, dict[str, NDArray[Any]]], None]


class Chooser(nn.Module):
    """A model that chooses by the larger of two sums, which are equal if the first input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.scores.weight.copy_(torch.tensor([[0.0, 0.3, 0.7, 0.9], [1.0, 0.3, 0.7, 0.9]]))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen values and the scores."""
        scores = self.scores(values)
        return torch.where(scores[:, :1] >= scores[:, 1:], values[:, 1:], -values[:, 1:]), scores


class Softened(nn.Module):
    """A model that chooses by the larger of two shares.

    Softmax rounds them to equal ones if the first input is tiny.
    """

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen values and the shares."""
        shares = torch.softmax(torch.stack([values[:, 0], -values[:, 0]], dim=1), dim=1)
        return torch.where(shares.argmax(1, keepdim=True) == 0, values[:, 1:], -values[:, 1:]), shares


class Raised(nn.Module):
    """A model that adds a large number to the values, so one unit in the last place is a large error."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of about 1 with the last digits of 700."""
        return values + 700


class Cancelling(nn.Module):
    """A model that subtracts an added number: rounding adds up to about 5e-5 of the output's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.raised = Raised()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, less some of their last digits."""
        return self.raised(values) - 700


class Dice(nn.Module):
    """A model with random outputs."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add random numbers."""
        return values + torch.rand(values.shape)


def inputs(first: float, seed: int) -> dict[str, torch.Tensor]:
    """Return three rows that begin with the chosen value."""
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    values[:, 0] = first
    return {"values": values}


TIE, CLEAR = 0.0, 1.0


@contextmanager
def prepared(model: nn.Module) -> Iterator[PreparedPart]:
    """Prepare a model as for export, and run it once."""
    loaded = loaded_from_module(model.eval(), inputs(CLEAR, 0))
    with prepared_part(loaded.only_part) as ready, torch.no_grad():
        loaded.model(*inputs(CLEAR, 0).values())
        yield ready


def compared(model: nn.Module, firsts: Sequence[float], change: Change) -> VerificationInfo:
    """Compare draws that begin with ``firsts`` with changed copies of PyTorch's own outputs."""
    numbers = iter(range(1, len(firsts) + 1))

    def changed(draw: Draw) -> Answers:
        answer = {name: value.copy() for name, value in draw.reference.items()}
        change(next(numbers), answer)
        return answer

    with prepared(model) as ready:

        def draw_inputs(number: int, _replaced: Draw | None = None) -> dict[str, torch.Tensor]:
            return inputs(firsts[number - 1], number)

        first_two = [draw_inputs(1), draw_inputs(2)]
        draws = [Draw(tensors, run_reference(ready, tensors), {}) for tensors in first_two]
        return compare_stable_draws(
            ready, draws, rounding=Rounding(("float32",)), draw_inputs=draw_inputs, run_file=changed
        )


def choosing_otherwise(*numbers: int) -> Change:
    """Return a change that reverses the choice in some draws."""

    def change(number: int, answer: dict[str, NDArray[Any]]) -> None:
        if number in numbers:
            answer["output_0"] *= -1

    return change


def test_draw_decided_by_rounding_is_set_aside() -> None:
    """Another draw is added, the threshold stays, and the record lists the draw."""
    info = compared(Chooser(), [CLEAR, TIE, CLEAR], choosing_otherwise(2))
    assert info.is_verified
    assert {1, 3} == {comparison.draw for comparison in info.comparisons}
    assert [("output_0", 2)] == [(item.name, item.draw) for item in info.set_aside]
    assert info.set_aside[0].relative_diff > 1
    assert [("output_0", 2)] == [(item["name"], item["draw"]) for item in info.as_record()["set_aside"]]


def test_draw_decided_by_rounding_in_a_function_is_set_aside() -> None:
    """The ranked value is the output of a function, not of a module."""
    info = compared(Softened(), [CLEAR, 1e-9, CLEAR], choosing_otherwise(2))
    assert [("output_0", 2)] == [(item.name, item.draw) for item in info.set_aside]


def moving(numbers: Collection[int], part: float) -> Change:
    """Return a change that moves one value of some draws by a share of the largest value."""

    def change(draw: int, answer: dict[str, NDArray[Any]]) -> None:
        if draw in numbers:
            answer["output"][0, 0] += part * abs(answer["output"]).max()

    return change


def test_difference_that_rounding_adds_up_to_is_set_aside() -> None:
    """The difference is above the threshold, and a few times the effect of one unit in the last place per module."""
    info = compared(Cancelling(), [CLEAR, CLEAR, CLEAR], moving([2], 1.2e-4))
    assert [("output", 2)] == [(item.name, item.draw) for item in info.set_aside]
    assert 3e-5 < info.set_aside[0].relative_diff < info.set_aside[0].threshold


def test_small_difference_in_every_draw_proves_the_graph_wrong() -> None:
    """Rounding reaches the difference in some draws only; a wrong graph differs in every draw."""
    with pytest.raises(VerificationError, match="not equal") as caught:
        compared(Cancelling(), [CLEAR] * 6, moving(range(1, 7), 1.2e-4))
    assert caught.value.is_graph_wrong


def test_difference_beyond_rounding_proves_the_graph_wrong() -> None:
    """The difference is ten times the threshold, and one unit in the last place makes half of the threshold."""
    with pytest.raises(VerificationError, match="not equal"):
        compared(Cancelling(), [CLEAR, CLEAR, CLEAR], moving([2], 1e-3))


def test_equal_draw_is_accepted_despite_rounding() -> None:
    """Draws with equal outputs are not examined for rounding."""
    info = compared(Chooser(), [CLEAR, TIE], choosing_otherwise())
    assert info.is_verified
    assert {1, 2} == {comparison.draw for comparison in info.comparisons}
    assert () == info.set_aside
    assert "set_aside" not in info.as_record()


@pytest.mark.parametrize("firsts", [[CLEAR, CLEAR], [CLEAR, TIE, CLEAR]], ids=["at once", "after another"])
def test_certain_draw_proves_the_graph_wrong(firsts: list[float]) -> None:
    """No further draw is requested: the graph is wrong."""
    with pytest.raises(VerificationError, match=rf"not equal: output 'output_0', sample {len(firsts)}") as caught:
        compared(Chooser(), firsts, choosing_otherwise(2, 3))
    assert caught.value.is_graph_wrong


def test_output_that_rounding_does_not_move_has_to_agree() -> None:
    """The uncertainty of another output in the same draw is no excuse."""

    def change(number: int, answer: dict[str, NDArray[Any]]) -> None:
        if number == 2:
            answer["output_0"] *= -1
            answer["output_1"] *= 1.01

    with pytest.raises(VerificationError, match="not equal"):
        compared(Chooser(), [CLEAR, TIE, CLEAR], change)


def test_non_finite_outputs_are_never_set_aside() -> None:
    """Rounding explains a different number, but no NaN."""

    def change(number: int, answer: dict[str, NDArray[Any]]) -> None:
        answer["output_0"][0, 0] = float("nan")

    with pytest.raises(VerificationError, match="NaN or"):
        compared(Chooser(), [TIE, TIE], change)


def test_model_decided_by_rounding_in_every_draw_cannot_be_verified() -> None:
    """The verification ends after a few draws and names the output; the graph is not called wrong."""
    count = MOST_SET_ASIDE + 3
    with pytest.raises(VerificationError, match=r"rounding alone .*'output_0'") as caught:
        compared(Chooser(), [TIE] * count, choosing_otherwise(*range(count + 1)))
    assert not caught.value.is_graph_wrong


def test_random_model_is_reported_as_random() -> None:
    """The error calls the model random."""

    def change(number: int, answer: dict[str, NDArray[Any]]) -> None:
        answer["output"] += 1

    with pytest.raises(VerificationError, match=r"output 'output' of PyTorch"):
        compared(Dice(), [CLEAR, CLEAR], change)


@pytest.mark.parametrize(("first", "factor", "is_equal"), [(TIE, -1.0, True), (TIE, 20.0, False), (CLEAR, -1.0, False)])
def test_other_choice_is_accepted_only_if_rounding_decides(first: float, factor: float, is_equal: bool) -> None:
    """The accepted difference is that of a choice; a larger one, or one that rounding does not make, is not."""
    with prepared(Chooser()) as ready:
        sample = inputs(first, 1)
        draw = Draw(sample, run_reference(ready, sample), {})
        changed = {**draw.reference, "output_0": draw.reference["output_0"] * factor}
        comparisons = compare_outputs([draw.reference], [changed]).comparisons
        judged = {entry.name: entry for entry in accept_rounding(ready, draw, comparisons, Rounding(("float32",)))}
    assert {"output_0": is_equal, "output_1": True} == {name: entry.is_equal for name, entry in judged.items()}


def test_model_is_restored() -> None:
    """No hook stays on a module."""
    model = Chooser()
    compared(model, [CLEAR, TIE, CLEAR], choosing_otherwise(2))
    assert not any(module._forward_hooks for module in model.modules())


def test_half_precision_is_judged_by_the_error_of_pytorch() -> None:
    """Outputs as near to float32 as PyTorch in float16 are equal; those for other inputs are not."""
    module = Cancelling().half()
    sample = {"values": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).half()}
    with prepared_part(loaded_from_module(module, sample).only_part) as prepared:
        draw = Draw(sample, run_reference(prepared, sample), {})
        (name,) = draw.reference
        exact = {name: sample["values"].numpy()}
        other = {name: exact[name][::-1].copy()}
        for outputs, is_equal in ((exact, True), (other, False)):
            comparisons = compare_outputs([draw.reference], [outputs]).comparisons
            assert not comparisons[0].is_equal
            (judged,) = accept_half_precision(prepared, draw, outputs, comparisons)
            assert is_equal == judged.is_equal == (judged.relative_diff <= judged.threshold)


class Overflowing(nn.Module):
    """The values beside one that overflows in float16 alone."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Square 300 in the first column."""
        large = values[:, :1] * 0 + 300
        return torch.cat([large * large, values], 1)


def test_value_that_overflows_in_half_precision_hides_no_difference() -> None:
    """Infinity is far from the value in float32; the other values have to be near it."""
    sample = {"values": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).half()}
    with prepared_part(loaded_from_module(Overflowing().half(), sample).only_part) as prepared:
        draw = Draw(sample, run_reference(prepared, sample), {})
        (name,) = draw.reference
        wrong = draw.reference[name].copy()
        wrong[:, 1:] *= 2
        comparisons = compare_outputs([draw.reference], [{name: wrong}]).comparisons
        (judged,) = accept_half_precision(prepared, draw, {name: wrong}, comparisons)
        assert not judged.is_equal
