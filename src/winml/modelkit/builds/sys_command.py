"""``winml sys``: what a bug report needs to say about the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._options import result_options
from winml.modelkit.cli._streams import show_result
from winml.modelkit.report import document as doc
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.ort.machine import Machine


@click.command(name="sys", cls=WinMLCommand)
@result_options(quiet="")
def command(**options: object) -> None:
    """Show versions, execution providers, devices and memory.

    The output is meant for bug reports. It contains no paths, user names or host names.

    Examples:
      winml sys
      winml sys --format json
    """
    from winml.modelkit.ort.machine import look_at_machine

    machine = look_at_machine()
    show_result(machine.as_record(), options, lambda: doc.Document([doc.Fields(list(_machine_fields(machine)))]))


def _machine_fields(machine: Machine) -> Iterator[doc.Field]:
    """Yield the label and text of each property of a machine."""
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
