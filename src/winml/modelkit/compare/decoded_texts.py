"""Similarity of two decoders of several graphs on texts: prompts and steps, run as in ``winml generate``.

Both decoders read the same tokens: a prompt, then single tokens that the reference generates. Each decoder passes its
own states to the next run, so that the errors of the graphs and of the KV cache add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.compare.fidelity import OutputFidelity, output_fidelity
from winml.modelkit.ort.decoding.decoder import rows_of
from winml.modelkit.ort.decoding.inputs import SCORES
from winml.modelkit.ort.decoding.parts import open_decoder
from winml.modelkit.ort.sessions import Session
from winml.modelkit.samples.generated_samples import NEW_TOKENS, token_texts

_TEXTS = 8
"""Chosen: some hundred tokens, in a second or two for a small model."""


def compare_on_texts(
    reference: Mapping[str, Path],
    files: Mapping[str, Path],
    folder: Path,
    seed: int,
    texts: Iterable[Array] | None = None,
) -> OutputFidelity:
    """Measure the similarity of the scores of all tokens of texts.

    Args:
        reference: Part → its file in float.
        files: Part → the compared file.
        folder: Folder of the tokenizer; without one, tokens are random.
        seed: Seed of generated texts.
        texts: Token ids of the user's texts; None: generated texts.

    Raises:
        StageError: ONNX Runtime cannot run a file.
    """
    expected_decoder, decoder = (open_decoder(parts, Session) for parts in (reference, files))
    room = (decoder.most_tokens or 2 * NEW_TOKENS) - NEW_TOKENS
    expected, actual = list[Array](), list[Array]()
    for text in itertools.islice(texts or token_texts(decoder.inputs, folder, seed), _TEXTS):
        caches = expected_decoder.empty_cache(1), decoder.empty_cache(1)
        tokens = rows_of(text[: max(room, 1)].tolist())
        scores: tuple[list[Array], list[Array]] = [], []
        for _ in range(NEW_TOKENS + 1):
            scores[0].append(expected_decoder.run(tokens, cache=caches[0]))
            scores[1].append(decoder.run(tokens, cache=caches[1]))
            tokens = rows_of([int(scores[0][-1][0, -1].argmax())])
        expected.append(np.concatenate(scores[0], axis=1))
        actual.append(np.concatenate(scores[1], axis=1))
    return output_fidelity(f"{SCORES} of {sum(array.shape[1] for array in expected)} tokens", expected, actual)
