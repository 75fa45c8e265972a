"""Preparation of a live module for tracing, and its restoration.

Exporters pass positional tensors and expect a flat tuple; model libraries take keywords and return records. During an
export, ``forward`` is replaced by a function of exactly the requested inputs. Unlike a wrapper module, the function
adds no level to the hierarchy. Forward hooks run in their scope: hooks of the root around its real forward.

NOTE: reads the dictionaries in which torch keeps the hooks of a module (docs/decisions/0004-private-seams.md).
``tests/integration/test_forward_hooks.py`` fails when one moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule  # not public; torch.jit.script returns it

from winml.modelkit.errors import ExportError
from winml.modelkit.models.inputs.nested_arguments import NestedArguments
from winml.modelkit.ort.shared_settings import attribute_replaced, attributes_replaced
from winml.modelkit.tags.torch_modules import suspend_compilation


class FlatForward:
    """A module's forward with the signature that exporters need: tensors in the order of the inputs → tuple of tensors.

    Attributes:
        output_names: Names of the returned tensors, known after the first call.
        unflattened: The module's own forward.
    """

    def __init__(
        self,
        forward: Callable[..., object],
        input_names: Sequence[str],
        options: Mapping[str, object] | None = None,
        arguments: NestedArguments | None = None,
    ) -> None:
        """Flatten ``forward``.

        Args:
            forward: The bound forward method.
            input_names: Names of its input tensors, in order.
            options: Further keyword arguments of every call, such as ``use_cache=False``.
            arguments: Conversion of the tensors into arguments; `None`: every tensor is an argument.
        """
        self.input_names = tuple(input_names)
        self.output_names: tuple[str, ...] = ()
        self._requested_names: tuple[str, ...] = ()
        self._tensor_names: frozenset[str] = frozenset()
        self.unflattened = forward
        self._options = dict(options or {})
        self._arguments = arguments
        self._is_by_name = _takes_names(forward, self.input_names if arguments is None else arguments.names)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the module once.

        Raises:
            ExportError: the module returns no tensor.
        """
        arguments: Mapping[str, Any] = dict(zip(self.input_names, tensors, strict=True))
        if self._arguments is not None:
            arguments = self._arguments.build(arguments)
        if self._is_by_name:
            outputs = self.unflattened(**{**self._options, **arguments})
        else:
            outputs = self.unflattened(*arguments.values(), **self._options)
        if self._arguments is not None:
            outputs = self._arguments.results(outputs)
        flat = flatten_outputs(outputs, used_names=self.input_names)
        if not torch.jit.is_tracing():  # type: ignore[attr-defined]  # public, and not in its __all__
            self._tensor_names = frozenset(flat)
        elif self._tensor_names:
            # In a trace, a size that the forward returns is a tensor as well.
            flat = {name: tensor for name, tensor in flat.items() if name in self._tensor_names}
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
        # The requested names apply only if the number of outputs matches.
        self.output_names = self._requested_names if len(self._requested_names) == len(flat) else tuple(flat)
        return tuple(flat.values())

    def rename_outputs(self, names: Sequence[str]) -> None:
        """Rename the returned tensors, now and in every later call; one name per tensor."""
        self._requested_names = self.output_names = tuple(names)


@contextmanager
def prepared_for_export(
    model: nn.Module,
    input_names: Sequence[str],
    forward_options: Mapping[str, object] | None = None,
    *,
    path: str = "",
    entry: Callable[[nn.Module], Callable[..., object]] | None = None,
    arguments: NestedArguments | None = None,
    plain_attention: bool = True,
) -> Iterator[FlatForward]:
    """Replace the forward of ``model`` by its :class:`FlatForward`; in place, undone at the end.

    The block runs in evaluation mode and without gradients; compiled modules are replaced by their uncompiled form.
    ``plain_attention`` makes attention and transformer layers of ``torch.nn`` call plain operators in place of fused
    ones and nested tensors, which have no ONNX form. The training flag of every submodule, the forward
    method, compiled modules, the gradient mode and the attention settings are always restored.

    ``path`` limits the call to the forward of a module inside ``model``, called through the modules around it, so that
    its scopes are the same as in the whole model. ``entry`` returns the function to call instead of the forward, such
    as another method. ``arguments`` converts the tensors into arguments unless each tensor is one argument.

    Raises:
        ExportError: a module is scripted; exporters cannot trace it.
    """
    _refuse_scripted(model)
    training = {module: module.training for module in model.modules()}
    with contextlib.ExitStack() as stack:
        module = model.get_submodule(path)
        forward: Callable[..., Any] = module.forward if entry is None else entry(module)
        if entry is not None and path:
            stack.enter_context(attribute_replaced(module, "forward", forward))
        for outer, inner in reversed(list(pairwise(_modules_along(model, path)))):
            forward = _call_through(inner, forward)
            if outer is not model:
                stack.enter_context(attribute_replaced(outer, "forward", forward))
        if not path:
            forward = stack.enter_context(_detach_hooks(model, forward))
        flat = FlatForward(forward, input_names, forward_options, arguments)
        stack.enter_context(attribute_replaced(model, "forward", flat))
        model.eval()
        try:
            if plain_attention:
                mha = torch.backends.mha
                stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
                mha.set_fastpath_enabled(False)
            with torch.no_grad(), suspend_compilation(model):
                yield flat
        finally:
            for module, was_training in training.items():
                module.training = was_training


def _modules_along(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules from the root to ``path``, without containers, which cannot be called."""
    names = path.split(".") if path else []
    modules = [model.get_submodule(".".join(names[:count])) for count in range(len(names) + 1)]
    return [module for module in modules if module is modules[-1] or type(module).forward is not nn.Module.forward]


def _call_through(module: nn.Module, forward: Callable[..., object]) -> Callable[..., Any]:
    """Return a function of the signature of ``forward`` that calls a module, hooks included."""

    @functools.wraps(forward)
    def call(*args: object, **kwargs: object) -> Any:
        return module(*args, **kwargs)

    return call


def _refuse_scripted(model: nn.Module) -> None:
    """Refuse a module that is TorchScript instead of Python.

    Raises:
        ExportError: names the module.
    """
    for path, module in model.named_modules():
        if isinstance(module, RecursiveScriptModule):
            label = f"module {path!r} is" if path else "the model is"
            raise ExportError(
                f"{label} scripted ({module.original_name}, by torch.jit.script or torch.jit.load): torch's exporters "
                "cannot look into it",
                hint="Pass the original nn.Module, before torch.jit.script; load the weights with load_state_dict().",
                module=path,
            )


def flatten_outputs(outputs: object, used_names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Return the tensors in the result of a forward by name.

    Names are the keys of mappings and records and the positions in sequences, nested ones joined by a dot
    (``hidden_states.0``). Values that are not tensors, such as None or a cache, are omitted.

    Args:
        outputs: The result of the forward.
        used_names: Reserved names, such as the names of inputs; an output with such a name gets ``_output`` appended.
    """
    if isinstance(outputs, torch.Tensor):
        outputs = {"output": outputs}
    elif isinstance(outputs, (list, tuple)) and not hasattr(outputs, "_asdict"):
        outputs = {f"output_{position}": value for position, value in enumerate(outputs)}
    tensors_by_name: dict[str, torch.Tensor] = {}
    for name, tensor in _walk_tensors(outputs):
        while name in tensors_by_name or name in used_names:
            name = f"{name}_output"
        tensors_by_name[name] = tensor
    return tensors_by_name


def _walk_tensors(value: object, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
        return
    for key, child in _list_children(value):
        yield from _walk_tensors(child, f"{prefix}.{key}" if prefix else str(key))


def _list_children(value: object) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _takes_names(forward: Callable[..., object], names: Sequence[str]) -> bool:
    """Return True if ``forward`` can be called with these names as keywords."""
    parameters = inspect.signature(forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    variadic_names = [
        name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.VAR_POSITIONAL
    ]
    if variadic_names and any(re.fullmatch(rf"{variadic_names[0]}_\d+", name) for name in names):
        return False  # the names are positions in ``*args``; the wrapped function has other names
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    positional_only = inspect.Parameter.POSITIONAL_ONLY
    return all(name in parameters and parameters[name].kind is not positional_only for name in names)


_HOOK_DICTIONARIES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks before or after its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


class _Keywords(dict[str, object]):
    """Keyword arguments; a lookup also finds arguments passed by position, because hooks may expect either."""

    def __init__(self, keywords: dict[str, object], signature: inspect.Signature, args: tuple[object, ...]) -> None:
        super().__init__(keywords)
        self._by_position = signature.bind_partial(*args).arguments

    def __missing__(self, name: str) -> Any:
        return self._by_position[name]


def _merge_repeated(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return arguments in which a keyword replaces the same argument passed by position."""
    bound = signature.bind_partial(*args)
    repeated_names = {name for name in kwargs if name in bound.arguments}
    bound.arguments.update({name: kwargs[name] for name in repeated_names})
    return bound.args, {name: value for name, value in kwargs.items() if name not in repeated_names}


@contextmanager
def _detach_hooks(module: nn.Module, forward: Callable[..., object]) -> Iterator[Callable[..., Any]]:
    """Detach the hooks of a module during the block; yields ``forward`` with these hooks around it.

    A hook sees the arguments and the outputs of ``forward``, not of its replacement. Hooks that are registered inside
    the block are separate.
    """
    if not has_hooks(module):
        yield forward
        return
    hooks = {name: getattr(module, name) for name in _HOOK_DICTIONARIES}
    with attributes_replaced(*((module, name, OrderedDict()) for name in _HOOK_DICTIONARIES)):
        yield _with_hooks(module, forward, hooks)


def _with_hooks(module: nn.Module, forward: Callable[..., object], hooks: Mapping[str, Any]) -> Callable[..., Any]:
    """Return ``forward`` with these hooks of a module called before and after it."""
    signature = inspect.signature(forward)
    pre_hooks = [
        (hook, key in hooks["_forward_pre_hooks_with_kwargs"]) for key, hook in hooks["_forward_pre_hooks"].items()
    ]
    post_hooks = [(hook, key in hooks["_forward_hooks_with_kwargs"]) for key, hook in hooks["_forward_hooks"].items()]

    def call(*args: object, **kwargs: object) -> Any:
        # Hooks without keywords see only arguments passed by position.
        bound = signature.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
        for hook, takes_keywords in pre_hooks:
            result = hook(module, args, _Keywords(kwargs, signature, args)) if takes_keywords else hook(module, args)
            if result is not None and takes_keywords:
                args, kwargs = _merge_repeated(signature, *result)
            elif result is not None:
                args = result if isinstance(result, tuple) else (result,)
        outputs = forward(*args, **kwargs)
        for hook, takes_keywords in post_hooks:
            keywords = _Keywords(kwargs, signature, args)
            result = hook(module, args, keywords, outputs) if takes_keywords else hook(module, args, outputs)
            outputs = outputs if result is None else result
        return outputs

    call.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return call
