"""``winml export`` of a checkpoint: its output, its files, and the effect of each option."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import onnx
import pytest

import winml.modelkit.export
from e2e.workplace import Outcome, Workplace

STEPS = (
    "model preparation",
    "input generation",
    "hierarchy building",
    "ONNX export",
    "node tagger creation",
    "node tagging",
    "tag injection",
    "metadata and reports",
)
FOREIGN_KEYS = ("winml.", "namespace", "pkg.torch.")


@pytest.fixture(scope="module")
def verbose_export(make_workplace: Callable[[], Workplace], bert_tiny: Path) -> tuple[Workplace, Outcome]:
    """A verbose export with a report, in a process of its own."""
    workplace = replace(make_workplace(), runs_here=False)
    return workplace, workplace.export("-m", bert_tiny, "-o", "model.onnx", "-v", "--with-report")


@pytest.fixture(scope="module")
def recorded(make_workplace: Callable[[], Workplace], bert_tiny: Path) -> tuple[Workplace, Outcome]:
    """An export with JSON output, a batch size and a chosen ``torch.nn`` class, in a process of its own."""
    workplace = replace(make_workplace(), runs_here=False)
    options = ("--format", "json", "--batch-size", "2", "--torch-module", "LayerNorm", "--shape-config")
    return workplace, workplace.export("-m", bert_tiny, "-o", "out/model.onnx", *options, '{"sequence_length": 24}')


def _keys(path: Path) -> set[str]:
    """Return the metadata keys of a file and its nodes."""
    model = onnx.load(path)
    holders = [model, model.graph, *model.graph.node, *model.graph.value_info, *model.functions]
    return {entry.key for holder in holders for entry in holder.metadata_props}


def test_export_shows_eight_steps_with_their_times(verbose_export: tuple[Workplace, Outcome]) -> None:
    """Each step is one line on stderr: number, name, seconds and summary."""
    lines = verbose_export[1].err.splitlines()
    assert 0 == verbose_export[1].code
    assert len(lines) == len(STEPS)
    for number, (line, step) in enumerate(zip(lines, STEPS, strict=True), start=1):
        assert re.match(rf"\[{number}/8\] {step} +\d+\.\d\d s  \S", line), line


def test_verbose_export_prints_the_tree_with_node_counts(verbose_export: tuple[Workplace, Outcome]) -> None:
    """The tree of a bert-tiny has 18 modules, with own nodes that add up to the nodes of the file; all are tagged."""
    workplace, outcome = verbose_export
    tree, _, summary = outcome.out.partition("\n\n")
    counts = re.findall(r" · (\d+) nodes?(?: \((\d+) own\))?(?: ·|$)", tree, re.MULTILINE)
    graph = onnx.load(workplace.folder / "model.onnx").graph
    nodes = len(graph.node)
    assert 18 == len(tree.splitlines()) == len(counts)
    assert nodes == sum(int(own or total) for total, own in counts)
    assert nodes == int(counts[0][0])
    tags = [entry.value for node in graph.node for entry in node.metadata_props if entry.key == "winml.hierarchy.tag"]
    inside = tags.count("/BertModel/BertEncoder/BertLayer.0/BertAttention/BertSelfAttention")
    assert inside in (23, 24)  # newer releases of transformers reshape once more
    attention = f"BertSelfAttention encoder.layer.0.attention.self · {inside} nodes · 49.5 k parameters"
    assert f"│   │   │   ├── {attention}" in tree
    assert (
        f"18 modules (48 registered, with torch.nn layers) · {nodes} of {nodes} nodes tagged (100 %), 6 at the root"
        in summary
    )
    assert "architecture BertModel" in summary
    assert "equals PyTorch" in summary


def test_export_writes_only_the_listed_files(verbose_export: tuple[Workplace, Outcome]) -> None:
    """Model, sidecar and report are written, and nothing else in the current directory or the temporary folder."""
    workplace, outcome = verbose_export
    written = {"model.onnx", "model_htp_metadata.json", "model_htp_export_report.md"}
    assert {*written, "config.json"} == set(workplace.files())
    assert "beside it  config.json (" in outcome.out
    assert written == set(re.findall(r"^wrote +(\S+) \(", outcome.out, re.MULTILINE))
    assert [] == list((workplace.root / "temporary").iterdir())
    onnx.checker.check_model(workplace.folder / "model.onnx", full_check=True)


def test_export_sends_no_telemetry(verbose_export: tuple[Workplace, Outcome]) -> None:
    """ONNX Runtime's telemetry is off: the user's home has no device id and no queue of events."""
    assert [] == [path for path in (verbose_export[0].root / "home").rglob("*") if "onnxruntime" in path.name.lower()]


def test_export_writes_a_valid_sidecar_and_report(verbose_export: tuple[Workplace, Outcome]) -> None:
    """The sidecar fits the shipped schema, and both files name every node of the model."""
    folder = verbose_export[0].folder
    record = json.loads((folder / "model_htp_metadata.json").read_text(encoding="utf-8"))
    schema = Path(winml.modelkit.export.__file__).with_name("htp_metadata.schema.json")
    jsonschema.validate(record, json.loads(schema.read_text(encoding="utf-8")))
    names = [node.name for node in onnx.load(folder / "model.onnx").graph.node]
    report = (folder / "model_htp_export_report.md").read_text(encoding="utf-8")
    assert sorted(names) == sorted(record["nodes"])
    assert [] == [name for name in names if name not in report]
    assert [] == [step for step in STEPS if step not in report]


def test_json_format_prints_one_object_only(recorded: tuple[Workplace, Outcome]) -> None:
    """Stdout is one JSON object; progress is on stderr."""
    workplace, outcome = recorded
    record = json.loads(outcome.out)
    assert 0 == outcome.code
    assert set(workplace.files()) == {"out", "out/model.onnx", "out/model_htp_metadata.json", "out/config.json"}
    assert [Path("out/model.onnx"), Path("out/model_htp_metadata.json")] == [
        Path(file["path"]) for file in record["files"]
    ]
    assert len(STEPS) == len(record["steps"]) == len(outcome.err.splitlines())
    assert record["verification"]["is_verified"] is True


def test_requested_sizes_are_the_shapes_of_the_graph(recorded: tuple[Workplace, Outcome]) -> None:
    """``--batch-size`` and ``--shape-config`` apply to every input and output."""
    graph = onnx.load(recorded[0].folder / "out" / "model.onnx").graph
    shapes = {
        value.name: [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    inputs = {name: [2, 24] for name in ("input_ids", "attention_mask", "token_type_ids")}
    assert shapes == {**inputs, "last_hidden_state": [2, 24, 128], "pooler_output": [2, 128]}


def test_requested_torch_class_has_separate_tags(recorded: tuple[Workplace, Outcome]) -> None:
    """``--torch-module LayerNorm`` makes each LayerNorm a module of the hierarchy."""
    graph = onnx.load(recorded[0].folder / "out" / "model.onnx").graph
    tags = {entry.value for node in graph.node for entry in node.metadata_props if entry.key == "winml.hierarchy.tag"}
    assert "/BertModel/BertEmbeddings/LayerNorm" in tags
    assert "/BertModel/BertEncoder/BertLayer.1/BertOutput/LayerNorm" in tags


@pytest.mark.parametrize("option", ["--no-hierarchy", "--clean-onnx"])
def test_export_without_hierarchy_writes_no_hierarchy_keys(workplace: Workplace, bert_tiny: Path, option: str) -> None:
    """Neither the model nor its nodes have a key of ours or of torch, no sidecar is written, and stderr is empty."""
    outcome = workplace.export(
        "-m", bert_tiny, "-o", "model.onnx", option, "-q", "--keep-torch-metadata", "--no-tokenizer"
    )
    assert (0, "", "") == (outcome.code, outcome.out, outcome.err)
    assert ["model.onnx"] == list(workplace.files())
    assert set() == {key for key in _keys(workplace.folder / "model.onnx") if key.startswith(FOREIGN_KEYS)}


def test_foreign_companion_is_reported_with_quiet(workplace: Workplace, bert_tiny: Path) -> None:
    """A config of an earlier export is removed with it, so that no wrong config stays beside a model."""
    request = ("-m", bert_tiny, "-o", "out/model.onnx", "--no-verify", "-q")
    assert 0 == workplace.export(*request).code
    assert "out/config.json" in workplace.files()
    assert 0 == workplace.export(*request, "--overwrite", "--no-tokenizer").code
    config = workplace.folder / "out" / "config.json"
    assert not config.exists()
    config.write_text("{}", encoding="utf-8")
    outcome = workplace.export(*request, "--overwrite", "--no-hierarchy")
    assert (0, "{}") == (outcome.code, config.read_text(encoding="utf-8"))
    assert "config.json" in outcome.err


def test_companion_changed_by_the_user_is_not_replaced(workplace: Workplace, bert_tiny: Path) -> None:
    """``--overwrite`` applies to files of an export only."""
    request = ("-m", bert_tiny, "-o", "model.onnx", "--no-verify", "-q")
    assert 0 == workplace.export(*request).code
    (workplace.folder / "config.json").write_text("{}", encoding="utf-8")
    outcome = workplace.export(*request, "--overwrite")
    assert (0, "{}") == (outcome.code, (workplace.folder / "config.json").read_text(encoding="utf-8"))
    assert "config.json" in outcome.err


@pytest.mark.parametrize("form", [(), ("-q",), ("-f", "json")])
def test_foreign_companion_is_reported_once(workplace: Workplace, bert_tiny: Path, form: tuple[str, ...]) -> None:
    """The message is a row of the table, or a line on stderr without a table."""
    (workplace.folder / "config.json").write_text("{}", encoding="utf-8")
    outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", "--no-verify", *form)
    words = outcome.err if form else outcome.out + outcome.err
    assert (0, 1) == (outcome.code, words.count("Existing files were not replaced"))


def test_config_alone_becomes_a_model_of_seeded_weights(workplace: Workplace, bert_tiny: Path) -> None:
    """A seed gives the same file each time with ``--random-weights``, and a note says that the weights are random."""
    request = ("-m", bert_tiny / "config.json", "--random-weights", "--seed", "7", "--no-verify", "--clean-onnx")
    first = workplace.export(*request, "-o", "first.onnx")
    again = workplace.export(*request, "-o", "again.onnx")
    files = workplace.files()
    assert [0, 0] == [first.code, again.code]
    assert files["first.onnx"] == files["again.onnx"]
    assert "are random" in again.out
    assert "skipped:" in again.out
    assert "(--no-hierarchy)" in again.out
    assert "warning: --clean-onnx is deprecated; use --no-hierarchy" == again.complaint[0]


def test_torch_metadata_is_written_on_request_only(
    workplace: Workplace, bert_tiny: Path, verbose_export: tuple[Workplace, Outcome]
) -> None:
    """Source lines are local paths, so that the file has them with ``--keep-torch-metadata`` only."""
    options = ("--keep-torch-metadata", "--operation-fallback", "--export-config", '{"opset_version": 18}')
    outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", *options)
    path = workplace.folder / "model.onnx"
    assert 0 == outcome.code, outcome.err
    assert "pkg.torch.onnx.stack_trace" in _keys(path)
    assert "pkg.torch.onnx.stack_trace" not in _keys(verbose_export[0].folder / "model.onnx")
    assert [18] == [entry.version for entry in onnx.load(path).opset_import if entry.domain == ""]
    assert "torchscript, opset 18" in outcome.out


def test_input_specs_override_sizes_with_a_note(workplace: Workplace, bert_tiny: Path) -> None:
    """The specs define all inputs; a note names the overruled option."""
    specs = workplace.root / "specs.json"
    entry = {"name": "input_ids", "shape": [1, 9], "dtype": "int64", "value_range": [5, 60]}
    specs.write_text(json.dumps([entry]), encoding="utf-8")
    options = ("--input-specs", specs, "--shape-config", '{"sequence_length": 24}')
    outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", *options)
    assert 0 == outcome.code, outcome.err
    assert "input_ids int64[1, 9], attention_mask int64[1, 9], token_type_ids int64[1, 9]" in outcome.out
    assert re.search("^note .*--input-specs.*--shape-config", outcome.out, re.MULTILINE)


def test_described_input_takes_type_and_range_of_the_model(workplace: Workplace, bert_tiny: Path, nets: Path) -> None:
    """Inputs that are not described stay, at the sizes they share with the described one."""
    specs = '{"attention_mask": {"shape": [2, "tokens"]}}'
    outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", "--input-specs", specs)
    assert 0 == outcome.code, outcome.err
    inputs = {item.name: item.type.tensor_type for item in onnx.load(workplace.folder / "model.onnx").graph.input}
    assert ["input_ids", "attention_mask", "token_type_ids"] == [*inputs]
    for tensor in inputs.values():
        assert onnx.TensorProto.INT64 == tensor.elem_type
        assert (2, "tokens") == (tensor.shape.dim[0].dim_value, tensor.shape.dim[1].dim_param)
    workplace.refuse(
        "-m", f"{nets}:good", "-o", "net.onnx", "--input-specs", '{"other": {"shape": [1]}}',
        code=2, words=("--input-specs", "other:", "dtype"),
    )  # fmt: skip


def test_inputs_of_a_config_are_all_inputs(workplace: Workplace, bert_tiny: Path) -> None:
    """A complete list leaves an optional input out."""
    entries = [{"name": "input_ids", "shape": [1, 9], "dtype": "int64", "value_range": [5, 60]}]
    options = ("--export-config", json.dumps({"input_tensors": entries}))
    outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", *options)
    assert 0 == outcome.code, outcome.err
    assert ["input_ids"] == [item.name for item in onnx.load(workplace.folder / "model.onnx").graph.input]


def test_overwrite_replaces_the_files_of_an_earlier_export(workplace: Workplace, nets: Path) -> None:
    """A data file of the earlier model is replaced only if that model named it."""
    for name in ("net.onnx", "net.onnx.data", "net_htp_metadata.json"):
        (workplace.folder / name).write_bytes(b"earlier")
    outcome = workplace.export("-m", f"{nets}:good", "-o", "net.onnx", "--overwrite")
    assert 0 == outcome.code, outcome.err
    assert {"net.onnx", "net.onnx.data", "net_htp_metadata.json"} == set(workplace.files())
    onnx.checker.check_model(workplace.folder / "net.onnx", full_check=True)


def test_requested_dynamo_export_prints_no_library_output(workplace: Workplace, bert_tiny: Path) -> None:
    """The summary names dynamo, stderr has the eight steps alone, and the tags are those of TorchScript."""
    tags = {}
    for flag in ("--dynamo", "--no-dynamo"):
        outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", "--overwrite", flag)
        assert 0 == outcome.code, outcome.err
        assert all(line.startswith("[") for line in outcome.err.splitlines())
        assert 8 == len(outcome.err.splitlines())
        assert ("exporter   dynamo, opset 18 (asked for)" in outcome.out) == (flag == "--dynamo")
        sidecar = json.loads((workplace.folder / "model_htp_metadata.json").read_text(encoding="utf-8"))
        tags[flag] = set(sidecar["nodes"].values())
        # Torch's compiler makes a folder there when it is imported.
        assert [] == list((workplace.root / "temporary").iterdir())
    assert tags["--dynamo"] == tags["--no-dynamo"]
