"""Counts the nodes with a wrong tag, by exporter and by tool.

Every model is exported with both exporters and changed by every tool, and the tags are transferred to the file of the
tool. The reference is the module in which PyTorch computed the values of a node (``tests/truth.py``).

``python scripts/truth_eval.py [ARCHITECTURE …]`` prints the table and every wrong tag; ``--write`` puts the
table into docs/reference/carry.md. ``zoo`` selects the small modules of ``tests/hostile_modules.py``.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from carry_document import run_measurement  # noqa: E402
from checkpoints import CONFIGS, build_model, make_distinct  # noqa: E402
from foreign_tools import (  # noqa: E402
    onnxscript_fusions,
    onnxscript_optimizer,
    onnxsim,
    onnxslim,
    optimized,
    ort_level,
    retagged,
)
from hostile_modules import GROUPS, group_inputs, make_group  # noqa: E402
from truth import Recording, judge, record  # noqa: E402
from winml.modelkit import ExportResult, WinMLExportConfig, export_pytorch  # noqa: E402
from winml.modelkit.models.live_module import loaded_from_module  # noqa: E402
from winml.modelkit.models.preparation import prepared_for_export  # noqa: E402
from winml.modelkit.models.tensors import to_torch  # noqa: E402
from winml.modelkit.ort.feeds import make_feeds  # noqa: E402

MARKERS = "<!-- tables: scripts/truth_eval.py -->", "<!-- end of the table by values -->"
EXPORTERS: tuple[Literal["torchscript", "dynamo"], ...] = ("torchscript", "dynamo")
LEVELS = ("basic", "extended", "full")
FURTHER: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "beit": ("BeitForImageClassification", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
        "patch_size": 8, "layer_scale_init_value": 0.1,
    }),
    "regnet": ("RegNetForImageClassification", {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "groups_width": 8,
    }),
}  # fmt: skip
"""Architectures beside those of the tests: folded scales, and fused residual sums."""


TOOLS: Mapping[str, Callable[[Path, Path], object]] = {
    "as exported": lambda source, target: target.write_bytes(source.read_bytes()),
    **{f"winml optimize --level {level}": optimized(level=level) for level in LEVELS},
    "winml optimize --enable-nchwc-layout": optimized(level="full", nchwc_layout=True),
    **{f"ORT, {level}": retagged(ort_level(f"ENABLE_{level.upper()}")) for level in ("basic", "extended", "all")},
    "onnxslim": retagged(onnxslim),
    "onnxsim": retagged(onnxsim),
    "onnxscript optimizer": retagged(onnxscript_optimizer),
    "onnxscript fusions": retagged(onnxscript_fusions),
}


def architecture(name: str) -> tuple[nn.Module, list[torch.Tensor], Recording]:
    """Build a model, its inputs, and the record of its run."""
    if name in FURTHER:
        import transformers

        class_name, config = FURTHER[name]
        torch.manual_seed(0)
        model_class: Any = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**config)).eval()
        make_distinct(model)
    else:
        model = build_model(name)
    loaded = loaded_from_module(model, None)
    tensors = {key: to_torch(value) for key, value in make_feeds(loaded.only_part.inputs, seed=1).items()}
    with prepared_for_export(model, list(tensors), loaded.only_part.forward_kwargs):
        return model, list(tensors.values()), record(model, list(tensors.values()))


def _export(model: nn.Module, inputs: Any, path: Path, config: WinMLExportConfig) -> ExportResult:
    return export_pytorch(model, path, inputs, config=config)


def models(names: Sequence[str]) -> Iterator[tuple[str, Callable[[Path, Any], Any], Recording, list[torch.Tensor]]]:
    """Yield a name, a function that exports, the record of the run, and its inputs."""
    for name in names or [*CONFIGS, *FURTHER, "zoo"]:
        if name == "zoo":
            for group in GROUPS:
                zoo, inputs = make_group(group), group_inputs()
                yield f"zoo {group}", partial(_export, zoo, inputs), record(zoo, inputs), inputs
        else:
            model, inputs, recording = architecture(name)
            yield name, partial(_export, model, None), recording, inputs


def run(names: Sequence[str]) -> tuple[dict[tuple[str, str], Counter[str]], list[str]]:
    """Return the number of judgements by tool and exporter, and the failures."""
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name, export, recording, inputs in models(names):
            for exporter in EXPORTERS:
                source, target = Path(folder, f"{exporter}.onnx"), Path(folder, "target.onnx")
                try:
                    result = export(source, WinMLExportConfig(exporter=exporter, verify=False))
                except Exception as error:
                    failed.append(f"{exporter} on {name}: {type(error).__name__}")
                    continue
                feeds = {
                    spec.name: tensor.numpy() for spec, tensor in zip(result.only_part.inputs, inputs, strict=True)
                }
                for tool, work in TOOLS.items():
                    try:
                        with contextlib.redirect_stdout(io.StringIO()):
                            work(source, target)
                    except Exception as error:
                        failed.append(f"{tool} on {name} ({exporter}): {type(error).__name__}")
                        continue
                    for verdict in judge(target, recording, feeds):
                        counts[tool, exporter][verdict.judgement] += 1
                        if verdict.judgement != "right":
                            print(f"{name}, {exporter}, {tool}: {verdict}", file=sys.stderr, flush=True)
                for file in Path(folder).iterdir():
                    file.unlink()
            total = sum(counts.values(), Counter())
            print(f"{name}: {dict(total)} so far", file=sys.stderr, flush=True)
    return counts, failed


def table(counts: Mapping[tuple[str, str], Counter[str]], failed: Sequence[str]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| tool | TorchScript: nodes | wrong | too high | dynamo: nodes | wrong | too high |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for tool in TOOLS:
        found = [counts.get((tool, exporter), Counter()) for exporter in EXPORTERS]
        cells = [f"{count.total()} | {count['wrong']} | {count['high']}" for count in found]
        lines.append(f"| {tool} | {' | '.join(cells)} |")
    if failed:
        lines += ["", f"Failed before any tag was looked at: {'; '.join(failed)}."]
    return "\n".join(lines)


def measure(names: Sequence[str]) -> str:
    """Return the table."""
    counts, failed = run(names)
    return table(counts, failed)


if __name__ == "__main__":
    sys.exit(run_measurement(__doc__, MARKERS, measure))
