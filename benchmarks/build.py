"""Cost of ``winml build`` beside ``winml export``, and a check of every file that the build writes.

Method. A checkpoint of the shape of bert-large is made first (24 layers, seeded random weights, safetensors). Then
whole processes run in alternation, A B A B …, after one warm-up of each that is not counted:

* A: ``winml build`` with an empty ``optim`` section, into an empty folder
* B: ``winml export`` of the same checkpoint, into an empty folder

Both compare with PyTorch. Wall time and peak resident memory are the operating system's own account of each finished
process; every ratio is taken within a pair. The build must say that it normalized exactly once. Then one build with the
fusions of GELU and of MatMul + Add is made and looked at: ``onnx.checker`` passes on every file, and every node has
exactly one tag and one depth. A table for people, then one line of JSON.

    python benchmarks/build.py [--pairs 5] [--layers 24]
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
from collections import Counter  # noqa: E402

from process_cost import Cost, run, spread  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

WINML = [sys.executable, "-m", "winml.modelkit"]
SHAPE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
EMPTY = '{"optim": {}, "quant": null, "compile": null}'
FUSIONS = '{"optim": {"gelu_fusion": true, "matmul_add_fusion": true}, "quant": null, "compile": null}'
FIRED = ("Gelu", "Gemm")
"""What these fusions make."""
KEYS = ("winml.hierarchy.tag", "winml.hierarchy.depth")


def make_checkpoint(folder: Path, layers: int) -> None:
    """Save a model of the shape of bert-large."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers, **SHAPE)).save_pretrained(folder)


def check_artifacts(folder: Path) -> dict[str, object]:
    """Return the contents of every ONNX file of a build; end the program if a file is wrong."""
    import onnx

    found: dict[str, object] = {}
    for path in sorted(folder.glob("*.onnx")):
        onnx.checker.check_model(str(path))
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            keys = Counter(entry.key for entry in node.metadata_props)
            if any(keys[key] != 1 for key in KEYS):
                raise SystemExit(f"{path}: node {node.name} has {[keys[key] for key in KEYS]} of {KEYS}")
        operators = Counter(node.op_type for node in model.graph.node)
        found[path.name] = {"nodes": len(model.graph.node), **{name: operators[name] for name in FIRED}}
    return found


def compare(checkpoint: Path, pairs: int, folder: Path) -> dict[str, object]:
    """Measure build against export."""
    built, exported = folder / "built", folder / "exported"
    build = [*WINML, "build", "-m", str(checkpoint), "-c", EMPTY, "-o", str(built), "-q"]
    export = [*WINML, "export", "-m", str(checkpoint), "-o", str(exported / "model.onnx"), "-q"]
    costs: list[tuple[Cost, Cost]] = []
    for pair in range(pairs + 1):
        row = (run(build), run(export))
        normalizations = json.loads((built / "build_manifest.json").read_text(encoding="utf-8"))["normalizations"]
        if normalizations != 1:
            raise SystemExit(f"the build normalized {normalizations} times")
        shutil.rmtree(built)
        shutil.rmtree(exported)
        if pair:
            costs.append(row)
    return {
        "pairs": pairs,
        "wall_ratio": spread([ours.wall_s / other.wall_s for ours, other in costs]),
        "peak_memory_ratio": spread([ours.peak_bytes / other.peak_bytes for ours, other in costs]),
        "build_wall_s": spread([ours.wall_s for ours, _ in costs]),
        "export_wall_s": spread([other.wall_s for _, other in costs]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    add_save_option(parser)
    options = parser.parse_args()
    if not hasattr(os, "wait4"):
        raise SystemExit("this benchmark needs os.wait4, which Windows does not have")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["WINML_CACHE"] = str(folder / "cache")
        make_checkpoint(folder / "checkpoint", options.layers)
        fused = folder / "fused"
        subprocess.run(
            [*WINML, "build", "-m", str(folder / "checkpoint"), "-c", FUSIONS, "-o", str(fused), "-q"], check=True
        )
        artifacts = check_artifacts(fused)
        shutil.rmtree(fused)
        row = compare(folder / "checkpoint", options.pairs, folder)
    cells = []
    for name in ("wall_ratio", "peak_memory_ratio", "build_wall_s", "export_wall_s"):
        value = row[name]
        assert isinstance(value, dict)
        cells.append({"measured": name, "median (range)": "{median:.2f} ({min:.2f}–{max:.2f})".format(**value)})
    table = markdown_table(cells)
    print("\n".join(table))
    for file, counts in artifacts.items():
        print(f"{file:<20}{counts}")
    publish(options, {"benchmark": "build", "layers": options.layers, **row, "artifacts": artifacts}, table)


if __name__ == "__main__":
    main()
