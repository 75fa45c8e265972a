"""A PyTorch model as one side of a comparison: outputs of its modules, recorded by forward hooks.

Loads and calls the model like the export. Hooks store requested values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.by_module.boundaries import CallKey, ModuleBoundary
from winml.modelkit.compare.verification.reference_run import PreparedPart, prepared_part, run_reference, with_values
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.tags.address import ModuleIdentity
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree


class TorchSide:
    """One PyTorch model, ready to run."""

    def __init__(self, prepared: PreparedPart, shown: str) -> None:
        """Store a prepared model.

        Args:
            prepared: The part; its parameters hold values.
            shown: Name of the model in messages.
        """
        self.shown = shown
        self.part = prepared.part
        self.inputs = tuple(prepared.part.inputs)
        self.declared_names = [spec.name for spec in self.inputs]
        self.input_shapes = {spec.name: spec.shape for spec in self.inputs}
        cache = prepared.part.cache
        self.states = {} if cache is None else {state.input: state.output for state in cache.states}
        self._prepared = prepared

    @property
    def is_rounded(self) -> bool:
        """True if it computes with fewer bits than float32."""
        return any(parameter.dtype in _HALVES for parameter in self._prepared.part.module.parameters())

    @property
    def module_classes(self) -> Mapping[str, str]:
        """Path of every module → class."""
        return {path: type(module).__name__ for path, module in self._prepared.model.named_modules()}

    def value_bytes(self, names: Sequence[str], feeds: Arrays) -> Sequence[int | None]:  # noqa: ARG002 - others look
        """Return ``None`` for every name: sizes are unknown before a run."""
        return [None] * len(names)

    def outputs(self, feeds: Arrays) -> dict[str, Array]:
        """Run the model, and return its outputs.

        Raises:
            UsageError: an input has no value.
            ExportError: the model refuses the values; names the module.
        """
        names = self.declared_names
        if missing := [name for name in names if name not in feeds]:
            raise UsageError(
                f"{self.shown} takes {', '.join(names)}, but the second model has no input {missing[0]!r}",
                hint=f"Compare it with a file that was exported from it, or map the input with {opt.map}.",
            )
        tensors = {name: to_torch(feeds[name]) for name in names}
        # Streamed parameters have no views under inference_mode.
        with torch.no_grad():
            return dict(run_reference(self._prepared, tensors))

    def values(self, feeds: Arrays, names: Sequence[str]) -> dict[str, Array]:
        """Run the model, and return inputs and outputs of its modules, by the names of :meth:`calls`."""
        requested, recorded = set(names), dict[str, Array]()
        if not requested:
            return recorded

        def keep(key: CallKey, kind: str, tensors: Sequence[torch.Tensor]) -> None:
            for name, tensor in zip(_value_names(key, kind, len(tensors)), tensors, strict=True):
                if name in requested:
                    # The next module may change an output in place.
                    recorded[name] = to_numpy(tensor).copy()

        with self._hook_modules(keep):
            self.outputs(feeds)
        return recorded

    def calls(self, feeds: Arrays) -> dict[CallKey, ModuleBoundary]:
        """Run the model: (module path, number of the call) → its tensors, in the order in which calls end.

        The tag of a module outside the hierarchy is empty.
        """
        names: dict[tuple[CallKey, str], tuple[str, ...]] = {}

        def note(key: CallKey, kind: str, tensors: Sequence[torch.Tensor]) -> None:
            names[key, kind] = _value_names(key, kind, len(tensors))

        with record_calls(self._prepared.model) as trace, self._hook_modules(note):
            self.outputs(feeds)
        nodes = {node.path: node for node in build_tree(trace).nodes}
        boundaries = {}
        for (path, call), kind in names:
            if kind == "output":
                node = nodes.get(path)
                identity = ModuleIdentity(path, "", "", call)
                if node is not None:
                    identity = ModuleIdentity(path, node.tag, node.class_name, call, node.calls)
                received, returned = (names[(path, call), side] for side in ("input", "output"))
                boundaries[path, call] = ModuleBoundary(identity, received, returned)
        return boundaries

    @contextmanager
    def _hook_modules(self, keep: Callable[[CallKey, str, Sequence[torch.Tensor]], None]) -> Iterator[None]:
        """Call ``keep`` with the floating-point inputs (``input``) and outputs (``output``) of each module call."""
        calls: dict[str, int] = {}

        def keep_floats(path: str, kind: str, values: object) -> None:
            keep((path, calls[path]), kind, [tensor for tensor in _tensors_in(values) if tensor.is_floating_point()])

        def hooks_of(path: str) -> tuple[Any, Any]:
            def before(_module: object, arguments: object, keywords: object) -> None:
                calls[path] = calls.get(path, 0) + 1
                keep_floats(path, "input", (arguments, keywords))

            def after(_module: object, _arguments: object, output: object) -> None:
                keep_floats(path, "output", output)

            return before, after

        with ExitStack() as hooks:
            for path, module in self._prepared.model.named_modules():
                before, after = hooks_of(path)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
            yield


def _value_names(key: CallKey, kind: str, count: int) -> tuple[str, ...]:
    """Return the names of the tensors of one call: ``path|call|kind|index``."""
    path, call = key
    return tuple(f"{path}|{call}|{kind}|{index}" for index in range(count))


@contextmanager
def opened_torch_side(part: ModelPart, shown: str) -> Iterator[TorchSide]:
    """Prepare a part of a model with its weights until the block ends."""
    with prepared_part(part) as prepared, with_values(prepared) as weighted:
        yield TorchSide(weighted, shown)


_HALVES = (torch.float16, torch.bfloat16)


def _tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module output, in order, from nested tuples, lists and mappings."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors_in(value)
