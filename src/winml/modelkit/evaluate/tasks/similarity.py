"""Text similarity: the cosine of two embeddings, compared with a reference score (STS)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.evaluate import metrics
from winml.modelkit.evaluate.tasks import task
from winml.modelkit.onnx.files.foreign_names import file_below
from winml.modelkit.options import read_json_file
from winml.modelkit.samples.preprocessing import Batch

ALIKE = 0.01
"""Maximum difference of two cosines in agreement. Chosen: far below the steps of human scores (0.05 of the range in
STS-B), far above rounding of float16 (1e-3)."""
_MODULES, _CONFIG = "modules.json", "config.json"
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Specified by sentence-transformers: pooling modes; embeddings of several modes are concatenated in this order."""


@dataclass(frozen=True)
class Pooling:
    """Pooling of token states into one embedding."""

    modes: tuple[str, ...]
    problem: str = ""
    """Unsupported part of the pooling; relevant if the graph does not return embeddings."""
    notes: tuple[str, ...] = ()

    def refuse_unknown(self) -> None:
        """Refuse an unsupported pooling.

        Raises:
            UsageError: names the unsupported part.
        """
        if self.problem:
            raise UsageError(
                f"{_MODULES} beside the model {self.problem}: the embeddings would differ from those of the model",
                hint="Use an ONNX file with the output sentence_embedding, or a different model.",
            )

    def embedding(self, states: Array, mask: Array) -> Array:
        """Compute the embedding of ``[tokens, size]`` states; the mask ``[tokens]`` is True for text tokens."""
        weights = np.flatnonzero(mask) + 1.0
        return np.concatenate([_pool_states(states[mask], weights, mode) for mode in self.modes])


def cosine(a: Array, b: Array) -> float:
    """Compute the cosine of two embeddings."""
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


@dataclass(frozen=True)
class _SimilarityEvaluator(task.Evaluator):
    """Evaluator of the cosine of two text embeddings."""

    pooling: Pooling
    tokenizer: Any
    notes: tuple[str, ...] = ()

    fed_per_sample = 2

    def fed(self, samples: Iterable[task.Sample]) -> Iterator[task.Sample]:
        for sample in samples:
            yield {"text": sample["text"]}
            yield {"text": sample["text_pair"]}

    def reference(self, sample: task.Sample) -> float:
        try:
            return float(sample["score"])
        except (TypeError, ValueError):
            raise UsageError(
                f"the score {sample['score']!r} is not a number",
                hint=f"Set its column with {opt.columns} score=COLUMN.",
            ) from None

    def row_predictions(self, outputs: task.Outputs, batch: Batch) -> list[Array]:
        """Return the embedding of each text: float64[size].

        Raises:
            UsageError: the pooling of sentence-transformers is not supported.
        """
        if "sentence_embedding" in outputs:
            return list(outputs["sentence_embedding"].astype(np.float64))
        self.pooling.refuse_unknown()
        states = task.named_output(outputs, "last_hidden_state").astype(np.float64)
        mask = task.token_masks(batch, self.tokenizer)
        return [self.pooling.embedding(*pair) for pair in zip(states, mask, strict=True)]

    def prediction(self, outputs: Sequence[Array], sample: task.Sample) -> float:  # noqa: ARG002  # texts are read
        a, b = outputs
        return cosine(a, b)

    def agreement(self, ours: float, theirs: float) -> float:
        return float(abs(ours - theirs) <= ALIKE)


def _pool_states(states: Array, places: Array, mode: str) -> Array:
    """Pool the token states of a text into one embedding; ``places`` are the token positions, counted from 1."""
    if mode in {"cls", "lasttoken"}:
        state: Array = states[0 if mode == "cls" else -1]
        return state
    if mode == "max":
        largest: Array = states.max(axis=0)
        return largest
    weights = places if mode == "weightedmean" else np.ones(len(states))
    total: Array = weights @ states
    return total / (math.sqrt(len(states)) if mode == "mean_sqrt_len" else weights.sum())


def read_pooling(folder: Path) -> Pooling:
    """Read the pooling that sentence-transformers wrote beside the model; without a file, mean pooling and a note."""
    modules = _read_json(folder, _MODULES)
    entries = [entry for entry in modules if isinstance(entry, Mapping)] if isinstance(modules, list) else []
    kinds = [str(entry.get("type", "")).rpartition(".")[2] for entry in entries]
    if "Pooling" not in kinds:
        reported = "No sentence-transformers file defines the pooling of token embeddings: mean pooling is used."
        return Pooling(("mean",), _other_modules(kinds), (reported,))
    config = _read_json(folder, f"{entries[kinds.index('Pooling')].get('path')}/{_CONFIG}")
    modes, problem = _read_modes(config if isinstance(config, Mapping) else {})
    return Pooling(modes, problem or _other_modules(kinds))


def _other_modules(kinds: Sequence[str]) -> str:
    """Describe modules other than encoder and pooling that change the embedding; ``""`` without any.

    The length of the embedding does not affect cosines.
    """
    unknown = [kind for kind in kinds if kind not in {"Transformer", "Pooling", "Normalize", "Dropout"}]
    return f"has the module{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}" if unknown else ""


def _read_modes(config: Mapping[str, object]) -> tuple[tuple[str, ...], str]:
    """Return the pooling modes of a file, and a description of unknown modes."""
    by_name = config.get("pooling_mode")
    names = [by_name] if isinstance(by_name, str) else list(by_name) if isinstance(by_name, (list, tuple)) else []
    chosen = [str(name) for name in names]
    chosen += [
        _MODES.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]
    if unknown := [name for name in chosen if name not in _MODES.values()]:
        return ("mean",), f"has the pooling {', '.join(unknown)}"
    return tuple(mode for mode in _MODES.values() if mode in chosen) or ("mean",), ""


def _read_json(folder: Path, name: str) -> Any:
    """Read a JSON file below a folder; ``None`` if missing or damaged."""
    try:
        return read_json_file(file_below(folder, name))
    except (OSError, ValueError):
        return None


def _similarity_evaluator(context: task.EvaluatorContext) -> _SimilarityEvaluator:
    pooling = read_pooling(context.folder)
    return _SimilarityEvaluator(pooling, context.processor("tokenizer"), pooling.notes)


FEATURE_EXTRACTION = task.TaskDefinition(
    "feature-extraction",
    ("text", "text_pair", "score"),
    (metrics.SPEARMAN, metrics.PEARSON),
    _similarity_evaluator,
    f"cosines that differ by {ALIKE} at most",
)
