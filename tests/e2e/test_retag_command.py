"""``winml retag``: tags for files of other tools, and no other change."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import graphs
from e2e.workplace import Workplace
from winml.modelkit.tags.tagging import measure_coverage

GRAPH = f"""agraph (float[2, 4] x) => (float[2, 4] z)
<float[4, 4] w = {{{",".join("0" * 16)}}}, float[4] w_bias = {{0, 0, 0, 0}}> {{
    i = Identity(x)
    m = MatMul(i, w)
    a = Add(m, w_bias)
    r = Relu(a)
    n = MatMul(r, w)
    z = Tanh(n)
}}"""


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A workplace with a tagged model, and an untagged one that ONNX Runtime made of it."""
    made = Workplace(tmp_path)
    made.folder.mkdir()
    ir.save(graphs.parse(GRAPH), made.folder / "before.onnx")
    optimize(made.folder / "before.onnx", made.folder / "after.onnx")
    assert 0 == measure_coverage(ir.load(made.folder / "after.onnx")).tagged
    return made


def optimize(source: Path, target: Path) -> None:
    """Run ONNX Runtime's offline optimizer."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def keep_outside(source: Path, target: Path) -> None:
    """Write a model with all its weights in ``after.data``."""
    ir.save(ir.load(source), target, external_data="after.data", size_threshold_bytes=0)


def flat_model(path: Path) -> onnx.ModelProto:
    """Return a flat model without metadata on model and nodes."""
    model = onnx.load(path, load_external_data=False)
    model.ClearField("metadata_props")
    for node in model.graph.node:
        node.ClearField("metadata_props")
    return model


def test_retag_writes_a_tagged_copy_with_statistics(place: Workplace) -> None:
    """Every node has a tag, the checker accepts the file, and only metadata differs; both inputs stay."""
    inputs = place.files()
    outcome = place.winml("retag", "before.onnx", "after.onnx", "-o", "tagged.onnx")
    assert (0, "") == (outcome.code, outcome.err)
    written = place.folder / "tagged.onnx"
    coverage = measure_coverage(ir.load(written))
    assert coverage.is_complete
    assert f"{coverage.nodes} of {coverage.nodes} nodes tagged" in outcome.out
    onnx.checker.check_model(str(written))
    assert flat_model(place.folder / "after.onnx") == flat_model(written)
    assert inputs == {name: content for name, content in place.files().items() if name != "tagged.onnx"}


def test_retag_json_is_the_only_thing_on_stdout(place: Workplace) -> None:
    """Stdout is one object with the counts of each matching rule, which add up."""
    outcome = place.winml("retag", "before.onnx", "after.onnx", "-o", "tagged.onnx", "--format", "json")
    record = json.loads(outcome.out)
    assert (record["nodes"], 100.0) == (record["coverage"]["tagged"], record["coverage"]["percent"])
    assert record["nodes"] == sum(record["ways"].values()) == sum(record["sources"].values())
    assert "tagged.onnx" == record["model_path"]
    assert (place.folder / "tagged.onnx").stat().st_size == record["size_bytes"]


def test_retag_in_place_needs_overwrite(place: Workplace) -> None:
    """Without an output the file itself is changed, with --overwrite only."""
    before = place.files()
    refused = place.winml("retag", "before.onnx", "after.onnx")
    assert 2 == refused.code
    assert "--overwrite" in refused.err
    assert before == place.files()
    assert 0 == place.winml("retag", "before.onnx", "after.onnx", "--overwrite", "-q").code
    assert measure_coverage(ir.load(place.folder / "after.onnx")).is_complete
    assert {"before.onnx", "after.onnx"} == set(place.files())


@pytest.fixture
def external(place: Workplace) -> Workplace:
    """The workplace with the weights of ``after.onnx`` as external data, in a separate folder."""
    (place.folder / "big").mkdir()
    keep_outside(place.folder / "after.onnx", place.folder / "big" / "after.onnx")
    return place


def test_retag_in_the_same_folder_shares_the_weights(external: Workplace) -> None:
    """External data is not copied within its folder; a note says that two files use it."""
    before = external.files()
    outcome = external.winml("retag", "before.onnx", "big/after.onnx", "-o", "big/tagged.onnx")
    assert 0 == outcome.code
    assert "after.data" in outcome.out
    assert {*before, "big/tagged.onnx"} == set(external.files())
    assert flat_model(external.folder / "big" / "after.onnx") == flat_model(external.folder / "big" / "tagged.onnx")


def test_retag_into_another_folder_copies_the_weights(external: Workplace) -> None:
    """A file in another folder gets a copy of the data."""
    outcome = external.winml("retag", "before.onnx", "big/after.onnx", "-o", "new/tagged.onnx")
    assert 0 == outcome.code
    written = external.files()
    (data,) = (name for name in written if name.startswith("new/tagged.onnx."))
    assert written["big/after.data"] == written[data]
    kept = flat_model(external.folder / "new" / "tagged.onnx")
    for tensor in kept.graph.initializer:
        assert Path(data).name == tensor.external_data[0].value
        tensor.external_data[0].value = "after.data"
    assert flat_model(external.folder / "big" / "after.onnx") == kept
    onnxruntime.InferenceSession(external.folder / "new" / "tagged.onnx", providers=["CPUExecutionProvider"])


def untagged(place: Workplace) -> None:
    """Remove the tags of the model before."""
    model = ir.load(place.folder / "before.onnx")
    for node in model.graph:
        node.metadata_props.clear()
    ir.save(model, place.folder / "before.onnx")


def unrelated(place: Workplace) -> None:
    """Replace the model after by another model."""
    text = "agraph (float[3] u) => (float[3] v) { t = Tanh(u)  v = Exp(t) }"
    model = graphs.parse(text)
    for node in model.graph:
        node.metadata_props.clear()
        node.name = ""
    ir.save(model, place.folder / "after.onnx")


def unrelated_of_the_same_signature(place: Workplace) -> None:
    """Replace the model after by another model with the same names of input and output."""
    unrelated(place)
    model = ir.load(place.folder / "after.onnx")
    model.graph.inputs[0].name, model.graph.outputs[0].name = "x", "z"
    ir.save(model, place.folder / "after.onnx")


def no_onnx(place: Workplace) -> None:
    """Replace the model after by a text."""
    (place.folder / "after.onnx").write_text("no model")


def missing(place: Workplace) -> None:
    """Remove the model after."""
    (place.folder / "after.onnx").unlink()


def data_missing(place: Workplace) -> None:
    """Remove the weights of the model after."""
    keep_outside(place.folder / "after.onnx", place.folder / "after.onnx")
    (place.folder / "after.data").unlink()


def output_exists(place: Workplace) -> None:
    """Create a file at the output path."""
    (place.folder / "tagged.onnx").write_text("mine")


def output_is_a_file_below(place: Workplace) -> None:
    """Create a folder at the output path."""
    (place.folder / "tagged.onnx").mkdir()


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (untagged, 1, ("before.onnx has no tags", "winml export")),
        (unrelated, 1, ("does not match", "0 of its 2 nodes")),
        (unrelated_of_the_same_signature, 1, ("does not match", "0 of its 2 nodes")),
        (no_onnx, 1, ("after.onnx is not an ONNX file",)),
        (missing, 2, ("after.onnx: no such file",)),
        (data_missing, 1, ("after.data is missing",)),
        (output_exists, 2, ("tagged.onnx exists already", "--overwrite")),
        (output_is_a_file_below, 2, ("tagged.onnx is a directory",)),
    ],
)
def test_retag_refusals_have_a_remedy_and_change_no_file(
    damage: object, code: int, words: tuple[str, ...], place: Workplace
) -> None:
    """The refusal has one sentence, a remedy and the right exit code, and no file changes."""
    assert callable(damage)
    damage(place)
    before = place.files()
    outcome = place.winml("retag", "before.onnx", "after.onnx", "-o", "tagged.onnx")
    assert (code, "") == (outcome.code, outcome.out)
    assert before == place.files()
    assert 2 == len(outcome.complaint)
    assert outcome.complaint[0].startswith("error: ")
    assert [] == [word for word in words if word not in outcome.err]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("before.onnx", "input before.onnx"),
        ("tagged", "in .onnx"),
        ("", "empty"),
    ],
)
def test_retag_output_that_cannot_be_is_refused(output: str, words: str, place: Workplace) -> None:
    """The original is never replaced, and an output is an ONNX file."""
    before = place.files()
    outcome = place.winml("retag", "before.onnx", "after.onnx", "-o", output, "--overwrite")
    assert 2 == outcome.code
    assert words in outcome.err
    assert before == place.files()


@pytest.mark.parametrize("holder", ["before.onnx", "after.onnx"])
def test_retag_output_never_replaces_weights(holder: str, place: Workplace) -> None:
    """A data file may have the name of a model; it stays even with --overwrite."""
    model = ir.load(place.folder / holder)
    ir.save(model, place.folder / holder, external_data="weights.onnx", size_threshold_bytes=0)
    files = place.files()
    outcome = place.winml("retag", "before.onnx", "after.onnx", "-o", "weights.onnx", "--overwrite")
    assert 2 == outcome.code
    assert "input weights.onnx" in outcome.err
    assert files == place.files()


def test_retag_imports_no_torch(place: Workplace) -> None:
    """The verb works on files alone."""
    hidden = place.folder / "hidden"
    hidden.mkdir()
    for name in ("torch", "transformers"):
        (hidden / f"{name}.py").write_text("raise ImportError('imported')")
    blind = Workplace(place.root, variables={"PYTHONPATH": str(hidden)})
    assert 0 == blind.winml("retag", "before.onnx", "after.onnx", "-o", "tagged.onnx").code
