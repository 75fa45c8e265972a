"""Text tasks: perplexity, masked words, question answering, and tags of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.evaluate import metrics
from winml.modelkit.evaluate.labels import LabelMap, label_names, match_labels, model_labels
from winml.modelkit.evaluate.tasks import task
from winml.modelkit.samples.preprocessing import Batch, Row
from winml.modelkit.samples.processors import tokenizer_call


@dataclass(frozen=True)
class PredictedText:
    """Prediction of the tokens of one text."""

    surprise: float
    """Sum of the negative log-likelihoods of its tokens."""
    best: tuple[int, ...]
    """Likeliest token at each predicted position."""


@dataclass(frozen=True)
class _PerplexityEvaluator(task.Evaluator):
    """Evaluator of next-token prediction: the tokens of a text are the reference."""

    tokenizer: Any

    def reference(self, sample: task.Sample) -> None:  # noqa: ARG002  # the text itself
        return None

    def row_predictions(self, outputs: task.Outputs, batch: Batch) -> list[PredictedText]:
        logits = task.named_output(outputs, "logits")
        return [
            predicted_text(scores[mask], tokens[mask])
            for scores, tokens, mask in zip(
                logits, batch.feeds["input_ids"], task.token_masks(batch, self.tokenizer), strict=False
            )
        ]

    def agreement(self, ours: PredictedText, theirs: PredictedText) -> float:
        return float(np.mean(np.asarray(ours.best) == np.asarray(theirs.best))) if ours.best else 1.0

    def for_metrics(self, prediction: PredictedText, reference: None) -> tuple[float, int]:  # noqa: ARG002  # the text itself
        return prediction.surprise, len(prediction.best)


def predicted_text(scores: Array, tokens: Array) -> PredictedText:
    """Compute the negative log-likelihood of a text.

    Args:
        scores: Logits: ``[tokens, vocabulary]``.
        tokens: The text: ``[tokens]``.
    """
    scores, following = scores[:-1].astype(np.float64), tokens[1:]
    if not len(following):
        return PredictedText(0.0, ())
    largest = scores.max(axis=1, keepdims=True)
    totals = np.log(np.exp(scores - largest).sum(axis=1)) + largest[:, 0]
    surprise = totals - scores[np.arange(len(following)), following]
    return PredictedText(float(surprise.sum()), tuple(scores.argmax(axis=1).tolist()))


TEXT_GENERATION = task.TaskDefinition(
    "text-generation",
    ("text",),
    (metrics.PERPLEXITY,),
    lambda context: _PerplexityEvaluator(context.processor("tokenizer")),
    "equal likeliest next tokens, token by token",
    # Scores of a full vocabulary for each of 512 tokens take 0.1 GB a text.
    batch_size=1,
)


_FIRST = 5
"""Tokens of a prediction. Specified: the number returned by the pipeline."""


@dataclass(frozen=True)
class _MaskedWordEvaluator(task.Evaluator):
    """Evaluator of the likeliest tokens at the single mask of a text, the best first."""

    tokenizer: Any

    def reference(self, sample: task.Sample) -> int:
        """Return the token of the masked word.

        Raises:
            UsageError: the word has several tokens.
        """
        word = str(sample["label"])
        # Byte-pair vocabularies have different tokens for a word with and without a preceding space.
        before, _, _ = str(sample["text"]).partition(self.tokenizer.mask_token)
        spellings = (f" {word}", word) if before[-1:].isspace() else (word, f" {word}")
        for spelled in spellings:
            with tokenizer_call(self.tokenizer, spelled):
                tokens = self.tokenizer(spelled, add_special_tokens=False)["input_ids"]
            if len(tokens) == 1:
                return int(tokens[0])
        raise UsageError(
            f"the masked word {word!r} has {len(tokens)} tokens; expected one token per mask",
            hint="Use samples whose masked word is one token.",
        )

    def row_predictions(self, outputs: task.Outputs, batch: Batch) -> list[tuple[int, ...]]:
        logits = task.named_output(outputs, "logits", "prediction_logits")
        answers = []
        for tokens, scores, row in zip(batch.feeds["input_ids"], logits, batch.rows, strict=False):
            places = np.flatnonzero(tokens == self.tokenizer.mask_token_id)
            if len(places) != 1:
                raise UsageError(
                    f"{row.sample['text']!r} contains {len(places)} masks; expected one",
                    hint=f"Put {self.tokenizer.mask_token} in place of the masked word.",
                )
            answers.append(tuple(np.argsort(-scores[places[0]], kind="stable")[:_FIRST].tolist()))
        return answers

    def agreement(self, ours: tuple[int, ...], theirs: tuple[int, ...]) -> float:
        return float(ours[0] == theirs[0])

    def words(self, value: tuple[int, ...] | int) -> str:
        return str(self.tokenizer.decode([value if isinstance(value, int) else value[0]])).strip()


def _first_accuracy(predictions: Sequence[tuple[int, ...]], references: Sequence[int]) -> Any:
    """Return the accuracy of the likeliest token."""
    return metrics.ACCURACY.measure([tokens[0] for tokens in predictions], references)


def _top_accuracy(predictions: Sequence[tuple[int, ...]], references: Sequence[int]) -> metrics.SampleRows:
    """Return the share of samples whose token is among the likeliest tokens."""
    from sklearn.metrics import accuracy_score

    hits = [right in tokens for tokens, right in zip(predictions, references, strict=True)]
    return metrics.ratio_of_sums(accuracy_score([True] * len(hits), hits), [(is_hit, 1) for is_hit in hits])


def _masked_word_evaluator(context: task.EvaluatorContext) -> _MaskedWordEvaluator:
    tokenizer = context.processor("tokenizer")
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise UsageError("the tokenizer has no mask token", hint=f"Use a different {opt.task}.")
    return _MaskedWordEvaluator(tokenizer)


FILL_MASK = task.TaskDefinition(
    "fill-mask",
    ("text", "label"),
    (
        metrics.Metric("accuracy", _first_accuracy, "sklearn", resolution="each"),
        metrics.Metric("top_5_accuracy", _top_accuracy, "sklearn", resolution="each"),
    ),
    _masked_word_evaluator,
    "equal likeliest tokens",
)


_LONGEST_ANSWER = 15
"""Maximum tokens of an answer. Specified: the default of the pipeline of transformers 4; its SQuAD scripts use nearly
twice as many."""


@dataclass(frozen=True)
class _AnswerEvaluator(task.Evaluator):
    """Evaluator of extracted answers; a prediction is empty if the model predicts no answer."""

    may_be_empty: bool
    """True if the dataset has questions without an answer."""

    def reference(self, sample: task.Sample) -> list[str]:
        return _answer_texts(sample["answers"])

    def row_predictions(self, outputs: task.Outputs, batch: Batch) -> list[_Answer]:
        starts, ends = task.named_output(outputs, "start_logits"), task.named_output(outputs, "end_logits")
        return [_best_answer(row, start, end) for row, start, end in zip(batch.rows, starts, ends, strict=True)]

    def prediction(self, outputs: Sequence[_Answer], sample: task.Sample) -> str:
        """Text of the best span over all windows; empty if a window scores "no answer" higher."""
        best = max(outputs, key=lambda output: output.score)
        if not best.characters or (self.may_be_empty and min(output.empty_score for output in outputs) > best.score):
            return ""
        return str(sample["context"])[slice(*best.characters)]

    def words(self, value: str | list[str]) -> str:
        return value if isinstance(value, str) else " / ".join(value)


@dataclass(frozen=True)
class _Answer:
    """Best answer within one window of a context."""

    score: float
    characters: tuple[int, int] | None
    """First character of the span and the character after its last; ``None`` for a window without context."""
    empty_score: float
    """Score of "no answer", which is the score of the first token."""


def _best_answer(row: Row, start: Array, end: Array) -> _Answer:
    """Return the best answer within one window of a context."""
    start, end = start.astype(np.float64), end.astype(np.float64)
    is_context = np.asarray([number == 1 for number in row.sequence_ids or ()], bool)
    empty_score = float(start[0] + end[0])
    if row.offsets is None or not is_context.any():
        return _Answer(-np.inf, None, empty_score)
    score, first, last = best_span(start, end, is_context)
    return _Answer(score, (int(row.offsets[first][0]), int(row.offsets[last][1])), empty_score)


def best_span(start: Array, end: Array, is_context: Array) -> tuple[float, int, int]:
    """Find the best span in the context: score, first token and last token.

    Args:
        start: Scores of tokens as span start: float64[tokens].
        end: Scores of tokens as span end.
        is_context: Mask of the tokens allowed in the span.
    """
    start, end = np.where(is_context, start, -np.inf), np.where(is_context, end, -np.inf)
    scores = start[:, None] + end[None, :]
    places = np.arange(len(start))
    length = places[None, :] - places[:, None]
    scores = np.where((length >= 0) & (length < _LONGEST_ANSWER), scores, -np.inf)
    first, last = np.unravel_index(np.argmax(scores), scores.shape)
    return float(scores[first, last]), int(first), int(last)


def _answer_texts(cell: Any) -> list[str]:
    """Accepted answers of a cell: SQuAD's record of lists, a list of texts, or one text."""
    texts = cell["text"] if isinstance(cell, Mapping) else cell
    return [texts] if isinstance(texts, str) else [str(text) for text in texts or ()]


def _answer_evaluator(context: task.EvaluatorContext) -> _AnswerEvaluator:
    task.refuse_slow_tokenizer(context, "places in the context")
    return _AnswerEvaluator(any(not _answer_texts(cell) for cell in context.values("answers")))


QUESTION_ANSWERING = task.TaskDefinition(
    "question-answering",
    ("question", "context", "answers"),
    (metrics.OVERLAP_F1, metrics.EXACT_MATCH),
    _answer_evaluator,
    "equal answers",
)


_LEFT_OUT = -100
"""Specified: tag of an ignored word, as in torch's losses."""
_OUTSIDE = "O"


@dataclass(frozen=True)
class _TagEvaluator(task.Evaluator):
    """Evaluator of word tags: the prediction of a word is that of its first token. Truncated words are outside."""

    labels: LabelMap
    notes: tuple[str, ...] = ()

    def reference(self, sample: task.Sample) -> list[str | None]:
        """Return the tag of each word; ``None`` for ignored words.

        Raises:
            UsageError: the model has no such tag.
            InputError: the numbers of words and tags differ.
        """
        words, tags = len(sample["tokens"]), len(sample["tags"])
        if words != tags:
            raise InputError(f"a sample has {words} words but {tags} tags", hint="Provide one tag per word.")
        return [None if tag == _LEFT_OUT else self.labels.name(tag) for tag in sample["tags"]]

    def row_predictions(self, outputs: task.Outputs, batch: Batch) -> list[list[str]]:
        classes = np.argmax(task.named_output(outputs, "logits"), axis=-1)
        return [self._assign_tags(row, numbers.tolist()) for row, numbers in zip(batch.rows, classes, strict=True)]

    def _assign_tags(self, row: Row, numbers: Sequence[int]) -> list[str]:
        """Return the tag of each word, from the class numbers of its tokens."""
        tags: list[str] = [_OUTSIDE] * len(row.sample["tokens"])
        words = row.word_ids or ()
        for index in reversed(range(len(words))):
            if (word := words[index]) is not None:
                tags[word] = self.labels.model[numbers[index]]
        return tags

    def words(self, value: Sequence[str | None]) -> str:
        return " ".join(tag or "–" for tag in value)

    def for_metrics(self, prediction: list[str], reference: list[str | None]) -> list[str]:
        """Tags of the words that are not ignored."""
        return [tag for tag, right in zip(prediction, reference, strict=True) if right is not None]


def _tag_evaluator(context: task.EvaluatorContext) -> _TagEvaluator:
    task.refuse_slow_tokenizer(context, "words")
    column = context.columns["tags"]
    names = label_names(context.data_set.features[column])
    values = (tag for tags in context.values("tags") for tag in _check_tags(tags, column) if tag != _LEFT_OUT)
    labels = match_labels(model_labels(context.config), names, values, column)
    return _TagEvaluator(labels, labels.notes)


def _check_tags(cell: object, column: str) -> Sequence[Any]:
    """Return the tags in a cell.

    Raises:
        UsageError: the cell is not a list.
    """
    if isinstance(cell, Sequence) and not isinstance(cell, str):
        return cell
    raise UsageError(
        f"column {column} contains {type(cell).__name__}; expected a list with one tag per word",
        hint=f"Set the column with {opt.columns} tags=COLUMN.",
    )


TOKEN_CLASSIFICATION = task.TaskDefinition(
    "token-classification",
    ("tokens", "tags"),
    (*metrics.SPAN_METRICS, metrics.TAG_ACCURACY),
    _tag_evaluator,
    "equal tags of all words",
)
