"""Prints a machine in a terminal: versions, processor, memory, devices and execution providers."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from winml.modelkit.report.terminal import print_rows
from winml.modelkit.runtime.machine import Machine
from winml.modelkit.words import size_words

__all__ = ["print_machine"]


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
