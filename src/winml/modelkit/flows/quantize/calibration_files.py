"""Which files does the data for the ranges of activations consist of, and can they be used?

Looks at names only, and imports no model library: a request is refused, and a result found again, before any is loaded.
"""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.errors import UsageError

__all__ = ["FORMS", "TEXT_SUFFIXES", "npz_files", "refuse_missing_files"]

TEXT_SUFFIXES = (".txt", ".csv", ".jsonl")
"""Of files whose texts the tokenizer beside the model makes arrays."""
FORMS = (
    "Give an .npz file or a folder of them (numpy.savez, one array per input of the graph, one file a sample), or a "
    "text: .txt (one a line), .csv or .jsonl with a column text, for the tokenizer beside the model."
)
"""What is read, for hints."""

_OPTION = "--calibration-data"


def npz_files(data: Path) -> list[Path]:
    """Return the files of a folder that hold samples, in their order; of a file, itself."""
    return sorted(data.glob("*.npz")) if data.is_dir() else [data]


def refuse_missing_files(data: str | Path | None) -> None:
    """Refuse data that is not there, or that has a form which is not read; None is none.

    Raises:
        UsageError: names it, and the forms that are read.
    """
    if data is None:
        return
    path = Path(data)
    if not path.exists():
        raise UsageError(f"{_OPTION} {path}: no such file or folder", hint=FORMS)
    if path.is_file() and path.suffix not in (".npz", *TEXT_SUFFIXES):
        raise UsageError(f"{_OPTION} {path}: a {path.suffix or 'nameless'} file is not read", hint=FORMS)
    if not npz_files(path):
        raise UsageError(f"{_OPTION} {path}: holds no sample", hint=FORMS)
