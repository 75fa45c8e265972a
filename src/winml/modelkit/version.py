"""Versions of winml and of libraries, and the packages that the extras of winml install."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__version__ = "0.4.0"
"""Also read by the build, so that the versions of distribution and package are equal."""


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of distributions without an import; missing distributions are omitted."""
    versions = {name: _installed_version(name) for name in names}
    return {name: version for name, version in versions.items() if version is not None}


def _installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None; cached, since each stage asks and reading metadata is slow."""
    # Imported late, as below.
    from importlib import metadata

    if name not in _VERSIONS:
        try:
            _VERSIONS[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            _VERSIONS[name] = None
    return _VERSIONS[name]


_VERSIONS: dict[str, str | None] = {}
"""Distribution → its version, of those that were read."""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, for every kind of installation of winml.

    The command names the extra if winml was installed from a folder that still exists, and otherwise its packages,
    because a wheel may not be on a package index.

    Args:
        extra: Name of the extra, such as ``eval``.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        own_package = distribution("winml-modelkit")
    except PackageNotFoundError:
        return f"pip install '.[{extra}]', in the folder of winml's source code"
    if (folder := _source_folder(own_package.read_text("direct_url.json"))) is not None:
        return f'pip install "{folder}[{extra}]"'
    parts = (line.replace('"', "'").partition(";") for line in own_package.requires or ())
    packages = [package.strip() for package, _, marker in parts if f"extra == '{extra}'" in marker]
    return " ".join(["pip install", *(f'"{package}"' for package in packages)])


def _source_folder(direct_url: str | None) -> Path | None:
    """Return the source folder of an installation, read from ``direct_url.json`` of pip; None if missing."""
    # Imported late: this module is imported before the working directory leaves the search path.
    import json
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    record = json.loads(direct_url or "{}")
    url = urlsplit(record.get("url", ""))
    if url.scheme != "file" or "dir_info" not in record:
        return None
    folder = Path(url2pathname(url.path))
    return folder if (folder / "pyproject.toml").is_file() else None
