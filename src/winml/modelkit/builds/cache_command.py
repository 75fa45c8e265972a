"""``winml cache``: what earlier commands keep on this disk, and how to have the room back."""

from __future__ import annotations

from typing import Any

import click

from winml.modelkit.builds.cache_verb import CleanRequest, plan_cleaning, run_cleaning
from winml.modelkit.cli._errors import WinMLCommand, WinMLGroup
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import show_result


@click.group(name="cache", cls=WinMLGroup, no_args_is_help=True)
def command() -> None:
    """List or remove builds in the cache.

    The cache stores builds and exports, so that no model is exported twice. It is in the cache folder of the user,
    or in the folder of the variable WINML_CACHE. Removing it is always safe.

    Examples:
      winml cache ls
      winml cache clean --older-than 30
      winml cache clean --dry-run
    """


@command.command(name="ls", cls=WinMLCommand)
@result_options(quiet="")
def _list(**options: object) -> None:
    """List the builds in the cache with the space that removing each one frees, latest first."""
    from winml.modelkit.builds.cache import list_cache
    from winml.modelkit.builds.machine_table import contents_document

    contents = list_cache()
    show_result(contents.as_record(), options, lambda: contents_document(contents))


@command.command(name="clean", cls=WinMLCommand)
@request_options(CleanRequest)
@result_options(quiet="")
def _clean(**options: Any) -> None:
    """Remove all builds, or old ones, from the cache. Builds in use are skipped."""
    from winml.modelkit.builds.machine_table import removed_document

    plan = plan_cleaning(CleanRequest(**stated_fields(CleanRequest, options)))
    end_dry_run(plan, options)
    removed = run_cleaning(plan)
    show_result(removed.as_record(), options, lambda: removed_document(removed))
