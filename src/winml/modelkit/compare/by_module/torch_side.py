"""A PyTorch model as one side of a comparison: outputs of its modules, by forward hooks.

Loads and calls the model as the export does. Hooks keep what is asked for, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.by_module.value_matching import ValueCounts, value_name
from winml.modelkit.compare.verification.reference_run import PreparedPart, prepared_part, run_reference, with_values
from winml.modelkit.errors import UsageError
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.tags.address import ModuleIdentity
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree


@dataclass(frozen=True)
class TorchCalls:
    """What one run of a model showed."""

    counts: ValueCounts
    identities: tuple[ModuleIdentity, ...]
    """Every call of a hierarchy module, in the order they return."""
    answer: Mapping[str, Array]


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
    def input_dtypes(self) -> Mapping[str, str]:
        """Name of each tensor it is called with → its type."""
        return {spec.name: spec.dtype for spec in self.part.inputs}

    @property
    def is_rounded(self) -> bool:
        """Whether it computes with fewer bits than float32."""
        return any(parameter.dtype in _HALVES for parameter in self._prepared.part.module.parameters())

    @property
    def module_classes(self) -> Mapping[str, str]:
        """Path of every module → its class."""
        return {path: type(module).__name__ for path, module in self._prepared.model.named_modules()}

    @property
    def part(self) -> ModelPart:
        """What is called."""
        return self._prepared.part

    def value_bytes(self, names: Sequence[str], feeds: Arrays) -> Sequence[int | None]:  # noqa: ARG002 - others look
        """Return nothing: how large values are shows in a run."""
        return [None] * len(names)

    def outputs(self, feeds: Arrays) -> dict[str, Array]:
        """Run the model, and return what it answers.

        Raises:
            UsageError: it takes an input that there is no value for.
            ExportError: it refuses the values; names the module.
        """
        names = list(self.input_dtypes)
        if missing := [name for name in names if name not in feeds]:
            raise UsageError(
                f"{self.shown} takes {', '.join(names)}, but the second model has no input {missing[0]!r}",
                hint="Compare it with a file that was exported from it, or map the input with --map.",
            )
        tensors = {name: to_torch(feeds[name]) for name in names}
        # Parameters that are read when they are computed with have no views under inference_mode.
        with torch.no_grad():
            return dict(run_reference(self._prepared, tensors))

    def values(self, feeds: Arrays, names: Sequence[str]) -> dict[str, Array]:
        """Run the model, and return what its modules take and return, by the names of ``value_name``."""
        requested, retained = set(names), dict[str, Array]()
        if not requested:
            return retained

        def keep(name: tuple[str, int, str], index: int, tensor: torch.Tensor) -> None:
            if (text := value_name(*name, index)) in requested:
                # What a module returns may be changed in place by the next.
                retained[text] = to_numpy(tensor).copy()

        with self._hooked(keep):
            self.outputs(feeds)
        return retained

    def calls(self, feeds: Arrays) -> TorchCalls:
        """Run the model, and return which modules run, and how many floating-point tensors each takes and returns."""
        counts: dict[tuple[str, int, str], int] = {}
        ended: list[tuple[str, int]] = []

        def count(name: tuple[str, int, str], _index: int, _tensor: torch.Tensor) -> None:
            counts[name] = counts.get(name, 0) + 1

        with record_calls(self._prepared.model) as trace, self._hooked(count, ended):
            output = self.outputs(feeds)
        nodes = {node.path: node for node in build_tree(trace).nodes}
        identities = [
            ModuleIdentity(path, nodes[path].tag, nodes[path].class_name, call, nodes[path].calls)
            for path, call in ended
            if path in nodes
        ]
        return TorchCalls(counts, tuple(identities), output)

    @contextmanager
    def _hooked(
        self,
        keep: Callable[[tuple[str, int, str], int, torch.Tensor], None],
        ended: list[tuple[str, int]] | None = None,
    ) -> Iterator[None]:
        """Call ``keep`` with every floating-point tensor that any module takes or returns; list ended calls."""
        calls: dict[str, int] = {}

        def keep_all(path: str, kind: str, values: object) -> None:
            floats = (tensor for tensor in _tensors_in(values) if tensor.is_floating_point())
            for index, tensor in enumerate(floats):
                keep((path, calls[path], kind), index, tensor)

        def hooks_of(path: str) -> tuple[Any, Any]:
            def before(_module: object, arguments: object, keywords: object) -> None:
                calls[path] = calls.get(path, 0) + 1
                keep_all(path, "input", (arguments, keywords))

            def after(_module: object, _arguments: object, output: object) -> None:
                keep_all(path, "output", output)
                if ended is not None:
                    ended.append((path, calls[path]))

            return before, after

        with ExitStack() as hooks:
            for path, module in self._prepared.model.named_modules():
                before, after = hooks_of(path)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
            yield


@contextmanager
def opened_torch_side(part: ModelPart, shown: str) -> Iterator[TorchSide]:
    """Prepare a part of a model and give it its weights, for the time of the block."""
    with prepared_part(part) as prepared, with_values(prepared) as weighted:
        yield TorchSide(weighted, shown)


_HALVES = (torch.float16, torch.bfloat16)


def _tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returns, in order: of tuples, lists and mappings, and of records of them."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors_in(value)
