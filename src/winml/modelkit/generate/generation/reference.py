"""Text generation with PyTorch for the same prompt, and comparison of the tokens.

PyTorch runs the checkpoint with transformers' loop and cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.generate.generation.decoder_prompt import PreparedPrompt
from winml.modelkit.generate.generation.transformers_loop import (
    generation_call,
    generation_config_beside,
    loop_arguments,
)
from winml.modelkit.generate.records import GeneratedText, ReferenceText, TokenDifference
from winml.modelkit.models.model import load_model
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.bundle import described_model
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.weights import QUANTIZED_OPERATORS


def compare_with_pytorch(
    results: Sequence[GeneratedText], prompts: Sequence[PreparedPrompt], request: ModelRequest
) -> list[GeneratedText]:
    """Add the texts that PyTorch generates after the same prompts to the results. The checkpoint is loaded once.

    Args:
        results: Texts generated greedily by ONNX Runtime, one for each prompt.
        prompts: Prompts of one model.
        request: Hub id or folder of the checkpoint, and the adapters to merge.

    Raises:
        UsageError: the checkpoint does not generate.
        WinMLError: the checkpoint cannot be loaded.
    """
    model = _load_checkpoint(request, prompts[0])
    is_quantized = _is_quantized(prompts[0].model)
    compared = []
    for result, prompt in zip(results, prompts, strict=True):
        tokens, scores = _generate_with_pytorch(model, prompt)
        difference = _find_first_difference(result.tokens, tokens, scores, prompt)
        text = "".join(prompt.tokenizer.pieces(tokens, after=prompt.before))
        equal = sum(token == expected for token, expected in zip(result.tokens, tokens, strict=False))
        share = equal / max(len(result.tokens), len(tokens), 1)
        reference = ReferenceText(request.model, tuple(tokens), text, difference, equal, share, is_quantized)
        compared.append(replace(result, reference=reference))
    return compared


def _is_quantized(path: Path) -> bool:
    """Return True if a graph has quantized operators that do not come from a quantized checkpoint."""
    is_coded = described_model(path).get("source_format") is not None
    return not is_coded and any(node.op_type in QUANTIZED_OPERATORS for node in read_structure(path).graph.node)


def _load_checkpoint(request: ModelRequest, prompt: PreparedPrompt) -> Any:
    """Load the checkpoint into PyTorch, with the generation config and the tokenizer of the built model.

    Raises:
        UsageError: the checkpoint does not generate.
    """
    task = "text-generation" if prompt.beginning is None else "text2text-generation"
    model: Any = load_model(replace(request, task=task)).model
    if not hasattr(model, "generate"):
        raise UsageError(
            f"{opt.reference} {request.model}: {type(model).__name__} does not generate",
            hint="Pass a text-generation checkpoint.",
        )
    model.generation_config = generation_config_beside(prompt.folder, model.config, has_cache=True)
    model.tokenizer_folder = prompt.folder
    return model


def _generate_with_pytorch(model: Any, prompt: PreparedPrompt) -> tuple[list[int], Sequence[torch.Tensor]]:
    """Return the tokens that PyTorch generates, and the scores of all tokens at each step."""
    output = generation_call(
        model,
        inputs=torch.tensor([list(prompt.tokens)]),
        **loop_arguments(prompt.settings),
        return_dict_in_generate=True,
        output_scores=True,
    )
    return output.sequences[0, len(prompt.before) :].tolist(), output.scores


def _find_first_difference(
    ours: Sequence[int], theirs: Sequence[int], scores: Sequence[torch.Tensor], prompt: PreparedPrompt
) -> TokenDifference | None:
    """Return the first position with different tokens; None if all are equal.

    Args:
        ours: Tokens of the built model.
        theirs: Tokens of PyTorch.
        scores: PyTorch's scores of each step.
        prompt: The prompt, with its tokenizer and settings.
    """
    pairs: list[tuple[int | None, int | None]] = list(zip_longest(ours, theirs))
    index = next((index for index, (built_token, torch_token) in enumerate(pairs) if built_token != torch_token), None)
    if index is None:
        return None
    token, reference_token = pairs[index]
    margin = None
    # The score of a beam is that of its whole text, so its next token need not have the highest score.
    if prompt.settings.is_stepwise and token is not None and reference_token is not None:
        margin = float(scores[index][0, reference_token] - scores[index][0, token])

    def text(value: int | None) -> str:
        """Return the text of a token after the equal tokens; "" for None."""
        if value is None:
            return ""
        # Decoded from the start: the tokens before may end inside a character.
        pieces = prompt.tokenizer.pieces([*ours[:index], value], after=prompt.before)
        return next(islice(pieces, index, None))

    return TokenDifference(index, token, text(token), reference_token, text(reference_token), margin)
