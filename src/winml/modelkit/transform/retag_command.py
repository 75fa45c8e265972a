"""Command ``winml retag``: transfers tags to a file that another tool wrote."""

from __future__ import annotations

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import show_result
from winml.modelkit.transform.retag_verb import RetagRequest, plan_retag, run_retag


@click.command(name="retag", cls=WinMLCommand)
@request_options(RetagRequest)
@result_options()
def command(**options: object) -> None:
    """Transfer the module tags of BEFORE to AFTER, which another tool made from BEFORE.

    Only the metadata of AFTER changes. No weights are read.

    Exit codes: 0 success, 1 invalid files, 2 usage error.

    Examples:
      winml retag model.onnx optimized.onnx -o optimized_tagged.onnx
      winml retag model.onnx optimized.onnx --overwrite
    """
    plan = plan_retag(RetagRequest(**stated_fields(RetagRequest, options)))
    end_dry_run(plan, options)
    result = run_retag(plan)
    from winml.modelkit.verbs.next_commands import measuring_command

    following = measuring_command("inspect", [result.model_path], ["-H"])
    show_result(result.as_record(), options, lambda: result.document().with_next(following))
