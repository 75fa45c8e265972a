"""Tree of the errors that callers may get.

The exit code of the command is on the class (FORMATS: 0 success, 1 failure, 2 wrong usage, 3 valid negative result)::

    WinMLError                      1
    ├── UsageError                  2   the request is wrong: change the command or the call
    │   ├── MissingOutputError      2   no output is specified, and there is no default
    │   ├── ConfigError             2   a JSON text or an option value is malformed or unknown
    │   ├── TaskError               2   the task is unknown, ambiguous, or not offered by the architecture
    │   ├── ModelPathError          2   the path that names the model is missing or unusable
    │   └── OutputExistsError       2   the output exists already
    ├── InputError                  1   the request is right, a file it names is not: repair the files
    │   ├── HubError                1   a Hub id could not be resolved or fetched
    │   ├── CheckpointError         1   config or weights are missing, truncated, of the wrong shape, or unsafe
    │   └── RemoteCodeError         1   the checkpoint needs to run its own code, which was not allowed
    ├── StageError                  1   a stage failed on this model
    │   ├── ExportError             1
    │   ├── NormalizeError          1
    │   ├── OptimizeError           1
    │   ├── QuantizeError           1
    │   ├── CompileError            1
    │   ├── MeasureError            1
    │   ├── NoInputsError           1   a graph accepts no values that can be generated
    │   ├── NoAnswerError           1   a process did not answer in time
    │   └── WriteError              1   the output could not be written
    ├── LimitError                  3   a result is beyond a limit of the request
    ├── VerificationError           3   two models that should give equal outputs do not
    └── InternalError               1   a bug of this package: asks for a report

Messages are one to three lines: the failure with the value, the expectation, and the next step. An option is named as
the user stated it (``f"{opt.min_sqnr} 30"``, see :func:`spell`): by a flag, a key of the config, or a keyword of
Python. This module imports no library; ``cli/_errors.py`` turns these types into text on stderr.
"""

from __future__ import annotations

import contextlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

_LIBRARIES = frozenset({"huggingface_hub", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch", "transformers"})
"""Libraries with private names that winml uses, which move without notice (docs/decisions/0004-private-seams.md)."""


class WinMLError(Exception):
    """Base of all errors of winml.

    Attributes:
        message: The failure, the value, and the expectation.
        hint: Next step for the user, or an empty string.
        step: Failed step of the flow (``step 4 of 8, ONNX export``), or an empty string.
        frozen: Names of dynamic dimensions that the graph or the model does not support, if this is the failure.
        is_after_export: True if the optimization, quantization or compilation of an exported graph failed.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.step = ""
        self.frozen: tuple[str, ...] = ()
        self.is_after_export = False

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def as_record(self) -> dict[str, object]:
        """Return the JSON object: message, hint and step."""
        return {"error": self.message, "hint": self.hint, "step": self.step}


class UsageError(WinMLError):
    """The request is wrong."""

    exit_code = 2


class MissingOutputError(UsageError):
    """No output file or folder is specified, and there is no default."""


class ConfigError(UsageError):
    """A JSON text or an option value is malformed, has an unknown key, or a value of the wrong kind."""


class TaskError(UsageError):
    """The task is unknown, ambiguous, or not offered by the architecture.

    Attributes:
        candidates: Tasks that would be accepted.
    """

    def __init__(self, message: str, *, hint: str = "", candidates: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.candidates = candidates


class ModelPathError(UsageError):
    """The path that names the model is missing or unusable."""


class OutputExistsError(UsageError):
    """The output exists already, and overwriting was not requested."""


class InputError(WinMLError):
    """A file that the request names is missing, damaged or unsafe."""


class HubError(InputError):
    """A Hub id could not be resolved or fetched."""


class CheckpointError(InputError):
    """Config or weights are missing, truncated, of the wrong shape, or unsafe to read."""


class RemoteCodeError(InputError):
    """The checkpoint needs to run its own code, which was not allowed."""


class StageError(WinMLError):
    """A stage failed on this model.

    Attributes:
        failed_pass: Name of the graph pass that failed; empty for every other failure.
    """

    failed_pass = ""


class ExportError(StageError):
    """A torch module could not be exported.

    Attributes:
        operator: The unsupported operator, such as ``aten::diff``, if this is the reason.
        module: Dotted path of the module whose forward failed, if known.
        is_by_value: True if the forward branches on the value of a tensor, which the exporter does not have.
    """

    def __init__(self, message: str, *, hint: str = "", operator: str | None = None, module: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.operator = operator
        self.module = module
        self.is_by_value = False


class NormalizeError(StageError):
    """A normalization pass failed, or violated its declaration."""


class OptimizeError(StageError):
    """A graph could not be optimized: an engine failed, or a pass violated its declaration."""


class QuantizeError(StageError):
    """A graph could not be quantized: an engine failed, or supports no node."""


class CompileError(StageError):
    """A graph could not be compiled: the execution provider failed, or took none of its nodes."""


class MeasureError(StageError):
    """Nothing could be measured: the graph does not run, or the execution provider records no profile."""


class NoInputsError(StageError):
    """A graph accepts none of the inputs that were generated for it."""


class NoAnswerError(StageError):
    """A process did not answer in time, which may be due to a busy machine."""


class WriteError(StageError):
    """An output file could not be written; earlier files are unchanged."""


class LimitError(WinMLError):
    """A result is beyond a limit of the request; no file was written."""

    exit_code = 3


class VerificationError(WinMLError):
    """Two models that should have equal outputs do not, or the outputs cannot be compared.

    Attributes:
        is_graph_wrong: True if the graph is the likely cause, not the reference or the inputs.
        inputs: Input values for which the outputs differ, by name, if both models ran.
        most: Name of a dynamic dimension → largest size with equal outputs, if only larger sizes differ.
        unchecked: Record of the comparison, if all outputs are equal but none depends on the inputs, so that a wrong
            graph would go unnoticed; None otherwise.
        is_quality: True if a quantized result is below its minimum SQNR, which another export would not change.
        is_normalization_wrong: True if the graph before normalization passes the same verification.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, hint: str = "", is_graph_wrong: bool = False, inputs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.is_graph_wrong = is_graph_wrong
        self.inputs = inputs
        self.most: Mapping[str, int] = {}
        self.unchecked: Any = None
        self.is_quality = False
        self.is_normalization_wrong = False


class InternalError(WinMLError):
    """A bug of this package: please report it."""


def error_chain(error: BaseException | None, *, with_context: bool = True) -> Iterator[BaseException]:
    """Yield an error and its causes, the first cause last. Each error is yielded once, since chains can be circular.

    Args:
        error: The error; `None` yields nothing.
        with_context: Include errors that were being handled, unless ``raise … from None`` suppressed them.
    """
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        yield error
        context = error.__context__ if with_context and not error.__suppress_context__ else None
        error = error.__cause__ or context


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's message, or its type if the message is empty; for use in messages."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def place_of(error: BaseException) -> str:
    """Return ``file:line: `` of the innermost line of user code that raised an error; empty if there is no such line.

    Lines of this package, of Python and of installed libraries are skipped. If no line of user code is found, the
    innermost line of a library is returned.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign_frames = [location for location in frames if not location[0].startswith(("<", str(Path(__file__).parent)))]
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    user_frames = [location for location in foreign_frames if not location[0].startswith(libraries)]
    return "".join(f"{file}:{line}: " for file, line in (user_frames or foreign_frames)[-1:])


def failed_import(error: BaseException) -> str:
    """Return the name of the package that raised an error during import; empty for all other errors.

    This package and the script of the user are skipped; errors of the script are reported with a line. The package of
    the cause is returned if an import error has one: transformers raises an import error for every error in its
    modules.
    """
    if isinstance(error, ImportError) and error.__cause__ is not None and (name := failed_import(error.__cause__)):
        return name
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    name = str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] if frames else ""
    return "" if name.startswith("_") or name == __name__.partition(".")[0] else name


def import_error(error: BaseException) -> InputError | None:
    """Return the error for an installed package that fails to import; `None` for all other errors."""
    package = failed_import(error)
    if not package:
        return None
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__
    return InputError(
        f"the installed package {package} cannot be imported: {type(error).__name__}: {first_line(error)}",
        hint=f"Install a version that is compatible with the installed packages, or remove it: pip uninstall {package}",
    )


_MISSING_LIBRARIES: Mapping[str, tuple[str, str]] = {
    "torch": (
        "this requires PyTorch, which is not installed",
        """Install it: pip install torch transformers. If there is no torch for this platform, as on Windows on Arm, \
export or build the model on another machine and copy the folder; ONNX files and build folders need no PyTorch.""",
    ),
    "transformers": (
        "these files are read by transformers, which is not installed",
        "Install it: pip install transformers. It reads them without PyTorch.",
    ),
}
"""Library that an installation may lack → message and hint."""


def missing_library(error: BaseException) -> UsageError | None:
    """Return the error for a model library that is not installed; `None` for all other errors."""
    missing = (link.name or "" for link in error_chain(error) if isinstance(link, ModuleNotFoundError))
    library = next((name for name in missing if name in _MISSING_LIBRARIES), None)
    if library is None:
        return None
    message, hint = _MISSING_LIBRARIES[library]
    return UsageError(message, hint=hint)


def missing_name(error: BaseException) -> str:
    """Return the name that the installed version of a library lacks: ``torch 2.14.1 has no torch.jit._script``.

    Empty for all other errors, and for errors raised outside of this package.
    """
    if isinstance(error, ImportError):
        imported = re.match(r"cannot import name '(\w+)'", str(error))
        name = ".".join(filter(None, (error.name, imported and imported[1])))
    elif isinstance(error, AttributeError):
        if isinstance(error.obj, ModuleType):
            owner = error.obj.__name__
        elif isinstance(error.obj, type):
            owner = f"{error.obj.__module__}.{error.obj.__name__}"
        else:  # attributes of instances are data: a key of a config, a child of a module
            return ""
        name = f"{owner}.{error.name}"
    else:
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name != "__getattr__"]
    is_ours = bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith(f"{__name__.rpartition('.')[0]}.")
    library = name.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", None)
    return f"{library} {version} has no {name}" if is_ours and version and library in _LIBRARIES else ""


def is_panic(error: BaseException) -> bool:
    """Return True if a library written in Rust panicked: the exception is no ``Exception`` and has no public type."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


def ended_by_foreign_code(error: BaseException) -> InputError:
    """Return the error for code of a model that ends the process, by ``sys.exit`` or a ``BaseException``."""
    text = " ".join(str(error).split())
    if is_panic(error):
        return InputError(f"{place_of(error)}a library failed on what it was given: {text}", hint="Check the files.")
    return InputError(
        f"{place_of(error)}code of the model ended the process: {type(error).__name__}{f': {text}' if text else ''}",
        hint="Let the code return, or raise an exception that states the reason.",
    )


_speller: ContextVar[Callable[[str], str] | None] = ContextVar("speller of options", default=None)
"""Spells the options in the texts of the running command or Python call; `None` spells flags."""
_TEXTS = {"output_folder": "-o FOLDER", "another_output": "another output path"}
"""Option → words in texts of the command, if they differ from the long flag."""
_KEYWORDS = {
    "another_output": "another output path",
    "asymmetric": "symmetric=False",
    "custom_ops": "the variable WINML_CUSTOM_OPS",
    "debug": "the cause of this exception",
    "dynamic_seq_len": "dynamic_sequence",
    "dynamo": "exporter='dynamo'",
    "ep_library": "the variable WINML_EP_LIBRARY",
    "export_config": "config",
    "input_specs": "input_tensors",
    "map": "names",
    "metric": "metrics",
    "min_sqnr": "min_sqnr_db",
    "no_dynamo": "exporter='torchscript'",
    "no_tokenizer": "with_companions=False",
    "opset": "opset_version",
    "output_folder": "output",
    "per_tensor": "per_channel=False",
}
"""Option → keyword of Python, if their names differ."""
_SWITCHES = frozenset({
    "allow_dynamic", "by_module", "deploy_only", "freeze_inputs", "overwrite", "random_weights", "rebuild",
    "skip_pre_normalization", "smooth_quant", "symmetric", "trust_remote_code", "verify",
})  # fmt: skip
"""Options that are on or off, as Python spells them: ``overwrite=True``, and ``verify=False`` for ``no_verify``."""


def spell(option: str) -> str:
    """Spell an option for the user who stated it: as a flag, a key of a config, or a keyword of Python.

    A text that is no identifier is spelled already, and is returned unchanged.

    >>> spell("min_sqnr"), spell("eval.dataset")
    ('--min-sqnr', 'eval.dataset')
    """
    return (_speller.get() or spell_flag)(option) if option.isidentifier() else option


class _SpelledOptions:
    """Options by name, as :func:`spell` spells them, for f-strings."""

    def __getattr__(self, name: str) -> str:
        return spell(name)


opt = _SpelledOptions()
"""``f"{opt.min_sqnr} 30"`` is ``--min-sqnr 30`` for the command line."""


def spell_flag(option: str) -> str:
    """Spell an option as on the command line, for texts with a command."""
    return _TEXTS.get(option) or f"--{option.replace('_', '-')}"


def spell_keyword(option: str) -> str:
    """Spell an option as the keyword of Python functions.

    >>> spell_keyword("no_verify"), spell_keyword("input_specs"), spell_keyword("task")
    ('verify=False', 'input_tensors', 'task')
    """
    if option in _KEYWORDS:
        return _KEYWORDS[option]
    start, _, name = option.partition("_")
    if start in ("no", "disable"):
        return f"{name}=False"
    return f"{name}=True" if start == "enable" else f"{option}=True" if option in _SWITCHES else option


@contextlib.contextmanager
def spell_options(names: Mapping[str, str]) -> Iterator[None]:
    """Spell some options within the block by other names, such as keys of a config.

    Args:
        names: Option → spelling; empty: the command has no such option, so that no text may offer it. The mapping may
            change within the block.
    """
    outer_speller = _speller.get() or spell_flag
    with spell_by(lambda option: names[option] if option in names else outer_speller(option)):
        yield


@contextlib.contextmanager
def spell_by(speller: Callable[[str], str]) -> Iterator[None]:
    """Spell options within the block by a function: option → spelling."""
    token = _speller.set(speller)
    try:
        yield
    finally:
        _speller.reset(token)


def has_speller() -> bool:
    """Return True within a block that spells options in its own way: a config, or a public function."""
    return _speller.get() is not None
