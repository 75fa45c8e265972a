"""What this machine has, and what is in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from winml.modelkit.ort.machine import Machine
from winml.modelkit.report import document as doc
from winml.modelkit.words import count_noun, size_words

if TYPE_CHECKING:
    from winml.modelkit.builds.cache import CacheContents


def machine_document(machine: Machine) -> doc.Document:
    """Describe versions, processor, memory, devices and execution providers."""
    return doc.Document([doc.Fields(list(_machine_fields(machine)))])


def _machine_fields(machine: Machine) -> Iterator[doc.Field]:
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
    for plug_in in machine.plug_ins:
        state = f"cannot be used: {plug_in.problem}" if plug_in.problem else plug_in.target
        yield "plug-in", f"{plug_in.name} ({plug_in.group}) of {plug_in.package} {plug_in.version}: {state}"
    yield from doc.note_fields(machine.notes)


def contents_document(contents: CacheContents) -> doc.Document:
    """Describe each build, and all of the cache."""
    total = f"{count_noun(len(contents.builds), 'build')}, {size_words(contents.size_bytes)} in {contents.root}"
    return doc.Document([_builds_table(contents), doc.Paragraph(total)])


def removed_document(contents: CacheContents) -> doc.Document:
    """Describe each build that was removed, those that stay, and what was freed."""
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
