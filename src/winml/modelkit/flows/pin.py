"""How does a file with open dimensions become a verified one with fixed sizes?

Fixes the sizes, brings the graph into its plain form, which computes whatever depended on them only, and compares the
result with the file it was made from. Knows no PyTorch and imports none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pydantic
from numpy.typing import NDArray

from winml.modelkit.compare.outputs import VerificationInfo, compare_outputs
from winml.modelkit.errors import InputError, StageError, VerificationError
from winml.modelkit.graph.dimensions import resolve_names
from winml.modelkit.graph.files.output_files import OutputFiles, refuse_inputs
from winml.modelkit.graph.files.output_paths import ExportPaths
from winml.modelkit.graph.files.placing import external_files
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.graph.model_metadata import output_specs
from winml.modelkit.graph.pinning import open_dimensions, pin_dimensions
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.coverage import Coverage
from winml.modelkit.metadata_keys import INPUTS_KEY, OUTPUTS_KEY
from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.normalize.stamp import stamp
from winml.modelkit.results.words import verification_words
from winml.modelkit.runtime.feeds import make_feeds
from winml.modelkit.runtime.sessions import Session

__all__ = ["PinnedModel", "pin_model"]

Array = NDArray[Any]

_TRIED_SIZES: Mapping[str, int] = {"height": 224, "width": 224, "samples": 16_000, "frames": 256}
"""Sizes of dimensions that stay open, for the comparison: chosen, ones that models take. Others get small ones."""


@dataclass(frozen=True)
class PinnedModel:
    """What came of fixing sizes."""

    model_path: Path
    sizes: Mapping[str, int]
    """Dimension → size, as fixed."""
    still_open: tuple[str, ...]
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...]
    coverage: Coverage
    verification: VerificationInfo | None
    """Comparison with the file it was made from; None where it was not asked for."""
    size_bytes: int
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready summary."""
        return {
            "model_path": str(self.model_path),
            "size_bytes": self.size_bytes,
            "pinned": dict(self.sizes),
            "open": list(self.still_open),
            "inputs": [spec.as_record() for spec in self.inputs],
            "outputs": [spec.as_record() for spec in self.outputs],
            "nodes": self.coverage.nodes,
            "coverage": {"tagged": self.coverage.tagged, "percent": round(self.coverage.percent, 2)},
            "verification": self.verification.as_record() if self.verification else None,
            "notes": list(self.notes),
        }


def pin_model(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    sizes: Mapping[str, int],
    *,
    overwrite: bool = False,
    verify: bool = True,
    seed: int = 0,
) -> PinnedModel:
    """Fix open dimensions of an ONNX file and write the result.

    Args:
        source: The file; it stays as it is.
        output: The ``.onnx`` file to write.
        sizes: Size by name in the file, or by key of ``--shape-config``. Names left out stay open.
        overwrite: Replace a file that is there already.
        verify: Compare with ``source`` at these sizes.
        seed: Seed of the inputs compared on.

    Raises:
        UsageError: a name the file does not have, or an output that exists or would replace its data.
        InputError: the file is no ONNX model.
        NormalizeError: the graph could not be brought into its plain form.
        VerificationError: the result does not answer as ``source`` does; no file was written.
    """
    source = Path(source)
    paths = ExportPaths.for_output(output, with_sidecar=False, with_report=False)
    paths.refuse_existing(overwrite=overwrite)
    read_structure(source)  # whatever is wrong with the file is told in words of ours
    if paths.model.resolve() != source.resolve():
        # The data of an earlier output goes when that is replaced.
        refuse_inputs([paths.data], external_files(source))
    model = _load(source)
    names = open_dimensions(model.graph)
    pinned = resolve_names(sizes, names)
    pin_dimensions(model, pinned)
    normalized = normalize(model)
    inputs = _input_specs(model)
    _rewrite_metadata(model, inputs)
    with OutputFiles() as files:
        staged = files.stage(paths.model)
        files.drop(paths.data)
        write_model(model, staged)
        still_open = tuple(name for name in names if name not in pinned)
        verification = _compare(source, staged, inputs, still_open, seed) if verify else None
        written = files.commit(overwrite=overwrite)
    return PinnedModel(
        model_path=paths.model,
        sizes=pinned,
        still_open=still_open,
        inputs=inputs,
        outputs=output_specs(model.graph),
        coverage=normalized.coverage,
        verification=verification,
        size_bytes=sum(written.values()),
        notes=normalized.notes,
    )


def _load(source: Path) -> ir.Model:
    try:
        return ir.load(source)
    except (OSError, ValueError, KeyError, AttributeError, NotImplementedError) as error:
        raise InputError(f"{source}: cannot be read as a graph: {error}", hint="Export it again.") from error


def _input_specs(model: ir.Model) -> tuple[InputTensorSpec, ...]:
    """Return the inputs as the graph declares them, with the value ranges the file knows."""
    try:
        known = {record["name"]: record for record in json.loads(model.metadata_props.get(INPUTS_KEY, "[]"))}
    except (json.JSONDecodeError, KeyError, TypeError):
        known = {}
    specs = []
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        record = {
            "name": value.name,
            "shape": [size if isinstance(size, int) else str(size) for size in value.shape or ()],
            "dtype": str(value.dtype.numpy()) if value.dtype is not None else "",
            **{
                key: known[value.name][key]
                for key in ("value_range", "first_values")
                if key in known.get(value.name, {})
            },
        }
        try:
            specs.append(InputTensorSpec.model_validate_json(json.dumps(record)))
        except pydantic.ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise InputError(
                f"input {value.name}: {record['dtype']}{record['shape']}: {reason}",
                hint="Only inputs whose rank and dtype are known, and whose open sizes have names, can be pinned.",
            ) from None
    return tuple(specs)


def _rewrite_metadata(model: ir.Model, inputs: tuple[InputTensorSpec, ...]) -> None:
    """Bring what the file says about itself up to date, in place; a file that says nothing goes on saying nothing."""
    if INPUTS_KEY not in model.metadata_props:
        return
    records = {
        INPUTS_KEY: [spec.as_record() for spec in inputs],
        OUTPUTS_KEY: [spec.as_record() for spec in output_specs(model.graph)],
    }
    for key, record in records.items():
        model.metadata_props[key] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    stamp(model)


def _compare(
    source: Path, staged: Path, inputs: tuple[InputTensorSpec, ...], still_open: tuple[str, ...], seed: int
) -> VerificationInfo:
    """Compare both files on two draws.

    Raises:
        VerificationError: they differ, or one cannot be run.
    """
    sizes = {name: _TRIED_SIZES.get(name, position) for position, name in enumerate(still_open, start=2)}
    draws = [make_feeds(inputs, seed + number, sizes=sizes) for number in (1, 2)]
    verification = compare_outputs(_answers(source, source.name, draws), _answers(staged, "the result", draws))
    if not all(item.is_equal for item in verification.comparisons):
        raise VerificationError(
            f"the result does not answer as {source.name} does: {verification_words(verification)}",
            hint="No file was written; --no-verify writes it all the same. Please report it.",
        )
    # A model that ignores its inputs was found out when it was exported; here only equality is asked.
    return replace(verification, has_signal=True)


def _answers(path: Path, shown: str, draws: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    try:
        session = Session(path)
        return [session.run(draw) for draw in draws]
    except StageError as error:
        raise VerificationError(
            f"cannot verify: {error.message.replace(str(path), shown)}",
            hint="Give sizes the model takes, or skip the comparison with --no-verify.",
        ) from error
