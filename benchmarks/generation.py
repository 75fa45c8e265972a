"""Cost of a decoder's build and of its generation, beside onnxruntime-genai's builder.

Method. Llama-shaped checkpoints are made as in ``weights.py``: seeded random weights in bf16, written shard by shard,
with a tokenizer of as many words as the model has tokens. For each size and precision these run in alternation:

* ``python -m winml.modelkit build -m CHECKPOINT -o FOLDER --layout genai --no-verify -q``, with ``--dtype fp32`` or
  ``--precision int4 --symmetric``
* ``GENAI_PYTHON -m onnxruntime_genai.models.builder -i CHECKPOINT -o FOLDER -p PRECISION -e cpu``
* with ``--mobius-python``, in fp32: ``MOBIUS_PYTHON -m mobius build --config CHECKPOINT --dtype f32 --ep cpu
  --runtime ort-genai FOLDER``, which makes the graph without tracing the model

Wall time and peak resident memory are the operating system's account of each finished process; what was written is
synced inside the measured time. Then both folders generate, again in alternation, each time in a new process: through
onnxruntime-genai's runtime, through ONNX Runtime alone, whose cache stays in its own memory from run to run, and
through the loop of ``winml generate``. A process generates once to warm up and then as often as ``--rounds`` says; it
reports the median of the time to the first token, and of the time of one token after it, and the computing time of all
after the first, for each of them. The prompt is random; the tokens are the best ones, and as many in both.
The last lines compare our loop with genai's runtime on one folder, ours.

The tokens of the two folders need not be the same in 4 bits, since each chooses its own scales; in fp32 the share of
equal tokens is printed. A table for people, then one line of JSON.

    python benchmarks/generation.py --genai-python PYTHON [--sizes 0.5,1] [--precisions int4,fp32] [--runs 3]
        [--rounds 3] [--prompt 128] [--tokens 64] [--threads 0] [--folder DIR] [--mobius-python PYTHON]

``PYTHON`` is that of an environment with onnxruntime-genai, or mobius-onnx, and torch. The largest size needs about
nine times its weights in bf16 on the disk, with mobius eleven times.
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

from results import add_save_option, markdown_table, publish  # noqa: E402

VOCABULARY = 32_000
OURS, THEIRS, MOBIUS = "winml", "genai", "mobius"
PACKAGES = {OURS: "winml-modelkit", THEIRS: "onnxruntime-genai", MOBIUS: "mobius-onnx"}
RUNTIMES = ("genai", "onnxruntime", "winml")


def add_tokenizer(checkpoint: Path) -> None:
    """Write a tokenizer of one word for each token into a checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a token of a text
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
    )
    fast.save_pretrained(checkpoint)


def build_command(who: str, checkpoint: Path, output: Path, precision: str, python: str) -> list[str]:
    """Return the command that is measured."""
    if who == THEIRS:
        builder = [python, "-m", "onnxruntime_genai.models.builder"]
        return [*builder, "-i", str(checkpoint), "-o", str(output), "-p", precision, "-e", "cpu"]
    if who == MOBIUS:
        options = ["--dtype", "f32", "--ep", "cpu", "--runtime", "ort-genai"]
        return [python, "-m", "mobius", "build", "--config", str(checkpoint), *options, str(output)]
    command = [python, "-m", "winml.modelkit", "build", "-m", str(checkpoint), "-o", str(output)]
    command += ["--layout", "genai", "--no-verify", "-q"]
    # Weights in bf16 are computed in float32 without a precision.
    # Both write weights without zero points: other kernels would run with zero points.
    few_bits = ["--precision", precision, "--symmetric"]
    return [*command, *(["--dtype", "fp32"] if precision == "fp32" else few_bits)]


def measure_build(command: list[str], output: Path) -> dict[str, float]:
    """Build once; a folder that is there goes first."""
    from process_cost import run

    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    started = time.perf_counter()
    cost = run(command)
    os.sync()
    wall = time.perf_counter() - started
    return {"wall_s": wall, "cpu_s": cost.cpu_s, "peak_bytes": cost.peak_bytes}


def installed_version(who: str, python: str) -> str:
    """Return the version of a builder in its environment."""
    program = f"import importlib.metadata; print(importlib.metadata.version({PACKAGES[who]!r}))"
    return subprocess.run([python, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def generate_in_process(runtime: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate in a separate process; return its report."""
    python = options.genai_python if runtime == "genai" else sys.executable
    command = [python, __file__, "--generate", runtime, str(folder)]
    command += ["--rounds", str(options.rounds), "--prompt", str(options.prompt), "--tokens", str(options.tokens)]
    command += ["--threads", str(options.threads)]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    output: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return output


def generate(runtime: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate the same text several times; return the medians and the tokens."""
    import numpy as np

    prompt = np.random.default_rng(0).integers(3, VOCABULARY, options.prompt).astype(np.int32)
    makers = {"genai": _genai_generator, "onnxruntime": _plain_generator, "winml": _winml_generator}
    once = makers[runtime](folder, options.threads)
    firsts, steps, computing = [], [], []
    tokens: list[int] = []
    for number in range(options.rounds + 1):
        started, tokens, times = time.perf_counter(), [], []
        for token in once(prompt, options.tokens):
            times.append(time.perf_counter() - started)
            if not tokens:
                computed = time.process_time()
            tokens.append(token)
            started = time.perf_counter()
        if number:
            firsts.append(times[0])
            steps.append(median(times[1:]))
            computing.append((time.process_time() - computed) / max(len(times) - 1, 1))
    return {"first_s": median(firsts), "step_s": median(steps), "step_cpu_s": median(computing), "tokens": tokens}


def _winml_generator(folder: Path, threads: int) -> Any:
    from winml.modelkit.generate.generation.loop import generate_tokens
    from winml.modelkit.generate.generation.settings import GenerationSettings
    from winml.modelkit.ort.decoding.decoder import DecoderGraph
    from winml.modelkit.ort.sessions import Session

    graph = DecoderGraph(Session(folder / "model.onnx", threads=threads or None))

    def once(prompt: Any, count: int) -> Any:
        settings = GenerationSettings(max_new_tokens=count)
        for entry in generate_tokens(graph, prompt.tolist(), settings):
            yield entry.token

    return once


def _genai_generator(folder: Path, threads: int) -> Any:
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    if threads:
        options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
        config.overlay(json.dumps(options))
    model = genai.Model(config)

    def once(prompt: Any, count: int) -> Any:
        parameters = genai.GeneratorParams(model)
        length = len(prompt) + count
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(prompt)
        for _ in range(count):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    return once


def _plain_generator(folder: Path, threads: int) -> Any:
    import numpy as np
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    session = ort.InferenceSession(str(folder / "model.onnx"), settings)
    names = [value.name for value in session.get_inputs()]
    caches = [name for name in names if name.startswith("past_key_values")]
    outputs = [name.replace("past_key_values", "present") for name in caches]
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    empty = np.zeros((1, config["num_key_value_heads"], 0, config["head_size"]), np.float32)

    def once(prompt: Any, count: int) -> Any:
        tokens, length = prompt[None].astype(np.int64), len(prompt)
        held = {name: ort.OrtValue.ortvalue_from_numpy(empty) for name in caches}
        for _ in range(count):
            positions = np.arange(length - tokens.shape[1], length)[None]
            known = {"input_ids": tokens, "attention_mask": np.ones((1, length), np.int64), "position_ids": positions}
            binding = session.io_binding()
            for name in names:
                if name in known:
                    binding.bind_cpu_input(name, known[name])
                else:
                    binding.bind_ortvalue_input(name, held[name])
            for name in ("logits", *outputs):
                binding.bind_output(name, "cpu")
            session.run_with_iobinding(binding)
            logits, *present = binding.get_outputs()
            held = dict(zip(caches, present, strict=True))
            best = int(logits.numpy()[0, -1].argmax())
            tokens, length = np.array([[best]]), length + 1
            yield best

    return once


def measure_size(size: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure one size in all precisions; its checkpoint is gone afterwards."""
    checkpoint = folder / "checkpoint"
    subprocess.run([sys.executable, FOLDER / "weights.py", "--make", size, checkpoint], check=True)
    subprocess.run([sys.executable, __file__, "--tokenizer", checkpoint], check=True)
    rows = [_measure(size, precision, options, checkpoint) for precision in options.precisions.split(",")]
    shutil.rmtree(checkpoint)
    return rows


def _measure(size: str, precision: str, options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    pythons = {OURS: sys.executable, THEIRS: options.genai_python}
    if options.mobius_python and precision == "fp32":
        pythons[MOBIUS] = options.mobius_python
    folders = {who: checkpoint.with_name(who) for who in pythons}
    builds: dict[str, list[dict[str, float]]] = {who: [] for who in folders}
    for _ in range(options.runs):
        for who, output in folders.items():
            command = build_command(who, checkpoint, output, precision, pythons[who])
            builds[who].append(measure_build(command, output))
    if MOBIUS in folders:
        shutil.rmtree(folders.pop(MOBIUS))
    outputs: dict[str, dict[str, list[dict[str, Any]]]] = {
        runtime: {who: [] for who in folders} for runtime in RUNTIMES
    }
    for _ in range(options.runs):
        for runtime, by_folder in outputs.items():
            for who, output in folders.items():
                by_folder[who].append(generate_in_process(runtime, output, options))
    sizes = {who: sum(file.stat().st_size for file in output.rglob("*.data")) for who, output in folders.items()}
    for output in folders.values():
        shutil.rmtree(output)
    versions = {who: installed_version(who, python) for who, python in pythons.items()}
    return {"versions": versions, **_row(size, precision, builds, outputs, sizes)}


def _row(size: str, precision: str, builds: Any, outputs: Any, sizes: dict[str, int]) -> dict[str, Any]:
    from process_cost import spread

    row: dict[str, Any] = {"billions": size, "precision": precision, "data_bytes": sizes}
    for key in ("wall_s", "cpu_s", "peak_bytes"):
        row[key] = {who: spread([build[key] for build in runs]) for who, runs in builds.items()}
    for runtime, by_folder in outputs.items():
        reported: dict[str, Any] = {
            key: {who: spread([1000 * output[key] for output in runs]) for who, runs in by_folder.items()}
            for key in ("first_s", "step_s", "step_cpu_s")
        }
        pairs = list(zip(*(runs[-1]["tokens"] for runs in by_folder.values()), strict=True))
        row[runtime] = {
            "first_ms": reported["first_s"],
            "step_ms": reported["step_s"],
            "step_cpu_ms": reported["step_cpu_s"],
            "equal_tokens": sum(left == right for left, right in pairs) / len(pairs),
        }
    return row


def _table_rows(row: dict[str, Any]) -> list[dict[str, str]]:
    def compared(
        what: str, values: dict[str, dict[str, float]], unit: str, scale: float = 1.0, peer: str = THEIRS
    ) -> dict[str, str]:
        ours, theirs = (values[who]["median"] for who in (OURS, peer))
        return {
            "model": f"{row['billions']} B {row['precision']}",
            "measured": what,
            "winml": f"{ours * scale:.2f} {unit}",
            "peer": f"{peer} {row['versions'][peer]}",
            "its value": f"{theirs * scale:.2f} {unit}",
            "ratio": f"{ours / theirs:.2f}",
        }

    lines = [
        compared(f"build, {what}", row[key], unit, scale, peer)
        for peer in row["wall_s"]
        if peer != OURS
        for what, key, unit, scale in (
            ("wall time", "wall_s", "s", 1.0),
            ("computing time", "cpu_s", "s", 1.0),
            ("peak memory", "peak_bytes", "GB", 1e-9),
        )
    ]
    for runtime in RUNTIMES:
        reported = row[runtime]
        lines.append(compared(f"both folders in {runtime}: first token", reported["first_ms"], "ms"))
        equal = f"{reported['equal_tokens']:.0%} equal tokens"
        lines.append(compared(f"both folders in {runtime}: later token ({equal})", reported["step_ms"], "ms"))
    for key, what in (
        ("first_ms", "first token"), ("step_ms", "later token"), ("step_cpu_ms", "later token, computing time")
    ):  # fmt: skip
        pair = {who: row[runtime][key][OURS] for who, runtime in ((OURS, "winml"), (THEIRS, "genai"))}
        lines.append(compared(f"our folder, our loop beside that of genai: {what}", pair, "ms"))
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--genai-python", help="Python of an environment with onnxruntime-genai")
    parser.add_argument("--mobius-python", help="Python of an environment with mobius-onnx, to compare builds in fp32")
    parser.add_argument("--sizes", default="0.5,1", help="billions of parameters, as weights.py knows them")
    parser.add_argument("--precisions", default="int4,fp32", help="of int4, fp32")
    parser.add_argument("--runs", type=int, default=3, help="builds, and processes that generate")
    parser.add_argument("--rounds", type=int, default=3, help="texts that each process generates")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of an operator; 0: as many as the runtime likes"
    )
    parser.add_argument("--folder", type=Path, help="where to work; else the place for temporary files")
    parser.add_argument("--generate", nargs=2, metavar=("RUNTIME", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.tokenizer:
        add_tokenizer(options.tokenizer)
        return
    if options.generate:
        print(json.dumps(generate(options.generate[0], Path(options.generate[1]), options)))
        return
    if not options.genai_python:
        raise SystemExit("--genai-python is missing: the Python of an environment with onnxruntime-genai")
    rows = []
    table: list[str] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in options.sizes.split(","):
            for row in measure_size(size, options, Path(folder)):
                rows.append(row)
                lines = markdown_table(_table_rows(row))[2 if table else 0 :]
                print("\n".join(lines), flush=True)
                table += lines
    publish(options, {"benchmark": "generation", "rows": rows}, table)


if __name__ == "__main__":
    main()
