"""How does a report page name the files written with it? By links relative to the page, and by what opens them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from winml.modelkit.report import document as doc
from winml.modelkit.report.html import render_html

_OPENED_BY = {
    "output": "– the results as JSON",
    "trace": "– kernels and modules over time, for ui.perfetto.dev or chrome://tracing",
    "node_data": "– numbers of the nodes, for Model Explorer beside the model",
    "model": "– the ONNX model, for Netron or Model Explorer",
    "exclude_list": "– the modules that stay in float, for --per-module",
}
"""Option that names a file → what it holds, and what opens it."""


def page_text(document: doc.Document, page: Path, files: Mapping[str, Iterable[Path]]) -> str:
    """Return a report as the text of a page.

    Args:
        document: The report.
        page: The file the page is written to.
        files: Option → the files it names that are written with the page; others, such as the page, are left out.
    """
    return render_html(replace(document, links=list(_links(page, files))))


def _links(page: Path, files: Mapping[str, Iterable[Path]]) -> Iterator[doc.Linked]:
    folder = page.absolute().parent
    for option, words in _OPENED_BY.items():
        for path in files.get(option, ()):
            try:
                target = Path(os.path.relpath(path.absolute(), folder)).as_posix()
            except ValueError:  # on another drive of Windows
                continue
            yield doc.Linked(words, path.name, target)
