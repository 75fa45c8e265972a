"""``winml extract`` and ``winml perf --module``, as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from e2e.in_process import run_here
from e2e.workplace import Outcome, Workplace
from graphs import parse

WEIGHTS = ", ".join(["0"] * 20)
NET = f"""<ir_version: 10, opset_import: ["" : 17, "com.example" : 1]>
g (float[batch, 20] x, bool deep) => (float[batch, 20] y)
<float[20] w = {{{WEIGHTS}}}> {{
    a = Mul(x, w)
    b = Relu(a)
    c = Mul(b, w)
    d = Relu(c)
    e = If (deep) <
        then_branch = t () => (float[batch, 20] u) {{ u = Exp(d) }},
        else_branch = f () => (float[batch, 20] v) {{ v = Neg(d) }}
    >
    y = Tanh(e)
}}
"""
TAGS = {"a": "/Net/Block", "b": "/Net/Block/Bend", "c": "/Net/Block", "d": "/Net/Block/Bend", "u": "/Net/Branch"}
MODULES = {"/Net": ("", 1), "/Net/Block": ("block", 2), "/Net/Block/Bend": ("block.bend", 2), "/Net/Gone": ("gone", 1)}
"""Tag → module path and calls."""
FEW = ("--iterations", "3", "--warmup", "0")


def _tag(node: onnx.NodeProto) -> None:
    tag = TAGS.get(node.output[0], "/Net")
    node.name = f"/{node.output[0]}"
    path = MODULES.get(tag, ("branch", 1))[0]
    for key, value in {"tag": tag, "module": path, "source": "direct", "depth": str(tag.count("/"))}.items():
        node.metadata_props.add(key=f"winml.hierarchy.{key}", value=value)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            _tag(inner)


def _save(path: Path, *, tags: bool = True) -> None:
    """Write a model with a module called twice, one inside an ``If`` of another, and one without nodes."""
    model = onnx.parser.parse_model(NET)
    array = np.linspace(-1, 1, 20, dtype=np.float32)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, "w"))
    if tags:
        for node in model.graph.node:
            _tag(node)
        tree = [
            {"path": module, "tag": tag, "class": tag.rpartition("/")[2], "execution_order": number, "calls": calls}
            for number, (tag, (module, calls)) in enumerate(MODULES.items())
        ]
        model.metadata_props.add(key="winml.hierarchy.tree", value=json.dumps(tree))
    onnx.save(model, path)


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    """A workplace with the model."""
    _save(workplace.folder / "net.onnx")
    return workplace


@pytest.fixture(scope="module")
def extracted(make_workplace: Callable[[], Workplace]) -> tuple[Workplace, Outcome]:
    """Every module of the model, with its recorded values."""
    place = make_workplace()
    _save(place.folder / "net.onnx")
    return place, place.winml("extract", "net.onnx", "--module", "**", "-o", "out", "--with-inputs", "--format", "json")


def _record(outcome: Outcome) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(outcome.out)
    return value


def _refuse(place: Workplace, *arguments: str, code: int, words: tuple[str, ...]) -> None:
    """Check that a request ends with one sentence and a remedy, and leaves no file."""
    before = place.files()
    outcome = place.winml(*arguments)
    assert (code, "") == (outcome.code, outcome.out), outcome.err
    assert 2 == len(outcome.complaint), outcome.complaint
    assert [] == [word for word in words if word not in "\n".join(outcome.complaint)], outcome.complaint
    assert before == place.files()


def test_each_call_becomes_a_file_and_uncut_modules_are_listed(extracted: tuple[Workplace, Outcome]) -> None:
    """A module that cannot be extracted makes the exit code 1, and a module without nodes does not count.

    Other modules are written.
    """
    place, outcome = extracted
    assert 1 == outcome.code
    (complaint,) = outcome.complaint
    assert complaint.startswith("error: 1 module ")
    found = _record(outcome)
    assert ["Net.onnx", "block.call1.onnx", "block.call2.onnx", "block.bend.call1.onnx", "block.bend.call2.onnx"] == [
        module["file"] for module in found["modules"]
    ]
    assert ["branch"] == [module["module"] for module in found["refused"]]
    assert "node /e (If)" in found["refused"][0]["reason"]
    assert ["gone"] == [module["module"] for module in found["without_nodes"]]
    assert all(module["verification"]["max_abs_diff"] == 0 for module in found["modules"])
    files = {
        file for module in found["modules"] for file in (module["file"], module["inputs_file"], module["outputs_file"])
    }
    assert files | {"extract_manifest.json"} == {path.name for path in (place.folder / "out").iterdir()}


def test_manifest_equals_the_printed_json(extracted: tuple[Workplace, Outcome]) -> None:
    """The manifest has the content of the printed JSON."""
    place, outcome = extracted
    manifest = json.loads((place.folder / "out" / "extract_manifest.json").read_text(encoding="utf-8"))
    assert {"folder": "out", **manifest} == _record(outcome)
    assert (1, "net.onnx", "**") == (manifest["schema_version"], manifest["source"], manifest["selector"])
    first = manifest["modules"][1]
    assert ("block", "/Net/Block", "Block", 1, 2) == tuple(
        first[key] for key in ("module", "tag", "class", "call", "calls")
    )
    assert [{"name": "x", "shape": ["batch", 20], "dtype": "float32"}] == first["inputs"]
    assert (2, 20) == (first["nodes"], first["parameters"])


def test_calls_follow_one_another(extracted: tuple[Workplace, Outcome]) -> None:
    """The inputs of the second call are the outputs of the first, and both files give the recorded outputs."""
    folder = extracted[0].folder / "out"
    kept = [
        {kind: np.load(folder / f"block.call{call}.{kind}.npz") for kind in ("inputs", "outputs")} for call in (1, 2)
    ]
    assert np.array_equal(kept[0]["outputs"]["b"], kept[1]["inputs"]["b"])
    for call, arrays in enumerate(kept, start=1):
        onnx.checker.check_model(folder / f"block.call{call}.onnx", full_check=True)
        session = onnxruntime.InferenceSession(folder / f"block.call{call}.onnx")
        (answer,) = session.run(None, dict(arrays["inputs"]))
        assert np.array_equal(*arrays["outputs"].values(), answer)


def test_words_name_file_module_and_boundary(place: Workplace) -> None:
    """The output names files, modules, boundaries and their comparison; nothing else is written."""
    outcome = place.winml("extract", "-m", "net.onnx", "--module", "block.bend", "-o", "out", "-q", "--seed", "3")
    assert (0, "", "") == (outcome.code, outcome.out, outcome.err)
    outcome = place.winml("extract", "net.onnx", "--module", "block.bend", "-o", "out", "--overwrite")
    assert 0 == outcome.code, outcome.err
    for words in (
        "block.bend.call2.onnx",
        "block.bend, call 2 of 2 (Bend): 1 node",
        "c float32[batch, 20] → d",
        "bit for bit",
    ):
        assert words in outcome.out
    names = {"net.onnx", "out", *(f"out/{name}" for name in ("extract_manifest.json", "block.bend.call1.onnx"))}
    assert {*names, "out/block.bend.call2.onnx"} == set(place.files())


def test_extraction_without_a_cut_module_leaves_no_file(place: Workplace) -> None:
    """No folder is made if every module is refused, and the reasons are printed."""
    before = place.files()
    outcome = place.winml("extract", "net.onnx", "--module", "branch", "-o", "out")
    assert (1, before) == (outcome.code, place.files())
    assert "node /e (If)" in outcome.out
    (complaint,) = outcome.complaint
    assert complaint.startswith("error: 1 module ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--module", "Blok", "-o", "out"), 2, ("'Blok'", "Block")),
        (("--module", "", "-o", "out"), 2, ("'--module':",)),
        (("--module", "block", "-o", "there"), 2, ("extract_manifest.json exists already", "--overwrite")),
        (("--module", "block", "-o", "out", "--shape-config", '{"length": 3}'), 2, ("'length'",)),
        (("--module", "block", "-o", "out", "--input-data", "no.npz"), 2, ("no.npz:",)),
        (("--module", "block", "-o", "out", "--task", "fill-mask"), 2, ("--task",)),
    ],
)
def test_wrong_request_is_refused(
    place: Workplace, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    """Each message has a remedy, and no file is left."""
    (place.folder / "there").mkdir()
    (place.folder / "there" / "extract_manifest.json").write_text("{}")
    _refuse(place, "extract", "net.onnx", *arguments, code=code, words=words)


def test_source_model_of_an_extraction_is_never_overwritten(place: Workplace) -> None:
    """The source stays even with --overwrite, and so does its data if named like that of an output."""
    model = onnx.load(place.folder / "net.onnx")
    (place.folder / "net.onnx").unlink()
    onnx.save(model, place.folder / "block.call1.onnx")
    data = "block.call2.onnx.data"
    onnx.save(model, place.folder / "whole.onnx", save_as_external_data=True, location=data, size_threshold=0)
    arguments = ("--module", "block", "-o", ".", "--overwrite")
    words = "is the input {}"
    _refuse(place, "extract", "block.call1.onnx", *arguments, code=2, words=(words.format("block.call1.onnx"),))
    _refuse(place, "extract", "whole.onnx", "--module", "block", "-o", "", code=2, words=("empty",))
    content = (place.folder / data).read_bytes()
    outcome = place.winml("extract", "whole.onnx", *arguments)
    assert 0 == outcome.code, outcome.err
    assert content == (place.folder / data).read_bytes()


def test_file_without_tags_is_refused(place: Workplace) -> None:
    """Both messages name the verb that writes tags."""
    _save(place.folder / "bare.onnx", tags=False)
    words = ("bare.onnx", "winml retag")
    _refuse(place, "extract", "bare.onnx", "--module", "block", "-o", "out", code=1, words=words)
    _refuse(place, "perf", "bare.onnx", "--module", "block", code=1, words=words)


def test_external_data_of_the_source_is_not_copied(place: Workplace) -> None:
    """A model with external data is extracted without a second copy of the data."""
    model = onnx.load(place.folder / "net.onnx")
    onnx.save(model, place.folder / "far.onnx", save_as_external_data=True, location="far.data", size_threshold=0)
    before = place.files()
    outcome = place.winml("extract", "far.onnx", "--module", "block", "-o", "out")
    assert 0 == outcome.code, outcome.err
    assert before == {name: data for name, data in place.files().items() if not name.startswith("out")}
    (place.folder / "far.data").unlink()
    session = onnxruntime.InferenceSession(place.folder / "out" / "block.call2.onnx")
    assert ["b"] == [value.name for value in session.get_inputs()]


def test_perf_measures_each_call_and_lists_failures(place: Workplace) -> None:
    """Each instance has its times or the reason of its failure; a failure makes the exit code 1."""
    before = place.files()
    outcome = place.winml("perf", "net.onnx", "--module", "**", *FEW, "--format", "json")
    assert (1, ["error: 1 of 6 instances could not be measured"]) == (outcome.code, outcome.complaint)
    found = _record(outcome)
    assert (2, None, 6, 1) == tuple(
        found[key] for key in ("schema_version", "module_class", "instance_count", "failed_count")
    )
    assert before == place.files()
    *measured, failed = found["instances"]
    assert ("branch", None) == (failed["module"], failed["mean_ms"])
    assert "node /e (If)" in failed["error"]
    for item in measured:
        assert item["min_ms"] <= item["mean_ms"] <= item["max_ms"]
        assert pytest.approx(np.mean(item["raw_samples_ms"]), abs=1e-5) == item["mean_ms"]
    assert {"b": {"dtype": "float32", "shape": [1, 20]}} == measured[2]["inputs"]
    by_class = {entry["class"]: entry for entry in found["classes"]}
    blocks = [np.median(item["raw_samples_ms"]) for item in measured if item["class"] == "Block"]
    assert (2, pytest.approx(sum(blocks), abs=1e-5)) == (by_class["Block"]["instances"], by_class["Block"]["total_ms"])


def test_perf_prints_tables_per_instance_and_per_class(place: Workplace) -> None:
    """Two tables are printed; without a failure the exit code is 0."""
    sizes = ("--shape-config", '{"batch": 3}')
    outcome = place.winml("perf", "net.onnx", "--module", "Block", *FEW, *sizes, "-q")
    assert (0, "") == (outcome.code, outcome.err)
    for words in (
        "block, call 1 of 2",
        "block, call 2 of 2",
        "Block",
        "fastest",
        "one run of the whole model on random values",
    ):
        assert words in outcome.out
    found = _record(place.winml("perf", "net.onnx", "--module", "Block", *FEW, *sizes, "--format", "json"))
    assert ("Block", 2) == (found["module_class"], found["instance_count"])
    assert [[3, 20]] * 2 == [shape["shape"] for item in found["instances"] for shape in item["inputs"].values()]


@pytest.mark.parametrize("other", [("--baseline", "net.onnx"), ("--by-module",)])
def test_perf_of_modules_and_of_the_whole_exclude_each_other(place: Workplace, other: tuple[str, ...]) -> None:
    """An option for the whole model is refused before a measurement."""
    words = (f"{other[0]} measures the whole model", "winml extract")
    _refuse(place, "perf", "net.onnx", "--module", "Block", *other, code=2, words=words)


def test_checkpoint_is_exported_once_for_several_commands(place: Workplace, bert_tiny: Path) -> None:
    """A folder is exported once; the second command finds the export."""
    shapes = ("--shape-config", '{"sequence_length": 8}')
    outcome = place.winml("extract", "-m", str(bert_tiny), "--module", "BertSelfOutput", "-o", "out", *shapes)
    assert 0 == outcome.code, outcome.err
    names = {f"encoder.layer.{number}.attention.output.onnx" for number in (0, 1)}
    assert names < {path.name for path in (place.folder / "out").iterdir()}
    outcome = place.winml("perf", "-m", str(bert_tiny), "--module", "BertPooler", *shapes, *FEW)
    assert 0 == outcome.code, outcome.err
    assert "modules measured" in outcome.err
    assert "PyTorch" not in outcome.err


def test_written_files_are_named_from_the_working_directory(place: Workplace) -> None:
    """The printed paths can be used in the next command."""
    done = place.winml("extract", "net.onnx", "--module", "Block", "-o", "out")
    written = [line.split()[1] for line in done.out.splitlines() if line.startswith("wrote")]
    assert written
    assert all((place.folder / name).is_file() for name in written)


def test_bfloat16_graph_without_types_is_refused(here: Path) -> None:
    """On the CPU it runs in float32, so that recorded values do not tell the types between modules."""
    graph = parse(
        "g (bfloat16[2, 2] x) => (bfloat16[2, 2] y) <bfloat16[2, 2] w = {1, 2, 3, 4}> "
        "{ a = MatMul (x, w) b = Relu (a) y = Gemm (b, w) }"
    )
    onnx.save(ir.to_proto(graph), "model.onnx")
    outcome = run_here("extract", "model.onnx", "--module", "/M/Gemm", "-o", "cut")
    assert 1 == outcome.code, outcome.err
    assert "bfloat16" in outcome.err
    assert ["model.onnx"] == [path.name for path in here.iterdir()]
