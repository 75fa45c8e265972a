"""Do the files of all parts, one after another, answer as PyTorch does? For any model whose last part decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from winml.modelkit.compare.fidelity import OutputFidelity
from winml.modelkit.compare.generation import GenerationInfo
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.verify.parts.encoded_fidelity import measure_encoded_text
from winml.modelkit.verify.parts.encoded_generation import EncodedParts, compare_encoded_generation
from winml.modelkit.verify.parts.seen_generation import SeenParts, compare_seen_generation, measure_seen_text
from winml.modelkit.verify.reference_run import PreparedPart

__all__ = ["compare_text_together", "decodes_for_others", "measure_text_together"]


def decodes_for_others(part: ModelPart, parts: Sequence[ModelPart]) -> bool:
    """Say whether a part decodes what other parts made."""
    return part.cache is not None and len(parts) > 1


def compare_text_together(
    parts: Sequence[ModelPart], decoder: PreparedPart, paths: Mapping[str, Path], seed: int
) -> GenerationInfo | str:
    """Compare the text of all files with that of PyTorch, token by token; return why not, where it cannot be.

    Args:
        parts: The parts of the model.
        decoder: That of them which decodes what the others made.
        paths: Name of the part → its file; without those that were not asked for.
        seed: Seed of what is drawn.

    Raises:
        VerificationError: PyTorch generates another text, or ONNX Runtime cannot run a file.
    """
    found = _grouped(parts, decoder, paths)
    if isinstance(found, SeenParts):
        return compare_seen_generation(found, seed)
    return compare_encoded_generation(found, seed)


def measure_text_together(
    parts: Sequence[ModelPart], decoder: PreparedPart, paths: Mapping[str, Path], seed: int
) -> OutputFidelity | str:
    """Measure how near the scores of all files are to those of PyTorch; see :func:`compare_text_together`."""
    found = _grouped(parts, decoder, paths)
    return measure_seen_text(found, seed) if isinstance(found, SeenParts) else measure_encoded_text(found, seed)


def _grouped(parts: Sequence[ModelPart], decoder: PreparedPart, paths: Mapping[str, Path]) -> SeenParts | EncodedParts:
    others = [part for part in parts if part is not decoder.part]
    assert decoder.part.cache is not None  # it decodes
    if decoder.part.cache.side is None:
        vision, maker = others
        return SeenParts(vision, maker, decoder, paths)
    (encoder,) = others
    return EncodedParts(encoder, decoder, paths[decoder.part.name], paths.get(encoder.name))
