"""Capture of a module's forward as a graph with torch's dynamo exporter.

Parameters are attached by reference, so capturing never copies a weight; the caller passes the values of fake
parameters. Every node has the exact module stack and a name after the module; `tags.tagging` writes the tags.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import keyword
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import _AttrProxy, _ModuleStackTracer

from winml.modelkit.errors import ExportError, error_chain, first_line, opt
from winml.modelkit.export.capture import (
    Capture,
    CaptureOptions,
    accepted_names,
    name_by_module,
    name_open_sizes,
    place_operands,
)
from winml.modelkit.export.complex_pairs import complex_as_pairs
from winml.modelkit.export.config import DYNAMO_OPSET
from winml.modelkit.export.dynamo.example_values import ExportedLoops, decided_by_examples
from winml.modelkit.export.dynamo.operator_forms import operator_forms
from winml.modelkit.export.dynamo.shortcuts import shortcuts
from winml.modelkit.export.dynamo.transformers_patches import library_repairs
from winml.modelkit.export.value_loops import call_replaced
from winml.modelkit.metadata_keys import (
    CLASSES_KEY,
    FX_NODE_KEY,
    ONNXSCRIPT_PREFIX,
    SCOPES_KEY,
    STACK_TRACE_KEY,
    TORCH_PREFIX,
)
from winml.modelkit.models.fake_parameters import WEIGHT_ENTRY, fresh_shape_envs, is_fake, weight_by_reference
from winml.modelkit.models.preparation import FlatForward
from winml.modelkit.models.source_lines import asserts_only, is_of_user
from winml.modelkit.models.state_restoration import quiet_torch, unprinted_failures
from winml.modelkit.onnx.assumptions import Assumption, SourceLine, assume_size
from winml.modelkit.ort.shared_settings import attribute_replaced
from winml.modelkit.tags.torch_modules import module_of_error, operator_remedy
from winml.modelkit.tags.tree import ModuleTree

_FIXED_AXIS = re.compile(r"(?:L\['(\w+)'\]\.size\(\)|inputs\['(\w+)'\]\.shape)\[(\d+)\]")
"""Format of a size in torch's messages about constraints."""
_MISSING_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_COMPLEX = re.compile(r"complex-valued|complex64|complex128")
_DATA_DEPENDENT = re.compile(r"data-dependent|DataDependent|unbacked symint|GuardOnDataDependent", re.IGNORECASE)
_T = TypeVar("_T")
_LEAST_TRACED, _LARGEST_SIZE = 2, 2**20
"""Specified: the smallest dynamic size that torch traces. Chosen: an upper bound beyond a million comes from 32-bit
integers, not from the forward."""
_ORDERS = frozenset({"<", "<=", ">", ">="})
_LIBRARIES = frozenset({"torch", "winml", "onnxscript", "onnx_ir"})
"""Packages whose source lines are not reported, because the user cannot change them."""
_SIZE_HINT = "Fix the size (omit the dynamic option), or read sizes from x.shape only in the forward."


def export_error(
    error: Exception,
    model: nn.Module,
    stacks: ModuleStacks,
    axes: Mapping[tuple[str, int], tuple[str, str]],
) -> ExportError:
    """Convert an exception of torch to an ExportError with operator and module, read from its stack frames.

    Args:
        error: The exception.
        model: The module that was exported.
        stacks: Reads the modules of torch's nodes.
        axes: ``(argument, axis)`` → names of the dynamic dimension and of the input.
    """
    chain = tuple(error_chain(error, with_context=False))
    node = _first_not_none(_failed_node(link) for link in chain)
    module = None
    if node is not None:
        paths = stacks.decode(name for name, _class in node.meta.get("nn_module_stack", {}).values())
        module = paths[-1] if paths else None
    if module is None:
        module = _first_not_none(module_of_error(link, model) for link in chain)
    scope = f" in module {module or '(the root)'}" if module is not None else ""
    if (missing_operator := _first_not_none(_MISSING_OPERATOR.search(str(link)) for link in chain)) is not None:
        operator = missing_operator[1].replace(".", "::")
        is_complex = any(_COMPLEX.search(str(link)) for link in chain)
        return ExportError(
            f"the dynamo exporter has no ONNX form of {operator}{' on complex numbers' if is_complex else ''}{scope}",
            hint=(
                "Compute with real and imaginary parts there (torch.view_as_real)."
                if is_complex
                else operator_remedy(module, "Replace the operator in that module's forward by others.")
            ),
            operator=operator,
            module=module,
        )
    if fixed_axes := _fixed_axes(error, axes):
        places = " and ".join(f"{dimension} (axis {axis} of {name})" for dimension, name, axis in fixed_axes)
        frozen = ExportError(
            f"{places} cannot be dynamic with the dynamo exporter{scope}: {_constraint_reason(error)}",
            hint=_SIZE_HINT,
            module=module,
        )
        frozen.frozen = tuple(name for name, _, _ in fixed_axes)
        return frozen
    cause = chain[-1]
    if any(_DATA_DEPENDENT.search(f"{type(link).__name__}: {first_line(link)}") for link in chain):
        undecided = ExportError(
            f"the forward decides by the value of a tensor{scope}{_user_line(chain)}, which the dynamo exporter cannot "
            f"follow: {first_line(cause)}",
            hint="Use torch.where or torch.cond there.",
            module=module,
        )
        undecided.is_by_value = True
        return undecided
    failed_operator = _operator_name(node)
    summary = (
        f"operator {failed_operator} could not be converted" if failed_operator else "the model could not be exported"
    )
    return ExportError(
        f"{summary}{scope} with the dynamo exporter: {type(cause).__name__}: {first_line(cause)}",
        hint=f"The forward must run under torch.export with these inputs; {opt.debug} shows the full traceback.",
        operator=failed_operator,
        module=module,
    )


def _first_not_none(candidates: Iterable[_T | None]) -> _T | None:
    return next((candidate for candidate in candidates if candidate is not None), None)


def _failed_node(error: BaseException) -> torch.fx.Node | None:
    """Return the node torch failed to convert, or None if the failure was elsewhere."""
    failed_node = None
    entry = error.__traceback__
    while entry is not None:
        frame = entry.tb_frame
        if frame.f_globals.get("__name__", "").startswith("torch.onnx."):
            node = frame.f_locals.get("node")
            failed_node = node if isinstance(node, torch.fx.Node) else failed_node
        entry = entry.tb_next
    return failed_node


def _operator_name(node: torch.fx.Node | None) -> str | None:
    if node is None or node.op != "call_function":
        return None
    target = node.target
    return target.name() if isinstance(target, torch._ops.OpOverload) else str(target)


def _fixed_axes(error: BaseException, axes: Mapping[tuple[str, int], tuple[str, str]]) -> list[tuple[str, str, int]]:
    """Return (dimension, input, axis) for each size in torch's message about constraints."""
    axis_keys = dict.fromkeys((match[1] or match[2], int(match[3])) for match in _FIXED_AXIS.finditer(str(error)))
    return [(*axes[key], key[1]) for key in axis_keys if key in axes]


def _constraint_reason(error: BaseException) -> str:
    """Return the reason in torch's message about a constraint, without torch's names of sizes."""
    for line in str(error).splitlines():
        if "specialized it to be a constant" in line or "is not valid" in line:
            return "the forward takes it for a constant" if "constant" in line else line.strip(" -")
    return first_line(error)


def _user_line(chain: Sequence[BaseException]) -> str:
    """Return file name and line of the innermost frame outside the libraries, in brackets: `` (net.py:8)``.

    ``""`` if all frames are in libraries.
    """
    for error in chain:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if not _LIBRARIES.intersection(Path(frame.filename).parts)]
        if user_frames:
            return f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})"
    return ""


class TimeIsUpError(BaseException):
    """The time limit is exceeded. Not an ``Exception``: libraries catch exceptions and continue."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise :class:`TimeIsUpError` in the block after ``seconds``; None: no limit.

    torch computes dynamic sizes by symbolic algebra, whose expressions can grow without bound. The block is stopped as
    by Ctrl-C; a running call into compiled code finishes first.
    """
    if seconds is None:
        yield
        return
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock = threading.Lock()
    is_over = False

    def stop() -> None:
        with lock:
            if not is_over:
                raise_in(thread, ctypes.py_object(TimeIsUpError))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            is_over = True
        # Cancel an error that was set and not raised yet: it must not be raised outside the block.
        raise_in(thread, None)


def capture_dynamo(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    forward: FlatForward,
    tree: ModuleTree,
    options: CaptureOptions,
) -> Capture:
    """Export a prepared module and return its graph.

    Args:
        model: The module, its forward replaced by ``forward``; its parameters may be fake tensors.
        inputs: Example tensors by input name, in order; their shapes become the graph's. Fake if the parameters are
            fake.
        forward: The flat forward, called at least once, so that its output names are known.
        tree: The modules of the model, for the names of nodes.
        options: Opset, dynamic sizes, weights and time limit.

    Raises:
        ExportError: the module cannot be traced, a size cannot be dynamic, the exporter lacks an operator, or the time
            limit is exceeded; the error names operator and module if known.
    """
    stacks = ModuleStacks(model)
    assumed: dict[tuple[str, int], Assumption] = {}
    try:
        with (
            time_limit(options.time_limit_s),
            quiet_torch(),
            unprinted_failures(),
            ExitStack() as stack,
        ):
            loops = ExportedLoops()
            if options.takes_example_values:
                stack.enter_context(decided_by_examples(assumed))
            with loops.in_trace():
                captured, bounds, branches = loops.call(
                    lambda: _export_with_dynamo(model, inputs, forward, stacks, options, loops)
                )
    except TimeIsUpError:
        raise ExportError(
            f"the dynamo exporter was stopped after {options.time_limit_s:.0f} s",
            hint=f"Use {opt.dynamo} to run it without a time limit. Divisions of dynamic sizes take long.",
        ) from None
    except Exception as error:
        raise export_error(error, model, stacks, _index_axes(forward, options.dynamic_axes)) from error
    # torch writes some operators as functions; inlined, every node has a module.
    ir.passes.common.InlinePass()(captured)
    capture = _make_capture(captured, model, tree, stacks, options)
    return replace(capture, bounds=bounds, assumed=tuple({**branches, **assumed}.values()), notes=loops.notes)


def _export_with_dynamo(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    forward: FlatForward,
    stacks: ModuleStacks,
    options: CaptureOptions,
    loops: ExportedLoops,
) -> tuple[ir.Model, dict[str, tuple[int, int]], dict[SourceLine, Assumption]]:
    """Return the graph of torch's dynamo exporter, with our repairs for transformers; the bounds of dynamic sizes, and
    the lines that branch on them otherwise.

    Args:
        model: The prepared model.
        inputs: Input → example.
        forward: Its flat forward.
        stacks: Record the modules of operators.
        options: Options of the capture.
        loops: Record the loops over values in the forward.
    """
    with (
        _function_as_forward(model, forward, loops, options.dynamic_axes),
        # torch traces in the fake mode of the parameters, which must allow dynamic sizes and contain none yet.
        fresh_shape_envs(model, are_sizes_open=True),
        stacks.patched_tracer(),
        shortcuts(keep_stack_traces=options.keep_stack_traces),
        attribute_replaced(nn.Module, "to", _cast_unless_equal),
        attribute_replaced(nn.functional, "embedding_bag", _sum_bags),
        call_replaced(torch.Tensor, "__setitem__", _write_at_indices),
        library_repairs(model) as repairs,
    ):
        with complex_as_pairs():
            program = torch.export.export(
                model,
                # Cloned in the forward, not here: torch would make an input that the model writes to one more output.
                tuple(inputs.values()),
                dynamic_shapes=_dynamic_shapes(inputs, options.dynamic_axes),
                strict=False,
            )
        sizes = _read_sizes(program, forward, options.dynamic_axes)
        bounds, branches = _find_size_bounds(program, sizes), _find_size_branches(sizes)
        repairs.repair_program(program)
        converted = torch.onnx.export(
            program,
            input_names=list(forward.input_names),
            output_names=list(forward.output_names),
            opset_version=max(options.opset_version, DYNAMO_OPSET),
            custom_translation_table={**operator_forms(), **repairs.translations},
            # torch's optimizer reads weights; our normalization does not.
            optimize=False,
            verbose=False,
        )
        assert converted is not None  # None only after a file was written
        repairs.repair_graph(converted)
    return converted.model, bounds, branches


def _read_sizes(
    program: torch.export.ExportedProgram, forward: FlatForward, axes: Mapping[str, Mapping[int, str]]
) -> list[tuple[str, torch.SymInt]]:
    """Return dimension and symbolic size for each dynamic axis of the inputs that torch left open."""
    names = program.graph_signature.user_inputs
    placeholders = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    sizes = []
    for name, argument in zip(forward.input_names, names, strict=True):
        shape = getattr(placeholders.get(argument) if isinstance(argument, str) else None, "shape", ())
        for axis, dimension in axes.get(name, {}).items() if shape else ():
            if isinstance(size := shape[axis], torch.SymInt):
                sizes.append((dimension, size))
    return sizes


def _find_size_bounds(
    program: torch.export.ExportedProgram, sizes: Sequence[tuple[str, torch.SymInt]]
) -> dict[str, tuple[int, int]]:
    """Return the ranges of dynamic sizes for which torch made the graph; unlimited ranges are left out.

    Beyond the range the forward branches differently or fails. A range from 2 on is unlimited: torch never traces a
    size of 0 or 1. The outputs for these sizes are compared later.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for dimension, size in sizes:
        limits = program.range_constraints.get(size.node.expr)
        if limits is None:
            continue
        low, high = (int(bound) if bound.is_Integer else sys.maxsize for bound in (limits.lower, limits.upper))
        if low > _LEAST_TRACED or high < _LARGEST_SIZE:
            before = bounds.get(dimension, (0, sys.maxsize))
            bounds[dimension] = (max(before[0], low if low > _LEAST_TRACED else 0), min(before[1], high))
    return bounds


def _find_size_branches(sizes: Sequence[tuple[str, torch.SymInt]]) -> dict[SourceLine, Assumption]:
    """Return the lines of the user's Python that branch on a size, such as ``size % 4 == 0``, and their assumptions.

    A comparison with a number by order is none: torch limits the range of the size to the branch taken.
    """
    names: dict[Any, str] = {}
    for dimension, size in sizes:
        names.setdefault(size.node.expr, dimension)
    found: dict[SourceLine, Assumption] = {}
    for guard in sizes[0][1].node.shape_env.guards if sizes else ():
        # A line of text, if torch knows no frame.
        frame = getattr(guard.sloc, "framework_loc", None)
        symbols = guard.expr.free_symbols
        is_bound = guard.expr.rel_op in _ORDERS and len(symbols) == 1 if guard.expr.is_Relational else False
        if is_bound or not isinstance(frame, traceback.FrameSummary) or not is_of_user(frame.filename):
            continue
        if frame.lineno is not None and not asserts_only(frame.filename, frame.lineno):
            line = (Path(frame.filename).name, frame.lineno)
            read = {names[symbol] for symbol in symbols if symbol in names}
            found.setdefault(line, assume_size(line, sizes=read, is_branch=True))
    return found


def _make_capture(
    captured: ir.Model, model: nn.Module, tree: ModuleTree, stacks: ModuleStacks, options: CaptureOptions
) -> Capture:
    """Attach weights, name nodes and dynamic sizes, drop torch's own metadata, in place; return the capture."""
    scopes = {node: stacks.read(node) for node in captured.graph.all_nodes()}
    _copy_scopes_to_bodies(scopes)
    _drop_exporter_metadata(captured, keep_stack_traces=options.keep_stack_traces)
    _attach_weights(captured.graph, model, options.weights)
    if options.dynamic_axes:
        name_open_sizes(captured.graph, options.dynamic_axes)
    unused_inputs = tuple(value.name or "" for value in captured.graph.inputs if not value.uses())
    place_operands(scopes)
    name_by_module(captured.graph, scopes, tree)
    return Capture(captured, scopes, unused_inputs)


def _copy_scopes_to_bodies(scopes: dict[ir.Node, tuple[str, ...]]) -> None:
    """Copy the scope of a loop or branch node to inner nodes without a recorded scope, in place.

    A node precedes the nodes of its subgraphs.
    """
    for node, scope in scopes.items():
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                scopes.update({inner: scope for inner in attribute.as_graph() if not scopes[inner]})


_cast, _embedding_bag = nn.Module.to, nn.functional.embedding_bag


def _write_at_indices(original: Callable[..., None], tensor: torch.Tensor, indices: Any, values: Any) -> None:
    """Write at indices, stacking a list of scalar tensors to one tensor; torch would read their values (for: UDOP)."""
    if isinstance(indices, tuple):
        indices = tuple(
            torch.stack(list(index))
            if isinstance(index, (list, tuple)) and index and all(isinstance(each, torch.Tensor) for each in index)
            else index
            for index in indices
        )
    original(tensor, indices, values)


def _cast_unless_equal(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """Return a module unchanged if it already has the dtype; a cast swaps parameters, which a trace refuses."""
    (requested, *other_arguments) = (*args, *options.values(), None)
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    is_alike = isinstance(requested, torch.dtype) and other_arguments == [None] and dtypes <= {requested}
    return module if is_alike else _cast(module, *args, **options)


def _sum_bags(indices: torch.Tensor, table: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Return sums or means of table rows per bag; for bags of one size, as a sum of gathered rows.

    onnxscript writes a loop over a sequence of bags, which ONNX Runtime does not load for every model (for: Kimi K2.5).
    """
    mode, weights = options.get("mode", "mean"), options.get("per_sample_weights")
    is_plain = indices.dim() == 2 and not args and options.keys() <= {"mode", "per_sample_weights"}
    if not is_plain or mode not in ("sum", "mean"):
        return _embedding_bag(indices, table, *args, **options)
    rows = nn.functional.embedding(indices, table)
    rows = rows if weights is None else rows * weights[..., None]
    return rows.sum(1) if mode == "sum" else rows.mean(1)


def _function_as_forward(
    model: nn.Module, forward: FlatForward, loops: ExportedLoops, axes: Mapping[str, Mapping[int, str]]
) -> AbstractContextManager[None]:
    """Replace the flat forward by a plain function with a signature torch can read, for the time of the block."""

    def forward_function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loops.begin()
        _unite_dimensions(dict(zip(forward.input_names, tensors, strict=True)), axes)
        copies = tuple(tensor.clone() for tensor in tensors)
        return _clone_repeated(forward(*copies), copies)

    forward_function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect.signature
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _argument_names(forward)]
    )
    return attribute_replaced(model, "forward", forward_function)


def _unite_dimensions(inputs: Mapping[str, torch.Tensor], axes: Mapping[str, Mapping[int, str]]) -> None:
    """Tell torch which sizes of the inputs are equal: it gives each a symbol, and finds out operator by operator.

    Args:
        inputs: Input → tensor of symbolic sizes.
        axes: Input → axis → name of each dynamic dimension.
    """
    first_sizes: dict[str, Any] = {}
    for name, tensor in inputs.items():
        for axis, dimension in axes.get(name, {}).items():
            size: Any = tensor.shape[axis]
            first = first_sizes.setdefault(dimension, size)
            if isinstance(size, torch.SymInt) and isinstance(first, torch.SymInt):
                bool(size == first)  # torch decides that they are equal, and remembers it


def _clone_repeated(outputs: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the outputs, with copies of repeated outputs and of inputs: an ONNX value has one name."""
    seen_ids = {id(tensor) for tensor in inputs}
    distinct = []
    for tensor in outputs:
        distinct.append(tensor.clone() if id(tensor) in seen_ids else tensor)
        seen_ids.add(id(tensor))
    return tuple(distinct)


def _argument_names(forward: FlatForward) -> list[str]:
    """Return the names of the inputs as valid names of Python parameters."""
    return accepted_names(forward.input_names, lambda name: name.isidentifier() and not keyword.iskeyword(name))


def _index_axes(forward: FlatForward, axes: Mapping[str, Mapping[int, str]]) -> dict[tuple[str, int], tuple[str, str]]:
    """Return (argument name of torch, axis) → (name of the dimension, name of the input)."""
    return {
        (argument, axis): (dimension, name)
        for name, argument in zip(forward.input_names, _argument_names(forward), strict=True)
        for axis, dimension in axes.get(name, {}).items()
    }


def _dynamic_shapes(inputs: Mapping[str, torch.Tensor], axes: Mapping[str, Mapping[int, str]]) -> Any:
    """Return the dynamic sizes in torch's format; torch finds dependencies among them. `None` if all are fixed."""
    if not axes:
        return None
    return tuple(dict.fromkeys(axes.get(name, {}), torch.export.Dim.DYNAMIC) or None for name in inputs)


def _attach_weights(graph: ir.Graph, model: nn.Module, weights: Mapping[str, ir.TensorProtocol] | None) -> None:
    """Attach the parameters to the initializers by reference, in place; tied parameters become one initializer.

    Raises:
        InternalError: a fake parameter has no values in ``weights``.
    """
    tensors = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    for name, value in list(graph.initializers.items()):
        tensor = tensors.get(name)
        first_name = name if tensor is None else first_names[id(tensor)]
        if first_name != name:
            value = _rename_initializer(graph, value, first_name)
        if tensor is None:
            tensor = getattr(value.const_value, "raw", None)
            if not is_fake(tensor):
                continue
        elif tensor.is_complex() and not is_fake(tensor):
            # torch's graph holds complex numbers as pairs of real ones.
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        value.const_value = weight_by_reference(first_name, tensor, weights)
        value.meta[WEIGHT_ENTRY] = first_name


def _rename_initializer(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """Rename an initializer, or replace the initializer by an existing one of the name; return the result."""
    assert value.name is not None  # an initializer has a name
    del graph.initializers[value.name]
    if name in graph.initializers:
        ir.convenience.replace_all_uses_with(value, graph.initializers[name])
        return graph.initializers[name]
    value.name = name
    graph.register_initializer(value)
    return value


_TORCH_PREFIXES = (TORCH_PREFIX, ONNXSCRIPT_PREFIX)
_CALL_COUNTER = re.compile(r"@\d+$")
"""torch appends it to the path of a module that is called again."""


class ModuleStacks:
    """Makes torch record stacks of module paths, and decodes them; each module has one path, its first."""

    def __init__(self, model: nn.Module) -> None:
        self._first_paths: dict[nn.Module, str] = {}
        self._paths: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            # A module registered twice has its first path, regardless of the name of the call.
            self._paths[path] = self._first_paths.setdefault(module, path)

    def patched_tracer(self) -> AbstractContextManager[None]:
        """Patch torch's tracer, so that an export inside the block writes the paths of this model."""
        path_of_module = _ModuleStackTracer.path_of_module

        def first_path(tracer: _ModuleStackTracer, module: Any) -> str:
            # torch passes proxies of modules that are shared.
            is_stand_in = isinstance(module, _AttrProxy)
            base: nn.Module = module.get_base() if is_stand_in else module
            # The root has an empty path, and torch's wrapper of the root none: torch names both.
            return self._first_paths.get(base) or path_of_module(tracer, module)

        return attribute_replaced(_ModuleStackTracer, "path_of_module", first_path)

    def read(self, node: ir.Node) -> tuple[str, ...]:
        """Return the paths of the modules a node ran in, outermost first; `()` if the exporter recorded none."""
        text = node.metadata_props.get(SCOPES_KEY)
        return self.decode(ast.literal_eval(text)[:-1]) if text else ()

    def decode(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the module paths of torch's names; names that are no module of the model are skipped."""
        plain_names = (_CALL_COUNTER.sub("", name).replace("._modules.", ".") for name in names)
        return tuple(self._paths[name] for name in plain_names if name in self._paths)


def _drop_exporter_metadata(model: ir.Model, *, keep_stack_traces: bool) -> None:
    """Remove torch's debugging metadata, in place; scopes and classes of nodes are retained.

    Args:
        model: A graph exported by torch.
        keep_stack_traces: Retain the Python source lines of nodes; these contain local paths.
    """
    preserved_keys = {SCOPES_KEY, CLASSES_KEY, *((STACK_TRACE_KEY, FX_NODE_KEY) if keep_stack_traces else ())}
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            values += node.outputs
            _drop_torch_keys(node.metadata_props, preserved_keys)
            node.doc_string = None
        for value in values:
            _drop_torch_keys(value.metadata_props, set())
        _drop_torch_keys(graph.metadata_props, set())


def _drop_torch_keys(metadata: dict[str, str], preserved_keys: set[str]) -> None:
    for key in [key for key in metadata if key.startswith(_TORCH_PREFIXES) and key not in preserved_keys]:
        del metadata[key]
