"""``winml optimize``: makes an ONNX file cheaper with the same answer, and keeps its tags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import (
    file_or_folder,
    parts_record,
    print_parts,
    refuse_early_in_folder,
    transform_folder,
)
from winml.modelkit.cli._options import (
    NonEmptyPath,
    debug_option,
    format_option,
    functions_option,
    submodel_option,
    verbose_option,
)
from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._requests import config_option, read_build_config, sizes_by_name
from winml.modelkit.cli._streams import print_json, show_result, silence_library_warnings
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import OPTIMIZED_SUFFIX, optimized_path
from winml.modelkit.optimize.capabilities import CAPABILITIES, LEVEL_WORDS, LEVELS

if TYPE_CHECKING:
    from rich.console import Console

    from winml.modelkit.builds.found_models import FoundFolder
    from winml.modelkit.optimize.options import OptimizeOptions
    from winml.modelkit.progress import StepEvent
    from winml.modelkit.results.optimization_check import OptimizationCheck

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml optimize -m model.onnx -o fast.onnx --level full
  winml optimize -m model.onnx -o npu.onnx --level full --ep qnn
  winml optimize -m built -o built-fast --level full
  winml optimize -m model.onnx -o gelu.onnx --enable-gelu-fusion
  winml optimize -m model.onnx -o part.onnx --level full --module 'encoder.layer.0'
  winml optimize -m model.onnx -o model21.onnx --opset 21
  winml optimize -m model.onnx -o functions.onnx --functions classes
  winml optimize -m model.onnx --level full --check
  winml optimize --list
"""

_F = TypeVar("_F", bound=Callable[..., Any])

_NO_FLAGS: dict[str, None] = dict.fromkeys(CAPABILITIES)
"""Every capability as its level says."""


def _capability_options(command: _F) -> _F:
    """Add a pair of options per capability, in the order of the registry."""
    for entry in reversed(list(CAPABILITIES.values())):
        option = click.option(
            f"--enable-{entry.flag}/--disable-{entry.flag}", entry.name, default=None, help=f"{entry.words}."
        )
        command = option(command)
    return command


@click.command(name="optimize", cls=WinMLCommand, epilog=EPILOG)
@click.option("-m", "--model", type=NonEmptyPath(), help="ONNX file, or folder of a build; it stays as it is.")
@click.option(
    "-o",
    "--output",
    type=NonEmptyPath(),
    help=f"File to write; of a folder, the folder.  [default: <stem>{OPTIMIZED_SUFFIX}.onnx beside the input]",
)
@submodel_option
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help=f"How much is done by default; none where left out. {'; '.join(f'{k}: {v}' for k, v in LEVEL_WORDS.items())}.",
)
@click.option("--ep", metavar="NAME", help="Execution provider it is for: leaves out what it has no operators for.")
@click.option("--opset", type=click.IntRange(min=7), help="Convert to this version of ONNX's operators first.")
@click.option("--module", metavar="SELECTOR", multiple=True, help="The only modules that change, with all below them.")
@click.option(
    "--exclude",
    metavar="SELECTOR",
    multiple=True,
    help="Modules that change to the plain form only, and those below them.",
)
@config_option("A build config, or its optim section; options win over it.")
@click.option("--check", is_flag=True, help="Say what each capability would do, and where; write nothing.")
@click.option("--list", "list_", is_flag=True, help="List the capabilities, with what they do and where they are on.")
@_capability_options
@click.option(
    "--external-data/--no-external-data",
    default=None,
    help="Keep weights in a file of their own, or inside; by default large ones go outside, which loads faster.",
)
@functions_option
@click.option("--verify/--no-verify", default=True, help="Compare the result with the source in ONNX Runtime.")
@click.option(
    "--shape-config",
    metavar="JSON",
    help='Sizes to compare at, such as {"batch_size": 4}, by name or input:axis; else some are tried; a file or text.',
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it is there already.")
@verbose_option("Tell more: the change of every module.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Make an ONNX file cheaper with the same answer; its nodes go on naming their modules.

    Without a level or an enabled capability, the graph is only brought into its plain form; a file that is in it
    already gets the output as a second name (a hard link, or a copy where links fail). Exit codes: 0 done, 1 the files
    are wrong, 2 wrong usage, 3 the result does not answer as the source does.
    """
    requested = _optimize_options(options)
    if options["list_"]:
        _list_capabilities(requested, options)
        return
    options, folder = file_or_folder(options)
    if options["check"]:
        _check_files(requested, options, folder)
    elif folder is not None:
        _optimize_folder(folder, requested, {**options, "output": options["output"] or _default_folder(folder.path)})
    else:
        _optimize_file(requested, {**options, "output": _refuse_early(options)})


def _optimize_options(options: dict[str, Any]) -> OptimizeOptions:
    """Return what is asked for: the config's section, with options of the command on top.

    Raises:
        UsageError: an execution provider nobody knows, or one that lacks the operators of an enabled capability.
        ConfigError: the config is wrong.
    """
    from winml.modelkit.optimize.options import OptimizeOptions
    from winml.modelkit.options import parse_options

    names = ("level", "ep", "opset", "module", "exclude", *CAPABILITIES)
    given = {name: options[name] for name in names if options[name] not in (None, ())}
    optim = read_build_config(options["config"], section="optim").optim if options["config"] is not None else None
    section = optim.model_dump(exclude_none=True) if optim is not None else {}
    requested = parse_options(OptimizeOptions, {**section, **given}, "options")
    list(requested.enabled())
    if not options["list_"]:
        requested.refuse_whole_graph()
    return requested


def _list_capabilities(requested: OptimizeOptions, options: dict[str, Any]) -> None:
    by_level = {level: requested.model_copy(update={**_NO_FLAGS, "level": level}) for level in LEVELS}
    defaults = {
        entry.name: {level: by_level[level].is_enabled(entry) for level in LEVELS} for entry in CAPABILITIES.values()
    }
    if options["format_"] == "json":
        rows = [
            {
                "name": entry.name,
                "does": entry.words,
                "on_from": entry.level,
                "defaults": defaults[entry.name],
                "execution_providers": list(entry.providers),
                "standard_operators": bool(entry.transformers),
                "engine": entry.engine,
                "enabled": requested.is_enabled(entry),
            }
            for entry in CAPABILITIES.values()
        ]
        print_json({"level": requested.level, "ep": requested.ep, "capabilities": rows})
        return
    from winml.modelkit.report.terminal import TextTable, console_for

    # At the level none nothing is on that is not enabled by name.
    levels = LEVELS[1:]
    table = TextTable(("capability", "on", *levels, "suits", "does"))
    for entry in CAPABILITIES.values():
        suits = ", ".join(entry.providers) or "any"
        suits += " (others: with operators of ONNX)" if entry.providers and entry.transformers else ""
        on = ["on" if defaults[entry.name][level] else "off" for level in levels]
        table.add(entry.name, "yes" if requested.is_enabled(entry) else "", *on, suits, entry.words)
    table.print(console_for(sys.stdout))


def _refuse_early(options: dict[str, Any]) -> Path:
    """Return the file to write; refuse what paths show to be wrong, before a model library is imported."""
    from winml.modelkit.graph.files.output_files import ExportPaths, refuse_existing, refuse_inputs

    model: Path | None = options["model"]
    if model is None:
        raise UsageError("no model was given", hint="Give one with --model; --list shows what can be done.")
    output: Path = options["output"] or optimized_path(model)
    paths = ExportPaths.for_output(output, with_sidecar=False, with_report=False)
    refuse_inputs([paths.model], [model])
    refuse_existing([paths.model], overwrite=options["overwrite"])
    if not model.is_file():
        raise UsageError(f"{model}: no such file", hint="Give the path of an ONNX file.")
    sizes_by_name({**options, "batch_size": None})
    return output


def _default_folder(folder: Path) -> Path:
    """Return the folder that is written where none is named: beside the one that is read."""
    named = folder if folder.name else folder.absolute()  # the working directory is "."
    return named.with_name(f"{named.name}{OPTIMIZED_SUFFIX}")


def _check_files(requested: OptimizeOptions, options: dict[str, Any], folder: FoundFolder | None) -> None:
    model: Path | None = options["model"]
    for name in ("output", "overwrite", "shape_config", "external_data"):
        if options[name]:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} is about a file, and --check writes none", hint="Leave one of them out.")
    if model is None or (folder is None and not model.is_file()):
        problem = "no model was given" if model is None else f"{model}: no such file"
        raise UsageError(problem, hint="Give the path of an ONNX file with --model.")
    paths = {"": model} if folder is None else {part: folder.parts[part] for part in folder.chosen}
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.cli._streams import library_output_to_stderr
    from winml.modelkit.flows.optimize_check import check_optimization

    with library_output_to_stderr():
        checks = {part: check_optimization(path, options=requested) for part, path in paths.items()}
    from winml.modelkit.report.optimization import print_optimization_check

    def render(check: OptimizationCheck, console: Console) -> None:
        print_optimization_check(check, console, verbose=options["verbose"])

    if len(checks) == 1:
        (check,) = checks.values()
        show_result(check.as_record(), options, lambda console: render(check, console))
        return
    record = parts_record({"target": str(model)}, {part: check.as_record() for part, check in checks.items()})
    show_result(record, options, lambda console: print_parts(checks, render, console))


def _optimize_folder(folder: FoundFolder, requested: OptimizeOptions, options: dict[str, Any]) -> None:
    refuse_early_in_folder(folder, options)
    sizes = sizes_by_name({**options, "batch_size": None})
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.flows.graph_file import GraphFileTask
    from winml.modelkit.flows.optimize import optimize_file
    from winml.modelkit.report.optimization import print_optimization
    from winml.modelkit.results.optimized_model import OptimizedFile

    def work(task: GraphFileTask, asked: OptimizeOptions, on_step: Callable[[StepEvent], None] | None) -> OptimizedFile:
        return optimize_file(task, asked, on_step, sizes=sizes)

    def render(result: OptimizedFile, console: Console) -> None:
        print_optimization(result, console, verbose=options["verbose"])

    transform_folder(folder, requested, options, work, render)


def _optimize_file(requested: OptimizeOptions, options: dict[str, Any]) -> None:
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.cli._streams import library_output_to_stderr
    from winml.modelkit.flows.optimize import optimize_onnx

    with library_output_to_stderr():
        result = optimize_onnx(
            options["model"],
            options["output"],
            options=requested,
            overwrite=options["overwrite"],
            verify=options["verify"],
            external_data=options["external_data"],
            sizes=sizes_by_name({**options, "batch_size": None}),
            functions=options["functions"],
            on_step=None if options["quiet"] else show_step,
        )
    from winml.modelkit.report.optimization import print_optimization

    show_result(
        result.as_record(), options, lambda console: print_optimization(result, console, verbose=options["verbose"])
    )
