"""Task results for texts, images and audio: ``winml run`` for a built model and for PyTorch alike.

Classes, tokens, spans and embeddings are computed here with numpy, as the pipelines of transformers do, and need no
PyTorch. Boxes, segments, depth and transcripts come from the pipeline of transformers. Reads only files next to the
model. Also compares the results of a built model and of PyTorch for the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.evaluate.tasks.similarity import ALIKE, cosine, read_pooling
from winml.modelkit.evaluate.tasks.task import named_output
from winml.modelkit.evaluate.tasks.texts import best_span
from winml.modelkit.generate.generation.settings import position_limit, read_settings
from winml.modelkit.generate.graph_model import GraphModel
from winml.modelkit.generate.records import AnswerEntry, AnswerKind, ReferenceAnswer
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.options import JsonError, load_json
from winml.modelkit.ort.foreign_libraries import local_files_only
from winml.modelkit.ort.ort_values import MAP_KEYS
from winml.modelkit.ort.shared_settings import attribute_replaced
from winml.modelkit.samples.media import Recording, resampled
from winml.modelkit.samples.preprocessing import text_limit
from winml.modelkit.samples.processors import ProcessorKind, open_processor, tokenizer_call

AUDIO = "input_values"
"""Specified by transformers: the input of a graph that takes samples of audio."""
TEXT = "input_ids"
"""Specified by transformers: the input of a graph that takes tokens of a text."""
_TOP = 5
"""Chosen: as transformers' pipelines do; a list that is read at a glance."""
_BEFORE_TEXT = 4
"""Specified by Whisper: tokens of start, language, task and times."""
_UNLIMITED = 1 << 20
"""Chosen: maximum tokens of a text that states no limit."""
_HYPOTHESIS, _CAPTION, _SOUND = "This example is {}.", "This is a photo of {}.", "This is a sound of {}."
"""Specified by transformers' pipelines: sentences for candidate labels of a text, an image and a sound."""
_SIGLIP_TOKENS = 64
"""Specified by transformers' pipeline: length to which the captions of SigLIP are padded."""
_POINTS = "input_points"
"""Specified by transformers: the input of a graph that takes points of objects."""
_OUTSIDE = "O"
"""Specified by the IOB format: class of a token outside of all entities."""
_MAX_LISTED_VALUES = 8
"""Values of a tensor in an answer. Chosen: they fit on a line."""


@dataclass(frozen=True)
class Answer:
    """Result of a model."""

    kind: AnswerKind
    entries: tuple[AnswerEntry, ...]
    arrays: Arrays = field(default_factory=dict)
    """Arrays of the result: embeddings, ``depth`` of each pixel, ``segments``: the segment number of each pixel,
    ``image``: its red, green and blue values from 0 to 255, ``audio``: its samples."""
    notes: tuple[str, ...] = ()


class _CuttingTokenizer:
    """A tokenizer of transformers that notes truncations of a text."""

    def __init__(self, tokenizer: Any, notes: dict[str, None], limit_words: str) -> None:
        """Store the tokenizer, the notes to extend, and a phrase for its limit."""
        self._tokenizer, self._notes, self._limit_words = tokenizer, notes, limit_words

    def __getattr__(self, name: str) -> Any:
        """Return the tokenizer's attribute of this name."""
        return getattr(self._tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Return the tokens; notes a cut text."""
        rows = self._tokenizer(*texts, **options)
        limit = self._tokenizer.model_max_length
        # Windows of a text lose no tokens.
        if (
            options.get("truncation")
            and not options.get("return_overflowing_tokens")
            and self._has_truncated(rows, *texts, **options)
        ):
            self._notes[f"a text of more than {limit} tokens is cut to {limit}, {self._limit_words}"] = None
        return rows

    def _has_truncated(self, rows: Any, *texts: Any, **options: Any) -> bool:
        """Return True if tokens were truncated; slow tokenizers do not report it and are re-run in case."""
        if rows.encodings is not None:
            return any(row.overflowing for row in rows.encodings)
        limit = self._tokenizer.model_max_length
        is_full = np.asarray(rows["input_ids"]).shape[-1] >= limit
        texts_by_name = {name: options[name] for name in ("text", "text_pair") if name in options}
        return bool(is_full and len(self._tokenizer(*texts, **texts_by_name, verbose=False)["input_ids"]) > limit)


class TaskRunner:
    """Answers the inputs of a task with a model."""

    def __init__(
        self,
        model: Any,
        task: str,
        folder: Path,
        *,
        graph_inputs: Sequence[InputTensorSpec],
        top: int | None,
        threshold: float | None,
    ) -> None:
        """Store a model and its settings.

        Args:
            model: A built model, or one of transformers. Boxes, segments, depth and transcripts need one that returns
                tensors of PyTorch.
            task: A key of :data:`~winml.modelkit.generate.task_inputs.RUN_TASKS`.
            folder: Folder of config, tokenizer and processor.
            graph_inputs: Inputs of the built model, to which images and audio are fitted; empty: any size is accepted.
            top: Number of classes or tokens in the result; None: 5.
            threshold: Minimum score of a box or a segment; None: the pipeline's default.
        """
        self._model, self._task, self._folder = model, task, folder
        self._graph_inputs = {spec.name: spec for spec in graph_inputs}
        self._top = top or _TOP
        self._threshold = {} if threshold is None else {"threshold": threshold}
        self._notes: dict[str, None] = {}

    def __call__(self, inputs: Mapping[str, Any]) -> Answer:
        """Compute the result for one set of inputs.

        Args:
            inputs: Input of the task → text, image of Pillow, recording, or a list of these.

        Raises:
            UsageError: files for making the inputs are missing next to the model, or the model does not take them.
            InputError: these files are damaged.
            StageError: ONNX Runtime fails.
        """
        # A pipeline raises arbitrary errors for unsuitable inputs or files.
        failure = f"{self._task}: the inputs cannot be processed"
        hint = "Check that the processor files and the config beside the model are those of its checkpoint."
        with local_files_only(), foreign_parser(failure, hint=hint):
            answer = _ANSWERS[self._task](self, inputs)
        return Answer(answer.kind, answer.entries, answer.arrays, (*self._notes, *answer.notes))

    def _open_processor(self, kind: ProcessorKind) -> Any:
        return open_processor(
            kind, self._folder, self._task, instead=f"or pass tensors by name: {opt.input} NAME=@FILE.npy"
        )

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer. It cuts texts to the maximum of the model or the fixed length of the graph, with a note."""
        tokenizer = self._open_processor("tokenizer")
        spec = self._graph_inputs.get(TEXT)
        fixed = spec.shape[-1] if spec is not None and isinstance(spec.shape[-1], int) else _UNLIMITED
        limit = text_limit(self._folder, tokenizer, at_most=_UNLIMITED)
        limit_words = "the maximum of the model"
        if fixed < limit:
            limit = fixed
            limit_words = (
                f"the input length of the graph; export or build the model with {opt.dynamic_seq_len} to read longer "
                "texts"
            )
        tokenizer.model_max_length = limit
        return _CuttingTokenizer(tokenizer, self._notes, limit_words)

    @cached_property
    def _extractor(self) -> Any:
        """The feature extractor next to the model."""
        return self._open_processor("feature extractor")

    @cached_property
    def _image_processor(self) -> Any:
        return self._open_processor("image processor")

    @property
    def _config(self) -> Any:
        """The config of the model, which names its classes.

        Raises:
            InputError: no config is next to the model.
        """
        if (config := getattr(self._model, "config", None)) is None:
            raise InputError(
                f"{self._folder}: no config.json for transformers, which names the classes",
                hint=f"Copy the config of the checkpoint there, or pass tensors by name: {opt.input} NAME=@FILE.npy",
            )
        return config

    def _pipeline(self, *kinds: ProcessorKind) -> Any:
        """Create the pipeline of the task.

        Raises:
            InputError: no config is next to the model.
        """
        _ = self._config
        import transformers

        attributes = {"tokenizer": "_tokenizer", "image processor": "_image_processor",
                      "feature extractor": "_extractor"}  # fmt: skip
        processors = {kind.replace(" ", "_"): getattr(self, attributes[kind]) for kind in kinds}
        return transformers.pipeline(self._task, model=self._model, device="cpu", **processors)  # type: ignore[call-overload]  # one overload a task

    def _class_name(self, number: int) -> str:
        return str(self._config.id2label.get(int(number), f"LABEL_{number}"))

    def _class_answer(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the likeliest classes for the inputs of the model."""
        logits = named_output(self._run_model(inputs), "logits")[0].astype(np.float32)
        problem = getattr(self._config, "problem_type", None)
        if problem == "regression":
            scores = logits
        elif problem == "multi_label_classification" or len(logits) == 1:
            scores = _sigmoid(logits)
        else:
            scores = _softmax(logits)
        return _ranked_answer([(self._class_name(number), score) for number, score in enumerate(scores)], self._top)

    def _tokenize(self, *texts: Any, **options: Any) -> Any:
        """Return the tokens of texts as arrays."""
        with tokenizer_call(self._tokenizer, *texts):
            return self._tokenizer(*texts, return_tensors="np", **{"truncation": True, **options})

    def text_classes(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the classes of a text or of a pair, or how well each of the candidate labels describes a text.

        Raises:
            UsageError: labels are passed with a text pair, or the model has no class for entailment.
        """
        if labels := _as_list(inputs.get("label", ())):
            return self._score_candidate_labels(inputs, labels)
        texts = [inputs[name] for name in ("text", "text_pair") if inputs.get(name)]
        return self._class_answer(self._tokenize(*texts))

    def _score_candidate_labels(self, inputs: Mapping[str, Any], labels: Sequence[str]) -> Answer:
        if inputs.get("text_pair"):
            raise UsageError("label and text_pair cannot be combined", hint="Omit one of them.")
        names = {number: str(name) for number, name in self._config.id2label.items()}
        entailment = next((number for number, name in names.items() if name.lower().startswith("entail")), None)
        if entailment is None:
            raise UsageError(
                f"candidate labels require a class 'entailment'; the model has {', '.join(names.values())}",
                hint=f"Omit {opt.label}, or use a model of natural language inference.",
            )
        pairs = [(inputs["text"], _HYPOTHESIS.format(label)) for label in labels]
        logits = [
            named_output(self._run_model(self._tokenize(*pair, truncation="only_first")), "logits")[0] for pair in pairs
        ]
        if len(labels) == 1:
            contradiction = -1 if entailment == 0 else 0
            scores = _softmax(logits[0][[contradiction, entailment]])[1:]
        else:
            scores = _softmax(np.asarray([row[entailment] for row in logits]))
        return _ranked_answer(zip(labels, scores, strict=True))

    def entities(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the entities of a text: neighbouring tokens of one class together.

        Raises:
            InputError: a file beside the model is missing or damaged, or the text is too long.
        """
        text, has_offsets = inputs["text"], self._tokenizer.is_fast
        rows = self._tokenize(text, return_special_tokens_mask=True, return_offsets_mapping=has_offsets)
        is_special = rows.pop("special_tokens_mask")[0]
        offsets = rows.pop("offset_mapping")[0] if has_offsets else None
        tokens = rows["input_ids"][0]
        scores = _softmax(named_output(self._run_model(rows), "logits")[0].astype(np.float32))
        groups: list[tuple[str, list[int]]] = []
        for place in np.flatnonzero(is_special == 0).tolist():
            name = self._class_name(scores[place].argmax())
            if groups and not name.startswith("B-") and _without_position(groups[-1][0]) == _without_position(name):
                groups[-1][1].append(place)
            else:
                groups.append((name, [place]))
        entries = []
        for name, places in groups:
            if _without_position(name) == _OUTSIDE:
                continue
            start, end = (None, None) if offsets is None else (int(offsets[places[0]][0]), int(offsets[places[-1]][1]))
            words = self._tokenizer.decode(tokens[places]) if start is None else text[start:end]
            score = float(scores[places].max(axis=-1).mean())
            entries.append(AnswerEntry(label=name.split("-", 1)[-1], score=score, text=words, start=start, end=end))
        return Answer("entities", tuple(entries))

    def masked_tokens(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the most likely tokens for each mask.

        Raises:
            UsageError: the text has no mask within the maximum of tokens, or the tokenizer knows none.
        """
        text, mask = inputs["text"], self._tokenizer.mask_token
        if mask is None:
            raise UsageError(
                "the tokenizer has no mask token, which marks the place of the token to predict",
                hint="Set mask_token in tokenizer_config.json, if the model was trained with one.",
            )
        if mask not in text:
            raise UsageError(f"text {text!r} has no mask", hint=f"Put {mask} where the model should predict a token.")
        rows = self._tokenize(text)
        tokens = rows["input_ids"][0]
        places = np.flatnonzero(tokens == self._tokenizer.mask_token_id)
        if not len(places):
            raise UsageError(
                f"{mask} is beyond the first {self._tokenizer.model_max_length} tokens of the text, which are read",
                hint=f"Shorten the text before {mask}.",
            )
        scores = _softmax(named_output(self._run_model(rows), "logits")[0, places].astype(np.float32))
        entries = []
        for place, row in zip(places, scores, strict=True):
            for number in np.argsort(-row, kind="stable")[: self._top]:
                filled = np.where(np.arange(len(tokens)) == place, number, tokens)
                entry_text = self._tokenizer.decode(filled, skip_special_tokens=len(places) == 1)
                token = self._tokenizer.decode([int(number)])
                entries.append(AnswerEntry(label=token, score=float(row[number]), text=entry_text))
        return Answer("labels", tuple(entries))

    def span(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the part of the context that answers the question; a long context is read in windows.

        Raises:
            UsageError: the tokenizer does not provide token offsets.
        """
        question, context = inputs["question"], inputs["context"]
        tokenizer = self._tokenizer
        longest = tokenizer.model_max_length
        if not tokenizer.is_fast:
            raise UsageError(
                "question-answering: the tokenizer does not provide token offsets",
                hint="Put a fast tokenizer (tokenizer.json) beside the model.",
            )
        with tokenizer_call(tokenizer, question, context):
            rows = tokenizer(
                question,
                context,
                truncation="only_second",
                max_length=longest,
                stride=min(128, longest // 4),
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
        best = AnswerEntry(text="", score=0.0)
        for window in range(len(rows["input_ids"])):
            row = {name: [rows[name][window]] for name in tokenizer.model_input_names if name in rows}
            output = self._run_model(row)
            is_context = np.asarray([number == 1 for number in rows.sequence_ids(window)])
            start, end = (_probabilities(output[name][0], is_context) for name in ("start_logits", "end_logits"))
            _, first, last = best_span(np.log(start + 1e-300), np.log(end + 1e-300), is_context)
            offsets = rows["offset_mapping"][window]
            begin, stop, score = int(offsets[first][0]), int(offsets[last][1]), float(start[first] * end[last])
            if score > (best.score or 0):
                best = AnswerEntry(text=context[begin:stop], score=score, start=begin, end=stop)
        return Answer("spans", (best,))

    def document_span(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the words of a page that answer the question; ``start`` and ``end`` count words.

        Raises:
            UsageError: neither the page nor its words are passed, or these are not as expected.
        """
        pipeline, words = self._pipeline("tokenizer"), inputs.get("word_boxes")
        if words is None and inputs.get("image") is None:
            raise UsageError(
                f"{self._task} takes word_boxes or an image of the page", hint=f"{opt.input} word_boxes=@words.json"
            )
        boxes = None if words is None else _read_word_boxes(words)
        results = pipeline(question=inputs["question"], image=inputs.get("image"), word_boxes=boxes)
        return Answer(
            "spans",
            tuple(
                AnswerEntry(text=found["answer"], score=found["score"], start=found["start"], end=found["end"])
                for found in results
            ),
        )

    def _run_model(self, inputs: Mapping[str, Any]) -> Arrays:
        return run_arrays(self._model, {name: np.asarray(value) for name, value in inputs.items()})

    def embeddings(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the embedding of one text or recording, or the similarity of each to the first."""
        return self.audio_embeddings(inputs) if "audio" in inputs else self.text_embeddings(inputs)

    def text_embeddings(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the embedding of one text, or the similarity of each to the first.

        Raises:
            UsageError: the pooling of sentence-transformers is not supported.
        """
        pooling, embeddings = read_pooling(self._folder), []
        for text in _as_list(inputs["text"]):
            with tokenizer_call(self._tokenizer, text):
                row = self._tokenizer(text, truncation=True)
            outputs = self._run_model({name: [value] for name, value in row.items()})
            if "sentence_embedding" in outputs:
                embeddings.append(outputs["sentence_embedding"][0].astype(np.float64))
                continue
            pooling.refuse_unknown()
            states = named_output(outputs, "last_hidden_state")[0].astype(np.float64)
            embeddings.append(pooling.embedding(states, np.ones(len(states), bool)))
        return _embedding_answer(_as_list(inputs["text"]), embeddings, pooling.notes)

    def written_text(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the text generated by an encoder-decoder; removes ``max_length`` from the settings of the model.

        Raises:
            InputError: a file beside the model is damaged, or the text is too long.
            UsageError: the settings are not supported.
        """
        settings = read_settings(self._folder).fitted(1, position_limit(self._folder))
        with tokenizer_call(self._tokenizer, inputs["text"]):
            row = self._tokenizer(inputs["text"], return_tensors="pt", truncation=True)
        model_inputs = {name: row[name] for name in ("input_ids", "attention_mask") if name in row}
        self._model.generation_config.max_length = None  # transformers warns if both are set
        tokens = self._model.generate(**model_inputs, max_new_tokens=settings.max_new_tokens)[0]
        with tokenizer_call(self._tokenizer):
            return Answer("text", (AnswerEntry(text=self._tokenizer.decode(tokens, skip_special_tokens=True)),))

    def speech(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the audio of a spoken text.

        Raises:
            UsageError: the text has no tokens.
            InputError: the config beside the model is missing or states no sampling rate, or the model returns no
                waveform.
        """
        row = self._tokenize(inputs["text"])
        if not row["input_ids"].size:
            raise UsageError(
                f"text {inputs['text']!r} has no tokens: the vocabulary of the model lacks its characters",
                hint="Pass words in the language and script of the model; write numbers as words.",
            )
        samples = named_output(self._run_model(row), "waveform").reshape(-1)
        if (rate_hz := getattr(self._config, "sampling_rate", None)) is None:
            raise InputError(f"{self._folder}: config.json states no sampling_rate", hint="Add the rate, in hertz.")
        if any(getattr(self._config, name, None) for name in ("noise_scale", "noise_scale_duration")):
            self._notes["the model draws random noise: the audio differs from run to run"] = None
        entries, arrays = _describe_tensors({"audio": samples})
        return Answer("audio", tuple(replace(entry, rate_hz=int(rate_hz)) for entry in entries), arrays)

    def _fit_image_processor(self, image: Any) -> Any:
        """Set the image processor, in place, to the fixed size of the graph, and return it.

        Args:
            image: The sample.
        """
        processor, spec = self._image_processor, self._graph_inputs.get("pixel_values")
        if spec is None or not all(isinstance(size, int) for size in spec.shape[-2:]):
            return processor
        image_size = tuple(processor(images=[image], return_tensors="np")["pixel_values"].shape[-2:])
        if image_size != spec.shape[-2:]:
            height, width = (int(size) for size in spec.shape[-2:] if isinstance(size, int))
            processor.size = type(processor.size)(height=height, width=width)
            if getattr(processor, "do_center_crop", None):
                processor.do_center_crop = False
            self._notes[
                f"images are resized to {height} x {width}, the input size of the graph; the image processor is "
                f"configured for {image_size[0]} x {image_size[1]}"
            ] = None
        return processor

    def image_classes(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the classes of an image."""
        processor = self._fit_image_processor(inputs["image"])
        return self._class_answer(processor(images=[inputs["image"]], return_tensors="np"))

    def labelled_image(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the score of each candidate label for an image.

        Raises:
            InputError: a file beside the model is missing or damaged, or a label is too long.
        """
        image, labels = inputs["image"], _as_list(inputs["label"])
        pixels = dict(self._fit_image_processor(image)(images=[image], return_tensors="np"))
        is_siglip = "siglip" in str(self._config.model_type)
        options = {"padding": "max_length", "max_length": _SIGLIP_TOKENS} if is_siglip else {"padding": True}
        texts = dict(self._tokenize([_CAPTION.format(label) for label in labels], **options))
        logits = self._label_logits(pixels, texts, "logits_per_image")
        scores = _sigmoid(logits) if is_siglip else _softmax(logits.astype(np.float32))
        return _ranked_answer(zip(labels, scores, strict=True))

    def labelled_audio(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the score of each candidate label for a recording.

        Raises:
            UsageError: the recording is longer than the model reads.
        """
        samples, labels = self._resample_uncut(inputs["audio"]), _as_list(inputs["label"])
        features = self._extractor([samples["raw"]], sampling_rate=samples["sampling_rate"], return_tensors="np")
        texts = dict(self._tokenize([_SOUND.format(label) for label in labels], padding=True))
        logits = self._label_logits(dict(features), texts, "logits_per_audio")
        return _ranked_answer(zip(labels, _softmax(logits.astype(np.float32)), strict=True))

    def _label_logits(self, sample: Mapping[str, Any], texts: Mapping[str, Any], output: str) -> Array:
        """Return the logit of each label; a graph of one text is run for each label.

        Args:
            sample: Tensors of one image or recording.
            texts: Tensors of the labels, one row each.
            output: Name of the output with the logits.
        """
        tokens, count = self._graph_inputs.get(TEXT), len(texts[TEXT])
        rows = [slice(None)]
        if tokens is not None and tokens.shape[0] == 1:
            rows = [slice(row, row + 1) for row in range(count)]
        outputs = [self._run_model({**sample, **{name: values[row] for name, values in texts.items()}}) for row in rows]
        return np.concatenate([named_output(result, output)[0] for result in outputs])

    def video_classes(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the classes of a video, of which the model reads a fixed number of evenly spaced frames."""
        frames = _as_list(inputs["image"])
        count = getattr(self._config, "num_frames", len(frames))
        chosen = [frames[index] for index in np.linspace(0, len(frames) - 1, count).round().astype(int)]
        if len(frames) != count:
            self._notes[f"{count} frames are read, evenly spaced among the {len(frames)} of the video"] = None
        return self._class_answer(self._image_processor(chosen, return_tensors="np"))

    def described_objects(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the objects in an image that labels describe, each with its box."""
        self._fit_image_processor(inputs["image"])
        labels = list(_as_list(inputs["label"]))
        pipeline = self._pipeline("tokenizer", "image processor")
        return _box_answer(pipeline(inputs["image"], candidate_labels=labels, **self._threshold))

    def boxes(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the objects in an image, each with its box."""
        self._fit_image_processor(inputs["image"])
        return _box_answer(self._pipeline("image processor")(inputs["image"], **self._threshold))

    def segments(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the classes or objects that pixels of an image belong to, the largest first."""
        self._fit_image_processor(inputs["image"])
        results = self._pipeline("image processor")(inputs["image"], **self._threshold)
        return _segment_answer(
            [(np.asarray(segment["mask"]) > 0, str(segment["label"]), segment["score"]) for segment in results]
        )

    def masks(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the object at each point of an image: of its masks, the one that the model scores best.

        Without points, the objects at a grid of points.

        Raises:
            UsageError: the points are not as expected or empty, or the graph does not take one point of one object.
        """
        import torch

        if "points" not in inputs:
            return self._grid_masks(inputs["image"])
        points, spec = _read_points(inputs["points"]), self._graph_inputs.get(_POINTS)
        if self._graph_inputs and (spec is None or spec.shape[1:3] != (1, 1)):
            raise self._unfit_for_masks(f"the graph does not take {_POINTS} of shape [1, 1, 1, 2]")
        row = self._image_processor(images=[inputs["image"]], return_tensors="np")
        pixels, sizes = row["pixel_values"], np.asarray(row["original_sizes"])
        # Images are padded on the right and below, or resized to the size of the model.
        resized = np.asarray(row.get("reshaped_input_sizes", [pixels.shape[-2:]]))
        scaled = (points * (resized[0] / sizes[0])[::-1]).astype(np.float32).reshape(1, -1, 1, 2)
        count = 1 if self._graph_inputs else len(points)
        found = []
        for first in range(0, len(points), count):
            outputs = self._run_model({"pixel_values": pixels, _POINTS: scaled[:, first : first + count]})
            scores = named_output(outputs, "iou_scores")[0]
            low_resolution = torch.from_numpy(named_output(outputs, "pred_masks").astype(np.float32))
            (masks,) = self._image_processor.post_process_masks(
                low_resolution, sizes.tolist(), reshaped_input_sizes=resized.tolist()
            )
            for point, choices, of_point in zip(points[first:], masks, scores, strict=False):
                best = int(of_point.argmax())
                found.append((choices[best].numpy(), f"{point[0]:g}, {point[1]:g}", float(of_point[best])))
        return _segment_answer(found)

    def _grid_masks(self, image: Any) -> Answer:
        """Return the objects at a grid of points, as transformers' pipeline finds them.

        Raises:
            UsageError: the model is one graph.
        """
        if self._graph_inputs:
            raise self._unfit_for_masks("one graph of images and points encodes the image for every point of the grid")
        threshold = {} if not self._threshold else {"pred_iou_thresh": self._threshold["threshold"]}
        # That of transformers requires torchvision.
        with attribute_replaced(self._image_processor, "post_process_for_mask_generation", distinct_masks):
            found = self._pipeline("image processor")(image, **threshold)
        masks = zip(found["masks"], found["scores"].tolist(), strict=True)
        answer = _segment_answer([(np.asarray(mask), "", score) for mask, score in masks])
        entries = (replace(entry, label=f"object {number}") for number, entry in enumerate(answer.entries, 1))
        return replace(answer, entries=tuple(entries))

    def _unfit_for_masks(self, reason: str) -> UsageError:
        return UsageError(
            f"{self._task}: {reason}",
            hint=f"Export the model again for {self._task}, or pass tensors by name: {opt.input} NAME=@FILE.npy",
        )

    def depth(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the depth of the pixels of an image, in the model's unit."""
        self._fit_image_processor(inputs["image"])
        result = self._pipeline("image processor")(inputs["image"])
        return Answer("depth", *_describe_tensors({"depth": result["predicted_depth"].numpy(force=True).squeeze()}))

    def changed_image(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the image that the model makes of an image."""
        tensors = self._image_processor(images=[inputs["image"]], return_tensors="np")
        channels = named_output(self._run_model(dict(tensors)), "reconstruction")[0].astype(np.float32)
        pixels = (np.moveaxis(channels, 0, -1).clip(0, 1) * 255).round().astype(np.uint8)
        return Answer("image", *_describe_tensors({"image": pixels}))

    def image_embeddings(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the embedding of one image, or the similarity of each to the first."""
        images = _as_list(inputs["image"])
        processor = self._fit_image_processor(images[0])
        embeddings = [self._pool_states(dict(processor(images=[image], return_tensors="np"))) for image in images]
        names = [str(getattr(image, "filename", "") or f"image {number}") for number, image in enumerate(images, 1)]
        return _embedding_answer(names, embeddings, ())

    def _pool_states(self, tensors: Mapping[str, Any], share: float = 1.0) -> Array:
        """Return the pooled output of a model, or the mean of its hidden states, with a note.

        Args:
            tensors: Inputs of one image or recording.
            share: Share of the states before the padding at their end.
        """
        outputs = self._run_model(tensors)
        if (pooled := outputs.get("pooler_output")) is None:
            self._notes["The model has no pooler_output: the mean of its last_hidden_state is used."] = None
            states = named_output(outputs, "last_hidden_state")[0]
            # [tokens or frames, size], or [channels, height, width]
            pooled = (
                states[: math.ceil(share * len(states))].mean(0)
                if states.ndim == 2
                else states.reshape(len(states), -1).mean(1)
            )
        return pooled.reshape(-1).astype(np.float64)

    def _resample_and_pad(self, recording: Recording) -> dict[str, Any]:
        """Return a recording at the rate of the model, padded to the length of a graph of a fixed length; notes both.

        Raises:
            UsageError: the recording is longer than the graph.
        """
        rate_hz = int(self._extractor.sampling_rate)
        samples = resampled(recording, rate_hz)
        if recording.rate_hz != rate_hz:
            self._notes[f"the audio is resampled from {recording.rate_hz} Hz to {rate_hz} Hz"] = None
        spec = self._graph_inputs.get(AUDIO)
        length = spec.shape[1] if spec is not None and len(spec.shape) == 2 else None
        if isinstance(length, int) and len(samples) > length:
            raise UsageError(
                f"the audio has {len(samples)} samples ({len(samples) / rate_hz:.3g} s), but the graph takes {length} "
                f"({length / rate_hz:.3g} s)",
                hint=f"Export or build the model with a dynamic length ({opt.dynamic_seq_len}), or pass shorter audio.",
            )
        if isinstance(length, int) and len(samples) < length:
            self._notes[
                f"the audio of {len(samples)} samples is padded with silence to {length}, the input length of the graph"
            ] = None
            samples = np.pad(samples, (0, length - len(samples)))
        return {"raw": samples, "sampling_rate": rate_hz}

    def _resample_uncut(self, recording: Recording) -> dict[str, Any]:
        """Return a recording as :meth:`_resample_and_pad` does, unless the feature extractor would cut it.

        Raises:
            UsageError: the recording is longer than the model reads.
        """
        samples = self._resample_and_pad(recording)
        # Whisper and CLAP
        longest = getattr(self._extractor, "n_samples", None) or getattr(self._extractor, "nb_max_samples", None)
        if longest is not None and len(samples["raw"]) > longest:
            rate_hz = samples["sampling_rate"]
            raise UsageError(
                f"the audio has {len(samples['raw']) / rate_hz:.3g} s, but the model reads {longest / rate_hz:.3g} s",
                hint="Pass shorter audio.",
            )
        return samples

    def audio_embeddings(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the embedding of one recording, or the similarity of each to the first.

        Raises:
            UsageError: the recording is longer than the model reads.
        """
        recordings, embeddings = _as_list(inputs["audio"]), []
        for recording in recordings:
            samples = self._resample_uncut(recording)
            rate_hz, length = samples["sampling_rate"], len(samples["raw"])
            tensors = dict(self._extractor(samples["raw"], sampling_rate=rate_hz, return_tensors="np"))
            own_length = len(recording.samples) * rate_hz / recording.rate_hz
            embeddings.append(self._pool_states(tensors, min(1.0, own_length / length)))
        names = [recording.name or f"audio {number}" for number, recording in enumerate(recordings, 1)]
        return _embedding_answer(names, embeddings, ())

    def transcript(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the transcript of a recording.

        Raises:
            InputError: a file beside the model is missing or damaged.
            UsageError: the recording is longer than the graph.
        """
        samples = self._resample_and_pad(inputs["audio"])
        pipeline = self._pipeline("tokenizer", "feature extractor")
        is_whisper = self._model.config.model_type == "whisper"
        if self._model.config.is_encoder_decoder:
            # The pipeline identifies generating models by the name of a class.
            pipeline.type = "seq2seq_whisper" if is_whisper else "seq2seq"
        longest = getattr(self._extractor, "n_samples", None)
        is_long = is_whisper and longest is not None and len(samples["raw"]) > longest
        arguments: dict[str, Any] = {"return_timestamps": True} if is_long else {}
        if self._model.config.is_encoder_decoder:
            # Room for the tokens of language, task and times before the text.
            settings = read_settings(self._folder).fitted(_BEFORE_TEXT, position_limit(self._folder))
            arguments["generate_kwargs"] = {"max_new_tokens": settings.max_new_tokens}
        with tokenizer_call(self._tokenizer):
            result = pipeline(samples, **arguments)
        return Answer("text", (AnswerEntry(text=str(result["text"])),))

    def audio_classes(self, inputs: Mapping[str, Any]) -> Answer:
        """Return the classes of a recording."""
        samples = self._resample_uncut(inputs["audio"])
        rate_hz = samples["sampling_rate"]
        return self._class_answer(self._extractor(samples["raw"], sampling_rate=rate_hz, return_tensors="np"))


_ANSWERS: Mapping[str, Callable[[TaskRunner, Mapping[str, Any]], Answer]] = {
    "text-classification": TaskRunner.text_classes,
    "token-classification": TaskRunner.entities,
    "question-answering": TaskRunner.span,
    "document-question-answering": TaskRunner.document_span,
    "fill-mask": TaskRunner.masked_tokens,
    "feature-extraction": TaskRunner.embeddings,
    "image-feature-extraction": TaskRunner.image_embeddings,
    "image-classification": TaskRunner.image_classes,
    "object-detection": TaskRunner.boxes,
    "image-segmentation": TaskRunner.segments,
    "mask-generation": TaskRunner.masks,
    "depth-estimation": TaskRunner.depth,
    "image-to-image": TaskRunner.changed_image,
    "zero-shot-object-detection": TaskRunner.described_objects,
    "video-classification": TaskRunner.video_classes,
    "zero-shot-audio-classification": TaskRunner.labelled_audio,
    "zero-shot-image-classification": TaskRunner.labelled_image,
    "automatic-speech-recognition": TaskRunner.transcript,
    "audio-classification": TaskRunner.audio_classes,
    "text2text-generation": TaskRunner.written_text,
    "text-to-audio": TaskRunner.speech,
}


def _read_word_boxes(text: str) -> list[tuple[str, list[int]]]:
    """Return the words of a page with their boxes.

    Raises:
        UsageError: the text is no JSON of words and boxes.
    """
    try:
        return [(str(word), [int(number) for number in box]) for word, box in load_json(text)]
    except (JsonError, TypeError, ValueError) as error:
        raise UsageError(
            f"word_boxes: expected words with boxes: {error}", hint='Example: [["Total", [10, 20, 90, 40]]]'
        ) from error


def _read_points(text: str) -> Array:
    """Return points of an image, of shape [points, 2].

    Raises:
        UsageError: the text is no JSON of pairs of numbers, or holds none.
    """
    try:
        points = np.asarray([(float(x), float(y)) for x, y in load_json(text)]).reshape(-1, 2)
    except (JsonError, TypeError, ValueError) as error:
        raise UsageError(f"points: expected pairs of numbers: {error}", hint="Example: [[120, 80]]") from error
    if not len(points):
        raise UsageError("points: the list is empty", hint="Example: [[120, 80]]")
    return points


def distinct_masks(masks: Sequence[Mapping[str, Any]], scores: Any, boxes: Any, largest_overlap: float) -> Any:
    """Return the masks that remain after non-maximum suppression, the best first; their scores, codes and boxes.

    Args:
        masks: Run lengths of each mask, column by column, of alternating values.
        scores: Tensor of scores of shape [masks].
        boxes: Tensor of left, top, right and bottom edges of shape [masks, 4].
        largest_overlap: Largest ratio of intersection and union with the box of a better mask.
    """
    edges = boxes.numpy().astype(np.float32)
    areas = (edges[:, 2:] - edges[:, :2]).prod(1)
    remaining, kept = np.argsort(-scores.numpy(), kind="stable"), []
    while len(remaining):
        best, remaining = remaining[0], remaining[1:]
        kept.append(int(best))
        corners = np.minimum(edges[best, 2:], edges[remaining, 2:]) - np.maximum(edges[best, :2], edges[remaining, :2])
        shared = corners.clip(0).prod(1)
        remaining = remaining[shared <= largest_overlap * (areas[best] + areas[remaining] - shared)]
    arrays = []
    for mask in (masks[index] for index in kept):
        height, width = mask["size"]
        values = np.arange(len(mask["counts"])) % 2 == 1
        arrays.append(np.repeat(values, mask["counts"]).reshape(width, height).T)
    return arrays, scores[kept], [masks[index] for index in kept], boxes[kept]


def _segment_answer(segments: Sequence[tuple[Array, str, float | None]]) -> Answer:
    """Return segments of an image, the largest first.

    Args:
        segments: Mask, label and score of each.
    """
    ranked = sorted(segments, key=lambda segment: -int(segment[0].sum()))
    numbers = np.zeros(ranked[0][0].shape if ranked else (0, 0), np.int32)
    for number, (mask, _, _) in enumerate(ranked, 1):
        numbers[mask] = number
    entries = (
        AnswerEntry(label=label, score=None if score is None else float(score), share=float(mask.mean()))
        for mask, label, score in ranked
    )
    return Answer("segments", tuple(entries), {"segments": numbers})


def run_arrays(model: Any, arrays: Arrays) -> Arrays:
    """Run a model on arrays by name and return its outputs by name.

    Args:
        model: A built model, or one of transformers.
        arrays: The inputs.
    """
    if type(model) is GraphModel:
        return model.run(**arrays)
    import torch

    from winml.modelkit.models.tensors import to_numpy

    with torch.inference_mode():
        outputs = model(**{name: torch.as_tensor(array) for name, array in arrays.items()})
    return {name: to_numpy(value) for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def tensor_answer(model: Any, tensors: Arrays, names: Collection[str] | None = None, top: int | None = None) -> Answer:
    """Return the outputs of a model for tensors by name; of maps of scores, the likeliest keys of each row.

    Args:
        model: A built model, or one of transformers.
        tensors: The inputs.
        names: Requested outputs; None: all tensors.
        top: Number of keys of a row; None: 5.

    Raises:
        UsageError: an input is missing, unknown, or of an unsupported type or shape.
        StageError: ONNX Runtime fails.
    """
    outputs = run_arrays(model, tensors)
    arrays = {name: array for name, array in outputs.items() if names is None or name in names}
    maps = [name for name in arrays if f"{name}{MAP_KEYS}" in arrays and arrays[name].dtype.kind == "f"]
    if len(maps) == 1:
        return _map_answer(arrays, maps[0], top or _TOP)
    return Answer("tensors", *_describe_tensors(arrays))


def _map_answer(arrays: Arrays, name: str, top: int) -> Answer:
    """Return the likeliest keys of each row, as those of the classifiers of scikit-learn.

    Args:
        arrays: Outputs of the model.
        name: The output with the scores of the keys.
        top: Number of keys of a row.
    """
    keys, scores = arrays[f"{name}{MAP_KEYS}"].astype(str), np.atleast_2d(arrays[name])
    predicted = [
        array.astype(str) for array in arrays.values() if array.dtype.kind in "iOU" and array.shape == scores.shape[:1]
    ]
    entries, notes = [], []
    for number, row in enumerate(scores, 1):
        ranked = _ranked_answer(zip(keys.tolist(), row, strict=True), top).entries
        entries += [replace(entry, input=f"row {number}" if len(scores) > 1 else None) for entry in ranked]
        if predicted and predicted[0][number - 1] != ranked[0].label:
            notes.append(f"The predicted class of row {number} is {predicted[0][number - 1]}.")
    return Answer("labels", tuple(entries), arrays, tuple(notes))


def _describe_tensors(arrays: Arrays) -> tuple[tuple[AnswerEntry, ...], Arrays]:
    """Describe arrays by type, limits and first values; return the entries and the arrays."""
    entries = []
    for name, array in arrays.items():
        if array.dtype.kind in "OU":
            text = ", ".join(map(str, array.reshape(-1)[:_MAX_LISTED_VALUES]))
            entries.append(AnswerEntry(label=name, text=text, shape=array.shape, dtype="string"))
            continue
        numbers = np.asarray(array, np.float64)
        entries.append(
            AnswerEntry(
                label=name,
                shape=array.shape,
                dtype=str(array.dtype),
                minimum=float(numbers.min()) if array.size else None,
                maximum=float(numbers.max()) if array.size else None,
                values=tuple(numbers.reshape(-1)[:_MAX_LISTED_VALUES].tolist()),
            )
        )
    return tuple(entries), arrays


def _box_answer(detections: Iterable[Mapping[str, Any]]) -> Answer:
    """Return objects with their boxes, as a pipeline of transformers returns them."""
    entries = (
        AnswerEntry(
            label=str(detection["label"]),
            score=float(detection["score"]),
            box=tuple(float(detection["box"][edge]) for edge in ("xmin", "ymin", "xmax", "ymax")),  # type: ignore[arg-type]  # four
        )
        for detection in detections
    )
    return Answer("boxes", tuple(entries))


def _ranked_answer(scores: Iterable[tuple[str, Any]], count: int | None = None) -> Answer:
    """Return labels with their scores, the highest first.

    Args:
        scores: Each label with its score; several classes may have one name.
        count: Number of labels; None: all.
    """
    ranked = sorted(scores, key=lambda item: -float(item[1]))[:count]
    return Answer("labels", tuple(AnswerEntry(label=label, score=float(score)) for label, score in ranked))


def _without_position(name: str) -> str:
    """Return the class of a token without its position in the entity, in the IOB format."""
    return name[2:] if name.startswith(("B-", "I-")) else name


def _softmax(logits: Array) -> Array:
    """Return the softmax along the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _sigmoid(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits)))


def _embedding_answer(names: Sequence[str], embeddings: Sequence[Array], notes: tuple[str, ...]) -> Answer:
    """Return a single embedding, or the similarity of each embedding to the first."""
    arrays = {"embeddings": np.stack(embeddings).astype(np.float32)}
    if len(embeddings) == 1:
        values = tuple(arrays["embeddings"][0].tolist())
        return Answer("embedding", (AnswerEntry(text=names[0], shape=(len(values),), values=values),), arrays, notes)
    entries = (
        AnswerEntry(text=name, score=cosine(embeddings[0], embedding))
        for name, embedding in zip(names[1:], embeddings[1:], strict=True)
    )
    return Answer("similarity", tuple(entries), arrays, notes)


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _probabilities(scores: Array, is_allowed: Array) -> Array:
    """Return the softmax over the allowed positions and the first position, which means no answer."""
    masked = np.where(is_allowed | (np.arange(len(scores)) == 0), scores.astype(np.float64), -np.inf)
    weights = np.exp(masked - masked.max())
    return np.asarray(weights / weights.sum() * is_allowed)


_PIXELS = 1.0
"""Largest difference of a side of two boxes, in pixels. Chosen: pipelines round to whole pixels."""


def compared_answers(ours: Answer, theirs: Answer, name: str) -> ReferenceAnswer:
    """Compare the results of the built model and of PyTorch.

    Args:
        ours: Result of the built model.
        theirs: Result of PyTorch.
        name: The checkpoint, as the user wrote it.
    """
    differences = list(_find_differences(ours, theirs))
    numbers = [number for number, _ in differences if number is not None]
    description = next((description for _, description in differences if description), None)
    return ReferenceAnswer(name, theirs.entries, description is None, max(numbers, default=None), ALIKE, description)


def _find_differences(ours: Answer, theirs: Answer) -> Iterator[tuple[float | None, str]]:
    """Yield the size of each difference, and a description if it is significant."""
    if ours.arrays:
        yield from _array_differences(ours, theirs)
    if ours.kind == "labels":
        yield from _class_differences(ours.entries, theirs.entries)
    elif ours.kind not in ("embedding", "depth", "image", "audio", "tensors", "segments"):
        yield from _entry_differences(ours.entries, theirs.entries)


def _array_differences(ours: Answer, theirs: Answer) -> Iterator[tuple[float | None, str]]:
    """Yield the relative error of each array, and a description if the error exceeds the tolerance."""
    for name, array in ours.arrays.items():
        reference = theirs.arrays[name]
        if array.shape != reference.shape:
            yield None, f"{name} has shape {list(array.shape)} instead of {list(reference.shape)}"
        elif ours.kind == "segments":
            # No segments have no pixels.
            share = float((_pixel_labels(ours) != _pixel_labels(theirs)).mean()) if array.size else 0.0
            yield share, f"{share:.2%} of the pixels have a different label" if share > ALIKE else ""
        else:
            scale = float(np.abs(np.asarray(reference, np.float64)).max(initial=0)) or 1.0
            error = float(np.abs(np.asarray(array, np.float64) - reference).max(initial=0)) / scale
            yield error, f"{name} differs by {error:.2%} of its largest value" if error > ALIKE else ""


def _pixel_labels(answer: Answer) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    """Return the label of each pixel of a segmentation."""
    names = np.asarray(["", *(entry.label for entry in answer.entries)], object)
    labels: np.ndarray[tuple[int, ...], np.dtype[np.object_]] = names[answer.arrays["segments"]]
    return labels


def _class_differences(
    ours: tuple[AnswerEntry, ...], theirs: tuple[AnswerEntry, ...]
) -> Iterator[tuple[float | None, str]]:
    if ours[0].label != theirs[0].label:
        yield None, f"the first is {ours[0].label} instead of {theirs[0].label}"
    names = [entry.label for entry in (*ours, *theirs)]  # special tokens have no text, and one label for all
    scores = {entry.label: entry.score or 0.0 for entry in theirs if names.count(entry.label) == 2}
    for entry in (entry for entry in ours if entry.label in scores):
        difference = abs((entry.score or 0.0) - scores[entry.label])
        yield difference, f"the score of {entry.label} differs by {difference:.4f}" if difference > ALIKE else ""


def _entry_differences(
    ours: tuple[AnswerEntry, ...], theirs: tuple[AnswerEntry, ...]
) -> Iterator[tuple[float | None, str]]:
    if len(ours) != len(theirs):
        yield None, f"{len(ours)} results instead of {len(theirs)}"
    for number, (entry, target) in enumerate(zip(ours, theirs, strict=False), 1):
        if entry.label != target.label or entry.text != target.text:
            yield None, f"result {number} is {entry.label or entry.text!r} instead of {target.label or target.text!r}"
        if entry.score is not None and target.score is not None:
            difference = abs(entry.score - target.score)
            yield difference, f"the score of result {number} differs by {difference:.4f}" if difference > ALIKE else ""
        if entry.box is not None and target.box is not None:
            pixels = max(abs(a - b) for a, b in zip(entry.box, target.box, strict=True))
            yield None, f"the box of result {number} differs by {pixels:g} pixels" if pixels > _PIXELS else ""
