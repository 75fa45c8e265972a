"""Recording of a proof: a PyTorch model and its ONNX file run on the same samples, and excerpts of their values."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.by_module.module_comparison import TOLERANCE, recorded_groups
from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import SidePair
from winml.modelkit.compare.by_module.torch_side import TorchSide
from winml.modelkit.compare.by_module.value_matching import match_with_torch, sort_boundaries
from winml.modelkit.compare.comparing import CompareOptions, create_file_samples
from winml.modelkit.compare.fidelity import SCORE_RANKS, FidelitySum, judged_outputs
from winml.modelkit.compare.proof.excerpts import choose_excerpt
from winml.modelkit.compare.proof.records import (
    Proof,
    ProofModule,
    ProofOutput,
    ProofPart,
    ProofRecord,
    ProofRequest,
    ProofSamples,
    ProofTensor,
    write_proof,
)
from winml.modelkit.compare.proof.replay import replay_part
from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.compare.quality_samples import SampleValues
from winml.modelkit.compare.words import samples_words
from winml.modelkit.errors import UsageError
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.fingerprint import file_fingerprint
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.records import json_value
from winml.modelkit.tags import address
from winml.modelkit.version import __version__, library_versions
from winml.modelkit.words import count_noun, size_words

_LEAST_BYTES, _MOST_BYTES = 1_000_000, 20_000_000
_SHARE = 0.01
"""Chosen: a proof is 1 % of its model; of a small model as large as its samples need, of a large one as small as a
repository takes."""
MOST_SAMPLES = 4
"""Chosen: a device that simulates an NPU takes seconds for each."""
_LEAST_WIDTH, _MOST_WIDTH = 64, 4096
"""Numbers of a sketch. Chosen: with 64, the error of a module is known to a sixth of itself."""
_SLACK_DB = 3.0
"""Chosen: the error of a file that misses its minimum may grow by the square root of 2, as between two machines."""
_SLACK_SHARE = 1 / 16
"""Chosen: of a file that misses its minimum, one prediction more of 16 may differ on another machine."""
_OTHER_VALUE = 0.5
"""Relative error from which a value of PyTorch is another one than the value of the file. Chosen: the file was compared
with PyTorch before, and two independent values have an error of 1.4."""
_OTHER_ROUNDED_VALUE = 1.0
"""As above, for a quantized file. Chosen: an error as large as the value."""


@dataclass
class ProofMaker:
    """Collects the parts of a proof."""

    request: ProofRequest
    model_class: str
    part_count: int
    """Number of parts of the model."""
    processors: Path | None = None
    """Folder of tokenizer and processor, for generated samples; ``None`` without one."""
    parts: list[ProofPart] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    limit_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        reference: TorchSide,
        tagged: Path,
        deployed: Path,
        minimum: QualityMinimum,
        provider: ChosenProvider | None = None,
    ) -> None:
        """Record a part: its values on samples, and the quality of the deployed file.

        Args:
            name: Name of the part.
            reference: The PyTorch model.
            tagged: ONNX file whose modules are recorded: the export, or the deployed file.
            deployed: ONNX file that is deployed.
            minimum: Minimum quality of the deployed file.
            provider: Provider of the deployed file; ``None``: the CPU provider.

        Raises:
            UsageError: the user's values do not fit the inputs.
            InputError: a file is damaged.
            StageError: a file cannot be run.
            ExportError: the PyTorch model refuses the samples.
        """
        limit_bytes = _part_limit(tagged, self.part_count)
        file = OnnxSide(tagged, by_module=True)
        run = RunOptions(tagged.name, input_data=self.request.inputs, seed=self.request.seed)
        options = CompareOptions(run, draws=MOST_SAMPLES)
        # The user's inputs in an earlier proof do not go into this one.
        samples = create_file_samples(file.session(), options, self.processors, tagged, takes_stored=False)
        part, arrays = _record_part(name, reference, file, samples, limit_bytes)
        self.parts.append(_with_quality(part, arrays, deployed, minimum, provider))
        self.arrays.update(arrays)
        self.limit_bytes += limit_bytes

    @property
    def has_user_data(self) -> bool:
        """True if the proof contains inputs of the user."""
        return self.request.inputs is not None

    @property
    def words(self) -> str:
        """Description of the proof."""
        samples = samples_words(self.parts[0].samples.about)
        size = size_words(sum(array.nbytes for array in self.arrays.values()))
        modules = sum(module.relative_error is not None for part in self.parts for module in part.modules)
        given = "" if self.request.inputs is None else f"; contains the inputs of {self.request.inputs.name}"
        return f"PyTorch's outputs on {samples}, values of {count_noun(modules, 'module call')} ({size}){given}"

    def write(self, folder: Path, files: OutputFiles) -> tuple[Path, Path]:
        """Write the proof into ``proof/`` in a folder, to be committed with the other files; return the final paths.

        Raises:
            WriteError: a file cannot be written.
        """
        record = ProofRecord(
            model_class=self.model_class,
            versions={
                "winml-modelkit": __version__,
                "python": platform.python_version(),
                **library_versions(("numpy", "onnx", "onnxruntime", "torch", "transformers")),
            },
            limit_bytes=self.limit_bytes,
            user_data=self.has_user_data,
            parts=tuple(self.parts),
        )
        return write_proof(Proof(record, self.arrays), folder, files)


def _part_limit(model: Path, parts: int) -> int:
    """Return the maximum size of the arrays of one of several parts, by the size of its file with the data."""
    size = sum(file.stat().st_size for file in (model, *external_files(model)))
    return int(min(max(_SHARE * size, _LEAST_BYTES), _MOST_BYTES) / max(parts, 1))


def _record_part(
    name: str, reference: TorchSide, file: OnnxSide, samples: SampleValues, limit_bytes: int
) -> tuple[ProofPart, dict[str, Array]]:
    """Run a PyTorch model and its file, and return the record of the part with the stored arrays.

    The record has no quality numbers yet: they are those of the replay.

    Args:
        name: Name of the part.
        reference: The PyTorch model.
        file: The ONNX file with its modules.
        samples: Inputs of both.
        limit_bytes: Maximum size of the arrays.

    Raises:
        UsageError: values do not fit the inputs.
        StageError: the file cannot be run.
        ExportError: the PyTorch model refuses the values.
    """
    file.session([name for call in file.boundaries.values() for name in (*call.inputs, *call.outputs)])
    feeds = _fitting_samples(samples, limit_bytes // 2)
    pair = SidePair(reference, file, feeds)
    data = ", ".join(values.file.name for values in samples.values[: len(feeds)] if values.file is not None)
    about = samples.about
    part = ProofPart(
        name=name,
        samples=ProofSamples(source=about.source, count=len(feeds), seed=about.seed, data=data or about.data),
        inputs=tuple(file.inputs),
        states=dict(file.states),
        is_rounded=reference.is_rounded,
        tensors={},
        modules=(),
        tolerance=TOLERANCE,
    )
    recorder = _Recorder(part)
    for number, sample in enumerate(feeds):
        for key, array in sample.items():
            recorder.store(part.key("inputs", key, number), array, array.size or 1)
        expected = reference.outputs(pair.reference_feeds(sample))
        numbers = max(limit_bytes // (4 * 4 * len(feeds) * len(expected)), _LEAST_WIDTH)
        for key, array in expected.items():
            if array.dtype.kind not in "OSU":
                recorder.store(part.key("outputs", key, number), array, numbers, by_rows=array.ndim in SCORE_RANKS)
    modules = _record_modules(recorder, replace(pair, draws=feeds[:1]), file, limit_bytes // 4)
    return part.model_copy(update={"tensors": recorder.tensors, "modules": modules}), recorder.arrays


def _with_quality(
    part: ProofPart, arrays: Arrays, path: Path, minimum: QualityMinimum, provider: ChosenProvider | None = None
) -> ProofPart:
    """Replay a part on the file that is deployed, and return the part with its quality, limits and time.

    Args:
        part: The part.
        arrays: Stored arrays of the part.
        path: The file.
        minimum: Minimum quality of every output. Limits are lower if the file does not reach it.
        provider: Execution provider; ``None``: the CPU provider.

    Raises:
        StageError: the file cannot be run.
    """
    try:
        replay = replay_part(part, arrays, path, minimum, by_module=True, provider=provider)
    except UsageError:  # it has no modules, or compiled ones
        replay = replay_part(part, arrays, path, minimum, provider=provider)
    outputs = [output.fidelity for output in replay.outputs]
    judged = judged_outputs(outputs)
    agreements = [output.prediction_agreement for output in judged if output.prediction_agreement is not None]
    reached = QualityMinimum(
        min(output.lower_db for output in judged) - _SLACK_DB,
        max(min(agreements) - _SLACK_SHARE, 0.0) if agreements else None,
    )
    limits = minimum if replay.is_within else reached
    compared = {(module.identity.tag, module.identity.call): module for module in replay.modules or ()}

    def measured(module: ProofModule) -> ProofModule:
        found = compared.get(module.key)
        if found is None or found.fidelity is None or found.fidelity.problem:
            return module
        return module.model_copy(
            update={"relative_error": found.fidelity.relative_error, "own_error": json_value(found.own_error)}
        )

    return part.model_copy(
        update={
            "file": path.name,
            "sha256": hash_file(path),
            "fingerprint": file_fingerprint(path),
            "provider": "CPUExecutionProvider" if provider is None else provider.provider.name,
            "outputs": tuple(
                ProofOutput(
                    name=output.name,
                    sqnr_db=output.sqnr_db,
                    lower_db=output.lower_db,
                    relative_error=json_value(output.relative_error),
                    top1_agreement=output.top1_agreement,
                )
                for output in outputs
            ),
            "min_sqnr_db": limits.sqnr_db,
            "min_agreement": limits.agreement,
            "modules": tuple(map(measured, part.modules)),
            "run_ms": json_value(replay.run_ms, 3),
        }
    )


class _Recorder:
    """Collects excerpts of values."""

    def __init__(self, part: ProofPart) -> None:
        self.part = part
        self.tensors: dict[str, ProofTensor] = {}
        self.arrays: dict[str, Array] = {}

    def store(
        self, key: str, array: Array, most_numbers: int, *, by_rows: bool = False, is_of_file: bool = False
    ) -> None:
        """Store the excerpt of a value under a key."""
        kind, self.arrays[key] = choose_excerpt(array, most_numbers, by_rows=by_rows)
        self.tensors[key] = ProofTensor(
            shape=array.shape, dtype=str(array.dtype), excerpt=kind, source="file" if is_of_file else "pytorch"
        )


def _fitting_samples(samples: SampleValues, limit_bytes: int) -> list[Arrays]:
    """Return the first samples whose inputs fit; at least one."""
    fitting: list[Arrays] = []
    total = 0
    for values in samples.values[:MOST_SAMPLES]:
        total += sum(array.nbytes for array in values.feeds.values())
        if fitting and total > limit_bytes:
            break
        fitting.append(values.feeds)
    return fitting


def _record_modules(recorder: _Recorder, pair: SidePair, file: OnnxSide, limit_bytes: int) -> tuple[ProofModule, ...]:
    """Store excerpts of the boundary values of all modules, and return the modules in the order of computation.

    The values are those of PyTorch. A value that no call of PyTorch takes or returns, such as the sum inside a parent,
    is that of the file.

    Args:
        recorder: Receives the values.
        pair: The PyTorch model, the file, and one sample.
        file: The file of the pair.
        limit_bytes: Maximum size of the excerpts.
    """
    calls = sort_boundaries(file.boundaries)
    inner = [call for call in calls if address.depth(call.identity.tag) > 1]
    sources = _torch_names(pair)
    taps = [
        (sources.get(name, ""), name)
        for name in dict.fromkeys(name for call in inner for name in (*call.outputs, *call.inputs))
    ]
    width = _sketch_width(len(taps), limit_bytes)
    for group, _, ours, theirs in recorded_groups(pair, taps):
        for source, name in group:
            own, value = ours.get(source), theirs[name]
            if "float" not in str(value.dtype):
                continue
            is_of_file = own is None or _is_other(own, value, is_rounded=file.is_rounded)
            array = value if is_of_file or own is None else own
            recorder.store(recorder.part.key("values", name), array, width, is_of_file=is_of_file)
    return tuple(ProofModule(boundary=boundary) for boundary in calls)


def _torch_names(pair: SidePair) -> Mapping[str, str]:
    """Name of a value in the file → its name in PyTorch; outputs of modules precede inputs of others."""
    names: dict[str, str] = {}
    matched = match_with_torch(pair)
    for pairs in (*(call.outputs for call in matched), *(call.inputs for call in matched)):
        for theirs, ours in pairs:
            names.setdefault(ours, theirs)
    return names


def _sketch_width(count: int, limit_bytes: int) -> int:
    """Return the numbers of a sketch, a power of two, such that so many sketches fit."""
    width = _MOST_WIDTH
    while width > _LEAST_WIDTH and 4 * width * count > limit_bytes:
        width //= 2
    return width


def _is_other(own: Array, value: Array, *, is_rounded: bool) -> bool:
    """Return True if PyTorch's value is another value than that of the file, matched by position alone."""
    if own.shape != value.shape:
        return True
    total = FidelitySum("")
    total.add(own, value)
    fidelity = total.of_value()
    if is_rounded:
        return fidelity.relative_error > _OTHER_ROUNDED_VALUE
    return bool(fidelity.problem) or fidelity.relative_error > _OTHER_VALUE
