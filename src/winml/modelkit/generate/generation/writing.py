"""Text generation with a built model, piece by piece.

Our loop chooses the tokens unless the files request unsupported features; it needs no torch. Features that only
transformers has, such as beams, use its loop.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from winml.modelkit.arrays import Arrays
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.file_names import DECODER, ONLY_PART, VISION, files_folder
from winml.modelkit.generate.generation.decoder_prompt import PreparedPrompt
from winml.modelkit.generate.generation.loop import GeneratedToken, TokenSource, generate_tokens
from winml.modelkit.generate.generation.settings import part_position_limit, position_limit, read_settings
from winml.modelkit.generate.generation.text import TimedText, read_tokenizer
from winml.modelkit.generate.records import GeneratedText
from winml.modelkit.generate.task_inputs import RUN_TASKS
from winml.modelkit.ort.decoding.decoder import DecoderGraph
from winml.modelkit.ort.decoding.parts import EncoderDecoder, open_decoder
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.progress import count_progress
from winml.modelkit.samples.chat_templates import chat_prompt


@dataclass
class _Progress:
    """Progress of a generated text."""

    max_tokens: int
    """Tokens that may be written."""
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    end: Literal["eos", "stop", "length"] = "length"

    def add(self, entry: GeneratedToken) -> int:
        """Record a token and return it."""
        self.tokens.append(entry.token)
        count_progress(len(self.tokens), self.max_tokens, f"token {len(self.tokens)} of at most {self.max_tokens}")
        self.seconds.append(entry.seconds)
        self.end = entry.end or self.end
        return entry.token

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first; `None` if there is only one."""
        return len(self.seconds[1:]) / sum(self.seconds[1:]) if sum(self.seconds[1:]) else None


def prepare_prompt(
    files: Mapping[str, Path],
    prompt: str,
    pictures: Sequence[str] = (),
    *,
    is_chat: bool,
    system: str | None = None,
    **requested: Any,
) -> PreparedPrompt:
    """Tokenize a prompt, and determine its generation settings; the model itself is not opened.

    Args:
        files: The ONNX files by part; tokenizer and configs are in the same folder.
        prompt: The text.
        pictures: Paths of the images of the prompt, for a vision-language model.
        is_chat: True if the text is a user message for the chat template of the model.
        system: Message in the role ``system`` before it, or None.
        **requested: See :meth:`~winml.modelkit.generate.generation.settings.GenerationSettings.updated`.

    Raises:
        UsageError: the prompt is empty or exceeds the positions, or an image or the chat template does not exist.
        InputError: an image cannot be opened, the tokenizer or processor is missing, or a file is damaged.
    """
    images: list[Any] = []
    if VISION in files:
        from winml.modelkit.generate.generation.media_prompts import open_picture, process_text

        images = [open_picture(path) for path in pictures]
    folder = files_folder(files.get(DECODER) or files[ONLY_PART])
    tokenizer = read_tokenizer(folder)
    settings = read_settings(folder).updated(**requested)
    inputs: Arrays = {}
    if VISION in files and (images or is_chat):
        text, tokens, inputs = process_text(files, folder, prompt, images, is_chat=is_chat, system=system)
    else:
        text = chat_prompt(folder, prompt, system) if is_chat else prompt
        tokens = tuple(tokenizer.encode(text, with_special=not is_chat))
    if not tokens:
        raise UsageError("the prompt is empty, and the tokenizer adds no start token", hint="Pass a text.")
    limit = part_position_limit(files[DECODER], folder) if VISION in files else position_limit(folder)
    return PreparedPrompt(files, text, tokens, settings.fitted(len(tokens), limit), tokenizer, inputs=inputs)


def write_texts(
    prompts: Sequence[PreparedPrompt],
    provider: ChosenProvider,
    *,
    threads: int | None,
    show: Callable[[str], None],
    adapter: Path | None,
) -> Iterator[GeneratedText]:
    """Yield the text after each prompt. The model is opened once, and each prompt starts with an empty cache.

    Args:
        prompts: Prompts of one model, at least one.
        provider: The execution provider.
        threads: Number of threads per operator; None: the runtime's default.
        show: Called with each piece of the text as soon as it is generated.
        adapter: File of the active adapter; None: the base model runs.

    Raises:
        InputError: the model does not generate.
        UsageError: the model does not take as many tokens.
        StageError: ONNX Runtime fails.
    """
    started = time.perf_counter()
    graph = open_decoder(prompts[0].files, partial(provider.open, threads=threads, adapter=adapter))
    session_ms = (time.perf_counter() - started) * 1000
    refuse_other_task(str(prompts[0].folder), graph.described.get("task"))
    fitted = [replace(raw, settings=raw.settings.fitted(raw.decoder_tokens, graph.most_tokens)) for raw in prompts]
    for prompt in fitted:
        loop, tokens = _choose_token_source(graph, prompt)
        text = _write_text(prompt, graph, loop, tokens, session_ms, show)
        yield replace(text, provider=provider.provider.name, simulated_on=provider.stand_in)


def refuse_other_task(name: str, task: str | None) -> None:
    """Refuse a model of a task that generates no text.

    Args:
        name: The model, as written on a command line.
        task: Task stated in its file.

    Raises:
        UsageError: the task generates no text.
    """
    if task in RUN_TASKS and task not in ("text2text-generation", "automatic-speech-recognition"):
        raise UsageError(
            f"{name} is for {task}, which winml run runs", hint=f"winml run {name} --schema lists what it takes."
        )


def _write_text(
    prompt: PreparedPrompt,
    graph: DecoderGraph,
    loop: Literal["winml", "transformers"],
    tokens: Iterator[GeneratedToken],
    session_ms: float,
    show: Callable[[str], None],
) -> GeneratedText:
    """Consume the tokens of one text, show each piece, and return the text with its measurements.

    Args:
        prompt: The prompt, with its tokenizer and settings.
        graph: The decoder, for the size of its cache.
        loop: Name of the loop that yields the tokens.
        tokens: Generated tokens, yielded as they are computed.
        session_ms: Time to open the model.
        show: Called with each piece of text.
    """
    progress, pieces = _Progress(prompt.settings.max_new_tokens), list[str]()
    for piece in prompt.tokenizer.pieces((progress.add(entry) for entry in tokens), after=prompt.before):
        pieces.append(piece)
        if piece:
            show(piece)
    ends_early = {"stop_strings", "max_time"} & (prompt.settings.for_transformers or {}).keys()
    if progress.end == "length" and ends_early and len(progress.tokens) < prompt.settings.max_new_tokens:
        progress.end = "stop"
    return GeneratedText(
        model=str(prompt.model),
        prompt=prompt.text,
        prompt_tokens=prompt.tokens,
        tokens=tuple(progress.tokens),
        text="".join(pieces),
        end=progress.end,
        loop=loop,
        settings=prompt.settings.as_record(),
        session_ms=session_ms,
        first_token_ms=next(iter(progress.seconds), 0.0) * 1000,
        tokens_per_second=progress.tokens_per_second if prompt.settings.is_stepwise else None,
        cache_bytes=graph.last_cache.size_bytes() if graph.last_cache is not None else None,
        notes=prompt.settings.notes if graph.has_cache else (*prompt.settings.notes, *_no_cache_notes()),
        segments=prompt.tokenizer.as_records(prompt.before) if isinstance(prompt.tokenizer, TimedText) else None,
    )


def _no_cache_notes() -> tuple[str, str]:
    slow = (
        "This model has no KV cache: every token recomputes the whole text, so generation slows down with its length."
    )
    return slow, f"Build it again without {opt.no_cache} to get one."


def _choose_token_source(graph: DecoderGraph, prompt: PreparedPrompt) -> TokenSource:
    """Return the loop that chooses the tokens, and the tokens."""
    inputs = prompt.inputs
    if isinstance(graph, EncoderDecoder):
        from winml.modelkit.generate.generation.media_prompts import encoder_arrays, recorded_tokens

        if isinstance(prompt.tokenizer, TimedText):
            return "transformers", recorded_tokens(graph, prompt, prompt.tokenizer)
        inputs = encoder_arrays(graph.encoder, prompt)
    if prompt.settings.for_transformers is None:
        tokens = generate_tokens(graph, prompt.before, prompt.settings, inputs=inputs, beginning=prompt.beginning)
        return "winml", tokens
    if importlib.util.find_spec("torch") is None:
        keys = ", ".join(prompt.settings.for_transformers)
        raise UsageError(
            f"{keys}: only the generation loop of transformers supports this, and it requires PyTorch, which is not "
            "installed",
            hint=f"Omit the option ({opt.num_beams}, {opt.stop}), or remove the key from generation_config.json.",
        )
    import torch

    from winml.modelkit.generate.generation.transformers_loop import generate_with_loop, model_of_graph, own_loop

    model = model_of_graph(graph, prompt.folder)
    arguments = {name: torch.from_numpy(array) for name, array in inputs.items()}
    count = len(prompt.before)
    if prompt.beginning is None:
        arguments["inputs"] = torch.tensor([list(prompt.tokens)])
    elif own_loop(model.config) is not None:
        count = 0
    return "transformers", generate_with_loop(model, arguments, count, prompt.settings)
