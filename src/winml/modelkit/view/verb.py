"""Plan and run of ``winml view``, and its Python function."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.errors import ModelPathError, UsageError, opt
from winml.modelkit.fields import MODEL, OUTPUT, declare
from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.python_functions import python_function
from winml.modelkit.report.plan import PlannedStep
from winml.modelkit.verbs.answers import AnswerPlan, AnswerRequest, plan_answer

if TYPE_CHECKING:
    from winml.modelkit.view.records import ModelPage


@dataclass(frozen=True)
class ViewSubject:
    """Subject of a page."""

    sides: Mapping[str, Mapping[str, Path]]
    """Name of a model → its parts → their files."""
    results: tuple[Path, ...]
    """JSON of earlier runs."""


@dataclass(frozen=True, kw_only=True)
class ViewRequest(AnswerRequest):
    """Request of ``winml view``."""

    models: tuple[str, ...] = declare((), MODEL, is_argument=True, is_repeatable=True, metavar="MODEL [OTHER]")
    """ONNX file or build folder, and another one to show beside it."""
    output: Path | None = declare(None, OUTPUT, short="-o", is_common=True)
    """HTML page to write."""
    results: tuple[Path, ...] = declare((), MODEL, spelling="--with", metavar="JSON", is_common=True)
    """Result of an earlier run (-f json) of `perf`, `compare`, `quantize --sensitivity` or `inspect --ep`.

    Results beside the model are found without this option. A result of another model is refused."""
    open: bool = declare(False, OUTPUT, is_common=True)
    """Open the page in the browser."""


def plan_view(request: ViewRequest) -> AnswerPlan[ViewSubject]:
    """Plan a page. Nothing is written.

    Raises:
        UsageError: no model or more than two are specified, or no page.
        ModelPathError: a model does not exist.
        OutputExistsError, WriteError: as :func:`winml.modelkit.verbs.answers.plan_answer` raises.
    """
    if not 1 <= len(request.models) <= 2:
        found = f"{len(request.models)} models are specified" if request.models else "no model is specified"
        raise UsageError(found, hint="Specify one ONNX file or build folder, or two to show side by side.")
    if request.output is None:
        raise UsageError("no page is specified", hint=f"Specify the HTML file to write: {opt.output} page.html.")
    sides = find_sides(request.models)
    files = [path for parts in sides.values() for path in parts.values()]
    step = PlannedStep("reading", " and ".join(request.models))
    subject = ViewSubject(sides, request.results)
    return plan_answer("view", subject, request, reads=(*files, *request.results), steps=(step,))


def find_sides(names: Sequence[str]) -> Mapping[str, Mapping[str, Path]]:
    """Return name of a model → part → file.

    Raises:
        UsageError: both names are equal.
        ModelPathError: as :func:`find_parts` raises.
    """
    if len(set(names)) < len(names):
        raise UsageError(f"{names[0]} is specified twice", hint="Specify two variants of a model, or only one.")
    return {name: find_parts(name) for name in names}


def find_parts(name: str) -> Mapping[str, Path]:
    """Return part → file of a model.

    Raises:
        ModelPathError: there is no such file, or a folder has no ONNX file.
    """
    from winml.modelkit.builds.found_models import onnx_file, part_files

    if parts := part_files(name):
        return parts
    path = onnx_file(name)
    if path is None:
        raise ModelPathError(f"{name} is no ONNX file or build folder", hint="Specify an ONNX file.")
    return {ONLY_PART: path}


def run_view(plan: AnswerPlan[ViewSubject]) -> ModelPage:
    """Collect the data of the page.

    Raises:
        InputError: a file is damaged or no ONNX file.
    """
    from winml.modelkit.view.collecting import collect_page

    plan.recover()
    return collect_page(plan.subject.sides, plan.subject.results)


@python_function()
def view_model(
    model: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    results: Sequence[str | os.PathLike[str]] = (),
) -> ModelPage:
    """Show the modules and the graph of a model, or of two side by side (``winml view``).

    A notebook displays the result as a page.

    Args:
        model: ONNX file or build folder.
        other: Another one, shown beside the first.
        results: JSON files of earlier runs; results beside the model are found without being named.

    Raises:
        UsageError: a result belongs to another model, or two models share no part.
        ModelPathError: a model does not exist.
        InputError: a file is damaged or no ONNX file.
    """
    from winml.modelkit.view.collecting import collect_page

    names = [os.fspath(name) for name in (model, other) if name is not None]
    return collect_page(find_sides(names), [Path(result) for result in results])
