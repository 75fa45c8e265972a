"""``winml sys``: what a bug report needs to say about the machine."""

from __future__ import annotations

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._options import result_options
from winml.modelkit.cli._streams import show_result


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
    from winml.modelkit.builds.machine_table import machine_document

    show_result(machine.as_record(), options, lambda: machine_document(machine))
