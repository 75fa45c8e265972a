"""Does a factory of the user become a model with inputs, and its mistakes one sentence?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from winml.modelkit.errors import InputError, ModelPathError, UsageError, WinMLError
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.model import load_model
from winml.modelkit.load.parts import LoadedModel
from winml.modelkit.load.request import ModelRequest

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
    """The manifest describes everything, so the example is not even made."""
    specs = (InputTensorSpec(name="ids", shape=(2, 3), dtype="int64", value_range=(0, 9)),)
    loaded = _load(folder, "\ndef example_inputs():\n    raise RuntimeError\n", input_specs=specs)
    assert specs == loaded.only_part.inputs
    assert loaded.only_part.example is None


def test_script_batch_size_beside_input_specs_is_reported(folder: Path) -> None:
    """What the manifest overrules is said."""
    specs = (InputTensorSpec(name="ids", shape=(2, 3), dtype="int64", value_range=(0, 9)),)
    loaded = _load(folder, "", input_specs=specs, batch_size=4)
    assert "--input-specs decides the inputs; --batch-size not used" in loaded.notes


def test_script_factory_may_be_a_class_an_instance_or_nested(folder: Path) -> None:
    """Whatever gives a module when called, or is one."""
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


def test_script_in_a_package_is_found_from_the_working_directory(folder: Path) -> None:
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
        ("", "mkae", ModelPathError, "Did you mean 'make'?"),
        ("size = 3", "size", ModelPathError, "'size' is a int, not a function"),
        ("", "make", UsageError, "nothing says what inputs Net takes"),
        ("def bad():\n    raise ValueError('too small')", "bad", InputError, "net.py:15: ValueError: too small"),
        ("def bad():\n    import sys\n    sys.exit(3)", "bad", InputError, "net.py:16: SystemExit: 3"),
        ("def bad(size):\n    pass", "bad", InputError, "TypeError: bad() missing 1 required"),
        ("def bad():\n    return torch.nn.Linear(-1, 2, 3, 4, 5, 6)", "bad", InputError, "net.py:15: TypeError"),
        ("import a_module_nobody_has", "make", InputError, "net.py:14: ModuleNotFoundError"),
        ("def bad(:", "bad", InputError, "net.py:14: SyntaxError"),
        ("def bad():\n    return 3", "bad", InputError, "returned int, expected a torch.nn.Module"),
        ("def example_inputs():\n    return {'ids': 3}", "make", InputError, "gave int for 'ids'"),
        ("def example_inputs():\n    return ()", "make", InputError, "gave no inputs"),
        ("def example_inputs():\n    return [torch.ones(1)] * 3", "make", InputError, "3 values"),
        ("def example_inputs():\n    return {'idx': torch.ones(1)}", "make", UsageError, "no input 'idx'"),
        ("def example_inputs():\n    return {'scale': torch.ones(1)}", "make", UsageError, "needs ids"),
        ("def example_inputs():\n    return torch.ones(0)", "make", UsageError, "cannot be an input"),
        ("def example_inputs():\n    return torch.ones(1, dtype=torch.complex64)", "make", UsageError, "unknown dtype"),
    ],
)  # fmt: skip
def test_script_mistake_is_one_error_with_its_place(
    folder: Path, text: str, factory: str, error: type[WinMLError], words: str
) -> None:
    """The user's mistakes name file and line, ours are none."""
    with pytest.raises(error) as caught:
        _load(folder, text, factory)
    assert words in str(caught.value)
    assert caught.value.hint


def test_script_missing_module_is_a_wrong_name(folder: Path) -> None:
    """No module of that name is exit code 2; a module whose own import fails is exit code 1."""
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


def test_script_compiled_model_is_the_one_it_was_compiled_from(folder: Path) -> None:
    """Its forward says what the inputs are called; the wrapper's does not."""
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
        ("torch.nn.Sequential(torch.nn.LazyLinear(2))", "'0.weight' is not initialized"),
        ('torch.nn.Linear(2, 2, device="meta")', "'weight' is on the meta device"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_script_model_without_values_is_refused_by_parameter(folder: Path, made: str, words: str) -> None:
    """There is nothing to export; what to do is told."""
    text = f"""
def empty():
    return {made}

def example_inputs():
    return torch.zeros(1, 2)
"""
    with pytest.raises(InputError, match=words) as caught:
        _load(folder, MODULE + text, "empty")
    assert caught.value.hint
