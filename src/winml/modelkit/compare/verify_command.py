"""``winml verify``: check of a model against the recorded outputs of PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._progress import show_wait
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import (
    json_text,
    library_output_to_stderr,
    own_stderr,
    show_result,
    tell,
    write_answer,
)
from winml.modelkit.compare.verify_verb import VerifyRequest, plan_verification, run_verification


@click.command(name="verify", cls=WinMLCommand)
@request_options(VerifyRequest)
@result_options(verbose="Show more detail: every module.")
def command(**options: Any) -> None:
    """Compare a model on this machine with recorded outputs of PyTorch. PyTorch is not needed.

    MODEL is a folder of winml build, or an ONNX file, with a proof beside it (winml build --proof). The model runs on
    the recorded inputs. Every output is compared with its limit. If one is beyond it, all modules are compared, and the
    first one that diverges is named. In GitHub Actions, failures are also annotations of the run.

    With --baseline, the result is compared with that of another environment, such as the one before an upgrade:
    quality, kernels, providers and times by module.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 an output is beyond its limit, or an error doubled or nodes left
    the provider since the baseline.

    Examples:
      winml verify built
      winml verify built --ep openvino
      winml verify built --against slim.onnx --by-module
      winml verify built --junit verify.xml -o verify.json
      winml verify built --baseline before.json
    """
    from winml.modelkit.compare.command import texts_of_parts
    from winml.modelkit.compare.proof.machine_reports import annotation_lines, junit_text

    request = VerifyRequest(**stated_fields(VerifyRequest, options))
    plan = plan_verification(request)
    end_dry_run(plan, options)
    measures_execution = request.output is not None or options["format_"] == "json"
    with library_output_to_stderr(), show_wait("verifying"):
        result = run_verification(plan, request, measures_execution=measures_execution)
    depth = request.depth
    record = result.as_record(depth=depth)
    texts: dict[str, Callable[[Path], str]] = {
        "output": lambda _path: f"{json_text(record)}\n",
        "junit": lambda _path: junit_text(result),
    }
    texts |= texts_of_parts(result, plan.files, depth)
    written = write_answer(plan.files, texts, overwrite=options["overwrite"])
    show_result(record, options, lambda: result.document(depth=depth).with_files(written))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotation_lines(result):
            own_stderr().write(f"{line}\n")
    if not result.is_accepted:
        if options["quiet"]:
            tell("; ".join(result.problems))
        click.get_current_context().exit(NEGATIVE_RESULT)
