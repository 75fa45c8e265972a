"""Command ``winml quantize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli import _streams
from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run, run_verb
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._progress import live_progress, show_step
from winml.modelkit.cli._requests import read_request
from winml.modelkit.quantize import verb

if TYPE_CHECKING:
    from winml.modelkit.quantize.records import QuantizedFile
    from winml.modelkit.quantize.sensitivity_records import QuantizationSensitivity
    from winml.modelkit.report.document import Document


@click.command(name="quantize", cls=WinMLCommand)
@request_options(verb.QuantizeRequest)
@result_options(verbose="Show more detail: every module.")
def command(**options: Any) -> None:
    """Quantize an ONNX model, module by module. Tags are preserved.

    Exit codes: 0 success, 1 invalid files, 2 usage error, 3 the quality of the outputs falls below the minimum, or
    --target is not met.

    Examples:
      winml quantize -m model.onnx -o int8.onnx
      winml quantize -m model.onnx -o int4.onnx --precision int4
      winml quantize -m built -o built-int8
      winml quantize -m model.onnx -o int8.onnx --exclude BertPooler --exclude 'encoder.layer.0.**'
      winml quantize -m model.onnx -o mixed.onnx --per-module rules.json
      winml quantize -m model.onnx -o qdq.onnx --mode qdq --calibration-data samples
      winml quantize -m built -o built-int4 -p int4 --algorithm gptq --calibration-data texts.jsonl
      winml quantize -m built -o built-mixed --budget 4.5bits --report page.html
      winml quantize -m model.onnx --sensitivity --report page.html
      winml quantize -m model.onnx --sensitivity --target sqnr_db=30 --exclude-list rules.json
      winml quantize -m model.onnx --sensitivity --target accuracy=0.9 --dataset reviews.csv
    """
    request = read_request(verb.QuantizeRequest, options)
    if request.sensitivity:
        _measure_sensitivity(request, options)
        return
    run_verb(request, options, _describe_result, lambda result: _write_page(result, options))


def _write_page(result: QuantizedFile, options: Mapping[str, Any]) -> list[Path]:
    """Write the HTML report of a search for bits, if requested; return its path."""
    if options["report"] is None:
        return []
    from winml.modelkit.quantize.table import budget_document

    files = {"model": [file.path for file in result.files if file.path.suffix == ".onnx"]}
    texts = {"report": lambda page: _streams.page_text(budget_document(result), page, files)}
    return _streams.write_answer({"report": [options["report"]]}, texts, overwrite=options["overwrite"])


def _describe_result(result: QuantizedFile) -> Document:
    """Build the document of a quantization."""
    from winml.modelkit.quantize.table import quantization_document  # reads numpy

    return quantization_document(result)


def _measure_sensitivity(request: verb.QuantizeRequest, options: Mapping[str, Any]) -> None:
    """Measure the sensitivity, write the requested files and print the ranking.

    Exits with code 3 if the target is not met. Removes the file of resumable measurements.
    """
    plan = verb.plan_sensitivity(request)
    end_dry_run(plan, options, verb.refuse_unrun_sensitivity)
    with _streams.library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        result = verb.run_sensitivity(plan, None if options["quiet"] else show_step, progress)
        paths = _write_files(result, options)
    if plan.sensitivity.measured is not None:
        plan.sensitivity.measured.unlink(missing_ok=True)  # the answer is written
    from winml.modelkit.quantize.sensitivity_table import sensitivity_document

    _streams.show_result(result.as_record(), options, lambda: sensitivity_document(result).with_files(paths))
    if result.exclude_list is not None and not result.exclude_list.is_met:
        _streams.tell(f"--target {request.target} was not met: {result.unmet_words}")
        click.get_current_context().exit(NEGATIVE_RESULT)


def _write_files(result: QuantizationSensitivity, options: Mapping[str, Any]) -> list[Path]:
    """Write the requested files and return their paths; the exclude list only if it meets the target."""
    from winml.modelkit.quantize.sensitivity_table import sensitivity_document

    listed = result.exclude_list
    texts: dict[str, Callable[[Path], str]] = {
        "output": lambda _path: f"{_streams.json_text(result.as_record())}\n",
        "report": lambda page: _streams.page_text(sensitivity_document(result), page, files),
    }
    if listed is not None and listed.is_met:
        texts["exclude_list"] = lambda _path: f"{_streams.plain_json_text(listed.rules)}\n"
    files = {name: [options[name]] for name in texts if options[name]}
    return _streams.write_answer(files, texts, overwrite=options["overwrite"])
