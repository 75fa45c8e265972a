"""Which model, of those that can be run, do the options of a verb name? Shared by the verbs that run one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._streams import tell
from winml.modelkit.errors import UsageError
from winml.modelkit.load.load_options import declared_options, is_given
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import FoundModel
    from winml.modelkit.progress import StepEvent

__all__ = ["exported_path", "files_read", "refuse_checkpoint_options", "runnable_model"]

FOR_CHECKPOINTS = (*(option.name for option in declared_options() if not option.is_for_onnx), "input_specs")
"""Options that say how a checkpoint becomes a graph, which an ONNX file already is."""


def runnable_model(options: Mapping[str, Any]) -> tuple[FoundModel, dict[str, Any]]:
    """Return the model, and the fields of its ``RunOptions`` that say what it is fed.

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
    from winml.modelkit.builds.found_models import FoundModel, onnx_file

    common = {
        "shown": name,
        "seed": options["seed"],
        "input_data": Path(options["input_data"]) if options["input_data"] else None,
    }
    path = onnx_file(name)
    if path is None:
        from winml.modelkit.cli._requests import model_request
        from winml.modelkit.load.request import resolve_source

        model = model_request({**options, "model": name})
        resolve_source(model)
        return FoundModel(name, request=model), {"is_exported": True, **common}
    hint = "Leave it out, or name the checkpoint the file was made from."
    refuse_checkpoint_options(path, options, FOR_CHECKPOINTS, hint)
    from winml.modelkit.cli._requests import sizes_by_name

    sizes = sizes_by_name({**options, "batch_size": None})
    return FoundModel(name, path), {"sizes": sizes, "batch_size": options["batch_size"], **common}


def exported_path(model: FoundModel, on_step: Callable[[StepEvent], None] | None) -> Path:
    """Return the ONNX file of a model; where it is exported now, say on stderr what is kept of that.

    Args:
        model: What the options name.
        on_step: Shows a step of the export; None: nothing is said.

    Raises:
        WinMLError: whatever the export raises.
    """
    steps: list[StepEvent] = []

    def show(event: StepEvent) -> None:
        assert on_step is not None
        steps.append(event)
        on_step(event)

    path = model.onnx_path(None if on_step is None else show)
    if steps:
        from winml.modelkit.builds.cache_contents import stored_bytes

        size = stored_bytes(file for file in path.parent.iterdir() if file.is_file())
        tell(f"kept in the cache for the next time: {size_words(size)} (winml cache ls)")
    return path


def refuse_checkpoint_options(path: Path, options: Mapping[str, Any], names: Iterable[str], hint: str) -> None:
    """Refuse the options that say how a checkpoint becomes a graph, which an ONNX file already is.

    Raises:
        UsageError: names the first of ``names`` that was given.
    """
    refused = frozenset(names)
    for parameter in click.get_current_context().command.params:
        if parameter.name in refused and is_given(parameter.name, options[parameter.name]):
            flag = [*parameter.opts, *parameter.secondary_opts][-1]
            raise UsageError(f"{flag} has no meaning for an ONNX file, and {path} is one", hint=hint)


def files_read(model: FoundModel, options: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files a verb reads: those of the model and those its options name; none of them may be replaced.

    Raises:
        WinMLError: the model names nothing that can be used.
    """
    given = (options[name] for name in ("input_data", "shape_config", "input_specs"))
    return (
        *model.files_read(),
        *(Path(value) for value in given if value and not str(value).lstrip().startswith(("{", "["))),
    )
