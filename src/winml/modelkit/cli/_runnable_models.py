"""Which model, of those that can be run, do the options of a verb name? Shared by the verbs that run one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from winml.modelkit.errors import UsageError

__all__ = ["runnable_model"]

FOR_CHECKPOINTS = ("task", "revision", "trust_remote_code", "input_specs", "random_weights")
"""Options that say how a checkpoint becomes a graph, which an ONNX file already is."""


def runnable_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a ``PerfRequest`` has to know of the model and of the values it is fed.

    What can be refused by looking at names and paths is refused here, before anything heavy is imported.

    Args:
        options: Values by the name of the option, ``target`` and ``model`` among them.

    Raises:
        UsageError: no model or two, nothing at its path, or an option that has no meaning for an ONNX file.
    """
    given = [value for value in (options["target"], options["model"]) if value is not None]
    if len(given) != 1:
        raise UsageError(
            f"two models were given: {given[0]!r} and, with -m, {given[1]!r}" if given else "no model was given",
            hint="Give one: an ONNX file, the folder of a build, a Hub id, a checkpoint folder or file.py:factory.",
        )
    name = given[0]
    from winml.modelkit.build.model_files import onnx_file

    common = {
        "shown": name,
        "seed": options["seed"],
        "input_data": Path(options["input_data"]) if options["input_data"] else None,
    }
    path = onnx_file(name)
    if path is None:
        from winml.modelkit.cli._requests import model_request
        from winml.modelkit.load.source import resolve_source

        model = model_request({**options, "model": name})
        resolve_source(model)
        return {"model": model, **common}
    _refuse_checkpoint_options(path, options)
    from winml.modelkit.cli._pinning import sizes_by_name

    sizes = sizes_by_name({**options, "batch_size": None})
    return {"model": path, "sizes": sizes, "batch_size": options["batch_size"], **common}


def _refuse_checkpoint_options(path: Path, options: Mapping[str, Any]) -> None:
    for parameter in click.get_current_context().command.params:
        if parameter.name in FOR_CHECKPOINTS and options[parameter.name]:
            raise UsageError(
                f"{parameter.opts[-1]} has no meaning for an ONNX file, and {path} is one",
                hint="Leave it out, or name the checkpoint the file was made from.",
            )
