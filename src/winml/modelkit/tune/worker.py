"""Process of one candidate: opens the file, compares its outputs, and times blocks of runs.

A separate process keeps memory, session creation and threads of one model apart from other candidates, and a provider
that ends its process ends no other. ``contestants.py`` sends the requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.fidelity import QualitySamples, measure_fidelity
from winml.modelkit.compare.outputs import TEXT_KINDS
from winml.modelkit.errors import MeasureError, WinMLError, WriteError, opt
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.ort import opened_model
from winml.modelkit.ort.graph_inputs import batch_of, graph_inputs
from winml.modelkit.ort.host import peak_bytes, resident_bytes
from winml.modelkit.ort.processes import answer_questions
from winml.modelkit.ort.sessions import PreparedRun
from winml.modelkit.profile.latency import LatencyOptions, measure_block, measure_latency

_FIRST_RUNS = 3
"""Number of runs before memory is measured. Chosen: ONNX Runtime plans its memory in the first run and has allocated
it after the second."""


_EQUAL_SAMPLES = 8
"""Number of samples after which the comparison of a file with equal outputs ends. Chosen: no quality limit is near,
and a wrongly optimized graph differs on the first sample."""
_EQUAL_DB = 100.0
"""Chosen: float32 sums in another order have an SQNR of 110 dB and more, quantized values 90 dB and less (int16)."""


def values_path(folder: Path) -> Path:
    """Return the path of the values used for timing."""
    return folder / "values.npz"


def sample_path(folder: Path, number: int) -> Path:
    """Return the path of a sample used for the comparison of outputs."""
    return folder / f"sample{number}.npz"


def _outputs_path(folder: Path, number: int) -> Path:
    return folder / f"answers{number}.npz"


def _write_sample(folder: Path, number: int, feeds: Arrays, outputs: Arrays) -> None:
    """Write a sample, and the outputs of the plain file.

    Raises:
        WriteError: one of the files cannot be written; then neither file is written.
    """
    with OutputFiles() as files:
        for path, arrays in ((sample_path(folder, number), feeds), (_outputs_path(folder, number), outputs)):
            np.savez(files.reserve(path), **arrays)  # type: ignore[arg-type]  # the stub takes an array for a flag
        files.commit()


def _usable_outputs(outputs: Arrays, model_name: str) -> dict[str, Array]:
    """Return the numeric outputs.

    Raises:
        MeasureError: the outputs cannot reveal a wrong candidate.
    """
    numbers = _numeric_outputs(outputs)
    if not any(np.any(np.isfinite(array) & (array != 0)) for array in numbers.values()):
        raise MeasureError(
            f"{model_name} returns only zeros, NaN or infinity on these inputs, so a wrong candidate could not "
            "be detected",
            hint=f"Pass inputs with meaningful outputs: {opt.input_data} file.npz.",
        )
    return numbers


def _numeric_outputs(outputs: Mapping[str, Array | None]) -> dict[str, Array]:
    """Return the numeric outputs, in data types that numpy can write."""
    numbers = {
        name: array for name, array in outputs.items() if array is not None and array.dtype.kind not in TEXT_KINDS
    }
    return {name: array if array.dtype.kind in "biufc" else array.astype(np.float32) for name, array in numbers.items()}


class _Runner:
    """The model of this process."""

    def __init__(self) -> None:
        self._opened: opened_model.OpenedModel | None = None
        self._feeds: Arrays = {}
        self._runs: list[PreparedRun] = []
        self._pool: ThreadPoolExecutor | None = None

    def record(
        self,
        path: str,
        model_name: str,
        processors: str | None,
        folder: str,
        samples: int | None,
        input_options: Mapping[str, Any],
        data_set: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write the values for timing, and the samples for comparison with the outputs of the plain file.

        Args:
            path: The plain file.
            model_name: The model as written by the user.
            processors: Folder of the processors that convert samples to arrays; None: no processors.
            folder: Folder of the written values.
            samples: Number of samples for comparison; None: the default for the file size, as in other verbs.
            input_options: Fields of ``RunOptions`` for the inputs.
            data_set: Fields of ``DataSetRequest`` for the samples of the comparison; None: generated samples.
        """
        # Imported late: only the first process needs these modules.
        from winml.modelkit.compare.quality_samples import SampleRequest, quality_values
        from winml.modelkit.ort.decoding.inputs import decoder_run, inputs_of_file
        from winml.modelkit.samples.data_sets import DataSetRequest

        input_data = input_options["input_data"]
        options = opened_model.RunOptions(
            model_name, **{**input_options, "input_data": None if input_data is None else Path(input_data)}
        )
        model = opened_model.open_model(Path(path), options, options.choose_provider())
        processor_dir = None if processors is None else Path(processors)
        request = None if data_set is None else DataSetRequest(**data_set)
        quality = quality_values(
            model.session, SampleRequest(options, processor_dir, request, count=samples, model=Path(path))
        )
        for number, values in enumerate(quality.values):
            with opened_model.refusals_explained(values):
                outputs = model.session.run(values.feeds)
            _write_sample(Path(folder), number, values.feeds, _usable_outputs(outputs, model_name))
        timing, is_as_drawn = options, False
        if input_data is None:
            decoding = decoder_run(inputs_of_file(Path(path)), options.sizes)
            timing = opened_model.with_fitting_sizes(model.session, dataclasses.replace(options, decoding=decoding))
            is_as_drawn = decoding is None and not timing.fitting_sizes
        values = opened_model.values_for(model.session, timing)
        with opened_model.refusals_explained(values):
            outputs = model.session.run(values.feeds)
        with OutputFiles() as files:
            np.savez(files.reserve(values_path(Path(folder))), **values.feeds)  # type: ignore[arg-type]  # as below
            files.commit()
        batch_size, _ = batch_of(values.inputs, values.feeds, outputs)
        return {
            "shapes": {name: list(array.shape) for name, array in values.feeds.items()},
            "notes": [*values.notes, *quality.values[0].notes],
            "samples": dataclasses.asdict(quality.about),
            "batch_size": batch_size,
            "is_as_drawn": is_as_drawn,
        }

    def open(self, path: str, folder: str, run: Mapping[str, Any]) -> dict[str, object]:
        """Open the file with the values for timing, and run it a few times; return its times and memory.

        Args:
            path: The ONNX file.
            folder: Folder with the stored values.
            run: Settings of the run: callers, provider and threads.

        Raises:
            UsageError: the provider does not support dynamic dimensions.
        """
        callers = run["callers"]
        options = opened_model.RunOptions(
            path,
            input_data=values_path(Path(folder)),
            ep=run["ep"],
            ep_options=run["ep_options"],
            threads=run["threads"],
        )
        provider = options.choose_provider()
        self._opened = model = opened_model.open_model(Path(path), options, provider)
        opened_model.refuse_dynamic_inputs(provider, graph_inputs(model.session), options)
        # Stored, because ONNX Runtime reads the arrays in place.
        self._feeds = feeds = opened_model.values_for(model.session, options).feeds
        bytes_before = resident_bytes()
        self._runs = [model.session.prepare(feeds) for _ in range(callers)]
        self._pool = ThreadPoolExecutor(callers) if callers > 1 else None
        latency = measure_latency(self._run_callers, LatencyOptions(_FIRST_RUNS, warmup=1))
        return {
            "session_creation_ms": model.creation_ms,
            "session_bytes": model.session_bytes,
            "run_bytes": max(resident_bytes() - bytes_before, 0),
            "peak_bytes": max(peak_bytes(), resident_bytes()),
            "first_run_ms": latency.first_run_ms,
            "run_ms": latency.summary.p50,
        }

    def compare(self, folder: str, samples: Mapping[str, Any]) -> dict[str, object]:
        """Compare the outputs with those of the plain file; return the worst output.

        Raises:
            UsageError: sizes or values do not fit the inputs of the graph.
            InputError: a file of values is damaged.
        """
        assert self._opened is not None  # opened before
        session, feeds, reference, outputs = self._opened.session, [], [], []
        quality_samples = QualitySamples(**samples)
        for number in range(quality_samples.count):
            options = opened_model.RunOptions(session.name, input_data=sample_path(Path(folder), number))
            feeds.append(opened_model.values_for(session, options).feeds)
            outputs.append(_numeric_outputs(session.run(feeds[-1])))
            with np.load(_outputs_path(Path(folder), number), allow_pickle=False) as archive:
                reference.append({name: archive[name] for name in archive.files})
            if number + 1 == _EQUAL_SAMPLES:
                worst = measure_fidelity(reference, outputs, 0.0, inputs=feeds).worst
                if not worst.problem and worst.sqnr_db >= _EQUAL_DB:
                    break
        quality_samples = dataclasses.replace(quality_samples, count=len(outputs))
        fidelity = measure_fidelity(reference, outputs, 0.0, quality_samples, inputs=feeds)
        worst = fidelity.worst
        return {
            "output": worst.name,
            "sqnr_db": None if worst.problem else worst.sqnr_db,
            "lower_sqnr_db": None if worst.problem else worst.lower_db,
            "problem": worst.problem,
            "quality": fidelity.quality or {},
        }

    def block(self, size: int) -> dict[str, object]:
        """Time a block of runs."""
        return {"runs_ms": list(measure_block(self._run_callers, size))}

    def _run_callers(self) -> None:
        """Run the model once for each caller, in parallel."""
        if self._pool is None:
            self._runs[0]()
        else:
            list(self._pool.map(lambda run: run(), self._runs))


def _run_request(request: dict[str, Any], runner: _Runner) -> dict[str, object]:
    """Call the method that a request names; return its result, or the error."""
    methods: dict[str, Callable[..., dict[str, object]]] = {
        "record": runner.record, "open": runner.open, "compare": runner.compare, "block": runner.block
    }  # fmt: skip
    try:
        return methods[request.pop("do")](**request)
    except WinMLError as error:
        return {"error": error.message, "hint": error.hint, "is_unwritten": isinstance(error, WriteError)}


if __name__ == "__main__":
    runner = _Runner()
    answer_questions(lambda request, _content: _run_request(request, runner))
