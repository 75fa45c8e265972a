"""ONNX's backend tests through ``winml inspect``, ``optimize`` and ``quantize``: no result may be wrong.

Method. The models of ONNX's backend tests (one for each operator and form, and 140 layers of PyTorch; some
2000) are made by the installed onnx package or stored in it, with their inputs. Each verb gets each model; ONNX
Runtime then runs the written file and its source on the inputs of the test, without winml. Outputs are equal within the
rounding of their type (8 bits: 15 dB). A refusal is one of ONNX Runtime if it does not run the source either, and one
for nothing to do if the graph has no weight, or is quantized. A table for people, the remaining refusals and wrong
results, then one line of JSON.

All tests take some 20 minutes. With ``--state``, a run continues the one before; with ``--seconds``, it ends early.

    python benchmarks/backend.py [--verbs inspect optimize] [--match reshape] [--state FILE --seconds 200] [--save]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
from google.protobuf.message import DecodeError  # noqa: E402
from onnx.backend.test.case.test_case import TestCase  # noqa: E402
from onnx.backend.test.loader import load_model_tests  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

from winml.modelkit import inspect_model, optimize_model, quantize_model  # noqa: E402
from winml.modelkit.errors import WinMLError  # noqa: E402

LOSSY_DB = 15.0
"""Smallest SQNR of a quantized result. Chosen: 8 bits of a layer with random weights have 30 dB and more."""
VERBS: Mapping[str, Callable[[Path, Path], Any]] = {
    "inspect": lambda source, _output: inspect_model(str(source)),
    "optimize": lambda source, output: optimize_model(source, output, level="full"),
    "quantize": quantize_model,
    "quantize fp16": lambda source, output: quantize_model(source, output, precision="fp16"),
}
KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
"""Kinds of tests in the onnx package; the others download models."""
UNFAIR = ("refused", "wrong")
OUTCOMES = ("right", *reversed(UNFAIR), "nothing to do", "refused by ONNX Runtime", "not comparable")
NOTHING_TO_DO = ("no node to quantize", "no node was quantized", "the graph is already quantized")


def model_of(case: TestCase) -> onnx.ModelProto:
    """Return the model of a test, from its file or made."""
    return case.model if case.model_dir is None else onnx.load(Path(case.model_dir) / "model.onnx")


def samples_of(case: TestCase) -> list[list[Any]]:
    """Return the inputs of each data set of a test."""
    if case.model_dir is None:
        return [list(inputs) for inputs, _ in case.data_sets]
    return [
        [read_value(path) for path in sorted(folder.glob("input_*.pb"), key=lambda path: int(path.stem.split("_")[1]))]
        for folder in sorted(Path(case.model_dir).glob("test_data_set_*"))
    ]


def read_value(path: Path) -> Any:
    """Read a stored tensor, or else a sequence."""
    content = path.read_bytes()
    try:
        return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(content))
    except (TypeError, ValueError, DecodeError):
        return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(content))


def run(path: Path, samples: Sequence[Sequence[Any]]) -> list[list[Any]] | None:
    """Run a file on the inputs of a test; None if ONNX Runtime does not run it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        values = ([np.asarray(v) if isinstance(v, np.generic) else v for v in inputs] for inputs in samples)
        return [session.run(None, dict(zip(names, inputs, strict=False))) for inputs in values]
    except Exception:  # each binding of the runtime has errors of its own
        return None


def is_equal(expected: Any, actual: Any, *, is_lossy: bool) -> bool:
    """Compare an output with that of the source."""
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(actual) and all(
            is_equal(*pair, is_lossy=is_lossy) for pair in zip(expected, actual, strict=True)
        )
    if not isinstance(expected, np.ndarray) or expected.dtype.kind not in "fiub":
        return bool(np.array_equal(expected, actual))
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return False
    x, y = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return False
    signal, noise = np.square(x[finite]).sum(), np.square(x[finite] - y[finite]).sum()
    if is_lossy:
        return bool(noise * 10 ** (LOSSY_DB / 10) <= signal)
    limit = 0 if expected.dtype.kind != "f" else 1e-2 if expected.dtype.itemsize == 2 else 1e-4
    return bool(np.abs(x - y)[finite].max(initial=0) <= limit * np.abs(x[finite]).max(initial=0))


def outcome_of(verb: str, source: Path, output: Path, samples: Sequence[Sequence[Any]]) -> tuple[str, str]:
    """Return the outcome of a verb on a model, and the reason of a refusal."""
    try:
        VERBS[verb](source, output)
    except WinMLError as error:
        if error.message.startswith(NOTHING_TO_DO):
            return "nothing to do", ""
        return ("refused", error.message) if run(source, samples) else ("refused by ONNX Runtime", error.message)
    if verb == "inspect":
        return "right", ""
    expected, actual = run(source, samples), run(output, samples)
    if expected is None:
        return "not comparable", ""
    if actual is None or not is_equal(expected, actual, is_lossy=verb.startswith("quantize")):
        return "wrong", "other outputs"
    return "right", ""


def main() -> None:
    """Run the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=[*VERBS])
    parser.add_argument("--match", default="", help="only tests with this text in their name")
    parser.add_argument("--state", type=Path, help="file of outcomes: those in it are not measured again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end before the test after this time")
    add_save_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    end = time.monotonic() + options.seconds
    cases = [case for kind in KINDS for case in load_model_tests(kind=kind) if options.match in case.name]
    lines = options.state.read_text(encoding="utf-8").splitlines() if options.state and options.state.exists() else []
    outcomes = {(case, verb): (outcome, reason) for case, verb, outcome, reason in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            if time.monotonic() > end:
                break
            source = Path(folder) / "model.onnx"
            source.write_bytes(model_of(case).SerializeToString())
            samples = samples_of(case)
            for verb in options.verbs:
                if (case.name, verb) in outcomes:
                    continue
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    outcome = outcome_of(verb, source, Path(place) / "output.onnx", samples)
                outcomes[case.name, verb] = outcome
                if options.state:
                    with options.state.open("a", encoding="utf-8") as stream:
                        print(json.dumps([case.name, verb, *outcome]), file=stream)
    measured = {
        key: outcomes[key] for case in cases for verb in options.verbs if (key := (case.name, verb)) in outcomes
    }
    unfair = {f"{case}, {verb}": ": ".join(found) for (case, verb), found in measured.items() if found[0] in UNFAIR}
    for name, reason in unfair.items():
        print(f"{name}: {reason[:200]}")
    counts = Counter((verb, outcome) for (_, verb), (outcome, _) in measured.items())
    rows = [{"verb": verb, **{name: str(counts[verb, name]) for name in OUTCOMES}} for verb in options.verbs]
    table = markdown_table(rows)
    print("\n".join(table))
    if len(measured) < len(cases) * len(options.verbs):
        print(f"{len(measured)} of {len(cases) * len(options.verbs)}: run it again")
        return
    record = {verb: {name: counts[verb, name] for name in OUTCOMES} for verb in options.verbs}
    publish(options, {"counts": record, "unfair": unfair}, table)


if __name__ == "__main__":
    main()
