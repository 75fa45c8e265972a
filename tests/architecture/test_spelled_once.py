"""Keys of our metadata and names of our files, each spelled in one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from architecture.sources import Module, modules
from winml.modelkit.quantize.precisions import PRECISIONS

_METADATA_KEY = re.compile(r"^winml\.(?!modelkit\b)[a-z_.]*$|^pkg\.(torch|onnxscript)\.[a-z_.]*$")
_FILE_NAME = re.compile(
    r"_htp_|\.onnx\.data$|^\.winml-partial|build_manifest\.json|extract_manifest\.json|winml_build_config"
    r"|winml-build\.lock|^(export|optimized|quantized|compiled)\.onnx$"
)


def _texts(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the text constants of a module, docstrings apart."""
    docstrings = {
        id(node.value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def _spelled_elsewhere(pattern: re.Pattern[str], home: str) -> list[str]:
    return [
        f"{module.name}:{line} {text!r}"
        for module in modules()
        if module.name != home
        for line, text in _texts(module)
        if pattern.search(text)
    ]


def test_metadata_keys_are_spelled_in_one_file() -> None:
    """All keys of a written file stand side by side in ``metadata_keys``."""
    assert [] == _spelled_elsewhere(_METADATA_KEY, "metadata_keys")


def test_file_names_are_spelled_in_one_file() -> None:
    """All names of written files stand side by side in ``file_names``."""
    assert [] == _spelled_elsewhere(_FILE_NAME, "file_names")


_OTHER_NAMES = {
    "builds.foreign_configs": "words of winml-cli's configs",
    "builds.layouts.transformers_js_dtypes": "names of transformers.js",
    "export.declared_options": "types of activations",
    "export.loading": "types that a checkpoint is loaded in",
    "models": "types of stored tensors, and those that a checkpoint is loaded in",
    "onnx": "types of ONNX",
    "quantize.carried_codes": "types of ONNX",
    "quantize.file_quantization": "types of ONNX",
    "quantize.declared_options": "the type of a KV cache, which mypy reads",
    "compare.command": "the suffix of a file name",
    "cli._synonyms": "words of other tools, and the precision that each means",
    "tune.candidates": "a hint of OpenVINO",
}
"""Module or package → the meaning of words there that are also names of precisions."""


def test_precisions_are_named_in_their_registry() -> None:
    """A precision is added by one entry: the other modules read the registry and name no precision."""
    named = [
        f"{module.name}:{line} {text!r}"
        for module in modules()
        if module.name != "quantize.precisions"
        and not any(module.name == other or module.name.startswith(f"{other}.") for other in _OTHER_NAMES)
        for line, text in _texts(module)
        if text in PRECISIONS
    ]
    assert [] == named


def test_spelling_patterns_match_keys_and_file_names() -> None:
    """The patterns match a key and a file name of ours, but neither a module nor a checkpoint's file."""
    assert _METADATA_KEY.search("winml.hierarchy.tag")
    assert not _METADATA_KEY.search("winml.modelkit")
    assert _FILE_NAME.search("model.onnx.data")
    assert not _FILE_NAME.search("config.json")


def test_written_texts_end_lines_alike_on_every_system() -> None:
    """Without ``newline``, Python writes the line ends of the system."""
    missing = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "write_text" or (node.func.attr in ("open", "fdopen") and _opens_text(node)))
        and any(keyword.arg == "encoding" for keyword in node.keywords)
        and not any(keyword.arg == "newline" for keyword in node.keywords)
    ]
    assert [] == missing


def _opens_text(call: ast.Call) -> bool:
    modes = [item.value for item in call.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return any(mode in ("w", "a", "x") for mode in modes)
