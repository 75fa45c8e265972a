"""Failed exports of unusable models: the reason in the message, and no file left."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.workplace import Workplace


class _Opens:
    """A pickle that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _cut_in_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def _misdescribe(folder: Path) -> None:
    """Declare a tensor with another size than its bytes."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [3, 3], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def _resize(folder: Path) -> None:
    _change_config(folder, hidden_size=64)


def _put_code_in(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _Opens(folder.parent / "marker")}, folder / "pytorch_model.bin")


def _put_nonsense_in(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"this is no pickle")


def _misname_type(folder: Path) -> None:
    _change_config(folder, model_type="bertt", architectures=["BerttModel"])


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "bert",\n  "hidden_size": }', encoding="utf-8")


def _bring_code(folder: Path) -> None:
    _change_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"})
    marker = folder.parent / "marker"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "truncated weights": (_cut, ("model.safetensors", "truncated", "ends at byte", "checkpoint again")),
    "weights cut in their header": (_cut_in_header, ("model.safetensors", "100 bytes cannot hold its header")),
    "a tensor of another size than its bytes": (_misdescribe, ("'weight'", "[3, 3]", "8 bytes")),
    "weights of another shape": (
        _resize,
        ("model.safetensors", "[128]", "[64]", "checkpoint again"),
    ),
    "a pickle with code in it": (_put_code_in, ("pytorch_model.bin", "io.open", "not unpickled", "safetensors")),
    "a pickle that is none": (_put_nonsense_in, ("pytorch_model.bin", "not unpickled", "checkpoint again")),
    "an unknown model type": (_misname_type, ("config.json", "model_type 'bertt'", "Did you mean 'bert'?")),
    "a malformed config": (_break_config, ("config.json", "line 2, column 18", "Correct the config")),
    "code of its own": (_bring_code, ("own.Model", "was not run", "--trust-remote-code")),
}


@pytest.mark.parametrize(("damage", "words"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_damaged_checkpoint_is_refused_without_running_code(
    workplace: Workplace, checkpoint: Path, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    """The message names the file and its damage; code in the checkpoint has not run."""
    damage(checkpoint)
    workplace.refuse("-m", checkpoint, "-o", "model.onnx", code=1, words=(str(checkpoint), *words))
    assert not (checkpoint.parent / "marker").exists()


REQUESTS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "a task the architecture lacks": (
        ("--task", "image-classification"), 2, ("image-classification", "bert", "fill-mask", "feature-extraction"),
    ),
    "a task the weights lack": (("--task", "fill-mask"), 1, ("BertForMaskedLM", "random", "BertModel")),
    "more positions than the model has": (
        ("--shape-config", '{"sequence_length": 600}'), 2, ("sequence_length 600", "512 positions"),
    ),
    "a shape the model refuses": (
        ("--input-specs", '[{"name": "input_ids", "shape": [1, 600], "dtype": "int64", "value_range": [0, 9]}]'), 1,
        ("step 3 of 8", "input_ids int64[1, 600]", "module embeddings", "--input-specs"),
    ),
    "an input the model does not take": (
        ("--input-specs", '[{"name": "pixels", "shape": [1, 6], "dtype": "int64"}]'), 2, ("'pixels'", "input_ids"),
    ),
    "a torch.nn class that does not run": (("--torch-module", "Liner"), 2, ("'Liner'", "did you mean 'Linear'?")),
}  # fmt: skip


@pytest.mark.parametrize(("options", "code", "words"), REQUESTS.values(), ids=REQUESTS)
def test_request_the_model_cannot_meet_is_refused(
    workplace: Workplace, bert_tiny: Path, options: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    """The message has the words of the request."""
    workplace.refuse("-m", bert_tiny, "-o", "model.onnx", *options, code=code, words=words)


FACTORIES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "an operator the exporter lacks": (
        "singular", 1,
        ("step 4 of 8", "neither exporter", "aten::linalg_svdvals", "module inner", "opset 17", "Replace the operator"),
    ),
    "control flow by value": ("deciding", 3, ("not equal", "'output'", "sample 2", ".item()", "--no-verify")),
    "noise": ("noise", 3, ("cannot verify", "'output'", "same inputs", "--no-verify")),
    "an output of NaN": ("not_a_number", 3, ("not checked", "NaN", "--no-verify")),
    "a factory that raises": ("broken", 1, ("nets.py:", "ValueError: the recipe is missing", "Correct the code")),
    "a factory of something else": ("number", 1, ("returned int", "torch.nn.Module")),
    "a factory that is not there": ("godo", 2, ("has no 'godo'", "Did you mean 'good'?")),
}  # fmt: skip


@pytest.mark.parametrize(("factory", "code", "words"), FACTORIES.values(), ids=FACTORIES)
def test_unexportable_factory_model_is_refused(
    workplace: Workplace, nets: Path, factory: str, code: int, words: tuple[str, ...]
) -> None:
    """The message names operator and module, the output, or the line of the user's code.

    Exit code 3 is a failed verification.
    """
    (workplace.folder / "model.onnx").write_bytes(b"earlier model")
    arguments = ("-m", f"{nets}:{factory}", "-o", "model.onnx", "--overwrite")
    workplace.refuse(*arguments, code=code, words=words)


def test_output_that_no_input_reaches_is_written_unchecked(workplace: Workplace, nets: Path) -> None:
    """Equal constants prove nothing about the graph, nor against it."""
    outcome = workplace.export("-m", f"{nets}:constant", "-o", "model.onnx")
    assert 0 == outcome.code, outcome.err
    assert "not checked: no output of the model depends on its inputs" in outcome.out


def test_operator_of_a_newer_opset_is_refused_with_the_opset(workplace: Workplace, tmp_path: Path) -> None:
    """The hint has the option for an opset with the operator, and the option works."""
    script = tmp_path / "image.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "class Warp(nn.Module):\n"
        "    def forward(self, image, grid):\n"
        "        return nn.functional.grid_sample(image, grid, align_corners=False)\n"
        "def build():\n    return Warp()\n"
        "def example_inputs():\n    return torch.randn(1, 2, 5, 5), torch.rand(1, 3, 3, 2)\n",
        encoding="utf-8",
    )
    arguments = ("-m", f"{script}:build", "-o", "model.onnx", "--no-dynamo", "--export-config")
    words = ("aten::grid_sampler", "opset 15", "--export-config '{\"opset_version\": 16}'")
    workplace.refuse(*arguments, '{"opset_version": 15}', code=1, words=words)
    outcome = workplace.export(*arguments, '{"opset_version": 16}')
    assert 0 == outcome.code, outcome.err


def test_value_that_the_trace_fixed_is_refused_or_declared(workplace: Workplace, tmp_path: Path) -> None:
    """The input, its value and the line are named; with the value declared, the file is written with a note."""
    script = tmp_path / "count.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "class Repeat(nn.Module):\n"
        "    def forward(self, x, n):\n"
        "        for _ in range(int(n)):\n            x = torch.tanh(x * 2)\n"
        "        return x\n"
        "def build():\n    return Repeat()\n"
        "def example_inputs():\n    return torch.randn(2, 4), torch.tensor(3)\n",
        encoding="utf-8",
    )
    arguments = ("-m", f"{script}:build", "-o", "model.onnx")
    words = ("fixed n to 3", "at 4", "count.py:5 reads the value", "value_range [3, 3] in --input-specs", "--no-verify")
    workplace.refuse(*arguments, code=3, words=words)
    specs = {"x": {"shape": [2, 4], "dtype": "float32"}, "n": {"shape": [], "dtype": "int64", "value_range": [3, 3]}}
    outcome = workplace.export(*arguments, "--input-specs", json.dumps(specs))
    assert 0 == outcome.code, outcome.err
    assert "n fixed to 3" in outcome.out
    assert "n is fixed to 3" in outcome.out


def test_unreachable_hub_is_reported_with_remedies(workplace: Workplace) -> None:
    """Offline, the error for an uncached id has both remedies."""
    workplace.refuse("-m", "nobody/no-model", "-o", "model.onnx", code=1, words=("nobody/no-model", "HF_HUB_OFFLINE"))


def test_debug_shows_the_traceback_a_failure_came_from(workplace: Workplace, nets: Path) -> None:
    """``--debug`` prints the traceback and its cause."""
    outcome = workplace.export("-m", f"{nets}:broken", "-o", "model.onnx", "--debug")
    assert 1 == outcome.code
    assert "Traceback" in outcome.err
    assert "ValueError: the recipe is missing" in outcome.err
    assert {} == workplace.files()
