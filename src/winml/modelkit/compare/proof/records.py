"""Records of a proof: ``proof.json`` and the arrays of ``proof.safetensors``, read from and written to a folder.

The records validate the JSON; ``docs/reference/formats.md`` specifies it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pydantic

from winml.modelkit.arrays import Array
from winml.modelkit.compare.by_module.boundaries import CallKey, ModuleBoundary
from winml.modelkit.compare.fidelity import QualitySamples, QualitySource
from winml.modelkit.compare.proof.excerpts import ExcerptKind
from winml.modelkit.errors import InputError, UsageError, WinMLError
from winml.modelkit.file_names import proof_paths
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.options import Options, parse_options, read_json_file

SCHEMA_VERSION: Final = 1


class ProofBase(Options):
    """Base of the records: keys that a later version added are ignored."""

    model_config = pydantic.ConfigDict(extra="ignore")


class ProofTensor(ProofBase):
    """One value of which numbers are stored."""

    shape: tuple[int, ...]
    """Shape of the whole value."""
    dtype: str
    excerpt: ExcerptKind = "all"
    """Stored numbers: ``all``, evenly spaced ``rows``, or a ``sketch``."""
    source: Literal["pytorch", "file"] = "pytorch"
    """Model that computed the value: ``file`` is the ONNX file that the proof was made with."""


class ProofModule(ProofBase):
    """One call of a module, with the names of its values in the file that the proof was made with."""

    boundary: ModuleBoundary
    relative_error: float | None = None
    """Relative error of its worst output when the proof was made; missing if it was not compared."""
    own_error: float | None = None
    """Part of the error that its inputs do not explain; missing if unknown."""

    @property
    def key(self) -> CallKey:
        """Tag and number of the call."""
        return self.boundary.key


class ProofOutput(ProofBase):
    """Quality of one output when the proof was made."""

    name: str
    sqnr_db: float
    lower_db: float
    """Lower end of the interval of the SQNR over the samples, to which the limit applies."""
    relative_error: float | None = None
    """Missing if it is infinite."""
    top1_agreement: float | None = None


class ProofSamples(ProofBase):
    """Samples of the proof."""

    source: QualitySource
    count: int
    seed: int
    data: str = ""
    """File names of the user's data, without folders; empty for generated samples."""

    @property
    def about(self) -> QualitySamples:
        """Description for the quality record."""
        return QualitySamples(self.source, self.count, self.seed, data=self.data)


class ProofPart(ProofBase):
    """One part of the model."""

    name: str
    """Name of the part; ``model`` if there is only one."""
    file: str = ""
    """Name of the file whose quality was recorded, without folder."""
    sha256: str = ""
    """SHA-256 of that file."""
    fingerprint: str = ""
    """Digest of its structure, by which ``winml view`` assigns the errors of modules; missing in earlier versions."""
    provider: str = ""
    """Execution provider that ran it."""
    samples: ProofSamples
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[ProofOutput, ...] = ()
    min_sqnr_db: float = 0.0
    """Minimum SQNR of every output of ``file``, in dB."""
    min_agreement: float | None = None
    """Minimum top-1 agreement, which replaces the SQNR for outputs with scores; missing: the SQNR applies to all."""
    states: dict[str, str] = pydantic.Field(default_factory=dict)
    """Input of the KV cache → output that is its next value."""
    is_rounded: bool = False
    """True if PyTorch computed with fewer bits than float32."""
    tensors: dict[str, ProofTensor]
    """Key in ``proof.safetensors`` → the value: ``<part>/inputs/<sample>/<name>``, ``<part>/outputs/<sample>/<name>``,
    and ``<part>/values/<name>`` of the first sample."""
    modules: tuple[ProofModule, ...]
    tolerance: float
    """Relative error of a module that counts as rounding."""
    run_ms: float | None = None
    """Median time of a run on the first sample; differs from build to build, unlike all other values."""

    def key(self, kind: Literal["inputs", "outputs", "values"], name: str, sample: int | None = None) -> str:
        """Return the key of a value in ``proof.safetensors``."""
        number = "" if sample is None else f"{sample}/"
        return f"{self.name}/{kind}/{number}{name}"


class ProofRecord(ProofBase):
    """Content of ``proof.json``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model_class: str
    versions: dict[str, str]
    """Versions of winml, Python and the libraries that made the proof."""
    limit_bytes: int
    """Maximum size of ``proof.safetensors``; exceeded only by a single sample that is larger."""
    user_data: bool
    """True if the proof contains inputs of the user."""
    tensors_sha256: str = ""
    """SHA-256 of ``proof.safetensors``; empty before the proof is written."""
    parts: tuple[ProofPart, ...]


@dataclass(frozen=True)
class Proof:
    """A proof in memory."""

    record: ProofRecord
    arrays: Mapping[str, Array]
    """Key → stored numbers."""

    def part(self, name: str) -> ProofPart:
        """Return the record of a part.

        Raises:
            UsageError: the proof has no such part.
        """
        for part in self.record.parts:
            if part.name == name:
                return part
        names = ", ".join(part.name for part in self.record.parts)
        raise UsageError(f"the proof has no part {name}", hint=f"It has {names}.")


@dataclass(frozen=True)
class ProofRequest:
    """Request for a proof."""

    inputs: Path | None = None
    """Values of the user: an .npz file, or a folder of such files; ``None``: generated samples."""
    seed: int = 0


def write_proof(proof: Proof, folder: Path, files: OutputFiles) -> tuple[Path, Path]:
    """Write a proof into ``proof/`` in a folder, to be committed with the other files; return the final paths.

    Raises:
        WriteError: a file cannot be written.
    """
    from safetensors.numpy import save

    paths = proof_paths(folder)
    tensors = save(dict(sorted(proof.arrays.items())))
    record = proof.record.model_copy(update={"tensors_sha256": hashlib.sha256(tensors).hexdigest()})
    files.write_json(paths[0], record.model_dump(mode="json", exclude_none=True))
    files.reserve(paths[1]).write_bytes(tensors)
    return paths


def read_proof(folder: Path) -> Proof:
    """Read the proof beside a model.

    Args:
        folder: Folder of the model.

    Raises:
        InputError: a file is missing or damaged.
    """
    record_path, tensors_path = proof_paths(folder)
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        record = parse_options(ProofRecord, read_json_file(record_path), str(record_path))
        tensors = tensors_path.read_bytes()
        if hashlib.sha256(tensors).hexdigest() != record.tensors_sha256:
            raise ValueError(f"{tensors_path.name} is not the file that {record_path.name} was written with")
        arrays = load(tensors)
    except (WinMLError, OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"{record_path.parent}: the proof is damaged: {getattr(error, 'message', error)}",
            hint="Copy the folder again, or build it again.",
        ) from error
    missing = {key for part in record.parts for key in part.tensors} - arrays.keys()
    if missing:
        raise InputError(
            f"{tensors_path}: has no tensor {min(missing)}, which {record_path.name} lists",
            hint="Copy the folder again, or build it again.",
        )
    return Proof(record, arrays)
