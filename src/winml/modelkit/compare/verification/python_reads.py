"""Finds which inputs a forward reads in Python: those that a value taken out of a tensor was computed from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from winml.modelkit.compare.verification.reference_run import PreparedPart, run_reference
from winml.modelkit.errors import ExportError
from winml.modelkit.models.source_lines import asserts_only
from winml.modelkit.onnx.assumptions import Place
from winml.modelkit.ort.shared_settings import attribute_replaced

_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose", "aten::nonzero"})
"""Operators that hand values to Python, or make shapes of them."""
_SHAPES_OF_VALUES = "aten::nonzero"
"""The one among them that a graph has, too."""
_UNSEEN = frozenset({"aten::equal", "aten::allclose"})
"""Those that decide without a trace knowing; of all others torch warns where it traces them."""
_TAKING_ALL = ("__array__", "__dlpack__", "__repr__", "numpy", "storage", "tolist", "untyped_storage")
"""Methods that take all values past torch's dispatcher; a trace knows of ``numpy`` and ``tolist`` alone."""
_IS_NONZERO = "is_nonzero"
"""A function and a method that decide as ``bool()`` does, by the same operator, without a trace knowing."""
_OURS = Path(__file__).parents[2]
_OPERATORS = torch.Tensor.__contains__.__code__.co_filename
"""The file of torch that has the operators of its tensors; what it reads is asked for one line up."""
_WRAPPERS = tuple(str(Path(torch.__file__).parent / name) for name in ("_compile.py", "_dynamo/eval_frame.py"))
"""Files of torch whose frames stand between an operator and a dispatch mode."""


@dataclass(frozen=True)
class ReadLine:
    """A line of the user's Python that reads a value."""

    inputs: frozenset[str]
    """Inputs from which the value comes; none where it is one of weights and constants."""
    value: str
    """What was read first, in words."""
    is_unseen: bool
    """Whether torch does not warn of it where it traces the line."""
    takes_all: bool = False
    """Whether the line takes all values out of a tensor."""


@dataclass(frozen=True)
class ValueReads:
    """What Python reads of the inputs in one run, or of what was computed from them."""

    inputs: frozenset[str] = frozenset()
    """Inputs of which a value is read, or a shape is made of their values."""
    deciding: frozenset[str] = frozenset()
    """Those of which a value is read."""
    lines: Mapping[Place, ReadLine] = field(default_factory=dict)
    """Lines of the user's Python that read a value."""
    has_run: bool = False
    """Whether PyTorch ran, so that no other line reads one."""


@contextmanager
def recorded_reads(inputs: Mapping[str, torch.Tensor]) -> Iterator[Callable[[], ValueReads]]:
    """Yield what returns what Python read of inputs in the block, once the block is over.

    Args:
        inputs: Inputs of the forward that is run in the block; copies of them count as well.
    """
    mode = _ReadMode(inputs)
    with mode, mode.watching_methods():
        yield lambda: ValueReads(frozenset(mode.read), frozenset(mode.deciding), mode.lines, has_run=True)


def read_inputs(prepared: PreparedPart, inputs: Mapping[str, torch.Tensor]) -> ValueReads:
    """Return what Python reads of the inputs; nothing where PyTorch refuses them.

    Args:
        prepared: The part, with values.
        inputs: Inputs to run it with, by name.
    """
    try:
        with recorded_reads(inputs) as reads:
            run_reference(prepared, inputs)
    except ExportError:
        return ValueReads()
    return reads()


class _ReadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is computed from each input."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[str] = set()
        self.deciding: set[str] = set()
        self.lines: dict[Place, ReadLine] = {}
        self._sources: MutableMapping[torch.Tensor, frozenset[str]] = WeakIdKeyDictionary()
        for name, value in inputs.items():
            self._sources[value] = frozenset({name})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch not import ``torch._dynamo`` to run this mode: it takes seconds, and nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and note from which inputs its results come."""
        result = func(*args, **(kwargs or {}))
        passed = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        sources = frozenset[str]().union(*(self._sources.get(value, frozenset()) for value in passed))
        if func.name() in _READS:
            self.read |= sources
            file, line, is_operator = _calling_line(inspect.currentframe())
            # Asserting something decides nothing in the graph.
            if func.name() != _SHAPES_OF_VALUES and not asserts_only(file, line):
                self.deciding |= sources
                if "site-packages" not in Path(file).parts:
                    is_unseen = func.name() in _UNSEEN or is_operator
                    self._note((Path(file).name, line), sources, str(result), is_unseen=is_unseen)
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._sources[value] = sources
        return result

    def _note(
        self, place: Place, sources: frozenset[str], value: str, *, is_unseen: bool, takes_all: bool = False
    ) -> None:
        known = self.lines.get(place, ReadLine(frozenset(), "", is_unseen=False))
        self.lines[place] = ReadLine(
            known.inputs | sources, known.value or value, known.is_unseen or is_unseen, known.takes_all or takes_all
        )

    @contextmanager
    def watching_methods(self) -> Iterator[None]:
        """Note calls of the methods above in the user's Python inside the block; patches torch."""
        with ExitStack() as stack:
            for owner, name in (*((torch.Tensor, name) for name in (*_TAKING_ALL, _IS_NONZERO)), (torch, _IS_NONZERO)):
                watched = self._watched(getattr(owner, name), takes_all=name != _IS_NONZERO)
                stack.enter_context(attribute_replaced(owner, name, watched))
            yield

    def _watched(self, original: Callable[..., Any], *, takes_all: bool) -> Callable[..., Any]:
        @wraps(original)
        def call(values: torch.Tensor, *args: Any, **options: Any) -> Any:
            file, line, _ = _calling_line(inspect.currentframe())
            sources = self._sources.get(values, frozenset())
            is_of_user = "site-packages" not in Path(file).parts and not Path(file).is_relative_to(_OURS)
            if sources and is_of_user and not asserts_only(file, line):
                self.read |= sources
                self.deciding |= sources
                self._note((Path(file).name, line), sources, "", is_unseen=True, takes_all=takes_all)
            return original(values, *args, **options)

        return call


def _calling_line(frame: FrameType | None) -> tuple[str, int, bool]:
    """Return file and line that called torch, and whether by an operator of Python's (``9 in ids``)."""
    is_operator = False
    while frame is not None and frame.f_code.co_filename in (__file__, _OPERATORS, *_WRAPPERS):
        is_operator |= frame.f_code.co_filename == _OPERATORS
        frame = frame.f_back
    return ("", 0, False) if frame is None else (frame.f_code.co_filename, frame.f_lineno, is_operator)
