"""Command ``winml quantize``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli import _streams
from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run, run_verb
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._progress import live_progress, show_step
from winml.modelkit.cli._requests import read_request
from winml.modelkit.fields import command_words
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.quantize import verb
from winml.modelkit.quantize.declared_options import QuantizeFields
from winml.modelkit.quantize.precisions import FLOAT32
from winml.modelkit.verbs.next_commands import (
    diverging_command,
    measuring_command,
    model_files,
    timing_command,
    transforming_command,
)

if TYPE_CHECKING:
    from winml.modelkit.quantize.options import QuantizeOptions
    from winml.modelkit.quantize.records import QuantizedFile
    from winml.modelkit.quantize.sensitivity_records import QuantizationSensitivity


@click.command(name="quantize", cls=WinMLCommand)
@request_options(verb.QuantizeRequest)
@result_options(verbose="Show more detail: every module.")
def command(**options: Any) -> None:
    """Quantize an ONNX model, module by module. Tags are preserved.

    Exit codes: 0 success, 1 invalid files, 2 usage error, 3 the quality of the outputs falls below the minimum, or
    --target is not met.

    Examples:
      winml quantize model.onnx -o int8.onnx
      winml quantize model.onnx -o int4.onnx --precision int4
      winml quantize built -o built-int8
      winml quantize model.onnx -o int8.onnx --exclude BertLayer.0 --exclude 'encoder.layer.1.output'
      winml quantize model.onnx -o mixed.onnx --per-module rules.json
      winml quantize model.onnx -o qdq.onnx --mode qdq --calibration-data samples
      winml quantize built -o built-int4 -p int4 --algorithm gptq --calibration-data texts.jsonl
      winml quantize built -o built-mixed --budget 4.5bits --report page.html
      winml quantize model.onnx --sensitivity --report page.html
      winml quantize model.onnx --sensitivity --target sqnr_db=30 --exclude-list rules.json
      winml quantize model.onnx --sensitivity --target accuracy=0.9 --dataset reviews.csv
    """
    request = read_request(verb.QuantizeRequest, options)
    if request.sensitivity:
        _measure_sensitivity(request, options)
        return

    def following(source: Path, output: Path, result: QuantizedFile) -> str:
        return _command_after(request, source, output, result)

    run_verb(request, options, lambda result: _write_page(result, options), following)


def _command_after(request: verb.QuantizeRequest, source: Path, output: Path, result: QuantizedFile) -> str:
    """Return the command that acts on a quantization: the search for the module with the error, or a measurement."""
    worst = result.fidelity.worst if result.fidelity is not None and result.fidelity.outputs else None
    if worst is None or worst.is_close or len(model_files(output)) > 1:
        return timing_command(source, output, request.options.ep)
    names = ("dataset", "split", "columns") if request.options.dataset else ()
    return diverging_command(source, output, {name: getattr(request.options, name) for name in names})


def _write_page(result: QuantizedFile, options: Mapping[str, Any]) -> list[Path]:
    """Write the HTML report of a search for bits, if requested; return its path."""
    if options["report"] is None:
        return []
    from winml.modelkit.quantize.table import budget_document

    files = {"model": [file.path for file in result.files if file.path.suffix == ".onnx"]}
    texts = {"report": lambda page: _streams.page_text(budget_document(result), page, files)}
    return _streams.write_answer({"report": [options["report"]]}, texts, overwrite=options["overwrite"])


def _measure_sensitivity(request: verb.QuantizeRequest, options: Mapping[str, Any]) -> None:
    """Measure the sensitivity, write the requested files and print the ranking.

    Exits with code 3 if the target is not met. Removes the file of resumable measurements.
    """
    plan = verb.plan_sensitivity(request)
    end_dry_run(plan, options, verb.refuse_unrun_sensitivity)
    with _streams.library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        result = verb.run_sensitivity(plan, None if options["quiet"] else show_step, progress)
        following = _next_command(request, result)
        record = {**result.as_record(), "next": following or None}
        written = _write_files(result, record, options)
    if plan.sensitivity.measured is not None:
        remove_file(plan.sensitivity.measured)  # the answer is written
    _streams.show_result(record, options, lambda: result.document().with_files(written).with_next(following))
    if result.exclude_list is not None and not result.exclude_list.is_met:
        _streams.tell(f"--target {request.target} was not met: {result.unmet_words}")
        click.get_current_context().exit(NEGATIVE_RESULT)


def _next_command(request: verb.QuantizeRequest, result: QuantizationSensitivity) -> str:
    """Return the command that acts on a sensitivity measurement; empty if no list of modules meets the target.

    It quantizes with the listed modules in float, or without a target with all modules quantized if they meet the
    default limit; else it searches the modules that have to stay in float.
    """
    listed, minimum = result.exclude_list, request.options.base.minimum
    options = request.options.model_copy(update={"samples": request.samples})
    if listed is None:
        worst = result.whole.worst
        agreement = None if worst is None else worst.prediction_agreement
        if worst is not None and result.whole.runs and minimum.is_met(worst.lower_db, agreement):
            return _quantizing_command(request, result, options, [])
        words = ["--sensitivity", *_option_words(request, options), *_part_words(request)]
        target = f"sqnr_db={minimum.searched_db(agreement):g}"
        return measuring_command("quantize", [_measured_model(request)], [*words, "--target", target])
    if not listed.is_met:
        return ""
    if all(precision == FLOAT32 for precision in listed.rules.values()):
        options = options.model_copy(update={"exclude": (*options.exclude, *listed.rules)})
    else:
        options = options.model_copy(update={"per_module": dict(listed.rules)})
    # The file is judged on the samples of the measurement, unless these are arrays of the user.
    is_same = listed.target.metric == "sqnr_db" and request.input_data is None
    words = ["--min-sqnr", f"{listed.target.value:g}"] if is_same else []
    return _quantizing_command(request, result, options, words)


def _quantizing_command(
    request: verb.QuantizeRequest, result: QuantizationSensitivity, options: QuantizeOptions, words: Sequence[str]
) -> str:
    """Return the command that quantizes the measured model; ``words`` follow its options."""
    return transforming_command(
        "quantize",
        _measured_model(request),
        [*_option_words(request, options), *words],
        suffix=result.precision,
        submodel=request.submodel,
    )


def _measured_model(request: verb.QuantizeRequest) -> Path:
    """Return the model as named by the user."""
    assert request.model is not None  # measured
    return request.model


def _part_words(request: verb.QuantizeRequest) -> list[str]:
    """Return the words that select the measured part and its inputs."""
    data = [] if request.input_data is None else ["--input-data", str(request.input_data)]
    return [*(word for part in request.submodel for word in ("--submodel", part)), *data]


def _option_words(request: verb.QuantizeRequest, options: QuantizeOptions) -> list[str]:
    """Return the words for options, seed and sizes of a measurement."""
    words = command_words(options, QuantizeFields)
    if request.seed:
        words += ["--seed", str(request.seed)]
    if request.sizes:
        words += ["--shape-config", json.dumps(dict(request.sizes))]
    return words


def _write_files(
    result: QuantizationSensitivity, record: Mapping[str, object], options: Mapping[str, Any]
) -> list[Path]:
    """Write the files that are asked for; the list of exceptions only where it meets the target."""
    listed = result.exclude_list
    texts: dict[str, Callable[[Path], str]] = {
        "output": lambda _path: f"{_streams.json_text(record)}\n",
        "report": lambda page: _streams.page_text(result.document(), page, files),
    }
    if listed is not None and listed.is_met:
        texts["exclude_list"] = lambda _path: f"{_streams.plain_json_text(listed.rules)}\n"
    files = {name: [options[name]] for name in texts if options[name]}
    return _streams.write_answer(files, texts, overwrite=options["overwrite"])
