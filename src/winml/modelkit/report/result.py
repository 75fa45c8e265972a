"""Base of the results of public functions: text in a terminal, a page in a notebook, rows of a data frame."""

from __future__ import annotations

import contextlib
import html
import importlib
import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from winml.modelkit.errors import InputError, UsageError, has_speller, spell_by, spell_keyword
from winml.modelkit.version import install_command

if TYPE_CHECKING:
    import pandas as pd

    from winml.modelkit.report.document import Document

_LINES = 12
"""Maximum number of lines of the text of a result. Chosen: a notebook shows it beside its cell without scrolling."""
_WIDTH = 120


class Result:
    """A result that describes itself, by the document of its command.

    Class keywords: ``document`` is ``module:function`` of the function that makes the document of a result; ``rows`` is
    the path of keys, joined by dots, to the entries of the record that become rows of the data frame: its modules,
    metrics or candidates.
    """

    _document_function: ClassVar[str] = ""
    _rows: ClassVar[str] = ""
    _page_height: ClassVar[int] = 480
    """Height of the page in a notebook, in pixels. Chosen: the chart and the first rows of the table."""

    def __init_subclass__(cls, *, document: str = "", rows: str = "", **keywords: Any) -> None:
        """Store the keywords, and define ``__repr__`` in the subclass in place of that of a dataclass."""
        super().__init_subclass__(**keywords)
        cls._document_function = document or cls._document_function
        cls._rows = rows or cls._rows
        cls.__repr__ = Result.__repr__  # type: ignore[method-assign]  # a dataclass has its own

    def document(self, *details: Any, **view: Any) -> Document:
        """Return the document of the result, as its command prints it.

        Args:
            *details: Further arguments of the function that makes the document.
            **view: Its options, such as the depth of displayed modules.
        """
        module, _, name = self._document_function.partition(":")
        with contextlib.nullcontext() if has_speller() else spell_by(spell_keyword):  # of a Python caller
            make = getattr(importlib.import_module(f"winml.modelkit.{module}"), name)
            document: Document = make(self, *details, **view)
        return document

    def text(self) -> str:
        """Return the text that the command prints."""
        from rich.console import Console

        from winml.modelkit.report.terminal import print_document

        text = io.StringIO()
        console = Console(file=text, width=_WIDTH, markup=False, emoji=False, highlight=False, no_color=True)
        print_document(self.document(), console)
        return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())

    def __repr__(self) -> str:
        """Return the first lines of the text."""
        lines = self.text().splitlines()
        more = [f"… {len(lines) - _LINES} more lines: print(result.text())"] if len(lines) > _LINES else []
        return "\n".join([*lines[:_LINES], *more])

    def _repr_html_(self) -> str:
        """Return the page of the result for a notebook, in a frame of its own."""
        from winml.modelkit.report.html import render_html

        page = html.escape(render_html(self.document()))
        style = f"width: 100%; height: {self._page_height}px; border: 0; resize: vertical"
        return f'<iframe srcdoc="{page}" style="{style}"></iframe>'

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame: one row for each module, metric, candidate or part, or one row for the whole result.

        Raises:
            InputError: pandas is not installed.
            UsageError: the rows of this result were not recorded in this run.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise InputError("to_frame requires pandas", hint=f"Install it: {install_command('eval')}") from error
        record: dict[str, Any] = self.as_record()  # type: ignore[attr-defined]  # of the subclass
        rows: Any = [record] if not self._rows else record
        for key in filter(None, self._rows.split(".")):
            rows = rows.get(key)
        if rows is None:
            raise UsageError(f"{type(self).__name__} has no {self._rows} in this run", hint="Use as_record().")
        if isinstance(rows, dict):
            rows = [{"name": name, **entry} for name, entry in rows.items()]
        return pd.json_normalize(list(_flat_rows(rows)))


def _flat_rows(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows and their children, which follow their parent."""
    for row in rows:
        yield {name: value for name, value in row.items() if name != "children"}
        yield from _flat_rows(row.get("children", ()))
