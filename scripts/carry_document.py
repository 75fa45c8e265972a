"""Prints the tables of a script that measures carried tags, and puts them into docs/reference/carry.md where asked."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "reference" / "carry.md"


def run_measurement(description: str | None, markers: tuple[str, str], measure: Callable[[Sequence[str]], str]) -> int:
    """Measure as the command line says, print the tables, and write them where asked; returns the exit status.

    Args:
        description: What ``--help`` says of the script.
        markers: Lines of the document between which the tables stand.
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
