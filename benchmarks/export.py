"""Cost of ``winml export`` beside a bare ``torch.onnx.export``.

Method. Two checkpoints of real size are made first (bert-base and resnet-50 shapes, seeded random weights, saved as
safetensors). Then whole processes run in alternation, A B A B …, after one warm-up of each that is not counted:

* A: ``python -m winml.modelkit export -m CHECKPOINT -o model.onnx --no-verify -q``
* B: this file with ``--bare``: loads the same checkpoint and calls ``torch.onnx.export`` with the same exporter, opset
  and inputs.

Wall time and peak resident memory are the operating system's own account of each finished process. Every ratio is taken
within a pair, so a drift of the machine's speed cancels; the median and the spread (smallest to largest) of the pairs
are printed. Both files are removed between runs. A table for people, then one line of JSON; ``--save`` writes both to
benchmarks/results, as every benchmark with this option does.

    python benchmarks/export.py [--pairs 5] [--models bert-base,resnet-50]

``--verified`` asks instead what the comparison with PyTorch costs: A is the export as its user types it, verified, B
the same with ``--no-verify``. With ``--against FOLDER``, B is the verified export of another checkout:
what a change made of the cost.

    python benchmarks/export.py --verified [--against ../earlier] [--models bert-base,gpt2,resnet-50]

``--exporters`` compares ``winml export --dynamo --no-verify`` with ``--no-dynamo``.

    python benchmarks/export.py --exporters [--models bert-base,gpt2,vit-base,resnet-50,llama-0.5]

``--side-by-side`` runs five exports of each model: ``winml export`` unverified and verified, bare ``torch.onnx.export``
with TorchScript and with dynamo and, with ``--optimum-python`` of another environment, ``optimum-cli export onnx``. The
order is shuffled in each round, and a pause lets caches of processor and disk settle. ``gpt2`` and ``llama-0.5``
are exported with their KV cache by winml alone. Of Llama and Whisper there is no bare TorchScript export: it fails
(``aten::diff`` at opset 17), and ratios are to dynamo.

    python benchmarks/export.py --side-by-side [--rounds 5] [--optimum-python PYTHON] [--models bert-base,vit-base]
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
import random  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

from process_cost import Cost, run, spread  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

OPSET = 17
SEQUENCE = 128
INPUTS = {
    "bert-base": {"input_ids": [1, SEQUENCE], "attention_mask": [1, SEQUENCE], "token_type_ids": [1, SEQUENCE]},
    "resnet-50": {"pixel_values": [1, 3, 224, 224]},
}
SIDE_BY_SIDE = {
    "bert-base": INPUTS["bert-base"],
    "vit-base": INPUTS["resnet-50"],
    "gpt2": {"input_ids": [1, SEQUENCE], "attention_mask": [1, SEQUENCE]},
    "resnet-50": INPUTS["resnet-50"],
    "bert-tiny": INPUTS["bert-base"],
    "whisper-tiny": {"input_features": [1, 80, 3000], "decoder_input_ids": [1, SEQUENCE]},
    "llama-0.5": {"input_ids": [1, SEQUENCE], "attention_mask": [1, SEQUENCE]},
}
CAUSAL = frozenset({"gpt2", "llama-0.5"})
NOT_BARE = frozenset({"whisper-tiny", "llama-0.5"})
"""A bare TorchScript export of these fails: ``aten::diff`` has no form at opset 17."""
EXPORTERS = ("bert-base", "gpt2", "vit-base", "resnet-50", "llama-0.5")
PAUSE_S = 1.0
"""Between two processes. Chosen: longer than the writes of a file of 500 MB take to reach the disk here."""


def make_checkpoint(name: str, folder: Path) -> None:
    """Save a model of the named shape."""
    import torch
    import transformers

    torch.manual_seed(0)
    if name == "bert-base":
        model = transformers.BertModel(transformers.BertConfig())
    elif name == "bert-tiny":
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
        model = transformers.BertModel(transformers.BertConfig(**sizes))
    elif name == "llama-0.5":
        sizes = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, intermediate_size=4864, vocab_size=151_936, tie_word_embeddings=True)
        model = transformers.LlamaForCausalLM(config)
    elif name == "vit-base":
        model = transformers.ViTModel(transformers.ViTConfig())
    elif name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    elif name == "whisper-tiny":
        model = transformers.WhisperModel(transformers.WhisperConfig())
    else:
        model = transformers.ResNetModel(transformers.ResNetConfig())
    model.save_pretrained(folder)


def export_bare(name: str, folder: str, output: str, *, dynamo: bool) -> None:
    """Load a checkpoint and call ``torch.onnx.export``, as a user without this tool would."""
    import torch
    import transformers

    auto = transformers.AutoModelForCausalLM if name in CAUSAL else transformers.AutoModel
    model = auto.from_pretrained(folder).eval()
    model.config.use_cache = False
    shapes = SIDE_BY_SIDE[name]
    tensors = tuple(
        torch.ones(shape, dtype=torch.int64) if len(shape) == 2 else torch.randn(shape) for shape in shapes.values()
    )
    forward = model.forward
    # transformers 5 refuses positional arguments, and the exporter passes no keywords.
    model.forward = lambda *values: tuple(forward(**dict(zip(shapes, values, strict=True))).values())
    with torch.no_grad():
        if dynamo:
            torch.onnx.export(model, tensors, output, input_names=list(shapes), dynamo=True)
        else:
            torch.onnx.export(model, tensors, output, input_names=list(shapes), opset_version=OPSET, dynamo=False)


def commands(name: str, checkpoint: Path, output: Path) -> tuple[list[str], list[str]]:
    """Return the two commands to compare."""
    shapes = INPUTS[name]
    sizes = (
        {"sequence_length": SEQUENCE}
        if "input_ids" in shapes
        else dict(zip(("height", "width"), shapes["pixel_values"][2:], strict=True))
    )
    ours = [sys.executable, "-m", "winml.modelkit", "export", "-m", str(checkpoint), "-o", str(output)]
    ours += ["--task", "feature-extraction", "--shape-config", json.dumps(sizes), "--no-verify", "-q"]
    return ours, [sys.executable, __file__, "--bare", name, str(checkpoint), str(output)]


def verified_commands(checkpoint: Path, output: Path, against: Path | None) -> tuple[list[str], list[str]]:
    """Return the verified export, and the same of another checkout, or without the comparison."""
    verified = [sys.executable, "-m", "winml.modelkit", "export", "-m", str(checkpoint), "-o", str(output), "-q"]
    if against is None:
        return verified, [*verified, "--no-verify"]
    return verified, ["env", f"PYTHONPATH={against.resolve() / 'src'}", *verified]


def exporter_commands(checkpoint: Path, output: Path) -> tuple[list[str], list[str]]:
    """Return the unverified export with dynamo, and the same with TorchScript."""
    _, unverified = verified_commands(checkpoint, output, None)
    return [*unverified, "--dynamo"], [*unverified, "--no-dynamo"]


def compare(
    name: str, pairs: int, folder: Path, *, verified: bool, against: Path | None, exporters: bool = False
) -> dict[str, Any]:
    """Measure one model."""
    checkpoint = folder / name
    make_checkpoint_process = [sys.executable, __file__, "--make", name, str(checkpoint)]
    subprocess.run(make_checkpoint_process, check=True)
    output = folder / "out" / "model.onnx"
    first, other = "winml", "bare" if not verified else "not verified" if against is None else "earlier"
    if exporters:
        both, (first, other) = exporter_commands(checkpoint, output), ("dynamo", "TorchScript")
    else:
        both = verified_commands(checkpoint, output, against) if verified else commands(name, checkpoint, output)
    costs: list[tuple[Cost, Cost]] = []
    for pair in range(pairs + 1):
        row = []
        for command in both:
            output.parent.mkdir(exist_ok=True)
            row.append(run(command))
            for file in output.parent.iterdir():
                file.unlink()
        if pair:
            costs.append((row[0], row[1]))
    wall = [ours.wall_s / bare.wall_s for ours, bare in costs]
    peak = [ours.peak_bytes / bare.peak_bytes for ours, bare in costs]
    return {
        "model": name,
        "pairs": pairs,
        "wall_ratio": spread(wall),
        "peak_memory_ratio": spread(peak),
        "wall_s": {
            first: spread([ours.wall_s for ours, _ in costs]),
            other: spread([bare.wall_s for _, bare in costs]),
        },
        "peak_bytes": {
            first: spread([ours.peak_bytes for ours, _ in costs]),
            other: spread([bare.peak_bytes for _, bare in costs]),
        },
    }


def sides(name: str, checkpoint: Path, output: Path, optimum_python: Path | None) -> dict[str, list[str]]:
    """Return the exports to run side by side, by name."""
    verified, unverified = verified_commands(checkpoint, output, None)
    bare = [sys.executable, __file__, "--bare", name, str(checkpoint), str(output)]
    found = {"winml": unverified, "winml verified": verified, "TorchScript": bare, "dynamo": [*bare, "--dynamo"]}
    if name in NOT_BARE:
        del found["TorchScript"]
    if optimum_python is not None:
        task = "text-generation" if name in CAUSAL else "feature-extraction"
        cli = [str(optimum_python.parent / "optimum-cli"), "export", "onnx", "-m", str(checkpoint), "--task", task]
        found["optimum"] = [*cli, str(output.parent)]
    return found


def side_by_side(name: str, rounds: int, folder: Path, optimum_python: Path | None) -> dict[str, Any]:
    """Measure one model in shuffled rounds, after one that is not counted."""
    checkpoint, output = folder / name, folder / "out" / "model.onnx"
    subprocess.run([sys.executable, __file__, "--make", name, str(checkpoint)], check=True)
    exports = sides(name, checkpoint, output, optimum_python)
    costs: dict[str, list[Cost]] = {side: [] for side in exports}
    order = random.Random(0)  # noqa: S311  # no secret
    for number in range(rounds + 1):
        for side in order.sample(sorted(exports), len(exports)):
            output.parent.mkdir()
            cost = run(exports[side])
            shutil.rmtree(output.parent)
            time.sleep(PAUSE_S)
            if number:
                costs[side].append(cost)
    bare = [cost.wall_s for cost in costs.get("TorchScript", costs["dynamo"])]
    return {
        "model": name,
        "rounds": rounds,
        "wall_s": {side: spread([cost.wall_s for cost in found]) for side, found in costs.items()},
        "wall_ratio": {
            side: spread([cost.wall_s / other for cost, other in zip(found, bare, strict=True)])
            for side, found in costs.items()
        },
        "peak_bytes": {side: spread([cost.peak_bytes for cost in found]) for side, found in costs.items()},
    }


def side_by_side_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: wall time, its ratio to bare TorchScript in the same round, and peak memory.

    Where there is no bare TorchScript export, the ratios are to dynamo.
    """
    cells = []
    every_side = dict.fromkeys(side for row in rows for side in row["wall_s"])
    for row in rows:
        line = {"model": row["model"], **dict.fromkeys(every_side, "fails")}
        for side in row["wall_s"]:
            wall, ratio, peak = (row[key][side] for key in ("wall_s", "wall_ratio", "peak_bytes"))
            line[side] = f"{wall['median']:.1f} s, {_range(ratio)}, {peak['median'] / 1e6:.0f} MB"
        cells.append(line)
    return markdown_table(cells)


def pair_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: both ratios, and wall time and peak memory of both sides."""
    sides = list(rows[0]["wall_s"])
    return markdown_table(
        [
            {
                "model": row["model"],
                f"wall, {'/'.join(sides)}": _range(row["wall_ratio"]),
                f"peak memory, {'/'.join(sides)}": _range(row["peak_memory_ratio"]),
                **{
                    side: f"{row['wall_s'][side]['median']:.1f} s, {row['peak_bytes'][side]['median'] / 1e9:.2f} GB"
                    for side in sides
                },
            }
            for row in rows
        ]
    )


def _range(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f}–{values['max']:.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", help="bert-base, resnet-50, and gpt2 with --verified; all of these by default")
    parser.add_argument("--verified", action="store_true", help="measure the comparison with PyTorch")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="with --verified: another checkout")
    parser.add_argument("--exporters", action="store_true", help="measure winml with dynamo beside TorchScript")
    parser.add_argument("--side-by-side", action="store_true", help="measure bare exports and optimum as well")
    parser.add_argument("--rounds", type=int, default=5, help="with --side-by-side")
    parser.add_argument("--optimum-python", type=Path, metavar="PYTHON", help="of an environment with optimum-onnx")
    parser.add_argument("--dynamo", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare", nargs=3, metavar=("NAME", "CHECKPOINT", "OUTPUT"), help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, metavar=("NAME", "CHECKPOINT"), help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.against and not options.verified:
        parser.error("--against compares verified exports: add --verified")
    measured = (
        SIDE_BY_SIDE
        if options.side_by_side
        else EXPORTERS
        if options.exporters
        else [*INPUTS, *(["gpt2"] if options.verified else [])]
    )
    if unknown := {*(options.models or "").split(",")} - {"", *measured}:
        parser.error(f"--models: {', '.join(sorted(unknown))} is not measured here")
    if options.bare:
        export_bare(*options.bare, dynamo=options.dynamo)
        return
    if options.make:
        make_checkpoint(options.make[0], Path(options.make[1]))
        return
    if not hasattr(os, "wait4"):
        raise SystemExit("this benchmark needs os.wait4, which Windows does not have")
    with tempfile.TemporaryDirectory() as folder:
        names = options.models.split(",") if options.models else list(measured)
        if options.side_by_side:
            rows = [side_by_side(name, options.rounds, Path(folder), options.optimum_python) for name in names]
            table = side_by_side_table(rows)
            print("\n".join(table))
            case = "-".join(["side-by-side", *(names if options.models else [])])
            publish(options, {"benchmark": "export, side by side", "rows": rows}, table, case)
            return
        rows = [
            compare(
                name,
                options.pairs,
                Path(folder),
                verified=options.verified,
                against=options.against,
                exporters=options.exporters,
            )
            for name in names
        ]
    table = pair_table(rows)
    print("\n".join(table))
    case = (
        "exporters"
        if options.exporters
        else "bare"
        if not options.verified
        else "verified"
        if options.against is None
        else "against"
    )
    publish(options, {"benchmark": "export", "rows": rows}, table, case)


if __name__ == "__main__":
    main()
