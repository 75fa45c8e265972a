"""Reading of one key of the front matter of a ``README.md``: the YAML between its first two lines ``---``.

Other keys are not parsed, and only a bounded number of bytes is: parsing YAML takes about a minute per megabyte.
Aliases, tags and deep nesting, which a model card does not need, are refused before values are made.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from winml.modelkit.onnx.files.foreign_names import refuse_special_file

_MOST_BYTES = 4 * 10**6
"""Maximum number of bytes read of a file. Chosen: cards are text of some thousand words."""
_DEEPEST = 32
"""Levels of lists and mappings. Chosen: features of data sets nest about ten."""
_MARK = "---"
_GOES_ON = (" ", "\t", "-", "#", "]", "}")
"""Prefixes of lines that continue a value."""


class FrontMatterError(ValueError):
    """The front matter cannot be read; the message gives the reason, without the name of the file."""


def front_matter_value(path: Path, key: str, most_bytes: int) -> Any:
    """Return the value of a front matter key; `None` if the file or the key is missing.

    Args:
        path: The file.
        key: The key, on the first level.
        most_bytes: Largest size of its value.

    Raises:
        FrontMatterError: the value is damaged, too large, nested too deeply, or has an alias or a tag.
    """
    text = _value_text(path, key)
    if text is None:
        return None
    if len(text) > most_bytes:
        raise FrontMatterError(f"{key!r} is larger than {most_bytes} bytes, the limit")
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse_unusable(yaml.parse(text, Loader=loader))
        value = yaml.load(text, Loader=loader)  # noqa: S506  # both are safe loaders
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, FrontMatterError):
            raise FrontMatterError(f"{key!r} {error}") from None
        problem = getattr(error, "problem", None) or next(iter(str(error).splitlines()), type(error).__name__)
        raise FrontMatterError(f"{key!r} is not valid YAML: {problem}") from error
    return value.get(key) if isinstance(value, dict) else None


def _value_text(path: Path, key: str) -> str | None:
    """Return the lines of the last occurrence of a first-level key; `None` if the key is missing.

    `None` also for a missing or unreadable file.
    """
    try:
        refuse_special_file(path)
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8-sig", errors="replace")
    except (OSError, ValueError):
        return None
    lines = text.lstrip().splitlines(keepends=True)
    if not lines or lines[0].strip() != _MARK:
        return None
    start = re.compile(rf"{re.escape(key)}[ \t]*:(?:\s|$)")
    value_lines: list[str] | None = None
    is_inside = False
    for line in lines[1:]:
        if line.rstrip() == _MARK:
            break
        if start.match(line):
            value_lines, is_inside = [], True
        elif line.strip() and not line.startswith(_GOES_ON):
            is_inside = False
        if is_inside and value_lines is not None:
            value_lines.append(line)
    return None if value_lines is None else "".join(value_lines)


def _refuse_unusable(events: Any) -> None:
    """Refuse aliases, tags and deep nesting in YAML events.

    Raises:
        FrontMatterError: the message names the problem.
    """
    import yaml

    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise FrontMatterError("has an alias, which is not read")
        if tag := getattr(event, "tag", None):
            raise FrontMatterError(f"has the tag {tag}, which is not read")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise FrontMatterError("is nested too deeply")
