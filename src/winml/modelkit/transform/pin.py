"""Fixing of dynamic dimensions of an ONNX file by ``winml export``.

Normalization folds expressions of the sizes. Commands that change a graph share normalization, comparison and writing
(``graph_file``). Independent of PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir
import pydantic

from winml.modelkit.compare.files import refuse_different
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.errors import InputError, StageError, UsageError, VerificationError, WinMLError, opt
from winml.modelkit.metadata_keys import DIMENSIONS_KEY, INPUTS_KEY, OUTPUTS_KEY
from winml.modelkit.onnx import pinning, specs
from winml.modelkit.onnx.model_metadata import output_specs
from winml.modelkit.onnx.stage import StageResult
from winml.modelkit.ort.accepted_inputs import large_size
from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.sessions import Session
from winml.modelkit.tags.tagging import measure_coverage
from winml.modelkit.transform.graph_file import FileWork, GraphFileTask, Transformation, make_file
from winml.modelkit.transform.records import PinnedModel


class _Trial:
    """Runs a file at sizes of its dynamic dimensions, since a graph does not declare their limits."""

    def __init__(self, session: Session, seed: int) -> None:
        self._session = session
        self._inputs = graph_inputs(session)
        self._seed = seed
        self.names = dict.fromkeys(key for spec in self._inputs for key in spec.shape if isinstance(key, str))
        self._small = {name: large_size(name) or 2 for name in self.names}

    def refusal(self, sizes: Mapping[str, int]) -> str | None:
        """Return the reason why the file does not run at the sizes; `None` if the file runs."""
        try:
            self._session.run(draw_feeds(self._inputs, {**self._small, **sizes}, self._seed))
        except StageError as error:
            return error.message.partition(f"{self._session.name}: ")[2] or error.message
        return None

    def limit(self, name: str, size: int) -> int | None:
        """Return the largest supported size of a dimension, with all remaining dimensions small.

        `None` if the file runs at `size`, or does not run at a small size either.
        """
        low, high = self._small.get(name, 2), size
        if low >= high or self.refusal({name: high}) is None or self.refusal({name: low}) is not None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.refusal({name: middle}) is None else (low, middle)
        return low


def pin_model(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    sizes: Mapping[str, int],
    *,
    overwrite: bool = False,
    verify: bool = True,
    seed: int = 0,
) -> PinnedModel:
    """Fix dynamic dimensions of an ONNX file and write the result.

    Args:
        source: The file; it is not changed.
        output: The ``.onnx`` file to write.
        sizes: Size by name in the file, by ``input:axis``, or by key of ``--shape-config``. Other dimensions stay
            dynamic.
        overwrite: Replace an existing file.
        verify: Compare with ``source`` at these sizes.
        seed: Seed of the inputs of the comparison.

    Raises:
        UsageError: a name is not in the file, or the output exists or would replace data of the source.
        InputError: the file is no ONNX model.
        VerificationError: the outputs of the result differ from those of ``source``; no file was written.
    """
    task = GraphFileTask(Path(source), Path(output), overwrite=overwrite, verify=verify, seed=seed)
    return make_file(task, Pinning(sizes))


@dataclass(frozen=True)
class _PinResult(StageResult):
    """A model with fixed dimensions."""

    sizes: Mapping[str, int]
    """Fixed dimension → size."""
    still_open: tuple[str, ...]


@dataclass(frozen=True)
class Pinning(FileWork[_PinResult, PinnedModel]):
    """Work that fixes dynamic dimensions."""

    sizes: Mapping[str, int]
    """Size by name in the file, by ``input:axis``, or by key of ``--shape-config``."""
    step_name: ClassVar[str] = "pinning"
    # Normalization folds expressions of the sizes, and infers the shapes again.
    precedes_normalization: ClassVar[bool] = True

    def refuse_graph(self, model: ir.Model) -> None:
        """Refuse sizes of dimensions that the graph lacks, and sizes outside its recorded bounds.

        Raises:
            UsageError: a size does not fit; the message names it.
        """
        bounds = specs.stated_bounds(model.metadata_props)
        for name, size in pinning.sizes_of_dimensions(model.graph, self.sizes).items():
            if name in bounds and (refusal := bounds[name].refusal(size)):
                raise UsageError(
                    f"{opt.shape_config}: {refusal}",
                    hint=f"Use one of the sizes {bounds[name].words}, or export the model with this one.",
                )

    @contextlib.contextmanager
    def acquire_resources(self, task: GraphFileTask) -> Iterator[Pinning]:  # noqa: ARG002 - other works look at it
        """Remove the step from errors: steps of the work are not displayed."""
        try:
            yield self
        except WinMLError as error:
            error.step = ""
            raise

    def record(self, transformation: Transformation[_PinResult]) -> PinnedModel:
        """Return the record with the sizes and the new inputs and outputs.

        Raises:
            InputError: an input has no rank or dtype, or a dynamic size without a name.
        """
        result, file = transformation.result, transformation.file
        return PinnedModel(
            model_path=file.model_path,
            sizes=result.sizes,
            still_open=result.still_open,
            inputs=tuple(_input_specs(result.model)),
            outputs=output_specs(result.model.graph),
            coverage=file.coverage,
            verification=file.verification,
            size_bytes=sum(written_file.size_bytes for written_file in file.files),
            notes=file.notes,
        )

    @property
    def request_words(self) -> str:
        """The sizes."""
        return _size_words(self.sizes)

    def apply(self, model: ir.Model) -> _PinResult:
        """Fix the dimensions, in place.

        Raises:
            UsageError: a name is not in the file.
        """
        names = pinning.open_dimensions(model.graph)
        sizes = pinning.sizes_of_dimensions(model.graph, self.sizes)
        sums = specs.stated_sums(model.metadata_props)
        sizes |= {name: size for name, size in specs.summed_sizes(sums, sizes).items() if name in names}
        pinning.pin_dimensions(model, sizes)
        _update_sums(model, sizes)
        _drop_fixed_bounds(model, sizes)
        return _PinResult(
            model,
            changed=bool(sizes),
            notes=(),
            coverage=measure_coverage(model),
            sizes=sizes,
            still_open=tuple(name for name in names if name not in sizes),
        )

    def summary(self, result: _PinResult) -> str:
        """Return the sizes."""
        return _size_words(result.sizes)

    def metadata(self, model: ir.Model) -> Mapping[str, Any]:
        """Return the records of the new inputs and outputs.

        Raises:
            InputError: an input has no rank or no dtype, or a dynamic size without a name.
        """
        return {
            INPUTS_KEY: [spec.as_record() for spec in _input_specs(model)],
            OUTPUTS_KEY: [spec.as_record() for spec in output_specs(model.graph)],
        }

    def compare(self, source: Path, written: Path, seed: int) -> VerificationInfo:
        """Compare both files at the fixed sizes.

        Raises:
            UsageError: ``source`` does not run at these sizes.
            VerificationError: the outputs differ, or the result cannot be run at these sizes.
        """
        try:
            return refuse_different(source, written, seed, has_fixed_sizes=True)
        except StageError as error:
            self._refuse_sizes(source, seed)
            raise VerificationError(error.message, hint=f"Skip the comparison with {opt.no_verify}.") from error

    def _refuse_sizes(self, source: Path, seed: int) -> None:
        """Refuse sizes at which the source itself does not run.

        Raises:
            UsageError: the source does not run; the message names the size and the largest supported one.
        """
        trial = _Trial(open_session(source, as_written=True), seed)
        sizes = specs.resolve_names(self.sizes, trial.names)
        reason = trial.refusal(sizes)
        if reason is None:
            return
        limits = [
            f"{name} {size}: {source.name} takes {limit} at most"
            for name, size in sizes.items()
            if (limit := trial.limit(name, size)) is not None
        ]
        refusal = "; ".join(limits) or f"{source.name} does not run at {_size_words(sizes)}: {reason}"
        raise UsageError(f"{opt.shape_config}: {refusal}", hint="Set sizes that the model supports.")


def _size_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _update_sums(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Replace fixed dimensions by numbers in the recorded sums, in place; remove the sums of fixed dimensions."""
    records = specs.input_records(model.metadata_props)
    if not any("sums" in record for record in records.values()):
        return
    for record in records.values():
        sums = {
            name: [sizes.get(term, term) for term in terms]
            for name, terms in record.pop("sums", {}).items()
            if name not in sizes
        }
        if sums:
            record["sums"] = sums
    model.metadata_props[INPUTS_KEY] = json.dumps(list(records.values()))


def _drop_fixed_bounds(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Remove the recorded bounds of fixed dimensions, in place."""
    bounds = [
        bound.as_record() for name, bound in specs.stated_bounds(model.metadata_props).items() if name not in sizes
    ]
    model.metadata_props.pop(DIMENSIONS_KEY, None)
    if bounds:
        model.metadata_props[DIMENSIONS_KEY] = json.dumps(bounds)


def _input_specs(model: ir.Model) -> Iterator[specs.InputTensorSpec]:
    """Yield the inputs of the graph, with the value ranges recorded in the file.

    Raises:
        InputError: an input has no rank or dtype, or a dynamic size without a name.
    """
    file_records = specs.input_records(model.metadata_props)
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        file_record = file_records.get(value.name or "", {})
        record: dict[str, object] = {
            "name": value.name,
            "shape": [size if isinstance(size, int) else str(size) for size in value.shape or ()],
            "dtype": str(value.dtype.numpy()) if value.dtype is not None else "",
            **{key: file_record[key] for key in specs.STATED_FIELDS if key in file_record},
        }
        try:
            yield specs.InputTensorSpec.model_validate_json(json.dumps(record))
        except pydantic.ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise InputError(
                f"input {value.name}: {record['dtype']}{record['shape']}: {reason}",
                hint="Sizes can be fixed only for inputs with a known rank and dtype and named dynamic dimensions.",
            ) from None
