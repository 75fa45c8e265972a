"""Cost of ``winml quantize`` and latency of its files, beside bare ONNX Runtime and other tools.

Method. For each shape (seeded random weights, made from configs, sizes pinned by the export) there is one plain export,
kept in a folder given by the user. Every row is measured only where the installed ``winml quantize`` has its mode.

Cost (``--rows cost``): whole processes in alternation, on the same file with the same settings, after one round that
brings the file into the page cache and is not counted: ``winml quantize`` with its comparison, and a script of a few
lines that calls ``onnxruntime.quantization``: ``quantize_dynamic`` (8 bits, a scale a channel), ``quantize_static``
(QDQ, as many random samples as ours) and ``MatMulNBitsQuantizer`` (4 bits, blocks of 32). Wall time, computing time and
peak resident memory are the operating system's account of each process. With ``--genai-python`` (the interpreter of an
environment with onnxruntime-genai) ``winml build --precision int4`` of a Llama-shaped checkpoint beside its builder.

Latency (``--rows latency``): every file gets a session with the options of a user who sets none but the number of
threads; then all are run in turns, in an order drawn anew each round, on the same values, in one process. Printed is
how many times as fast as the plain export it is, within each round: quarter points and median, of the wall time and of
the computing time of the process; with one thread, the second hardly depends on what else the machine does. With
``--optimum-python`` also what ``optimum`` makes for AVX-512 VNNI; with ``--openvino-python`` what OpenVINO and NNCF
make, timed in a process of that environment: not in turns.

Sensitivity (``--rows sensitivity``): the whole process of ``winml quantize --sensitivity`` on MiniLM's shape, over what
it may take: modules × (quantizing one alone + one run) + one session of the whole.

First it says whether the processor has VNNI. Tables in Markdown, then one line of JSON.

    python benchmarks/quantize.py --cache FOLDER [--rows cost,latency,sensitivity] [--models bert-base,minilm]
        [--modes dynamic,qdq,weight-only] [--rounds 3] [--runs 30] [--threads 1] [--samples 4]
        [--genai-python PYTHON] [--optimum-python PYTHON] [--openvino-python PYTHON]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import random  # noqa: E402
import shutil  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

from process_cost import Cost, run, spread  # noqa: E402
from results import add_save_option, publish  # noqa: E402

WINML = [sys.executable, "-m", "winml.modelkit"]
LATENCY_MODELS = ("bert-base", "minilm", "vit-base", "resnet-50", "gpt2")
COST_MODELS = ("bert-base",)
SENSITIVITY_MODEL = "minilm"

OURS: dict[str, list[str]] = {
    "dynamic": ["--mode", "dynamic", "--precision", "int8"],
    "qdq": ["--mode", "qdq", "--precision", "int8"],
    "weight-only": ["--mode", "weight-only", "--precision", "int4", "--block-size", "32"],
}
"""Mode → options."""

BARE = """
import sys
source, target, mode, samples = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
if mode == "dynamic":
    quantize_dynamic(source, target, per_channel=True, weight_type=QuantType.QInt8)
elif mode == "dynamic, per tensor":
    quantize_dynamic(source, target, weight_type=QuantType.QInt8)
elif mode == "qdq":
    import numpy as np
    import onnxruntime as ort
    inputs = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).get_inputs()
    class Samples(CalibrationDataReader):
        def __init__(self):
            self.left, self.random = samples, np.random.default_rng(0)
        def draw(self, value):
            if "int" in value.type:
                largest = 2 if "mask" in value.name or "type" in value.name else 1000
                return self.random.integers(0, largest, value.shape)
            return self.random.standard_normal(value.shape).astype(np.float32)
        def get_next(self):
            self.left -= 1
            return {value.name: self.draw(value) for value in inputs} if self.left >= 0 else None
    quantize_static(source, target, Samples(), per_channel=True, weight_type=QuantType.QInt8)
else:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(target, use_external_data_format=True)
"""
"""Bare ONNX Runtime, in a process of its own."""

OPTIMUM = """
import shutil, sys
from pathlib import Path
from optimum.onnxruntime import ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig
source, target = Path(sys.argv[1]), Path(sys.argv[2])
work = target.with_suffix("")
quantizer = ORTQuantizer(source)
config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
quantizer.quantize(save_dir=work, quantization_config=config, file_suffix="")
(work / source.name).replace(target)
shutil.rmtree(work)
"""
"""Run in optimum's environment."""

OPENVINO = """
import sys, time
import numpy as np, nncf, openvino
source, runs, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
core = openvino.Core()
model = core.read_model(source)
drawn = np.random.default_rng(0)
def draw():
    return {
        value.any_name: drawn.integers(0, 2, list(value.shape)) if "i64" in str(value.element_type) or "int" in
        str(value.element_type) else drawn.standard_normal(list(value.shape)).astype(np.float32)
        for value in model.inputs
    }
samples = [draw() for _ in range(8)]
is_transformer = all(len(value.shape) == 2 for value in model.inputs)
kind = nncf.ModelType.TRANSFORMER if is_transformer else None
small = nncf.quantize(model, nncf.Dataset(samples), subset_size=8, model_type=kind)
compiled = core.compile_model(small, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"})
for number in range(runs + 3):
    started, spent = time.perf_counter(), time.process_time()
    compiled(samples[0])
    if number >= 3:
        print("took", time.perf_counter() - started, time.process_time() - spent)
"""
"""Run in OpenVINO's environment."""


def export(name: str, cache: Path) -> Path:
    """Return the plain export, which is made once; see ``optimize.py``."""
    from optimize import make_export  # imports torch where it is not there yet

    return make_export(name, cache)


def has_option(name: str) -> bool:
    """Return True if ``winml quantize`` has an option."""
    from winml.modelkit.quantize.command import command

    return any(name in parameter.opts for parameter in command.params)


def our_command(source: Path, target: Path, mode: str, samples: int) -> list[str]:
    """Return the command that is measured."""
    command = [*WINML, "quantize", "-m", str(source), "-o", str(target), *OURS[mode], "--overwrite", "-q"]
    # Random weights and values: fidelity is not measured here.
    command += ["--min-sqnr", "-100"]
    return [*command, "--samples", str(samples)] if mode == "qdq" and has_option("--samples") else command


def bare_command(source: Path, target: Path, mode: str, samples: int) -> list[str]:
    """Return the process it is measured beside."""
    return [sys.executable, "-c", BARE, str(source), str(target), mode, str(samples)]


# Cost.


def measure_cost(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both in alternation; return walls, peaks and the ratio of the medians."""
    source = export(name, arguments.cache)
    work = arguments.cache / "cost"
    costs: dict[str, list[Cost]] = {"winml": [], "bare": []}
    for number in range(arguments.rounds + 1):
        for kind, command_of in (("winml", our_command), ("bare", bare_command)):
            work.mkdir(parents=True)
            cost = run(command_of(source, work / "out.onnx", mode, arguments.samples))
            shutil.rmtree(work)
            if number:  # the first round brings the files into the page cache
                costs[kind].append(cost)
    return {"weights_bytes": size_of(source), **compared_costs(costs)}


def measure_genai(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run ``winml build --precision int4`` of a checkpoint and genai's builder in alternation."""
    from weights import make_checkpoint

    checkpoint, work = arguments.cache / "llama-0.5", arguments.cache / "cost"
    if not checkpoint.is_dir():
        make_checkpoint("0.5", checkpoint)
    builder = [str(arguments.genai_python), "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint)]
    commands = {
        "winml": [*WINML, "build", "-m", str(checkpoint), "-o", str(work / "out"), "--precision", "int4", "-q"],
        "bare": [*builder, "-o", str(work / "out"), "-p", "int4", "-e", "cpu", "-c", str(work / "cache")],
    }
    costs: dict[str, list[Cost]] = {kind: [] for kind in commands}
    for _ in range(arguments.rounds):
        for kind, command in commands.items():
            work.mkdir(parents=True)
            costs[kind].append(run(command))
            shutil.rmtree(work)
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    return {"weights_bytes": weights, **compared_costs(costs)}


def compared_costs(costs: dict[str, list[Cost]]) -> dict[str, Any]:
    """Return median and range of each, and how many times the bare process's ours takes."""
    output: dict[str, Any] = {}
    for kind, measured in costs.items():
        output[kind] = {
            "wall_s": spread([cost.wall_s for cost in measured]),
            "cpu_s": spread([cost.cpu_s for cost in measured]),
            "peak_bytes": max(cost.peak_bytes for cost in measured),
        }
    for key in ("wall_s", "cpu_s"):
        output[f"{key}_ratio"] = round(output["winml"][key]["median"] / output["bare"][key]["median"], 2)
    return output


def cost_rows(arguments: argparse.Namespace, output: dict[str, Any]) -> Iterator[str]:
    """Yield the table of costs."""
    yield "| file | mode | winml: wall | bare: wall | ratio | of computing | winml: peak / weights | bare: peak |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    jobs = [(name, mode) for name in arguments.models or COST_MODELS for mode in arguments.modes]
    jobs += [("llama-0.5", "int4, genai")] if arguments.genai_python else []
    for name, mode in jobs:
        try:
            row = measure_genai(arguments) if "genai" in mode else measure_cost(name, mode, arguments)
        except SystemExit as error:
            output["troubles"].append(f"cost of {mode} for {name}: {last_line(str(error))}")
            shutil.rmtree(arguments.cache / "cost", ignore_errors=True)
            continue
        output["cost"].append({"file": name, "mode": mode, **row})
        walls = " | ".join("{median:.1f} s ({min:.1f}–{max:.1f})".format(**row[kind]["wall_s"]) for kind in ROLES)
        peaks = " | ".join(
            f"{row[kind]['peak_bytes'] / 1e9:.2f} GB = {row[kind]['peak_bytes'] / row['weights_bytes']:.2f} ×"
            for kind in ROLES
        )
        yield f"| {name} | {mode} | {walls} | {row['wall_s_ratio']:.2f} | {row['cpu_s_ratio']:.2f} | {peaks} |"


ROLES = ("winml", "bare")


# Latency.


def make_forms(name: str, arguments: argparse.Namespace, output: dict[str, Any]) -> dict[str, Path]:
    """Return the files to compare, the plain export first; print the failures."""
    plain = export(name, arguments.cache)
    files = {"plain": plain}
    commands: dict[str, list[str]] = {}
    for mode in arguments.modes:
        if mode == "dynamic" and name == "resnet-50":
            continue  # ONNX Runtime has no fast kernel for convolutions with dynamic ranges
        commands[f"winml {mode}"] = our_command(plain, target_of(plain, f"winml {mode}"), mode, arguments.samples)
        for kind in (mode, *(["dynamic, per tensor"] if mode == "dynamic" else [])):
            label = f"bare {kind}"
            commands[label] = bare_command(plain, target_of(plain, label), kind, arguments.samples)
    if arguments.optimum_python:
        target = target_of(plain, "optimum")
        commands["optimum"] = [str(arguments.optimum_python), "-c", OPTIMUM, str(plain), str(target)]
    for label, command in commands.items():
        target_of(plain, label).unlink(missing_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not target_of(plain, label).is_file():
            output["troubles"].append(f"{label} of {name}: {last_line(done.stderr)}")
        else:
            files[label] = target_of(plain, label)
    return files


def target_of(plain: Path, label: str) -> Path:
    """Return the path of a variant."""
    return plain.with_name(f"{label.replace(', ', '-').replace(' ', '-')}.onnx")


def measure_latency(files: dict[str, Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all files in turns; return per file the median times and how many times as fast as the plain export."""
    import onnxruntime as ort

    from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs
    from winml.modelkit.ort.sessions import Session

    feeds = draw_feeds(graph_inputs(Session(files["plain"])), {}, seed=0)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = arguments.threads
    sessions = {
        kind: ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for kind, path in files.items()
    }
    for session in sessions.values():
        for _ in range(3):
            session.run(None, feeds)
    wall: dict[str, list[float]] = {kind: [] for kind in files}
    computing: dict[str, list[float]] = {kind: [] for kind in files}
    order = list(files)
    for _ in range(arguments.runs):
        random.shuffle(order)
        for kind in order:
            started, spent = time.perf_counter(), time.process_time()
            sessions[kind].run(None, feeds)
            computing[kind].append(time.process_time() - spent)
            wall[kind].append(time.perf_counter() - started)
    return {
        kind: {
            "wall_ms": round(statistics.median(wall[kind]) * 1000, 3),
            "wall_times_as_fast": quarters(wall["plain"], wall[kind]),
            "computing_ms": round(statistics.median(computing[kind]) * 1000, 3),
            "computing_times_as_fast": quarters(computing["plain"], computing[kind]),
            "size_bytes": size_of(files[kind]),
        }
        for kind in files
    }


def quarters(plain: list[float], values: list[float]) -> list[float]:
    """Return the first quarter point, the median and the third quarter point of the ratios, pair by pair."""
    return [round(point, 2) for point in statistics.quantiles([a / b for a, b in zip(plain, values, strict=True)], n=4)]


def measure_openvino(plain: Path, plain_row: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Time OpenVINO's int8 in its own environment; raises RuntimeError where it fails."""
    command = [str(arguments.openvino_python), "-c", OPENVINO, str(plain), str(arguments.runs), str(arguments.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("took ")]
    if done.returncode or not lines:
        raise RuntimeError(last_line(done.stderr))
    wall, computing = ([float(line[place]) * 1000 for line in lines] for place in (0, 1))
    return {
        "wall_ms": round(statistics.median(wall), 3),
        "wall_times_as_fast": quarters([plain_row["wall_ms"]] * len(wall), wall),
        "computing_ms": round(statistics.median(computing), 3),
        "computing_times_as_fast": quarters([plain_row["computing_ms"]] * len(computing), computing),
        "size_bytes": None,
    }


def latency_rows(arguments: argparse.Namespace, output: dict[str, Any]) -> Iterator[str]:
    """Yield the table of latencies, and a sentence that compares winml with the fastest file of ONNX Runtime."""
    yield "| shape | form | size | wall | times as fast: wall | of computing |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in arguments.models or LATENCY_MODELS:
        files = make_forms(name, arguments, output)
        rows = measure_latency(files, arguments)
        if arguments.openvino_python:
            try:
                rows["openvino int8"] = measure_openvino(files["plain"], rows["plain"], arguments)
            except RuntimeError as error:
                output["troubles"].append(f"OpenVINO, {name}: {error}")
        output["latency"][name] = rows
        for kind, row in rows.items():
            size = f"{row['size_bytes'] / 1e6:.0f} MB" if row["size_bytes"] else "–"
            ratios = " | ".join(
                "{1:.2f} ({0:.2f}–{2:.2f})".format(*row[key])
                for key in ("wall_times_as_fast", "computing_times_as_fast")
            )
            yield f"| {name} | {kind} | {size} | {row['wall_ms']:.2f} ms | {ratios} |"
    yield ""
    for name, rows in output["latency"].items():
        ours = {kind: row["computing_ms"] for kind, row in rows.items() if kind in ("winml dynamic", "winml qdq")}
        bare = {
            kind: row["computing_ms"] for kind, row in rows.items() if kind.startswith(("bare dynamic", "bare qdq"))
        }
        if ours and bare:
            best, other = min(ours, key=lambda kind: ours[kind]), min(bare, key=lambda kind: bare[kind])
            ratio = ours[best] / bare[other]
            yield f"{name}: {best} takes {ratio:.3f} of the computing time of the best other, {other}."


# Sensitivity.


def sensitivity_rows(arguments: argparse.Namespace, output: dict[str, Any]) -> Iterator[str]:
    """Yield the cost of ranking the modules, beside its limit."""
    if not has_option("--sensitivity"):
        yield "This winml quantize has no --sensitivity."
        return
    source = export(SENSITIVITY_MODEL, arguments.cache)
    target = arguments.cache / "sensitivity.json"
    target.unlink(missing_ok=True)
    complete = run([*WINML, "quantize", "-m", str(source), "-o", str(target), "--sensitivity", "-q"])
    modules = json.loads(target.read_text(encoding="utf-8"))["modules"]
    alone, run_s, session_s = one_module_alone(source, next(entry["tag"] for entry in modules if entry["nodes"]))
    allowed = len(modules) * (alone + run_s) + session_s
    output["sensitivity"] = {
        "modules": len(modules), "wall_s": round(complete.wall_s, 2), "peak_bytes": complete.peak_bytes,
        "one_alone_s": round(alone, 3), "run_s": round(run_s, 4), "session_s": round(session_s, 3),
        "allowed_s": round(allowed, 2),
    }  # fmt: skip
    yield "| modules | whole process | one quantized alone | one run | session of the whole | allowed | ratio | peak |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    yield (
        f"| {len(modules)} | {complete.wall_s:.1f} s | {alone:.2f} s | {run_s * 1000:.1f} ms | {session_s:.2f} s | "
        f"{allowed:.1f} s | {complete.wall_s / allowed:.2f} | {complete.peak_bytes / 1e9:.2f} GB |"
    )


def one_module_alone(source: Path, tag: str) -> tuple[float, float, float]:
    """Return seconds of quantizing one module (in this process, written and not compared), of a run, of a session."""
    import onnxruntime as ort

    from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs
    from winml.modelkit.ort.sessions import Session
    from winml.modelkit.quantize.verb import quantize_onnx

    output = source.with_name("alone.onnx")
    walls = []
    for _ in range(4):  # the first imports libraries
        started = time.perf_counter()
        quantize_onnx(source, output, overwrite=True, verify=False, include=[tag])
        walls.append(time.perf_counter() - started)
    started = time.perf_counter()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    session_s = time.perf_counter() - started
    feeds = draw_feeds(graph_inputs(Session(source)), {}, seed=0)
    session.run(None, feeds)
    started = time.perf_counter()
    session.run(None, feeds)
    return statistics.median(walls[1:]), time.perf_counter() - started, session_s


def size_of(model: Path) -> int:
    """Return the bytes of a model file and its data."""
    return sum(file.stat().st_size for file in (model, *model.parent.glob(f"{model.name}.*data*")))


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line for line in reversed(text.strip().splitlines()) if line.strip()), "no words")[-300:]


TABLES = {"cost": cost_rows, "latency": latency_rows, "sensitivity": sensitivity_rows}


def main() -> None:
    """Measure, print the tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="Folder for exports and what is made of them.")
    parser.add_argument("--rows", default=",".join(TABLES), help="Tables to make.")
    parser.add_argument("--models", default="", help="Shapes; each table has its own where left out.")
    parser.add_argument("--modes", default="", help="Modes; all the installed winml quantize has where left out.")
    parser.add_argument("--rounds", type=int, default=3, help="Processes of each kind.")
    parser.add_argument("--runs", type=int, default=30, help="Runs of each file.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4, help="Samples for the ranges of qdq.")
    parser.add_argument("--genai-python", type=Path, help="Interpreter with onnxruntime-genai.")
    parser.add_argument("--optimum-python", type=Path, help="Interpreter with optimum[onnxruntime].")
    parser.add_argument("--openvino-python", type=Path, help="Interpreter with openvino and nncf.")
    add_save_option(parser)
    arguments = parser.parse_args()
    from winml.modelkit.ort.host import has_integer_dot_products

    arguments.models = [name for name in arguments.models.split(",") if name]
    arguments.modes = [mode for mode in arguments.modes.split(",") if mode in OURS] or list(OURS)
    vnni = {True: "yes", False: "no", None: "not known"}[has_integer_dot_products()]
    output: dict[str, Any] = {
        "vnni": vnni, "threads": arguments.threads, "cost": [], "latency": {}, "sensitivity": None, "troubles": [],
    }  # fmt: skip
    print(f"8-bit dot products (VNNI): {vnni}; modes: {', '.join(arguments.modes)}; threads: {arguments.threads}")
    tables: list[str] = []
    for name in arguments.rows.split(","):
        print(f"\n## {name}\n")
        tables += ["", f"**{name}**", ""]
        for line in TABLES[name](arguments, output):
            print(line, flush=True)
            tables.append(line)
    print()
    for trouble in output["troubles"]:
        print(f"not made: {trouble}")
    publish(arguments, output, tables[1:], arguments.rows.replace(",", "-"))


if __name__ == "__main__":
    main()
