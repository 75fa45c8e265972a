"""A PyTorch model as one side of a comparison: what its modules return, by forward hooks.

Loads and calls the model as the export does. Hooks keep what is asked for, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from numpy.typing import NDArray

from winml.modelkit.errors import UsageError
from winml.modelkit.export.tensors import to_numpy, to_torch
from winml.modelkit.load.model import load_model
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.verify.reference_run import PreparedPart, prepared_part, run_reference, with_values

__all__ = ["TorchSide", "ValueKind", "opened_torch_side"]

Array = NDArray[Any]
ValueKind = Literal["input", "output"]
"""Whether a module takes or returns a tensor."""


class TorchSide:
    """One PyTorch model, ready to be called."""

    def __init__(self, prepared: PreparedPart, shown: str) -> None:
        """Take a prepared model.

        Args:
            prepared: Its parameters hold values.
            shown: The model, for people.
        """
        self.shown = shown
        self._prepared = prepared

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors it is called with."""
        return tuple(spec.name for spec in self._prepared.part.inputs)

    def outputs(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model, and return what it answers.

        Raises:
            UsageError: it takes an input that there is no value for.
            ExportError: it refuses the values; names the module.
        """
        if missing := [name for name in self.input_names if name not in feeds]:
            raise UsageError(
                f"{self.shown} takes {', '.join(self.input_names)}, and the other side has no input {missing[0]!r}",
                hint="Compare it with a file that was exported from it, or name the input with --map.",
            )
        tensors = {name: to_torch(feeds[name]) for name in self.input_names}
        with torch.inference_mode():
            return dict(run_reference(self._prepared, tensors))

    def values(self, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Run the model, and return what its modules return, by the names of :meth:`value_name`."""
        wanted, kept = set(names), dict[str, Array]()
        if not wanted:
            return kept

        def keep(path: str, call: int, kind: ValueKind, index: int, tensor: torch.Tensor) -> None:
            if (name := self.value_name(path, call, kind, index)) in wanted:
                # What a module returns may be changed in place by the next.
                kept[name] = to_numpy(tensor).copy()

        with self._hooked(keep):
            self.outputs(feeds)
        return kept

    def value_counts(self, feeds: Mapping[str, Array]) -> dict[tuple[str, int, ValueKind], int]:
        """Run the model, and return how many floating-point tensors each call of each module takes and returns.

        Returns:
            Module path, number of the call, from 1, and ``input`` or ``output`` → tensors.
        """
        counts: dict[tuple[str, int, ValueKind], int] = {}

        def count(path: str, call: int, kind: ValueKind, _index: int, _tensor: torch.Tensor) -> None:
            counts[path, call, kind] = counts.get((path, call, kind), 0) + 1

        with self._hooked(count):
            self.outputs(feeds)
        return counts

    @staticmethod
    def value_name(path: str, call: int, kind: ValueKind, index: int) -> str:
        """Return the name of one tensor that a call of a module takes or returns."""
        return f"{path}|{call}|{kind}|{index}"

    @contextmanager
    def _hooked(self, keep: Callable[[str, int, ValueKind, int, torch.Tensor], None]) -> Iterator[None]:
        """Call ``keep`` with every floating-point tensor that any module takes or returns."""
        calls: dict[str, int] = {}

        def keep_all(path: str, kind: ValueKind, values: Any) -> None:
            floats = (tensor for tensor in _tensors_in(values) if tensor.is_floating_point())
            for index, tensor in enumerate(floats):
                keep(path, calls[path], kind, index, tensor)

        def hooks_of(path: str) -> tuple[Any, Any]:
            def before(_module: Any, arguments: Any, keywords: Any) -> None:
                calls[path] = calls.get(path, 0) + 1
                keep_all(path, "input", (arguments, keywords))

            def after(_module: Any, _arguments: Any, output: Any) -> None:
                keep_all(path, "output", output)

            return before, after

        with ExitStack() as hooks:
            for path, module in self._prepared.model.named_modules():
                before, after = hooks_of(path)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
            yield


@contextmanager
def opened_torch_side(request: ModelRequest, has_value: Callable[[str], bool]) -> Iterator[TorchSide]:
    """Load a model with its weights, for the time of the block; without its cache where the other side has none.

    Args:
        request: The model.
        has_value: Says of an input whether there is a value for it.
    """
    part = load_model(request).only_part
    if not all(has_value(spec.name) for spec in part.inputs if spec.cache is not None):
        part = load_model(replace(request, cache=False)).only_part
    with prepared_part(part) as prepared, with_values(prepared) as weighted:
        yield TorchSide(weighted, request.model or "the model")


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returns, in order: of tuples, lists and mappings, and of records of them."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors_in(value)
