"""``winml cache``: what earlier commands keep on this disk, and how to have the room back."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._options import debug_option, format_option
from winml.modelkit.cli._streams import print_json

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
def _list(**options: Any) -> None:
    """List the builds in the cache, the one written last first, with what removing each frees."""
    from winml.modelkit.builds.cache_contents import list_cache
    from winml.modelkit.report.machine import print_contents
    from winml.modelkit.report.terminal import console_for

    contents = list_cache()
    if options["format_"] == "json":
        print_json(contents.as_record())
        return
    print_contents(contents, console_for(sys.stdout))


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
    from winml.modelkit.report.machine import print_removed
    from winml.modelkit.report.terminal import console_for

    contents = list_cache(_age(options))
    removed: CacheContents = contents if options["dry_run"] else remove_builds(contents)
    if options["format_"] == "json":
        print_json({"dry_run": options["dry_run"], **removed.as_record()})
        return
    print_removed(removed, console_for(sys.stdout), is_rehearsal=options["dry_run"])


def _age(options: dict[str, Any]) -> timedelta | None:
    return None if options["older_than"] is None else timedelta(days=min(options["older_than"], 1e6))
