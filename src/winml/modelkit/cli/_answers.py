"""How does a record become the answer for a program? One JSON object on stdout, in one form for all verbs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from winml.modelkit.words import json_printable

__all__ = ["json_text", "print_json"]


def print_json(record: Mapping[str, Any]) -> None:
    """Write a record on stdout."""
    click.echo(json_text(record))


def json_text(record: Mapping[str, Any]) -> str:
    """Return a record as indented JSON; letters of all languages stay readable, and no character moves a terminal."""
    import json

    return json_printable(json.dumps(record, indent=2, ensure_ascii=False))
