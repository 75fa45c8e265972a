"""Gain of ``winml optimize`` over the plain export and over other optimizers.

Method. For each shape (bert-base, minilm, vit-base, resnet-50, gpt2, the encoder of whisper-base; seeded random
weights, made from configs) there is one plain export, kept in a folder given by the user, and made of it:

* ``full``: ``winml optimize --level full``;
* ``open`` and ``open full``: the export with an open batch and open lengths, and ``--level full`` of it; both run at
  the sizes of the plain export;
* ``compiled``: ``winml compile --ep cpu`` of ``full``; suits processors like this one only;
* with ``--peers FOLDER``: ``optimum`` O2 and O3 (where it knows the architecture) and ``onnxslim``, installed into an
  environment of their own in that folder, with the same ONNX Runtime; what does not install or fails is said;
* with ``--others``, for orientation, each in a process of its own and not in turns: the PyTorch module under
  ``torch.compile``, and with ``--openvino-python PYTHON`` the plain export in OpenVINO, in fp32 and at its own choice.

Latency: every file gets a session with the options of a user who sets none but the number of threads; then all are run
in turns, in an order drawn anew each round, on the same values, in one process, each after a rest. Of each run the wall
time and the time of computing (of the process) are taken; with ``--threads 1`` the second hardly depends on what else
the machine does. The ratio to the plain export is taken within each round, and the median and the quarter points of the
ratios printed.

Cold session creation: a fresh process per session, in turns, files in the page cache; only the constructor is timed.

A table for people, then one line of JSON.

    python benchmarks/optimize.py --cache FOLDER [--models bert-base,gpt2] [--rounds 30] [--threads 1] [--peers FOLDER]
        [--others] [--openvino-python PYTHON]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import random  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
import venv  # noqa: E402
from typing import Any  # noqa: E402

from results import add_save_option, markdown_table, publish  # noqa: E402

WINML = [sys.executable, "-m", "winml.modelkit"]

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-base": ("BertConfig", "BertModel", {}),
    "minilm": (
        "BertConfig", "BertModel",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "vit-base": ("ViTConfig", "ViTForImageClassification", {}),
    "resnet-50": ("ResNetConfig", "ResNetForImageClassification", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
         "decoder_layers": 6, "decoder_attention_heads": 8, "decoder_ffn_dim": 2048},
    ),
}  # fmt: skip
"""Name → config class, model class, what differs from the config's defaults."""

SUBMODELS = {"whisper": "encoder"}
OPEN_SIZES = {
    "vit-base": ["--dynamic-batch"],
    "resnet-50": ["--dynamic-batch"],
    "whisper": ["--dynamic-batch"],
}
"""Name → what opens its sizes; the others have an open length as well."""

REST_SECONDS = 0.06

COLD = (
    "import sys, time, onnxruntime as ort; options = ort.SessionOptions(); options.log_severity_level = 3;"
    "started = time.perf_counter();"
    "ort.InferenceSession(sys.argv[1], options, providers=['CPUExecutionProvider']);"
    "print(time.perf_counter() - started)"
)

PEER = """
import shutil, sys
from pathlib import Path
source, target, kind, config = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
if kind == "onnxslim":
    import onnx, onnxslim
    onnx.save(onnxslim.slim(str(source)), target)
else:
    from optimum.onnxruntime import ORTOptimizer
    from optimum.onnxruntime.configuration import AutoOptimizationConfig
    from transformers import AutoConfig
    work = target.with_suffix("")
    optimizer = ORTOptimizer([source], config=AutoConfig.from_pretrained(config))
    optimizer.optimize(save_dir=work, optimization_config=getattr(AutoOptimizationConfig, kind)(), file_suffix="")
    (work / source.name).replace(target)
    shutil.rmtree(work)
"""
"""Run in the peers' environment."""


OPENVINO = """
import sys, time
import numpy, openvino
path, feeds, threads, rounds, precision = sys.argv[1], numpy.load(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
if precision != "own":
    settings["INFERENCE_PRECISION_HINT"] = precision
request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
seconds = []
for _ in range(rounds + 3):
    started = time.perf_counter()
    request.infer(dict(feeds))
    seconds.append(time.perf_counter() - started)
print(sorted(seconds[3:])[rounds // 2])
"""
"""Run in the environment of OpenVINO."""

TORCH_COMPILE = """
import sys, time
import numpy, torch, transformers
torch.set_num_threads(int(sys.argv[3]))
rounds, kind, part = int(sys.argv[4]), sys.argv[5], sys.argv[6]
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
module = getattr(transformers, kind)(config).eval()
module = module.get_encoder() if part else module
feeds = {name: torch.from_numpy(array) for name, array in numpy.load(sys.argv[2]).items()}
compiled, seconds = torch.compile(module), []
with torch.inference_mode():
    for _ in range(rounds + 3):
        started = time.perf_counter()
        compiled(**feeds)
        seconds.append(time.perf_counter() - started)
print(sorted(seconds[3:])[rounds // 2])
"""


def make_export(name: str, cache: Path, kind: str = "plain") -> Path:
    """Return the export with fixed sizes (``plain``) or open sizes (``open``); it is created once."""
    import transformers

    target = cache / name / f"{kind}.onnx"
    if not target.is_file():
        config_class, model_class, sizes = SHAPES[name]
        config = getattr(transformers, config_class)(architectures=[model_class], **sizes)
        config.save_pretrained(target.parent)
        source = ["-m", str(target.parent / "config.json"), "--random-weights"]
        part = SUBMODELS.get(name)
        if part is None:
            options = OPEN_SIZES.get(name, ["--dynamic-batch", "--dynamic-seq-len"]) if kind == "open" else []
            call([*WINML, "export", *source, "--no-cache", *options, "-o", str(target), "-q"])
        elif kind == "open":  # parts have open sizes anyway, and the file of a part is named after it
            call([*WINML, "export", *source, "--submodel", part, "-o", str(target), "-q"])
            target.with_name(f"{kind}_{part}.onnx").replace(target)
        else:
            opened = make_export(name, cache, "open")
            call([*WINML, "export", "-m", str(opened), "--batch-size", "1", "-o", str(target), "-q"])
    return target


def call(command: list[str]) -> None:
    """Run a command; end with its words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-400:]}")


def make_variants(name: str, plain: Path, peers: Path | None) -> tuple[dict[str, Path], list[str]]:
    """Return the files to compare, the plain export first, and the failures."""
    opened = make_export(name, plain.parent.parent, "open")
    files, troubles = {"plain": plain, "open": opened}, []
    for kind, source in {"full": plain, "open full": opened}.items():
        files[kind] = plain.with_name(f"{kind.replace(' ', '_')}.onnx")
        options = ["--level", "full", "--overwrite", "-q"]
        call([*WINML, "optimize", "-m", str(source), "-o", str(files[kind]), *options])
    files["compiled"] = plain.with_name("compiled.onnx")
    compiled = ["-o", str(files["compiled"]), "--ep", "cpu", "--overwrite", "-q"]
    call([*WINML, "compile", "-m", str(files["full"]), *compiled])
    if peers is not None:
        python = peers_python(peers)
        for kind in ("O2", "O3", "onnxslim"):
            target = plain.with_name(f"{kind}.onnx")
            try:
                if not target.is_file():
                    call([str(python), "-c", PEER, str(plain), str(target), kind, str(plain.parent)])
                files[kind] = target
            except RuntimeError as error:
                troubles.append(f"{name} {kind}: {str(error).splitlines()[-1]}")
    return files, troubles


def peers_python(folder: Path) -> Path:
    """Return the interpreter of the peers' environment, which is made where it is not there."""
    import onnxruntime
    import torch

    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.is_file():
        venv.create(folder, with_pip=True)
        own_torch = torch.__version__.partition("+")[0]
        call([str(python), "-m", "pip", "install", "-q", f"torch=={own_torch}"])
        requested = ["onnxslim", "optimum[onnxruntime]", f"onnxruntime=={onnxruntime.__version__}"]
        call([str(python), "-m", "pip", "install", "-q", *requested])
    return python


def measure_latency(files: dict[str, Path], rounds: int, threads: int) -> dict[str, Any]:
    """Run all files in turns; return per file the median times and the ratios to the plain export."""
    import numpy as np
    import onnxruntime as ort

    from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs
    from winml.modelkit.ort.sessions import Session

    plain = Session(files["plain"])
    feeds = draw_feeds(graph_inputs(plain), {}, seed=0)
    del plain
    np.savez(files["plain"].with_name("feeds.npz"), **feeds)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    sessions = {
        kind: ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for kind, path in files.items()
    }
    for session in sessions.values():
        for _ in range(3):
            session.run(None, feeds)
    wall: dict[str, list[float]] = {kind: [] for kind in files}
    computing: dict[str, list[float]] = {kind: [] for kind in files}
    order = list(files)
    for _ in range(rounds):
        random.shuffle(order)
        for kind in order:
            # Threads of the session before wait for work by spinning for some 40 ms, and would be measured with.
            time.sleep(REST_SECONDS)
            started, spent = time.perf_counter(), time.process_time()
            sessions[kind].run(None, feeds)
            computing[kind].append(time.process_time() - spent)
            wall[kind].append(time.perf_counter() - started)
    return {
        kind: {
            "wall_ms": round(statistics.median(wall[kind]) * 1000, 3),
            "wall_ratio": quarters(wall[kind], wall["plain"]),
            "computing_ratio": quarters(computing[kind], computing["plain"]),
        }
        for kind in files
    }


def quarters(values: list[float], plain: list[float]) -> list[float]:
    """Return the first quarter point, the median and the third quarter point of the ratios, pair by pair."""
    ratios = [value / other for value, other in zip(values, plain, strict=True)]
    return [round(point, 3) for point in statistics.quantiles(ratios, n=4)]


def measure_cold(files: dict[str, Path], rounds: int) -> dict[str, dict[str, float]]:
    """Open a session of each file in a fresh process, in turns; return milliseconds and how many times as fast."""
    seconds: dict[str, list[float]] = {kind: [] for kind in files}
    for _ in range(rounds + 1):
        for kind, path in files.items():
            done = subprocess.run([sys.executable, "-c", COLD, str(path)], capture_output=True, text=True, check=True)
            seconds[kind].append(float(done.stdout))
    plain = statistics.median(seconds["plain"][1:])  # the first round brings the files into the page cache
    medians = {kind: statistics.median(values[1:]) for kind, values in seconds.items()}
    return {
        kind: {"cold_ms": round(value * 1000, 1), "times_as_fast": round(plain / value, 2)}
        for kind, value in medians.items()
    }


def measure_others(name: str, plain: Path, arguments: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """Return the median milliseconds of other runtimes, each in a separate process, and the failures."""
    feeds, bounds = plain.with_name("feeds.npz"), [str(arguments.threads), str(arguments.rounds)]
    model = [SHAPES[name][1], SUBMODELS.get(name, "")]
    others = {"torch.compile": [sys.executable, "-c", TORCH_COMPILE, str(plain.parent), str(feeds), *bounds, *model]}
    if arguments.openvino_python:
        openvino = [str(arguments.openvino_python), "-c", OPENVINO, str(plain), str(feeds), *bounds]
        others |= {"OpenVINO fp32": [*openvino, "f32"], "OpenVINO": [*openvino, "own"]}
    outputs, troubles = {}, []
    for kind, command in others.items():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            troubles.append(f"{name} {kind}: {done.stderr.strip().splitlines()[-1]}")
        else:
            outputs[kind] = round(float(done.stdout.split()[-1]) * 1000, 3)
    return outputs, troubles


def node_counts(files: dict[str, Path]) -> dict[str, int]:
    """Return the number of nodes of each file, including subgraphs."""
    import onnx_ir as ir

    return {kind: sum(1 for _ in ir.load(path).graph.all_nodes()) for kind, path in files.items()}


def main() -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="Folder for exports and what is made of them.")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cold-rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", type=Path, help="Folder for an environment with the other optimizers.")
    parser.add_argument("--others", action="store_true", help="Run other runtimes too, for orientation.")
    parser.add_argument("--openvino-python", type=Path, help="Interpreter with openvino.")
    add_save_option(parser)
    arguments = parser.parse_args()
    output: dict[str, Any] = {"threads": arguments.threads, "rounds": arguments.rounds, "models": {}, "troubles": []}
    table: list[str] = []
    for name in arguments.models.split(","):
        files, troubles = make_variants(name, make_export(name, arguments.cache), arguments.peers)
        latency = measure_latency(files, arguments.rounds, arguments.threads)
        cold = measure_cold(files, arguments.cold_rounds)
        nodes_of = node_counts(files)
        output["models"][name] = {kind: {"nodes": nodes_of[kind], **latency[kind], **cold[kind]} for kind in files}
        output["troubles"] += troubles
        for kind, row in output["models"][name].items():
            cells = {
                "model": name,
                "file": kind,
                "nodes": str(row["nodes"]),
                "wall": f"{row['wall_ms']:.2f} ms",
                "wall / plain": "{1:.3f} ({0:.3f}–{2:.3f})".format(*row["wall_ratio"]),
                "computing / plain": "{1:.3f} ({0:.3f}–{2:.3f})".format(*row["computing_ratio"]),
                "cold session": f"{row['cold_ms']:.1f} ms",
                "cold session, times as fast": f"{row['times_as_fast']:.2f}",
            }
            lines = markdown_table([cells])[2 if table else 0 :]
            print("\n".join(lines), flush=True)
            table += lines
        if arguments.others:
            output.setdefault("others", {})[name], troubles = measure_others(name, files["plain"], arguments)
            output["troubles"] += troubles
            for kind, milliseconds in output["others"][name].items():
                print(f"{name:<10} {kind:<15} {milliseconds:>9.2f}")
    for trouble in output["troubles"]:
        print(f"not made: {trouble}")
    publish(arguments, output, table, f"{arguments.threads}-threads")


if __name__ == "__main__":
    main()
