"""Do the files of all parts, one after another, return the outputs of PyTorch? For models with a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from winml.modelkit.compare.fidelity import OutputFidelity
from winml.modelkit.compare.outputs import GenerationInfo
from winml.modelkit.compare.verification.generated_text import generates_alone
from winml.modelkit.compare.verification.parts.encoder_decoder import (
    EncoderDecoderParts,
    TextSample,
    compare_encoder_decoder_generation,
    measure_encoder_decoder_text,
)
from winml.modelkit.compare.verification.parts.vision_language import (
    VisionLanguageParts,
    compare_vision_language_generation,
    measure_vision_language_text,
)
from winml.modelkit.compare.verification.reference_run import PreparedPart
from winml.modelkit.models.parts import ModelPart


def decodes_for_others(part: ModelPart, parts: Sequence[ModelPart]) -> bool:
    """Say whether a part decodes what other parts made."""
    return part.cache is not None and len(parts) > 1 and not generates_alone(part)


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
    if isinstance(found, VisionLanguageParts):
        return compare_vision_language_generation(found, seed)
    return compare_encoder_decoder_generation(found, seed)


def measure_text_together(
    parts: Sequence[ModelPart],
    decoder: PreparedPart,
    paths: Mapping[str, Path],
    seed: int,
    sample: TextSample | None,
) -> OutputFidelity | str:
    """Measure how near the scores of all files are to those of PyTorch; see :func:`compare_text_together`.

    ``sample`` is what encoder and decoder of a text read; None: random values.
    """
    found = _grouped(parts, decoder, paths)
    return (
        measure_vision_language_text(found, seed)
        if isinstance(found, VisionLanguageParts)
        else measure_encoder_decoder_text(found, seed, sample)
    )


def _grouped(
    parts: Sequence[ModelPart], decoder: PreparedPart, paths: Mapping[str, Path]
) -> VisionLanguageParts | EncoderDecoderParts:
    others = [part for part in parts if part is not decoder.part]
    assert decoder.part.cache is not None  # it decodes
    if decoder.part.cache.side is None:
        vision, maker = others
        return VisionLanguageParts(vision, maker, decoder, paths)
    (encoder,) = others
    return EncoderDecoderParts(encoder, decoder, paths[decoder.part.name], paths.get(encoder.name))
