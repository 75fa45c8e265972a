"""Writes a document that is generated from the code; with ``--check``, checks the existing document."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(target: Path, text: str) -> None:
    """Write a document; with ``--check`` on the command line, compare it instead.

    Raises:
        SystemExit: it is out of date.
    """
    if "--check" not in sys.argv[1:]:
        target.write_text(text, encoding="utf-8", newline="\n")
    elif not target.is_file() or target.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{target} is out of date: run python {Path(sys.argv[0]).name}")
