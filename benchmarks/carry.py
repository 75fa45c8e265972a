"""Cost of the transfer of tags, beside reading the file.

Method. A tagged graph of 100,000 nodes in the shape of a transformer's layers is written to a file. Of it three graphs
are made, as tools leave them: one that only lost its metadata, one that lost its node names too, and one in which
every pair of MatMul and Add became a Gemm between two reshapes with new names. Then, in alternation, ``onnx.load``
reads the file and the tags are carried to each graph, once uncounted; time is processor time of this process, since
others may run beside it. The limit the project has set itself: carrying takes less than reading twice. A table for
people, then one line of JSON.

    python benchmarks/carry.py [--nodes 100000] [--width 8] [--runs 5]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import gc  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnx_ir as ir  # noqa: E402
from results import add_save_option, markdown_table, publish  # noqa: E402

from winml.modelkit.cli.main import COLLECTION_THRESHOLD  # noqa: E402
from winml.modelkit.metadata_keys import NAMESPACE_KEY  # noqa: E402
from winml.modelkit.tags.carry.carrying import carry_tags  # noqa: E402
from winml.modelkit.tags.tagging import NodeTag, write_tag  # noqa: E402

LIMIT = 2.0
"""Largest time, as a multiple of one ``onnx.load``."""
STEPS_PER_LAYER = 20


class Maker:
    """Builds the graph."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.input = self.value("x", 4, width)
        self._random = np.random.default_rng(0)

    @staticmethod
    def value(name: str, *shape: int) -> ir.Value:
        """Make a value."""
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))

    def weight(self, name: str, *shape: int) -> ir.Value:
        """Make a weight."""
        value = self.value(name, *shape)
        value.const_value = ir.tensor(self._random.standard_normal(shape).astype(np.float32), name=name)
        self.weights.append(value)
        return value

    def node(self, op_type: str, layer: int, place: str, *inputs: ir.Value) -> ir.Value:
        """Add a tagged node."""
        module = f"encoder.layer.{layer}.{place}"
        node = ir.node(op_type, list(inputs), name=f"/encoder/layer.{layer}/{place}/{op_type}_{len(self.nodes)}")
        node.outputs[0].name = f"{node.name}_output_0"
        write_tag(node, NodeTag(f"/Model/Encoder/Layer.{layer}/{place.title()}", module, "direct"))
        node.metadata_props[NAMESPACE_KEY] = (
            f"Model/encoder: Encoder/encoder.layer.{layer}: Layer/{module}: {place.title()}"
        )
        self.nodes.append(node)
        return node.outputs[0]


def build(nodes: int, width: int) -> ir.Model:
    """Build the tagged graph: dense layer, activation and residual, over and over."""
    maker = Maker(width)
    value = maker.input
    for step in range(nodes // 4):
        layer, place = step // STEPS_PER_LAYER, ("attention", "output")[step % 2]
        product = maker.node("MatMul", layer, place, value, maker.weight(f"{layer}.{step}.weight", width, width))
        dense = maker.node("Add", layer, place, product, maker.weight(f"{layer}.{step}.bias", width))
        value = maker.node("Add", layer, place, maker.node("Relu", layer, place, dense), value)
    value.type, value.shape = maker.input.type, maker.input.shape
    graph = ir.Graph(
        [maker.input],
        [value],
        nodes=maker.nodes,
        initializers=maker.weights,
        opset_imports={"": 17},
        name="graph",
    )
    return ir.Model(graph, ir_version=10)


def stripped(model: ir.Model) -> ir.Model:
    """Take the metadata away."""
    copy = model.clone()
    for node in copy.graph:
        node.metadata_props.clear()
    return copy


def nameless(model: ir.Model) -> ir.Model:
    """Take metadata and names of nodes away."""
    copy = stripped(model)
    for node in copy.graph:
        node.name = ""
    return copy


def fused(model: ir.Model) -> ir.Model:
    """Make every MatMul and Add a Gemm between reshapes, as ONNX Runtime does."""
    copy = stripped(model)
    for number, node in enumerate(list(copy.graph)):
        if node.op_type != "MatMul":
            continue
        (add,) = [use.node for use in node.outputs[0].uses()]
        before = ir.node("Reshape", [node.inputs[0]], name=f"gemm_input_reshape_{number}")
        gemm = ir.node("Gemm", [before.outputs[0], node.inputs[1], add.inputs[1]], name=f"{node.name}/MatMulAddFusion")
        after = ir.node("Reshape", [gemm.outputs[0]], name=f"gemm_output_reshape_{number}")
        for kind, created in (("input", before), ("gemm", gemm), ("output", after)):
            created.outputs[0].name = f"{kind}_{number}"
        copy.graph.insert_before(node, [before, gemm, after])
        name = add.outputs[0].name
        ir.convenience.replace_all_uses_with(add.outputs[0], after.outputs[0])
        copy.graph.remove([node, add], safe=True)
        after.outputs[0].name = name
    return copy


def processor_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of one run."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> int:
    """Measure; the exit code says whether the limit is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=8, help="size of the square weights, one to every fourth node")
    parser.add_argument("--runs", type=int, default=5)
    add_save_option(parser)
    arguments = parser.parse_args()
    gc.set_threshold(COLLECTION_THRESHOLD)
    model = build(arguments.nodes, arguments.width)
    makers = {"stripped": stripped, "nameless": nameless, "fused": fused}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        ir.save(model, path)
        size_bytes = path.stat().st_size
        seconds: dict[str, list[float]] = {"onnx.load": [], **{name: [] for name in makers}}
        for run in range(arguments.runs + 1):
            timed = {"onnx.load": processor_seconds(lambda: onnx.load(path))}
            for name, make in makers.items():
                after = make(model)
                gc.collect()
                timed[name] = processor_seconds(lambda after=after: carry_tags(model, after))  # type: ignore[misc]
            for name, value in timed.items():
                seconds[name] += [value] if run else []
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: median / medians["onnx.load"] for name, median in medians.items()}
    table = markdown_table(
        [
            {
                "graph": name,
                "computing": f"{medians[name]:.2f} s ({min(values):.2f}–{max(values):.2f})",
                "times `onnx.load`": f"{ratios[name]:.2f}",
            }
            for name, values in seconds.items()
        ]
    )
    print("\n".join(table))
    met = all(ratios[name] < LIMIT for name in makers)
    record = {
        "nodes": arguments.nodes, "file_bytes": size_bytes, "seconds": medians, "ratios": ratios, "limit": LIMIT,
        "met": met,
    }  # fmt: skip
    publish(arguments, record, table)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
