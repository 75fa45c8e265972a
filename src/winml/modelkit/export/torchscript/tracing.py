"""Traces with TorchScript: scopes for every module, tensors without values, and Python that a trace cannot record.

Every module gets a scope, read back as the module stack of a node. Operations that need values which fake tensors lack
are refused, and loops over values, bools, masks, rounding and assertions are adapted. Lines that take a tensor for a
number are noted.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.onnx._internal.torchscript_exporter import utils as exporter

from winml.modelkit.errors import ExportError
from winml.modelkit.export.value_loops import ValueLoops, call_replaced
from winml.modelkit.models import script_modules
from winml.modelkit.models.fake_parameters import is_fake
from winml.modelkit.models.preparation import has_hooks
from winml.modelkit.models.source_lines import asserts_only_at, is_of_user
from winml.modelkit.onnx.assumptions import SourceLine
from winml.modelkit.ort.shared_settings import attribute_replaced, attributes_replaced
from winml.modelkit.progress import count_progress
from winml.modelkit.tags.torch_modules import module_of_error

_NUMBER_METHODS = ("__bool__", "__float__", "__index__", "__int__", "__iter__", "__len__", "item")
"""Methods of a tensor that return a Python value for control flow. torch warns of methods that read all values."""
_OF_SHAPES = frozenset({"aten::size", "aten::numel", "aten::len", "aten::sym_size", "aten::sym_numel"})
"""Operators that ask for no value."""
_UNTAGGED = frozenset({"aten::nonzero_numpy", "aten::repeat_interleave.self_Tensor", "aten::where"})
"""Composite operators whose result sizes depend on values; torch tags only the operators inside."""
_COUNTED_ROWS = frozenset({"aten::index", "aten::nonzero", "aten::masked_select", "aten::argwhere"})
"""Operators with one axis of value-dependent size: the first axis; for ``index``, the axis selected by a mask."""
_PATCHES = (__file__, ValueLoops.call.__code__.co_filename)
"""Files with replacements of torch's functions."""
_WRAPPERS = (*_PATCHES, torch.Tensor.__contains__.__code__.co_filename)
"""Files whose frames are between the line that reads a value and the patched function."""


@dataclass
class NumberReads:
    """Lines of the user's Python that read a traced tensor as a number in one trace, such as ``if n > 3``."""

    input_names: tuple[str, ...]
    """Inputs of the model, in order."""
    open_axes: Mapping[str, Mapping[int, str]]
    """Input → axis → name, of the sizes that are left open."""
    values: dict[SourceLine | None, tuple[str, frozenset[str]]] = field(default_factory=dict)
    """Source line, None in a scripted module → the number and the inputs from whose values it was computed."""
    sizes: dict[SourceLine | None, tuple[str, frozenset[str]]] = field(default_factory=dict)
    """Source line → the number and the names of the dynamic sizes, if computed from sizes alone."""

    @contextmanager
    def in_trace(self) -> Iterator[None]:
        """Note them inside the block; patches torch."""
        with ExitStack() as stack:
            for name in _NUMBER_METHODS:
                stack.enter_context(call_replaced(torch.Tensor, name, functools.partial(self._read_number, name)))
            yield

    def _read_number(self, name: str, original: Callable[..., object], values: torch.Tensor) -> Any:
        """Call a tensor's method that returns a number; in a trace, note the line of user code that fixes the number.

        Not noted: lines of libraries, subscripts, and asserts. The warnings of torch about noted lines are suppressed.
        """
        frame = inspect.currentframe()
        while frame is not None and (frame.f_code.co_filename in _WRAPPERS):
            frame = frame.f_back
        is_traced = torch._C._get_tracing_state() is not None and isinstance(values, torch.Tensor)
        is_scripted = frame is not None and frame.f_code.co_filename == script_modules.__file__
        if frame is None or not is_traced or not (is_scripted or is_of_user(frame.f_code.co_filename)):
            return original(values)
        if name == "__index__" and _is_subscript(frame):
            return original(values)
        with warnings.catch_warnings():
            # torch's warnings are replaced by notes here, with their source lines.
            warnings.simplefilter("ignore")
            number = original(values)
        file, line = frame.f_code.co_filename, frame.f_lineno
        # The trace follows values that are still tensors: torch has its own ``len()``.
        if not isinstance(number, torch.Tensor) and not asserts_only_at(frame):
            self._note_line(None if is_scripted else (Path(file).name, line), name, values, number)
        return number

    def _note_line(self, source_line: SourceLine | None, name: str, values: torch.Tensor, number: object) -> None:
        """Note a line that reads a number, with the inputs or the dynamic sizes that decide the number.

        Args:
            source_line: The line; None: in a scripted module.
            name: Method of the tensor that returns the number.
            values: The tensor.
            number: The number.
        """
        value: Any = torch._C._get_value_trace(values)  # type: ignore[attr-defined]  # its stub misses it
        is_of_rows = name in ("__len__", "__iter__")
        inputs, sizes = self._sizes_of(value, 0) if is_of_rows else self._find_origins(value)
        text = str(values.shape[0] if name == "__iter__" else number)
        if inputs:
            self.values[source_line] = (text, inputs)
        elif sizes:
            previous = self.sizes.get(source_line, (text, frozenset()))
            self.sizes[source_line] = (previous[0], previous[1] | sizes)

    def _sizes_of(self, value: Any, axis: int | None) -> tuple[frozenset[str], frozenset[str]]:
        """Return the inputs whose values decide the size of a traced value, and the dynamic sizes it may equal.

        Args:
            value: The traced value.
            axis: The axis; None: any axis.
        """
        names = self._map_traced_inputs()
        if value.unique() in names:
            axes = self.open_axes.get(names[value.unique()], {})
            return frozenset(), frozenset(size for number, size in axes.items() if axis is None or number == axis)
        ancestors = list(_find_ancestors(value))
        inputs = [names[ancestor.unique()] for ancestor in ancestors if ancestor.unique() in names]
        sizes = frozenset(size for name in inputs for size in self.open_axes.get(name, {}).values())
        deciding = frozenset[str]()
        for ancestor in ancestors:
            operand = _find_counting_operand(ancestor.node())
            if operand is not None and not _has_same_axis(ancestor, value, axis):
                deciding |= self._find_origins(operand)[0]
        return deciding, sizes

    def _find_origins(self, value: Any) -> tuple[frozenset[str], frozenset[str]]:
        """Return the inputs whose values a traced number depends on, and the dynamic sizes it depends on."""
        names = self._map_traced_inputs()
        inputs, sizes = frozenset[str](), frozenset[str]()
        for ancestor in _find_ancestors(value, until=_OF_SHAPES, follows_writes=True):
            if ancestor.unique() in names:
                inputs |= {names[ancestor.unique()]}
            if ancestor.node().kind() in _OF_SHAPES:
                operands = list(ancestor.node().inputs())
                axis = operands[1].toIValue() if len(operands) > 1 else None
                by_value, of_sizes = self._sizes_of(operands[0], axis if isinstance(axis, int) and axis >= 0 else None)
                inputs, sizes = inputs | by_value, sizes | of_sizes
        return inputs, sizes

    def _map_traced_inputs(self) -> dict[int, str]:
        """Return the names of the traced values of the inputs."""
        return dict(zip(_traced_inputs(len(self.input_names)), self.input_names, strict=False))


def _traced_inputs(count: int) -> list[int]:
    """Return the ids of the model's inputs in the trace; the exporter lists inputs first and weights after them."""
    tracing: Any = torch._C._get_tracing_state()
    return [value.unique() for value in list(tracing.graph().inputs())[:count]]


def _find_ancestors(value: Any, until: Collection[str] = (), *, follows_writes: bool = False) -> Iterator[Any]:
    """Yield a traced value and its ancestors, stopping at operators of the kinds in ``until``.

    Args:
        value: The traced value.
        until: Kinds of operators.
        follows_writes: Also yield operands that were written into these values or into views of them.
    """
    pending: list[Any] = [value]
    visited: set[int] = set()
    while pending:
        ancestor = pending.pop()
        if ancestor.unique() not in visited:
            visited.add(ancestor.unique())
            yield ancestor
            pending += [] if ancestor.node().kind() in until else ancestor.node().inputs()
            pending += _find_written_operands(ancestor) if follows_writes else []


def _find_written_operands(value: Any) -> Iterator[Any]:
    """Yield the operands of operators that write into a traced value or into a view of it."""
    pending: list[Any] = [value]
    while pending:
        for use in pending.pop().uses():
            written, viewed = _aliased_arguments(use.user.schema())
            if use.offset in written:
                yield from use.user.inputs()
            if use.offset in (*written, *viewed):
                pending += use.user.outputs()


@functools.cache
def _aliased_arguments(schema: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of arguments that an operator writes into, and of arguments that results are views of."""
    if schema.startswith("("):  # nodes of TorchScript itself have no schema
        return (), ()
    aliased = [
        (position, argument.alias_info.is_write)
        for position, argument in enumerate(torch._C.parse_schema(schema).arguments)
        if argument.alias_info is not None
    ]
    return tuple(at for at, is_write in aliased if is_write), tuple(at for at, is_write in aliased if not is_write)


def _find_counting_operand(node: Any) -> Any:
    """Return the operand whose values decide the number of elements a traced operator returns; `None` without one."""
    operands = list(node.inputs())
    kind, name = node.kind(), node.schema().partition("(")[0]
    if kind == "aten::index":
        return next((index for index in operands[1].node().inputs() if _holds_flags(index)), None)
    if name not in _UNTAGGED and not _has_tagged_size(name):
        return None
    if kind == "aten::one_hot":
        # -1: as many classes as the largest value.
        return operands[0] if operands[1].toIValue() == -1 else None
    return operands[1 if name in ("aten::masked_select", "aten::repeat_interleave.self_Tensor") else 0]


def _holds_flags(value: Any) -> bool:
    return value.type().kind() == "TensorType" and value.type().scalarType() in ("Bool", "Byte")


def _has_same_axis(counted: Any, value: Any, axis: int | None) -> bool:
    """Return True if an axis of a traced value is unchanged by an operator with a value-dependent number of rows.

    Args:
        counted: The result of that operator.
        value: A value computed from the result.
        axis: The axis; None: any axis.
    """
    node = counted.node()
    if axis is None or node.kind() not in _COUNTED_ROWS:
        return False
    rows = 0
    if node.kind() == "aten::index":
        rows = [_holds_flags(index) for index in list(node.inputs())[1].node().inputs()].index(True)
    sizes, counted_sizes = value.type().sizes(), counted.type().sizes()
    is_known = sizes is not None and counted_sizes is not None and len(sizes) == len(counted_sizes)
    return is_known and axis != rows and sizes[axis] == counted_sizes[axis]


@functools.cache
def _has_tagged_size(name: str) -> bool:
    """Return True if torch tags an operator as having results whose sizes depend on values."""
    namespace, _, operator = name.partition("::")
    if namespace != "aten":
        return False
    packet, _, overload = operator.partition(".")
    overloads = getattr(torch.ops.aten, packet, None)
    # Operators that TorchScript alone has are no overloads.
    return torch.Tag.dynamic_output_shape in getattr(getattr(overloads, overload or "default", None), "tags", ())


def is_noted_elsewhere(file: str) -> bool:
    """Return True if a warning of the tracer comes from the patches of torch, which note by themselves."""
    return file in _PATCHES


def _is_subscript(frame: FrameType) -> bool:
    """Return True if a frame evaluates ``values[…]``: a trace follows this for tensors."""
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return "SUBSCR" in name or "SLICE" in name


_OF_TENSORS = (
    *("fill_", "fill_diagonal_", "index_fill", "index_fill_", "masked_fill", "masked_fill_", "new_full"),
    *("scatter", "scatter_"),
)
_OF_TORCH = ("full", "full_like", "index_fill", "masked_fill", "scatter")
"""Specified, together with the names above: functions that write a number into a tensor; all except ``full`` use the
tensor's dtype.
"""
_NAMES_OF_NUMBERS = ("fill_value", "value")


@contextmanager
def booleans_as_numbers() -> Iterator[None]:
    """Pass 1 and 0 instead of True and False to the functions above inside the block; patches torch.

    TorchScript's tracer records a bool as an operand of a signature that does not exist, and fails with an internal
    error.
    """
    with ExitStack() as stack:
        for owner, names in ((torch.Tensor, _OF_TENSORS), (torch, _OF_TORCH)):
            for name in names:
                stack.enter_context(call_replaced(owner, name, _call_with_numbers))
        yield


def _call_with_numbers(original: Callable[..., Any], *args: object, **options: object) -> Any:
    """Call a function with 1 and 0 in place of True and False."""
    numbers = {key: options[key] for key in _NAMES_OF_NUMBERS if key in options}
    if original.__name__ == "full" and any(isinstance(value, bool) for value in (*args, *numbers.values())):
        # The only function whose dtype follows from the number.
        options["dtype"] = options.get("dtype") or torch.bool
    return original(*map(_as_number, args), **{**options, **{key: _as_number(value) for key, value in numbers.items()}})


def _as_number(value: object) -> Any:
    return int(value) if isinstance(value, bool) else value


_MODULE = "transformers.masking_utils"
_MAPPED, _INDEXING = "_vmap_expansion_sdpa", "TransformGetItemToIndex"
"""Private in transformers: the function that maps conditions over tokens, and the class for indexing inside it."""


def masks_without_vmap() -> AbstractContextManager[None]:
    """Compute masks for all pairs of tokens at once inside the block; patches transformers.

    transformers computes a mask by conditions on one pair of tokens and maps them over all pairs with ``torch.vmap``,
    which the tracer cannot record.
    """
    module = sys.modules.get(_MODULE)
    replacements = ((module, _MAPPED, _vectorize_condition), (module, _INDEXING, nullcontext))
    return attributes_replaced(*(replacement for replacement in replacements if hasattr(*replacement[:2])))


def _vectorize_condition(condition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function from index ranges (batch, head, query token, key token) to the mask of a condition."""

    def make_mask(*numbers: torch.Tensor) -> torch.Tensor:
        placed = [
            indices[(*[None] * axis, slice(None), *[None] * (len(numbers) - axis - 1))]
            for axis, indices in enumerate(numbers)
        ]
        return condition(*placed).expand(*(indices.shape[0] for indices in numbers))

    return make_mask


_DIGITS = 6
"""Specified: how many decimal digits 32 bits keep for certain (``FLT_DIG``)."""


def tensors_rounded_as_numbers() -> AbstractContextManager[None]:
    """Make ``round()`` accept tensors of one element inside the block; patches torch.

    In a trace a size is a tensor, and tensors have no ``__round__``. The result is a Python number, as without a trace,
    and becomes a constant of the graph, as with ``int()``.
    """
    has_own = hasattr(torch.Tensor, "__round__")
    return nullcontext() if has_own else attribute_replaced(torch.Tensor, "__round__", _round_tensor)


def _round_tensor(values: torch.Tensor, digits: int | None = None) -> int | float:
    """Round the only value of a tensor, in the digits of its type."""
    number = values.item()
    if values.dtype == torch.float32:
        # Python computes in 64 bits, the trace in 32: drop the digits that 32 bits do not have.
        number = float(f"{number:.{_DIGITS}g}")
    return round(number, digits)


@dataclass
class TracedLoops(ValueLoops):
    """Loops over values of one TorchScript trace that depend on an input, not on weights alone.

    NOTE: queries the ancestors of a tensor from the tracer (docs/decisions/0004-private-seams.md).
    ``tests/unit/export/torchscript/test_traced_loops.py`` fails when this API changes.
    """

    input_count: int
    """Number of inputs of the model."""

    def count_positions(self, values: torch.Tensor) -> int | None:
        """Return the number of values; `None` for values that depend on no input."""
        return len(_read_untraced(values)) if self._depends_on_inputs(values) else None

    def make_position(self, number: int, device: torch.device) -> torch.Tensor:
        """Return the position as a constant."""
        return torch.full((1,), number, dtype=torch.int64, device=device)

    def size_if_filled(self, values: torch.Tensor) -> Any:
        """Return the number of values in the trace, at least 1."""
        return max(1, len(_read_untraced(values)))

    def after_failure(self) -> None:
        """Reset the index that torch retains of a failed trace and would use in the next trace."""
        with suppress(RuntimeError), warnings.catch_warnings():
            # That it is outdated, as the exporter is.
            warnings.simplefilter("ignore")
            torch.jit.trace(lambda values: values[0], torch.zeros(1), check_trace=False)

    def _depends_on_inputs(self, values: torch.Tensor) -> bool:
        """Return True if a tensor is computed from an input of the model, and not from weights and constants alone."""
        if torch._C._get_tracing_state() is None:
            return False
        inputs = _traced_inputs(self.input_count)
        value = torch._C._get_value_trace(values)  # type: ignore[attr-defined]  # its stub misses it
        origins = _find_ancestors(value, until=_OF_SHAPES)
        return any(ancestor.unique() in inputs or ancestor.node().kind() in _OF_SHAPES for ancestor in origins)


def _read_untraced(values: torch.Tensor) -> list[Any]:
    """Return the values of a tensor without recording the read in the graph."""
    tracing: Any = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # its stub misses it
    try:
        return list(values.detach().cpu().numpy().tolist())
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


_TRACER: Any = torch._C._parse_dispatch_key("Tracer")


_CONVOLUTION_BACKEND = (False, False, False, False)
"""Specified: ``benchmark``, ``deterministic``, ``cudnn_enabled`` and ``allow_tf32``, which no ONNX operator has."""


def untraced_shape_computation() -> AbstractContextManager[None]:
    """Exclude torch's shape computation on fake tensors from a trace, inside the block.

    torch computes shapes in Python from sizes of tensors. In a trace a size is a tensor, which such Python code does
    not support. For a convolution the tracer records only the inner operator ``_convolution``, which fake tensors never
    reach: it is called here, and recorded.
    """
    dispatch = FakeTensorMode.dispatch

    def dispatch_untraced(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        """Dispatch an operator of fake tensors outside of the trace; a convolution is traced instead."""
        tracing: Any = torch._C._get_tracing_state()
        if tracing is None:
            return dispatch(mode, *args, **kwargs)
        function, _types, operands, *_ = args
        if function is torch.ops.aten.convolution.default:
            with _enable_tracer():
                # ``_convolution`` takes the operands of ``convolution``.
                return torch._convolution(*operands, *_CONVOLUTION_BACKEND)  # type: ignore[call-overload]
        _set_tracing_state(None)
        try:
            return dispatch(mode, *args, **kwargs)
        finally:
            _set_tracing_state(tracing)

    return attribute_replaced(FakeTensorMode, "dispatch", dispatch_untraced)


def _set_tracing_state(state: object) -> None:
    """Set the tracing state, also inside an operator, where torch excludes the tracer and refuses to set the state."""
    with _enable_tracer():
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]  # its stub misses it


@contextmanager
def _enable_tracer() -> Iterator[None]:
    """Enable the tracer inside an operator, where torch excludes it; for the time of the block."""
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_TRACER)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, is_excluded)


def missing_value_error(error: Exception, model: nn.Module) -> ExportError | None:
    """Convert an error of a forward that read a missing value to an ExportError; `None` for other errors."""
    if not isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return None
    path = module_of_error(error, model)
    place = f" in module {path or '(the root)'}" if path is not None else ""
    return ExportError(
        f"the forward reads the value of a tensor{place} ({error.func}), and the weights are not in memory",
        module=path,
    )


def _refuse_missing_constants(graph: Any) -> None:
    """Refuse a traced graph that holds a constant without values.

    torch records some operators, such as an LSTM cell, only by their inner operators, which fake tensors never reach. A
    forward may also use tensors that were computed from weights before the call.

    Args:
        graph: The graph traced by TorchScript.

    Raises:
        ExportError: the graph holds a constant without values.
    """
    for node in graph.findAllNodes("prim::Constant"):  # also in blocks
        has_tensor = node.hasAttribute("value") and node.kindOf("value") == "t"
        if has_tensor and is_fake(node.t("value")):
            shape = list(node.t("value").shape)
            raise ExportError(
                f"TorchScript recorded no computation of a tensor {shape}, and the weights are not in memory",
            )


_SEGMENT = re.compile(r"m(\d+)(?:_\d+)?")
"""A scope in a node's name; the exporter appends a counter when a module is called again."""


class ModuleScopes:
    """Unique scopes of the modules of a model, and decoding of scopes from node names."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[nn.Module, str] = {}
        self._paths: list[str] = []
        self._lacks_values = any(map(is_fake, (*model.parameters(), *model.buffers())))
        for position, (path, module) in enumerate(model.named_modules()):
            # The class part of a scope name never reaches node names; the attribute part does.
            self._modules[module] = torch._C._jit_onnx_create_full_scope_name("Module", f"m{position}")
            self._paths.append(path)

    @contextmanager
    def patched_exporter(self) -> Iterator[None]:
        """Patch torch's exporter, so that an export inside the block writes these scopes and prints no messages.

        Raises:
            ExportError: the graph holds a constant without values.
        """
        trace_graph = torch.jit._get_trace_graph  # type: ignore[attr-defined]
        infer_shapes = torch._C._jit_pass_onnx_graph_shape_type_inference
        was_inlining = torch._C._jit_get_inline_everything_mode()

        def set_up_scopes(_model: nn.Module, _as_functions: object) -> set[str]:
            torch.jit._trace._trace_module_map = _CountedScopes(self._modules)
            return set()

        def trace_with_scopes(*args: object, **kwargs: object) -> Any:
            graph, *other_results = trace_graph(*args, **kwargs)
            if self._lacks_values:
                _refuse_missing_constants(graph)
            _inline_calls(graph)
            operators.total = sum(1 for _ in graph.nodes())
            return (graph, *other_results)

        def infer_without_weights(graph: torch._C.Graph, _weights: object, opset_version: int) -> None:
            # With the weights, each pass would serialize a copy of all of them; no shape depends on a weight.
            infer_shapes(graph, {}, opset_version)

        operators = _ConvertedOperators(exporter._run_symbolic_function)
        # Scripted functions stay calls, which have a scope, until _inline_calls copies it to their nodes.
        torch._C._jit_set_inline_everything_mode(False)
        try:
            with (
                attribute_replaced(exporter, "_setup_trace_module_map", set_up_scopes),
                attribute_replaced(torch.jit, "_get_trace_graph", trace_with_scopes),
                attribute_replaced(exporter, "_run_symbolic_function", operators),
                attribute_replaced(torch._C, "_jit_pass_onnx_graph_shape_type_inference", infer_without_weights),
                # Equal computations are merged later, where their scopes can be preserved.
                attribute_replaced(torch._C, "_jit_pass_cse", lambda _graph: False),
                # Checks torch's own passes, as often as they run.
                attribute_replaced(torch._C, "_jit_pass_lint", lambda _graph: None),
                _silence_exporter_log(),
                _open_scopes_around_hooks(self._modules),
            ):
                yield
        finally:
            torch._C._jit_set_inline_everything_mode(was_inlining)

    def read(self, node_name: str) -> tuple[str, ...]:
        """Return the paths of the modules a node ran in, outermost first; empty where the exporter recorded no scope.

        Args:
            node_name: Name the exporter gave the node, such as ``m0/m3/MatMul_1``.
        """
        scope, _, _operator = node_name.rpartition("/")
        return self.decode(scope.strip("/").split("/") if scope else ())

    def decode(self, segments: Iterable[str]) -> tuple[str, ...]:
        """Return the module paths for the segments of a scope; unknown segments are skipped."""
        matches = (_SEGMENT.fullmatch(segment) for segment in segments)
        paths = (self._paths[int(match[1])] for match in matches if match)
        # Twice in a row where hooks are around a module: theirs and torch's own.
        return tuple(path for path, _ in groupby(paths))


class _CountedScopes(dict[nn.Module, str]):
    """Counter of the modules whose scope a trace has requested: the first half of the export's progress."""

    def __init__(self, scopes: Mapping[nn.Module, str]) -> None:
        super().__init__(scopes)
        self._begun: set[nn.Module] = set()

    def __getitem__(self, module: nn.Module) -> str:
        """Return the scope of a module; depending on its version, torch calls this method or ``get``."""
        self._count_module(module)
        return super().__getitem__(module)

    def get(self, module: nn.Module, default: Any = None) -> Any:
        """Return the scope of a module that begins."""
        self._count_module(module)
        return super().get(module, default)

    def _count_module(self, module: nn.Module) -> None:
        self._begun.add(module)
        count_progress(len(self._begun), 2 * len(self), f"module {len(self._begun)} of {len(self)} traced")


class _ConvertedOperators:
    """Counts the operators of a trace that are converted, as the second half of an export."""

    def __init__(self, convert: Callable[..., Any]) -> None:
        self.total = 0
        """Number of operators, once traced."""
        self._convert = convert
        self._done = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Convert one."""
        self._done += 1
        if self._done < self.total:  # constants inside operators increase the count
            count_progress(self.total + self._done, 2 * self.total, f"operator {self._done} of {self.total} converted")
        return self._convert(*args, **kwargs)


@contextmanager
def _open_scopes_around_hooks(scopes: Mapping[nn.Module, str]) -> Iterator[None]:
    """Open the scope of a module before its hooks and close it after the hooks; torch opens it for the forward only."""
    entered: list[nn.Module] = []

    def enter(module: nn.Module, _args: object) -> None:
        if (tracing := torch._C._get_tracing_state()) is not None:
            tracing.push_scope(scopes[module])
            entered.append(module)

    def leave(module: nn.Module, _args: object, _outputs: object) -> None:
        # Called after a failure as well, which may have been before the module was entered.
        if entered and entered[-1] is module:
            entered.pop()
            if (tracing := torch._C._get_tracing_state()) is not None:
                tracing.pop_scope()

    with ExitStack() as handles:
        for module in filter(has_hooks, scopes):
            handles.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            handles.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _silence_exporter_log() -> Iterator[None]:
    """Suppress the graphs that the exporter prints on stdout when verbose and on every failure."""
    enabled = torch._C._jit_is_onnx_log_enabled()
    torch._C._jit_set_onnx_log_enabled(False)
    try:
        with attribute_replaced(exporter, "setup_onnx_logging", lambda _verbose: nullcontext()):
            yield
    finally:
        torch._C._jit_set_onnx_log_enabled(enabled)


def _inline_calls(graph: torch._C.Graph) -> None:
    """Inline scripted functions in place, and copy the scope of each call to the nodes that replace it."""
    markers = []
    for node in list(graph.nodes()):
        if node.kind() in ("prim::CallFunction", "prim::CallMethod"):
            marker = graph.create("prim::Constant", 1)  # type: ignore[call-arg]  # the stub misses this overload
            marker.copyMetadata(node)
            marker.insertBefore(node)
            markers.append(marker)
    if not markers:
        return
    names = {marker.output().debugName() for marker in markers}
    torch._C._jit_pass_inline(graph)
    donor = None
    for node in graph.nodes():
        if node.kind() == "prim::Constant" and node.output().debugName() in names:
            donor = node
        elif node.scopeName():
            donor = None
        if donor is not None:
            _adopt_scope(node, donor)
    for marker in markers:
        marker.destroy()


def _adopt_scope(node: Any, donor: object) -> None:
    """Copy the scope of a donor to a node without a scope, and to the nodes inside it."""
    if not node.scopeName():
        node.copyMetadata(donor)
    for block in node.blocks():
        for inner in block.nodes():
            _adopt_scope(inner, donor)


def operator_of_error(error: BaseException, scopes: ModuleScopes) -> tuple[str, str] | None:
    """Return ``(operator, module path)`` of the node the exporter could not convert, or None for other errors.

    Args:
        error: The error raised by the exporter.
        scopes: The scopes of the export.
    """
    failed_operator = None
    traceback = error.__traceback__
    while traceback is not None:
        for value in list(traceback.tb_frame.f_locals.values()):
            if isinstance(value, torch._C.Node):
                names = (segment.rpartition("::")[2] for segment in value.scopeName().split("/"))
                failed_operator = (str(value.kind()), (scopes.decode(names) or ("",))[-1])
        traceback = traceback.tb_next
    return failed_operator
