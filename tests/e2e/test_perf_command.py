"""``winml perf``, as a user runs it: results, and refusals of wrong requests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from e2e.workplace import Outcome, Workplace
from winml.modelkit.profile.statistics import summarize

NET = """<ir_version: 10, opset_import: ["" : 17]>
g (float[batch, 8] x, int64[batch] ids) => (float[batch, 8] y, float[batch, 4] z)
<float[8, 8] w, float[6, 4] table> {
    y = MatMul(x, w)
    z = Gather(table, ids)
}
"""
TIMES = ("mean", "std", "min", "p50", "p90", "p95", "p99", "max")
FEW = ("--iterations", "7", "--warmup", "1")
ALTERNATIVES = ("--baseline", "other.onnx")


def save(text: str, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a graph given as text; declared values other than inputs and outputs become weights."""
    model = onnx.parser.parse_model(text)
    for key, value in (metadata or {}).items():
        model.metadata_props.add(key=key, value=value)
    generator = np.random.default_rng(0)
    for value in model.graph.value_info:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        array = generator.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    model.graph.ClearField("value_info")
    onnx.save(model, path)


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    """A workplace with a model that needs ids below 6, as stated only in the metadata."""
    save(NET, workplace.folder / "net.onnx", {"winml.io.inputs": '[{"name": "ids", "value_range": [0, 5]}]'})
    return workplace


def record(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON of a command, which is all of stdout."""
    assert 0 == outcome.code, outcome.err
    value: dict[str, Any] = json.loads(outcome.out)
    return value


def refuse(place: Workplace, *arguments: str, code: int, words: tuple[str, ...]) -> None:
    """Check that a request is refused with one sentence and a remedy, and leaves no file."""
    before = place.files()
    outcome = place.winml("perf", *arguments)
    assert (code, "") == (outcome.code, outcome.out), outcome.err
    assert 2 == len(outcome.complaint), outcome.complaint
    assert [] == [word for word in words if word not in "\n".join(outcome.complaint)], outcome.complaint
    assert before == place.files()


def test_json_has_the_keys_of_its_format(place: Workplace) -> None:
    """Stdout is one object with the documented numbers, and the samples give the summary."""
    found = record(place.winml("perf", "net.onnx", *FEW, "--batch-size", "3", "--format", "json"))
    assert [
        "schema_version", "benchmark_info", "model_info", "latency_ms", "raw_samples_ms", "memory", "throughput",
    ] == list(found)  # fmt: skip
    assert 2 == found["schema_version"]
    assert {"x": [None, 8], "ids": [None]} == found["model_info"]["input_shapes"]
    assert {"x": [3, 8], "ids": [3]} == found["model_info"]["measured_shapes"]
    assert {"y": [3, 8], "z": [3, 4]} == found["model_info"]["output_shapes"]
    samples = found["raw_samples_ms"]
    assert 7 == len(samples) == found["benchmark_info"]["iterations"]
    assert list(TIMES) == list(found["latency_ms"])
    assert pytest.approx(summarize(samples).as_record(), abs=1e-5) == found["latency_ms"]
    mean = found["latency_ms"]["mean"]
    assert pytest.approx(3 * 1000 / mean, rel=1e-3) == found["throughput"]["samples_per_sec"]
    assert found["benchmark_info"]["session_creation_ms"] > 0
    assert found["benchmark_info"]["first_run_ms"] > 0
    assert found["memory"]["peak_bytes"] >= found["memory"]["process_bytes"] > 0


def test_arrays_are_passed_in_every_run_without_binding(place: Workplace) -> None:
    """JSON and table name the mode; binding is the default, which the table does not mention."""
    bound = record(place.winml("perf", "net.onnx", *FEW, "--format", "json"))["benchmark_info"]
    assert (True, ["cpu"]) == (bound["io_binding"], bound["output_memory"])
    passed = place.winml("perf", "net.onnx", *FEW, "--no-io-binding", "--baseline", "net.onnx", "-o", "passed.json")
    assert "every run" in passed.out
    written = json.loads((place.folder / "passed.json").read_text(encoding="utf-8"))
    assert written["benchmark_info"]["io_binding"] is False
    assert not any("text" in note for note in written["benchmark_info"]["notes"])


def test_table_has_the_facts_of_the_json_and_writes_no_file(place: Workplace) -> None:
    """The table has the times, the inputs and the batch; no file is written."""
    before = place.files()
    outcome = place.winml("perf", "-m", "net.onnx", *FEW)
    assert (0, "") == (outcome.code, outcome.err)
    for word in (*TIMES, "x float32[1, 8]", "ids int64[1]", "1 (dimension batch)", "7 counted", "samples/s"):
        assert word in outcome.out
    assert "batch 1" in outcome.out
    assert before == place.files()


def test_duration_decides_how_many_runs(place: Workplace) -> None:
    """Half a second holds more runs of this model than the default of one hundred."""
    found = record(place.winml("perf", "net.onnx", "--duration", "0.5", "--threads", "1", "--format", "json"))
    assert found["benchmark_info"]["iterations"] > 100
    assert (0.5, 1) == (found["benchmark_info"]["duration_s"], found["benchmark_info"]["threads"])


def test_input_data_is_fed_unchanged(place: Workplace) -> None:
    """Values and sizes come from the file."""
    arrays = {"x": np.ones((5, 8), np.float32), "ids": np.zeros(5, np.int64)}
    np.savez(place.folder / "values.npz", **arrays)
    found = record(place.winml("perf", "net.onnx", *FEW, "--input-data", "values.npz", "--format", "json"))
    assert (5, "file") == (found["benchmark_info"]["batch_size"], found["benchmark_info"]["input_source"])


def test_nan_and_non_numeric_outputs_are_noted(workplace: Workplace) -> None:
    """Outputs with NaN, text or sequences do not stop a measurement."""
    text = """<ir_version: 10, opset_import: ["" : 17]>
g (string[2] s, float[2, 2] x) => (string[2] t, seq(float[1, 2]) parts, float[2, 2] root)
{ t = Identity(s)  parts = SplitToSequence(x)  root = Sqrt(x) }"""
    save(text, workplace.folder / "odd.onnx")
    np.savez(workplace.folder / "values.npz", s=np.array(["a", "b"]), x=-np.ones((2, 2), np.float32))
    found = record(workplace.winml("perf", "odd.onnx", *FEW, "--input-data", "values.npz", "--format", "json"))
    notes = "\n".join(found["benchmark_info"]["notes"])
    for words in ("output t is not a numeric", "output parts is not", "output root contains NaN", "contains text"):
        assert words in notes
    assert {"t": None, "parts": None, "root": [2, 2]} == found["model_info"]["output_shapes"]
    text_drawn = record(workplace.winml("perf", "odd.onnx", *FEW, "--format", "json"))
    assert "random" == text_drawn["benchmark_info"]["input_source"]


def test_baseline_of_the_same_file_shows_no_difference(place: Workplace) -> None:
    """Both files are measured in pairs on the same values, and the ratio lies inside its interval."""
    shutil.copy(place.folder / "net.onnx", place.folder / "same.onnx")
    arguments = ("net.onnx", "--baseline", "same.onnx", "--iterations", "30", "--threads", "1")
    found = record(place.winml("perf", *arguments, "--format", "json"))["baseline"]
    assert ("same.onnx", "onnx", 30) == (found["name"], found["kind"], len(found["raw_samples_ms"]))
    assert (30, 0.95, 1) == (found["ratio"]["pairs"], found["ratio"]["confidence"], found["block"])
    assert found["ratio"]["low"] <= found["ratio"]["value"] <= found["ratio"]["high"]


def test_slower_baseline_is_detected(place: Workplace) -> None:
    """A model with a hundred large products is slower, and the sentence has the ratio."""
    products = "\n".join(f"a{number} = MatMul(a{number - 1}, w)" for number in range(1, 101))
    text = f"""<ir_version: 10, opset_import: ["" : 17]>
g (float[batch, 8] x, int64[batch] ids) => (float[1, 1] y) <float[128, 128] w> {{
one = ReduceSum<keepdims = 1>(x)  a0 = Mul(one, w)  {products}  y = ReduceSum<keepdims = 1>(a100)
}}"""
    save(text, place.folder / "other.onnx")
    outcome = place.winml("perf", "net.onnx", "--iterations", "12", "--warmup", "2", *ALTERNATIVES)
    assert 0 == outcome.code, outcome.err
    # A busy machine, as a note says, gives no verdict unless the difference exceeds the disturbance.
    assert "net.onnx is faster than other.onnx: ratio 0." in outcome.out or "the machine seems busy" in outcome.out
    too_few = place.winml("perf", "net.onnx", "--iterations", "2", *ALTERNATIVES)
    assert "busy" in too_few.out or "too few" in too_few.out


def test_pytorch_baseline_of_a_script_is_measured_on_the_same_values(workplace: Workplace) -> None:
    """The model is exported once, cached, and compared with its source; the second run finds the export."""
    script = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.inner(x).relu()
def build():
    return Net()
def example_inputs():
    return {"x": torch.ones(3, 8)}
"""
    (workplace.folder / "net.py").write_text(script, encoding="utf-8")
    before = workplace.files()
    outcome = workplace.winml("perf", "-m", "net.py:build", *FEW, "--baseline", "pytorch", "--format", "json")
    found = record(outcome)
    assert ("pytorch", 3) == (found["baseline"]["kind"], found["benchmark_info"]["batch_size"])
    assert set(before) == {name for name in workplace.files() if "__pycache__" not in name}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "net.onnx does not record"),
        ({"winml.model": "no json"}, "net.onnx does not record"),
        ({"winml.model": '{"name_or_path": "owner/name"}'}, "owner/name"),
        ({"winml.model": '{"name_or_path": "evil.py:build"}'}, "evil.py:build"),
    ],
)
def test_pytorch_baseline_named_in_a_file_is_not_fetched(
    workplace: Workplace, metadata: dict[str, str], words: str
) -> None:
    """The name in a foreign file is untrusted: no network is used and no script runs."""
    (workplace.folder / "evil.py").write_text("open('was_here', 'w').close()\ndef build(): pass\n", encoding="utf-8")
    save(NET, workplace.folder / "net.onnx", metadata)
    refuse(workplace, "net.onnx", "--baseline", "pytorch", "-q", *FEW, code=2, words=(words, "-m"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("net.onnx", "--ep", "nnapi"), 2, ("NnapiExecutionProvider", "cpu")),
        (("net.onnx", "--ep", "cpuu"), 2, ("--ep cpuu", "'cpu'")),
        (("net.onnx", "--ep", "cpu", "--device", "npu"), 2, ("on cpu",)),
        (("net.onnx", "--ep-options", "a=1"), 2, ("no options", "--threads")),
        (("net.onnx", "--ep-options", "a"), 2, ("expected KEY=VALUE",)),
        (("net.onnx", "--iterations", "0"), 2, ("--iterations", "range 1 to ")),
        (("net.onnx", "--iterations", "-4"), 2, ("--iterations", "range 1 to ")),
        (("net.onnx", "--duration", "0"), 2, ("--duration", "above 0 to 86400")),
        (("net.onnx", "--duration", "inf"), 2, ("--duration", "to 86400")),
        (("net.onnx", "--duration", "nan"), 2, ("--duration", "nan")),
        (("net.onnx", "--threads", "0"), 2, ("--threads", "range 1 to 1024")),
        (("net.onnx", "--threads", "999999999"), 2, ("--threads", "range 1 to 1024")),
        (("net.onnx", "--batch-size", "9" * 20), 2, ("--batch-size", "9" * 20)),
        (("net.onnx", "--shape-config", f'{{"batch": {2**63 - 1}}}'), 2, (f"batch {2**63 - 1}",)),
        (("relu.onnx", "--baseline", "wide.onnx"), 2, ("float32[2, 9]", "float32[2, 8]")),
        (("net.onnx", "--iterations", "3", "--duration", "1"), 2, ("--iterations 3", "--duration 1")),
        (("net.onnx", "--task", "fill-mask"), 2, ("--task",)),
        (("net.onnx", "--shape-config", '{"btch": 2}'), 2, ("'btch'", "batch")),
        (("net.onnx", "--shape-config", '{"batch": 0}'), 2, ("at least 1",)),
        (("net.onnx", "--baseline", "./neither"), 2, ("neither",)),
        (("net.onnx", "--baseline", "missing.onnx"), 2, ("missing.onnx:",)),
        (("net.onnx", "--baseline", "relu.onnx"), 2, ("x, ids",)),
        (("relu.onnx", "--batch-size", "4"), 2, ("batch dimension", "--dynamic-batch")),
        (("net.onnx", "--input-data", "values.npz"), 2, ("int64[batch]",)),
        (("net.onnx", "--input-data", "far.npz"), 1, ("ids int64[2]", "far.npz")),
        (("net.onnx", "--input-data", "values.npz", "--batch-size", "2"), 2, ("determines the sizes",)),
        (("missing.onnx",), 2, ("missing.onnx:",)),
        (("text.onnx",), 1, ("ONNX file",)),
        (("empty.onnx",), 1, ("is empty",)),
        (("data.onnx",), 1, ("weights.bin is missing",)),
        (("unknown.onnx",), 1, ("cannot load unknown.onnx", "Nonsense")),
        ((), 2, ("no model",)),
        (("net.onnx", "--input-data", ""), 2, ("'--input-data':",)),
        (("net.onnx", "-m", "other.onnx"), 2, ("two models",)),
        (("net.onnx", "--generation", "--no-io-binding"), 2, ("--no-io-binding",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_request_is_refused_in_one_sentence(
    place: Workplace, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    """The message has the failure, the value, the expectation and a remedy, without a traceback or a file."""
    relu = '<ir_version: 10, opset_import: ["" : 17]> g (float[2, 8] x) => (float[2, 8] y) { y = Relu(x) }'
    save(relu, place.folder / "relu.onnx")
    save(relu.replace("8]", "9]"), place.folder / "wide.onnx")
    save(relu.replace("Relu", "Nonsense"), place.folder / "unknown.onnx")
    (place.folder / "text.onnx").write_text("not a model", encoding="utf-8")
    (place.folder / "empty.onnx").write_bytes(b"")
    model = onnx.load(place.folder / "net.onnx")
    onnx.save(model, place.folder / "data.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    (place.folder / "weights.bin").unlink()
    values = {"x": np.ones((2, 8), np.float32), "ids": np.ones(2, np.int64)}
    np.savez(place.folder / "values.npz", **{**values, "ids": np.ones(2, np.float32)})
    np.savez(place.folder / "far.npz", **{**values, "ids": np.full(2, 99)})
    few = () if {"--iterations", "--duration"} & set(arguments) else ("--iterations", "2")
    refuse(place, *arguments, *few, code=code, words=words)
