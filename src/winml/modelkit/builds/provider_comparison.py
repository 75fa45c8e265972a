"""Comparison of a built file on the execution provider it is for, with the CPU provider.

For providers that compile a file when a session is created; others write a compiled file, which the compile stage
compares.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.builds.config import requested_quantization
from winml.modelkit.builds.dtypes import requested_quantizations
from winml.modelkit.builds.manifest_records import ProviderComparison
from winml.modelkit.compare.quality_minimum import FLOAT32_PROVIDER_DB
from winml.modelkit.compile.declared_options import DEFAULT_MIN_SQNR_DB
from winml.modelkit.errors import InputError, StageError, UsageError, opt
from winml.modelkit.ort.execution_providers import find_execution_provider

if TYPE_CHECKING:
    from winml.modelkit.builds.plan import BuildPlan
    from winml.modelkit.compare.quality_samples import JudgingData
    from winml.modelkit.ort.devices import ChosenProvider

_ROUNDING_MARGIN_DB = 6.0
"""How much worse than the CPU a provider may round activations to 8 bits. Chosen: twice the error. Measured on decoders
of two layers: WebGPU, which rounds 128 values with one scale and the CPU 32, loses 3 dB more."""


def opens_on_provider(plan: BuildPlan) -> bool:
    """Return True if a build names a provider that compiles the file when a session is created."""
    section = plan.config.compile
    if section is None or section.ep is None or not plan.verify:
        return False
    return not find_execution_provider(section.ep).has_compiled_form


def judging_data(plan: BuildPlan, model: Path) -> JudgingData:
    """Return the samples that the quantization of a build is judged on, for later comparisons.

    Calibration data that does not fit the inputs as a dataset is left out: texts calibrate a decoder with a cache too.

    Args:
        plan: The build.
        model: The file to compare.
    """
    from winml.modelkit.compare.quality_samples import JudgingData, judging_request, refuse_unfit_data
    from winml.modelkit.models.request import processor_folder
    from winml.modelkit.quantize.calibration.calibration_files import calibration_kind

    options, seed = requested_quantization(plan.config), plan.request.seed
    if options is None:
        return JudgingData()
    data = options.calibration_data
    if options.dataset is not None or data is None:
        return JudgingData(data_set=options.judging_request(seed))
    if calibration_kind(data) == "arrays":
        return JudgingData(input_data=Path(data))
    request = judging_request(data, split=options.split, columns=options.columns, seed=seed)
    folder = processor_folder(plan.onnx_path or plan.request)
    if request is not None and folder is not None:
        with contextlib.suppress(UsageError, InputError):
            refuse_unfit_data(request, model, folder)
            return JudgingData(data_set=request)
    return JudgingData()


def compare_on_provider(plan: BuildPlan, model: Path) -> ProviderComparison:
    """Run a built file on its provider and on the CPU provider, and compare the outputs.

    Args:
        plan: The build, with a provider in its compile section.
        model: The ONNX file.

    Returns:
        The comparison, or the reason why the provider cannot run the file here.

    Raises:
        VerificationError: an output differs more than the limit.
    """
    from winml.modelkit.ort.devices import choose_provider, provider_version

    section = plan.config.compile
    assert section is not None  # see opens_on_provider
    assert section.ep is not None
    provider = find_execution_provider(section.ep)
    try:
        chosen = choose_provider(section.ep, section.device, section.ep_options or {})
    except (UsageError, StageError) as error:
        return ProviderComparison(provider=provider.name, problem=error.message)
    comparison = ProviderComparison(
        provider=provider.name,
        version=provider_version(provider),
        device=chosen.device,
        simulated_on=chosen.stand_in,
    )
    return _measure_quality(plan, model, chosen, comparison, section.min_sqnr_db)


def _measure_quality(
    plan: BuildPlan, model: Path, chosen: ChosenProvider, comparison: ProviderComparison, minimum_db: float | None
) -> ProviderComparison:
    """Run both providers; return the comparison with the quality, or with the problem of the provider.

    Raises:
        VerificationError: an output differs more than the limit.
    """
    from winml.modelkit.compare.fidelity import measure_fidelity
    from winml.modelkit.compare.files import (
        outputs_of_file,
        reference_outputs,
        refuse_below_minimum_sqnr,
        rounds_activations,
    )
    from winml.modelkit.compile.file_compilation import SIMULATED_SAMPLES
    from winml.modelkit.models.request import processor_folder
    from winml.modelkit.ort.decoding.inputs import inputs_of_file
    from winml.modelkit.ort.opened_model import RunOptions
    from winml.modelkit.progress import counted

    sizes = chosen.simulated_sizes(inputs_of_file(model))
    run = RunOptions(str(model), sizes=sizes, seed=plan.request.seed)
    folder = processor_folder(plan.onnx_path or plan.request)
    most = SIMULATED_SAMPLES // 2 if chosen.stand_in else None
    request = judging_data(plan, model).request(run, folder, model, most=most)
    try:
        feeds, expected, samples = reference_outputs(model, request.read)
        session = chosen.open(model)
        outputs = [session.run(sample) for sample in counted(feeds, "sample")]
    except (UsageError, StageError) as error:
        reason = error.message.replace(str(model), "the file")
        return comparison.model_copy(update={"problem": f"it cannot run the file here: {reason}"})
    is_float32 = not requested_quantizations(plan.config) and "float16" not in {
        str(array.dtype) for array in expected[0].values()
    }
    limit_db = minimum_db if minimum_db is not None else FLOAT32_PROVIDER_DB if is_float32 else DEFAULT_MIN_SQNR_DB
    values: dict[str, object] = {"samples": samples.count}
    if rounds_activations(model):
        # The reference runs without packed weights, and so without the kernels that round.
        rounded = outputs_of_file(model, feeds, as_written=False)
        rounding_db = measure_fidelity(expected, rounded, limit_db, inputs=feeds).worst.sqnr_db
        values["cpu_rounding_db"] = rounding_db
        if minimum_db is None and rounding_db is not None:
            limit_db = min(limit_db, rounding_db - _ROUNDING_MARGIN_DB)
    fidelity = measure_fidelity(expected, outputs, limit_db, samples, inputs=feeds)
    worst = fidelity.worst
    values |= {"output": worst.name, "sqnr_db": worst.sqnr_db, "min_sqnr_db": limit_db}
    if chosen.stand_in and fidelity.is_refused:
        # The driver in software may be wrong, and the file right.
        return comparison.model_copy(update={**values, "is_near": False})
    hint = (
        f"{chosen.provider.name} computes the file differently from the CPU. Compare module by module: winml compare "
        f"FILE.onnx FILE.onnx --by-module --ep {plan.config.compile.ep if plan.config.compile else ''}. Set a lower "
        f"{opt.min_sqnr}, or build anyway with {opt.no_verify}."
    )
    refuse_below_minimum_sqnr(fidelity, f"the CPU provider ({chosen.provider.name} runs the file)", feeds[0], hint)
    return comparison.model_copy(update=values)
