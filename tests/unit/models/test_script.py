"""Loading of a model from a user's factory, and messages about mistakes in the script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from winml.modelkit.errors import InputError, ModelPathError, UsageError, WinMLError
from winml.modelkit.models.model import load_model
from winml.modelkit.models.parts import LoadedModel
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import InputTensorSpec

MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)
    def forward(self, ids, scale=None, *, shift=None):
        found = self.table(ids)
        return found if scale is None else found * scale

def make():
    return Net()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _load(folder: Path, text: str, factory: str = "make", **others: object) -> LoadedModel:
    path = folder / "net.py"
    path.write_text(MODULE + text, encoding="utf-8")
    return load_model(ModelRequest(f"{path}:{factory}", **others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "returned",
    [
        "{'ids': torch.tensor([[1, 7]]), 'scale': torch.ones(2, 4)}",
        "(torch.tensor([[1, 7]]), torch.ones(2, 4))",
        "[torch.tensor([[1, 7]]), torch.ones(2, 4)]",
    ],
)
def test_script_example_becomes_inputs_and_first_draw(folder: Path, returned: str) -> None:
    """Names come from the dict or from forward; indices are valid within those of the example."""
    loaded = _load(folder, f"\ndef example_inputs():\n    return {returned}\n")
    expected = (
        InputTensorSpec(name="ids", shape=(1, 2), dtype="int64", value_range=(1, 7)),
        InputTensorSpec(name="scale", shape=(2, 4), dtype="float32"),
    )
    assert expected == loaded.only_part.inputs
    assert loaded.only_part.example is not None
    assert [[1, 7]] == loaded.only_part.example["ids"].tolist()
    assert ("Net", "script", "torch", None) == (
        loaded.info.class_name,
        loaded.info.source_kind,
        loaded.info.library,
        loaded.info.task,
    )
    assert not loaded.model.training


def test_script_single_tensor_is_the_first_parameter(folder: Path) -> None:
    """A lone tensor needs no container."""
    loaded = _load(folder, "\ndef example_inputs():\n    return torch.tensor([3])\n")
    assert ["ids"] == [spec.name for spec in loaded.only_part.inputs]


def test_script_input_specs_win_over_the_example(folder: Path) -> None:
    """The manifest describes everything, so an example that cannot be made does no harm."""
    specs = (InputTensorSpec(name="ids", shape=(2, 3), dtype="int64", value_range=(0, 9)),)
    loaded = _load(folder, "\ndef example_inputs():\n    raise RuntimeError\n", input_specs=specs)
    assert specs == loaded.only_part.inputs
    assert loaded.only_part.example is None


def test_script_batch_size_beside_input_specs_is_reported(folder: Path) -> None:
    """A note says that --input-specs overrides the batch size."""
    specs = (InputTensorSpec(name="ids", shape=(2, 3), dtype="int64", value_range=(0, 9)),)
    loaded = _load(folder, "", input_specs=specs, batch_size=4)
    assert any("--input-specs" in note for note in loaded.notes)


def test_script_factory_may_be_a_class_an_instance_or_nested(folder: Path) -> None:
    """The name after the colon is a module instance or anything that returns one when called."""
    example = "\nnet = Net()\nclass Zoo:\n    make = staticmethod(make)\n"
    example += "def example_inputs():\n    return torch.tensor([3])\n"
    assert {"Net"} == {_load(folder, example, name).info.class_name for name in ("Net", "net", "Zoo.make")}


def test_script_may_import_its_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's folder is searched, and only while the script runs."""
    import sys

    (folder / "a_neighbour_of_net.py").write_text("size = 3\n", encoding="utf-8")
    monkeypatch.chdir(folder.parent)
    before = list(sys.path)
    text = "\ndef example_inputs():\n    from a_neighbour_of_net import size\n    return torch.arange(size)\n"
    assert (3,) == _load(folder, text).only_part.inputs[0].shape
    assert before == sys.path


def test_script_in_a_package_is_imported_from_the_working_directory(folder: Path) -> None:
    """``package.module:factory`` needs no installation."""
    package = folder / "zoo_of_this_test"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "nets.py").write_text(
        MODULE + "\ndef example_inputs():\n    return torch.tensor([3])\n", encoding="utf-8"
    )
    assert "Net" == load_model(ModelRequest("zoo_of_this_test.nets:make")).info.class_name


@pytest.mark.parametrize(
    ("text", "factory", "error", "words"),
    [
        ("", "mkae", ModelPathError, "'make'"),
        ("import os\nfrom torch import nn", "o", ModelPathError, "Net, make."),
        ("size = 3", "size", ModelPathError, "'size' is"),
        ("", "make", UsageError, "inputs of Net"),
        ("def bad():\n    raise ValueError('too small')", "bad", InputError, "net.py:15: ValueError: too small"),
        ("def bad():\n    import sys\n    sys.exit(3)", "bad", InputError, "net.py:16: SystemExit: 3"),
        ("def bad(size):\n    pass", "bad", InputError, "TypeError: bad() missing 1 required"),
        ("def bad():\n    return torch.nn.Linear(-1, 2, 3, 4, 5, 6)", "bad", InputError, "net.py:15: TypeError"),
        ("import a_module_nobody_has", "make", InputError, "net.py:14: ModuleNotFoundError"),
        ("def bad(:", "bad", InputError, "net.py:14: SyntaxError"),
        ("def bad():\n    return 3", "bad", InputError, "torch.nn.Module"),
        ("def example_inputs():\n    return {'ids': 3}", "make", InputError, "'ids'"),
        ("def example_inputs():\n    return ()", "make", InputError, "no inputs"),
        ("def example_inputs():\n    return [torch.ones(1)] * 3", "make", InputError, "3 values"),
        ("def example_inputs():\n    return {'idx': torch.ones(1)}", "make", UsageError, "'idx'"),
        ("def example_inputs():\n    return {'scale': torch.ones(1)}", "make", UsageError, "needs ids"),
        ("def example_inputs():\n    return torch.ones(1, dtype=torch.complex64)", "make", UsageError, "unknown dtype"),
    ],
)  # fmt: skip
def test_script_mistake_is_one_error_with_its_place(
    folder: Path, text: str, factory: str, error: type[WinMLError], words: str
) -> None:
    """The message names the mistake, and the hint says how to proceed."""
    with pytest.raises(error) as caught:
        _load(folder, text, factory)
    assert words in str(caught.value)
    assert caught.value.hint


def test_script_missing_module_is_a_wrong_name(folder: Path) -> None:
    """A missing module is exit code 2; a module with a failing import is exit code 1."""
    with pytest.raises(ModelPathError, match=r"no module 'no_such_package.nets'"):
        load_model(ModelRequest("no_such_package.nets:make"))
    (folder / "broken_net.py").write_text("import a_module_nobody_has\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"broken_net.py:1: ModuleNotFoundError"):
        load_model(ModelRequest("broken_net:make"))


def test_script_bool_example_is_drawn_as_a_flag(folder: Path) -> None:
    """Booleans have no range to keep to."""
    loaded = _load(folder, "\ndef example_inputs():\n    return torch.tensor([3]), torch.tensor([True])\n")
    assert loaded.only_part.inputs[1].value_range is None
    assert loaded.only_part.example is not None
    assert torch.bool == loaded.only_part.example["scale"].dtype


def test_script_compiled_model_becomes_its_original(folder: Path) -> None:
    """The inputs are named by the forward of the original model, not by that of the wrapper."""
    text = """
def compiled():
    return torch.compile(make(), backend="eager")

def example_inputs():
    return torch.tensor([[1, 2]])
"""
    loaded = _load(folder, MODULE + text, "compiled")
    assert "Net" == type(loaded.model).__name__
    assert ["ids"] == [spec.name for spec in loaded.only_part.inputs]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("torch.nn.Sequential(torch.nn.LazyLinear(2))", "'0.weight'"),
        ('torch.nn.Linear(2, 2, device="meta")', "'weight' .*meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_script_model_without_values_is_refused_by_parameter(folder: Path, made: str, words: str) -> None:
    """The model has nothing to export; a hint says how to proceed."""
    text = f"""
def empty():
    return {made}

def example_inputs():
    return torch.zeros(1, 2)
"""
    with pytest.raises(InputError, match=words) as caught:
        _load(folder, MODULE + text, "empty")
    assert caught.value.hint


NESTED = """
from typing import NamedTuple

class Box(NamedTuple):
    size: torch.Tensor
    scale: float

class Nested(torch.nn.Module):
    def forward(self, features, box=None, factor=1.0):
        return features["ids"].float() * factor

def nested():
    return Nested()

def with_inputs():
    return Nested(), {"features": {"ids": torch.tensor([5])}}

def example_inputs_nested():
    return {"features": {"ids": torch.tensor([[1, 7]])}, "box": Box(torch.ones(2), 3.0), "factor": 2.0}

def example_inputs_with_inputs():
    raise RuntimeError("not asked for")

def example_inputs():
    return torch.tensor([[1, 7]])
"""


def test_script_examples_belong_to_factories(folder: Path) -> None:
    """An example returned by the factory comes first, then the function named after it, then example_inputs."""
    names = {
        factory: [spec.name for spec in _load(folder, NESTED, factory).only_part.inputs]
        for factory in ("nested", "with_inputs", "make")
    }
    assert {"nested": ["features.ids", "box.size"], "with_inputs": ["features.ids"], "make": ["ids"]} == names


def test_script_example_with_containers_builds_the_arguments(folder: Path) -> None:
    """The forward gets its own containers and constants, and the user learns of the constants."""
    part = _load(folder, NESTED, "nested").only_part
    assert part.arguments is not None
    assert part.example is not None
    built = part.arguments.build(part.example)
    assert "Box" == type(built["box"]).__name__
    assert (3.0, 2.0) == (built["box"].scale, built["factor"])
    assert any("constant 2.0" in note for note in part.notes)


def test_script_input_specs_keep_containers_and_constants_of_the_example(folder: Path) -> None:
    """The manifest declares sizes and types; containers and constants come from the example with the same names."""
    specs = (
        InputTensorSpec(name="features.ids", shape=(2, 3), dtype="int64", value_range=(0, 9)),
        InputTensorSpec(name="box.size", shape=(4,), dtype="float32"),
    )
    part = _load(folder, NESTED, "nested", input_specs=specs).only_part
    assert specs == part.inputs
    assert part.arguments is not None
    built = part.arguments.build({spec.name: torch.zeros(1) for spec in specs})
    assert ("Box", 2.0) == (type(built["box"]).__name__, built["factor"])


def test_script_input_specs_of_other_names_are_containers(folder: Path) -> None:
    """Names alone tell dicts and lists; constants of the example stay."""
    specs = (InputTensorSpec(name="features.0", shape=(2,), dtype="int64"),)
    part = _load(folder, NESTED, "nested", input_specs=specs).only_part
    assert part.arguments is not None
    built = part.arguments.build({"features.0": torch.zeros(1)})
    assert (list, 2.0) == (type(built["features"]), built["factor"])


def test_script_example_that_fails_beside_input_specs_is_a_note(folder: Path) -> None:
    """The manifest describes everything; that the example was not used is said."""
    specs = (InputTensorSpec(name="ids", shape=(2, 3), dtype="int64", value_range=(0, 9)),)
    loaded = _load(folder, "\ndef example_inputs():\n    raise RuntimeError('broken')\n", input_specs=specs)
    assert any("RuntimeError: broken; it is not used" in note for note in loaded.notes)


def test_script_returning_a_second_value_is_refused(folder: Path) -> None:
    """The error states the order (model, inputs)."""
    text = "\ndef bad():\n    return torch.zeros(1), make()\n"
    with pytest.raises(InputError, match="Tensor, Net") as caught:
        _load(folder, text, "bad")
    assert "(model, inputs)" in str(caught.value.hint)


def test_script_dict_as_the_only_argument_is_explained(folder: Path) -> None:
    """A dict is spread over the parameters; the message explains how to pass one as an argument."""
    text = """
class Only(torch.nn.Module):
    def forward(self, features):
        return features["ids"]

def only():
    return Only(), {"ids": torch.zeros(1)}
"""
    with pytest.raises(UsageError, match="'ids'") as caught:
        _load(folder, text, "only")
    assert "{'features': {…}}" in str(caught.value.hint)


def test_script_example_without_a_function_is_refused(folder: Path) -> None:
    """An ``example_inputs`` other than a function is refused, not ignored."""
    with pytest.raises(InputError, match="example_inputs") as caught:
        _load(folder, "\nexample_inputs = {'ids': torch.tensor([3])}\n")
    assert "def example_inputs(): return" in (caught.value.hint or "")


def test_weights_of_a_factory_depend_on_the_seed_alone(folder: Path) -> None:
    """The caller's random state has no effect and is not changed."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    example = "\ndef example_inputs():\n    return torch.tensor([[1, 7]])\n"
    weights = [_load(folder, example, seed=seed).model.get_parameter("table.weight") for seed in (5, 5, 6)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(expected, torch.rand(3))
