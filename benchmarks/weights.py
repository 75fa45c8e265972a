"""Cost of an export by size of the weights, and of a build with weights in 4 bits.

Method. Llama-shaped checkpoints are made first, one after the other: seeded random weights in bf16, in shards of half a
gigabyte, written shard by shard, so the model never lies in memory. For each size and each way to keep the weights
(as they are; cast with ``--dtype``) these run in alternation, after one warm-up of each on the smallest size, which is
not counted:

* ``python -m winml.modelkit export -m CHECKPOINT -o model.onnx --no-cache --no-verify -q [--dtype …]``
* for ``int4``: ``python -m winml.modelkit build -m CHECKPOINT -o FOLDER --precision int4 --no-verify -q``
* a plain copy of the checkpoint's files: what the disk alone takes, once for reading and once for writing.

Both are written to the same disk and synced inside the measured time; the exported files are removed between runs. Wall
time and peak resident memory are the operating system's account of each finished process; beside the peak, the largest
anonymous part of it that was seen (Linux, looked at 20 times a second): the rest is mapped files, which the system may
drop; and the largest size of the folder it writes to, seen as often. The median of the runs is printed. A table for
people, then one line of JSON.

    python benchmarks/weights.py [--sizes 0.1,0.5,1,3] [--seven] [--dtypes kept,fp32,fp16,int4] [--runs 3]
        [--folder DIR]

The largest size needs its weights on the disk twice, with fp32 three times.
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from contextlib import suppress  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

from process_cost import run, spread  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

SHARD_BYTES = 500_000_000
SEQUENCE = 128
SHAPES: dict[str, dict[str, int]] = {
    "0.1": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
            "intermediate_size": 2048},
    "0.5": {"hidden_size": 1280, "num_hidden_layers": 20, "num_attention_heads": 20, "num_key_value_heads": 20,
            "intermediate_size": 3456},
    "1": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
          "intermediate_size": 5632},
    "3": {"hidden_size": 3200, "num_hidden_layers": 26, "num_attention_heads": 32, "num_key_value_heads": 32,
          "intermediate_size": 8640},
    "7": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
          "intermediate_size": 14336},
}  # fmt: skip
"""Billions of parameters → sizes, those of published models from 1 on."""
DTYPE_BYTES = {"kept": 2, "bf16": 2, "fp16": 2, "fp32": 4, "int4": 0.5}


def make_checkpoint(size: str, folder: Path) -> None:
    """Write a checkpoint of the named size, one shard in memory at a time."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(vocab_size=32_000, max_position_embeddings=2048, **SHAPES[size])
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    torch.manual_seed(0)
    shards: list[dict[str, Any]] = [{}]
    for name in shapes:
        if 2 * sum(math.prod(shapes[held]) for held in [*shards[-1], name]) > SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = None
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        # Activations have their full size: verified at the sizes that fit into memory.
        tensors = {name: _values(shapes[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total = 2 * sum(math.prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _values(shape: Any) -> Any:
    import torch

    values = torch.empty(shape, dtype=torch.bfloat16)
    return values.normal_(0, shape[-1] ** -0.5) if len(shape) > 1 else values.normal_(1, 0.05)


def copy_files(source: str, target: str) -> None:
    """Copy a checkpoint to disk: the minimum cost of any export."""
    shutil.copytree(source, target)
    os.sync()


def export_command(checkpoint: Path, output: Path, dtype: str) -> list[str]:
    """Return the command that is measured."""
    winml = [sys.executable, "-m", "winml.modelkit"]
    common = ["--shape-config", json.dumps({"sequence_length": SEQUENCE}), "--no-verify", "-q"]
    if dtype == "int4":
        return [*winml, "build", "-m", str(checkpoint), "-o", str(output.parent), "--precision", dtype, *common]
    command = [*winml, "export", "-m", str(checkpoint), "-o", str(output), "--no-cache", *common]
    return command if dtype == "kept" else [*command, "--dtype", dtype]


def measure_export(checkpoint: Path, output: Path, dtype: str) -> dict[str, float]:
    """Export once; the files are gone afterwards."""
    output.parent.mkdir()
    anonymous, disk = [0], [0]
    started = time.perf_counter()
    command = export_command(checkpoint, output, dtype)
    cost = run(command, on_start=lambda pid: watch(pid, output.parent, anonymous, disk))
    os.sync()
    wall = time.perf_counter() - started
    written = size_on_disk(output.parent)
    shutil.rmtree(output.parent)
    return {
        "wall_s": wall,
        "cpu_s": cost.cpu_s,
        "peak_bytes": cost.peak_bytes,
        "anonymous_bytes": max(anonymous),
        "disk_bytes": max(*disk, written),
        "output_bytes": written,
    }


def size_on_disk(folder: Path) -> int:
    """Return the bytes of a folder's files; a file of two names counts once, one that goes meanwhile not at all."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = Path(parent, name).stat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def watch(pid: int, folder: Path, anonymous: list[int], disk: list[int]) -> None:
    """Note anonymous memory of a process and bytes of the folder it writes to, for as long as it runs."""

    def look() -> None:
        status = Path(f"/proc/{pid}/status")
        while True:
            try:
                lines = status.read_text(encoding="utf-8").splitlines()
            except OSError:
                return
            found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
            if not found:
                return
            anonymous.append(found[0])
            disk.append(size_on_disk(folder))
            time.sleep(0.05)

    threading.Thread(target=look, daemon=True).start()


def measure_copy(checkpoint: Path, target: Path) -> float:
    """Copy once; the copy is gone afterwards."""
    cost = run([sys.executable, __file__, "--copy", str(checkpoint), str(target)])
    shutil.rmtree(target)
    return cost.wall_s


def measure_size(size: str, dtypes: list[str], runs: int, folder: Path) -> list[dict[str, Any]]:
    """Measure one size in all ways; its checkpoint is gone afterwards."""
    checkpoint = folder / "checkpoint"
    subprocess.run([sys.executable, __file__, "--make", size, str(checkpoint)], check=True)
    os.sync()
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    exports: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in dtypes}
    copies = []
    for _ in range(runs):
        for dtype in dtypes:
            exports[dtype].append(measure_export(checkpoint, folder / "out" / "model.onnx", dtype))
        copies.append(measure_copy(checkpoint, folder / "copy"))
    shutil.rmtree(checkpoint)
    return [_row(size, dtype, weights, exports[dtype], copies) for dtype in dtypes]


def _row(size: str, dtype: str, weights: int, exports: list[dict[str, float]], copies: list[float]) -> dict[str, Any]:
    def of(key: str) -> dict[str, float]:
        return spread([export[key] for export in exports])

    expected = weights * DTYPE_BYTES[dtype] / 2
    return {
        "billions": size,
        "dtype": dtype,
        "runs": len(exports),
        "weights_bytes": weights,
        "output_over_weights": round(median(export["output_bytes"] for export in exports) / expected, 4),
        "wall_s": of("wall_s"),
        "cpu_s": of("cpu_s"),
        "copy_s": spread(copies),
        "peak_bytes": of("peak_bytes"),
        "anonymous_bytes": of("anonymous_bytes"),
        "disk_bytes": of("disk_bytes"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.1,0.5,1,3", help=f"of {', '.join(SHAPES)} (billions of parameters)")
    parser.add_argument("--seven", action="store_true", help="7 as well, as it is and in 4 bits, once")
    parser.add_argument("--dtypes", default="kept,fp32,fp16", help=f"of {', '.join(DTYPE_BYTES)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; else the place for temporary files")
    parser.add_argument("--make", nargs=2, metavar=("SIZE", "CHECKPOINT"), help=argparse.SUPPRESS)
    parser.add_argument("--copy", nargs=2, metavar=("SOURCE", "TARGET"), help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.make:
        make_checkpoint(options.make[0], Path(options.make[1]))
        return
    if options.copy:
        copy_files(*options.copy)
        return
    if not hasattr(os, "wait4"):
        raise SystemExit("this benchmark needs os.wait4, which Windows does not have")
    sizes, dtypes = options.sizes.split(","), options.dtypes.split(",")
    plan = [(size, dtypes, options.runs) for size in sizes]
    if options.seven:
        plan.append(("7", [dtype for dtype in dtypes if dtype in ("kept", "int4")], 1))
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure_size(sizes[0], dtypes, 1, Path(folder))
        table: list[str] = []
        for size, ways, runs in plan:
            for row in measure_size(size, ways, runs, Path(folder)):
                rows.append(row)
                lines = markdown_table([_table_row(row)])[2 if table else 0 :]
                print("\n".join(lines), flush=True)
                table += lines
    publish(options, {"benchmark": "weights", "rows": rows}, table)


def _table_row(row: dict[str, Any]) -> dict[str, str]:
    return {
        "billions": str(row["billions"]),
        "dtype": row["dtype"],
        "weights": f"{row['weights_bytes'] / 1e9:.2f} GB",
        "output / weights": f"{row['output_over_weights']:.3f}",
        "wall": "{median:.1f} s ({min:.1f}–{max:.1f})".format(**row["wall_s"]),
        "computing": f"{row['cpu_s']['median']:.1f} s",
        "copy alone": f"{row['copy_s']['median']:.1f} s",
        "peak memory": f"{row['peak_bytes']['median'] / 1e9:.2f} GB",
        "of it anonymous": f"{row['anonymous_bytes']['median'] / 1e9:.2f} GB",
        "most on the disk": f"{row['disk_bytes']['median'] / 1e9:.2f} GB",
    }


if __name__ == "__main__":
    main()
