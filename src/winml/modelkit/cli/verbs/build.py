"""``winml build``: a model becomes a folder with everything that was made of it, stage by stage."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.builds.layouts.layout import LAYOUTS
from winml.modelkit.cli._errors import NEGATIVE_ANSWER, Interrupted, WinMLCommand
from winml.modelkit.cli._measuring import parse_ep_options
from winml.modelkit.cli._options import (
    NonEmptyPath,
    dynamic_options,
    input_options,
    model_option,
    output_options,
    random_options,
    source_options,
    weight_options,
)
from winml.modelkit.cli._requests import (
    config_option,
    configured_options,
    model_request,
    read_build_config,
    told_sections,
    with_sizes,
)
from winml.modelkit.cli._streams import library_output_to_stderr, print_json, silence_library_warnings, tell
from winml.modelkit.cli.verbs._quantize_options import filled_section, quantization_options, refuse_flags_without_stage
from winml.modelkit.errors import UsageError, told_as
from winml.modelkit.optimize.capabilities import LEVELS
from winml.modelkit.quantize.options import PRECISIONS

if TYPE_CHECKING:
    from winml.modelkit.builds.config import CompileSection, WinMLBuildConfig
    from winml.modelkit.builds.plan import BuildPlan
    from winml.modelkit.progress import StepEvent
    from winml.modelkit.results.build_result import BuildResult

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml build -m sentence-transformers/all-MiniLM-L6-v2 -o built --level basic
  winml config -m ./checkpoint -o config.json && winml build -c config.json -o built
  winml build -m model.onnx -o built --level extended --ep dml
  winml build -m ./checkpoint -o built --ep qnn --ep-options soc_model=60
  winml build -m ./checkpoint -o built --precision int8 --exclude BertPooler
  winml build -m ./checkpoint --use-cache --format json
"""

SWITCHES = {"optimize": "optim", "quant": "quant", "compile": "compile"}
"""Option that leaves a stage out → section of the config."""

_PLACE = {"--ep": "ep", "--ep-options": "ep_options"}
"""Option that says where the model is to run → key of the section ``compile`` that says the same."""


@click.command(name="build", cls=WinMLCommand, epilog=EPILOG)
@model_option(
    required=False,
    help="Hub id, checkpoint folder, config.json, file.py:factory, package.module:factory, or an .onnx file.",
)
@config_option("What to do, as winml config writes it; a file or text. Options win over it.")
@click.option("-o", "--output", type=NonEmptyPath(), help="The folder to build in.")
@click.option("--use-cache", is_flag=True, help="Build in the cache: one folder for each model and config.")
@click.option("--rebuild", is_flag=True, help="Run every stage again; files no build wrote stay.")
@click.option("--optimize/--no-optimize", default=True, help="Optimize the graph, or not.  [default: optimize]")
@click.option("--quant/--no-quant", default=True, help="Quantize where a precision is asked for, or not.")
@click.option(
    "--compile/--no-compile",
    default=None,
    help="Compile the result, or not.  [default: where --ep or compile.ep of the config names a provider]",
)
@click.option("--level", type=click.Choice(LEVELS), help="How much the optimizer does; winml optimize --list.")
@quantization_options([*PRECISIONS, "auto"], unset="as the model has them", auto="; auto: by the device in the config")
@click.option(
    "--layout",
    type=click.Choice(tuple(LAYOUTS)),
    help="Lay the folder out for this tool, which then opens it unchanged.",
)
@click.option(
    "--deploy-only",
    is_flag=True,
    help="Leave in the folder only what is deployed: the model, and the files its readers look for beside it.",
)
@click.option(
    "--ep", metavar="NAME", help="Execution provider the model is for, and compiled for where it compiles, such as qnn."
)
@click.option("--ep-options", multiple=True, metavar="KEY=VALUE", help="Option of the provider; repeatable.")
@click.option(
    "--dynamo/--no-dynamo",
    default=None,
    help="Use torch's dynamo exporter, or TorchScript.  [default: TorchScript, and dynamo for what it cannot do]",
)
@click.option(
    "--skip-pre-normalization", is_flag=True, help="Leave an .onnx file as it is where no optimization is asked for."
)
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Compare what each stage makes with what it was made from, or not.  [default: verify]",
)
@click.option(
    "--tokenizer/--no-tokenizer",
    default=True,
    help="Copy config, tokenizer and processor files of the checkpoint into the folder, or not.  [default: copy]",
)
@source_options
@weight_options
@random_options
@input_options
@dynamic_options
@output_options
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Build a model: export, optimize, quantize, compile it; one ONNX file for each stage, and model.onnx for the last.

    Stages whose result is there already are not run again. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a stage's
    result does not answer as its input does, or the result misses a limit of the eval section.
    """
    plan, words = _plan_build(context, options)
    kept: list[str] = []
    try:
        with told_as(words):
            result = _run_build(plan, options, kept)
    except KeyboardInterrupt:
        ending = f"kept: {', '.join(kept)}; the same command goes on from there" if kept else "no stage had ended"
        raise Interrupted(ending) from None
    _show_result(result, options)
    if result.evaluation is not None and not result.evaluation.is_good_enough:
        context.exit(NEGATIVE_ANSWER)


def _plan_build(context: click.Context, options: dict[str, Any]) -> tuple[BuildPlan, dict[str, str]]:
    """Return what is to be built, and for messages which keys of the config stand in place of options."""
    from winml.modelkit.builds.plan import is_onnx_path, plan_build, refuse_sizes

    if (options["output"] is None) == (not options["use_cache"]):
        both = "-o and --use-cache name two places" if options["use_cache"] else "nothing says where to build"
        raise UsageError(both, hint="Give a folder with -o, or --use-cache.")
    config = read_build_config(options["config"])
    given = configured_options(context, options, config)
    model = given.options["model"]
    if not model:
        raise UsageError("no model was given", hint="Give one with -m, or a config whose loader names one.")
    # Before its text is read: the names of an ONNX file are not the keys of a checkpoint.
    for option in ("shape_config", "batch_size"):
        if is_onnx_path(model) and options[option]:
            refuse_sizes(model, f"--{option.replace('_', '-')}", str(options[option]))
    sections_off = {section: f"--no-{name}" for name, section in SWITCHES.items() if options[name] is False}
    place = {
        option: f"compile.{key}"
        for option, key in _PLACE.items()
        if not options[key] and config.compile is not None and getattr(config.compile, key)
    }
    words = {**given.words, **place, **told_sections(config.export, options, "export.{}")}
    with told_as(words):
        plan = plan_build(
            _with_flags(config, options, sections_off),
            model_request(given.options),
            switched_off=sections_off,
            skip_pre_normalization=options["skip_pre_normalization"],
            verify=options["verify"],
            with_companions=options["tokenizer"],
            deploy_only=options["deploy_only"],
        )
        _refuse_early(plan, options)
    return plan, words


def _with_flags(
    config: WinMLBuildConfig, options: Mapping[str, Any], sections_off: Mapping[str, str]
) -> WinMLBuildConfig:
    """Return the config with what the options say of stages; an option wins.

    Raises:
        UsageError: an option speaks of a stage that is left out.
    """
    from winml.modelkit.runtime.execution_providers import find_execution_provider, short_name

    sections: dict[str, dict[str, Any]] = {"export": {}, "optim": {}, "quant": {}, "compile": {}}
    if options["level"] is not None:
        if "optim" in sections_off:
            raise UsageError("--level has no meaning with --no-optimize", hint="Leave one of them out.")
        sections["optim"]["level"] = options["level"]
    if options["ep"] is not None:
        provider = short_name(find_execution_provider(options["ep"]).name)
        for given in sections.values():
            given["ep"] = provider
    if options["ep_options"]:
        sections["compile"]["ep_options"] = parse_ep_options(options["ep_options"])
    if options["dynamo"] is not None:
        sections["export"]["exporter"] = "dynamo" if options["dynamo"] else "torchscript"
    if options["allow_dynamic"]:
        sections["export"]["allow_dynamic"] = True
    changed: dict[str, Any] = {"export": with_sizes(config.export, options)} if config.export is not None else {}
    if options["compile"] or options["ep_options"]:
        changed["compile"] = _asked_compilation(config, options)
    if "quant" in sections_off:
        refuse_flags_without_stage(options)
    changed["quant"] = filled_section(config.quant, options)
    if options["layout"] is not None:
        changed["layout"] = options["layout"]
    for name, given in sections.items():
        section = changed.get(name, getattr(config, name))
        if given and section is not None:
            # Not made anew: what was left out of the config is to stay left out.
            changed[name] = section.model_copy(update=given)
    return config.model_copy(update=changed)


def _asked_compilation(config: WinMLBuildConfig, options: Mapping[str, Any]) -> CompileSection:
    """Return the section of the stage that options ask for.

    Raises:
        UsageError: the stage is left out, or nothing names a provider that it can compile for.
    """
    from winml.modelkit.builds.config import CompileSection
    from winml.modelkit.runtime.execution_providers import refuse_uncompilable

    flag = "--compile" if options["compile"] else "--ep-options"
    if options["compile"] is False:
        raise UsageError(f"{flag} has no meaning with --no-compile", hint="Leave one of them out.")
    section = config.compile or CompileSection()
    ep = options["ep"] or section.ep
    if ep is None:
        raise UsageError(
            f"{flag}: no execution provider is named to compile for",
            hint="Give one with --ep; winml compile --list shows which there are.",
        )
    refuse_uncompilable(ep)
    return section


def _refuse_early(plan: BuildPlan, options: Mapping[str, Any]) -> None:
    """Refuse what can be refused by looking at names and paths, before anything heavy is imported."""
    from winml.modelkit.builds.folder import BuildFolder, refuse_input_as_output
    from winml.modelkit.builds.plan import refuse_missing_compiler
    from winml.modelkit.builds.stages import STAGES, names_of
    from winml.modelkit.load.request import resolve_source
    from winml.modelkit.runtime.execution_providers import refuse_dynamic

    refuse_missing_compiler(plan, [option for option, key in _PLACE.items() if options[key]])
    places = [plan.onnx_path] if plan.onnx_path is not None else []
    if plan.config.export is not None:
        config, request = plan.config.export, plan.request
        refuse_dynamic(config.ep, is_dynamic=request.is_dynamic, allow_dynamic=config.allow_dynamic)
        source = resolve_source(request)
        places += [source.path] if source.path is not None else []
    if options["output"] is not None:
        names = names_of(STAGES, config=plan.config)
        refuse_input_as_output(options["output"], places, names)
        BuildFolder(options["output"], names, is_cache=False)


def _run_build(plan: BuildPlan, options: Mapping[str, Any], kept: list[str]) -> BuildResult:
    """Build; the names of stages whose results are there go to ``kept``."""
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.builds.build import BuildListener, run_build
    from winml.modelkit.builds.build_model import build_in_cache
    from winml.modelkit.builds.open_sizes import build_most_open, says_nothing_of_sizes
    from winml.modelkit.cli._progress import show_step

    def show_finished(event: StepEvent) -> None:
        # The line of the running stage would stand between those of its steps.
        if event.finished is not None:
            show_step(event)

    verbose, quiet = options["verbose"], options["quiet"]
    listener = BuildListener(
        on_stage=None if quiet else show_finished if verbose else show_step,
        on_step=show_step if verbose and not quiet else None,
        on_kept=kept.append,
        tell=tell,
    )

    def build(planned: BuildPlan) -> BuildResult:
        if options["use_cache"]:
            return build_in_cache(planned, rebuild=options["rebuild"], listener=listener)
        return run_build(planned, options["output"], rebuild=options["rebuild"], listener=listener)

    with library_output_to_stderr():
        # Whoever opens such a folder gives rows of any number and length.
        if plan.config.layout is not None and says_nothing_of_sizes(plan):
            return build_most_open(plan, build)
        return build(plan)


def _show_result(result: BuildResult, options: Mapping[str, Any]) -> None:
    if options["format_"] == "json":
        print_json(result.as_record())
        return
    if options["quiet"]:
        return
    from winml.modelkit.report.terminal import console_for, print_rows
    from winml.modelkit.results.build_result import build_lines

    print_rows(build_lines(result), console_for(sys.stdout), width=10)
