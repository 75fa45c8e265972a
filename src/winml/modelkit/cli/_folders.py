"""How do verbs for ONNX files take the folder of a build? All parts of it, unless ``--submodel`` names some."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._streams import library_output_to_stderr, print_json
from winml.modelkit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from winml.modelkit.builds.found_models import FoundFolder
    from winml.modelkit.flows.graph_file import GraphFileTask
    from winml.modelkit.options import Options
    from winml.modelkit.progress import StepEvent
    from winml.modelkit.results.transformed_folder import RecordT

    OptionsT = TypeVar("OptionsT", bound=Options)
    AnyT = TypeVar("AnyT")

__all__ = [
    "file_or_folder",
    "named_parts",
    "options_of_part",
    "parts_record",
    "print_parts",
    "refuse_early_in_folder",
    "transform_folder",
    "transformed_one",
]


def file_or_folder(options: Mapping[str, Any]) -> tuple[dict[str, Any], FoundFolder | None]:
    """Return the options with the file of the only part that is meant, or the folder whose files become a folder.

    Args:
        options: Those of a verb that makes a file of a file: ``model``, ``output`` and ``submodel``.

    Raises:
        UsageError: the folder has no such part, or several parts are to become one file.
        ModelPathError: the folder holds no ONNX model.
    """
    model, output = options["model"], options.get("output")
    if model is None or not model.is_dir():
        if options["submodel"]:
            raise UsageError(
                f"--submodel {options['submodel'][0]} names a part in the folder of a build, and {model} is none",
                hint="Leave it out.",
            )
        return dict(options), None
    from winml.modelkit.builds.found_models import found_folder

    found = found_folder(model, options["submodel"])
    if output is None or output.suffix.lower() != ".onnx":
        return dict(options), found
    return transformed_one(options, found, f"-o {output} is one file"), None


def transformed_one(options: Mapping[str, Any], found: FoundFolder, words: str) -> dict[str, Any]:
    """Return the options with the file of the only part that is meant.

    Args:
        options: Those of the verb.
        found: The folder that they name.
        words: Why there can be one only.

    Raises:
        UsageError: several are.
    """
    if len(found.chosen) > 1:
        raise UsageError(
            f"{words}, and {found.path} holds {', '.join(found.chosen)}",
            hint=f"Name one of them: --submodel {found.chosen[-1]}.",
        )
    return {**options, "model": found.parts[found.chosen[0]], "submodel": ()}


def refuse_early_in_folder(found: FoundFolder, options: Mapping[str, Any]) -> None:
    """Refuse the folder to write where paths show that it cannot be, before a model library is imported.

    Raises:
        UsageError: there is no ``--output``, or it cannot be written.
    """
    from winml.modelkit.builds.folder_transformation import refuse_folder_outputs

    if options["output"] is None:
        raise UsageError("no output was given", hint="Name the folder to write with -o.")
    refuse_folder_outputs(found, options["output"], overwrite=options["overwrite"])


def transform_folder(
    found: FoundFolder,
    requested: OptionsT,
    options: Mapping[str, Any],
    work: Callable[[GraphFileTask, OptionsT, Callable[[StepEvent], None] | None], RecordT],
    render: Callable[[RecordT, Console], None],
) -> None:
    """Do something with the parts of a folder, and show what came of it.

    Args:
        found: The folder.
        requested: What is to be done.
        options: Those of the verb.
        work: Turns one file into another; told where steps are shown.
        render: Prints the record of one part.

    Raises:
        WinMLError: whatever the work raises.
    """
    from winml.modelkit.builds import folder_transformation
    from winml.modelkit.flows.graph_file import GraphFileTask

    task = GraphFileTask(
        found.path,
        options["output"],
        overwrite=options["overwrite"],
        verify=options["verify"],
        external_data=options.get("external_data"),
        functions=options.get("functions"),
    )

    def work_on_part(part: str, part_task: GraphFileTask, part_options: OptionsT) -> RecordT:
        return work(part_task, part_options, _step_listener(part, found, options))

    with library_output_to_stderr():
        result = folder_transformation.transform_folder(found, task, requested, work_on_part)
    if options["format_"] == "json":
        print_json(result.as_record())
        return
    if options["quiet"]:
        return
    from winml.modelkit.report.terminal import console_for, print_rows
    from winml.modelkit.words import size_words

    console = console_for(sys.stdout)
    if result.is_of_one_part:
        render(next(iter(result.parts.values())), console)
    else:
        print_parts(result.parts, render, console)
    console.print()
    rows = [(part, f"came along as it is ({why})") for part, why in result.unchanged.items()]
    rows += [("beside", ", ".join(result.companions))] if result.companions else []
    print_rows([*rows, ("folder", f"{result.folder} ({size_words(result.size_bytes)})")], console)


def _step_listener(part: str, found: FoundFolder, options: Mapping[str, Any]) -> Callable[[StepEvent], None] | None:
    """Return what shows the steps of a part, with its name where there are several."""
    if options["quiet"]:
        return None
    if len(found.parts) == 1:
        return show_step
    return lambda event: show_step(replace(event, name=f"{part}: {event.name}"))


def named_parts(options: Mapping[str, Any], *, beside_weights: bool = False) -> Mapping[str, Path]:
    """Return the files of the parts that the options of a verb mean; empty where they name no folder of several parts.

    Args:
        options: ``target``, ``model`` and ``submodel`` among them.
        beside_weights: Also those that were exported into the folder of their checkpoint.

    Raises:
        UsageError: the folder has no part of a name.
    """
    given = [value for value in (options["target"], options["model"]) if value is not None]
    if len(given) != 1:
        return {}
    from winml.modelkit.builds.found_models import chosen_parts

    return chosen_parts(given[0], options["submodel"], beside_weights=beside_weights)


def options_of_part(options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the options of a verb as if the file of a part were named."""
    return {**options, "target": str(path), "model": None, "submodel": ()}


def parts_record(options: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answer for a program: the record of each part of a folder."""
    return {"schema_version": 1, "model": options["target"] or options["model"], "parts": dict(records)}


def print_parts(results: Mapping[str, AnyT], render: Callable[[AnyT, Console], None], console: Console) -> None:
    """Print the answer for each part below its name."""
    from rich.text import Text

    for number, (part, result) in enumerate(results.items()):
        if number:
            console.print()
        console.print(Text(part, "bold"))
        render(result, console)
