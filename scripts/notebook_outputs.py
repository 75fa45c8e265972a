"""Run the notebooks of the documentation and write their outputs into them.

    python scripts/notebook_outputs.py

Cells run one after the other in this process, as in Jupyter: printed text and the value of the last line are the
output. No Jupyter is needed. Outputs of cells with the tag ``times`` differ from run to run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
TIMES = "times"
"""Tag of a cell that measures: its numbers are not the same in each run."""

_MEDIA = {"image/svg+xml": "_repr_svg_", "text/html": "_repr_html_", "text/markdown": "_repr_markdown_"}
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")


def read_notebook(path: Path) -> dict[str, Any]:
    """Return a notebook as its JSON says."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def source_of(cell: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(notebook: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Run the code cells in order; yield the outputs of each."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        for count, cell in enumerate(code_cells(notebook), start=1):
            yield _outputs(source_of(cell), count, namespace)


def _outputs(source: str, count: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    name = f"<cell {count}>"
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)  # noqa: S102  # cells of our own
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if value is not None:
        data = {kind: getattr(value, method)() for kind, method in _MEDIA.items() if hasattr(value, method)}
        data["text/plain"] = f"<{type(value).__name__}>" if data else repr(value)
        content = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
        outputs.append({"data": content, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def is_measured(cell: dict[str, Any]) -> bool:
    """Return True if the numbers of a cell differ from run to run."""
    return TIMES in cell["metadata"].get("tags", ())


def text_of(outputs: list[dict[str, Any]], *, measured: bool) -> str:
    """Return outputs as text, without pictures, and without numbers in measuring cells."""
    texts = ["".join(output.get("text") or output["data"]["text/plain"]) for output in outputs]
    text = "".join(texts)
    # How wide a column is depends on its numbers.
    return re.sub(" +", " ", _NUMBER.sub("#", text)) if measured else text


def write_outputs(path: Path) -> None:
    """Run a notebook and write the outputs into its file."""
    notebook = read_notebook(path)
    for count, (cell, outputs) in enumerate(zip(code_cells(notebook), run_cells(notebook), strict=True), start=1):
        cell["outputs"], cell["execution_count"] = outputs, count
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    for found in sorted(NOTEBOOKS.glob("*.ipynb")):
        write_outputs(found)
        print(f"wrote {found.name}")
