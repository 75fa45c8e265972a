"""Renders what is in the cache for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from winml.modelkit.results.cache_contents import CacheContents, CachedBuild
from winml.modelkit.words import size_words

__all__ = ["listed_lines", "removed_lines"]


def listed_lines(contents: CacheContents) -> Iterator[str]:
    """Yield a line for each build, and one for all of the cache."""
    for build in contents.builds:
        yield _build_line(build)
    yield f"{_count_words(contents.builds)}, {size_words(contents.size_bytes)} in {contents.root}"


def removed_lines(contents: CacheContents, *, is_rehearsal: bool) -> Iterator[str]:
    """Yield a line for each build that was removed, or would be, those that stay, and what was freed."""
    for build in contents.builds:
        yield _build_line(build)
    for build in contents.in_use:
        yield f"stays, somebody builds in it: {build.folder.name}"
    verb = "would be removed" if is_rehearsal else "removed"
    yield f"{_count_words(contents.builds)} {verb}, {size_words(contents.size_bytes)} in {contents.root}"


def _build_line(build: CachedBuild) -> str:
    state = "" if build.is_finished else "  unfinished"
    model = build.model or "?"
    return f"{build.written:%Y-%m-%d %H:%M}  {size_words(build.size_bytes):>9}  {build.folder.name}  {model}{state}"


def _count_words(builds: tuple[CachedBuild, ...]) -> str:
    return f"{len(builds)} build{'' if len(builds) == 1 else 's'}"
