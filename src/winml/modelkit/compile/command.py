"""Command ``winml compile``: compiles an ONNX file for one execution provider, and preserves its tags."""

from __future__ import annotations

from typing import Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import run_verb
from winml.modelkit.cli._options import option, request_options, result_options
from winml.modelkit.cli._requests import read_request
from winml.modelkit.cli._streams import show_result
from winml.modelkit.compile.verb import CompileRequest
from winml.modelkit.fields import DEVICE


@click.command(name="compile", cls=WinMLCommand)
@request_options(CompileRequest)
@option(
    "list_",
    bool,
    "List the execution providers that compile models, and state for each if it is installed.",
    DEVICE,
    spelling="--list",
    is_common=True,
)
@result_options(verbose="Show more detail: every module and node.")
def command(**options: Any) -> None:
    """Compile an ONNX model for an execution provider. Tags are preserved.

    If the provider compiles, each compiled subgraph becomes one EPContext node that lists its modules. For cpu, the
    file contains the graph as ONNX Runtime optimizes it, so that sessions are created faster.

    Exit codes: 0 success, 1 invalid files, 2 usage error, 3 the result does not load, or its outputs differ from those
    of the source beyond tolerance.

    Examples:
      winml compile model.onnx -o fast.onnx --ep cpu
      winml compile model.onnx -o npu.onnx --ep qnn
      winml compile built -o built-cpu --ep cpu
      winml compile model.onnx -o npu.onnx --ep qnn --embed --ep-options htp_arch=73
      winml compile --list
    """
    if options["list_"]:
        _list_providers(options)
        return
    run_verb(read_request(CompileRequest, options), options)


def _list_providers(options: dict[str, object]) -> None:
    """Print every execution provider that compiles models, as a table or as JSON."""
    from winml.modelkit.compile.file_compilation import compilable_providers
    from winml.modelkit.compile.table import compilable_providers_document

    providers = compilable_providers()
    record = {"execution_providers": [provider.as_record() for provider in providers]}
    show_result(record, options, lambda: compilable_providers_document(providers), is_answer=True)
