"""Cost of an export of a checkpoint that is published with low-bit weights.

Method. Llama-shaped checkpoints are made first, one after the other: random codes with small scales in the layout of
the format, the embedding and the head in float16, in shards of half a gigabyte, written shard by shard. For each size
and format these run once after a warm-up on the smallest size, which is not counted:

* ``python -m winml.modelkit export -m CHECKPOINT -o model.onnx --no-verify -q``
* with ``--build`` also ``python -m winml.modelkit build -m CHECKPOINT -o FOLDER --no-verify -q``

Wall time, computing time and peak resident memory are the operating system's account of the finished process; files are
synced inside the measured time. A table for people, then one line of JSON.

    python benchmarks/lowbits_checkpoints.py [--sizes 0.1,1,7] [--formats awq,gptq,fp8,nf4] [--build] [--folder DIR]

The largest size needs 9 GB of disk, 18 GB in 8 bits.
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
from typing import Any  # noqa: E402

from process_cost import run  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402
from weights import SHAPES, SHARD_BYTES, size_on_disk, watch  # noqa: E402

GROUP = 128
RECORDS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
"""Format → its ``quantization_config``."""


def make_checkpoint(size: str, name: str, folder: Path) -> None:
    """Write a checkpoint of the named size and format, one shard in memory at a time."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(vocab_size=32_000, max_position_embeddings=2048, **SHAPES[size])
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.float16
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, "quantization_config": RECORDS[name]}))
    weight_map: dict[str, str] = {}
    shard: dict[str, Any] = {}

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for key, shape in shapes.items():
        if key.endswith("_proj.weight"):
            shard.update(_codes(name, key.removesuffix(".weight"), *shape))
        else:
            values = torch.empty(shape, dtype=torch.float16)
            shard[key] = values.normal_(0, shape[-1] ** -0.5) if len(shape) > 1 else values.normal_(1, 0.05)
        if sum(value.nbytes for value in shard.values()) > SHARD_BYTES:
            write()
    write()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _codes(name: str, module: str, rows: int, depth: int) -> dict[str, Any]:
    """Return the tensors of one weight, of which activations stay at scale."""
    import torch

    def words(*shape: int) -> Any:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)

    scale = depth**-0.5 / 4
    groups = depth // GROUP
    scales = (torch.rand(groups, rows) * scale).half()
    if name == "awq":
        packed = {"qweight": words(depth, rows // 8), "qzeros": words(groups, rows // 8), "scales": scales}
    elif name == "gptq":
        order = torch.randperm(depth)
        index = torch.empty(depth, dtype=torch.int32)
        index[order] = torch.arange(depth, dtype=torch.int32) // GROUP
        packed = {"qweight": words(depth // 8, rows), "qzeros": words(groups, rows // 8), "scales": scales}
        packed["g_idx"] = index
    elif name == "fp8":
        codes = torch.randint(0, 0x70, (rows, depth), dtype=torch.uint8)
        codes |= torch.randint(0, 2, (rows, depth), dtype=torch.uint8) << 7
        blocks = torch.rand(-(-rows // 128), groups) * depth**-0.5 / 32
        packed = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": blocks}
    else:
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [rows, depth]}
        packed = {
            "weight": torch.randint(0, 256, (rows * depth // 2, 1), dtype=torch.uint8),
            "weight.absmax": torch.rand(rows * depth // 64) * depth**-0.5,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
    return {f"{module}.{part}": value for part, value in packed.items()}


def measure(verb: str, checkpoint: Path, folder: Path) -> dict[str, float]:
    """Export or build once; the files are gone afterwards."""
    folder.mkdir()
    output = folder / "model.onnx" if verb == "export" else folder / "built"
    command = [
        sys.executable,
        "-m",
        "winml.modelkit",
        verb,
        "-m",
        str(checkpoint),
        "-o",
        str(output),
        "--no-verify",
        "-q",
    ]
    anonymous, disk = [0], [0]
    started = time.perf_counter()
    cost = run(command, on_start=lambda pid: watch(pid, folder, anonymous, disk))
    os.sync()
    wall, written = time.perf_counter() - started, size_on_disk(folder)
    shutil.rmtree(folder)
    return {
        "wall_s": round(wall, 2),
        "cpu_s": round(cost.cpu_s, 2),
        "peak_bytes": cost.peak_bytes,
        "anonymous_bytes": max(anonymous),
        "output_bytes": written,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.1,1,7", help=f"of {', '.join(SHAPES)} (billions of parameters)")
    parser.add_argument("--formats", default="awq", help=f"of {', '.join(RECORDS)}")
    parser.add_argument("--build", action="store_true", help="build as well")
    parser.add_argument("--folder", type=Path, help="where to work; else the place for temporary files")
    parser.add_argument("--make", nargs=3, metavar=("SIZE", "FORMAT", "CHECKPOINT"), help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.make:
        make_checkpoint(options.make[0], options.make[1], Path(options.make[2]))
        return
    verbs = ["export", *(["build"] if options.build else [])]
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        table: list[str] = []
        for number, (size, name) in enumerate(
            (size, name) for size in options.sizes.split(",") for name in options.formats.split(",")
        ):
            checkpoint = folder / "checkpoint"
            subprocess.run([sys.executable, __file__, "--make", size, name, str(checkpoint)], check=True)
            os.sync()
            stored = size_on_disk(checkpoint)
            for verb in verbs:
                if number == 0:
                    measure(verb, checkpoint, folder / "out")
                row = {"billions": size, "format": name, "verb": verb, "checkpoint_bytes": stored}
                rows.append({**row, **measure(verb, checkpoint, folder / "out")})
                lines = markdown_table([_table_row(rows[-1])])[2 if table else 0 :]
                print("\n".join(lines), flush=True)
                table += lines
            shutil.rmtree(checkpoint)
    publish(options, {"benchmark": "lowbits_checkpoints", "rows": rows}, table)


def _table_row(row: dict[str, Any]) -> dict[str, str]:
    return {
        "billions": row["billions"],
        "format": row["format"],
        "verb": row["verb"],
        "checkpoint": f"{row['checkpoint_bytes'] / 1e9:.2f} GB",
        "output": f"{row['output_bytes'] / 1e9:.2f} GB",
        "wall": f"{row['wall_s']:.1f} s",
        "computing": f"{row['cpu_s']:.1f} s",
        "peak memory": f"{row['peak_bytes'] / 1e9:.2f} GB",
        "of it anonymous": f"{row['anonymous_bytes'] / 1e9:.2f} GB",
    }


if __name__ == "__main__":
    main()
