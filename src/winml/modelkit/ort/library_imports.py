"""Import of the parts of transformers that a model needs, without parts used only in training or compilation.

Importing a model class takes 2.7 s of computing; without these parts 1.6 s (measured with transformers 5.24).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from winml.modelkit.ort.shared_settings import attribute_replaced

_COMMAND = "_WINML_COMMAND"
"""Environment variable of a process that runs a command of winml and then ends."""
_OPTIMIZE = "scipy.optimize"
_DYNAMO = "torch._dynamo"
_TRACING = f"{_DYNAMO}._trace_wrapped_higher_order_op"
_BUILDER = f"{_DYNAMO}.variables.builder"
_AOT = "torch._functorch.aot_autograd"
_INDUCTOR = "torch._inductor"
_STRUCTURE = "transformers.utils.import_utils"
_SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
_SYMPY = "sympy"
_SEPARATE = {
    *(f"{_DYNAMO}.{name}" for name in ("bytecode_analysis", "bytecode_transformation", "config", "exc")),
    *(f"{_DYNAMO}.{name}" for name in ("graph_utils", "metrics_context", "source", "utils")),
    f"{_INDUCTOR}.config",
}
"""Modules that need no other modules of their packages."""
_SEPARATELY_IMPORTED: dict[str, ModuleType] = {}
_DEFINED_IN = {
    (_BUILDER, "TrackedFake"): _SYMBOLIC,
    (_AOT, "_detect_attribute_assignment"): "torch._functorch._aot_autograd.frontend_utils",
}
"""Module and attribute → the module that defines the attribute."""


def import_transformers() -> None:
    """Import transformers, and list its model modules once.

    transformers reads its 1,700 source files line by line for ``transformers``, and again for ``transformers.models``
    (0.2 s). Nobody trains or compiles a model in a process of a command, so there

    * transformers is imported as with a torch that is built without ``torch.distributed`` (0.5 s);
    * ``torch._dynamo`` and the compilers behind it are imported when something other than its decorators, errors and
      names of sources is used (0.8 s): transformers decorates kernels for GPUs, torch decorates functions that
      initialize weights, and ``torch.export`` imports all of it;
    * sympy and torch's symbolic sizes are imported when a size is a symbol (0.2 s).
    """
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _FinderOfStructure())
    import transformers  # noqa: F401  # the finder changes how it lists its modules

    if _COMMAND not in os.environ or "transformers.models" in sys.modules or not importlib.util.find_spec("torch"):
        return
    import torch.distributed

    utils: Any = importlib.import_module(_STRUCTURE)
    with attribute_replaced(torch.distributed, "is_available", lambda: False):
        getattr(utils, "is_torch_distributed_available", bool)()  # remembers its first answer
    if _DYNAMO not in sys.modules:
        _stand_in_for_dynamo()
    if not {_SYMBOLIC, _SYMPY} & {*sys.modules}:
        _stand_in_for_symbolic_sizes()
    sys.meta_path.insert(0, _ModulesOfStandIn())
    importlib.import_module("transformers.models")


class _FinderOfStructure:
    """Finder of the import system for the module that lists the modules of transformers: makes it faster."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _STRUCTURE:
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(name, path, target)
        loader: Any = None if found is None else found.loader
        if loader is not None:
            loader.exec_module = _with_fast_listing(loader.exec_module)
        return found


def _with_fast_listing(execute: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make transformers list its modules once for each folder, and search only the last lines of a file for names."""

    def execute_and_change(utils: Any) -> None:
        execute(utils)
        with suppress(AttributeError):  # another version lists its modules otherwise
            names_in, modules_in = utils.fetch__all__, utils.create_import_structure_from_path
            utils.fetch__all__ = lambda content: names_in(content[content.rfind("\n__all__") + 1 :])
            end = f"{os.sep}__init__.py"
            utils.create_import_structure_from_path = lambda path: modules_in(str(path).removesuffix(end))

    return execute_and_change


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

    Fake tensors and ``torch.export`` use a few of its modules, which import nothing else of it. The check of symbolic
    sizes, which imports it, is off by default. torch reads the paths of files of the compiler to skip their frames.
    """
    import torch

    def decorate(function: Any = None, *_arguments: Any, **_keywords: Any) -> Any:
        return function or decorate

    def name_source(*parts: Any) -> Any:
        return SimpleNamespace(name=parts)

    def mark_dynamic(tensor: Any, axis: int) -> None:
        vars(tensor).pop("_dynamo_dynamic_range", None)  # no bounds
        vars(tensor).setdefault("_dynamo_dynamic_indices", set()).add(axis)

    folder = Path(torch.__file__).parent
    decorators = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable", "dont_skip_tracing"), decorate)
    marks = {"mark_dynamic": mark_dynamic, "mark_static": lambda _tensor, _axis: None}
    _stand_in(_DYNAMO, __path__=[str(folder / "_dynamo")], OptimizedModule=_StandIn, **decorators, **marks)
    _stand_in(f"{_DYNAMO}.eval_frame", __file__=str(folder / "_dynamo" / "eval_frame.py"))
    _stand_in(f"{_DYNAMO}.guards", uninteresting_files=set)
    _stand_in(f"{_DYNAMO}.variables", __path__=[])
    _stand_in("torch._higher_order_ops.triton_kernel_wrap")
    _stand_in(_BUILDER)
    no_code = SimpleNamespace(stack_frames_for_code=lambda _path, _line: None)
    _stand_in(_INDUCTOR, __path__=[str(folder / "_inductor")], codecache=SimpleNamespace(PyCodeCache=no_code))
    # torch asks at each operator whether it is to be searched for a fault of the compiler, and makes a folder for that.
    search = dict.fromkeys(("disable_subsystem", "get_backend", "get_config_change"), lambda *_: None)
    _stand_in(f"{_INDUCTOR}.compiler_bisector", CompilerBisector=SimpleNamespace(bisection_enabled=False, **search))
    _stand_in(f"{_INDUCTOR}.sizevars", __file__=str(folder / "_inductor" / "sizevars.py"))
    _stand_in(_AOT, aot_export_joint_with_descriptors=_imported_late(_AOT, "aot_export_joint_with_descriptors"))
    # Fake tensors name the tensors that they are made of, for guards of compiled code.
    _stand_in(f"{_DYNAMO}.source", AttrSource=name_source, ConstantSource=name_source, RandomValueSource=_StandIn)
    _stand_in("torch.fx.experimental.validator", translation_validation_enabled=lambda: False)
    _stand_in(_TRACING, TransformGetItemToIndex=_imported_late(_TRACING, "TransformGetItemToIndex"))


def _stand_in_for_symbolic_sizes() -> None:
    """Represent sympy, and torch's functions of symbolic sizes, until a size is a symbol.

    Operators on tensors without values pass all their sizes to these functions.
    """
    functions: dict[str, Callable[..., object]] = {
        **dict.fromkeys(("expect_true", "guarding_hint_or_throw", "statically_known_true"), lambda value: value),
        **dict.fromkeys(("guard_or_false", "guard_or_true", "guard_size_oblivious", "size_hint"), lambda value: value),
        "has_guarding_hint": lambda _value: True,
        "is_nested_int": lambda _value: False,
        "sym_and": lambda *values: all(values),
        "sym_eq": lambda left, right: left == right if isinstance(left, int) else [*left] == [*right],
        "sym_or": lambda *values: any(values),
    }
    _stand_in(_SYMBOLIC, **{name: _of_numbers(name, function) for name, function in functions.items()})
    _stand_in(_SYMPY, __path__=[], Basic=type("Basic", (), {}))


def _of_numbers(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return a function of sizes that calls the real one only for symbols."""
    real = _imported_late(_SYMBOLIC, name)

    def call(*values: Any, **keywords: Any) -> object:
        sizes = [size for value in values for size in (value if isinstance(value, (list, tuple)) else (value,))]
        return function(*values) if all(isinstance(size, (int, float)) for size in sizes) else real(*values, **keywords)

    return call


class _StandIn(ModuleType):
    """A module with a few attributes, which is replaced by the real module when another attribute is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by the import system
            raise AttributeError(name)
        if (module := f"{self.__name__}.{name}") in _SEPARATE:
            return importlib.import_module(module)
        if module := _DEFINED_IN.get((self.__name__, name), ""):
            with suppress(ImportError, AttributeError):  # another version defines it elsewhere
                return getattr(importlib.import_module(module), name)
        return getattr(_import_real(self.__name__), name)


class _ModulesOfStandIn:
    """Finder of the import system for modules inside a stand-in, which is replaced by the real module."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name in _SEPARATELY_IMPORTED:
            return ModuleSpec(name, self, loader_state=_SEPARATELY_IMPORTED.pop(name))  # type: ignore[arg-type]
        package = next((package for package in (_DYNAMO, _SYMPY) if name.startswith(f"{package}.")), "")
        if name in _SEPARATE or not isinstance(sys.modules.get(package), _StandIn):
            return None
        _import_real(package)
        # Otherwise the import system executes a module that the package has imported once more.
        return ModuleSpec(name, self, loader_state=sys.modules.pop(name, None))  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, found: ModuleSpec) -> ModuleType:
        module: ModuleType = found.loader_state or importlib.import_module(found.name)
        found.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Restore the module's own specification: it is executed."""
        if module.__spec__.loader is self:  # torch's modules of settings keep theirs
            module.__spec__ = module.__spec__.loader_state


def _stand_in(name: str, **attributes: Any) -> None:
    sys.modules[name] = module = _StandIn(name)
    vars(module).update(attributes)
    package, _, last = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package])[last] = module


def _import_real(name: str) -> ModuleType:
    """Import a module in place of its stand-in, which gets its attributes: other modules may hold it."""
    stand_in = sys.modules.get(name)
    if not isinstance(stand_in, _StandIn):
        return importlib.import_module(name)
    _remove_stand_ins(name)
    # Modules are attributes of the stand-in once imported; the import system makes them attributes of the package.
    names = {f"{name}.{attribute}": value for attribute, value in vars(stand_in).items()}
    inner = [key for key, value in names.items() if sys.modules.get(key, stand_in) is value]
    _SEPARATELY_IMPORTED.update({key: sys.modules.pop(key) for key in inner})
    module = importlib.import_module(name)
    vars(stand_in).update(vars(module))
    return module


def _remove_stand_ins(package: str) -> None:
    """Remove the stand-ins for a module and for the modules in it."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        if isinstance(sys.modules[name], _StandIn):
            del sys.modules[name]


def _imported_late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports a module at each call and calls its function of this name."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(_import_real(module), name)(*arguments, **keywords)

    return call
