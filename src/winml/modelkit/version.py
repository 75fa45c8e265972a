"""Which version of winml is this, and what do its extras install?"""

from __future__ import annotations

__all__ = ["__version__", "install_command"]

__version__ = "0.2.0"
"""Also read by the build, so that the distribution and the package cannot disagree."""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, wherever winml itself came from.

    The extra is not named in it: winml may have been installed from a folder or a wheel, and be on no package index.

    Args:
        extra: Name of the extra, such as ``eval``.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires("winml-modelkit") or ()
    except PackageNotFoundError:
        return f"pip install '.[{extra}]', in the folder of winml's source code"
    parts = (line.replace('"', "'").partition(";") for line in requirements)
    packages = [package.strip() for package, _, marker in parts if f"extra == '{extra}'" in marker]
    return " ".join(["pip install", *(f'"{package}"' for package in packages)])
