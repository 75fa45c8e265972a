"""Decorator of the public functions: types of arguments are checked, and errors are in the words of Python.

The library spells options as the command line does, and names commands as remedies; a caller of a function needs its
keywords and calls.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ParamSpec, TypeVar

from winml.modelkit.errors import UsageError, WinMLError, has_speller, missing_library, spell_by, spell_keyword

_ParametersT = ParamSpec("_ParametersT")
_ResultT = TypeVar("_ResultT")


_KEYWORDS_OF: dict[str, Mapping[str, str]] = {}
"""Function → option → its keyword, if it differs from the keyword of the other functions."""


def python_function(
    **keywords_of: str,
) -> Callable[[Callable[_ParametersT, _ResultT]], Callable[_ParametersT, _ResultT]]:
    """Return a decorator: errors of a public function spell options as its keywords, unless a command calls it.

    Arguments of another type than annotated are refused, as far as the annotation names common types.

    Args:
        **keywords_of: Option → keyword of this function, if it differs from the keyword of the other functions.
    """

    def wrap(function: Callable[_ParametersT, _ResultT]) -> Callable[_ParametersT, _ResultT]:
        signature = inspect.signature(function)
        names = {"shape_config": "sizes"} if "sizes" in signature.parameters else {}
        names.update(keywords_of)
        _KEYWORDS_OF[function.__name__] = names

        @functools.wraps(function)
        def call(*arguments: _ParametersT.args, **keywords: _ParametersT.kwargs) -> _ResultT:
            if has_speller():
                return function(*arguments, **keywords)
            with spell_by(lambda option: names.get(option) or spell_keyword(option)):
                try:
                    _refuse_wrong_types(function, signature, arguments, keywords)
                    return function(*arguments, **keywords)
                except ModuleNotFoundError as error:
                    raise missing_library(error) or error from error
                except WinMLError as error:
                    error.message, error.hint = _python_words(error.message), _python_words(error.hint)
                    raise

        return call

    return wrap


_FUNCTIONS = {
    "build": "build_model", "compare": "compare_models", "compile": "compile_model", "diff": "diff_models",
    "eval": "evaluate_model", "export": "export_model", "extract": "extract_modules",
    "inspect": "inspect_model",
    "optimize": "optimize_model", "perf": "profile_model", "quantize": "quantize_model", "refit": "refit_model",
    "retag": "retag_model", "run": "run_model", "tune": "tune_model",
}  # fmt: skip
"""Command → function."""
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s,;]*[^\s,;.])"
_WORD = (
    rf"-[mop] {_VALUE}|-{{2}}(?:ep|kv-cache|layout|level|mode|module|opset|precision|shape-config|task)[ =]{_VALUE}"
    r"|-{2}[a-z][\w-]*|-H"
    r"|'[^']*'|[\w\-./\\]*[./\\][\w\-./\\]*\w|[A-Z]{2,}"
)
"""A word of a command in a sentence: an option, a path, or a placeholder in capitals."""
_COMMAND = re.compile(rf"winml ({'|'.join(_FUNCTIONS)})\b((?: (?:{_WORD}))*)(?! (?:…|-|[\w.]+ -))")
_GENERATE = re.compile(rf"winml generate ({_VALUE})(?: (?:{_WORD}|{_VALUE}))+")
"""The command that generates text: Python has a class for it."""
_ONLY_IN_COMMAND = re.compile(r"-{2}(list|schema|check|help)\b")


def _python_words(text: str) -> str:
    """Replace commands in a text by calls of their functions; commands without a function stay.

    >>> _python_words("Build it first: winml build -m ckpt -o built --level full")
    "Build it first: build_model('ckpt', 'built', level='full')"
    >>> _python_words("Export it with winml export, or see winml sys. winml compile --list lists them.")
    'Export it with export_model, or see winml sys. winml compile --list lists them.'
    >>> _python_words('winml generate built -p "Once upon a time"')
    "WinMLAutoModel.from_pretrained('built').generate(…)"
    """
    text = _GENERATE.sub(lambda match: f"WinMLAutoModel.from_pretrained({match[1]!r}).generate(…)", text)
    return _COMMAND.sub(_python_call, text)


def _python_call(match: re.Match[str]) -> str:
    """Return the call of the function of a command."""
    if _ONLY_IN_COMMAND.search(match[2]):
        return match[0]
    places: dict[str, str] = {}
    keywords: list[str] = []
    for word in re.findall(_WORD, match[2]):
        flag, _, value = word.partition("=") if "=" in word.partition(" ")[0] else word.partition(" ")
        value = value.strip("'\"")
        if flag in ("-m", "-o"):
            places[flag] = value
        elif flag == "-H":
            continue  # the default in Python
        elif not flag.startswith("-"):
            places[f"{len(places)}"] = word.strip("'")
        else:
            name = flag.lstrip("-").replace("-", "_")
            name = {"p": "precision", "shape_config": "sizes"}.get(name, name)
            literal = value if value.startswith("{") or value.isdecimal() else repr(value)
            keyword = _spell_for(_FUNCTIONS[match[1]], name)
            # The keyword of a switch may have its value: dynamo=False.
            keywords.append(f"{keyword}={literal}" if value else keyword if "=" in keyword else f"{keyword}=True")
    values = [places[flag] for flag in ("-m", *(name for name in places if name.isdigit()), "-o") if flag in places]
    call = ", ".join([*map(repr, values), *keywords])
    return f"{_FUNCTIONS[match[1]]}({call})" if call else _FUNCTIONS[match[1]]


def _spell_for(function: str, option: str) -> str:
    """Spell an option as the keyword of a public function."""
    getattr(sys.modules[__package__], function)  # a function is loaded when its name is read, and states its keywords
    return _KEYWORDS_OF.get(function, {}).get(option) or spell_keyword(option)


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "None": ((type(None),), "None"),
    "str": ((str, os.PathLike), "text"),
    "PathLike": ((os.PathLike,), "a path"),
    "bool": ((bool,), "True or False"),
    "int": ((numbers.Integral,), "a whole number"),
    "float": ((numbers.Real,), "a number"),
    "Mapping": ((Mapping,), "a dict"),
    "Sequence": ((Collection,), "a list"),
    "Callable": ((Callable,), "a function"),  # type: ignore[dict-item]  # isinstance takes it
}
"""Name of an annotated type → the types of its values, and words. A path may be the text of a dataset."""
_CLASS_NAME = re.compile(r"\w+(Config|Evaluator|Listener|Options|Request)|Module")
"""Names of classes that annotations refer to; such a class is told by its name, without an import."""


def _refuse_wrong_types(
    function: Callable[..., object],
    signature: inspect.Signature,
    arguments: Sequence[object],
    keywords: Mapping[str, object],
) -> None:
    """Refuse an argument whose type is not among those of its annotation; a missing argument is left to the call.

    Raises:
        UsageError: names the argument, its type, the annotated types, and the description of the argument.
    """
    try:
        bound = signature.bind_partial(*arguments, **keywords)
    except TypeError:
        return  # the call reports it
    for name, argument in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for value in argument if parameter.kind is parameter.VAR_POSITIONAL else (argument,):
            hint = functools.partial(_argument_hint, function, name, value)
            refuse_wrong_type(f"{function.__name__}: {name}", value, str(parameter.annotation), hint)


def refuse_wrong_type(label: str, value: object, annotation: str, hint: Callable[[], str] = str) -> None:
    """Refuse a value whose type is not among those of an annotation, as far as the annotation names common types.

    Args:
        label: Name of the value.
        value: The value.
        annotation: Text of the annotation, such as ``int | None``.
        hint: Returns the next step.

    Raises:
        UsageError: names the value, its type and the annotated types.
    """
    kinds = [kind.partition("[")[0].rpartition(".")[2] for kind in annotation.split(" | ")]
    is_known = all(kind in _KINDS or _CLASS_NAME.fullmatch(kind) for kind in kinds)
    if not is_known or any(_is_of_kind(value, kind) for kind in kinds):
        return
    if "Module" in kinds and type(value).__module__.startswith("torch."):
        return  # the function knows the other programs of PyTorch
    words = [_KINDS[kind][1] if kind in _KINDS else f"a {kind}" for kind in kinds]
    raise UsageError(f"{label} is of type {type(value).__name__}, expected {' or '.join(words)}", hint=hint())


def _is_of_kind(value: object, kind: str) -> bool:
    """Return True if a value has an annotated type; text and a module are no list, and True is no number."""
    if kind not in _KINDS:
        return any(base.__name__ == kind for base in type(value).__mro__)
    is_text, is_switch = isinstance(value, (str, bytes)), isinstance(value, bool)
    if (is_switch and kind in ("int", "float")) or (is_text and kind == "Sequence"):
        return False
    return isinstance(value, _KINDS[kind][0])


def _argument_hint(function: Callable[..., object], name: str, value: object) -> str:
    """Return the way to use a module of PyTorch, or the description of an argument in the docstring."""
    if any(base.__module__ == "torch.nn.modules.module" for base in type(value).__mro__):
        return "Export the module, and pass the file: export_model(module, 'model.onnx', example_inputs)."
    described = re.search(
        rf"^ +\*?{name}: (.+?)(?=\n\n|\n +\*{{0,2}}\w+: |\Z)", function.__doc__ or "", re.DOTALL | re.MULTILINE
    )
    text = "" if described is None else " ".join(described[1].split()).replace("``", "")
    plain_text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"\1", text)
    return f"Expected: {plain_text}" if text else ""
