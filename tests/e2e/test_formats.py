"""Files and JSON records, compared with every row of ``docs/reference/formats.md`` and ``tags.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from architecture.sources import REPOSITORY
from e2e.in_process import run_here
from encoder_decoder import save_encoder_decoder
from winml.modelkit.ort.kernel_memory import RECORDING_VERSION
from winml.modelkit.ort.sessions import is_onnxruntime_at_least

pytestmark = pytest.mark.skipif(not (REPOSITORY / "docs").is_dir(), reason="an installed package has no documents")

_SPAN = re.compile(r"`([^`]+)`")


def _tables(heading: str, page: str = "formats") -> list[dict[str, str]]:
    """Return the tables of a section, each as first cell → second cell of its rows."""
    text = (REPOSITORY / f"docs/reference/{page}.md").read_text(encoding="utf-8")
    section = text.partition(f"\n{heading}\n")[2]
    section = re.split(r"\n##? ", section)[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [dict(_cells(line) for line in block.splitlines()[2:]) for block in blocks]


def _cells(line: str) -> tuple[str, str]:
    first, second = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:3]]
    return first, second


def _keys(table: dict[str, str]) -> set[str]:
    return {key for cell in table for key in _SPAN.findall(cell)}


def _done(*arguments: str | Path) -> Any:
    done = run_here(*arguments, "-f", "json")
    assert 0 == done.code, done.err
    return json.loads(done.out)


def _metadata(properties: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in properties}


@pytest.fixture(scope="module")
def folder(bert_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with files of every kind, which is the current one during the tests."""
    folder = tmp_path_factory.mktemp("folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WINML_CACHE", str(folder / "cache"))
        save_encoder_decoder(folder / "t5", "t5")
        quick = ("--no-verify", "--shape-config", '{"sequence_length": 16}')
        _done("export", "-m", bert_tiny, "-o", "model.onnx", *quick)
        _done("export", "-m", bert_tiny, "-o", "dynamo.onnx", "--dynamo", *quick)
        _done("export", "-m", bert_tiny, "-o", "functions.onnx", "--functions", "classes", *quick)
        _done("build", "-m", "t5", "-o", "built", "--no-verify")
        _done("optimize", "-m", "model.onnx", "-o", "full.onnx", "--level", "full")
        _done("quantize", "-m", "full.onnx", "-o", "int8.onnx", "--no-verify")
        _done("compile", "-m", "model.onnx", "-o", "cpu.onnx", "--ep", "cpu")
        _done("extract", "-m", "model.onnx", "--module", "BertPooler", "-o", "parts")
        yield folder


FILES = ("model", "dynamo", "functions", "built/decoder", "full", "int8", "cpu", "parts/pooler")


def _graphs(folder: Path) -> list[onnx.ModelProto]:
    found = [path for path in folder.rglob("*.onnx") if "cache" not in path.parts]
    assert len(found) >= len(FILES)
    return [onnx.load(path, load_external_data=False) for path in found]


def test_tag_rows_equal_the_tags_of_an_export(folder: Path) -> None:
    """Each example of the mapping is a node of its model."""
    (table,) = _tables("## Tags (HTP)", "tags")
    nodes = {
        node.name: _metadata(node.metadata_props)["winml.hierarchy.tag"]
        for node in onnx.load(folder / "model.onnx").graph.node
    }
    told = {name.strip("`"): tag.strip("`") for name, tag in table.items()}
    assert told == {name: nodes.get(name) for name in told}


def test_rows_of_metadata_are_the_keys_of_files(folder: Path) -> None:
    """Every written key of nodes and models is documented, and some verb writes every documented key."""
    models = _graphs(folder)
    (of_nodes,) = _tables("## Node metadata (`node.metadata_props`, keys unique)", "tags")
    # In files of onnxscript's builder: tests/unit/onnx/test_module_tree.py.
    assert _keys(of_nodes) - {"pkg.onnxscript.name_scopes", "pkg.onnxscript.class_hierarchy"} == {
        key for model in models for node in model.graph.node for key in _metadata(node.metadata_props)
    }
    of_models = _tables("## Model metadata (`model.metadata_props`)")[0]
    # Of models with adapters that are switched, with bounds, or compiled for a device: integration/test_adapters.py,
    # test_bounds_of_sizes.py, test_compilers.py.
    written = {key for model in models for key in _metadata(model.metadata_props)}
    assert _keys(of_models) - {"winml.adapters", "winml.io.dimensions", "winml.compile.trace"} == written


def test_rows_of_a_cache_are_the_names_of_inputs(folder: Path) -> None:
    """The table lists the kinds in the file's metadata."""
    table = _tables("### A cache")[0]
    model = onnx.load(folder / "built" / "decoder.onnx", load_external_data=False)
    inputs = json.loads(_metadata(model.metadata_props)["winml.io.inputs"])
    kinds = {entry["cache"]["kind"] for entry in inputs if "cache" in entry}
    assert {"key", "value"} == kinds <= _keys(table)
    first = next(entry for entry in inputs if "cache" in entry)
    assert {"layer", "kind", "side"} == set(first["cache"])
    assert re.fullmatch(r"past_key_values\.\d+\.(decoder|encoder)\.(key|value)", first["name"])


def test_rows_of_the_sidecar_are_its_keys(folder: Path) -> None:
    """The keys are those of the table and of the text after it."""
    (table,) = _tables("## Sidecar `<stem>_htp_metadata.json`")
    sidecar = json.loads((folder / "built" / "decoder_htp_metadata.json").read_text(encoding="utf-8"))
    text = (REPOSITORY / "docs/reference/formats.md").read_text(encoding="utf-8")
    behind = text.partition("\nThen `export_context`")[2].partition("A JSON Schema")[0]
    named = {"export_context", *re.findall(r"[·)]\s`(\w+)` \(", behind), *re.findall(r"·\n`(\w+)` \(", behind)}
    assert set(sidecar) == _keys(table) | named


def test_rows_of_a_manifest_are_its_keys(folder: Path) -> None:
    """The tables are those of the build, of a part, and of a stage."""
    build, part, stage = map(_keys, _tables("## Manifest of a build `build_manifest.json`"))
    manifest = json.loads((folder / "built" / "build_manifest.json").read_text(encoding="utf-8"))
    assert {"manifest_version", *build} == set(manifest)
    assert part == {key for item in manifest["parts"] for key in item}
    assert {"name", *stage} == {key for item in manifest["parts"] for run in item["stages"] for key in run}


def test_rows_of_results_are_their_keys(folder: Path) -> None:
    """The verbs are those that finish in a second or two."""
    perf, by_module, memory, of_modules = _tables("## JSON of `winml perf`")
    timed = ("perf", "model.onnx", "--iterations", "3")
    assert _keys(perf) == set(_done(*timed, "--baseline", "full.onnx"))
    # Of a provider that compiles: integration/test_compilers.py.
    assert _keys(by_module) - {"placement"} == set(_done(*timed, "--by-module")["by_module"])
    if is_onnxruntime_at_least(RECORDING_VERSION):
        assert _keys(memory) == set(_done(*timed, "--by-module", "--memory")["by_module"]["memory"])
    measured = _done(*timed, "--module", "BertPooler")
    assert {"schema_version", "benchmark_info", *_keys(of_modules)} == set(measured)
    (quantized,) = _tables("## JSON of `winml quantize`")
    # The record has a budget only on request: tests/e2e/test_bits_by_data_command.py.
    assert _keys(quantized) - {"budget"} == set(
        _done("quantize", "-m", "model.onnx", "-o", "again.onnx", "--no-verify")
    )
    (compared,) = _tables("## JSON of `winml compare`")
    assert _keys(compared) - {"parts", "device", "simulates", "fingerprint", "digests", "tolerance"} == set(
        _done("compare", "model.onnx", "full.onnx")
    )
    (answer,) = _tables("## JSON of `winml run`")
    tokens = [f"--input={name}={[[1] * 16]}" for name in ("input_ids", "attention_mask", "token_type_ids")]
    assert _keys(answer) - {"simulated_on"} == set(_done("run", "model.onnx", *tokens))
    (extracted,) = _tables("## Manifest of `winml extract`")
    assert _keys(extracted) == set(json.loads((folder / "parts" / "extract_manifest.json").read_text(encoding="utf-8")))


@pytest.mark.usefixtures("folder")
def test_rows_of_a_plan_are_its_keys() -> None:
    """The verbs are those with ``--dry-run``."""
    (table,) = _tables("## JSON of `--dry-run`")
    keys = {next(iter(_SPAN.findall(cell))) for cell in table}
    for arguments in (
        ("optimize", "-m", "model.onnx", "-o", "planned.onnx"),
        ("retag", "model.onnx", "full.onnx", "-o", "planned.onnx"),
        ("extract", "model.onnx", "--module", "BertPooler", "-o", "planned"),
    ):
        plan = _done(*arguments, "--dry-run")
        assert keys == plan.keys()
        assert {"path", "replaces", "only_if"} == {key for file in plan["writes"] for key in file}
        assert {"name", "does"} == {key for step in plan["steps"] for key in step}
