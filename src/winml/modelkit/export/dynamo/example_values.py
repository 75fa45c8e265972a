"""Values of the example inputs for forwards that branch on values, during one dynamo export.

torch's exporter computes shapes and no values: a number read from a tensor by Python (``item``, ``tolist``, ``if``) is
unknown, and torch refuses code that depends on the number. Inside the block torch also computes the values of the
example inputs. Such a number is the number of the examples, as in a TorchScript trace; a size that depends on values,
such as the size of ``nonzero``, stays unknown until code depends on it. The comparison with PyTorch on other values
checks whether the graph holds for other inputs.

NOTE: values beside fake tensors are private in torch (docs/decisions/0004-private-seams.md).
``tests/unit/export/dynamo/test_example_values.py`` fails when this API changes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._functorch import config
from torch._subclasses import meta_utils
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch

from winml.modelkit.export.value_loops import ValueLoops, call_replaced
from winml.modelkit.models.source_lines import asserts_only_at, is_of_user
from winml.modelkit.onnx.assumptions import Assumption, assume_branch
from winml.modelkit.ort.shared_settings import attribute_replaced

_TAKES_A_NUMBER = torch.ops.aten._local_scalar_dense.default
_INSTALLED = "site-packages"
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""Folders of torch and of this package, whose frames are skipped when looking for the line that reads a number."""
_SIZE_FILES = tuple(str(Path(torch.__file__).parent / name) for name in ("__init__.py", "fx/experimental"))
"""Files of torch that compute with sizes."""
_ITERATION = torch.Tensor.__iter__.__code__
"""Takes the number of rows by an operator of torch."""


@contextmanager
def decided_by_examples(assumed: dict[tuple[str, int], Assumption]) -> Iterator[None]:
    """Also compute the values of the example inputs inside the block; patches torch.

    Args:
        assumed: Line of the user's Python → assumption that the line reads a value; filled during the block.
    """
    original = op_implementations_dict[_TAKES_A_NUMBER]

    def read_example_number(mode: FakeTensorMode, operator: Callable[..., Any], values: FakeTensor) -> Any:
        """Return the example's number, and record the line of the user's Python that reads it."""
        if values.real_tensor is None:
            return original(mode, operator, values)
        source_line = _find_user_line(inspect.currentframe())
        if source_line is not None:
            assumed.setdefault(source_line, assume_branch(source_line))
        return values.real_tensor.item()

    def note_size(env: ShapeEnv, expression: object, value: object) -> None:
        log_size(env, expression, value)
        source_line = _find_size_reading_line(inspect.currentframe())
        if source_line is not None:
            assumed.setdefault(source_line, assume_branch(source_line, str(value)))

    log_size = ShapeEnv._log_real_tensor_propagation
    op_implementations_dict[_TAKES_A_NUMBER] = read_example_number
    try:
        with (
            config.patch(fake_tensor_propagate_real_tensors=True),
            # oneDNN's recurrent layers return fewer outputs than their shape rule states.
            torch.backends.mkldnn.flags(enabled=False),
            attribute_replaced(torch, "tensor", _make_tensor_of_numbers),
            attribute_replaced(FakeTensorMode, "_maybe_infer_fake_kernel_from_pytree_out", _apply_fake_strides),
            attribute_replaced(meta_utils, "_safe_copy", _copy_values),
            attribute_replaced(ShapeEnv, "_log_real_tensor_propagation", note_size),
        ):
            yield
    finally:
        op_implementations_dict[_TAKES_A_NUMBER] = original


_tensor = torch.tensor


def _make_tensor_of_numbers(data: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Make a tensor of numbers, some of which are tensors; torch would read a storage that such a tensor lacks."""

    def read_numbers(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [read_numbers(element) for element in value]
        return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value

    return _tensor(read_numbers(data) if isinstance(data, (list, tuple)) else data, *args, **options)


def _copy_values(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """Copy the values beside a fake tensor; torch leaves the values of parameters uninitialized."""
    if source is not None and type(source) in (torch.Tensor, torch.nn.Parameter):
        target.copy_(source.detach())


def _apply_fake_strides(_mode: FakeTensorMode, _operator: object, _inputs: object, _values: object, *out: Any) -> Any:
    """Apply the strides of fake tensors to the values beside them, in place; return the fake tensors.

    torch refuses a kernel whose result has another layout or integer type than the shape rule states.
    """
    fakes, values = (result if isinstance(result, (list, tuple)) else (result,) for result in out)
    for fake, value in zip(fakes, values, strict=True):
        if isinstance(fake, FakeTensor) and isinstance(value, torch.Tensor):
            strides = fake.stride()
            is_known = all(isinstance(size, int) for size in (*fake.shape, *strides))
            if is_known and strides != value.stride():
                _lay_out_like(value, fake)
    return out[0]


def _lay_out_like(value: torch.Tensor, fake: FakeTensor) -> None:
    """Lay out a tensor like a fake tensor, in place: with equal strides, in a storage of equal size."""
    with no_dispatch():
        count = fake.untyped_storage().nbytes() // fake.element_size()
        elements = torch.zeros(count, dtype=value.dtype)
        elements.as_strided(value.shape, fake.stride(), fake.storage_offset()).copy_(value)
        value.set_(elements.untyped_storage(), fake.storage_offset(), value.shape, fake.stride())


def _find_user_line(frame: FrameType | None) -> tuple[str, int] | None:
    """Return file name and line of the user's Python that reads a value; None for libraries and assertions.

    Libraries mostly read shapes, and the user cannot change them.
    """
    while frame is not None and frame.f_code.co_filename.startswith((*_PACKAGES, "<")):
        frame = frame.f_back
    if frame is None:
        return None
    file = frame.f_code.co_filename
    if _INSTALLED in Path(file).parts or asserts_only_at(frame):
        return None
    return Path(file).name, frame.f_lineno


def _find_size_reading_line(frame: FrameType | None) -> tuple[str, int] | None:
    """Return file name and line of the user's Python that reads a size as a number; `None` if torch itself reads it."""
    is_read_by_user, passing_on = True, (__file__, *_SIZE_FILES)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        if frame.f_code is _ITERATION:
            is_read_by_user, passing_on = True, (*passing_on, _PACKAGES[1])
        else:
            is_read_by_user &= frame.f_code.co_filename.startswith(passing_on)
        frame = frame.f_back
    if frame is None or not is_read_by_user or not is_of_user(frame.f_code.co_filename) or asserts_only_at(frame):
        return None
    return Path(frame.f_code.co_filename).name, frame.f_lineno


@dataclass
class ExportedLoops(ValueLoops):
    """Loops of one export: over all positions whose number is unknown."""

    @contextmanager
    def in_trace(self) -> Iterator[None]:
        """Trace an iteration for every position inside the block, including positions in names; patches torch."""
        with super().in_trace(), call_replaced(torch.Tensor, "__format__", _format_known_number):
            yield

    def count_positions(self, values: torch.Tensor) -> int | None:
        """Return the number of positions; None for a dynamic size, or outside an export."""
        size: Any = values.shape[0]
        return size if isinstance(size, int) and torch.compiler.is_exporting() else None

    def make_position(self, number: int, device: torch.device) -> torch.Tensor:
        """Return the position as a constant tensor whose value Python knows."""
        return torch.tensor([number], device=device)

    def size_if_filled(self, values: torch.Tensor) -> Any:
        """Return the number of elements, or at least 1 for a dynamic number."""
        count: Any = math.prod(values.shape)
        return torch.sym_max(1, count) if isinstance(count, torch.SymInt) else count


def _format_known_number(original: Callable[..., str], tensor: torch.Tensor, format_spec: str) -> str:
    """Return a number that is a constant of the graph as PyTorch writes it, such as in ``expert_3`` (for: Switch)."""
    constant = getattr(tensor, "constant", None)
    if isinstance(constant, torch.Tensor) and constant.dim() == 0:
        return format(constant.item(), format_spec)
    return original(tensor, format_spec)
