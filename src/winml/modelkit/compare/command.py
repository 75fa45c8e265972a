"""``winml compare``: do two models answer alike, and which module is the first to part?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._progress import show_wait
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import library_output_to_stderr, page_text, show_answer
from winml.modelkit.compare.verb import CompareRequest, plan_comparison, run_comparison
from winml.modelkit.fields import command_words
from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.tags.selector import escape
from winml.modelkit.verbs.next_commands import measuring_command, transforming_command

if TYPE_CHECKING:
    from winml.modelkit.compare.records import ModelComparison


@click.command(name="compare", cls=WinMLCommand)
@request_options(CompareRequest)
@result_options(quiet="", verbose="Show more detail: every module.")
def command(**options: Any) -> None:
    """Run two models on the same inputs and find the first module whose outputs diverge.

    Each model is an ONNX file, a build folder, or a checkpoint or Hub id, which PyTorch runs. In folders with several
    parts, parts of the same name are compared. With --ep, CANDIDATE runs on the execution provider, and REFERENCE on
    the CPU.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 the error of an output exceeds --threshold.

    Examples:
      winml compare model.onnx int8.onnx
      winml compare ./checkpoint model.onnx --by-module
      winml compare model.onnx fp16.onnx --by-module --input-data sample.npz -o where.json
      winml compare model.onnx int8.onnx --by-module --depth 4 --report where.html
      winml compare model.onnx int8.onnx --dataset sentences.parquet --samples 32
      winml compare model.onnx int8.onnx --threshold 0.2
      winml compare ./checkpoint ./finetuned --by-module
      winml compare ./checkpoint int4.onnx --by-module --step 8
      winml compare model.onnx model.onnx --ep webgpu
      winml compare built built_int8 --submodel decoder
    """
    request = CompareRequest(**stated_fields(CompareRequest, options))
    plan = plan_comparison(request)
    end_dry_run(plan, options)
    with library_output_to_stderr(), show_wait("comparing"):
        result = run_comparison(plan, request)
    _show(result, plan.files, request, options)
    if not result.is_within:
        click.get_current_context().exit(NEGATIVE_RESULT)


_ROUNDING_DB = 100.0
"""SQNR of rounding. Chosen: float32 sums in another order have 110 dB and more."""


def _next_command(request: CompareRequest, result: ModelComparison) -> str:
    """Return the command that acts on a comparison; empty if no error is left, or no command changes it.

    Without modules, the command compares them. If winml quantized the candidate, the command quantizes the reference
    again, with the module that causes the error in float; if no single module does, it ranks the modules. No command
    repeats a calibration on data, whose path a file does not record.
    """
    fidelity = result.worst.fidelity
    is_rounding = not fidelity.problem and fidelity.sqnr_db >= _ROUNDING_DB
    if result.parts or result.step is not None or is_rounding:
        return ""
    if result.modules is None:
        by_module = replace(
            request, by_module=True, output=None, report=None, node_data=None, overwrite=False, threshold=None
        )
        words = command_words(by_module, CompareRequest)
        return measuring_command("compare", [result.reference, result.candidate], words)
    reference, candidate = Path(result.reference), Path(result.candidate)
    if not (reference.is_file() and candidate.is_file() and {reference.suffix, candidate.suffix} == {".onnx"}):
        return ""
    from winml.modelkit.quantize.pipeline import read_request

    requested, quantized = read_request(candidate)
    is_on_unknown_data = requested is not None and (requested.split is not None or bool(requested.columns))
    is_of_float = not read_request(reference)[1]  # a quantized file is not quantized again
    if requested is None or not quantized or not is_of_float or (is_on_unknown_data and request.dataset is None):
        return ""
    cause = _find_cause(result)
    if cause not in quantized if cause is not None else fidelity.prediction_agreement == 1:
        return ""
    from winml.modelkit.quantize.declared_options import QuantizeFields

    data = {name: getattr(request, name) for name in ("dataset", "split", "columns", "samples")}
    data["samples"] = data["dataset"] and data["samples"]
    exclude = requested.exclude if cause is None else (*requested.exclude, escape(cause))
    words = command_words(requested.model_copy(update={"exclude": exclude, **data}), QuantizeFields)
    if cause is None:
        return measuring_command("quantize", [reference], ["--sensitivity", *words])
    return transforming_command("quantize", reference, words, suffix="mixed", like=candidate)


_LEAST_SHARE = 0.5
"""Chosen: without a module with half of the error power, the SQNR rises by 3 dB."""


def _find_cause(result: ModelComparison) -> str | None:
    """Return the tag of the module that causes the error: the first that diverges, or one with most of the error."""
    if result.first_divergence is not None:
        return result.first_divergence.identity.tag
    errors = result.arising_errors()
    worst = max(errors, key=lambda tag: errors[tag], default=None)
    power = sum(error**2 for error in errors.values())
    return worst if worst is not None and errors[worst] ** 2 >= _LEAST_SHARE * power > 0 else None


def _show(
    result: ModelComparison, files: Mapping[str, Sequence[Path]], request: CompareRequest, options: Mapping[str, Any]
) -> None:
    """Write the files that are requested, and print the answer: each part has files of its modules.

    Args:
        result: The comparison.
        files: Option → files to write, one for each part, or one for all.
        request: The request, with the depth of the displayed modules.
        options: Values of the command line.
    """
    depth = request.depth
    following = _next_command(request, result)
    show_answer(
        {**result.as_record(depth=depth), "next": following or None},
        files,
        options,
        lambda: result.document(depth=depth).with_next(following),
        **texts_of_parts(result, files, depth),
    )


def texts_of_parts(
    result: ModelComparison, files: Mapping[str, Sequence[Path]], depth: int | None
) -> dict[str, Callable[[Path], str]]:
    """Return option → function that returns the text of a file, for the options with a file for each part.

    Args:
        result: The comparison.
        files: Option → files to write.
        depth: Levels of the displayed modules.
    """
    from winml.modelkit.profile.node_data import comparison_node_data

    parts = list((result.parts or {ONLY_PART: result}).values())

    def page(path: Path) -> str:
        number = files["report"].index(path)
        # The answer is one file for all parts.
        beside = {option: paths[number : number + 1] or paths for option, paths in files.items()}
        return page_text(parts[number].document(depth=depth), path, beside)

    return {"report": page, "node_data": lambda path: comparison_node_data(parts[files["node_data"].index(path)])}
