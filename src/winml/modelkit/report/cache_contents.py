"""Renders what is in the cache for a terminal."""

from __future__ import annotations

from rich.console import Console

from winml.modelkit.report.terminal import label
from winml.modelkit.results.cache_contents import CacheContents, CachedBuild
from winml.modelkit.words import size_words

__all__ = ["print_contents", "print_removed"]


def print_contents(contents: CacheContents, console: Console) -> None:
    """Print a line for each build, and one for all of the cache."""
    _print_builds(contents, console)
    _print_line(f"{_count_words(contents.builds)}, {size_words(contents.size_bytes)} in {contents.root}", console)


def print_removed(contents: CacheContents, console: Console, *, is_rehearsal: bool) -> None:
    """Print a line for each build that was removed, or would be, those that stay, and what was freed."""
    _print_builds(contents, console)
    for build in contents.in_use:
        _print_line(f"stays, somebody builds in it: {build.folder.name}", console)
    verb = "would be removed" if is_rehearsal else "removed"
    freed = size_words(contents.size_bytes)
    _print_line(f"{_count_words(contents.builds)} {verb}, {freed} in {contents.root}", console)


def _print_builds(contents: CacheContents, console: Console) -> None:
    for build in contents.builds:
        _print_line(_build_line(build), console)


def _print_line(line: str, console: Console) -> None:
    console.print(label(line), soft_wrap=True)


def _build_line(build: CachedBuild) -> str:
    state = "" if build.is_finished else "  unfinished"
    model = build.model or "?"
    return f"{build.written:%Y-%m-%d %H:%M}  {size_words(build.size_bytes):>9}  {build.folder.name}  {model}{state}"


def _count_words(builds: tuple[CachedBuild, ...]) -> str:
    return f"{len(builds)} build{'' if len(builds) == 1 else 's'}"
