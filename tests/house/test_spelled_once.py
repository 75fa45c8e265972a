"""Are the keys of our metadata and the names of our files each spelled in one place?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from house.sources import Module, modules

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
    """Whoever looks for a key of a written file finds all of them side by side."""
    assert [] == _spelled_elsewhere(_METADATA_KEY, "metadata_keys")


def test_file_names_are_spelled_in_one_file() -> None:
    """Whoever looks for the name of a written file finds all of them side by side."""
    assert [] == _spelled_elsewhere(_FILE_NAME, "file_names")


def test_patterns_see_what_they_are_for() -> None:
    """A key and a name of ours are seen, a module and a checkpoint's file are not."""
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
