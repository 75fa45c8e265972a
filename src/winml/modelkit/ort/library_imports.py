"""Import of the parts of transformers that a model needs, without parts used only in training or compilation.

Importing a model class takes 2.7 s of computing; without these parts 1.6 s (measured with transformers 5.24).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from winml.modelkit.ort.shared_settings import attribute_replaced

_COMMAND = "_WINML_COMMAND"
"""Environment variable of a process that runs a command of winml and then ends."""
_OPTIMIZE = "scipy.optimize"
_DYNAMO = "torch._dynamo"
_TRACING = f"{_DYNAMO}._trace_wrapped_higher_order_op"
_SETTINGS = f"{_DYNAMO}.config"
_SHARDED = "torch.distributed.tensor"
_STRUCTURE = "transformers.utils.import_utils"


def import_transformers() -> None:
    """Import transformers, and list its model modules once.

    transformers reads its 1,700 source files for ``transformers``, and again for ``transformers.models`` (0.2 s).
    Nobody trains or compiles a model in a process of a command, so there

    * transformers is imported as with a torch that is built without ``torch.distributed`` (0.5 s);
    * ``torch._dynamo`` is imported when something other than its decorators is used (0.5 s): transformers decorates
      kernels for GPUs, and torch decorates functions that initialize weights.
    """
    if "transformers.models" in sys.modules:
        return
    import transformers

    utils: Any = importlib.import_module(_STRUCTURE)
    if _COMMAND in os.environ:
        import torch.distributed

        with attribute_replaced(torch.distributed, "is_available", lambda: False):
            getattr(utils, "is_torch_distributed_available", bool)()  # remembers its first answer
        if _DYNAMO not in sys.modules:
            _stand_in_for_dynamo()
    known: Any = transformers
    with suppress(AttributeError, ImportError):  # another version lists its modules otherwise
        structure = _model_modules(known._import_structure, known._object_missing_backend)
        with attribute_replaced(utils, "define_import_structure", lambda _path: structure):
            importlib.import_module("transformers.models")


def _model_modules(
    modules: Mapping[str, list[str]], missing: Mapping[str, list[str]]
) -> Mapping[frozenset[str], Mapping[str, list[str]]]:
    """Return missing backends → module below ``transformers.models`` → its names."""
    structure: dict[frozenset[str], dict[str, list[str]]] = {frozenset(): {}}
    for path, names in modules.items():
        if path.startswith("models."):
            # The names of a module may need different libraries.
            for name in names or [path]:
                of_backends = structure.setdefault(frozenset(missing.get(name, ())), {})
                of_backends.setdefault(path.removeprefix("models."), []).extend(names and [name])
    return structure


def import_losses() -> None:
    """Import the losses of transformers, which every model class imports, without ``scipy.optimize``.

    Only one of its functions is called, in training, to match boxes of object detectors; its import takes 0.3 s. The
    losses get a function that imports ``scipy.optimize`` on the first call.
    """
    if _OPTIMIZE in sys.modules or "transformers.loss.loss_utils" in sys.modules:
        return
    _stand_in(_OPTIMIZE, linear_sum_assignment=_imported_late(_OPTIMIZE, "linear_sum_assignment"))
    try:
        # A version without this module imports its losses with the model class.
        with suppress(ImportError):
            importlib.import_module("transformers.loss.loss_utils")
    finally:
        _remove_stand_ins(_OPTIMIZE)


def _stand_in_for_dynamo() -> None:
    """Represent ``torch._dynamo`` by its decorators until another attribute or a module of it is needed.

    Its module of settings, which fake tensors read, imports nothing else. The check of symbolic sizes, which imports
    it, is off by default.
    """
    import torch

    def decorate(function: Any = None, *_arguments: Any, **_keywords: Any) -> Any:
        return function or decorate

    def name_source(*parts: Any) -> Any:
        return SimpleNamespace(name=parts)

    place = [str(Path(torch.__file__).with_name("_dynamo"))]
    _stand_in(_DYNAMO, __path__=place, allow_in_graph=decorate, assume_constant_result=decorate, disable=decorate)
    # Fake tensors name the tensors that they are made of, for guards of compiled code.
    vars(sys.modules[_DYNAMO])["source"] = _stand_in(
        f"{_DYNAMO}.source", AttrSource=name_source, ConstantSource=name_source, RandomValueSource=_StandIn
    )
    # torch asks for this class when it meets the first tensor of another class, such as a fake tensor.
    _stand_in(_SHARDED, __path__=[], DTensor=type("DTensor", (), {}))
    _stand_in("torch.fx.experimental.validator", translation_validation_enabled=lambda: False)
    _stand_in(_TRACING, TransformGetItemToIndex=_imported_late(_TRACING, "TransformGetItemToIndex"))
    sys.meta_path.insert(0, _ModulesOfStandIn())


class _StandIn(ModuleType):
    """A module with a few attributes, which is replaced by the real module when another attribute is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by the import system
            raise AttributeError(name)
        return getattr(_import_real(self.__name__), name)


class _ModulesOfStandIn:
    """Finder of the import system for modules inside a stand-in, which is replaced by the real module."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        package = next((package for package in (_DYNAMO, _SHARDED) if name.startswith(f"{package}.")), "")
        if name == _SETTINGS or not isinstance(sys.modules.get(package), _StandIn):
            return None
        _import_real(package)
        return ModuleSpec(name, self)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, found: ModuleSpec) -> ModuleType:
        return importlib.import_module(found.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is imported."""


def _stand_in(name: str, **attributes: Any) -> ModuleType:
    sys.modules[name] = module = _StandIn(name)
    vars(module).update(attributes)
    return module


def _import_real(name: str) -> ModuleType:
    """Import a module in place of its stand-in, which gets its attributes: other modules may hold it."""
    replaced = _remove_stand_ins(name)
    module = importlib.import_module(name)
    for stand_in in replaced:
        if stand_in.__name__ == name:
            vars(stand_in).update(vars(module))
    return module


def _remove_stand_ins(package: str) -> list[ModuleType]:
    """Remove the stand-ins for a module and for the modules in it, and return them."""
    names = [name for name in [*sys.modules] if f"{name}.".startswith(f"{package}.")]
    return [sys.modules.pop(name) for name in names if isinstance(sys.modules[name], _StandIn)]


def _imported_late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports a module at each call and calls its function of this name."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(_import_real(module), name)(*arguments, **keywords)

    return call
