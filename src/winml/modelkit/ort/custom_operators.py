"""Libraries of custom operators that sessions load, named by the user.

The environment variable passes them to child processes as well. A library is code: none is loaded that the user does
not name.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from winml.modelkit.errors import UsageError, spell

LIBRARIES_VARIABLE = "WINML_CUSTOM_OPS"
"""Environment variable with the libraries, separated as in ``PATH``."""
_EXTENSIONS = "onnxruntime_extensions"
"""The package with a library of custom operators for tokenizers and image processing."""
_LIBRARY_SUFFIXES = (".so", ".pyd", ".dll", ".dylib")


def custom_libraries() -> tuple[str, ...]:
    """Return the paths of the libraries."""
    return tuple(filter(None, os.environ.get(LIBRARIES_VARIABLE, "").split(os.pathsep)))


def add_custom_library(text: str, libraries: str) -> str:
    """Return the value of the environment variable with one more library.

    Args:
        text: Path of a library, or ``onnxruntime-extensions`` for the library of the installed package.
        libraries: The value so far.

    Raises:
        UsageError: there is no such file, or the package is not installed.
    """
    path = Path(text)
    if text.replace("-", "_") == _EXTENSIONS and not path.exists():
        package = importlib.util.find_spec(_EXTENSIONS)
        names = [] if package is None else [Path(folder) for folder in package.submodule_search_locations or ()]
        files = (file for folder in names for file in folder.glob("_extensions_pydll*"))
        found = [file for file in files if file.suffix in _LIBRARY_SUFFIXES]
        if not found:
            raise UsageError(
                f"{spell('custom_ops')} {text}: the package is not installed",
                hint="Install it: pip install onnxruntime-extensions.",
            )
        path = found[0]
    if not path.is_file():
        raise UsageError(
            f"{spell('custom_ops')} {text}: no such file",
            hint="Pass the shared library (.so, .dll, .dylib) of the operators, or onnxruntime-extensions.",
        )
    return os.pathsep.join(filter(None, (libraries, str(path.absolute()))))
