"""Lets transformers' own generation loop drive the graph of a decoder.

The loop is given tokens, mask and positions as for a model of its own; the cache it hands from step to step is that of
the graph, and stays in ONNX Runtime's memory.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, set_seed
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from winml.modelkit.errors import InputError, UsageError, first_line
from winml.modelkit.file_names import GENERATION_CONFIG_NAME
from winml.modelkit.generate.built_model import config_beside
from winml.modelkit.generate.generation.loop import GeneratedToken
from winml.modelkit.generate.generation.settings import SPEED_ONLY, GenerationSettings, read_generation_config
from winml.modelkit.generate.generation.text import open_tokenizer
from winml.modelkit.models.caches.layout import loop_cache_name
from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.ort.decoding.decoder import DecoderGraph, GraphCache
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.sessions import Session
from winml.modelkit.samples.processors import tokenizer_call

Output = TypeVar("Output")


def passed_cache(cache: GraphCache | None, past_key_values: GraphCache | None) -> GraphCache | None:
    """Return the cache that a call is given by either of its names; None: it is given none.

    Raises:
        UsageError: it is given two.
    """
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise UsageError(
            "cache and past_key_values are two different caches: they are two names of one argument",
            hint="Pass the cache of the previous result once.",
        )
    return past_key_values if cache is None else cache


def with_cache(record: Callable[..., Output], logits: torch.Tensor, cache: GraphCache | None) -> Output:
    """Return an answer with logits and a cache, which is named as the installed transformers names it.

    Args:
        record: Class of the answer.
        logits: Of shape [batch, sequence, vocabulary].
        cache: For the next call; None: there is none.
    """
    return record(logits=logits, **{loop_cache_name(): cache})


def refuse_tuple(return_dict: bool | None) -> None:
    """Refuse a request for a tuple in place of a record.

    Raises:
        UsageError: ``return_dict`` is False.
    """
    if return_dict is False:
        raise UsageError(
            "return_dict=False is not supported: the result is a record",
            hint="Omit it, and read the fields of the result.",
        )


def open_sessions(
    paths: Iterable[str | os.PathLike[str]],
    *,
    ep: str | None = None,
    device: Literal["cpu", "gpu", "npu"] | None = None,
    ep_options: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> Iterator[Session]:
    """Open the graphs of a model on one execution provider.

    Args:
        paths: The ONNX files.
        ep: Execution provider to run on; None: the one for the device.
        device: Kind of processor; None: the provider's own, the CPU without one.
        ep_options: Options of the provider.
        threads: Threads that share the work of one operator; None: the runtime's own choice.

    Raises:
        UsageError: the provider is unknown or not installed.
        StageError: ONNX Runtime cannot load a file.
    """
    provider = choose_provider(ep, device, ep_options or {})
    for path in paths:
        yield Session(Path(path), providers=provider.names, provider_options=provider.options, threads=threads)


class DecoderModel(GenerationMixin):
    """What transformers' loop asks of a model, answered by a graph.

    Attributes:
        graph: The graph in its session.
        config: The model's config.
        generation_config: What decides how it generates where a call says nothing.
    """

    main_input_name = "input_ids"
    device = torch.device("cpu")
    dtype = torch.float32
    _is_stateful = False
    graph: DecoderGraph
    config: Any
    generation_config: GenerationConfig
    tokenizer_folder: Path
    """Where the tokenizer is, which finds the strings that end a text."""

    @classmethod
    def of_graph(cls, graph: Any, folder: Path) -> Any:
        """Return the model of a graph that is open already.

        Raises:
            InputError: there is no config in the folder.
        """
        model = cls.__new__(cls)
        model._take_graph(graph, folder)
        return model

    @classmethod
    def can_generate(cls) -> bool:
        """Say that it does."""
        return True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # Read by transformers' loop: the first answer brings the cache along.
        return False

    @staticmethod
    def is_remote_code() -> bool:
        """Say that the class comes with no checkpoint."""
        return False

    @staticmethod
    def get_experts_implementation() -> dict[str, str]:
        """Say that transformers has no experts of its own to run here."""
        return {}

    def prepare_inputs_for_generation(self, *arguments: Any, **kwargs: Any) -> dict[str, object]:
        """Return what a step is given: not the tokenizer, which the loop hands on with what a model takes."""
        kwargs.pop("tokenizer", None)
        loop: Any = super()  # declared for models of torch
        prepared: dict[str, object] = loop.prepare_inputs_for_generation(*arguments, **kwargs)
        return prepared

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: object = None,
        past_key_values: GraphCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: GraphCache | None = None,
        **other: Any,
    ) -> CausalLMOutputWithPast:
        """Answer tokens.

        Args:
            input_ids: Integers of shape [batch, sequence]: those after what ``cache`` stands for.
            attention_mask: Integers of shape [batch, cached + sequence], 0 for padding; None: there is none.
            position_ids: Integers of shape [batch, sequence]; None: counted on from the cache.
            past_key_values: ``cache`` by its name before transformers 5.24.
            use_cache: Whether the answer brings a cache along; None: where the graph has one.
            return_dict: Must not be False: the answer is a record.
            cache: That of the answer before, which this one changes in place; None: a new text begins.
            **other: Inputs that a caller may hand on, as None.

        Returns:
            ``logits`` of shape [batch, sequence or 1, vocabulary], and the cache for the next call: ``cache``, or
            ``past_key_values`` before transformers 5.24.

        Raises:
            UsageError: an input is missing, unknown or of a shape the graph does not take; or the cache is that of
                another model.
            StageError: ONNX Runtime fails.
        """
        self._refuse_inputs(input_ids, use_cache, return_dict, other)
        keeps = self.graph.has_cache if use_cache is None else use_cache
        tokens = _integers(input_ids)
        mask = None if attention_mask is None else _integers(attention_mask)
        positions = None if position_ids is None else _integers(position_ids)
        cache = passed_cache(cache, past_key_values)
        if cache is None and self.graph.has_cache:
            cache = self.graph.empty_cache(len(tokens))
        logits = to_torch(self.graph.run(tokens, mask, positions, cache))
        return with_cache(CausalLMOutputWithPast, logits, cache if keeps else None)

    __call__ = forward

    def _take_graph(self, graph: DecoderGraph, folder: Path) -> None:
        """Take a graph and the configs in a folder.

        Raises:
            InputError: there is none.
        """
        config = config_beside(folder / "model.onnx")
        if config is None:
            raise InputError(
                f"{folder}: the generation loop of transformers needs a config there",
                hint="Build the model again without --no-tokenizer.",
            )
        self.graph, self.config, self.tokenizer_folder = graph, config, folder
        self.generation_config = generation_config_beside(folder, config, has_cache=graph.has_cache)

    def _refuse_inputs(self, tokens: Any, use_cache: bool | None, return_dict: bool | None, other: Any) -> None:
        passed = [name for name, value in other.items() if value is not None]
        if tokens is None or passed:
            problem = f"unexpected input {passed[0]!r}" if passed else "missing input_ids"
            raise UsageError(
                f"{problem}: {self.graph.name} takes {', '.join(item.name for item in self.graph.inputs)}",
                hint="Pass input_ids, and attention_mask if rows are padded.",
            )
        refuse_tuple(return_dict)
        if use_cache and not self.graph.has_cache:
            raise UsageError(
                f"use_cache=True, but {self.graph.name} has no KV cache",
                hint="Omit it, or build the model again without --no-cache.",
            )


def generation_config_beside(folder: Path, config: PretrainedConfig, *, has_cache: bool) -> GenerationConfig:
    """Return what the files in a folder say about generating.

    Args:
        folder: Where the files are.
        config: The model's config, which says it where ``generation_config.json`` is missing.
        has_cache: Whether the graph has a cache.

    Raises:
        InputError: a file is damaged, or transformers refuses its values.
        UsageError: a way to choose tokens is asked for that is not supported.
    """
    path = folder / GENERATION_CONFIG_NAME
    passed = {key: value for key, value in read_generation_config(folder).items() if key not in SPEED_ONLY}
    with foreign_parser(f"{path}: transformers rejects it", hint="Correct it in this file."):
        found = GenerationConfig.from_dict(passed) if path.is_file() else GenerationConfig.from_model_config(config)
    found.use_cache = has_cache
    return found


def generation_call(model: DecoderModel, **arguments: Any) -> Any:
    """Return what ``generate()`` answers, with the tokenizer where a string ends the text.

    Raises:
        InputError: transformers refuses the settings beside the model, or the tokenizer cannot be read.
        WinMLError: whatever a run of a graph raises.
    """
    folder = model.tokenizer_folder
    if "max_new_tokens" in arguments:
        model.generation_config.max_length = None  # transformers warns where both are set
    ends_by_strings = (arguments.get("stop_strings") or model.generation_config.stop_strings) is not None
    if ends_by_strings:
        arguments["tokenizer"] = open_tokenizer(folder)
    try:
        with tokenizer_call(folder) if ends_by_strings else contextlib.nullcontext():
            return model.generate(**arguments)  # type: ignore[misc]  # declared for models of torch
    except (ValueError, TypeError) as error:  # its words for settings that do not go together
        if _comes_from_graph(error):
            raise
        raise InputError(
            f"{folder / GENERATION_CONFIG_NAME}: the generation loop of transformers rejects it: {first_line(error)}",
            hint="Correct or remove this key.",
        ) from error


def _comes_from_graph(error: Exception) -> bool:
    """Say whether an error was raised while a graph ran, or by code of ours: then no setting is wrong."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = __name__.partition(".")[0]
    ours = [frame for frame in frames if str(frame.f_globals.get("__name__")).partition(".")[0] == own]
    return frames[-1] in ours or any(frame.f_code.co_name == "forward" for frame in ours)


def loop_arguments(settings: GenerationSettings) -> dict[str, Any]:
    """Return what ``generate()`` is told of settings that a user can change."""
    step, others = settings.step, settings.for_transformers or {}
    return {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": step.is_sampled,
        "repetition_penalty": step.repetition_penalty,
        "num_beams": others.get("num_beams", 1),
        **({"stop_strings": others["stop_strings"]} if "stop_strings" in others else {}),
        **step.drawn,
    }


def generated_by(
    model: Any, inputs: Mapping[str, torch.Tensor], passed: int, settings: GenerationSettings
) -> Iterator[GeneratedToken]:
    """Yield the tokens that transformers' loop chooses; with beams, all of them at the end.

    Args:
        model: What the loop runs.
        inputs: Of one row, by argument of ``generate()``.
        passed: Tokens at the start of the answer that were not chosen; 0: a loop of the model type takes them off, and
            gives all others at the end.
        settings: How tokens are chosen, besides what the configs say.

    Raises:
        WinMLError: whatever a run of a graph raises.
    """
    set_seed(settings.seed)
    streams = passed > 0 and settings.is_stepwise
    streamer = _Stream()

    def work() -> None:
        try:
            arguments = {**inputs, **loop_arguments(settings)}
            output = generation_call(model, **arguments, streamer=streamer if streams else None)
            if not streams:
                streamer.put(output[0, :passed])
                for token in output[0, passed:]:
                    streamer.put(token)
            streamer.entries.put(None)
        except BaseException as error:  # handed to the thread that waits for the tokens, and raised there
            streamer.entries.put(error)

    threading.Thread(target=work, daemon=True).start()
    before = time.perf_counter()
    for token in streamer.tokens():
        now = time.perf_counter()
        yield GeneratedToken(token, now - before, "eos" if token in settings.eos_token_ids else "")
        before = now


class _Stream(BaseStreamer):
    """Hands each token to another thread."""

    def __init__(self) -> None:
        self.entries: queue.Queue[int | BaseException | None] = queue.Queue()
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Take the prompt, then token after token."""
        if not self._is_prompt:
            self.entries.put(int(value))
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: the end is told when ``generate`` returns."""

    def tokens(self) -> Iterator[int]:
        """Yield the tokens as they come.

        Raises:
            BaseException: whatever the thread met.
        """
        while (entry := self.entries.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry


def _integers(value: Any) -> Any:
    return to_numpy(value if isinstance(value, torch.Tensor) else torch.as_tensor(value))
