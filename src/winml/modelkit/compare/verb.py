"""Plan and run of ``winml compare``: two models run on the same inputs, and their outputs compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.evaluate.declared_options import DataSetFields, data_set_files, requested_samples
from winml.modelkit.fields import DATASET, INPUTS, MODEL, OUTPUT, SIZES, declare, refuse_stated, stated_options
from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.report.plan import PlannedStep
from winml.modelkit.verbs.answers import AnswerPlan, ModuleAnswerRequest, plan_answer
from winml.modelkit.verbs.file_to_file import read_sizes
from winml.modelkit.verbs.running import DeviceFields

if TYPE_CHECKING:
    from winml.modelkit.builds.compared_models import ModelPairs
    from winml.modelkit.compare.records import ModelComparison

_COMPARISON = "Comparison"
_ONLY_BY_MODULE = ("depth", "report", "node_data")
_OF_ONE_GRAPH = ("dataset", "input_data", "names", "step")
"""Options for the inputs of one graph."""


def _read_names(pairs: tuple[str, ...]) -> dict[str, str]:
    names = {}
    for text in pairs:
        reference, sign, candidate = text.partition("=")
        if not (reference and sign and candidate):
            raise UsageError(
                f"{opt.map} {text}: expected two names, reference=candidate", hint=f"Such as {opt.map} ids=input_ids."
            )
        names[reference] = candidate
    return names


@dataclass(frozen=True, kw_only=True)
class CompareRequest(ModuleAnswerRequest, DataSetFields, DeviceFields):
    """Request of ``winml compare``."""

    reference: str = declare(None, MODEL, is_argument=True)
    """Reference: an ONNX file, a build folder, a checkpoint or a Hub id."""
    candidate: str = declare(None, MODEL, is_argument=True)
    """Model to compare with it."""
    submodel: tuple[str, ...] = declare((), MODEL, metavar="PART")
    """Compare only this part of a folder."""
    by_module: bool = declare(False, _COMPARISON, is_common=True)
    """Compare every module, and report the first one whose outputs diverge."""
    depth: int | None = declare(None, OUTPUT, minimum=1, default_words="all", is_common=True)
    """Levels of the module tree to show, with `--by-module`."""
    threshold: float | None = declare(None, _COMPARISON, minimum=0, default_words="unlimited", is_common=True)
    """Maximum relative error of an output. If it is exceeded, the exit code is 3."""
    input_data: Path | None = declare(None, INPUTS, metavar="FILE", default_words="random values", is_common=True)
    """Inputs to run on: an .npz file with one array per input, or a folder of such files."""
    sizes: dict[str, int] = declare(
        {}, SIZES, spelling="--shape-config", metavar="JSON", read=read_sizes, is_common=True
    )
    """Sizes of dynamic dimensions by name or input:axis, such as batch_size=4: pairs, JSON text or a file."""
    dataset: str | None = declare(None, DATASET, metavar="DATA", is_common=True)
    """Dataset to run on, instead of generated samples: a file, a folder, or a name on the Hub."""
    samples: int | None = declare(None, DATASET, minimum=1, default_words="16, fewer for large models", is_common=True)
    """Number of samples. They come from the dataset, or are generated for the processor of the model, or random."""
    step: int | None = declare(None, _COMPARISON, minimum=0, metavar="N")
    """Decoders: compare at token N of the text that REFERENCE generates greedily; 0 is the prompt."""
    seed: int = declare(0, INPUTS)
    """Seed of random inputs."""
    names: dict[str, str] = declare({}, INPUTS, spelling="--map", metavar="A=B", is_repeatable=True, read=_read_names)
    """Input or output A of REFERENCE corresponds to B of CANDIDATE."""


def plan_comparison(request: CompareRequest) -> AnswerPlan[ModelPairs]:
    """Plan a comparison. Nothing is written, and no model is loaded.

    Raises:
        UsageError: a name is unusable, or options contradict each other.
        InputError: a file of a folder is damaged.
        OutputExistsError, WriteError: as :func:`winml.modelkit.verbs.answers.plan_answer` raises.
    """
    from winml.modelkit.builds.compared_models import resolve_pairs
    from winml.modelkit.builds.found_models import source_files
    from winml.modelkit.compare.quality_samples import value_files

    request.refuse_unknown_provider()
    if not request.by_module:
        refuse_stated(request, _ONLY_BY_MODULE, "{} shows modules", f"Add {opt.by_module}, or omit {{}}.")
    pairs = resolve_pairs(request.reference, request.candidate, request.submodel)
    if request.node_data and not any(isinstance(side, Path) for side in pairs.sides):
        raise UsageError(f"{opt.node_data} requires an ONNX file, and both models are PyTorch models", hint="Omit it.")
    options = stated_options(request)
    pairs.refuse_values([options[name] for name in _OF_ONE_GRAPH if name in options])
    data_set = requested_samples(request, seed=request.seed)
    if data_set is not None and request.input_data is not None:
        raise UsageError(f"{opt.dataset} and {opt.input_data} cannot be combined", hint="Use one of them.")
    if request.input_data and request.samples is not None:
        raise UsageError(
            f"{opt.samples} {request.samples}: {opt.input_data} {request.input_data} already determines the samples",
            hint="Pass one of them. If it is a folder, every .npz file is read.",
        )
    values = value_files(request.input_data) if request.input_data else data_set_files(request)
    text = f"{request.candidate} with {request.reference}{', module by module' if request.by_module else ''}"
    return plan_answer(
        "compare",
        pairs,
        request,
        reads=(*(file for side in pairs.sides for file in source_files(side)), *values),
        steps=[PlannedStep("comparing", text if part == ONLY_PART else f"{part} of {text}") for part in pairs.parts],
        parts=list(pairs.parts),
    )


def run_comparison(plan: AnswerPlan[ModelPairs], request: CompareRequest) -> ModelComparison:
    """Recover files of killed commands, then compare.

    Raises:
        WinMLError: as :func:`winml.modelkit.builds.compared_models.compare_models` raises.
    """
    plan.recover()
    from winml.modelkit.compare.comparing import CompareOptions
    from winml.modelkit.ort.opened_model import RunOptions

    run = RunOptions(
        request.candidate,
        sizes=request.sizes,
        input_data=request.input_data,
        seed=request.seed,
        **request.provider_options,
    )
    return plan.subject.compare(
        CompareOptions(
            run,
            by_module=request.by_module,
            threshold=request.threshold,
            draws=request.samples,
            step=request.step,
            data_set=requested_samples(request, seed=request.seed),
            names=request.names,
        )
    )
