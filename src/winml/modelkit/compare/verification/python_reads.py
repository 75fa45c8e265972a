"""Detection of the inputs that a forward reads in Python: the sources of values taken out of tensors."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.verification.reference_run import PreparedPart, run_reference
from winml.modelkit.errors import ExportError
from winml.modelkit.models.source_lines import asserts_only_at, is_caught, is_of_user
from winml.modelkit.onnx.assumptions import SourceLine
from winml.modelkit.ort.shared_settings import attribute_replaced

_CHECK = "aten::_linalg_check_errors"
"""Operator that raises depending on values, such as for a matrix that is not positive definite."""
_INDEX = "aten::index.Tensor"
"""Its output size depends on values only if an index contains flags, whatever its tags state."""
_UNSEEN = frozenset({"aten::equal", "aten::allclose"})
"""Operators that decide unnoticed by a trace; for all others torch warns during the trace."""
_TAKING_ALL = (
    *("__array__", "__dlpack__", "__reduce_ex__", "__repr__", "apply_", "data_ptr", "map_", "map2_", "numpy"),
    *("storage", "tolist", "untyped_storage"),
)
"""Methods that take all values without torch's dispatcher; a trace notices ``numpy`` and ``tolist`` only."""
_IS_NONZERO = "is_nonzero"
"""Function and method that decide like ``bool()``, by the same operator, unnoticed by a trace."""
_WATCHED = (
    *((torch.Tensor, name) for name in (*_TAKING_ALL, _IS_NONZERO)),
    *((torch, _IS_NONZERO), (dlpack, "to_dlpack")),
)
_storage_of = torch.Tensor.untyped_storage
"""The original method, which is replaced while reads are recorded."""
_OURS = Path(__file__).parents[2]
_OPERATORS = torch.Tensor.__contains__.__code__.co_filename
"""File of torch with the operators of tensors; the reading frame is one level up."""
_WRAPPERS = tuple(str(Path(torch.__file__).parent / name) for name in ("_compile.py", "_dynamo/eval_frame.py"))
"""Files of torch whose frames lie between an operator and a dispatch mode."""
_COPYING = (copy.__file__, pickle.__file__, torch.serialization.__file__)
"""Files whose functions copy tensors by their methods."""


@dataclass(frozen=True)
class ReadLine:
    """A source line of the user that reads a value."""

    inputs: frozenset[str]
    """Inputs that the value comes from; empty for values of weights and constants."""
    value: str
    """The first value read, in words."""
    is_unseen: bool
    """True if torch does not warn when it traces the line."""
    takes_all: bool = False
    """True if the line takes all values out of a tensor."""


@dataclass(frozen=True)
class ValueReads:
    """Values that Python reads in one run from the inputs or from results computed from them."""

    inputs: frozenset[str] = frozenset()
    """Inputs with a value that is read or determines a shape."""
    deciding: frozenset[str] = frozenset()
    """Inputs with a value that is read."""
    lines: Mapping[SourceLine, ReadLine] = field(default_factory=dict)
    """Source lines of the user that read a value."""
    has_run: bool = False
    """True if PyTorch ran, so that the lines are complete."""


@contextmanager
def recorded_reads(inputs: Mapping[str, torch.Tensor]) -> Iterator[Callable[[], ValueReads]]:
    """Record the values that Python reads in the block; yield a function that returns them afterwards.

    Args:
        inputs: Inputs of the forward that runs in the block; reads of copies are recorded too.
    """
    mode = _ReadMode(inputs)
    with mode, mode.watching_methods():
        yield lambda: ValueReads(frozenset(mode.read), frozenset(mode.deciding), mode.lines, has_run=True)


def run_watched(prepared: PreparedPart, inputs: Mapping[str, torch.Tensor]) -> tuple[Arrays, ValueReads]:
    """Run the part; return its outputs and the values that Python reads, empty if it fails while reads are recorded.

    Args:
        prepared: The part, with weights.
        inputs: Inputs to run it with, by name.

    Raises:
        ExportError: the module refuses the inputs.
    """
    try:
        with recorded_reads(inputs) as reads:
            outputs = run_reference(prepared, inputs)
    except ExportError:
        # Higher-order operators, such as torch.cond, fail while reads are recorded.
        return run_reference(prepared, inputs), ValueReads()
    return outputs, reads()


class _ReadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the inputs that each tensor is computed from.

    Tensors that share memory share their inputs: a write through a view changes the base tensor.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[str] = set()
        self.deciding: set[str] = set()
        self.lines: dict[SourceLine, ReadLine] = {}
        self._thread = threading.current_thread()
        self._of_storages: dict[StorageWeakRef, frozenset[str]] = {}
        self._of_tensors: MutableMapping[torch.Tensor, frozenset[str]] = WeakIdKeyDictionary()
        """Inputs, which may share memory, and tensors without storage, such as sparse tensors."""
        for name, value in inputs.items():
            self._of_tensors[value] = frozenset({name})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevent torch from importing ``torch._dynamo`` for this mode: it takes seconds, and nothing is compiled
        here.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and record the input sources of its results and of tensors that it writes into."""
        kwargs = kwargs or {}
        sources = self._find_sources((args, kwargs))
        name = func.name()
        is_check, is_read = name == _CHECK, _reads_values(func)
        frame, is_operator = _calling_frame(inspect.currentframe()) if is_check or is_read else (None, False)
        if is_check and is_caught(frame):
            self._add_read(frame, sources, is_unseen=True)
        result = func(*args, **kwargs)
        if is_read:
            is_unseen = name in _UNSEEN or is_operator or threading.current_thread() is not self._thread
            self._add_read(frame, sources, str(result), is_unseen=is_unseen)
        elif torch.Tag.dynamic_output_shape in func.tags:
            # A graph has these operators too.
            self.read |= self._find_sources(_flag_indices(args[1])) if name == _INDEX else sources
        targets = [
            kwargs[argument] if argument in kwargs else args[position]
            for position, argument in _written_arguments(func)
            if argument in kwargs or position < len(args)
        ]
        self._add_sources((result, targets), sources)
        return result

    def _find_sources(self, values: object) -> frozenset[str]:
        """Inputs that the nested tensors come from."""
        sources = frozenset[str]()
        for value in _find_tensors(values):
            sources |= self._of_tensors.get(value, frozenset())
            if (storage := _weak_storage(value)) is not None:
                sources |= self._of_storages.get(storage, frozenset())
        return sources

    def _add_sources(self, values: object, sources: frozenset[str]) -> None:
        """Record the inputs that the nested tensors come from."""
        for value in _find_tensors(values) if sources else ():
            storage = _weak_storage(value)
            if storage is None:
                self._of_tensors[value] = sources
            else:
                self._of_storages[storage] = self._of_storages.get(storage, frozenset()) | sources

    def _add_read(
        self,
        frame: FrameType | None,
        sources: frozenset[str],
        value: str = "",
        *,
        is_unseen: bool,
        takes_all: bool = False,
    ) -> None:
        """Record that a line of the user's Python reads a value; assertions and this package are ignored.

        Args:
            frame: Frame of the line, if known.
            sources: Inputs that the value depends on.
            value: The value as text, if known.
            is_unseen: True if torch does not warn when it traces the line.
            takes_all: True if all values of a tensor are read.
        """
        file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        if Path(file).is_relative_to(_OURS):
            return
        self.read |= sources
        # Assertions decide nothing in the graph.
        if frame is not None and asserts_only_at(frame):
            return
        self.deciding |= sources
        if is_of_user(file):
            place = (Path(file).name, line)
            prior = self.lines.get(place, ReadLine(frozenset(), "", is_unseen=False))
            self.lines[place] = ReadLine(
                prior.inputs | sources, prior.value or value, prior.is_unseen or is_unseen, prior.takes_all or takes_all
            )

    @contextmanager
    def watching_methods(self) -> Iterator[None]:
        """Record calls of the methods above, and reads of other threads, until the block ends; patches torch and
        Python.
        """
        run = threading.Thread.run

        def run_watched(thread: threading.Thread) -> None:
            with self:
                run(thread)

        with ExitStack() as stack:
            for owner, name in _WATCHED:
                watched = self._wrap_method(getattr(owner, name), takes_all=name != _IS_NONZERO)
                stack.enter_context(attribute_replaced(owner, name, watched))
            stack.enter_context(attribute_replaced(threading.Thread, "run", run_watched))
            yield

    def _wrap_method(self, original: Callable[..., Any], *, takes_all: bool) -> Callable[..., Any]:
        """Wrap a method of tensors, so that calls from the user's Python are recorded."""

        @wraps(original)
        def call(values: torch.Tensor, *args: Any, **options: Any) -> Any:
            frame, _ = _calling_frame(inspect.currentframe(), further=_COPYING)
            sources = self._find_sources((values, args))
            if sources and frame is not None and is_of_user(frame.f_code.co_filename):
                self._add_read(frame, sources, is_unseen=True, takes_all=takes_all)
            return original(values, *args, **options)

        return call


def _reads_values(operator: Any) -> bool:
    """Return True if an operator passes values to Python."""
    return torch.Tag.data_dependent_output in operator.tags or operator.name() == f"aten::{_IS_NONZERO}"


@cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operator writes into."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _find_tensors(values: object) -> Iterator[torch.Tensor]:
    return (value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor))


def _flag_indices(indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the boolean indices, whose values determine the output size."""
    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _weak_storage(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Identity of the memory of a tensor, never reused by later memory; `None` for a tensor without storage."""
    try:
        return StorageWeakRef(_storage_of(tensor))  # type: ignore[no-untyped-call]
    except NotImplementedError:
        return None


def _calling_frame(frame: FrameType | None, further: Iterable[str] = ()) -> tuple[FrameType | None, bool]:
    """Find the frame that called torch; also return True for a Python operator (``9 in ids``).

    Args:
        frame: The first frame.
        further: Files to skip in addition to those of torch's operators.
    """
    is_operator = False
    while frame is not None and frame.f_code.co_filename in (__file__, _OPERATORS, *_WRAPPERS, *further):
        is_operator |= frame.f_code.co_filename == _OPERATORS
        frame = frame.f_back
    return frame, is_operator
