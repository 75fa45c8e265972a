"""Command ``winml optimize``: optimizes an ONNX file with equal outputs, and preserves tags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import run_verb, show_parts
from winml.modelkit.cli._options import option, request_options, result_options
from winml.modelkit.cli._requests import read_request
from winml.modelkit.cli._streams import show_result
from winml.modelkit.errors import UsageError
from winml.modelkit.optimize.capabilities import CAPABILITIES, LEVELS
from winml.modelkit.optimize.declared_options import OPTIMIZATION
from winml.modelkit.optimize.verb import OptimizeRequest

if TYPE_CHECKING:
    from winml.modelkit.optimize.options import OptimizeOptions

_NO_FLAGS: dict[str, None] = dict.fromkeys(CAPABILITIES)
"""Every capability as its level says."""


@click.command(name="optimize", cls=WinMLCommand)
@request_options(OptimizeRequest)
@option(
    "check", bool, "Show what each optimization would change, by module. Writes nothing.", OPTIMIZATION, is_common=True
)
@option(
    "list_",
    bool,
    "List the optimizations, with level and execution providers.",
    OPTIMIZATION,
    spelling="--list",
    is_common=True,
)
@result_options(verbose="Show more detail: the changes of every module.")
def command(**options: Any) -> None:
    """Optimize an ONNX model without changing its outputs. Tags are preserved.

    Without --level or an enabled optimization, the graph is only normalized. A normalized source is copied.

    Exit codes: 0 success, 1 invalid files, 2 usage error, 3 the outputs differ from the source beyond tolerance.

    Examples:
      winml optimize model.onnx -o fast.onnx --level full
      winml optimize model.onnx -o npu.onnx --level full --ep qnn
      winml optimize built -o built-fast --level full
      winml optimize model.onnx -o gelu.onnx --enable-gelu-fusion
      winml optimize model.onnx -o part.onnx --level full --module 'encoder.layer.0'
      winml optimize model.onnx -o model21.onnx --opset 21
      winml optimize model.onnx -o functions.onnx --functions classes
      winml optimize model.onnx --level full --check
      winml optimize --list
    """
    request = read_request(OptimizeRequest, options)
    if options["list_"]:
        _list_capabilities(request.options, options)
    elif options["check"]:
        _check_files(request, options)
    else:
        run_verb(request, options)


def _list_capabilities(requested: OptimizeOptions, options: dict[str, object]) -> None:
    """Print all capabilities with levels and providers, as a table or as JSON."""
    by_level = {level: requested.model_copy(update={**_NO_FLAGS, "level": level}) for level in LEVELS}
    defaults = {
        entry.name: {level: by_level[level].is_enabled(entry) for level in LEVELS} for entry in CAPABILITIES.values()
    }
    is_standard = requested.operators == "standard"
    rows = [
        {
            "name": entry.name,
            "does": entry.words,
            "on_from": entry.level,
            "defaults": defaults[entry.name],
            # Any provider runs operators of ONNX.
            "execution_providers": [] if is_standard and entry.standard_opset else list(entry.providers),
            "standard_operators": bool(entry.transformers),
            "engine": entry.engine,
            "enabled": requested.is_enabled(entry),
        }
        for entry in CAPABILITIES.values()
    ]
    from winml.modelkit.optimize.table import capabilities_document

    record = {"level": requested.level, "ep": requested.ep, "capabilities": rows}
    show_result(record, options, lambda: capabilities_document(rows), is_answer=True)


def _check_files(request: OptimizeRequest, options: Mapping[str, Any]) -> None:
    """Print the effect of each capability on the requested files; nothing is written.

    Raises:
        UsageError: an option has no effect with ``--check``, or a file does not exist.
    """
    for name, flag in (
        ("output", "--output"),
        ("overwrite", "--overwrite"),
        ("sizes", "--shape-config"),
        ("dataset", "--dataset"),
        ("input_data", "--input-data"),
        ("external_data", "--external-data"),
        ("dry_run", "--dry-run"),
    ):
        if options[name]:
            raise UsageError(f"{flag} has no effect with --check, which writes no file", hint="Omit one of them.")
    request.refuse_options()
    source = request.find_source()
    if isinstance(source, Path) and not source.is_file():
        raise UsageError(f"{source}: no such file", hint="Specify an ONNX file with --model.")
    paths = {"": source} if isinstance(source, Path) else {part: source.parts[part] for part in source.chosen}
    from winml.modelkit.cli._streams import library_output_to_stderr
    from winml.modelkit.optimize.file_optimization import check_optimization

    with library_output_to_stderr():
        checks = {part: check_optimization(path, options=request.options) for part, path in paths.items()}
    from winml.modelkit.optimize.table import optimization_check_document

    show_parts(checks, options, optimization_check_document, of_several=len(checks) > 1)
