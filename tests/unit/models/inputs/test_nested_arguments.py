"""Flattening of arguments with nested tensors, and rebuilding of equal arguments."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.models.inputs.nested_arguments import arguments_of_names, flatten_arguments


@dataclasses.dataclass(frozen=True)
class Points:
    """A dataclass unknown to pytree, with a member that its constructor does not set."""

    xy: torch.Tensor
    names: list[str] = dataclasses.field(default_factory=list)
    scale: float = dataclasses.field(default=2.0, init=False)


class Pair(NamedTuple):
    """A NamedTuple with a member that may be missing."""

    first: torch.Tensor
    second: torch.Tensor | None = None


ARGUMENTS: dict[str, Any] = {
    "images": [torch.full((2,), 1.0), torch.full((3,), 2.0)],
    "features": {"ids": torch.full((4,), 3.0), 7: (torch.full((1,), 4.0),), "none": None, "empty": []},
    "points": Points(torch.full((5,), 5.0), ["a"]),
    "pair": Pair(torch.full((6,), 6.0)),
    "encoding": BatchEncoding({"input_ids": torch.full((7,), 7.0)}),
    "output": BaseModelOutput(last_hidden_state=torch.full((8,), 8.0)),
    "ordered": collections.OrderedDict(z=torch.full((9,), 9.0)),
    "flag": True,
}


def test_flatten_arguments_names_every_tensor_by_its_path() -> None:
    """Keys, positions and fields, joined by dots; in order."""
    tensors, arguments = flatten_arguments(ARGUMENTS, "inputs")
    expected = ["images.0", "images.1", "features.ids", "features.7.0", "points.xy", "pair.first"]
    assert [*expected, "encoding.input_ids", "output.last_hidden_state", "ordered.z"] == list(tensors)
    assert arguments is not None
    assert tuple(ARGUMENTS) == arguments.names


def test_arguments_built_again_hold_other_tensors_in_the_same_places() -> None:
    """Classes, constants and empty containers stay; the original arguments are not changed."""
    tensors, arguments = flatten_arguments(ARGUMENTS, "inputs")
    assert arguments is not None
    built = arguments.build({name: tensor * 10 for name, tensor in tensors.items()})
    assert [10.0, 20.0] == [float(image[0]) for image in built["images"]]
    assert (30.0, 40.0, None, []) == (
        float(built["features"]["ids"][0]),
        float(built["features"][7][0][0]),
        built["features"]["none"],
        built["features"]["empty"],
    )
    assert (Points, 50.0, ["a"], 2.0) == (
        type(built["points"]),
        float(built["points"].xy[0]),
        built["points"].names,
        built["points"].scale,
    )
    assert (Pair, 60.0, None) == (type(built["pair"]), float(built["pair"].first[0]), built["pair"].second)
    assert 70.0 == float(built["encoding"].input_ids[0])
    assert 80.0 == float(built["output"].last_hidden_state[0])
    assert built["flag"] is True
    assert 5.0 == float(ARGUMENTS["points"].xy[0])
    assert 7.0 == float(ARGUMENTS["encoding"]["input_ids"][0])


def test_constants_are_noted_except_none() -> None:
    """A user learns which of the values became no input."""
    _, arguments = flatten_arguments(ARGUMENTS, "inputs")
    assert arguments is not None
    assert [
        "points.names.0 is the constant 'a': only tensors become inputs of the graph",
        "points.scale is the constant 2.0: only tensors become inputs of the graph",
        "flag is the constant True: only tensors become inputs of the graph",
    ] == list(arguments.notes)


def test_tensors_alone_need_no_builder() -> None:
    """Arguments that are all tensors have no builder."""
    tensor = torch.zeros(1)
    assert ({"x": tensor, "y": tensor}, None) == flatten_arguments({"x": tensor, "y": tensor}, "inputs")


def test_tensor_passed_twice_is_two_inputs() -> None:
    """The two arguments may be different tensors in another run."""
    tensor = torch.zeros(1)
    assert ["a", "b.0"] == list(flatten_arguments({"a": tensor, "b": [tensor]}, "inputs")[0])


def _cycle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": [np.zeros(1)]}, "'x.0' is a ndarray"),
        ({"x": {1, 2}}, "'x' is a set"),
        ({"x": 3}, "int for 'x'"),
        ({"x": []}, "list for 'x'"),
        ({}, "no inputs"),
        ({"x": {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}}, "tensors have the name 'x.a.b'"),
        ({"x": _cycle()}, "contain themselves"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], words: str) -> None:
    """The error names the argument."""
    with pytest.raises(InputError) as caught:
        flatten_arguments(arguments, "inputs")
    assert words in caught.value.message
    assert caught.value.hint


class Net(torch.nn.Module):
    """A model with containers declared by annotations."""

    def forward(
        self,
        images: list[torch.Tensor],
        points: Points | None = None,
        pairs: list[Pair] | None = None,
        fixed: tuple[torch.Tensor, torch.Tensor] | None = None,
        features: dict[str, torch.Tensor] | None = None,
        anything: Any = None,
    ) -> torch.Tensor:
        """Do nothing."""
        del points, pairs, fixed, features, anything
        return images[0]


def test_arguments_of_names_follow_keys_and_annotations() -> None:
    """Dataclasses, NamedTuples and tuples are built from annotations if there is no example."""
    names = ["images.0", "images.1", "points.xy", "pairs.0.first", "fixed.0", "fixed.1", "features.0", "anything.x.0"]
    arguments = arguments_of_names(Net(), names, "--input-specs", {"flag": 1})
    assert arguments is not None
    built = arguments.build({name: torch.full((1,), float(place)) for place, name in enumerate(names)})
    assert [0.0, 1.0] == [float(image) for image in built["images"]]
    assert (Points, Pair, tuple, dict) == (
        type(built["points"]),
        type(built["pairs"][0]),
        type(built["fixed"]),
        type(built["features"]),
    )
    assert 7.0 == float(built["anything"]["x"][0])
    assert 1 == built["flag"]


def test_arguments_of_flat_names_need_no_builder() -> None:
    """Each name is an argument."""
    assert arguments_of_names(Net(), ["images", "features"], "--input-specs") is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["images", "images.0"], "'images'"),
        (["images.0", "points.zz"], "from zz"),
    ],
)
def test_arguments_of_names_that_contradict_are_refused(names: list[str], words: str) -> None:
    """The error names the container and the option."""
    with pytest.raises(UsageError) as caught:
        arguments_of_names(Net(), names, "--input-specs")
    assert caught.value.message.startswith("--input-specs:")
    assert words in caught.value.message


class Wrapped(collections.abc.MutableMapping[str, Any]):
    """A mapping with members in an inner dict, and one further attribute."""

    def __init__(self, members: Any, scale: float = 1.0) -> None:
        self.members = dict(members)
        self.scale = scale

    def __getitem__(self, name: str) -> Any:
        return self.members[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.members[name] = value

    def __delitem__(self, name: str) -> None:
        del self.members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)


class Locked(Wrapped):
    """A mapping that accepts no members and cannot be built from any."""

    def __init__(self) -> None:
        super().__init__({"x": torch.zeros(2)})

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("locked")


def test_mapping_of_the_user_keeps_its_own_tensors() -> None:
    """The built mapping has the members of the call and the other attributes of the original."""
    mine = torch.zeros(2)
    given = Wrapped({"x": mine}, scale=3.0)
    tensors, nested = flatten_arguments({"features": given}, "inputs")
    assert ["features.x"] == list(tensors)
    assert nested is not None
    other = torch.ones(2)
    built = nested.build({"features.x": other})["features"]
    assert (Wrapped, 3.0) == (type(built), built.scale)
    assert built["x"] is other
    assert given["x"] is mine


def test_mapping_that_takes_no_other_members_is_refused() -> None:
    """No copy with the tensors of a call can be made."""
    with pytest.raises(InputError, match="'features' is a Locked"):
        flatten_arguments({"features": Locked()}, "inputs")
