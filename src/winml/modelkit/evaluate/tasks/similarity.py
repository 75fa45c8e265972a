"""How alike are two texts? The cosine of their embeddings, against a score of reference (STS)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.metrics.similarity import PEARSON, SPEARMAN
from winml.modelkit.evaluate.preprocessing import Batch
from winml.modelkit.evaluate.tasks.task import (
    Judge,
    JudgeContext,
    Outputs,
    Sample,
    TaskDefinition,
    named_output,
    token_masks,
)

__all__ = ["FEATURE_EXTRACTION"]

Array = NDArray[Any]

ALIKE = 0.01
"""Largest difference of two cosines that counts as agreement. Chosen: far below the steps of human scores (0.05 of the
range in STS-B), far above rounding of float16 (1e-3)."""
_MODULES, _POOLING = "modules.json", "config.json"


@dataclass(frozen=True)
class _SimilarityJudge(Judge):
    """A prediction is the cosine of the embeddings of both texts."""

    pooling: str
    """``mean``, ``cls`` or ``max``: how the states of the tokens become one."""
    tokenizer: Any
    notes: tuple[str, ...] = ()

    fed_per_sample = 2

    def fed(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        for sample in samples:
            yield {"text": sample["text"]}
            yield {"text": sample["text_pair"]}

    def reference(self, sample: Sample) -> float:
        try:
            return float(sample["score"])
        except (TypeError, ValueError):
            raise UsageError(
                f"the score {sample['score']!r} is no number", hint="Say which column holds it: --columns score=COLUMN."
            ) from None

    def answers(self, outputs: Outputs, batch: Batch) -> list[Array]:
        """Return the embedding of each text: float64[size]."""
        if "sentence_embedding" in outputs:
            return list(outputs["sentence_embedding"].astype(np.float64))
        states = named_output(outputs, "last_hidden_state").astype(np.float64)
        mask = token_masks(batch, self.tokenizer)
        return [self._pooled(*pair) for pair in zip(states, mask, strict=True)]

    def _pooled(self, states: Array, mask: Array) -> Array:
        states = states[mask]
        pooled: Array = states[0] if self.pooling == "cls" else getattr(states, self.pooling)(axis=0)
        return pooled

    def prediction(self, answers: Sequence[Array], sample: Sample) -> float:  # noqa: ARG002  # texts are read
        left, right = answers
        return float(left @ right / max(float(np.linalg.norm(left) * np.linalg.norm(right)), 1e-12))

    def agreement(self, ours: float, theirs: float) -> float:
        return float(abs(ours - theirs) <= ALIKE)


def _pooling(folder: Path) -> tuple[str, tuple[str, ...]]:
    """Return the pooling that sentence-transformers wrote beside the model, else the usual one, which is told."""
    modules = _read(folder / _MODULES)
    entries = modules if isinstance(modules, list) else []
    for entry in entries:
        place = entry.get("path") if isinstance(entry, Mapping) else None
        said = (
            _read(folder / str(place) / _POOLING) if place and str(entry.get("type", "")).endswith("Pooling") else None
        )
        if isinstance(said, Mapping):
            for key, name in (("pooling_mode_cls_token", "cls"), ("pooling_mode_max_tokens", "max")):
                if said.get(key):
                    return name, ()
            return "mean", ()
    return "mean", ("No file of sentence-transformers says how tokens become one embedding: their mean is taken.",)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _judge(context: JudgeContext) -> _SimilarityJudge:
    pooling, notes = _pooling(context.folder)
    return _SimilarityJudge(pooling, context.processor("tokenizer"), notes)


FEATURE_EXTRACTION = TaskDefinition(
    "feature-extraction",
    ("text", "text_pair", "score"),
    (SPEARMAN, PEARSON),
    _judge,
    f"cosines that differ by {ALIKE} at most",
)
