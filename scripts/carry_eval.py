"""Measures the share of correctly transferred tags, by matching rule, on small models of real architectures.

Every model is exported and changed by every tool, and the tags are transferred to the file of the tool. Two checks
decide if a tag is correct:

* traced: every original node gets a unique key. If a tool copies keys to new nodes, the keys of a node name exactly
  the replaced nodes. The tag must be the common module of the replaced nodes.
* weights: a node that reads a weight must be in a module that reads the weight in the original, or in a parent or
  child of this module.

``python scripts/carry_eval.py [ARCHITECTURE …]`` prints the tables; ``--write`` puts them into docs/reference/carry.md.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]

from carry_document import run_measurement  # noqa: E402
from foreign_tools import (  # noqa: E402
    Tool,
    dynamic_quantization,
    float16,
    onnxscript_fusions,
    onnxscript_optimizer,
    onnxsim,
    onnxslim,
    opset_21,
    ort_level,
    ort_transformers,
)
from winml.modelkit import HTPExporter  # noqa: E402
from winml.modelkit.models.request import ModelRequest  # noqa: E402
from winml.modelkit.onnx.files.graph_reading import load_foreign  # noqa: E402
from winml.modelkit.tags import address  # noqa: E402
from winml.modelkit.tags.carry.carrying import carry_tags  # noqa: E402
from winml.modelkit.tags.carry.matching import Way  # noqa: E402
from winml.modelkit.tags.tagging import (  # noqa: E402
    all_nodes,
    clear_tag,
    read_tag,
)

MARKERS = "<!-- tables: scripts/carry_eval.py -->", "<!-- end of tables -->"
REAL = "all-MiniLM-L6-v2"
WAYS: tuple[Way, ...] = ("kept", "name", "output", "fused", "replaced", "neighbours", "root")
TRACE = "trace."


TOOLS: Mapping[str, Tool] = {
    "ORT, disabled": ort_level("DISABLE_ALL"),
    "ORT, basic": ort_level("ENABLE_BASIC"),
    "ORT, extended": ort_level("ENABLE_EXTENDED"),
    "ORT, all": ort_level("ENABLE_ALL"),
    "onnxruntime.transformers, level 0": ort_transformers(0),
    "onnxruntime.transformers, level 1": ort_transformers(1),
    "onnxscript fusions": onnxscript_fusions,
    "onnxscript optimizer": onnxscript_optimizer,
    "onnxslim": onnxslim,
    "onnxsim": onnxsim,
    "float16": float16,
    "dynamic quantization": dynamic_quantization,
    "opset 21": opset_21,
}


def export_models(names: list[str], folder: Path) -> Iterator[tuple[str, Path]]:
    """Export every architecture; yields its name and its file."""
    checkpoints, demo = importlib.import_module("checkpoints"), importlib.import_module("demo")
    for name in names or [*checkpoints.CONFIGS, REAL]:
        if name == REAL:
            checkpoint = demo.checkpoint_folder()
        else:
            checkpoint = checkpoints.save_checkpoint(name, folder / f"{name}-checkpoint")
        target = folder / f"{name}.onnx"
        HTPExporter().export_checkpoint(ModelRequest(str(checkpoint)), target)
        yield name, target


class Evaluation:
    """Counts of one tool over all models."""

    def __init__(self) -> None:
        self.models = 0
        self.ways: Counter[str] = Counter()
        self.checks: Counter[str] = Counter()
        self.wrong: list[str] = []

    def check(self, kind: str, node: ir.Node, expected: str, is_right: bool) -> None:
        """Count one comparison."""
        self.checks[kind] += 1
        if not is_right:
            self.checks[f"{kind} wrong"] += 1
            tag = read_tag(node)
            self.wrong.append(f"{kind}: {node.op_type} {node.name}: {tag.tag if tag else ''} instead of {expected}")

    def rate(self, kind: str) -> str:
        """Return how many comparisons failed, in words."""
        total = self.checks[kind]
        return f"{self.checks[f'{kind} wrong']} of {total}" if total else "–"


def evaluate(source: Path, target: Path, evaluation: Evaluation) -> None:
    """Transfer the tags of one file to the file of a tool, and check the tags."""
    before, after = ir.load(source), load_foreign(target)
    report = carry_tags(before, after)
    evaluation.models += 1
    evaluation.ways.update(report.by_way)
    bare = load_foreign(target)
    traced = {}
    for number, node in enumerate(all_nodes(bare)):
        traced[number] = [int(key.removeprefix(TRACE)) for key in node.metadata_props if key.startswith(TRACE)]
        clear_tag(node)
    carry_tags(before, bare)
    tags = [tag.tag for node in all_nodes(before) if (tag := read_tag(node)) is not None]
    owners = weight_owners(before)
    for number, node in enumerate(all_nodes(bare)):
        node_tag = read_tag(node)
        assert node_tag is not None
        if traced[number]:
            expected = address.common_ancestor(tags[source] for source in traced[number])
            evaluation.check("traced", node, expected, expected == node_tag.tag)
        for value in node.inputs:
            owner_tags = owners.get(value.name or "", ()) if value is not None and value.is_initializer() else ()
            if owner_tags:
                is_related = any(
                    address.is_within(tag, node_tag.tag) or address.is_within(node_tag.tag, tag) for tag in owner_tags
                )
                evaluation.check("weights", node, " or ".join(owner_tags), is_related)


def weight_owners(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """Return the tags of the nodes that read each weight; equal scalars and shapes are merged by tools."""
    return {
        name: tuple({tag.tag for use in value.uses() if (tag := read_tag(use.node)) is not None})
        for name, value in model.graph.initializers.items()
        if (tensor := value.const_value) is not None and tensor.size > 1 and tensor.dtype.is_floating_point()
    }


def with_traces(source: Path, target: Path) -> None:
    """Copy a model and give every node a key of its own."""
    model = ir.load(source)
    for number, node in enumerate(all_nodes(model)):
        node.metadata_props[f"{TRACE}{number}"] = "1"
    ir.save(model, target)


def run_tools(names: list[str]) -> tuple[dict[str, Evaluation], list[str]]:
    """Run every tool on every model; return the evaluations and the failures."""
    evaluations = {tool: Evaluation() for tool in TOOLS}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name, model in export_models(names, Path(folder)):
            source, target = Path(folder, "traced.onnx"), Path(folder, "made.onnx")
            with_traces(model, source)
            for tool, run in TOOLS.items():
                print(f"{name}: {tool}", file=sys.stderr, flush=True)
                try:
                    with contextlib.redirect_stdout(io.StringIO()):
                        run(source, target)
                except Exception as error:
                    failed.append(f"{tool} on {name}: {type(error).__name__}")
                    continue
                evaluate(model, target, evaluations[tool])
    return evaluations, failed


def tables(evaluations: Mapping[str, Evaluation], failed: list[str]) -> str:
    """Return the tables as Markdown."""
    lines = [f"| tool | models | nodes | {' | '.join(WAYS)} |", f"| --- |{' ---: |' * (len(WAYS) + 2)}"]
    for tool, evaluation in evaluations.items():
        nodes = evaluation.ways.total()
        shares = [f"{100 * evaluation.ways[way] / nodes:.1f} %" if evaluation.ways[way] else "" for way in WAYS]
        lines.append(f"| {tool} | {evaluation.models} | {nodes} | {' | '.join(shares)} |")
    lines += ["", "Wrong tags:", "", "| tool | traced | weights |", "| --- | ---: | ---: |"]
    for tool, evaluation in evaluations.items():
        lines.append(f"| {tool} | {' | '.join(evaluation.rate(kind) for kind in ('traced', 'weights'))} |")
    if failed:
        lines += ["", f"Tools that failed on a model, before any tag was looked at: {'; '.join(failed)}."]
    return "\n".join(lines)


def measure(names: Sequence[str]) -> str:
    """Return the tables; print every wrong tag on stderr."""
    evaluations, failed = run_tools(list(names))
    for tool, evaluation in evaluations.items():
        for line in evaluation.wrong:
            print(f"{tool}: {line}", file=sys.stderr)
    return tables(evaluations, failed)


if __name__ == "__main__":
    sys.exit(run_measurement(__doc__, MARKERS, measure))
