"""Cost of ``winml compare --by-module`` and ``winml diff``, beside bare runs of the same files.

Method. A bert-base shape with seeded random weights is exported once by this package, and a copy of it in which the
weights of one layer are changed. **Compare:** in one process each, ONNX Runtime opens both files and runs them on as
many samples as the command, node by node as they are written: sessions and runs are timed apart. Then whole processes
``winml compare A B --by-module`` run, and a process that imports what it imports and ends; the difference of both is
held against the limit, 2.5 times the two runs and the creation of the sessions. Peak memory is the operating system's
own account of the process; it is held against the files, the largest group of recorded values and the imports.
**Diff:** whole processes compare the structure of the two files, and of two of seven billion parameters, whose weights
are sparse files. All take turns, after one round that is not counted. A table for people, then one line of JSON.

    python benchmarks/compare.py [--runs 5] [--small] [--cases compare,diff,diff-7b]
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
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402

import onnx  # noqa: E402
from process_cost import Cost, run, spread  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

from winml.modelkit.metadata_keys import MODULE_KEY, TAG_KEY  # noqa: E402

WINML = [sys.executable, "-m", "winml.modelkit"]
MAKE_BERT = """
import json, sys, torch, transformers
torch.manual_seed(0)
transformers.BertModel(transformers.BertConfig(**json.loads(sys.argv[2]))).save_pretrained(sys.argv[1])
"""
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SAMPLES = 16
"""That ``winml compare`` runs by default; a plain run has as many."""
BARE_RUNS = f"""
SAMPLES = {SAMPLES}
import json, sys, time
from pathlib import Path
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.opened_model import RunOptions, values_for
started = time.perf_counter()
sessions = [open_session(Path(path), as_written=True) for path in sys.argv[1:]]
opened = time.perf_counter()
feeds = values_for(sessions[1], RunOptions("")).feeds
drawn = time.perf_counter()
for session in sessions:
    for _ in range(SAMPLES):
        session.run(feeds)
print(json.dumps({{"sessions_s": opened - started, "runs_s": time.perf_counter() - drawn}}))
"""
CHANGE_LAYER = """
import sys
import numpy as np
import onnx
from onnx import numpy_helper
model = onnx.load(sys.argv[1])
weights = (item for item in model.graph.initializer if "layer.1.intermediate" in item.name and len(item.dims) > 1)
weight = next(weights)
weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.5), weight.name))
onnx.save(model, sys.argv[2])
"""
IMPORTS = """
import winml.modelkit.cli.main
import winml.modelkit.compare.comparing, winml.modelkit.compare.table
"""
RUNS_FACTOR = 2.5
"""Chosen by the project: how many times two plain runs a comparison by module may take, besides the sessions."""
GROUP_BYTES = 256_000_000
"""Values that a comparison records at a time."""
LAYERS_7B, WIDTH_7B = 32, 4096
"""Of a Llama of seven billion parameters: each layer has four square matrices and three of the inner width."""
INNER_7B = 11008


@dataclass(frozen=True)
class Case:
    """One command to measure."""

    name: str
    command: list[str]
    limit_s: float | None
    limit_bytes: int | None


def exported(folder: Path, sizes: dict[str, int]) -> tuple[Path, Path]:
    """Return an ONNX file, of 0.44 GB by default, and a copy with different weights in one layer."""
    checkpoint, path, changed = folder / "bert", folder / "bert.onnx", folder / "changed.onnx"
    subprocess.run([sys.executable, "-c", MAKE_BERT, str(checkpoint), json.dumps(sizes)], check=True)
    export = [*WINML, "export", "-m", str(checkpoint), "-o", str(path), "--task", "feature-extraction"]
    subprocess.run([*export, "--no-verify", "-q"], check=True)
    # In a separate process: the peak of a child starts at the size of its parent.
    subprocess.run([sys.executable, "-c", CHANGE_LAYER, str(path), str(changed)], check=True)
    return path, changed


def pair_of_7b(folder: Path, layers: int) -> tuple[Path, Path]:
    """Return two files whose weights are sparse data files; the weights of one layer differ."""
    return _sparse_model(folder / "7b.onnx", layers, None), _sparse_model(
        folder / "7b-changed.onnx", layers, layers // 2
    )


def _sparse_model(path: Path, layers: int, changed: int | None) -> Path:
    shapes = [(WIDTH_7B, WIDTH_7B)] * 4 + [(WIDTH_7B, INNER_7B)] * 2 + [(INNER_7B, WIDTH_7B)]
    nodes, weights, offset, last = [], [], 0, "x"
    data = path.with_name(f"{path.name}.data")
    with data.open("wb") as file:
        for layer in range(layers):
            for number, shape in enumerate(shapes):
                name, length = f"layers.{layer}.{number}.weight", 2 * shape[0] * shape[1]
                tensor = onnx.TensorProto(name=name, dims=shape, data_type=onnx.TensorProto.FLOAT16, data_location=1)
                for key, value in (("location", data.name), ("offset", offset), ("length", length)):
                    tensor.external_data.add(key=key, value=str(value))
                weights.append(tensor)
                created = f"/layers.{layer}/MatMul_{number}"
                node = onnx.helper.make_node("MatMul", [last, name], [f"{created}_output"], created)
                node.metadata_props.add(key=TAG_KEY, value=f"/Model/Layer.{layer}")
                node.metadata_props.add(key=MODULE_KEY, value=f"layers.{layer}")
                nodes.append(node)
                last = node.output[0]
                if layer == changed:
                    file.seek(offset + length // 2)
                    file.write(b"\x01\x3c")
                offset += length
        file.truncate(offset)
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, [1, WIDTH_7B])],
        [onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT16, None)],
        weights,
    )
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 17)]), path)
    return path


def bare(pair: tuple[Path, Path]) -> dict[str, float]:
    """Return the seconds that creating both sessions and running each once takes in a process of its own."""
    command = [sys.executable, "-c", BARE_RUNS, *map(str, pair)]
    record: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return record


def make_cases(folder: Path, names: list[str], *, small: bool) -> tuple[list[Case], tuple[Path, Path]]:
    """Create the files and return the measurements; ``diff`` and ``compare`` read the same files."""
    pair = exported(folder, SMALL if small else {})
    size = sum(path.stat().st_size for path in pair)
    files = [*map(str, pair)]
    makers: dict[str, Callable[[], Case]] = {
        "compare": lambda: Case("compare", [*WINML, "compare", *files, "--by-module"], None, size + GROUP_BYTES),
        "diff": lambda: Case("diff", [*WINML, "diff", *files, "--exit-zero"], 2.0, 300_000_000),
        "diff-7b": lambda: Case(
            "diff-7b",
            [*WINML, "diff", *map(str, pair_of_7b(folder, 2 if small else LAYERS_7B)), "--exit-zero"],
            None,
            300_000_000,
        ),
    }
    return [Case("imports", [sys.executable, "-c", IMPORTS], None, None), *(makers[name]() for name in names)], pair


def measure(
    cases: list[Case], pair: tuple[Path, Path], runs: int
) -> tuple[dict[str, list[Cost]], list[dict[str, float]]]:
    """Measure the cases and the bare runs in alternation."""
    costs: dict[str, list[Cost]] = {case.name: [] for case in cases}
    bares: list[dict[str, float]] = []
    for number in range(runs + 1):
        found = bare(pair)
        for case in cases:
            cost = run(case.command)
            if number:
                costs[case.name].append(cost)
        if number:
            bares.append(found)
    return costs, bares


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="Small models, to see that the benchmark works.")
    parser.add_argument("--cases", default="compare,diff,diff-7b")
    add_save_option(parser)
    options = parser.parse_args()
    if not hasattr(os, "wait4"):
        raise SystemExit("this benchmark needs os.wait4, which Windows does not have")
    names = options.cases.split(",")
    if unknown := set(names) - {"compare", "diff", "diff-7b"}:
        raise SystemExit(f"unknown case {', '.join(sorted(unknown))}; known: compare, diff, diff-7b")
    with tempfile.TemporaryDirectory() as folder:
        cases, pair = make_cases(Path(folder), names, small=options.small)
        costs, bares = measure(cases, pair, options.runs)
    sessions, plain = (spread([found[key] for found in bares]) for key in ("sessions_s", "runs_s"))
    imports = spread([cost.wall_s for cost in costs["imports"]])["median"]
    held = spread([cost.peak_bytes for cost in costs["imports"]])["median"]
    allowed = RUNS_FACTOR * plain["median"] + sessions["median"]
    rows: list[dict[str, object]] = []
    cells = [
        {"case": "two sessions", "wall": _seconds(sessions), "limit": "", "peak memory": "", "limit of memory": ""},
        {"case": "two plain runs", "wall": _seconds(plain)},
    ]
    for case in cases:
        wall, peak = (spread([getattr(cost, key) for cost in costs[case.name]]) for key in ("wall_s", "peak_bytes"))
        limit_s = imports + allowed if case.name == "compare" else case.limit_s
        limit_bytes = held + case.limit_bytes if case.name == "compare" and case.limit_bytes else case.limit_bytes
        rows.append(
            {"case": case.name, "wall_s": wall, "limit_s": limit_s, "peak_bytes": peak, "limit_bytes": limit_bytes}
        )
        cells.append(
            {
                "case": case.name,
                "wall": _seconds(wall),
                "limit": f"{limit_s:.2f} s" if limit_s else "",
                "peak memory": f"{peak['median'] / 1e6:.0f} MB",
                "limit of memory": f"{limit_bytes / 1e6:.0f} MB" if limit_bytes else "",
            }
        )
    table = markdown_table(cells)
    print("\n".join(table))
    publish(options, {"benchmark": "compare", "sessions_s": sessions, "runs_s": plain, "rows": rows}, table)


def _seconds(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} s ({values['min']:.2f}–{values['max']:.2f})"


if __name__ == "__main__":
    main()
