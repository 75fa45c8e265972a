"""Prints the machine, and what is in the cache."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from winml.modelkit.report.terminal import label, print_rows
from winml.modelkit.results.cache_contents import CacheContents, CachedBuild
from winml.modelkit.runtime.machine import Machine
from winml.modelkit.words import size_words

__all__ = [
    "print_contents",
    "print_machine",
    "print_removed",
]


def print_machine(machine: Machine, console: Console) -> None:
    """Print one row per fact about the machine."""
    print_rows(_machine_rows(machine), console)


def _machine_rows(machine: Machine) -> Iterator[tuple[str, str]]:
    for name, version in machine.versions.items():
        yield name, version or "not installed"
    yield "system", f"{machine.system} ({machine.architecture})"
    cores = {"physical": machine.physical_cores, "logical": machine.logical_cores, "usable": machine.usable_cores}
    counts = ", ".join(f"{count} {name}" for name, count in cores.items() if count is not None)
    yield "processor", f"{machine.processor} · cores: {counts or 'not known'}"
    dot_products = {True: "yes", False: "no", None: "not known"}[machine.has_integer_dot_products]
    yield "8-bit dot products", f"{dot_products} (VNNI, or those of Arm: what makes int8 fast)"
    yield "memory", f"{size_words(machine.total_bytes)}, {size_words(machine.available_bytes)} of it available"
    for device in machine.devices:
        device_name = f" {device.name}" if device.name else ""
        yield "device", f"{device.kind} of {device.vendor or 'an unknown maker'}{device_name}, by {device.provider}"
    for provider in machine.providers:
        if provider.is_present:
            yield "has", f"{provider.short} ({provider.name})"
    for provider in machine.providers:
        if not provider.is_present:
            yield "can have", f'{provider.short} ({", ".join(provider.devices)}): pip install "{provider.package}"'
    yield from (("note", note) for note in machine.notes)


# --- Renders what is in the cache for a terminal.


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
