"""Inspection of a model: facts of a future export, from every kind of source, without reading weights."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from checkpoints import CONFIGS, save_checkpoint
from winml.modelkit.errors import CheckpointError, UsageError
from winml.modelkit.inspect import model_inspection
from winml.modelkit.inspect.model_inspection import inspect_checkpoint, list_tasks
from winml.modelkit.inspect.records import InspectedModel
from winml.modelkit.inspect.table import model_inspection_document
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.report.terminal import console_for, print_document

pytestmark = pytest.mark.usefixtures("libraries_may_warn")

SCRIPT = """
import torch
class Scale(torch.nn.Module):
    def forward(self, rows):
        return rows * 2
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Scale(), Scale()])
        self.spare = Scale()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows)
        return self.linear(rows)
def build():
    return Net()
def example_inputs():
    return {"rows": torch.ones(3, 4)}
"""


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A small checkpoint folder."""
    return save_checkpoint("bert", tmp_path / "bert")


def printed(record: InspectedModel, *, verbose: bool = False) -> str:
    """Return the text for a terminal."""
    stream = io.StringIO()
    print_document(model_inspection_document(record), console_for(stream), verbose=verbose)
    return stream.getvalue()


def test_inspect_folder_describes_the_export(bert: Path) -> None:
    """The record has the task with its rule, classes, inputs, outputs, parameters and weight files."""
    seen = inspect_checkpoint(ModelRequest(str(bert)))
    assert ("feature-extraction", "from the architecture BertModel in the config") == (
        seen.info.task,
        seen.info.task_rule,
    )
    assert "fill-mask" in seen.tasks
    assert "WinMLModelForFeatureExtraction" == seen.inference_class
    assert ["BertTokenizer"] == [item.class_name for item in seen.processors]
    assert [("input_ids", (0, 119)), ("attention_mask", (0, 1)), ("token_type_ids", (0, 1))] == [
        (spec.name, spec.value_range) for spec in seen.inputs
    ]
    assert seen.outputs is not None
    assert {"last_hidden_state": (1, 64, 32), "pooler_output": (1, 32)} == {
        spec.name: spec.shape for spec in seen.outputs
    }
    assert seen.weights is not None
    assert (bert / "model.safetensors").stat().st_size == seen.weights.size_bytes
    assert seen.parameter_count == seen.weights.stored[0].count
    assert seen.tree is None


def test_inspect_folder_without_weights_differs_in_the_weights_only(bert: Path) -> None:
    """The weight file is not read, so a missing one changes only the entry ``weights``."""
    whole = inspect_checkpoint(ModelRequest(str(bert)), hierarchy=True).as_record()
    (bert / "model.safetensors").unlink()
    without = inspect_checkpoint(ModelRequest(str(bert)), hierarchy=True).as_record()
    assert None is without.pop("weights")
    assert whole.pop("weights")["format"] == "safetensors"
    assert whole == without


def test_inspect_damaged_weights_are_a_note(bert: Path) -> None:
    """A damaged file does not stop an inspection."""
    (bert / "model.safetensors").write_bytes(b"\x00" * 4)
    seen = inspect_checkpoint(ModelRequest(str(bert)))
    assert None is seen.weights
    assert any("truncated" in note for note in seen.notes)


def test_inspect_config_file_and_processor_files(bert: Path) -> None:
    """A config.json is a source, and the files beside it name the processor classes."""
    (bert / "tokenizer_config.json").write_text('{"tokenizer_class": "SpecialTokenizer"}', encoding="utf-8")
    seen = inspect_checkpoint(ModelRequest(str(bert / "config.json")))
    assert [("SpecialTokenizer", "tokenizer_config.json")] == [
        (item.class_name, item.origin) for item in seen.processors
    ]


def test_inspect_model_type_needs_no_checkpoint() -> None:
    """The default config of a model type is a source."""
    seen = inspect_checkpoint(ModelRequest(""), model_type="distilbert")
    assert ("DistilBertModel", "type") == (seen.info.class_name, seen.info.source_kind)
    assert seen.parameter_count > 60_000_000


def test_inspect_unknown_model_type_names_the_nearest() -> None:
    """A typo gets a suggestion."""
    with pytest.raises(UsageError, match="--model-type brt: unknown") as caught:
        inspect_checkpoint(ModelRequest(""), model_type="brt")
    assert "bert" in caught.value.hint


def test_inspect_script_has_its_tree_and_unexecuted_modules(tmp_path: Path) -> None:
    """The module of a factory runs without values; containers are not listed as never run."""
    (tmp_path / "net.py").write_text(SCRIPT, encoding="utf-8")
    seen = inspect_checkpoint(ModelRequest(f"{tmp_path / 'net.py'}:build"), hierarchy=True)
    assert seen.tree is not None
    assert ["", "layers.0", "layers.1", "linear"] == [node.path for node in seen.tree]
    assert any("Linear" in note for note in seen.notes)
    assert ["spare"] == [module.path for module in seen.never_ran]
    text = printed(seen)
    assert "Scale spare" in text
    assert "20 parameters" in text


def test_inspect_hierarchy_beyond_the_limit_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A forward that needs values is not run on more random weights than fit into the limit."""
    content = {
        "model_type": "longformer", "architectures": ["LongformerModel"], "vocab_size": 50, "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "attention_window": 8,
        "max_position_embeddings": 66,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(model_inspection, "MOST_STAND_IN_BYTES", 1000)
    with pytest.raises(CheckpointError, match="without values") as caught:
        inspect_checkpoint(ModelRequest(str(tmp_path)), hierarchy=True)
    assert "without --hierarchy" in caught.value.hint
    assert None is inspect_checkpoint(ModelRequest(str(tmp_path))).outputs


def test_inspect_record_is_json_with_the_facts_of_the_table(bert: Path) -> None:
    """Table and JSON have the same facts."""
    seen = inspect_checkpoint(ModelRequest(str(bert)), hierarchy=True)
    record = json.loads(json.dumps(seen.as_record()))
    assert "model" == record["kind"]
    assert {"calls", "parent", "path", "tag", "class", "execution_order", "parameters"} == set(
        record["hierarchy"]["modules"][0]
    )
    text = printed(seen, verbose=True)
    for words in (
        "BertModel",
        "input_ids int64[1, 64], values 0 to 119",
        "last_hidden_state float32[1, 64, 32]",
        "opset 17",
    ):
        assert words in text


@pytest.mark.parametrize("architecture", ["bert", "vit", "wav2vec2"])
def test_list_tasks_needs_no_decision(architecture: str, tmp_path: Path) -> None:
    """The tasks of a checkpoint with an unknown class are listed without building a model."""
    folder = save_checkpoint(architecture, tmp_path)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**content, "architectures": ["NoSuchClass"]}), encoding="utf-8")
    tasks = list_tasks(ModelRequest(str(folder)))
    assert CONFIGS[architecture][0] in {name for classes in tasks.values() for name in classes}


def test_inspect_allocates_no_parameters() -> None:
    """No tensor with storage is made for the parameters."""
    seen = inspect_checkpoint(ModelRequest(""), model_type="llama", hierarchy=True)
    assert seen.tree is not None
    assert seen.parameter_bytes > 10 * 10**9
    assert torch.get_default_device() == torch.device("cpu")


CONDITION = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, rows):
        return torch.cond(rows.sum() > 0, self.first, self.second, (rows,))
def build():
    return Net()
def example_inputs():
    return {"rows": torch.ones(3, 4)}
"""


def test_inspect_takes_a_condition_as_the_export_does(tmp_path: Path) -> None:
    """A model with torch.cond has a tree."""
    script = tmp_path / "net.py"
    script.write_text(CONDITION)
    seen = inspect_checkpoint(ModelRequest(f"{script}:build"), hierarchy=True)
    assert seen.tree is not None
    assert seen.outputs is not None
    assert ("first", "second") == tuple(path for path in ("first", "second") if path not in seen.never_ran)
