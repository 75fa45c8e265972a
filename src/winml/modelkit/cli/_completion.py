"""Which values does a shell complete as paths? Those of parameters that take a path or something else, too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["complete_paths"]

_PATHS = frozenset({"MODEL", "CHECKPOINT", "DATA", "FILE", "FOLDER", "PATH", "JSON"})
"""Words of a metavar that stand for a path: ``PATH|NAME``, ``[MODEL]``. ``JSON`` is a file or text."""


class _PathOrText(click.types.StringParamType):
    """Text that may be a path, such as a model, which is a file, a folder, or a name at the Hub."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002  # click's
        """Leave it to the shell, which knows the files."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


def complete_paths(params: Iterable[click.Parameter]) -> None:
    """Let a shell complete every argument of a verb, and every option whose metavar names a path; in place."""
    for param in params:
        is_named = bool(_PATHS & set(re.findall(r"[A-Z]+", param.metavar or "")))
        if isinstance(param.type, click.types.StringParamType) and (isinstance(param, click.Argument) or is_named):
            param.type = _PathOrText()
