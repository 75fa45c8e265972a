"""``winml run``: the answer of a model to one text, image, recording or set of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import (
    model_option,
    reference_option,
    request_options,
    result_options,
    source_options,
)
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import json_text, library_output_to_stderr, show_result
from winml.modelkit.generate.run_verb import RunRequest, plan_run, run_inference, run_request, run_schema, write_files


@click.command(name="run", cls=WinMLCommand)
@model_option("ONNX file, build folder, Hub id or checkpoint folder.")
@source_options
@request_options(RunRequest)
@reference_option(
    "Also run PyTorch on the same inputs and compare. Without a value: the local checkpoint that the model was "
    "exported from."
)
@result_options(quiet="Print the result only.")
def command(**options: Any) -> None:
    """Run a model on text, an image, audio or tensors, and print the result.

    The task is recorded in the file, or stated by --task. A checkpoint is built in the cache first.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 the result differs from PyTorch (--reference).

    Examples:
      winml run built --schema
      winml run built --text "The house is old."
      winml run qa-built --input question="What is old?" --input context=@article.txt
      winml run detector --image photo.jpg --save boxes.png
      winml run clip-built --image photo.jpg --label "a cat" --label "a dog"
      winml run whisper-built --audio speech.wav --format json
      winml run minilm --text "The house is old." --text "An old building."
      winml run built --text "The house is old." --reference
      winml run model.onnx --input input_ids=[[2,5,3]] --input attention_mask=[[1,1,1]]
    """
    request = run_request(options, stated_fields(RunRequest, options))
    plan = plan_run(request)
    end_dry_run(plan, options)
    if request.schema:
        from winml.modelkit.generate.table import schema_document

        with library_output_to_stderr():
            schema = run_schema(plan, request)
        show_result(schema.as_record(), options, lambda: schema_document(schema), is_answer=True)
        return
    with library_output_to_stderr():
        result, saved = run_inference(plan, request)
    writers = dict(saved)
    if request.output is not None:
        text = f"{json_text(result.as_record())}\n"
        writers[request.output] = lambda path: _write_text(path, text)
    paths = write_files(writers, overwrite=request.overwrite)
    show_result(result.as_record(), options, lambda: result.document().with_files(paths), is_answer=True)
    if result.reference is not None and not result.reference.is_same:
        click.get_current_context().exit(NEGATIVE_RESULT)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
