"""Plan and run of ``winml view``, and its Python function."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.errors import InputError, UsageError, opt, spell
from winml.modelkit.fields import MODEL, OUTPUT, declare
from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.python_functions import python_function
from winml.modelkit.report.plan import PlannedStep
from winml.modelkit.verbs.answers import AnswerPlan, AnswerRequest, plan_answer
from winml.modelkit.verbs.named_models import model_request
from winml.modelkit.view.titles import PARAMETERS

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.view.collecting import Sides
    from winml.modelkit.view.known import EarlierResult
    from winml.modelkit.view.records import ModelPage


@dataclass(frozen=True)
class ViewSubject:
    """Subject of a page."""

    sides: Sides
    results: tuple[Path, ...]
    """JSON of earlier runs."""
    measure: bool
    histograms: bool
    width: str
    colour: str | None


@dataclass(frozen=True, kw_only=True)
class ViewRequest(AnswerRequest):
    """Request of ``winml view``."""

    models: tuple[str, ...] = declare((), MODEL, is_argument=True, is_repeatable=True, metavar="MODEL [OTHER]")
    """ONNX file, build folder or checkpoint, and another one to show beside it."""
    output: Path | None = declare(None, OUTPUT, short="-o", is_common=True)
    """HTML page to write, or a picture of the modules: a name that ends in .svg or .png."""
    results: tuple[str, ...] = declare((), MODEL, spelling="--with", metavar="JSON", is_common=True)
    """Result of an earlier run (-f json) of `perf`, `compare`, `quantize --sensitivity` or `inspect --ep`.

    Results beside the model are found without this option. A result of another model is refused."""
    measure: bool = declare(False, MODEL, is_common=True)
    """Measure the time of each module, and of two models the error of each module, unless an earlier run did."""
    histograms: bool = declare(False, MODEL)
    """Read the weights and show the distribution of the values of each."""
    width: str = declare(PARAMETERS, OUTPUT, metavar="NUMBER")
    """Number that is the width of the modules, by its name on the page, such as `time`."""
    colour: str | None = declare(
        None, OUTPUT, spelling="--colour --color", metavar="NAME", default_words="change of two models, else class"
    )
    """Number or text that is the colour of the modules, by its name on the page, such as `own error`."""
    open: bool = declare(False, OUTPUT, is_common=True)
    """Open the page in the browser."""


_ENDINGS = ("", ".html", ".htm", ".svg", ".png")
"""Endings of pages and pictures in lower case."""


def plan_view(request: ViewRequest) -> AnswerPlan[ViewSubject]:
    """Plan a page. Nothing is written.

    Raises:
        UsageError: no model or more than two are specified, or no page, or its name ends as no page and no picture.
        WinMLError: a model does not exist.
        OutputExistsError, WriteError: as :func:`winml.modelkit.verbs.answers.plan_answer` raises.
    """
    from winml.modelkit.onnx.files.named_paths import named_path

    if not 1 <= len(request.models) <= 2:
        found = f"{len(request.models)} models are specified" if request.models else "no model is specified"
        raise UsageError(found, hint="Specify an ONNX file, build folder or checkpoint, or two to show side by side.")
    if request.output is None:
        raise UsageError("no page is specified", hint=f"Specify the HTML file to write: {opt.output} page.html.")
    if (ending := request.output.suffix.lower()) not in _ENDINGS:
        raise UsageError(
            f"{opt.output} {request.output}: no page or picture ends in {ending}",
            hint="Specify a name that ends in .html, or in .svg or .png for a picture of the modules.",
        )
    if ending == ".png" and importlib.util.find_spec("PIL") is None:
        raise InputError("a PNG requires Pillow", hint="Install it: pip install pillow. An SVG requires nothing.")
    step = PlannedStep("reading", " and ".join(request.models))
    results = tuple(map(named_path, request.results))
    subject = _find_subject(
        request.models,
        results,
        measure=request.measure,
        histograms=request.histograms,
        width=request.width,
        colour=request.colour,
    )
    files = [path for source in subject.sides.values() if isinstance(source, Mapping) for path in source.values()]
    return plan_answer("view", subject, request, reads=(*files, *results), steps=(step,))


def _find_subject(
    names: Sequence[str], results: tuple[Path, ...], *, measure: bool, histograms: bool, width: str, colour: str | None
) -> ViewSubject:
    """Find the files of models by name; a checkpoint becomes a request.

    Raises:
        UsageError: both names are equal, or an option does not apply to a checkpoint.
        WinMLError: there is no such model.
    """
    if len(set(names)) < len(names):
        raise UsageError(f"{names[0]} is specified twice", hint="Specify two variants of a model, or only one.")
    sides = {name: _find_model(name) for name in names}
    checkpoint = next((name for name, source in sides.items() if not isinstance(source, Mapping)), None)
    option = "measure" if measure else "histograms" if histograms else None
    if checkpoint is not None and option is not None:
        raise UsageError(
            f"{spell(option)} requires ONNX files: {checkpoint} is a checkpoint",
            hint="Omit it, or export the checkpoint first.",
        )
    return ViewSubject(sides, results, measure, histograms, width, colour)


def _find_model(name: str) -> Mapping[str, Path] | ModelRequest:
    """Return part → file of a model, or the request of a checkpoint."""
    from winml.modelkit.builds.found_models import onnx_file, part_files
    from winml.modelkit.models.request import resolve_source

    if parts := part_files(name):
        return parts
    if (path := onnx_file(name)) is not None:
        return {ONLY_PART: path}
    request = model_request({"model": name})
    resolve_source(request, needs_weights=False)
    return request


def run_view(plan: AnswerPlan[ViewSubject]) -> ModelPage:
    """Collect the data of the page.

    Raises:
        InputError: a file is damaged or no ONNX file.
    """
    plan.recover()
    return _collect_page(plan.subject)


def _collect_page(subject: ViewSubject) -> ModelPage:
    """Collect the data of the page; raises as :func:`run_view` does."""
    from winml.modelkit.view.collecting import collect_page

    measure_missing = _measure_missing if subject.measure else None
    return collect_page(
        subject.sides,
        subject.results,
        measure_missing,
        histograms=subject.histograms,
        width=subject.width,
        colour=subject.colour,
    )


_MEASURED = Path("this run")
"""Place of a file in the results of this run."""


def _measure_missing(
    names: Sequence[str], prints: Sequence[set[str]], known: Iterable[EarlierResult]
) -> list[EarlierResult]:
    """Measure the time of each module, and of two models the error of each module, unless they are known.

    Args:
        names: One or two models, as passed by the user.
        prints: Fingerprints of the files of each model.
        known: Results of earlier runs.

    Raises:
        StageError: a model cannot be run.
        UsageError: two models take different inputs.
    """
    from winml.modelkit.builds.compared_models import compare_models
    from winml.modelkit.profile.verb import profile_model
    from winml.modelkit.view.known import results_in

    keys: dict[str, set[str]] = {}
    for result in known:
        keys.setdefault(result.fingerprint, set()).update(measure.key for measure in result.measures)

    def has(prefix: str, fingerprint: str) -> bool:
        return any(key.startswith(prefix) for key in keys.get(fingerprint, ()))

    results: list[EarlierResult] = []
    if not all(has("time", fingerprint) for side in prints for fingerprint in side):
        profiled = profile_model(*names, by_module=True)
        for profile in profiled.values() if isinstance(profiled, dict) else [profiled]:
            results += results_in(profile.as_record(), _MEASURED)
    if len(names) > 1 and not all(has("own error", fingerprint) for fingerprint in prints[-1]):
        results += results_in(compare_models(names[0], names[1], by_module=True).as_record(), _MEASURED)
    return results


@python_function(**{"with": "results"})
def view_model(
    model: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    results: Sequence[str | os.PathLike[str]] = (),
    measure: bool = False,
    histograms: bool = False,
    width: str = PARAMETERS,
    colour: str | None = None,
) -> ModelPage:
    """Show the modules and the graph of a model, or of two side by side (``winml view``).

    A notebook displays the result as a page.

    Args:
        model: ONNX file, build folder or checkpoint.
        other: Another one, shown beside the first.
        results: JSON files of earlier runs; results beside the model are found without being named.
        measure: Measure the time of each module, and of two models the error of each module, unless an earlier run did.
        histograms: Read the weights, for the distribution of the values of each.
        width: Number that is the width of the modules at first, by its name on the page, such as ``time``.
        colour: Number or text that is their colour at first; by default the change of two models, or the class.

    Raises:
        UsageError: a result belongs to another model, two models share no part, a checkpoint cannot be measured, or no
            module has the number of ``width`` or ``colour``.
        WinMLError: a model does not exist.
        InputError: a file is damaged or no ONNX file.

    Example:
        ```python
        page = view_model("model.onnx", "int8.onnx")
        ```
    """
    names = [os.fspath(name) for name in (model, other) if name is not None]
    paths = tuple(map(Path, results))
    return _collect_page(
        _find_subject(names, paths, measure=measure, histograms=histograms, width=width, colour=colour)
    )
