"""Reads the arrays of an ``.npz`` file, which may come from anyone.

No Python object is read, and no array whose header declares more than is there or than fits into memory.
"""

from __future__ import annotations

import lzma
import math
import stat
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.runtime.memory import available_bytes
from winml.modelkit.words import size_words

__all__ = ["read_arrays"]


_DAMAGED = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError, SyntaxError,
    EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError,
)  # fmt: skip
"""What numpy and zipfile raise for files that are damaged, locked or no archive."""
_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Specified by numpy; a version 3 is for names of fields that are not Latin, which no tensor has."""


def read_arrays(path: Path, source: str) -> dict[str, Array]:
    """Return the arrays of a file by their names.

    Args:
        path: The file.
        source: What named it, for messages.

    Raises:
        UsageError: there is no such file, or it holds one array without a name.
        InputError: it is damaged, holds Python objects, or declares more than is read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{source}: is no regular file", hint="Give a file that numpy.savez wrote.")
        with path.open("rb") as file:
            is_single = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
            file.seek(0)
            if not is_single:
                content = np.load(file, allow_pickle=False)
                _refuse_oversized(content.zip, source)
                return {name: content[name] for name in content.files}
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise UsageError(f"{source}: {reason}", hint="Give a file that numpy.savez wrote.") from None
    except _DAMAGED as error:
        raise InputError(
            f"{source}: is no .npz file, or damaged, or holds Python objects",
            hint="Give a file that numpy.savez wrote from arrays of numbers or of text (dtype U).",
        ) from error
    raise UsageError(
        f"{source}: holds one array without a name",
        hint='Save it with the name of the input: numpy.savez("inputs.npz", input_ids=array).',
    )


def _refuse_oversized(archive: zipfile.ZipFile, source: str) -> None:
    """Refuse arrays whose headers declare more than their files hold, or than there is memory.

    Raises:
        InputError: names the array.
        ValueError: a file of the archive is no array.
    """
    free = available_bytes()
    total = 0
    for member in archive.infolist():
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in _HEADER_READERS:
                raise ValueError(f"an array of the version {version}")
            shape, _, dtype = _HEADER_READERS[version](file)
        declared = math.prod(shape) * dtype.itemsize
        total += declared
        name = member.filename.removesuffix(".npy")
        if declared > member.file_size:
            raise InputError(
                f"{source}: array {name!r} declares {size_words(declared)} and has {size_words(member.file_size)}",
                hint="Save it again with numpy.savez.",
            )
        if free is not None and total > free:
            raise InputError(
                f"{source}: its arrays up to {name!r} take {size_words(total)}; {size_words(free)} of memory are free",
                hint="Give fewer samples a file, or smaller ones.",
            )
