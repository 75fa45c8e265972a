"""Reads the texts of a ``.txt``, ``.csv`` or ``.jsonl`` file without the datasets library, one row at a time.

For callers that need untyped texts: numbers in a ``.csv`` file stay texts.
"""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.options import load_json
from winml.modelkit.samples.data_sets import DataSetRequest
from winml.modelkit.samples.media import Unreadable

TEXT_SUFFIXES = (".txt", ".csv", ".jsonl")
_HINT = "Pass text: .txt (one per line), .csv with a header, or .jsonl with one object per line."


class TextFile:
    """The rows of a text file in order, limited to the requested number.

    Has the used interface of :class:`~winml.modelkit.samples.data_sets.DataSet`.
    """

    split = "train"
    notes: tuple[str, ...] = ()

    def __init__(self, request: DataSetRequest) -> None:
        """Take a file; rows are read lazily.

        Raises:
            UsageError: a split other than the default is requested, or more rows than the file has.
            InputError: the file is damaged.
        """
        self.request = request
        self.unreadable: dict[int, Unreadable] = {}
        self.path = Path(request.source)
        self.name = self.words = self.path.absolute().name
        if request.split not in (None, self.split):
            raise UsageError(
                f"{request.words}: no split {request.split!r}", hint=f"A single file has one split; omit {opt.split}."
            )
        first_row = next(self._all_rows(), {})
        self.features: Mapping[str, Any] = dict.fromkeys(map(str, first_row))
        if request.samples is not None:
            request.count_samples(self._row_count)

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names; ``text`` for a file of lines."""
        return tuple(self.features)

    def __len__(self) -> int:
        """Return the number of rows that are read."""
        return self.request.count_samples(self._row_count)

    def rows(self, roles: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the rows by role: role → column; rows without text are skipped, and noted in ``unreadable``.

        Raises:
            InputError: the file is damaged, or no row has a text.
        """
        count = 0
        for number, row in enumerate(itertools.islice(self._all_rows(), len(self))):
            cells = {role: row.get(column) for role, column in roles.items()}
            if any(cell is None or (isinstance(cell, str) and not cell.strip()) for cell in cells.values()):
                self.unreadable[number] = Unreadable(f"row {number}", "contains no text")
                continue
            count += 1
            yield cells
        if self.unreadable and not count:
            columns = ", ".join(roles.values())
            raise InputError(f"{self.request.words}: no row has text in {columns}", hint=_HINT)

    @property
    def unreadable_note(self) -> str | None:
        """Note on skipped rows; None if all rows have texts."""
        if not self.unreadable:
            return None
        verbs = "without text is" if len(self.unreadable) == 1 else "without text are"
        return f"{len(self.unreadable)} of {len(self)} rows of {self.name} {verbs} skipped"

    @functools.cached_property
    def _row_count(self) -> int:
        return sum(1 for _ in self._all_rows())

    def _all_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the non-empty rows.

        Raises:
            InputError: the file cannot be read as text, or a line is no object.
        """
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                suffix = self.path.suffix.lower()
                if suffix == ".txt":
                    rows: Iterator[Any] = ({"text": line.strip()} for line in file)
                elif suffix == ".csv":
                    rows = csv.DictReader(file)
                else:
                    rows = (load_json(line) for line in file if line.strip())
                for row in rows:
                    if not isinstance(row, Mapping):
                        raise InputError(
                            f"{self.request.words}: a line contains {type(row).__name__}, not an object", hint=_HINT
                        )
                    if any(row.values()):
                        yield row
        except (OSError, ValueError, csv.Error) as error:
            raise InputError(f"{self.request.words}: cannot be read as text: {error}", hint=_HINT) from error
