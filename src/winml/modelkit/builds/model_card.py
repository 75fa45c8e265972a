"""The model card of a build: ``README.md`` with facts for people and for the Hub.

Language, licence and text of the source's card are kept; facts about the files are added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winml.modelkit.file_names import CARD_NAME
from winml.modelkit.onnx.files.front_matter import FrontMatterError, front_matter_value
from winml.modelkit.options import read_text_file
from winml.modelkit.version import __version__
from winml.modelkit.words import size_words

_SOURCE_KEYS = ("language", "license", "license_name", "license_link", "pipeline_tag", "datasets")
"""Specified by the Hub: keys about the source that hold for its conversion."""
_LARGEST_VALUE = 10_000
"""Bytes. Chosen: a list of some hundred data sets."""
_MARK = "---"


@dataclass(frozen=True)
class CardRow:
    """One model of the folder, or one variant of a package."""

    name: str
    """Path of the file relative to the folder, or name of the variant."""
    size_bytes: int
    facts: tuple[str, ...] = ()
    """Further cells of the row."""


@dataclass(frozen=True)
class CardFacts:
    """Facts about the files of a folder."""

    model: str
    """Name of the source, as the user wrote it."""
    task: str
    """Task of the model; "": none."""
    readers: str
    """Tools that open the folder."""
    rows: Sequence[CardRow]
    columns: tuple[str, ...] = ("file", "size")
    """Headings of the table."""
    stages: Sequence[str] = ()
    """Results of the stages and their comparisons, one line each."""
    usage: Sequence[str] = ()
    """Lines of code that open the folder."""
    language: str = "python"
    """Language of these lines."""
    tags: tuple[str, ...] = field(default=("onnx",))
    later_modules: tuple[str, ...] = ()
    """Modules of sentence-transformers that the files do not contain; they follow the graph."""


def model_card(facts: CardFacts, sources: Mapping[str, Path]) -> str:
    """Return the text of a model card.

    Args:
        facts: Facts about the folder.
        sources: Card and licence files of the checkpoint: name → file.
    """
    is_local = Path(facts.model).exists()
    name = Path(facts.model).name or facts.model
    source = next((path for key, path in sources.items() if key.lower() == "readme.md"), None)
    licences = [key for key in sources if CARD_NAME.fullmatch(key) and not key.lower().startswith("readme")]
    matter = _front_matter(facts, source)
    licence = matter.get("license_name") or matter.get("license")
    if licence and licences:
        stated = f"{licence} ({', '.join(licences)})"
    else:
        stated = str(licence or ", ".join(licences) or "not stated by the source")
    lines = [
        _MARK,
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in matter.items()),
        _MARK,
        "",
        f"# {name} (ONNX)",
        "",
        *([f"* Task: {facts.task}"] if facts.task else []),
        f"* Source: {name if is_local else facts.model}",
        f"* Licence of the source: {stated}",
        f"* Made with winml {__version__} for {facts.readers}",
        *([_later_modules_line(facts.later_modules)] if facts.later_modules else []),
        "",
        _table_line(facts.columns),
        _table_line(["---"] * len(facts.columns)),
        *(_table_line([f"`{row.name}`", size_words(row.size_bytes), *row.facts]) for row in facts.rows),
        "",
    ]
    if facts.stages:
        lines += ["## Stages", "", *(f"* {text}" for text in facts.stages), ""]
    if facts.usage:
        lines += ["## Use", "", f"```{facts.language}", *facts.usage, "```", ""]
    if body := _body(source):
        lines += ["## Card of the source", "", body, ""]
    return "\n".join(lines)


def _later_modules_line(modules: Sequence[str]) -> str:
    """Return the line on modules that follow the graph, and change the size of an embedding."""
    return (
        f"* Not in the graph: {', '.join(modules)} of sentence-transformers. The outputs are those of the transformer; "
        "the size of an embedding that the source states holds after these modules."
    )


def _table_line(cells: Sequence[str]) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _front_matter(facts: CardFacts, source: Path | None) -> dict[str, Any]:
    """Return the front matter: values of the source that hold for its conversion, and facts about the files."""
    values = {key: _source_value(source, key) for key in _SOURCE_KEYS}
    matter = {key: value for key, value in values.items() if value is not None}
    if facts.task and "pipeline_tag" not in matter:
        matter["pipeline_tag"] = facts.task
    base_model = _source_value(source, "base_model")
    if not Path(facts.model).exists() and facts.model.count("/") == 1:  # an id of the Hub
        base_model = facts.model
    if base_model is not None:
        matter["base_model"] = base_model
    own_tags = _source_value(source, "tags")
    kept = [tag for tag in own_tags if isinstance(tag, str)] if isinstance(own_tags, list) else []
    return {**matter, "tags": list(dict.fromkeys((*facts.tags, *kept)))}


def _source_value(source: Path | None, key: str) -> Any:
    """Return a value of the source's front matter; ``None`` if it is missing or cannot be read."""
    try:
        return None if source is None else front_matter_value(source, key, _LARGEST_VALUE)
    except (FrontMatterError, OSError):
        return None


def _body(source: Path | None) -> str:
    """Return the text of a card below its front matter; ``""`` without a card."""
    if source is None:
        return ""
    try:
        lines = read_text_file(source).splitlines()
    except (OSError, ValueError):
        return ""
    if lines and lines[0].strip() == _MARK:
        end = next((number for number, line in enumerate(lines[1:], 1) if line.strip() == _MARK), 0)
        lines = lines[end + 1 :]
    return "\n".join(lines).strip()
