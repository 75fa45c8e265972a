"""Does what several parts of few bits write together stay near what PyTorch writes? Asked once all are files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.files import refuse_little_left
from winml.modelkit.compare.words import fidelity_words
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.left_as_found import process_left_as_found
from winml.modelkit.flows.export.loading import load_for_export
from winml.modelkit.graph.files.working_directory import working_directory_kept
from winml.modelkit.load.library_access import local_files_only
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.verify.parts.together import decodes_for_others, measure_text_together
from winml.modelkit.verify.reference_run import prepared_part

__all__ = ["words_of_text_together"]


def words_of_text_together(
    request: ModelRequest, config: WinMLExportConfig, paths: Mapping[str, Path], least_sqnr_db: float
) -> str | None:
    """Compare the text of all parts with that of the model they were made from, and say how near it is.

    Args:
        request: The model, as it was exported.
        config: Options of its export.
        paths: Name of the part → its file of few bits.
        least_sqnr_db: Ratio in decibels that each part had to reach.

    Returns:
        How near it is, or why it was not compared; None where no part writes a text with others.

    Raises:
        VerificationError: too little is left of the scores, or ONNX Runtime cannot run a file.
        WinMLError: the model cannot be loaded.
    """
    if config.input_tensors is not None and request.input_specs is None:
        request = replace(request, input_specs=config.input_tensors, specs_origin="input_tensors")
    request = replace(request, dynamic=request.dynamic.joined(config.dynamic))
    with process_left_as_found(), working_directory_kept():
        loaded, _ = load_for_export(request, config)
        decoder = next((part for part in loaded.parts if decodes_for_others(part, loaded.parts)), None)
        if decoder is None or decoder.name not in paths:
            return None
        with local_files_only(), prepared_part(decoder) as prepared:
            text = measure_text_together(loaded.parts, prepared, paths, request.seed)
    if isinstance(text, str):
        return f"not compared together: {text}"
    # Of scores that are zero everywhere, a wrong graph would give the same.
    fidelity = FidelityInfo(
        (),
        least_sqnr_db,
        has_signal=text.has_signal,
        draws=1,
        together=text,
        parts=len(loaded.parts),
        silent=None if text.has_signal else ("zeros",),
    )
    refuse_little_left(fidelity, "the model in PyTorch", {})
    return fidelity_words(fidelity)
