"""Does what several parts of few bits write together stay near what PyTorch writes? Asked once all are files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from winml.modelkit.compare.fidelity import OutputFidelity, least_together_db
from winml.modelkit.compare.words import together_words
from winml.modelkit.errors import VerificationError
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
    least_db = least_together_db(least_sqnr_db, len(loaded.parts))
    which = "all parts together" if len(paths) == len(loaded.parts) else "after the encoder of the source"
    words = together_words(text, least_db, which)
    _refuse_little_left(text, words, least_db)
    return words


def _refuse_little_left(text: OutputFidelity, words: str, least_db: float) -> None:
    if text.problem or text.sqnr_db < least_db:
        raise VerificationError(
            f"too little is left of the answers of the model in PyTorch: {words}",
            hint="Exclude the modules that suffer (--exclude), choose another --precision or --mode, lower --min-sqnr, "
            "or build it all the same with --no-verify.",
            is_graph_wrong=text.sqnr_db < 0,
        )
