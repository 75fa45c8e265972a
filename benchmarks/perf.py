"""Delay until ``winml perf`` of a file starts to measure, and overhead of its loop.

Method. A bert-base shape with seeded random weights is exported once by this package. **Start:** whole processes
``winml perf FILE --iterations 1 --warmup 0`` run, after one that is not counted; from the wall time of each what the
process says of itself is taken away: session creation, first run and the counted run. What is left – the interpreter,
imports, values, the answer – is compared with the limit the project has set itself. Beside it, in alternation, a Python
that imports ``onnxruntime`` and ends. **Loop:** in one process, on a graph whose run takes microseconds, our prepared
run and a bare ``InferenceSession.run`` with arrays take turns, and the ratio is given with its interval. A table for
people, then one line of JSON.

    python benchmarks/perf.py [--runs 5]
"""

from __future__ import annotations

import sys
from pathlib import Path

# Another benchmark has the name of a standard module: this folder is last on the path, so that it shadows no module.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402
import onnx.parser  # noqa: E402
import onnxruntime  # noqa: E402
from process_cost import run, spread  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

from winml.modelkit.ort.sessions import Session  # noqa: E402
from winml.modelkit.profile.latency import LatencyOptions, measure_alternating  # noqa: E402

WINML = [sys.executable, "-m", "winml.modelkit"]
LIMIT_S = 1.5
"""Chosen by the project: time until measuring starts, without opening the session."""
MAKE_BERT_BASE = """
import sys, torch, transformers
torch.manual_seed(0)
transformers.BertModel(transformers.BertConfig()).save_pretrained(sys.argv[1])
"""
SMALL = '<ir_version: 10, opset_import: ["" : 17]> g (float[4, 4] x) => (float[4, 4] y) { y = Relu(x) }'


def exported_bert_base(folder: Path) -> Path:
    """Return an ONNX file of 0.44 GB."""
    checkpoint, path = folder / "bert-base", folder / "bert-base.onnx"
    subprocess.run([sys.executable, "-c", MAKE_BERT_BASE, str(checkpoint)], check=True)
    export = [*WINML, "export", "-m", str(checkpoint), "-o", str(path), "--task", "feature-extraction"]
    subprocess.run([*export, "--no-verify", "-q"], check=True)
    return path


def start_seconds(path: Path) -> float:
    """Return the time of one process besides the session and its runs."""
    command = [*WINML, "perf", str(path), "--iterations", "1", "--warmup", "0", "--format", "json"]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall_s = time.perf_counter() - started
    record = json.loads(done.stdout)
    info = record["benchmark_info"]
    return wall_s - (info["session_creation_ms"] + info["first_run_ms"] + sum(record["raw_samples_ms"])) / 1000


def measure_start(path: Path, runs: int) -> dict[str, dict[str, float]]:
    """Measure both processes in alternation."""
    imports, starts = [], []
    for number in range(runs + 1):
        cost = run([sys.executable, "-c", "import onnxruntime"])
        seconds = start_seconds(path)
        if number:
            imports.append(cost.wall_s)
            starts.append(seconds)
    return {"import-onnxruntime": spread(imports), "start": spread(starts)}


def measure_loop() -> dict[str, object]:
    """Compare our prepared run with a bare one."""
    graph = onnx.parser.parse_model(SMALL).SerializeToString()
    values = {"x": np.ones((4, 4), np.float32)}
    prepared = Session(graph, threads=1).prepare(values)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    bare = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    found = measure_alternating(prepared, lambda: bare.run(None, values), LatencyOptions(iterations=30_000))
    return {
        "prepared_us": round(found.model.summary.p50 * 1000, 2),
        "bare_us": round(found.baseline.summary.p50 * 1000, 2),
        "ratio": found.ratio.as_record(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    add_save_option(parser)
    options = parser.parse_args()
    if not hasattr(os, "wait4"):
        raise SystemExit("this benchmark needs os.wait4, which Windows does not have")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_start(exported_bert_base(Path(folder)), options.runs)
    loop = measure_loop()
    names = {"import-onnxruntime": "`import onnxruntime`", "start": "`winml perf` until it measures"}
    cells = [
        {
            "measured": names[name],
            "median (range)": f"{wall['median']:.2f} s ({wall['min']:.2f}–{wall['max']:.2f})",
            "limit": f"{LIMIT_S} s" if name == "start" else "",
        }
        for name, wall in rows.items()
    ]
    cells.append({"measured": "prepared run", "median (range)": f"{loop['prepared_us']} µs"})
    cells.append({"measured": "bare run with arrays", "median (range)": f"{loop['bare_us']} µs"})
    table = markdown_table(cells)
    print("\n".join(table))
    publish(options, {"benchmark": "perf", "limit_s": LIMIT_S, **rows, "loop": loop}, table)


if __name__ == "__main__":
    main()
