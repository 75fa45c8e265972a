"""``winml compile``: compiles an ONNX file for one execution provider, and keeps its tags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import file_or_folder, refuse_early_in_folder, transform_folder
from winml.modelkit.cli._measuring import parse_ep_options, refuse_unknown_ep
from winml.modelkit.cli._options import (
    NonEmptyPath,
    debug_option,
    device_option,
    format_option,
    submodel_option,
    verbose_option,
)
from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._requests import config_option, read_build_config, sizes_by_name
from winml.modelkit.cli._streams import print_json, show_result, silence_library_warnings
from winml.modelkit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from winml.modelkit.builds.found_models import FoundFolder
    from winml.modelkit.progress import StepEvent

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml compile -m model.onnx -o fast.onnx --ep cpu
  winml compile -m model.onnx -o npu.onnx --ep qnn
  winml compile -m built -o built-cpu --ep cpu
  winml compile -m model.onnx -o npu.onnx --ep qnn --embed --ep-options htp_arch=73
  winml compile --list
"""


@click.command(name="compile", cls=WinMLCommand, epilog=EPILOG)
@click.option("-m", "--model", type=NonEmptyPath(), help="ONNX file, or folder of a build; it stays as it is.")
@click.option("-o", "--output", type=NonEmptyPath(), help="File to write; of a folder, the folder.")
@submodel_option
@click.option("--ep", metavar="NAME", help="Execution provider that compiles, such as qnn; see --list.")
@device_option("Kind of device; else the provider's default.")
@click.option("--ep-options", multiple=True, metavar="KEY=VALUE", help="Option of the provider; repeatable.")
@click.option("--embed/--no-embed", default=None, help="Keep what was compiled inside the file, or beside it.")
@click.option(
    "--min-sqnr",
    "min_sqnr_db",
    type=float,
    metavar="DB",
    help="Ratio of signal to error that every output has to reach, where the provider computes with fewer bits.",
)
@config_option("A build config, or its compile section; options win over it.")
@click.option(
    "--validate/--no-validate", "--verify/--no-verify", "verify", default=True,
    help="Open the result, run it on the provider and compare it with the source.",
)  # fmt: skip
@click.option("--shape-config", metavar="JSON", help="Sizes to compare at, by name or input:axis; a file or text.")
@click.option("--list", "list_", is_flag=True, help="List the providers that compile, and which are here.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it is there already.")
@verbose_option("Tell more: every module and node.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Compile an ONNX file for one execution provider; its nodes go on naming their modules.

    Where the provider compiles, each part it takes becomes one node that lists its modules. For cpu, the file holds
    the graph that ONNX Runtime runs, so that sessions open faster. Exit codes: 0 done, 1 the files are wrong, 2 wrong
    usage, 3 the result does not load, or does not answer as the source does.
    """
    if options["list_"]:
        _list_providers(options)
        return
    options, folder = file_or_folder(options)
    options = _refuse_early(options, folder)
    silence_library_warnings(debug=options["debug"])
    if folder is not None:
        _compile_folder(folder, options)
    else:
        _compile_file(options)


def _list_providers(options: dict[str, Any]) -> None:
    from winml.modelkit.flows.compile import compilable_providers

    providers = compilable_providers()
    if options["format_"] == "json":
        print_json({"execution_providers": [item.as_record() for item in providers]})
        return
    from winml.modelkit.report.files import print_compilable_providers
    from winml.modelkit.report.terminal import console_for

    print_compilable_providers(providers, console_for(sys.stdout))


def _refuse_early(options: dict[str, Any], folder: FoundFolder | None) -> dict[str, Any]:
    """Return the options with what the config says; refuse what they show to be wrong, before anything is read."""
    from winml.modelkit.compile.options import CompileOptions
    from winml.modelkit.graph.files.output_files import ExportPaths, refuse_existing, refuse_inputs
    from winml.modelkit.options import parse_options

    model: Path | None = options["model"]
    if model is None or options["output"] is None:
        missing = "model" if model is None else "output"
        raise UsageError(f"no {missing} was given", hint=f"Give one with --{missing}; --list shows the providers.")
    given = {name: options[name] for name in ("ep", "device", "embed", "min_sqnr_db") if options[name] is not None}
    if options["ep_options"]:
        given["ep_options"] = parse_ep_options(options["ep_options"])
    section = None
    if options["config"] is not None:
        section = read_build_config(options["config"], section="compile").compile
    asked = {**(section.model_dump(exclude_none=True) if section is not None else {}), **given}
    requested = parse_options(CompileOptions, asked, "options")
    if requested.ep is None:
        raise UsageError("no execution provider was given", hint="Give one with --ep; --list shows which there are.")
    refuse_unknown_ep(requested.ep)
    if folder is not None:
        refuse_early_in_folder(folder, options)
    else:
        paths = ExportPaths.for_output(options["output"], with_sidecar=False, with_report=False)
        refuse_inputs([paths.model], [model])
        refuse_existing([paths.model], overwrite=options["overwrite"])
        if not model.is_file():
            raise UsageError(f"{model}: no such file", hint="Give the path of an ONNX file.")
    sizes = sizes_by_name({**options, "batch_size": None})
    return {**options, "requested": requested, "sizes": sizes}


def _compile_folder(folder: FoundFolder, options: dict[str, Any]) -> None:
    from winml.modelkit.compile.options import CompileOptions
    from winml.modelkit.flows.compile import compile_file
    from winml.modelkit.flows.graph_file import GraphFileTask
    from winml.modelkit.report.files import print_compilation
    from winml.modelkit.results.compiled_model import CompiledFile

    def work(task: GraphFileTask, asked: CompileOptions, on_step: Callable[[StepEvent], None] | None) -> CompiledFile:
        return compile_file(task, asked, on_step, sizes=options["sizes"])

    def render(result: CompiledFile, console: Console) -> None:
        print_compilation(result, console, verbose=options["verbose"])

    transform_folder(folder, options["requested"], options, work, render)


def _compile_file(options: dict[str, Any]) -> None:
    from winml.modelkit.cli._streams import library_output_to_stderr
    from winml.modelkit.flows.compile import compile_onnx

    with library_output_to_stderr():
        result = compile_onnx(
            options["model"],
            options["output"],
            options=options["requested"],
            overwrite=options["overwrite"],
            verify=options["verify"],
            sizes=options["sizes"],
            on_step=None if options["quiet"] else show_step,
        )
    from winml.modelkit.report.files import print_compilation

    show_result(
        result.as_record(), options, lambda console: print_compilation(result, console, verbose=options["verbose"])
    )
