"""Documents of a model's inputs, its results, and generated texts."""

from __future__ import annotations

from collections.abc import Iterator

from winml.modelkit.generate.records import (
    AnswerEntry,
    GeneratedText,
    InferenceResult,
    ReferenceText,
    RunSchema,
    SchemaTensor,
)
from winml.modelkit.onnx.specs import is_array_type
from winml.modelkit.report import document as doc
from winml.modelkit.words import shape_words, size_words

_MAX_CHARACTERS = 40
"""Maximum characters of a text beside its result. Chosen: the result fits on the same line."""


def inference_document(result: InferenceResult) -> doc.Document:
    """Describe a result for people, and its comparison with PyTorch."""
    return doc.Document([_answer_block(result)], doc.Fields(list(_summary_fields(result))), title="Answer")


def _answer_block(result: InferenceResult) -> doc.Block:
    """Return the entries of a result as paragraph, fields or table, depending on the kind."""
    entries = result.entries
    is_single = all(entry.input is None for entry in entries)
    match result.kind:
        case "text" if is_single:
            return doc.Paragraph(entries[0].text or "")
        case "text":
            columns = doc.columns("text")
            rows: list[list[doc.Cell]] = [[entry.text or ""] for entry in entries]
        case "labels" if any(entry.text is not None for entry in entries):
            columns = doc.columns("token", ("score", "score"), "text")
            rows = [[entry.label or "", entry.score, entry.text or ""] for entry in entries]
        case "labels":
            columns = doc.columns("label", ("score", "score"))
            rows = [[entry.label or "", entry.score] for entry in entries]
        case "entities":
            columns = doc.columns("entity", "text", ("score", "score"), "characters")
            rows = [
                [entry.label or "", entry.text or "", entry.score, f"{entry.start}–{entry.end}"] for entry in entries
            ]
        case "spans":
            unit = "words" if result.task == "document-question-answering" else "characters"
            columns = doc.columns("answer", ("score", "score"), unit)
            rows = [[entry.text or "", entry.score, f"{entry.start}–{entry.end}"] for entry in entries]
        case "boxes":
            columns = doc.columns("object", ("score", "score"), "left, top, right, bottom")
            rows = [
                [entry.label or "", entry.score, ", ".join(f"{edge:g}" for edge in entry.box or ())]
                for entry in entries
            ]
        case "segments":
            columns = doc.columns("segment", ("pixels", "share"), ("score", "score"))
            rows = [[entry.label or "", entry.share, entry.score] for entry in entries]
        case "similarity":
            queries = next((result.inputs[name] for name in ("text", "image", "audio") if name in result.inputs), [""])
            columns = doc.columns(f"similarity to {_shorten(queries[0])!r}", ("cosine", "score"))
            rows = [[_shorten(entry.text or ""), entry.score] for entry in entries]
        case "embedding":
            entry = entries[0]
            values = entry.values or ()
            return doc.Fields([("embedding", f"{len(values)} numbers: {_format_numbers(values[:6])}, …")])
        case "audio":
            columns = doc.columns("audio", "samples", "sampling rate")
            sounds = [((entry.shape or (0,))[0], entry.rate_hz or 1) for entry in entries]
            rows = [[f"{count / rate_hz:.3g} s", count, f"{rate_hz} Hz"] for count, rate_hz in sounds]
        case _:
            columns = doc.columns("output", "type", "minimum", "maximum", "first values")
            rows = [_tensor_row(entry) for entry in entries]
    if not is_single:
        columns = [*doc.columns("input"), *columns]
        texts = [entry.input or "" for entry in entries]
        rows = [[doc.Shortened(_shorten(text), text), *row] for text, row in zip(texts, rows, strict=True)]
    return doc.Table(columns, rows)


def _shorten(text: str) -> str:
    r"""Return the start of a text, on one line.

    >>> _shorten("one\n two")
    'one two'
    """
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"


def _format_numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _tensor_row(entry: AnswerEntry) -> list[doc.Cell]:
    shape = ", ".join(map(str, entry.shape or ()))
    limits = ("" if value is None else f"{value:.4g}" for value in (entry.minimum, entry.maximum))
    first = _format_numbers((entry.values or ())[:4]) if entry.text is None else _shorten(entry.text)
    return [entry.label or "", f"{entry.dtype}[{shape}]", *limits, first]


def _summary_fields(result: InferenceResult) -> Iterator[doc.Field]:
    """Yield the fields of an answer: task, times, provider, notes, and the comparison with PyTorch."""
    if not result.entries:
        yield "answer", "nothing found"
    if result.task is not None:
        yield "task", f"{result.task} ({result.task_rule})"
    prepared = "" if result.task is None else ", input and output processing included"
    # Rows of tensors are one run.
    count = 1 if result.task is None else len({entry.input for entry in result.entries})
    runs = "the first run" if count <= 1 else f"{count} runs, with the first one"
    yield "time", f"{result.run_ms:.0f} ms for {runs}{prepared}; {result.session_ms:.0f} ms to open the model"
    simulation = f", simulated on the {result.simulated_on}" if result.simulated_on else ""
    yield "provider", f"{result.provider}{simulation}"
    yield from doc.note_fields(result.notes)
    reference = result.reference
    if reference is not None:
        number = "" if reference.max_difference is None else f", largest difference {reference.max_difference:.1e}"
        verdict = "the same answer" if reference.is_same else f"another answer: {reference.difference}"
        yield "PyTorch", f"{verdict}{number} ({reference.model})"


def schema_document(schema: RunSchema) -> doc.Document:
    """Describe the inputs of a model: inputs of its task, tensors of its graph, and a command that runs it."""
    blocks: list[doc.Block] = [doc.Fields([("task", schema.task or "not stated")])]
    if schema.inputs:
        columns = doc.columns("input", "kind", "option", "meaning")
        rows: list[list[doc.Cell]] = [
            [
                entry.name + ("" if entry.is_required else " (optional)"),
                entry.kind,
                entry.option + (" …" if entry.is_repeatable else ""),
                entry.meaning,
            ]
            for entry in schema.inputs
        ]
        blocks.append(doc.Table(columns, rows))
    blocks.append(_tensor_table("tensor", schema.tensors))
    if schema.outputs:
        blocks.append(_tensor_table("output", schema.outputs))
    if schema.dimensions:
        blocks.append(doc.Fields([("sizes", ", ".join(f"{dim.name} {dim.words}" for dim in schema.dimensions))]))
    return doc.Document(
        blocks, doc.Fields([("example", schema.example or "none: only tensors can be passed")]), title="Inputs"
    )


def _tensor_table(name: str, tensors: tuple[SchemaTensor, ...]) -> doc.Table:
    """Return a table of tensors, with a column of parts if there are several."""
    has_parts = len({tensor.part for tensor in tensors}) > 1
    columns = doc.columns(name, "type", *(["part"] if has_parts else []))
    rows: list[list[doc.Cell]] = [
        [
            tensor.name,
            shape_words(tensor.dtype, tensor.shape) if is_array_type(tensor.dtype) else tensor.dtype,
            *([tensor.part] if has_parts else []),
        ]
        for tensor in tensors
    ]
    return doc.Table(columns, rows)


_ENDS = {
    "eos": "ended by the model",
    "stop": "ended by {}",
    "length": "at the maximum",
}


def generated_lines(result: GeneratedText, number: int | None = None) -> Iterator[str]:
    """Yield a line for times and memory, a line per note, and the text of PyTorch.

    Args:
        result: The text.
        number: Number of the prompt, if there are several.
    """
    rate = result.tokens_per_second
    count = len(result.prompt_tokens)
    names = {"stop_strings": "a stop string", "max_time": "max_time"}
    ended_by = " or ".join(phrase for name, phrase in names.items() if name in result.settings)
    parts = [
        *([f"prompt {number}"] if number is not None else []),
        f"{len(result.tokens)} new tokens ({_ENDS[result.end].format(ended_by)}) after {count} of the prompt",
        *([f"session {result.session_ms / 1000:.2f} s"] if number in {None, 1} else []),
        f"first token {result.first_token_ms:.0f} ms",
        *([f"{rate:.1f} tokens/s"] if rate is not None else []),
        *([f"cache {size_words(result.cache_bytes)}"] if result.cache_bytes is not None else []),
        *(["transformers' loop"] if result.loop == "transformers" else []),
    ]
    yield ", ".join(parts)
    yield from (f"note: {note}" for note in result.notes)
    if result.reference is not None:
        yield from _reference_lines(result.reference, len(result.tokens))


def _reference_lines(reference: ReferenceText, count: int) -> Iterator[str]:
    difference = reference.difference
    if difference is None:
        yield f"PyTorch ({reference.model}) writes the same {count} tokens"
        return
    margin = difference.reference_margin
    scored = "" if margin is None else f"; PyTorch scores them {margin:.2e} apart"
    quantized = " (the model is quantized)" if reference.is_of_quantized else ""
    yield (
        f"PyTorch ({reference.model}) differs at token {difference.index + 1}: "
        f"{_token_words(difference.reference_token, difference.reference_text)} instead of "
        f"{_token_words(difference.token, difference.text)}{scored}; {reference.equal_tokens} of "
        f"{max(count, len(reference.tokens))} tokens ({100 * reference.equal_share:.0f} %) are equal{quantized}"
    )


def _token_words(token: int | None, text: str) -> str:
    return "its end" if token is None else f"{token} ({text!r})"
