"""``winml compare``: do two models answer alike, and which module is the first to part?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_ANSWER, WinMLCommand
from winml.modelkit.cli._options import (
    NonEmptyPath,
    columns_option,
    data_set_files,
    debug_option,
    format_option,
    requested_samples,
    split_option,
    verbose_option,
)
from winml.modelkit.cli._requests import sizes_by_name
from winml.modelkit.cli._streams import (
    json_text,
    library_output_to_stderr,
    refuse_outputs,
    show_result,
    silence_library_warnings,
    write_files,
)
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import ONLY_PART, part_path

if TYPE_CHECKING:
    from winml.modelkit.builds.compared_models import FoundPairs
    from winml.modelkit.results.comparison import ModelComparison

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml compare model.onnx int8.onnx
  winml compare ./checkpoint model.onnx --by-module
  winml compare model.onnx fp16.onnx --by-module --input-data sample.npz -o where.json
  winml compare model.onnx int8.onnx --by-module --depth 4 --report where.html
  winml compare model.onnx int8.onnx --dataset sentences.parquet --samples 32
  winml compare model.onnx int8.onnx --threshold 0.2
  winml compare ./checkpoint ./finetuned --by-module
  winml compare ./checkpoint int4.onnx --by-module --step 8
  winml compare built built_int8 --submodel decoder
"""

BY_MODULE_FILES = ("report", "node_data")
"""Those of modules; of several parts, each has one."""
ONLY_BY_MODULE = ("depth", *BY_MODULE_FILES)
VALUES = {"dataset": "--dataset", "input_data": "--input-data", "names": "--map", "step": "--step"}
"""Options that say what one graph is fed."""
MOST_SAMPLES = 8
"""Samples of a data set where no number is given. Chosen: as many as a quantized file is compared on."""


@click.command(name="compare", cls=WinMLCommand, epilog=EPILOG)
@click.argument("reference")
@click.argument("candidate")
@click.option("--by-module", is_flag=True, help="Compare every module, and name the first whose error is its own.")
@click.option("--depth", type=click.IntRange(min=1), help="With --by-module, levels of the module tree to show.")
@click.option("--threshold", type=click.FloatRange(min=0), help="Largest relative error of an output; else exit 3.")
@click.option("--input-data", metavar="FILE", help="Values for the inputs: an .npz file, or a folder of them.")
@click.option(
    "--shape-config",
    metavar="JSON",
    help='Sizes of open dimensions, such as {"batch_size": 4}, by name or input:axis; a file or text.',
)
@click.option("--dataset", metavar="DATA", help="Samples in place of random values: a file, a folder, a Hub name.")
@split_option
@columns_option
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Sets of random values, or samples of the data set.  [default: 1; at most 8 of a data set]",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Of decoders: compare at token N of the text that REFERENCE writes greedily; 0 is the prompt.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of what is drawn.")
@click.option(
    "--submodel", multiple=True, metavar="PART", help="Of a folder with several parts, compare this one; repeatable."
)
@click.option("--map", "names", multiple=True, metavar="A=B", help="Input or output A of REFERENCE is B of CANDIDATE.")
@click.option("-o", "--output", type=NonEmptyPath(), help="Also write the answer to this file, as JSON.")
@click.option("--report", type=NonEmptyPath(), help="Also write a page with chart and table, to open in a browser.")
@click.option("--node-data", type=NonEmptyPath(), help="Also write node data for Model Explorer (JSON).")
@click.option("--overwrite", is_flag=True, help="Replace files that are there already.")
@verbose_option("Tell more: every module.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Run REFERENCE and CANDIDATE on the same values, and say how near their answers are.

    Each is an ONNX file, the folder of a build, or a checkpoint or Hub id, which PyTorch runs. Of a folder with several
    parts, those of one name are compared. Exit codes: 0 done, 3 an output is off by more than --threshold, 1 failed, 2
    wrong usage.
    """
    found = _refuse_early(options)
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.flows.compare.compare import CompareOptions
    from winml.modelkit.runtime.opened_model import RunOptions

    run = RunOptions(
        options["candidate"],
        sizes=sizes_by_name({**options, "batch_size": None}),
        input_data=Path(options["input_data"]) if options["input_data"] else None,
        seed=options["seed"],
    )
    requested = CompareOptions(
        run,
        by_module=options["by_module"],
        threshold=options["threshold"],
        draws=options["samples"] or 1,
        step=options["step"],
        data_set=requested_samples(options, MOST_SAMPLES),
        names=_names(options["names"]),
    )
    with library_output_to_stderr():
        result = found.compare(requested)
    written = _write(result, options)
    _show(result, written, options)
    if not result.is_within:
        click.get_current_context().exit(NEGATIVE_ANSWER)


def _write(result: ModelComparison, options: Mapping[str, Any]) -> list[Path]:
    """Write the files that were asked for: the answer, and of every part what shows its modules."""
    from winml.modelkit.report.comparison import comparison_document
    from winml.modelkit.report.html import render_html
    from winml.modelkit.report.trace import comparison_node_data

    depth = options["depth"]
    renderers: dict[str, Callable[[], str]] = {"output": lambda: f"{json_text(result.as_record(depth=depth))}\n"}
    paths = {"output": options["output"]}
    pages: dict[str, Callable[[ModelComparison], str]] = {
        "report": lambda part: render_html(comparison_document(part, depth=depth)),
        "node_data": comparison_node_data,
    }
    parts = result.parts or {ONLY_PART: result}
    for option, page in pages.items():
        for name, path in zip(parts, _module_files(options[option], list(parts)), strict=False):
            renderers[f"{option} {name}"], paths[f"{option} {name}"] = partial(page, parts[name]), path
    return write_files(renderers, {**options, **paths})


def _module_files(path: Path | None, parts: Sequence[str]) -> list[Path]:
    """Return where what shows the modules of each part goes; none where that was not asked for."""
    return [] if path is None else [part_path(path, part, of_several=len(parts) > 1) for part in parts]


def _show(result: ModelComparison, written: list[Path], options: Mapping[str, Any]) -> None:
    from winml.modelkit.report.comparison import comparison_document

    depth = options["depth"]
    record = result.as_record(depth=depth)
    show_result(record, options, lambda: comparison_document(result, depth=depth).with_files(written))


def _refuse_early(options: Mapping[str, Any]) -> FoundPairs:
    """Return what is compared; refuse what options and paths show to be wrong, before heavy imports."""
    from winml.modelkit.builds.compared_models import found_pairs
    from winml.modelkit.flows.compare.values import value_files

    for name in ONLY_BY_MODULE:
        if options[name] and not options["by_module"]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} shows modules", hint=f"Add --by-module, or leave {flag} out.")
    found = found_pairs(options["reference"], options["candidate"], options["submodel"])
    if options["node_data"] and not found.files:
        raise UsageError(
            "--node-data is shown over an ONNX file, and both sides are PyTorch models", hint="Leave it out."
        )
    found.refuse_values([flag for name, flag in VALUES.items() if options[name] not in (None, ())])
    _names(options["names"])
    if requested_samples(options, MOST_SAMPLES) is not None and options["input_data"] is not None:
        raise UsageError("--dataset and --input-data both give values", hint="Give one of the two.")
    if options["input_data"] and options["samples"] is not None:
        raise UsageError(
            f"--samples {options['samples']}: --input-data {options['input_data']} has values",
            hint="Give one of the two; of a folder, every .npz file is read.",
        )
    passed = value_files(Path(options["input_data"])) if options["input_data"] else data_set_files(options)
    sizes_by_name({**options, "batch_size": None})
    outputs = [path for name in BY_MODULE_FILES for path in _module_files(options[name], list(found.parts))]
    outputs += [options["output"]] if options["output"] else []
    if len({path.absolute() for path in outputs}) < len(outputs):
        raise UsageError("two of --output, --report and --node-data name one file", hint="Give each a file of its own.")
    if outputs:
        refuse_outputs(outputs, [*found.files, *passed], overwrite=options["overwrite"])
    return found


def _names(pairs: tuple[str, ...]) -> dict[str, str]:
    """Return what ``--map`` says.

    Raises:
        UsageError: one has no equals sign between two names.
    """
    named = {}
    for text in pairs:
        left, sign, right = text.partition("=")
        if not (left and sign and right):
            raise UsageError(
                f"--map {text}: expected two names, reference=candidate", hint="Such as --map ids=input_ids."
            )
        named[left] = right
    return named
