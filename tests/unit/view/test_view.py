"""The page of ``winml view``: what its data contains, and what a browser shows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from PIL import Image

from browser import Browser
from e2e.in_process import run_here
from winml.modelkit import UsageError, compare_models, quantize_model, view_model
from winml.modelkit.metadata_keys import TREE_KEY
from winml.modelkit.onnx.files.placing import file_digest, model_digest
from winml.modelkit.onnx.fingerprint import file_fingerprint
from winml.modelkit.report.html import render_html
from winml.modelkit.tags.tagging import NodeTag, write_tag
from winml.modelkit.view.histograms import _MOST_VALUES, _histogram
from winml.modelkit.view.pairing import _find_replaced_nodes
from winml.modelkit.view.records import ModelPage

LAYERS = 4
SIZE = 16
MOST_PAGE_BYTES = 300_000
"""Specified by the project for a model of the size of bert-base."""
RUN = "document.title='run'"
NAMES = (
    f"<script>{RUN}</script>", f'</script><img src=x onerror="{RUN}">', "a\u202eb", "L" * 10_000, "~0/x", "~~",
    "constructor", "__proto__", "toString",
)  # fmt: skip
"""Names that a page must show as text; objects of JavaScript have members of the last ones."""


def _layers(count: int = LAYERS, *, is_tagged: bool = True) -> ir.Model:
    """Return a model of equal layers, each with a product in ``proj`` and a sum around it."""
    generator = np.random.default_rng(0)
    value = x = ir.val("x", dtype=ir.DataType.FLOAT, shape=["batch", SIZE])
    nodes, weights = [], []
    for layer in range(count):
        weight = generator.standard_normal((SIZE, SIZE)).astype(np.float32)
        name = f"layers.{layer}.proj.weight"
        weights.append(ir.val(name, const_value=ir.tensor(weight, name=name)))
        scope, tag = f"/layers.{layer}", f"/Net/Layer.{layer}"
        product = ir.node("MatMul", [value, weights[-1]], name=f"{scope}/proj/MatMul")
        total = ir.node("Add", [product.outputs[0], value], name=f"{scope}/Add")
        for node, inner in ((product, "Proj"), (total, "")):
            node.outputs[0].name = f"{node.name}_output_0"
            node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(["batch", SIZE]), ir.DataType.FLOAT
            if is_tagged:
                path = f"layers.{layer}.proj" if inner else f"layers.{layer}"
                write_tag(node, NodeTag(f"{tag}/{inner}" if inner else tag, path, "direct"))
            else:
                node.name = f"{node.op_type}_{len(nodes)}"
            nodes.append(node)
        value = total.outputs[0]
    graph = ir.Graph([x], [value], nodes=nodes, initializers=weights, opset_imports={"": 20}, name="net")
    model = ir.Model(graph, ir_version=10)
    if is_tagged:
        tree = [{"path": "", "tag": "/Net", "class": "Net"}]
        for layer in range(count):
            tree.append({"path": f"layers.{layer}", "tag": f"/Net/Layer.{layer}", "class": "Layer"})
            tree.append({"path": f"layers.{layer}.proj", "tag": f"/Net/Layer.{layer}/Proj", "class": "Proj"})
        model.metadata_props[TREE_KEY] = json.dumps(tree)
    return model


def _saved(model: ir.Model, path: Path) -> Path:
    ir.save(model, path)
    return path


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A file of equal layers."""
    return _saved(_layers(), tmp_path / "net.onnx")


@pytest.fixture
def pair(net: Path) -> tuple[Path, Path]:
    """A file, and the file with quantized weights."""
    quantized = net.with_name("int8.onnx")
    quantize_model(net, quantized, precision="int8")
    return net, quantized


def _times(net: Path, fingerprint: str | None = None) -> dict[str, Any]:
    """Return the JSON of ``winml perf --by-module`` in its smallest form: layer N takes N milliseconds."""

    def row(tag: str, milliseconds: float, children: list[Mapping[str, Any]]) -> dict[str, Any]:
        return {"tag": tag, "self_ms": milliseconds, "output_bytes": 4, "fused_with": [], "children": children}

    layers = [row(f"/Net/Layer.{layer}", float(layer), []) for layer in range(LAYERS)]
    stated = file_fingerprint(net) if fingerprint is None else fingerprint
    return {"by_module": {"unit": "ms", "tree": [row("/Net", 0.5, [*layers])], "fingerprint": stated}}


def _part(page: ModelPage, side: int = 0) -> dict[str, Any]:
    part: dict[str, Any] = page.data["models"][side]["parts"][0]
    return part


def test_equal_layers_are_stored_once(tmp_path: Path) -> None:
    """A model of 64 layers has as many templates as one of 4, and a page of nearly the same size."""
    pages = [view_model(_saved(_layers(count), tmp_path / f"{count}.onnx")) for count in (4, 64)]
    assert len(pages[0].data["templates"]) == len(pages[1].data["templates"])
    sizes = [len(render_html(page.document())) for page in pages]
    assert sizes[1] < MOST_PAGE_BYTES
    # Of a further layer, the page repeats label, path, number of the template and sources of the inputs.
    assert (sizes[1] - sizes[0]) / 60 < 80


def test_earlier_results_beside_the_model_are_shown(net: Path) -> None:
    """A result in the folder of the model belongs to it by fingerprint; one of another model is left out."""
    net.with_name("times.json").write_text(json.dumps(_times(net)))
    net.with_name("other.json").write_text(json.dumps(_times(net, "0" * 64)))
    net.with_name("broken.json").write_text('{"fingerprint": ')
    net.with_name("deep.json").write_text('{"fingerprint": ' + 100_000 * "[" + 100_000 * "]" + "}")
    page = view_model(net)
    assert ["times.json"] == [known.source for known in page.models[0].known if known.title == "time"]
    times = _part(page)["measures"]["time"]
    assert [0.5, 0.0, None, 1.0, None, 2.0, None, 3.0, None] == times


@pytest.mark.parametrize("fingerprint", ["0" * 64, ""], ids=["other", "unstated"])
def test_result_of_another_model_is_refused(net: Path, tmp_path: Path, fingerprint: str) -> None:
    """A named result with another fingerprint, or without one, is an error."""
    result = tmp_path / "elsewhere"
    result.mkdir()
    result = result / "times.json"
    result.write_text(json.dumps(_times(net, fingerprint)))
    with pytest.raises(UsageError, match=r"times\.json"):
        view_model(net, results=[result])
    outcome = run_here("view", net, "--with", result, "-o", net.with_name("page.html"))
    assert 2 == outcome.code
    assert "--with" in outcome.err
    assert not net.with_name("page.html").exists()
    result.write_text(json.dumps(_times(net)))
    assert 0 == run_here("view", net, "--with", result, "-o", net.with_name("page.html")).code


_NO_RESULTS = (
    "{}", "[1]", '{"modules": [{"own_error": 1}]}', '{"by_module": {"tree": [5]}}',
    '{"execution_provider": {"modules": [1]}}',
    '{"modules": [{"tag": "/Net", "own_error": Infinity, "sqnr_db": "<b>"}], "fingerprint": "FINGERPRINT"}',
)  # fmt: skip


@pytest.mark.parametrize(("text", "code"), [(None, 1), ("{", 1), *((text, 2) for text in _NO_RESULTS)], ids=str)
def test_unusable_result_is_refused(net: Path, text: str | None, code: int) -> None:
    """A named result that is missing, no JSON, or without numbers of modules is an error."""
    result = net.with_name("result.json")
    if text is not None:
        result.write_text(text.replace("FINGERPRINT", file_fingerprint(net)))
    outcome = run_here("view", net, "--with", result, "-o", net.with_name("page.html"))
    assert code == outcome.code
    assert "result.json" in outcome.err


def _known(page: ModelPage, title: str, side: int = 0) -> dict[str, Any]:
    """Return tag → value of a number of modules."""
    (key,) = [entry["key"] for entry in page.data["models"][side]["measures"] if entry["title"] == title]
    values = _part(page, side)["measures"][key]
    tags = ["/Net", *(f"/Net/Layer.{layer}{inner}" for layer in range(LAYERS) for inner in ("", "/Proj"))]
    return {tag: value for tag, value in zip(tags, values, strict=True) if value is not None}


def test_verdicts_on_times_of_modules_are_shown(net: Path) -> None:
    """Each module has its ratio to the baseline, unless undecided, and the answer whether it is faster."""
    times, verdicts = _times(net), ("faster", "no difference found", "slower", "undecided")
    ratios = [
        {"tag": f"/Net/Layer.{layer}", "ratio": {"value": 0.5 + layer}, "verdict": verdict}
        for layer, verdict in enumerate(verdicts)
    ]
    unmeasured = {"tag": "/Net", "ratio": None, "verdict": ""}
    times["baseline"] = {"name": "folder/before.onnx", "ratios": [*ratios, unmeasured]}
    net.with_name("times.json").write_text(json.dumps(times))
    page = view_model(net)
    answers = _known(page, "faster than before.onnx")
    assert ["yes", "no", "no", "undecided"] == [answers[f"/Net/Layer.{layer}"] for layer in range(LAYERS)]
    ratios_shown = _known(page, "time relative to before.onnx")
    assert [0.5, 1.5, 2.5] == [*ratios_shown.values()]


def test_moved_modules_are_named(net: Path, tmp_path: Path) -> None:
    """A module whose nodes another provider runs, or that left the provider, has moved; its files may be equal."""
    (tmp_path / "after").mkdir()
    model = _layers()
    model.graph.opset_imports[""] = 21
    other = _saved(model, tmp_path / "after" / "net.onnx")
    for side, count in ((net, 2), (other, 1)):
        rows = [{"module": f"layers.{layer}", "nodes": 2, "on_device": 2, "reasons": {}} for layer in range(2)]
        rows[1] |= {"on_device": count, "reasons": {} if count == 2 else {"no kernel": 1}}
        fit = {"provider": "QNN", "modules": rows, "fingerprint": file_fingerprint(side)}
        side.with_name("fit.json").write_text(json.dumps({"execution_provider": fit}))
    page = view_model(net, other)
    assert {"/Net/Layer.1": "moved", "/Net": "changed inside"} == {
        tag: change for tag, change in _known(page, "change", 1).items() if change != "equal"
    }
    (words,) = page.data["changes"]["model /Net/Layer.1"]
    assert "no kernel" in words


def test_memory_of_modules_is_that_without_inner_modules(net: Path) -> None:
    """``perf --memory`` states totals; the page adds up the values of modules."""
    times = _times(net)
    (root,) = times["by_module"]["tree"]
    root["memory"] = {"weights_bytes": 1000, "packed_bytes": 10, "peak_bytes": 100}
    root["children"][0]["memory"] = {"weights_bytes": 600, "packed_bytes": 10, "peak_bytes": 20}
    net.with_name("times.json").write_text(json.dumps(times))
    page = view_model(net, width="memory at the peak")
    peak, weights = _known(page, "memory at the peak"), _known(page, "memory of weights")
    assert {"/Net": 480, "/Net/Layer.0": 630} == {tag: value for tag, value in peak.items() if value}
    assert {"/Net": 400, "/Net/Layer.0": 610} == {tag: value for tag, value in weights.items() if value}


def _scaled(model: ir.Model) -> ir.Model:
    """Change the values of the weights, but nothing else."""
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        value.const_value = ir.tensor(2 * value.const_value.numpy(), name=name)
    return model


def test_errors_of_other_weights_are_not_shown(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Errors belong to the weights of both files; times belong to the graph."""
    net, quantized = pair
    (tmp_path / "other").mkdir()
    other = _saved(_scaled(_layers()), tmp_path / "other" / "scaled.onnx")
    record = compare_models(net, quantized, by_module=True).as_record()
    errors, times = tmp_path / "errors.json", tmp_path / "times.json"
    errors.write_text(json.dumps(record))
    verdict = {"question": "int8.onnx is faster than net.onnx", "answer": "yes", "reason": "measured"}
    baseline = {"name": "net.onnx", "ratios": [], "verdict": verdict}
    times.write_text(json.dumps({**_times(quantized), "baseline": baseline}))

    def shown(*names: Path) -> tuple[set[str], tuple[str, ...]]:
        """Return the titles of the last model, and its notes."""
        model = view_model(*names).models[-1]
        return {known.title for known in model.known}, model.notes

    assert {"own error", "time"} <= shown(net, quantized)[0]
    assert any("is faster" in note for note in shown(net, quantized)[1])
    titles, notes = shown(other, quantized)
    assert "time" in titles
    assert "own error" not in titles
    assert not any("is faster" in note for note in notes)
    with pytest.raises(UsageError, match="another model"):
        view_model(other, quantized, results=[errors])
    del record["digests"]
    errors.write_text(json.dumps(record))
    titles, notes = shown(net, quantized)
    assert "own error" not in titles
    assert any("errors.json" in note for note in notes)


def test_proof_and_stages_of_a_build_are_shown(net: Path) -> None:
    """A proof states the own error of modules; a manifest nodes, size and quality of each stage."""
    boundaries = [{"identity": {"tag": f"/Net/Layer.{layer}"}} for layer in range(2)]
    rows = [{"boundary": boundaries[0], "own_error": 0.1}, {"boundary": boundaries[1]}]
    part = {"name": "model", "fingerprint": file_fingerprint(net), "tolerance": 1e-3, "modules": rows}
    part["sha256"] = file_digest(net)
    (net.parent / "proof").mkdir()
    (net.parent / "proof" / "proof.json").write_text(json.dumps({"schema_version": 1, "parts": [part]}))
    stage = {"name": "quantize", "status": "run", "nodes": 8, "summary": "SQNR 30.0 dB"}
    files = [{"name": net.name, "size_bytes": net.stat().st_size, "sha256": "0" * 64}]
    built = {
        "name": "model",
        "model": files,
        "stages": [{**stage, "files": files}, {"name": "compile", "status": "skipped"}],
    }
    manifest = {"manifest_version": 2, "status": "done", "files": [net.name], "parts": [built]}
    net.with_name("build_manifest.json").write_text(json.dumps(manifest))
    page = view_model(net)
    assert {"/Net/Layer.0": 0.1} == _known(page, "own error")
    assert {"/Net/Layer.0": "no", "/Net/Layer.1": "undecided"} == _known(page, "adds no error")
    assert ["quantize"] == [*page.models[0].build]
    assert "SQNR 30.0 dB" in page.models[0].build["quantize"]
    assert () == view_model(_saved(_scaled(_layers()), net)).models[0].known
    changed = view_model(_saved(_layers(2), net))
    assert {} == changed.models[0].build
    assert [] == [known for known in changed.models[0].known if known.title == "own error"]


def test_picture_has_the_modules_of_the_chart(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """An SVG is XML with folded modules, their legend and no reference to other files; a PNG has twice its pixels."""
    svg, png, both = tmp_path / "picture.svg", tmp_path / "picture.PNG", tmp_path / "both.svg"
    for models, picture in ((pair[:1], svg), (pair[:1], png), (pair, both)):
        assert 0 == run_here("view", *models, "-o", picture).code
    text = svg.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    texts = ["".join(entry.itertext()) for entry in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {f"Layer.0 … .{LAYERS - 1} ({LAYERS} ×)", f"Proj ({LAYERS} ×)", "width: parameters", "colour: class"} <= {
        *texts
    }
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "colour: change" in both.read_text(encoding="utf-8")
    with Image.open(png) as image:
        assert image.size == tuple(2 * int(root.attrib[name]) for name in ("width", "height"))


def test_picture_of_bits_has_one_scale(pair: tuple[Path, Path]) -> None:
    """A module has the bits of the weights inside it; equal numbers have equal colours in both models."""
    page = view_model(*pair, width="bytes of weights", colour="bits of a parameter")
    space = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in ET.fromstring(page.svg()).iter(f"{space}svg") if box.find(f"{space}title") is not None]
    names = [str(box.findtext(f"{space}title")) for box in boxes]
    roots = [place for place, name in enumerate(names) if name.startswith("Net")]
    (before, after) = (page.models[side].total.bits for side in (0, 1))
    assert after is not None
    assert [f"{before:.3g}", f"{after:.3g}"] == [names[place].split()[1] for place in roots]
    hot = [boxes[place].find(f"{space}rect[@fill-opacity]") for place in roots]
    assert ["1.00", "0.00"] == [box.attrib["fill-opacity"] for box in hot if box is not None]


def test_texts_of_a_picture_are_no_markup(tmp_path: Path) -> None:
    """Names of a foreign file are texts, also of a module with many lines."""
    model = _layers()
    for node, name in zip(model.graph, NAMES, strict=False):
        write_tag(node, NodeTag(f"/Net/{name.replace('/', '')}", name, "direct"))
    page = view_model(_saved(model, tmp_path / "net.onnx"), width="nodes")
    root = ET.fromstring(page.svg())
    assert not {"script", "img", "b"} & {element.tag.rpartition("}")[2] for element in root.iter()}
    assert page.png()[:4] == b"\x89PNG"


@pytest.mark.parametrize("option", ["width", "colour"])
def test_unknown_number_is_refused(net: Path, option: str) -> None:
    """The error lists the known ones; a text is no width."""
    with pytest.raises(UsageError, match=option) as caught:
        view_model(net, **{option: "tim"})
    assert "parameters" in caught.value.hint
    assert "MACs" not in caught.value.hint  # the batch is dynamic
    with pytest.raises(UsageError):
        view_model(net, width="class")


def test_pair_states_changes_by_module(pair: tuple[Path, Path]) -> None:
    """Quantized modules are named, and the nodes that replaced others."""
    page = view_model(*pair)
    changes = _part(page, 1)["measures"]["change"]
    assert page.differing == sum(change not in ("changed inside", "equal") for change in changes)
    assert changes[0] == "changed inside"
    assert {"quantized"} == {*changes[2::2]}  # the products; a quantizer of activations is new in the layers
    assert [False, True] == [_part(page, side)["isQuantized"] for side in (0, 1)]
    quantized = [change for change in changes if change == "quantized"]
    assert f"{len(quantized)} quantized" in (page.document().answer or "")
    replaced = page.data["replaced"]["model"]
    assert ["/layers.0/proj/MatMul"] in replaced.values()
    assert [] in replaced.values()


def test_file_without_tags_is_a_flat_graph(tmp_path: Path) -> None:
    """The page says so, and divides the graph into groups that can be laid out."""
    page = view_model(_saved(_layers(200, is_tagged=False), tmp_path / "flat.onnx"))
    assert any("no tags" in note for note in page.models[0].notes)
    root = page.data["templates"][_part(page)["template"]]
    assert 3 == len(root["x"])
    assert 400 == page.models[0].total.nodes


def test_unknown_numbers_are_measured(pair: tuple[Path, Path]) -> None:
    """Times of both models and errors of the second are measured, as no earlier run has."""
    page = view_model(*pair, measure=True)
    known = [{entry.title for entry in model.known if entry.source == "this run"} for model in page.models]
    assert "time" in known[0]
    assert {"time", "own error", "SQNR"} <= known[1]
    assert any(page.models[1].notes)  # the verdict on the time


def test_histograms_show_the_values_of_weights(net: Path) -> None:
    """Each weight has its smallest and largest value, and the height of each bin."""
    histograms = _part(view_model(net, histograms=True))["histograms"]
    values = _layers().graph.initializers["layers.0.proj.weight"].const_value
    assert values is not None
    low, high, heights = histograms["layers.0.proj.weight"]
    # The page displays three digits.
    np.testing.assert_allclose([low, high], [values.numpy().min(), values.numpy().max()], rtol=5e-3)
    assert "z" in heights  # the highest bin
    assert LAYERS == len(histograms)


def test_histograms_of_extreme_values() -> None:
    """Equal large values, and ends of float32 whose difference exceeds it, have bins; the ends are of all values."""
    outlier = np.zeros(_MOST_VALUES * 2, np.float16)
    outlier[1] = 8
    values = [np.full(64, 1e20, np.float32), np.array([-3e38, 3e38] * 32, np.float32), outlier, np.full(64, np.inf)]
    found = [_histogram(entry) for entry in values]
    assert [(1e20, 1e20), (-3e38, 3e38), (0, 8)] == [entry and entry[:2] for entry in found[:3]]
    assert [1, 2, 1] == [len(entry[2].replace("0", "")) for entry in found[:3] if entry]
    assert found[3] is None


def test_replaced_nodes_without_names() -> None:
    """A node without a name is identified by its first output, as most nodes of other tools have no name."""

    def graph(*nodes: tuple[str, str, str]) -> onnx.ModelProto:
        made = [onnx.helper.make_node(operator, [read], [written]) for operator, read, written in nodes]
        return onnx.helper.make_model(onnx.helper.make_graph(made, "g", [], []))

    before = graph(("Relu", "x", "a"), ("Sigmoid", "a", "b"), ("Tanh", "b", "c"), ("Abs", "c", "y"))
    replaced, replaced_by = _find_replaced_nodes(
        before, graph(("Relu", "x", "a"), ("Selu", "a", "c"), ("Abs", "c", "y"))
    )
    assert {"c": ["c", "b"]} == replaced
    assert {"b": ["c"], "c": ["c"]} == replaced_by


def test_checkpoint_is_shown_before_its_export() -> None:
    """The modules of a factory have parameters and no nodes."""
    factory = Path(__file__).parents[2] / "e2e" / "nets.py"
    model = view_model(f"{factory}:good").models[0]
    assert model.parts[0].path is None
    assert model.total.parameters > 0
    assert model.total.nodes == 0


def test_checkpoint_has_no_numbers_of_a_graph(net: Path) -> None:
    """Nodes and bytes of a checkpoint are unknown, not 0."""
    checkpoint = f"{Path(__file__).parents[2] / 'e2e' / 'nets.py'}:good"
    page = view_model(checkpoint, net, width="nodes")
    with pytest.raises(UsageError, match="nodes"):
        view_model(checkpoint, width="nodes")
    figures = {figure.label: figure.value for figure in page.document().figures}
    assert f"– → {page.models[1].total.nodes}" == figures["nodes"]
    assert "– → 4.1 kB" == figures["weights"]
    assert ">0<" not in page.svg()


@pytest.mark.parametrize("option", ["measure", "histograms"])
def test_checkpoint_has_no_times_and_no_histograms(net: Path, option: str) -> None:
    """An option that needs the graph is refused, also beside a file."""
    factory = Path(__file__).parents[2] / "e2e" / "nets.py"
    with pytest.raises(UsageError, match=option):
        view_model(net, f"{factory}:good", **{option: True})


def test_many_inner_modules_are_grouped(tmp_path: Path) -> None:
    """The items of a module with many layers are divided into groups; numbers of modules stay those of the file."""
    net = _saved(_layers(200), tmp_path / "deep.onnx")
    net.with_name("times.json").write_text(json.dumps(_times(net)))
    page = view_model(net)
    root = page.data["templates"][_part(page)["template"]]
    assert ["items 1 … 150", "items 151 … 200"] == [item[0] for item in root["x"]]
    assert 401 == page.models[0].parts[0].modules
    assert [0.5, None, 0.0, None, 1.0] == _part(page)["measures"]["time"][:5]


def test_command_writes_the_page(net: Path) -> None:
    """The command prints a summary and writes one file, which it does not overwrite unasked."""
    output = net.with_name("page.html")
    assert 0 == run_here("view", net, "-o", output).code
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert 0 != run_here("view", net, "-o", output).code
    record = json.loads(run_here("view", net, "-o", output, "--overwrite", "-f", "json").out)
    assert 2 * LAYERS == record["models"][0]["parts"][0]["total"]["nodes"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("net.onnx",),
        ("-o", "page.html"),
        ("net.onnx", "net.onnx", "-o", "page.html"),
        ("net.onnx", "-o", "page.pdf"),
    ],
    ids=str,
)
def test_incomplete_command_is_refused(net: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    """A page and one or two models are required; nothing is written otherwise."""
    monkeypatch.chdir(net.parent)
    assert 2 == run_here("view", *arguments).code
    assert not [*net.parent.glob("page.*")]


def _written(page: ModelPage, path: Path) -> Path:
    path.write_text(render_html(page.document()), encoding="utf-8")
    return path


def _texts(browser: Browser, selector: str) -> list[str]:
    texts: list[str] = browser.run(f"[...document.querySelectorAll({selector!r})].map(node => node.textContent)")
    return texts


def _search(browser: Browser, text: str) -> None:
    """Type a text into the search field."""
    browser.run("document.body.focus()")
    browser.press("/")
    browser.send("Input.insertText", text=text)


def _click(browser: Browser, selector: str, text: str) -> None:
    """Click the first element of a selector whose text starts with a text, as an icon of a tree may precede."""
    found = browser.run(
        f"(() => {{ const found = [...document.querySelectorAll({selector!r})].find(node => "
        f"node.textContent.replace(/^[▸▾▶] /, '').startsWith({text!r})); "
        "found?.dispatchEvent(new MouseEvent('click', {bubbles: true, cancelable: true})); return !!found; })()"
    )
    assert found, f"no {selector} with {text}: {_texts(browser, selector)}"


def _choose(browser: Browser, name: str, words: str, side: int = 0) -> None:
    """Choose width or colour of a chart."""
    browser.run(
        f"(() => {{ const choice = document.querySelectorAll('.{name}')[{side}]; "
        f"choice.value = [...choice.options].find(option => option.textContent === {words!r}).value; "
        "choice.dispatchEvent(new Event('change')); })()"
    )


def _errors(net: Path, *errors: float) -> dict[str, Any]:
    """Return the JSON of ``winml compare --by-module`` in its smallest form: one error for each layer."""
    rows = [{"tag": f"/Net/Layer.{layer}", "own_error": error} for layer, error in enumerate(errors)]
    return {"modules": rows, "fingerprint": file_fingerprint(net), "digests": {"candidate": model_digest(net)}}


@pytest.mark.reader("chromium")
@pytest.mark.parametrize(
    ("errors", "parts"),
    [
        ((0.0, 0.001, 0.01, 0.1), (0, 0, 50, 100)),
        ((0.1, 0.1, 0.1, 0.1), (0, 0, 0, 0)),
        ((0.0, 0.0, 0.0, 0.1), (0, 0, 0, 0)),
    ],
    ids=["zero", "equal", "one"],
)
def test_errors_are_colours(
    browser: Browser, net: Path, tmp_path: Path, errors: tuple[float, ...], parts: tuple[float, ...]
) -> None:
    """The scale is logarithmic over the errors above 0; an error of 0 has the colour of its low end, unknown a grey."""
    net.with_name("errors.json").write_text(json.dumps(_errors(net, *errors)))
    browser.open(_written(view_model(net), tmp_path / "page.html"))
    browser.run("document.querySelector('.fold').click()")
    _choose(browser, "colour", "by own error")
    found = browser.run(
        "[...document.querySelectorAll('.plot .heat')].map(box => box.style.background.match(/([0-9.]+)%/)[1])"
    )
    np.testing.assert_allclose([float(part) for part in found], parts, atol=0.1)
    assert 1 + 2 * LAYERS - LAYERS == len(_texts(browser, ".plot button:not(.heat)"))
    # The line and the labels state both chosen numbers.
    assert any(f"{errors[-1]:g} · " in text for text in _texts(browser, ".plot .heat"))
    assert "error unknown" in _texts(browser, ".about output")[0]
    assert "own error" in _texts(browser, ".legend")[0]
    assert [] == browser.problems


@pytest.mark.reader("chromium")
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_page_fits_the_window(
    browser: Browser, pair: tuple[Path, Path], tmp_path: Path, width: int, is_dark: bool
) -> None:
    """Both models fit windows from a telephone to a large screen, without an error of a script."""
    browser.open(_written(view_model(*pair), tmp_path / "page.html"), width=width, is_dark=is_dark)
    assert [] == browser.problems
    assert [] == browser.wider_elements()


@pytest.mark.reader("chromium")
def test_modules_zoom_and_the_graph_follows(browser: Browser, net: Path, tmp_path: Path) -> None:
    """A click on folded layers zooms both views; a click in the graph opens a module down to its nodes."""
    net.with_name("times.json").write_text(json.dumps(_times(net)))
    browser.open(_written(view_model(net), tmp_path / "page.html"))
    _choose(browser, "width", "time")
    assert ["6.5 ms, 100.0 %", "6 ms, 92.3 %"] == _texts(browser, ".plot button span:last-child")  # no time of a Proj
    _click(browser, ".plot button", "Layer.0")
    assert "Layer.0" in _texts(browser, ".graph .path b")[0]
    assert ["layers.*"] == browser.run(
        "[...document.querySelectorAll('.details dd')].map(cell => cell.textContent).filter(text => text.includes('*'))"
    )
    before = len(_texts(browser, ".flow .box.node"))
    _click(browser, ".flow .box.module", "Proj")
    assert before < len(_texts(browser, ".flow .box.node"))
    _click(browser, ".flow .box.node", "MatMul")
    details = _texts(browser, ".details")[0]
    assert "/layers.0/proj/MatMul" in details
    assert "layers.0.proj.weight" in details
    assert f"float32[batch, {SIZE}]" in details
    assert [] == browser.problems


@pytest.mark.reader("chromium")
def test_page_opens_with_width_and_colour(browser: Browser, net: Path, tmp_path: Path) -> None:
    """The choices of the chart are those of the command."""
    net.with_name("times.json").write_text(json.dumps(_times(net)))
    colour = "bits of a parameter"
    browser.open(_written(view_model(net, width="time", colour=colour), tmp_path / "page.html"))
    chosen = "[...document.querySelectorAll('.width, .colour')].map(choice => choice.selectedOptions[0].textContent)"
    assert ["time", f"by {colour}"] == browser.run(chosen)
    assert [] == browser.problems


@pytest.mark.reader("chromium")
def test_notebook_shows_the_page(browser: Browser, net: Path, tmp_path: Path) -> None:
    """The page runs in the frame of a notebook, where it may run no other script."""
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset=utf-8>{view_model(net)._repr_html_()}", encoding="utf-8")
    browser.open(notebook)
    browser.run("globalThis.inner = () => document.querySelector('iframe').contentDocument")
    browser.run("inner().querySelector('.flow .box.module').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert "Layer.0" == browser.run("inner().querySelector('.details h3').textContent")
    assert [] == browser.problems


@pytest.mark.reader("chromium")
def test_keys_walk_through_the_graph(browser: Browser, net: Path, tmp_path: Path) -> None:
    """Arrow keys follow the data, Enter opens a module, Escape returns to the module around it."""
    browser.open(_written(view_model(net), tmp_path / "page.html"))
    browser.run("document.querySelector('.flow [tabindex=\"0\"]').focus()")
    label = "document.activeElement.getAttribute('aria-label')"
    assert browser.run(label).startswith("Layer.0")
    browser.press("ArrowDown")
    assert browser.run(label).startswith("Layer.1")
    browser.press("Enter")
    assert "true" == browser.run("document.activeElement.getAttribute('aria-expanded')")
    browser.run("document.activeElement.dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert ["Layer.1"] == _texts(browser, ".graph .path b")
    assert browser.run("document.activeElement.closest('.flow') !== null")
    assert "Layer.1" in _texts(browser, ".details h3")
    browser.press("Escape")
    assert ["Net"] == _texts(browser, ".graph .path b")
    assert browser.run(label).startswith("Layer.1")


@pytest.mark.reader("chromium")
@pytest.mark.parametrize(
    ("text", "count"),
    [("op:MatMul", LAYERS), ("layers.*", LAYERS), ("Proj", LAYERS), ("layers.2.proj", 2), ("nothing", 0)],
)
def test_search_finds_modules_and_nodes(browser: Browser, net: Path, tmp_path: Path, text: str, count: int) -> None:
    """A text is an operator, a selector or a part of a name; Enter shows the first result in the graph."""
    browser.open(_written(view_model(net), tmp_path / "page.html"))
    _search(browser, text)
    found = _texts(browser, ".search .results button")
    # ``Proj`` is the class of a module and, in other case, a part of the names of nodes.
    assert count <= len(found) if text == "Proj" else count == len(found)
    browser.press("Enter")
    assert (count > 0) == bool(_texts(browser, ".flow .box.selected"))


@pytest.mark.reader("chromium")
def test_two_models_are_compared(browser: Browser, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A module is selected in both graphs; the table has both values and their ratio, and nodes are marked."""
    browser.open(_written(view_model(*pair), tmp_path / "page.html"))
    _click(browser, "#graph1 .box.module", "Layer.1")
    _click(browser, "#graph1 .box.module", "Proj")
    assert 2 == len(_texts(browser, "#graph2 .box.module.open"))
    rows = dict(
        zip(_texts(browser, ".details tr td:first-child"), _texts(browser, ".details tr td:last-child"), strict=True)
    )
    assert rows["parameters"] == "equal"
    assert rows["bytes of weights"].startswith("×\u00a00.")
    assert any("new" in text for text in _texts(browser, "#graph2 .box.changed"))
    assert [] == browser.problems


@pytest.mark.reader("chromium")
def test_layers_with_different_changes_are_not_folded(browser: Browser, net: Path, tmp_path: Path) -> None:
    """A layer that stays float is a box of its own, and the selectors of the others do not match it."""
    quantized = net.with_name("int8.onnx")
    quantize_model(net, quantized, precision="int8", exclude=("layers.3",))
    browser.open(_written(view_model(net, quantized), tmp_path / "page.html"))
    assert "quantized" in _texts(browser, ".answer")[0]
    names = _texts(browser, ".boxes:first-of-type .plot button span:first-child")
    # The layer before the float one has no quantizer of its output.
    assert {"Layer.0 … .1 (2 ×)", "Layer.2", "Layer.3"} <= set(names)
    assert not any("several" in text for text in _texts(browser, ".legend"))
    _click(browser, ".plot button", "Layer.0 … .1")
    assert "layers.0, layers.1" in _texts(browser, ".details dd")
    # A quantized file cannot be quantized again: the command names the file that it came from.
    commands = _texts(browser, ".commands code")
    assert any(f"quantize {net} --exclude layers.0 --exclude layers.1" in text for text in commands)
    _click(browser, "#graph2 .box.module", "Proj")
    commands = _texts(browser, ".commands code")
    assert not any(f"quantize {quantized}" in text for text in commands)
    assert any(f"quantize {net} --exclude layers.0.proj" in text for text in commands)
    browser.open(_written(view_model(quantized), tmp_path / "page.html"))
    assert not any("quantize" in text.split() for text in _texts(browser, ".commands code"))


@pytest.mark.reader("chromium")
def test_choices_and_search_apply_to_both_models(browser: Browser, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Colour, folding, the tools of the graph and a result of the search show the same place in both models."""
    browser.open(_written(view_model(*pair), tmp_path / "page.html"))
    assert 2 == len(_texts(browser, ".plot button:first-child"))
    browser.run("document.querySelector('.fold').click()")
    assert [False, False] == browser.run("[...document.querySelectorAll('.fold')].map(fold => fold.checked)")
    _choose(browser, "colour", "by class")
    fills = "[1, 2].map(n => document.querySelector(`#graph${n} .box.module rect`).style.fill)"
    boxes = "[0, 1].map(n => document.querySelectorAll('.plot')[n].children[1].style.background)"
    assert browser.run(boxes) == browser.run(fills)
    browser.run("document.querySelector('.deeper').click()")
    assert LAYERS == len(_texts(browser, "#graph1 .box.open")) == len(_texts(browser, "#graph2 .box.open"))
    _search(browser, "layers.2.proj")
    browser.press("Enter")
    assert ["Layer.2", "Layer.2"] == _texts(browser, ".graph .path b")
    assert 2 == len(_texts(browser, ".flow .box.selected"))
    assert "Proj" in browser.run("document.activeElement.getAttribute('aria-label')")
    # The description is in the window.
    place = "document.querySelector('.details h3').getBoundingClientRect()"
    assert browser.run(f"{place}.top >= 0 && {place}.bottom <= innerHeight")
    assert [] == browser.problems


@pytest.mark.reader("chromium")
def test_graph_is_moved_and_scaled(browser: Browser, net: Path, tmp_path: Path) -> None:
    """A pointer drags the graph without a click; the button for a smaller graph never enlarges it."""
    browser.open(_written(view_model(_saved(_layers(150), net)), tmp_path / "page.html"))
    browser.run("document.querySelector('.flow').scrollIntoView()")
    box = browser.run("(() => { const b = document.querySelector('.flow .box.module').getBoundingClientRect(); "
                      "return [b.x + 5, b.y + 5]; })()")  # fmt: skip
    for kind, lift in (("mousePressed", 0), ("mouseMoved", 30), ("mouseReleased", 30)):
        place = {"x": box[0], "y": box[1] - lift}
        browser.send("Input.dispatchMouseEvent", type=kind, **place, button="left", buttons=1, clickCount=1)
    assert 30 == browser.run("document.querySelector('.flow').scrollTop")
    assert [] == _texts(browser, ".flow .box.open")
    browser.run("document.querySelector('.fit').click()")
    width = "document.querySelector('.flow svg').getBoundingClientRect().width"
    before = browser.run(width)
    browser.run("document.querySelector('.out').click()")
    assert browser.run(width) <= before
    browser.run("document.querySelector('.tensor').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert "1 tensor" in _texts(browser, ".details")[0]
    assert [] == browser.problems


@pytest.mark.reader("chromium")
def test_search_lists_all_results_and_weights(browser: Browser, net: Path, tmp_path: Path) -> None:
    """A weight is found by name and shown at its reader; a button lists the results after the first."""
    browser.open(_written(view_model(_saved(_layers(100), net)), tmp_path / "page.html"))
    _search(browser, "op:Add")
    _click(browser, ".results button", "40 more")
    assert 100 == len(_texts(browser, ".results button"))
    browser.run("document.querySelector('.search input').value = ''")
    _search(browser, "7.proj.weight")
    _click(browser, ".results button", "layers.7.proj.weight")
    assert "layers.7.proj.weight" in _texts(browser, ".details h3")
    assert "MatMul" in browser.run("document.activeElement.getAttribute('aria-label')")
    assert [] == browser.problems


@pytest.mark.reader("chromium")
def test_commands_are_copied(browser: Browser, net: Path, tmp_path: Path) -> None:
    """The command of a module has the selector that the verbs understand."""
    browser.open(_written(view_model(net), tmp_path / "page.html"))
    _click(browser, ".flow .box.module", "Layer.1")
    browser.run("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }")
    _click(browser, ".details .copy", "copy")
    assert f"winml perf {net} --module layers.1" == browser.run("window.copied")
    assert 0 == run_here("inspect", net, "--module", "layers.1").code


@pytest.mark.reader("chromium")
def test_graph_without_nodes_has_a_page(browser: Browser, net: Path, tmp_path: Path) -> None:
    """No number of its root is known or above 0."""
    empty = _saved(ir.Model(ir.Graph([], [], nodes=[], name="empty"), ir_version=10), tmp_path / "empty.onnx")
    for models in ((empty,), (net, empty)):
        browser.open(_written(view_model(*models), tmp_path / "page.html"))
        assert [] == browser.problems
        assert "empty" in _texts(browser, ".plot button")[-1]


@pytest.mark.reader("chromium")
def test_command_of_folded_modules_selects_no_other(browser: Browser, tmp_path: Path) -> None:
    """A wildcard would also exclude the last layer, which differs from the folded ones."""
    model = _layers()
    write_tag(model.graph[-1], NodeTag("/Net/Layer.3/Tail", "layers.3.tail", "direct"))
    browser.open(_written(view_model(_saved(model, tmp_path / "net.onnx")), tmp_path / "page.html"))
    _click(browser, ".plot button", "Layer.0")
    (command,) = _texts(browser, ".details .commands code")
    assert "--exclude layers.0 --exclude layers.1 --exclude layers.2 -o" in command


@pytest.mark.reader("chromium")
def test_foreign_names_are_text(browser: Browser, tmp_path: Path) -> None:
    """No name of a node, module, value or attribute of a file becomes an element or a script."""
    value = x = ir.val("<b>x</b>", dtype=ir.DataType.FLOAT, shape=["<i>n</i>", 4])
    nodes = []
    for number, name in enumerate(NAMES):
        node = ir.node("LeakyRelu", [value], name=name, attributes={"note": name} if number else {})
        node.outputs[0].name = f"{name}/out"
        write_tag(node, NodeTag(f"/Net/{name.replace('/', '')}", name, "direct"))
        node.metadata_props["foreign"] = name
        nodes.append(node)
        value = node.outputs[0]
    value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["<i>n</i>", 4])
    graph = ir.Graph([x], [value], nodes=nodes, opset_imports={"": 20}, name=NAMES[0])
    file = _saved(ir.Model(graph, ir_version=10), tmp_path / "foreign.onnx")
    other = _saved(ir.Model(graph, ir_version=9), tmp_path / "other.onnx")
    browser.open(_written(view_model(file, other), tmp_path / "pair.html"))
    assert [] == browser.problems
    assert [] == _texts(browser, ".flow .box.changed")
    browser.open(_written(view_model(file), tmp_path / "page.html"))
    browser.run("document.querySelector('.deeper').click()")
    for name in ("<b>x", NAMES[0]):
        _search(browser, name)
        assert any(name in text for text in _texts(browser, ".search .results button, .flow title"))
    browser.run(
        "[...document.querySelectorAll('.flow .box')].forEach(box => box.dispatchEvent(new MouseEvent('click')))"
    )
    assert 0 == browser.run("document.querySelectorAll('img, svg b, .details b, .details i').length")
    assert "run" != browser.run("document.title")
    assert "\u202e" not in browser.run("document.body.textContent")
    assert [] == browser.wider_elements()
    assert [] == browser.problems
    # If a name became an element in spite of that, its script would not run.
    browser.run(
        f"document.body.insertAdjacentHTML('beforeend', `<b onclick=\"{RUN}\">x</b>`); document.body.lastChild.click()"
    )
    assert "run" != browser.run("document.title")
