"""How is a live module made ready to be traced, and put back as it was?

Exporters take positional tensors and give back a flat tuple; model libraries want keywords and return records. For the
time of an export ``forward`` is replaced by a function of exactly the wanted inputs, which, unlike a wrapper module,
adds no level to the hierarchy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule  # not public; torch.jit.script returns it

from winml.modelkit.errors import ExportError
from winml.modelkit.hierarchy.compiled_modules import without_compilation

__all__ = ["FlatForward", "flatten_outputs", "prepared_for_export"]


class FlatForward:
    """A module's forward as exporters want it: tensors in the order of the inputs → tuple of tensors.

    Attributes:
        output_names: Names of the returned tensors, known after the first call.
    """

    def __init__(
        self, forward: Callable[..., Any], input_names: Sequence[str], options: Mapping[str, Any] | None = None
    ) -> None:
        """Flatten ``forward``.

        Args:
            forward: The bound forward method.
            input_names: Names of the tensors it will be given, in order.
            options: Further keyword arguments of every call, such as ``use_cache=False``.
        """
        self.input_names = tuple(input_names)
        self.output_names: tuple[str, ...] = ()
        self._wanted_names: tuple[str, ...] = ()
        self._forward = forward
        self._options = dict(options or {})
        self._is_by_name = _takes_names(forward, self.input_names)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the module once.

        Raises:
            ExportError: the module returns no tensor.
        """
        if self._is_by_name:
            outputs = self._forward(**dict(zip(self.input_names, tensors, strict=True)), **self._options)
        else:
            outputs = self._forward(*tensors, **self._options)
        flat = flatten_outputs(outputs, taken=self.input_names)
        if not flat:
            raise ExportError(
                f"the model returned no tensor, but {type(outputs).__name__}",
                hint="An ONNX graph needs an output: return a tensor, or a tuple or mapping of tensors.",
            )
        for name, tensor in flat.items():
            if tensor.is_complex():
                raise ExportError(
                    f"the model returns complex numbers ({name}: {str(tensor.dtype).removeprefix('torch.')}), which "
                    "ONNX Runtime does not have",
                    hint="Return real and imaginary parts: torch.view_as_real(output), or its abs() and angle().",
                )
        # Other outputs than those that were renamed are told apart by the names they have.
        self.output_names = self._wanted_names if len(self._wanted_names) == len(flat) else tuple(flat)
        return tuple(flat.values())

    def rename_outputs(self, names: Sequence[str]) -> None:
        """Call the returned tensors by other names, now and in every later call; as many as there are."""
        self._wanted_names = self.output_names = tuple(names)


@contextmanager
def prepared_for_export(
    model: nn.Module, input_names: Sequence[str], forward_options: Mapping[str, Any] | None = None, *, path: str = ""
) -> Iterator[FlatForward]:
    """Replace the forward of ``model`` by its :class:`FlatForward`; in place, undone at the end.

    Evaluation mode is set and gradients are off inside the block, and modules that were compiled stand there as they
    were before. The training flag of every submodule, the forward methods, what was compiled and the gradient mode come
    back as they were, whatever happens in the block.

    With ``path``, the forward of that module inside ``model`` is called alone, through the modules around it, so that
    its scopes are those it has in the whole model.

    Raises:
        ExportError: a module is scripted, which no exporter can look into.
    """
    _refuse_scripted(model)
    training = {module: module.training for module in model.modules()}
    with contextlib.ExitStack() as replaced:
        forward: Callable[..., Any] = model.get_submodule(path).forward
        for outer, inner in reversed(list(pairwise(_modules_on(model, path)))):
            forward = _calling(inner, forward)
            if outer is not model:
                replaced.enter_context(_forward_replaced(outer, forward))
        flat = FlatForward(forward, input_names, forward_options)
        replaced.enter_context(_forward_replaced(model, flat))
        model.eval()
        try:
            with torch.no_grad(), without_compilation(model):
                yield flat
        finally:
            for module, was_training in training.items():
                module.training = was_training


def _modules_on(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules from the root to the one at ``path``; containers that cannot be called are left out."""
    names = path.split(".") if path else []
    modules = [model.get_submodule(".".join(names[:count])) for count in range(len(names) + 1)]
    return [module for module in modules if module is modules[-1] or type(module).forward is not nn.Module.forward]


def _calling(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the signature of ``forward`` that calls a module, hooks included."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return call


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module; in place, undone at the end."""
    own_forward = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own_forward is None:
            del module.__dict__["forward"]
        else:
            module.forward = own_forward


def _refuse_scripted(model: nn.Module) -> None:
    """Refuse a module that holds TorchScript instead of Python.

    Raises:
        ExportError: names the module.
    """
    for path, module in model.named_modules():
        if isinstance(module, RecursiveScriptModule):
            place = f"module {path!r} is" if path else "the model is"
            raise ExportError(
                f"{place} scripted ({module.original_name}, by torch.jit.script or torch.jit.load): torch's exporters "
                "cannot look into it",
                hint="Give it as the Python module it was before torch.jit.script, with the weights in its state_dict.",
                module=path,
            )


def flatten_outputs(outputs: Any, taken: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Name the tensors in what a forward returned.

    Mappings and records give their keys, sequences their positions; nested names are joined by a dot
    (``hidden_states.0``). Whatever is not a tensor, such as None or a cache, is left out.

    Args:
        outputs: What the forward returned.
        taken: Names that are not free, such as those of the inputs. A name that is not gets ``_output`` appended.
    """
    if isinstance(outputs, torch.Tensor):
        outputs = {"output": outputs}
    elif isinstance(outputs, (list, tuple)) and not hasattr(outputs, "_asdict"):
        outputs = {f"output_{position}": value for position, value in enumerate(outputs)}
    named: dict[str, torch.Tensor] = {}
    for name, tensor in _walk(outputs):
        while name in named or name in taken:
            name = f"{name}_output"
        named[name] = tensor
    return named


def _walk(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
        return
    for key, item in _children(value):
        yield from _walk(item, f"{prefix}.{key}" if prefix else str(key))


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _takes_names(forward: Callable[..., Any], names: Sequence[str]) -> bool:
    """Say whether ``forward`` can be called with these names as keywords."""
    parameters = inspect.signature(forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    rest = [name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.VAR_POSITIONAL]
    if rest and any(re.fullmatch(rf"{rest[0]}_\d+", name) for name in names):
        return False  # called so for their place in ``*rest``; the function behind it knows other names
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    positional_only = inspect.Parameter.POSITIONAL_ONLY
    return all(name in parameters and parameters[name].kind is not positional_only for name in names)
