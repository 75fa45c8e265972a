"""Export of TorchScript modules, exported programs and their files, module by module."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch._export.serde.serialize import sympy
from torch.export.pt2_archive import _package

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.errors import InputError, ModelPathError
from winml.modelkit.export.records import ExportedPart
from winml.modelkit.models.programs import _is_size, _without_code, load_program
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.module_tree import read_tree
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.tags.selector import ModuleAddress

# torch 2.15 warns of torch.jit.load as well, which is called by winml.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:`torch.jit.(save|freeze)` is deprecated:FutureWarning"
)

INPUTS = (torch.randn(2, 4),)


def net() -> nn.Module:
    """Build a small module."""
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()


class WithScriptedPart(nn.Module):
    """Calls a TorchScript module."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = torch.jit.script(net()), nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call both modules."""
        result: torch.Tensor = self.last(self.part(values))
        return result


def loaded(folder: Path) -> Any:
    """Save a TorchScript archive and return it loaded."""
    torch.jit.save(torch.jit.script(net()), folder / "net.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.15
        return torch.jit.load(folder / "net.pt")


PROGRAMS: dict[str, Callable[[Path], Any]] = {
    "scripted": lambda _folder: torch.jit.script(net()),
    "loaded": loaded,
    "traced": lambda _folder: torch.jit.trace(net(), INPUTS),
    "module with a scripted part": lambda _folder: WithScriptedPart(),
    "exported program": lambda _folder: torch.export.export(net(), INPUTS),
    "module of an exported program": lambda _folder: torch.export.export(net(), INPUTS).module(),
}
LAYERS = {"0": "Linear", "1": "GELU", "2": "Linear"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_exported_with_the_tags_of_its_modules(name: str, tmp_path: Path) -> None:
    """Every node has the module that the program was made from, and the outputs equal those of the program."""
    program = PROGRAMS[name](tmp_path)
    result = HTPExporter(WinMLExportConfig()).export(program, tmp_path / "model.onnx", INPUTS).only_part
    assert result.verification is not None
    assert result.verification.is_verified
    prefix = "part." if name == "module with a scripted part" else ""
    modules = {node.metadata_props["winml.hierarchy.module"] for node in ir.load(tmp_path / "model.onnx").graph}
    assert {f"{prefix}{path}" for path in LAYERS} <= modules
    assert "" not in modules


class Branches(nn.Module):
    """Has a branch on a size, a loop, a list and a submodule, which TorchScript keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale = 2.0

    def forward(self, values: torch.Tensor, is_scaled: bool = True) -> list[torch.Tensor]:
        """Return the outputs of all layers."""
        outputs = []
        for layer in self.layers:
            values = torch.nn.functional.relu(layer(values))
            if values.size(1) > 2 and is_scaled:
                values = values * self.scale
            outputs.append(values[:, : values.size(1) - 1])
        return outputs


def test_control_flow_of_a_script_is_run_in_python(tmp_path: Path) -> None:
    """Outputs equal those of the script at another batch, and each layer has its nodes."""
    program = torch.jit.script(Branches().eval())
    request = WinMLExportConfig(dynamic_axes={"values": {0: "rows"}})
    result = HTPExporter(request).export(program, tmp_path / "model.onnx", INPUTS).only_part
    assert result.verification is not None
    # As in a module of Python, the branch of a traced size is an assumption.
    assert ["size"] == [assumption.kind for assumption in result.verification.assumed]
    session = ort.InferenceSession(tmp_path / "model.onnx")
    values = torch.randn(5, 4)
    for expected, actual in zip(program(values), session.run(None, {"values": values.numpy()}), strict=True):
        torch.testing.assert_close(expected.detach(), torch.from_numpy(actual))
    assert {"layers.0", "layers.1"} <= {module.path for module in read_onnx_modules(tmp_path / "model.onnx")}


def test_script_of_a_layer_with_a_fused_kernel_is_exported(tmp_path: Path) -> None:
    """In evaluation mode the layer would call a kernel that has no ONNX form."""
    program = torch.jit.script(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    result = (
        HTPExporter(WinMLExportConfig()).export(program, tmp_path / "model.onnx", (torch.randn(1, 3, 8),)).only_part
    )
    assert result.verification is not None
    assert result.verification.is_verified


class SizeArithmetic(nn.Module):
    """Computes sizes and grows a list in place."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return three parts, each of half the rows and columns of the input."""
        half = (values.size(0) + 1) // 2
        parts = [values[:half].reshape(half, values.shape[1])]
        parts += [values.new_zeros([half, values.shape[1]]) + half, torch.tensor([2.0]) * parts[0]]
        parts.reverse()
        return torch.cat(parts, 1)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_sizes_of_a_script_stay_dynamic(exporter: Literal["torchscript", "dynamo"], tmp_path: Path) -> None:
    """Numbers computed from sizes are no constants of the trace."""
    program = torch.jit.script(SizeArithmetic().eval())
    request = WinMLExportConfig(dynamic_axes={"values": {0: "rows"}}, exporter=exporter)
    HTPExporter(request).export(program, tmp_path / "model.onnx", (torch.randn(6, 4),))
    session = ort.InferenceSession(tmp_path / "model.onnx")
    for rows in (4, 9):
        values = torch.randn(rows, 4)
        torch.testing.assert_close(program(values), torch.from_numpy(session.run(None, {"values": values.numpy()})[0]))


def read_onnx_modules(path: Path) -> Sequence[ModuleAddress]:
    """Read the module tree of a file."""
    model = onnx.load(path)
    return read_tree(model.graph.node, {entry.key: entry.value for entry in model.metadata_props}, "root").modules


def test_file_of_a_program_is_exported(tmp_path: Path) -> None:
    """A .pt2 file has its example inputs, a TorchScript archive needs --input-specs, and weights are refused."""
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(net(), INPUTS, dynamic_shapes=({0: rows},))
    torch.export.save(program, tmp_path / "net.pt2")
    exported = export_checkpoint_file(tmp_path / "net.pt2", tmp_path / "a.onnx")
    assert [(2, 4)] == [spec.shape for spec in exported.inputs]
    loaded(tmp_path)
    specs = (InputTensorSpec(name="input", shape=("rows", 4), dtype="float32"),)
    exported = export_checkpoint_file(tmp_path / "net.pt", tmp_path / "b.onnx", input_specs=specs)
    assert exported.verification is not None
    assert exported.verification.is_verified
    torch.save(net().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ModelPathError, match="weights file"):
        export_checkpoint_file(tmp_path / "weights.pt", tmp_path / "c.onnx")


def export_checkpoint_file(path: Path, output: Path, **fields: Any) -> ExportedPart:
    """Export a file as the command does."""
    return HTPExporter(WinMLExportConfig()).export_checkpoint(ModelRequest(str(path), **fields), output).only_part


def test_pickled_objects_in_an_archive_are_refused(tmp_path: Path) -> None:
    """No Python code of a file runs: a constant that is a pickled object is refused."""
    with _without_code(), pytest.raises(ValueError, match="pickled"):
        _package.pickle.loads(pickle.dumps(object))


def test_size_in_an_archive_is_not_evaluated_as_python(tmp_path: Path) -> None:
    """Sizes of a dynamic program are read, and one that calls Python is refused before it runs."""
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(nn.Flatten(0), (torch.randn(4, 3),), dynamic_shapes=({0: rows},))
    torch.export.save(program, tmp_path / "net.pt2")
    assert isinstance(load_program(tmp_path / "net.pt2", "net.pt2"), torch.export.ExportedProgram)
    call = f"open('{(tmp_path / 'ran').as_posix()}', 'w')"
    with zipfile.ZipFile(tmp_path / "net.pt2") as source, zipfile.ZipFile(tmp_path / "bad.pt2", "w") as target:
        for name in source.namelist():
            text = source.read(name).replace(b'"expr_str": "Symbol(', f'"expr_str": "{call} + Symbol('.encode())
            target.writestr(name, text)
    with pytest.raises(InputError, match="no size"):
        load_program(tmp_path / "bad.pt2", "bad.pt2")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", ["sympify('__import__')", "().__class__", "Symbol('a.b')", "[open for x in y]", "Symbol", "(lambda: 0)()"]
)
def test_only_calls_of_expressions_are_sizes(text: str) -> None:
    """Functions, attributes and texts that are no names are refused; a name alone is harmless."""
    assert (text == "Symbol") == _is_size(text, vars(sympy), sympy.Basic)


def test_module_left_in_training_mode_is_noted(tmp_path: Path) -> None:
    """The export evaluates the module; a model entirely in training mode is usual and is not noted."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)).eval()
    exporter = HTPExporter(WinMLExportConfig())
    assert not any("training" in note for note in exporter.export(model, tmp_path / "a.onnx", INPUTS).only_part.notes)
    model[1].train()
    notes = exporter.export(model, tmp_path / "b.onnx", INPUTS).only_part.notes
    assert ["1 is in training mode inside a model in evaluation mode: exported in evaluation mode."] == [
        note for note in notes if "training" in note
    ]
    assert model[1].training


class WithKeywords(nn.Module):
    """Takes a dictionary by position, and a list and a number by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, a: dict[str, torch.Tensor], b: list[torch.Tensor], d: int) -> torch.Tensor:
        """Combine them."""
        result: torch.Tensor = self.first(a["q"]) * d + b[0] - b[1]
        return result


def test_keyword_arguments_of_an_exported_program_are_inputs(tmp_path: Path) -> None:
    """As many tensors as arguments, so that the names of the tensors are not those of the arguments."""
    model = WithKeywords().eval()
    q, first, second = torch.randn(2, 4), torch.randn(2, 4), torch.randn(4)
    program = torch.export.export(model, ({"q": q},), {"b": [first, second], "d": 3})
    torch.export.save(program, tmp_path / "net.pt2")
    exported = export_checkpoint_file(tmp_path / "net.pt2", tmp_path / "a.onnx")
    assert [(2, 4), (2, 4), (4,)] == [spec.shape for spec in exported.inputs]
    feeds = {spec.name: value.numpy() for spec, value in zip(exported.inputs, (q, first, second), strict=True)}
    (actual,) = ort.InferenceSession(tmp_path / "a.onnx").run(None, feeds)
    torch.testing.assert_close(model({"q": q}, [first, second], 3).detach(), torch.from_numpy(actual))


ROWS = (InputTensorSpec(name="input", shape=(2, 4), dtype="float32"),)


def test_frozen_script_is_exported(tmp_path: Path) -> None:
    """A frozen module has no mode, no parameters and no submodules; saved and in memory."""
    program = torch.jit.freeze(torch.jit.script(net()))
    torch.jit.save(program, tmp_path / "net.pt")
    exported = export_checkpoint_file(tmp_path / "net.pt", tmp_path / "a.onnx", input_specs=ROWS)
    (actual,) = ort.InferenceSession(tmp_path / "a.onnx").run(None, {"input": INPUTS[0][:2].numpy()})
    torch.testing.assert_close(program(INPUTS[0]).detach(), torch.from_numpy(actual))
    assert not any("training" in note for note in exported.notes)
    live = HTPExporter(WinMLExportConfig()).export(program, tmp_path / "b.onnx", INPUTS).only_part
    assert live.verification is not None
    assert live.verification.is_verified


@pytest.mark.parametrize("is_training", [False, True])
def test_file_saved_in_training_mode_is_noted(is_training: bool, tmp_path: Path) -> None:
    """The export evaluates the module."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout()).train(is_training)
    torch.jit.save(torch.jit.script(model), tmp_path / "net.pt")
    exported = export_checkpoint_file(tmp_path / "net.pt", tmp_path / "a.onnx", input_specs=ROWS)
    assert is_training == any("was saved in training mode" in note for note in exported.notes)
