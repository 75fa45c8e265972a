"""``winml cache``: lists and removes builds in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand, WinMLGroup
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import show_result
from winml.modelkit.fields import OUTPUT, declare
from winml.modelkit.report import document as doc
from winml.modelkit.report.plan import Plan, PlannedStep
from winml.modelkit.words import count_noun, size_words

if TYPE_CHECKING:
    from winml.modelkit.builds.cache import CacheContents

_LONGEST_DAYS = 1e6
"""Chosen: older than any file, without an overflow of ``timedelta``."""


@dataclass(frozen=True, kw_only=True)
class _CleanRequest:
    """Options of ``winml cache clean``."""

    older_than: float | None = declare(
        None, OUTPUT, minimum=0, metavar="DAYS", default_words="all builds", is_common=True
    )
    """Remove only builds last written more than this many days ago."""


@dataclass(frozen=True, kw_only=True)
class _CleanPlan(Plan):
    """Plan of ``winml cache clean``."""

    contents: CacheContents
    """The builds to remove."""


def _plan_cleaning(request: _CleanRequest) -> _CleanPlan:
    """Return the plan with the builds to remove; removes nothing."""
    from winml.modelkit.builds.cache import list_cache

    days = request.older_than
    contents = list_cache(None if days is None else timedelta(days=min(days, _LONGEST_DAYS)))
    return _CleanPlan(
        verb="cache clean",
        reads=(),
        writes=(),
        steps=tuple(
            PlannedStep(
                "removing",
                f"{build.model or build.folder.name}: {size_words(build.size_bytes)}, last written "
                f"{build.written:%Y-%m-%d %H:%M}",
            )
            for build in contents.builds
        ),
        notes=(f"{size_words(contents.size_bytes)} in {contents.root}. Builds in use are skipped.",),
        removes=tuple(build.folder for build in contents.builds),
        contents=contents,
    )


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
def _list_builds(**options: object) -> None:
    """List the builds in the cache, latest first, each with the disk space that its removal frees."""
    from winml.modelkit.builds.cache import list_cache

    contents = list_cache()
    show_result(contents.as_record(), options, lambda: contents_document(contents))


@command.command(name="clean", cls=WinMLCommand)
@request_options(_CleanRequest)
@result_options(quiet="")
def _clean_cache(**options: Any) -> None:
    """Remove all builds, or old ones, from the cache. Builds in use are skipped."""
    plan = _plan_cleaning(_CleanRequest(**stated_fields(_CleanRequest, options)))
    end_dry_run(plan, options)
    from winml.modelkit.builds.cache import remove_builds

    removed = remove_builds(plan.contents)
    show_result(removed.as_record(), options, lambda: _removed_document(removed))


def contents_document(contents: CacheContents) -> doc.Document:
    """Describe each build and the whole cache."""
    total = f"{count_noun(len(contents.builds), 'build')}, {size_words(contents.size_bytes)} in {contents.root}"
    return doc.Document([_builds_table(contents), doc.Paragraph(total)])


def _removed_document(contents: CacheContents) -> doc.Document:
    """Describe the removed builds, the builds in use, and the freed space."""
    freed = f"{size_words(contents.size_bytes)} in {contents.root}"
    return doc.Document(
        [
            _builds_table(contents),
            doc.Fields([("stays", f"{build.folder.name}: somebody builds in it") for build in contents.in_use]),
            doc.Paragraph(f"{count_noun(len(contents.builds), 'build')} removed, {freed}"),
        ]
    )


def _builds_table(contents: CacheContents) -> doc.Table:
    return doc.Table(
        doc.columns("written", ("size", "bytes"), ("folder", "name"), "model", "state"),
        [
            [
                f"{build.written:%Y-%m-%d %H:%M}",
                build.size_bytes,
                build.folder.name,
                build.model or "?",
                "finished" if build.is_finished else "unfinished",
            ]
            for build in contents.builds
        ],
    )
