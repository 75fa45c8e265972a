"""``winml quantize``: output, files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from e2e.in_process import run_here
from graphs import parse
from weighted_graphs import CONVOLUTION, PERCEPTRON
from winml.modelkit.tags.tagging import measure_coverage


@pytest.fixture
def model(here: Path) -> Path:
    """A tagged file in the current folder."""
    ir.save(parse(PERCEPTRON), here / "model.onnx")
    return here / "model.onnx"


@pytest.mark.usefixtures("here")
def test_quantized_export_is_accepted_by_all_readers(small_file: Path) -> None:
    """Every node keeps its module; summary, record and tree agree; the file can be timed and extracted by module."""
    outcome = run_here("quantize", "-m", small_file, "-o", "int8.onnx", "--exclude", "BertPooler", "--format", "json")
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    assert (100.0, True) == (record["coverage"]["percent"], record["verification"]["is_verified"])
    assert {"excluded by BertPooler": 1} == record["left"]
    written = onnx.load("int8.onnx")
    onnx.checker.check_model(written)
    kept = [node.op_type for node in written.graph.node if "pooler" in node.name]
    assert "MatMulInteger" not in kept

    tree = json.loads(run_here("inspect", "int8.onnx", "-H", "--format", "json").out)
    before = json.loads(run_here("inspect", small_file, "-H", "--format", "json").out)
    bits = {module["tag"]: module["bits"] for module in tree["modules"]}
    assert (32, True) == (bits["/BertModel/BertPooler"], 8 <= bits["/BertModel/BertEmbeddings"] < 9)
    assert tree["records"]["winml.quantization"]["modules"] == record["modules"]
    weights = {"float32", "int8", "uint8"}
    parameters = [
        sum(count["parameters"] for dtype, count in contents["initializers"]["by_dtype"].items() if dtype in weights)
        for contents in (before, tree)
    ]
    assert parameters[0] == parameters[1]

    sizes = ("--shape-config", '{"sequence": 8}', "--iterations", "2", "--warmup", "0")
    timed = run_here("perf", "int8.onnx", "--by-module", *sizes, "--format", "json")
    assert 0 == timed.code, timed.err
    assert 0 == json.loads(timed.out)["by_module"]["unattributed_ms"]
    cut = run_here("extract", "-m", "int8.onnx", "--module", "BertPooler", "-o", "cut", "-q", *sizes[:2])
    assert 0 == cut.code, cut.err


@pytest.mark.usefixtures("model")
def test_summary_lists_float_modules_first() -> None:
    """The summary has requested and actual precision by module with reasons, so that float32 is not taken for int8."""
    outcome = run_here("quantize", "-m", "model.onnx", "-o", "out.onnx", "--per-module", '{"Gemm": "fp32"}')
    assert 0 == outcome.code, outcome.err
    lines = outcome.out.splitlines()
    assert ["precision", "quantized"] == [line.split()[0] for line in lines[:2]]
    assert "1 of 2 nodes" in lines[1]
    assert any(line.startswith("left ") and "fp32" in line for line in lines)
    table = [line.split() for line in lines[-4:-2]]
    assert [["/M/Gemm", "fp32", "fp32"], ["/M/MatMul", "int8", "int8"]] == [row[:3] for row in table]


@pytest.mark.usefixtures("model")
def test_quiet_prints_nothing() -> None:
    """Only errors are printed."""
    outcome = run_here("quantize", "-m", "model.onnx", "-o", "out.onnx", "-q")
    assert (0, "", "") == (outcome.code, outcome.out, outcome.err)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-o", "out.onnx", "--exclude", "Gemn"], 2, "Nearest: Gemm"),
        (["-o", "out.onnx", "--exclude", "M"], 2, "by M"),
        (["-o", "out.onnx", "--per-module", '{"Nothing": "fp32"}'], 2, "'Nothing'"),
        (["-o", "out.onnx", "--per-module", '{"Gemm": "int3"}'], 2, "int3"),
        (["-o", "out.onnx", "--per-module", "rules.json"], 2, "rules.json"),
        (["-o", "out.onnx", "--mode", "dynamic", "--precision", "int4"], 2, "--mode weight-only"),
        (["-o", "out.onnx", "--precision", "int3"], 2, "int3"),
        (["-o", "model.onnx", "--overwrite"], 2, "input model.onnx"),
        (["-o", "out.txt"], 2, "out.txt"),
        (["-o", "out.onnx", "--min-sqnr", "nan"], 2, "nan is"),
        (["-o", "out.onnx", "--per-tensor", "--precision", "int4"], 2, "--per-tensor"),
        (["-o", "out.onnx", "--min-sqnr", "120"], 3, "120 dB"),
        (["-m", "missing.onnx", "-o", "out.onnx"], 2, "missing.onnx"),
        (["-m", "convolution.onnx", "-o", "out.onnx", "--mode", "dynamic"], 2, "Conv (--mode qdq"),
        (["-m", "integer.onnx", "-o", "out.onnx"], 1, "already quantized"),
        (["-m", "text.onnx", "-o", "out.onnx"], 1, "text.onnx"),
    ],
)
def test_wrong_request_is_refused_and_writes_nothing(here: Path, arguments: list[str], code: int, words: str) -> None:
    """Exit code and message tell the error; no file appears."""
    ir.save(parse(CONVOLUTION), here / "convolution.onnx")
    ir.save(
        parse("m (float[2] x) => (uint8[2] y) { y, s, z = DynamicQuantizeLinear (x) }"),
        here / "integer.onnx",
    )
    (here / "text.onnx").write_text("no model", encoding="utf-8")
    before = sorted(path.name for path in here.iterdir())
    outcome = run_here("quantize", *(["-m", "model.onnx"] if "-m" not in arguments else []), *arguments)
    assert (code, "") == (outcome.code, outcome.out), outcome.err
    assert words in outcome.err
    assert before == sorted(path.name for path in here.iterdir())


@pytest.mark.usefixtures("model")
def test_config_and_options_mean_the_same(here: Path) -> None:
    """The section of a build config is the same request, and options win over it."""
    (here / "config.json").write_text('{"quant": {"precision": "int8"}}', encoding="utf-8")
    run = ("quantize", "-m", "model.onnx", "--format", "json")
    by_config = json.loads(run_here(*run, "-o", "a.onnx", "-c", "config.json").out)
    by_options = json.loads(run_here(*run, "-o", "b.onnx", "--precision", "int8").out)
    assert by_config["modules"] == by_options["modules"]
    assert onnx.load("a.onnx").graph == onnx.load("b.onnx").graph
    both = json.loads(run_here(*run, "-o", "c.onnx", "-c", "config.json", "--precision", "uint8").out)
    assert {"uint8"} == {module["actual"] for module in both["modules"]}


@pytest.mark.usefixtures("model")
def test_build_and_quantize_take_the_same_options() -> None:
    """The keys of a config have the same effect."""
    asked = ("--precision", "int4", "--block-size", "16", "--algorithm", "k_quant", "--min-sqnr", "5")
    alone = run_here("quantize", "-m", "model.onnx", "-o", "a.onnx", *asked)
    assert 0 == alone.code, alone.err
    built = run_here("build", "-m", "model.onnx", "-o", "built", *asked, "--no-optimize")
    assert 0 == built.code, built.err
    config = '{"quant": {"precision": "int4", "block_size": 16, "algorithm": "k_quant", "min_sqnr_db": 5}}'
    again = run_here("quantize", "-m", "model.onnx", "-o", "b.onnx", "-c", config)
    assert 0 == again.code, again.err
    graph = onnx.load("a.onnx").graph
    assert graph == onnx.load("built/model.onnx").graph == onnx.load("b.onnx").graph
    sizes = {a.i for node in graph.node for a in node.attribute if a.name == "block_size"}
    assert {16} == sizes


def test_untagged_file_is_quantized_with_a_note(here: Path) -> None:
    """Coverage is unknown rather than zero, and a note says that selectors match node names."""
    graph = parse(PERCEPTRON)
    for node in graph.graph:
        node.metadata_props.clear()
    ir.save(graph, here / "foreign.onnx")
    outcome = run_here("quantize", "-m", "foreign.onnx", "-o", "out.onnx", "--exclude", "gemm")
    assert 0 == outcome.code, outcome.err
    assert "the source" in outcome.out
    assert "node names" in outcome.out
    assert not measure_coverage(ir.load("out.onnx")).tagged


@pytest.mark.usefixtures("model")
def test_file_that_a_link_leads_to_is_quantized_and_verified(here: Path) -> None:
    """ONNX Runtime maps no weights through a link."""
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "link.onnx").symlink_to(here / "model.onnx")

    outcome = run_here("quantize", "-m", "elsewhere/link.onnx", "-o", "int8.onnx", "--format", "json")

    assert 0 == outcome.code, outcome.err
    assert json.loads(outcome.out)["verification"]["is_verified"]
