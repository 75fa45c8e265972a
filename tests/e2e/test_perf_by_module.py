"""``winml perf --by-module`` on a tagged file: output, files and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphs
from e2e.in_process import run_here
from e2e.workplace import Workplace
from installed_versions import KERNEL_MEMORY
from winml.modelkit.metadata_keys import COMPILE_KEY
from winml.modelkit.onnx.files.writing import write_model

ZEROS = ", ".join("0" * 256)
BODY = f"""g (float[8,16] x) => (float[8,16] y)
<float[16,16] w1 = {{{ZEROS}}}, float[16] w2 = {{{ZEROS[:46]}}}, float[16,16] w3 = {{{ZEROS}}}> {{
  a = MatMul (x, w1)
  b = Add (a, w2)
  c = Relu (b)
  d = MatMul (c, w3)
  y = Add (d, x)
}}"""


@pytest.fixture
def model(workplace: Workplace) -> Path:
    """A file with nodes that ONNX Runtime fuses."""
    path = workplace.folder / "net.onnx"
    write_model(graphs.parse(BODY), path)
    return path


def test_by_module_prints_the_tree_and_unattributed_time(workplace: Workplace, model: Path) -> None:
    """Every module has a line, all of the kernel time is attributed, and no file is left beside the model."""
    done = workplace.winml("perf", model.name, "--by-module", "--iterations", "5")
    assert 0 == done.code, done.err
    for segment in ("M ", "MatMul ", "Relu "):
        assert any(line.strip().startswith(segment) for line in done.out.splitlines()), done.out
    assert "0.000 ms (0.00%" in done.out
    assert [model.name] == [path.name for path in workplace.folder.iterdir()]


def test_by_module_json_adds_up(workplace: Workplace, model: Path) -> None:
    """The JSON has the keys of the whole model and ``by_module``; the self times add up to the kernel time."""
    done = workplace.winml("perf", model.name, "--by-module", "--iterations", "5", "--format", "json", "-q")
    record = json.loads(done.out)
    by_module = record["by_module"]
    assert {"schema_version", "benchmark_info", "model_info", "latency_ms", "by_module"} <= set(record)
    assert "winml tags" == by_module["tree_source"]
    assert 0 == by_module["unattributed_share"]

    def self_ms(module: dict[str, object]) -> float:
        return module["self_ms"] + sum(map(self_ms, module["children"]))  # type: ignore[operator, call-overload, no-any-return]

    assert math.isclose(by_module["kernel_ms"], sum(map(self_ms, by_module["tree"])), rel_tol=1e-9)
    assert 5 == len(by_module["runs_ms"])


def test_by_module_writes_the_requested_files(workplace: Workplace, model: Path) -> None:
    """Page, node data and trace are complete, name the file's own nodes, and need ``--overwrite`` to be replaced."""
    arguments = ["perf", model.name, "--by-module", "--iterations", "3"]
    files = ["--report", "time.html", "--node-data", "nodes.json", "--trace", "trace.json"]
    done = workplace.winml(*arguments, *files)
    assert 0 == done.code, done.err
    page = (workplace.folder / "time.html").read_text(encoding="utf-8")
    assert page.rstrip().endswith("</html>")
    nodes = json.loads((workplace.folder / "nodes.json").read_text(encoding="utf-8"))["g"]["results"]
    assert set(nodes) <= {"/matmul/MatMul_0", "/add/Add_1", "/relu/Relu_2", "/matmul/MatMul_3", "/add/Add_4"}
    assert sum(entry["value"] for entry in nodes.values()) > 0
    events = json.loads((workplace.folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {"module", "kernel"} == {event["cat"] for event in events}
    again = workplace.winml(*arguments, "--trace", "trace.json")
    assert 2 == again.code
    assert ["error: output", "Use --overwrite"] == [
        line[:13] if line[0] == "e" else line[:15] for line in again.complaint
    ]
    assert 0 == workplace.winml(*arguments, "--trace", "trace.json", "--overwrite").code


def test_by_module_sets_two_models_side_by_side(workplace: Workplace, model: Path) -> None:
    """Terminal, page and JSON have the times of both; the ratio is measured without profiling."""
    write_model(graphs.parse(BODY), workplace.folder / "other.onnx")
    output = ("--by-module", "--iterations", "3", "--report", "pair.html", "-o", "pair.json", "-q")
    done = workplace.winml("perf", "other.onnx", model.name, *output)
    assert 0 == done.code, done.err
    head = next(line.split() for line in done.out.splitlines() if line.startswith("module "))
    assert ["module", "other.onnx", "ms", "net.onnx", "ms", "ratio", "change", "ms", "verdict", "weights"] == head
    record = json.loads((workplace.folder / "pair.json").read_text(encoding="utf-8"))
    assert record["baseline"]["ratio"]["value"] > 0
    trees = [side["by_module"]["tree"] for side in (record, record["baseline"])]
    assert [["/M"], ["/M"]] == [[module["tag"] for module in tree] for tree in trees]
    ratios = {row["module"]: row for row in record["baseline"]["ratios"]}
    assert 3 == ratios[""]["ratio"]["pairs"]
    assert {"undecided"} == {row["verdict"] for row in ratios.values() if row["ratio"]}  # three pairs have no interval
    assert 2112 == record["weight_bytes"]["/M"] == record["baseline"]["weight_bytes"]["/M"]
    assert "other.onnx ms" in (workplace.folder / "pair.html").read_text(encoding="utf-8")


@KERNEL_MEMORY
def test_by_module_with_memory_adds_up(workplace: Workplace, model: Path) -> None:
    """The weights of the modules are those of the graph, and the uses add up to the growth of the process."""
    files = ("-o", "memory.json", "--report", "memory.html")
    done = workplace.winml("perf", model.name, "--by-module", "--memory", "--iterations", "3", *files)
    assert 0 == done.code, done.err
    by_module = json.loads((workplace.folder / "memory.json").read_text(encoding="utf-8"))["by_module"]
    memory, (root,) = by_module["memory"], by_module["tree"]
    assert 2112 == memory["weights_bytes"] == root["memory"]["weights_bytes"]
    assert [2112, 0, 0] == [child["memory"]["weights_bytes"] for child in root["children"]]  # Add and Relu are fused
    peak, process = memory["peak"], memory["process"]
    held = sum(value["size_bytes"] for value in peak["values"])
    assert peak["activation_bytes"] == held + peak["reserved_bytes"]
    assert root["memory"]["peak_bytes"] == held
    counted = memory["weights_bytes"] + memory["packed_bytes"] + memory["allocator_bytes"]
    counted += peak["activation_bytes"] + peak["scratch_bytes"]
    assert process["growth_bytes"] == counted + process["freed_bytes"] + memory["other_bytes"]
    for text in (done.out, (workplace.folder / "memory.html").read_text(encoding="utf-8")):
        assert "growth of the process" in text
        assert "at the peak" in text


SCRIPT = """
import torch
class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(32, 32)
    def forward(self, x):
        return self.dense(x).relu()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Half(), Half()
    def forward(self, x):
        return self.second(self.first(x)) + x
def build():
    return Net()
def example_inputs():
    return {"x": torch.ones(3, 32)}
"""


def test_by_module_beside_pytorch_has_each_module_on_both_sides(workplace: Workplace) -> None:
    """Times of PyTorch without those of inner modules add up to the forward, and ratios are sorted."""
    (workplace.folder / "net.py").write_text(SCRIPT, encoding="utf-8")
    arguments = ("perf", "-m", "net.py:build", "--by-module", "--baseline", "pytorch", "--iterations", "6")
    done = workplace.winml(*arguments, "-o", "both.json", "--report", "both.html", "-q")
    assert 0 == done.code, done.err
    record = json.loads((workplace.folder / "both.json").read_text(encoding="utf-8"))
    ours, theirs = (side["by_module"]["tree"][0] for side in (record, record["baseline"]))
    paths = ["first", "second"]
    assert paths == [child["module"] for child in ours["children"]] == [child["module"] for child in theirs["children"]]
    parts = theirs["self_ms"] + sum(child["self_ms"] for child in theirs["children"])
    assert math.isclose(record["baseline"]["by_module"]["kernel_ms"], parts, rel_tol=1e-9)
    assert all(child["self_ms"] > 0 for child in theirs["children"])
    ratios = record["baseline"]["ratios"]
    assert {"", *paths} == {row["module"] for row in ratios}
    values = [row["ratio"]["value"] for row in ratios]
    assert values == sorted(values, reverse=True)
    assert 6 == ratios[0]["ratio"]["pairs"]
    assert {row["verdict"] for row in ratios} <= {"faster", "slower", "no difference found", "undecided"}
    assert "PyTorch ms" in done.out
    assert "PyTorch ms" in (workplace.folder / "both.html").read_text(encoding="utf-8")


def test_page_of_two_latencies_needs_no_modules(workplace: Workplace, model: Path) -> None:
    done = workplace.winml("perf", model.name, "--baseline", model.name, "--iterations", "2", "--report", "a.html")
    assert 0 == done.code, done.err
    assert "peak memory" in (workplace.folder / "a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--depth", "2"], "error: --depth requires --by-module"),
        (["--report", "a.html", "--module", "M"], "error: --report has no effect with --module"),
        (["--memory"], "error: --memory requires --by-module"),
        (["--by-module", "--memory", "--baseline", "net.onnx"], "error: --by-module --memory measures one model"),
        (["--by-module", "--baseline", "pytorch", "--group", "class"], "error: --group has no effect with --by-module"),
        (["--by-module", "--baseline", "pytorch"], "error: --baseline pytorch: net.onnx does not record the model"),
        (
            ["--by-module", "--trace", "a", "--node-data", "a"],
            "error: --node-data and --trace ",
        ),
        (["--by-module", "--depth", "2", "--group", "class"], "error: --depth 2 "),
        (["--by-module", "--depth", "2", "--top", "3"], "error: --depth 2 "),
        (["--by-module", "--report", ""], "error: Invalid value for '--report': the path is empty"),
        (["--by-module", "--trace", "./net.onnx", "--overwrite"], "error: output net.onnx is the input net.onnx"),
        (["--by-module", "--top", "0"], "error: Invalid value for '--top'"),
    ],
)
def test_by_module_refuses_conflicting_options(
    workplace: Workplace, model: Path, options: list[str], sentence: str
) -> None:
    """The exit code is 2, before anything runs."""
    before = workplace.files()
    done = workplace.winml("perf", model.name, *options)
    assert (2, "") == (done.code, done.out)
    assert any(line.startswith(sentence) for line in done.complaint), done.err
    assert before == workplace.files()


@pytest.mark.parametrize("read", ["net.onnx", "weights.bin", "net_htp_metadata.json", "values.npz"])
def test_by_module_never_overwrites_its_inputs(workplace: Workplace, model: Path, read: str) -> None:
    """Model, data, sidecar and values stay, even with --overwrite."""
    content = onnx.load(model)
    onnx.save(content, model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    model.with_name("net_htp_metadata.json").write_text("{}", encoding="utf-8")
    np.savez(workplace.folder / "values.npz", x=np.ones((8, 16), np.float32))
    before = workplace.files()
    arguments = ("perf", model.name, "--by-module", "--input-data", "values.npz", "--overwrite")
    done = workplace.winml(*arguments, "--node-data", read)
    assert (2, "", before) == (done.code, done.out, workplace.files())
    assert f"error: output {read} is the input {read}" == done.complaint[0]


@pytest.mark.parametrize("source", ["net.onnx", "sub/net.onnx", "../net.onnx", "/net.onnx", "gone.onnx", None, 7])
@pytest.mark.parametrize(
    "asked",
    [
        ("perf", "built/npu.onnx", "--by-module"),
        ("perf", "built/npu.onnx", "--module", "MatMul"),
        ("extract", "-m", "built/npu.onnx", "--module", "MatMul", "-o", "cut"),
        ("compare", "net.onnx", "built/npu.onnx", "--by-module"),
    ],
    ids=" ".join,
)
def test_modules_of_a_compiled_file_are_read_from_its_source(
    here: Path, asked: tuple[str, ...], source: object
) -> None:
    """One node replaces all modules: the error names the source file if it is known."""
    (here / "built" / "sub").mkdir(parents=True)
    for path in (here / "net.onnx", here / "built" / "sub" / "net.onnx"):
        write_model(graphs.parse(BODY), path)
    body = 'g (float[8,16] x) => (float[8,16] y) { y = com.microsoft.EPContext <ep_cache_context = "x"> (x) }'
    model = graphs.parse(body, domains=', "com.microsoft" : 1')
    record = {"provider": "QNNExecutionProvider"} | ({} if source is None else {"source": source})
    model.metadata_props[COMPILE_KEY] = json.dumps(record)
    write_model(model, here / "built" / "npu.onnx")
    refused = run_here(*asked)
    assert (2, "") == (refused.code, refused.out), refused.err
    assert "QNNExecutionProvider compiled 1" in refused.err
    known = {"net.onnx": "net.onnx", "sub/net.onnx": "built/sub/net.onnx", "gone.onnx": "gone.onnx"}
    named = refused.err.splitlines()[-1].partition(": ")[2].removesuffix(".")
    assert known.get(str(source), "") == named
    if named and named != "gone.onnx":
        assert (here / named).is_file()
