"""Where do the files of a cell go? To a folder, or to a URL that fsspec knows, such as ``s3://bucket/sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from winml.modelkit.errors import UsageError, WriteError, first_line

__all__ = ["joined", "refuse_unknown_place", "upload"]


def joined(place: str, name: str) -> str:
    """Return where a folder is below a place.

    >>> joined("s3://bucket/sweep/", "bert")
    's3://bucket/sweep/bert'
    """
    return f"{place.rstrip('/')}/{name}"


def refuse_unknown_place(place: str) -> None:
    """Refuse a URL that nothing installed can write to.

    Raises:
        UsageError: names its protocol.
    """
    import fsspec

    protocol = fsspec.core.split_protocol(place)[0]
    try:
        fsspec.get_filesystem_class(protocol or "file")
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"--artifacts {place}: {first_line(error)}",
            hint="Install the package that fsspec needs for it, or name a folder.",
        ) from error


def upload(folder: Path, names: Sequence[str], place: str) -> None:
    """Copy files and folders.

    Args:
        folder: Where they are.
        names: Of files and folders in it; one that is not there is left out.
        place: Folder or URL.

    Raises:
        WriteError: the place does not take them.
    """
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(place)
        system.makedirs(root, exist_ok=True)
        for name in names:
            files = [folder / name] if (folder / name).is_file() else sorted((folder / name).rglob("*"))
            for path in files:
                if path.is_file():
                    target = joined(root, path.relative_to(folder).as_posix())
                    system.makedirs(target.rpartition("/")[0], exist_ok=True)
                    system.put_file(str(path), target)
    except Exception as error:
        # Every protocol has errors of its own.
        raise WriteError(f"{place}: {first_line(error)}", hint="Choose another place with --artifacts.") from error
