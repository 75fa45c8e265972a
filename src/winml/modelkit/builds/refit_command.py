"""``winml refit``: puts other weights into a build without tracing the model again."""

from __future__ import annotations

from typing import Any

import click

from winml.modelkit.builds.command import make_listener, show_build
from winml.modelkit.builds.refit_verb import RefitRequest, plan_requested_refit, run_planned_refit
from winml.modelkit.cli._endings import Interrupted, resuming_words
from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import library_output_to_stderr


@click.command(name="refit", cls=WinMLCommand)
@request_options(RefitRequest)
@result_options(verbose="Show more detail: every step of a stage.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Put other weights into a build without tracing the model again.

    BUILD is a folder of winml build --refittable. Its stages run again with its options on the traced graph, so that
    the result equals a new build of the checkpoint. The outputs are compared with PyTorch.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 the outputs differ beyond tolerance, or the result misses a limit
    of the eval section.

    Examples:
      winml refit built --weights ./fine-tuned -o refitted
      winml refit built --weights ./checkpoint --adapter ./lora -o refitted
      winml refit built/model.onnx --weights ./fine-tuned -o refitted --no-verify
    """
    request = RefitRequest(**stated_fields(RefitRequest, options))
    with library_output_to_stderr():
        plan = plan_requested_refit(request)
    end_dry_run(plan, options)
    try:
        with library_output_to_stderr():
            result = run_planned_refit(plan, request, make_listener(options, []))
    except KeyboardInterrupt:
        raise Interrupted(resuming_words() or "no stage was completed") from None
    show_build(result, options)
    if result.evaluation is not None and not result.evaluation.is_good_enough:
        context.exit(NEGATIVE_RESULT)
