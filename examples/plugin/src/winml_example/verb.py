"""A verb: ``winml operators MODEL`` counts the operators of an ONNX file.

The module is imported for ``winml --help``, so it imports nothing heavy at its top.
"""

from __future__ import annotations

from pathlib import Path

import click

from winml.modelkit.extend import InputError, WinMLCommand, debug_option, format_option, print_json


@click.command(name="operators", cls=WinMLCommand)
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@format_option
@debug_option
def command(model: Path, format_: str, **_: object) -> None:
    """Count the operators of an ONNX file."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(model, load_external_data=False).graph
    except DecodeError as error:
        raise InputError(f"{model}: is no ONNX file") from error
    counts: dict[str, int] = {}
    for node in graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    if format_ == "json":
        print_json(counts)
        return
    for name, count in sorted(counts.items()):
        click.echo(f"{count:6d}  {name}")
