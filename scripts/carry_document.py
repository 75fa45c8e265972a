"""Prints the tables of a script that measures transferred tags; with ``--write``, writes docs/reference/carry.md."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "reference" / "carry.md"


def run_measurement(description: str | None, markers: tuple[str, str], measure: Callable[[Sequence[str]], str]) -> int:
    """Measure the architectures of the command line, print the tables, write them on request; return the status.

    Args:
        description: Text of ``--help``.
        markers: Lines of the document before and after the tables.
        measure: Names of architectures, none for all → the tables as Markdown.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    text = measure(arguments.architectures)
    print(text)
    if arguments.write:
        start, end = markers
        before, rest = DOCUMENT.read_text(encoding="utf-8").split(start)
        after = rest.split(end)[1]
        DOCUMENT.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}", encoding="utf-8")
    return 0
