"""When is the text that several quantized parts write together compared with PyTorch's, and where is that written down?

A stage of a build changes one part at a time, and compares it with what it was made from. Errors of parts add up, which
shows once all of them are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.quantization import quantize_options
from winml.modelkit.file_names import DECODER
from winml.modelkit.results.build_manifest import BuildManifest, StageRecord

if TYPE_CHECKING:
    from winml.modelkit.builds.stage_runs import BuiltPart

__all__ = ["compared_together"]

_SEPARATOR = "; "


def compared_together(plan: BuildPlan, parts: Sequence[BuiltPart], earlier: BuildManifest | None) -> None:
    """Compare the text of parts whose last stage took bits away, and add the outcome to the record of the decoder.

    What was compared before and is used again is not compared a second time, unless that build was refused or killed.

    Args:
        plan: The build.
        parts: All parts, with the record of that stage as their last.
        earlier: What the build before left in the folder.

    Raises:
        VerificationError: too little is left of the scores.
    """
    decoder = next((part for part in parts if part.name == DECODER), None)
    paths = {part.name: part.current for part in parts if part.current is not None}
    if decoder is None:
        return
    if decoder.records[-1].together:
        if _are_of_one_build(parts, earlier):
            return
        decoder.records[-1] = _with_words(decoder.records[-1], "")
    if len(parts) < 2 or len(paths) < len(parts) or not plan.verify or plan.onnx_path is not None:
        return
    from winml.modelkit.flows.export.part_export import words_of_text_together
    from winml.modelkit.flows.quantize.quantize import Quantization

    config, section = plan.config.export, plan.config.quant
    assert config is not None  # there are several parts, which an export made
    assert section is not None  # a stage took bits away
    least = Quantization(decoder.current or paths[DECODER], quantize_options(section), {}).least_sqnr_db
    words = words_of_text_together(plan.request, config, paths, least)
    if words is not None:
        decoder.records[-1] = _with_words(decoder.records[-1], words)


def _are_of_one_build(parts: Sequence[BuiltPart], earlier: BuildManifest | None) -> bool:
    """Say whether all parts are those that the build before ended with; those of the cache may be of several builds."""
    if earlier is None or earlier.status != "done" or len(earlier.parts) != len(parts):
        return False
    return all(part.records[-1].status == "reused" and not part.records[-1].reason for part in parts)


def _with_words(record: StageRecord, words: str) -> StageRecord:
    summary = record.summary.removesuffix(f"{_SEPARATOR}{record.together}") if record.together else record.summary
    return record.model_copy(
        update={"together": words, "summary": f"{summary}{_SEPARATOR}{words}" if words else summary}
    )
