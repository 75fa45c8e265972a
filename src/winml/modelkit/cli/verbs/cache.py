"""``winml cache``: what earlier commands keep on this disk, and how to have the room back."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._options import debug_option, format_option
from winml.modelkit.cli._streams import show_result

if TYPE_CHECKING:
    from winml.modelkit.results.cache_contents import CacheContents

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml cache ls
  winml cache clean --older-than 30
  winml cache clean --dry-run
"""


@click.group(name="cache", epilog=EPILOG, no_args_is_help=True)
def command() -> None:
    """Show or remove what earlier builds keep, so that a model is exported once.

    The cache is in the platform's place for caches, or where WINML_CACHE says. Nothing in it is ever needed.
    """


@command.command(name="ls", cls=WinMLCommand)
@format_option
@debug_option
def _list(**options: object) -> None:
    """List the builds in the cache, the one written last first, with what removing each frees."""
    from winml.modelkit.builds.cache_contents import list_cache
    from winml.modelkit.report.machine import contents_document

    contents = list_cache()
    show_result(contents.as_record(), options, lambda: contents_document(contents))


@command.command(name="clean", cls=WinMLCommand)
@click.option(
    "--older-than", type=click.FloatRange(min=0), metavar="DAYS", help="Only builds last written longer ago than this."
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@format_option
@debug_option
def _clean(**options: Any) -> None:
    """Remove builds from the cache, all of them or old ones. A build that somebody works in stays."""
    from winml.modelkit.builds.cache_contents import list_cache, remove_builds
    from winml.modelkit.report.machine import removed_document

    contents = list_cache(_age(options))
    removed: CacheContents = contents if options["dry_run"] else remove_builds(contents)
    is_rehearsal = options["dry_run"]
    record = {"dry_run": is_rehearsal, **removed.as_record()}
    show_result(record, options, lambda: removed_document(removed, is_rehearsal=is_rehearsal))


def _age(options: Mapping[str, Any]) -> timedelta | None:
    return None if options["older_than"] is None else timedelta(days=min(options["older_than"], 1e6))
