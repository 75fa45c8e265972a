"""Memory of a model by module (``winml perf --by-module --memory``), on the CPU provider.

Three sources are joined: the weights of the executed graph, the memory of each kernel in the profile, and the growth of
this process while another session of the same file opens and runs. The first two are counted, the third is measured, so
that their difference is the memory that ONNX Runtime takes for itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from winml.modelkit.onnx.contents import Contents, read_contents, subgraphs
from winml.modelkit.onnx.contexts import proto_nodes
from winml.modelkit.onnx.module_costs import weight_owners
from winml.modelkit.onnx.module_tree import OnnxTree
from winml.modelkit.ort import opened_model
from winml.modelkit.ort.host import PeakMemory, resident_bytes, return_freed_memory
from winml.modelkit.ort.kernel_memory import KernelMemory, RunMemory
from winml.modelkit.profile.memory_records import HeldValue, MemoryGrowth, MemoryPeak, ModuleBytes, ModuleMemory

_RUNS = 3
"""Number of runs before the growth is read. Chosen: ONNX Runtime plans its memory in the first run and has allocated it
after the second."""
_PACKING = ("MatMul", "Gemm", "Attention")
"""Parts of the names of operators whose kernels replace their second input, if it is a weight, by a packed copy when a
session is opened. Measured on the CPU: scales and biases stay."""


_VIEWS = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators that return their input in another shape."""


def measure_growth(path: Path, options: opened_model.RunOptions) -> MemoryGrowth:
    """Measure the growth of this process while a session opens a file and runs it.

    An earlier session in this process has loaded the code of the kernels, so that it is not counted.

    Args:
        path: The ONNX file.
        options: Run options.
    """
    return_freed_memory()
    before = resident_bytes()
    with PeakMemory() as opening:
        opened = opened_model.open_model(path, options, options.choose_provider())
    after_opening = resident_bytes()
    values = opened_model.values_for(opened.session, options)
    run = opened.session.prepare(values.feeds, io_binding=options.io_binding)
    before_runs = resident_bytes()
    for _ in range(_RUNS):
        run()
    after_runs = resident_bytes()
    return_freed_memory()
    return MemoryGrowth(
        growth_bytes=after_opening - before + after_runs - before_runs,
        freed_bytes=max(after_runs - resident_bytes(), 0),
        opening_peak_bytes=max(opening.largest_bytes - before, 0),
    )


@dataclass(frozen=True)
class ExecutedGraph:
    """The graph that ONNX Runtime executed, with the modules of its nodes."""

    model: onnx.ModelProto
    tags: Mapping[str, str]
    """Name of a node → tag."""
    tree: OnnxTree
    """Modules of the file."""


def charge_memory(executed: ExecutedGraph, run: RunMemory, growth: MemoryGrowth) -> ModuleMemory:
    """Charge weights, values and scratch memory to modules.

    Args:
        executed: The executed graph.
        run: Memory of its kernels.
        growth: Growth of the process.
    """
    contents = read_contents(executed.model)
    node_tags = tuple(executed.tags.get(node.proto.name, "") for node in contents.nodes)
    owners = weight_owners(replace(executed.tree, tags=node_tags), contents)
    packed = _packed_bytes(contents, run.before_bytes)
    modules: dict[str, ModuleBytes] = defaultdict(ModuleBytes)
    for weight, owner, copy_bytes in zip(contents.weights, owners, packed, strict=True):
        modules[owner] += ModuleBytes(weights_bytes=weight.size_bytes or 0, packed_bytes=copy_bytes)
    peak = _find_peak(executed, run.kernels)
    for held in peak.values:
        modules[held.tag] += ModuleBytes(peak_bytes=held.size_bytes)
    for kernel in run.kernels:
        modules[executed.tags.get(kernel.node, "")] += ModuleBytes(scratch_bytes=kernel.scratch_bytes)
    return ModuleMemory(
        weights_bytes=sum(weight.size_bytes or 0 for weight in contents.weights),
        packed_bytes=sum(packed),
        peak=peak,
        allocator_bytes=max(run.rounded_bytes - peak.activation_bytes - peak.scratch_bytes, 0) + run.block_bytes,
        growth=growth,
        modules=dict(modules),
    )


def _packed_bytes(contents: Contents, arena_bytes: int) -> list[int]:
    """Memory of packed copies beyond the weights that they replace, by weight.

    Kernels pack weights into the arena. The profile has the sum only, which is divided in proportion to the weights.

    Args:
        contents: Nodes and weights of the executed graph.
        arena_bytes: Memory in use in the arena before the first run.
    """
    packing, reading = set[int](), set[int]()
    for node in contents.nodes:
        for position, index in node.weight_inputs:
            is_packed = position == 1 and any(name in node.proto.op_type for name in _PACKING)
            (packing if is_packed else reading).add(index)
    sizes = [weight.size_bytes or 0 for weight in contents.weights]
    copied = [size if index in packing else 0 for index, size in enumerate(sizes)]
    replaced = sum(size for index, size in enumerate(copied) if index not in reading)
    extra = max(arena_bytes - replaced, 0)
    return [size * extra // max(sum(copied), 1) for size in copied]


def _find_peak(executed: ExecutedGraph, kernels: Sequence[KernelMemory]) -> MemoryPeak:
    """Find the kernel with the most memory in use, and the values in memory then; of several, with the most values."""
    buffers = _trace_buffers(executed, kernels)
    live_bytes = [0] * len(kernels)
    for buffer in buffers:
        for position in range(buffer.start, min(buffer.last_use + 1, len(kernels))):
            live_bytes[position] += buffer.size_bytes
    used_bytes = [kernel.in_use_bytes + kernel.scratch_bytes for kernel in kernels]
    peak = max(range(len(kernels)), key=lambda position: (used_bytes[position], live_bytes[position]))
    alive = [buffer for buffer in buffers if buffer.size_bytes and buffer.start <= peak <= buffer.last_use]
    values = [buffer.held_value(peak) for buffer in sorted(alive, key=lambda buffer: -buffer.size_bytes)]
    kernel = kernels[peak]
    return MemoryPeak(
        node=kernel.node,
        operator=kernel.op_type,
        tag=executed.tags.get(kernel.node, ""),
        activation_bytes=kernel.in_use_bytes,
        scratch_bytes=kernel.scratch_bytes,
        values=tuple(values),
    )


@dataclass
class _Buffer:
    """Memory of one value, or of several values one after the other."""

    start: int
    """Position of the kernel that allocates it."""
    size_bytes: int
    last_use: int = 0
    """Position of the last kernel that reads it."""
    values: list[tuple[int, HeldValue]] = field(default_factory=list)
    """(position of the kernel that computed it, value)."""

    def held_value(self, position: int) -> HeldValue:
        """Return the value when a kernel ends."""
        return [value for start, value in self.values if start <= position][-1]


def _trace_buffers(executed: ExecutedGraph, kernels: Sequence[KernelMemory]) -> list[_Buffer]:
    """List the memory of all values of the graph and of the subgraphs that ran.

    A kernel that allocates nothing returns a view of an input, or writes into the memory of an input of the same size
    that no later kernel reads, or into that of an earlier value. The last is not recorded, and counts as memory of its
    own. The outputs of a subgraph are the outputs of its node.

    Args:
        executed: The executed graph.
        kernels: Kernels of a run, in order.
    """
    named = list(proto_nodes(executed.model))
    counts = Counter(node.name for node in named)
    nodes = {node.name: node for node in named if counts[node.name] == 1}
    last_read = _find_last_reads(nodes, [value.name for value in executed.model.graph.output], kernels)
    buffers: list[_Buffer] = []
    memory: dict[str, _Buffer] = {}
    for position, kernel in enumerate(kernels):
        if (node := nodes.get(kernel.node)) is None:
            continue
        outputs = [(index, name) for index, name in enumerate(node.output) if name]
        # Optional outputs without a value are not in the profile.
        for (index, name), size, (dtype, shape) in zip(
            outputs, kernel.output_bytes, kernel.output_shapes, strict=False
        ):
            inner = _inner_outputs(node, index)
            shared = next(
                (
                    memory[source]
                    for source in inner or node.input
                    if source in memory
                    and memory[source].size_bytes == size
                    and (inner or kernel.op_type in _VIEWS or memory[source].last_use <= position)
                ),
                None,
            )
            if shared is None or (kernel.allocated_bytes and not inner):
                shared = _Buffer(position, size)
                buffers.append(shared)
            memory[name] = shared
            shared.last_use = max(shared.last_use, last_read.get((name, position), position))
            tag = executed.tags.get(kernel.node, "")
            shared.values.append((position, HeldValue(name, kernel.op_type, tag, dtype, shape, size)))
    return buffers


def _find_last_reads(
    nodes: Mapping[str, onnx.NodeProto], outputs: Sequence[str], kernels: Sequence[KernelMemory]
) -> dict[tuple[str, int], int]:
    """(value, position of the kernel that computed it) → position of the last kernel that reads it.

    The body of a loop computes a value several times. A value that the model returns is read after the last kernel.
    """
    computed: dict[str, int] = {}
    last: dict[tuple[str, int], int] = {}
    for position, kernel in enumerate(kernels):
        if (node := nodes.get(kernel.node)) is None:
            continue
        last.update({(name, computed[name]): position for name in _read_values(node) if name in computed})
        computed.update(dict.fromkeys(node.output, position))
    return last | {(name, computed[name]): len(kernels) for name in outputs if name in computed}


def _read_values(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that stay in memory until a node ends: its inputs, and what its subgraphs read and return."""
    yield from node.input
    for graph in subgraphs(node):
        yield from (value.name for value in graph.output)
        inside = {name for inner in graph.node for name in inner.output}
        yield from (name for inner in graph.node for name in _read_values(inner) if name not in inside)


def _inner_outputs(node: onnx.NodeProto, index: int) -> list[str]:
    """Values of the subgraphs that become an output of a node; the body of a ``Loop`` returns its condition first."""
    return [
        graph.output[position].name
        for graph in subgraphs(node)
        if 0 <= (position := len(graph.output) - len(node.output) + index) < len(graph.output)
    ]
