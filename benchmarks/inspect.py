"""Cost of ``winml inspect`` as a whole process.

Method. Each case is prepared once (a bert-base shape with seeded random weights, exported by this package; a config of
the shape of Llama 70B). Then whole processes run, all cases in alternation, after one warm-up of each that is not
counted; beside them a Python that imports ``onnx``, and one that imports the model class, and ends, since nothing that
reads ONNX files or builds the class can cost less. Wall time and peak resident memory are the
operating system's own account of each finished process; the median and the spread (smallest to largest) are printed,
with the limit the project has set itself. A table for people, then one line of JSON.

    python benchmarks/inspect.py [--runs 5] [--cases import-onnx,onnx]
"""

from __future__ import annotations

import sys
from pathlib import Path

# This file has the name of a standard module: its folder is last on the path, so that it shadows no module.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import os  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

from process_cost import Cost, run, spread  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

WINML = [sys.executable, "-m", "winml.modelkit"]
MAKE_BERT_BASE = """
import sys, torch, transformers
torch.manual_seed(0)
transformers.BertModel(transformers.BertConfig()).save_pretrained(sys.argv[1])
"""
MAKE_LLAMA_70B = """
import sys, transformers
transformers.LlamaConfig(
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672,
    vocab_size=128256, max_position_embeddings=8192, architectures=["LlamaForCausalLM"], dtype="bfloat16",
).save_pretrained(sys.argv[1])
"""


@dataclass(frozen=True)
class Case:
    """One command to measure."""

    name: str
    limit_s: float | None
    """Wall time the project has set itself; None: it is there to compare with."""
    prepare: Callable[[Path], list[str]]
    """Makes what the command needs in a folder of its own, and returns the command."""


def import_onnx(_folder: Path) -> list[str]:
    """Return the command that does nothing but import the library."""
    return [sys.executable, "-c", "import onnx"]


def exported_bert_base(folder: Path) -> Path:
    """Return an ONNX file of 0.44 GB, weights inside, made once."""
    path = folder / "bert-base.onnx"
    if not path.exists():
        model = checkpoint(folder, "bert-base", MAKE_BERT_BASE)
        export = [*WINML, "export", "-m", str(model), "-o", str(path), "--task", "feature-extraction"]
        subprocess.run([*export, "--no-verify", "-q"], check=True)
    return path


def checkpoint(folder: Path, name: str, program: str) -> Path:
    """Return a checkpoint folder, made once by a program."""
    path = folder / name
    if not path.exists():
        subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    return path


def inspect_model(folder: Path, name: str, program: str, *options: str) -> list[str]:
    """Return the command that inspects a checkpoint."""
    return [*WINML, "inspect", "-m", str(checkpoint(folder, name, program)), *options]


def import_model(_folder: Path) -> list[str]:
    """Return the command that does nothing but import the class a BERT is inspected by."""
    return [sys.executable, "-c", "from transformers import BertModel"]


CASES = (
    Case("import-onnx", None, import_onnx),
    Case("onnx", 0.8, lambda folder: [*WINML, "inspect", str(exported_bert_base(folder))]),
    Case("onnx-hierarchy", 0.8, lambda folder: [*WINML, "inspect", str(exported_bert_base(folder)), "-H"]),
    Case("import-model", None, import_model),
    Case("model", 1.5, lambda folder: inspect_model(folder, "bert-base", MAKE_BERT_BASE)),
    Case("model-hierarchy", None, lambda folder: inspect_model(folder, "bert-base", MAKE_BERT_BASE, "-H")),
    # The memory limit is 1.5 GB; the described weights would take 141 GB.
    Case("llama-70b-hierarchy", 4.0, lambda folder: inspect_model(folder, "llama-70b", MAKE_LLAMA_70B, "-H")),
)


def measure(cases: list[Case], runs: int, folder: Path) -> list[dict[str, Any]]:
    """Measure the cases in alternation."""
    commands = {case.name: case.prepare(folder) for case in cases}
    costs: dict[str, list[Cost]] = {case.name: [] for case in cases}
    for number in range(runs + 1):
        for case in cases:
            cost = run(commands[case.name])
            if number:
                costs[case.name].append(cost)
    return [
        {
            "case": case.name,
            "runs": runs,
            "limit_s": case.limit_s,
            "wall_s": spread([cost.wall_s for cost in costs[case.name]]),
            "peak_bytes": spread([cost.peak_bytes for cost in costs[case.name]]),
        }
        for case in cases
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    add_save_option(parser)
    options = parser.parse_args()
    if not hasattr(os, "wait4"):
        raise SystemExit("this benchmark needs os.wait4, which Windows does not have")
    requested = options.cases.split(",")
    if unknown := set(requested) - {case.name for case in CASES}:
        raise SystemExit(f"unknown case {', '.join(sorted(unknown))}; known: {', '.join(case.name for case in CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure([case for case in CASES if case.name in requested], options.runs, Path(folder))
    table = markdown_table(
        [
            {
                "case": row["case"],
                "wall": "{median:.2f} s ({min:.2f}–{max:.2f})".format(**row["wall_s"]),
                "limit": f"{row['limit_s']} s" if row["limit_s"] else "",
                "peak memory": f"{row['peak_bytes']['median'] / 1e6:.0f} MB",
            }
            for row in rows
        ]
    )
    print("\n".join(table))
    publish(options, {"benchmark": "inspect", "rows": rows}, table)


if __name__ == "__main__":
    main()
