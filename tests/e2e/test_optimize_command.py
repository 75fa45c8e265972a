"""``winml optimize``: output, files and exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from e2e.workplace import Workplace


@pytest.fixture(scope="module")
def exported(make_workplace: Callable[[], Workplace], bert_tiny: Path) -> Path:
    """An export of bert-tiny."""
    workplace = make_workplace()
    outcome = workplace.export("-m", bert_tiny, "-o", "model.onnx", "-q")
    assert 0 == outcome.code, outcome.err
    return workplace.folder / "model.onnx"


@pytest.fixture
def model(exported: Path, workplace: Workplace) -> Path:
    """The export, in the current folder of the commands."""
    return Path(shutil.copyfile(exported, workplace.folder / "model.onnx"))


@pytest.mark.usefixtures("model")
def test_full_level_fuses_and_lists_fusions_by_module(workplace: Workplace) -> None:
    """GELUs, attentions and normalizations become one operator each; every node keeps its module; the file is valid."""
    outcome = workplace.winml("optimize", "-m", "model.onnx", "-o", "fast.onnx", "--level", "full", "--format", "json")
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    assert {"gelu_fusion": 2, "attention_fusion": 2, "skip_layer_norm_fusion": 5} == {
        name: record["fired"][name] for name in ("gelu_fusion", "attention_fusion", "skip_layer_norm_fusion")
    }
    assert record["fired"]["skip_layer_norm_fusion"] > 0
    assert record["after"]["nodes"] < record["before"]["nodes"]
    assert (100.0, True) == (record["coverage"]["percent"], record["verification"]["is_verified"])
    assert 0 == record["normalizations"]
    written = onnx.load(workplace.folder / "fast.onnx")
    onnx.checker.check_model(written)
    for node in written.graph.node:
        keys = [entry.key for entry in node.metadata_props]
        assert 1 == keys.count("winml.hierarchy.tag") == keys.count("winml.hierarchy.depth"), node.name
    assert ["fast.onnx", "model.onnx"] == sorted(workplace.files())


@pytest.mark.usefixtures("model")
def test_optimize_without_flags_copies_the_export_with_a_note(workplace: Workplace) -> None:
    """An export is normalized already."""
    outcome = workplace.winml("optimize", "-m", "model.onnx", "-o", "same.onnx")
    assert 0 == outcome.code, outcome.err
    assert "already normalized" in outcome.out
    model, same = (workplace.folder / name for name in ("model.onnx", "same.onnx"))
    assert model.read_bytes() == same.read_bytes()
    assert not model.samefile(same)


@pytest.mark.usefixtures("model")
def test_pair_of_flags_switches_one_capability(workplace: Workplace) -> None:
    """An enabled capability is the only one, a disabled one is the only one left out; a config has the same effect."""
    (workplace.folder / "optim.json").write_text('{"optim": {"gelu_fusion": true}}', encoding="utf-8")
    for name, arguments in {
        "only.onnx": ["--enable-gelu-fusion"],
        "config.onnx": ["-c", "optim.json"],
        "without.onnx": ["--level", "full", "--disable-gelu-fusion"],
    }.items():
        outcome = workplace.winml("optimize", "-m", "model.onnx", "-o", name, "-q", *arguments)
        assert (0, "", "") == (outcome.code, outcome.out, outcome.err)
    operators = {
        name: [node.op_type for node in onnx.load(workplace.folder / name).graph.node]
        for name in ("model.onnx", "only.onnx", "config.onnx", "without.onnx")
    }
    assert 2 == operators["only.onnx"].count("Gelu") == operators["config.onnx"].count("Gelu")
    assert operators["only.onnx"].count("LayerNormalization") == operators["model.onnx"].count("LayerNormalization")
    assert ("Erf" in operators["without.onnx"], "Gelu" in operators["without.onnx"]) == (True, False)


def test_capability_list_has_the_defaults_per_level(workplace: Workplace) -> None:
    """The table and the JSON come from one registry."""
    table = workplace.winml("optimize", "--list", "--level", "extended", "--ep", "qnn")
    assert 0 == table.code
    listed = json.loads(workplace.winml("optimize", "--list", "--level", "extended", "--format", "json").out)
    rows = {row["name"]: row for row in listed["capabilities"]}
    assert {"gelu_fusion", "attention_fusion", "bias_gelu_fusion"} <= set(rows)
    assert (True, False) == (rows["bias_gelu_fusion"]["enabled"], rows["attention_fusion"]["enabled"])
    assert all(name in table.out and row["does"] in table.out for name, row in rows.items())


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-o", "out.onnx", "--enable-glu-fusion"], 2, "--enable-gelu-fusion"),
        (["-o", "out.onnx", "--ep", "qmn"], 2, "'qnn'"),
        (["-o", "out.onnx", "--ep", "qnn", "--enable-attention-fusion"], 2, "cpu, cuda, dml"),
        (["-o", "out.onnx", "--ep", "qnn", "--enable-gelu-fusion"], 2, "--opset 20"),
        (["-o", "out.onnx", "--config", '{"optim": {"gelu_fuson": true}}'], 2, "'gelu_fusion'"),
        (["-o", "model.onnx", "--level", "full", "--overwrite"], 2, "input model.onnx"),
        (["-o", "out.txt", "--level", "full"], 2, "out.txt"),
        (["-o", "out.onnx", "--opset", "13"], 1, "opset 17 to 13"),
    ],
)
def test_wrong_request_is_refused_and_writes_nothing(
    workplace: Workplace, arguments: list[str], code: int, words: str
) -> None:
    """Exit code and message tell the error; no file appears."""
    before = workplace.files()
    outcome = workplace.winml("optimize", "-m", "model.onnx", *arguments)
    assert (code, "") == (outcome.code, outcome.out)
    assert words in outcome.err
    assert before == workplace.files()


@pytest.mark.usefixtures("model")
def test_fusion_for_an_npu_fires_at_the_opset_that_the_refusal_names(workplace: Workplace) -> None:
    """Every GELU becomes an operator of ONNX, none one of ONNX Runtime."""
    asked = ("-m", "model.onnx", "-o", "npu.onnx", "--ep", "qnn", "--enable-gelu-fusion", "--opset", "20")
    outcome = workplace.winml("optimize", *asked)
    assert 0 == outcome.code, outcome.err
    nodes = onnx.load(workplace.folder / "npu.onnx").graph.node
    assert 2 == sum(node.op_type == "Gelu" and not node.domain for node in nodes)


@pytest.mark.usefixtures("model")
def test_optimizing_imports_no_torch(workplace: Workplace) -> None:
    """A command on a file needs no model library."""
    program = (
        "import sys; from winml.modelkit import optimize_onnx;"
        "optimize_onnx('model.onnx', 'fast.onnx', level='full');"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=workplace.folder,
        env=workplace.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "[]\n" == done.stdout


@pytest.mark.usefixtures("model")
def test_functions_of_classes_are_written_and_read_back_byte_by_byte(workplace: Workplace) -> None:
    """Layers share a function; a reader of the file gets the original graph."""
    outcome = workplace.winml(
        "optimize", "-m", "model.onnx", "-o", "functions.onnx", "--functions", "classes", "--format", "json"
    )
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    functions = record["functions"]["functions"]
    assert (2, 2, 1) == (functions["BertLayer"], functions["GELUActivation"], functions["BertPooler"])
    assert (17, []) == (sum(functions.values()), record["functions"]["left_out"])
    assert record["functions"]["written_nodes"] < record["after"]["nodes"] == record["before"]["nodes"]
    assert (100.0, True) == (record["coverage"]["percent"], record["verification"]["is_verified"])
    written = onnx.load(workplace.folder / "functions.onnx")
    onnx.checker.check_model(written)
    assert len(functions) == len(written.functions)
    inspected = json.loads(workplace.winml("inspect", "functions.onnx", "-H", "--format", "json").out)
    assert (record["after"]["nodes"], len(functions)) == (inspected["nodes"], len(inspected["functions"]))
    assert inspected["nodes"] == inspected["modules"][0]["total"]["nodes"]
    assert 0 == workplace.winml("optimize", "-m", "functions.onnx", "-o", "flat.onnx").code
    assert (workplace.folder / "model.onnx").read_bytes() == (workplace.folder / "flat.onnx").read_bytes()
