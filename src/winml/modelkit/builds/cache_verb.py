"""What does ``winml cache clean`` do with a request? Removes builds from the cache, all of them or old ones."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from winml.modelkit.fields import OUTPUT, declare
from winml.modelkit.report.plan import Plan, PlannedStep
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.builds.cache_records import CacheContents

_LONGEST_DAYS = 1e6
"""Chosen: longer than any file is old, and no overflow of ``timedelta``."""


@dataclass(frozen=True, kw_only=True)
class CleanRequest:
    """What is requested of ``winml cache clean``."""

    older_than: float | None = declare(
        None, OUTPUT, minimum=0, metavar="DAYS", default_words="all builds", is_common=True
    )
    """Remove only builds last written more than this many days ago."""


@dataclass(frozen=True, kw_only=True)
class CleanPlan(Plan):
    """What cleaning would do."""

    contents: CacheContents
    """The builds that are requested to be removed."""


def plan_cleaning(request: CleanRequest) -> CleanPlan:
    """Return which builds would be removed. Nothing is removed."""
    from winml.modelkit.builds.cache import list_cache

    days = request.older_than
    contents = list_cache(None if days is None else timedelta(days=min(days, _LONGEST_DAYS)))
    return CleanPlan(
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


def run_cleaning(plan: CleanPlan) -> CacheContents:
    """Remove what a plan lists, and return what was removed.

    Raises:
        WriteError: a folder cannot be removed.
    """
    from winml.modelkit.builds.cache import remove_builds

    return remove_builds(plan.contents)
