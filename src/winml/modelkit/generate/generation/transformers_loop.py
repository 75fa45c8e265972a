"""Use of transformers' generation loop with the graphs of a model.

The loop passes tokens, mask and positions as for one of its models; the cache that it passes from step to step is the
decoder's, in ONNX Runtime's memory. For an encoder-decoder the loop encodes once and passes the encoder outputs to
every step, with rows repeated for beams.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils.generic import ModelOutput

from winml.modelkit.errors import InputError, UsageError, first_line, opt
from winml.modelkit.file_names import DECODER, GENERATION_CONFIG_NAME, files_folder
from winml.modelkit.generate.built_model import as_array
from winml.modelkit.generate.generation.decoder_prompt import read_prompt
from winml.modelkit.generate.generation.loop import GeneratedToken
from winml.modelkit.generate.generation.settings import (
    SPEED_ONLY,
    GenerationSettings,
    position_limit,
    read_generation_config,
)
from winml.modelkit.generate.generation.text import open_tokenizer
from winml.modelkit.generate.graph_model import config_beside
from winml.modelkit.models.caches.layout import CACHE_ARGUMENTS, loop_cache_name
from winml.modelkit.models.inputs.modalities.text import KINDS_PARAMETER
from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.ort.decoding.decoder import DecoderGraph, GraphCache
from winml.modelkit.ort.decoding.inputs import TOKEN_TYPES
from winml.modelkit.ort.decoding.parts import (
    PIXEL_MASK,
    Encoder,
    EncoderDecoder,
    VisionLanguageDecoder,
    open_decoder,
)
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.foreign_libraries import local_files_only
from winml.modelkit.samples.processors import tokenizer_call

_Output = TypeVar("_Output")
_IMAGES_KEY = "winml_seen_images"
"""Key among the loop's arguments for image features computed before rows are repeated."""


def _resolve_cache(cache: GraphCache | None, past_key_values: GraphCache | None) -> GraphCache | None:
    """Return the cache passed under either of its names; None without a cache.

    Raises:
        UsageError: two different caches are passed.
    """
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise UsageError(
            "cache and past_key_values are two different caches: they are two names of one argument",
            hint="Pass the cache of the previous result once.",
        )
    return past_key_values if cache is None else cache


def _make_output(record: Callable[..., _Output], logits: torch.Tensor, cache: GraphCache | None) -> _Output:
    """Create an output record with logits and a cache, under the name used by the installed transformers.

    Args:
        record: Class of the record.
        logits: Logits of shape [batch, sequence, vocabulary].
        cache: Cache for the next call, or None.
    """
    return record(logits=logits, **{loop_cache_name(): cache})


def _refuse_tuple(return_dict: bool | None) -> None:
    """Refuse a request for a tuple instead of a record.

    Raises:
        UsageError: ``return_dict`` is False.
    """
    if return_dict is False:
        raise UsageError(
            "return_dict=False is not supported: the result is a record",
            hint="Omit it, and read the fields of the result.",
        )


class DecoderModel(GenerationMixin):
    """Adapter of a decoder graph, or of several graphs of one model, to transformers' generation loop.

    Attributes:
        graph: The decoder in its session.
        config: The model's config.
        generation_config: Default generation settings of a call.
    """

    main_input_name = "input_ids"
    device = torch.device("cpu")
    dtype = torch.float32
    _is_stateful = False
    graph: DecoderGraph
    config: Any
    generation_config: GenerationConfig
    tokenizer_folder: Path
    """Folder of the tokenizer, which is used to find stop strings."""

    def __init__(
        self,
        files: Mapping[str, str | os.PathLike[str]],
        *,
        ep: str | None = None,
        device: Literal["cpu", "gpu", "npu"] | None = None,
        ep_options: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        """Open the graphs of a model of several parts; config and tokenizer are in the folder of the decoder.

        Args:
            files: Part → ONNX file.
            ep: Execution provider to run on; None: the provider for the device.
            device: Kind of processor; None: the provider's default, or the CPU without a provider.
            ep_options: Options of the provider.
            threads: Number of threads per operator; None: the runtime's default.

        Raises:
            InputError: the files do not belong together, or no config is next to them.
            UsageError: the provider is unknown or not installed.
            StageError: ONNX Runtime cannot load a file.
        """
        paths = {part: Path(path) for part, path in files.items()}
        open_file = partial(choose_provider(ep, device, ep_options or {}).open, threads=threads)
        self._set_graph(open_decoder(paths, open_file), paths[DECODER].parent)

    @classmethod
    def of_graph(cls, graph: Any, folder: Path) -> Any:
        """Return the model of a graph that is open already.

        Raises:
            InputError: there is no config in the folder.
        """
        model = cls.__new__(cls)
        model._set_graph(graph, folder)
        return model

    @classmethod
    def can_generate(cls) -> bool:
        """Return True: the model generates text."""
        return True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # Read by transformers' loop: the first answer brings the cache along.
        return False

    @staticmethod
    def is_remote_code() -> bool:
        """Return False: the class does not come from a checkpoint."""
        return False

    @staticmethod
    def get_experts_implementation() -> dict[str, str]:
        """Return ``{}``: no transformers implementation of experts runs here."""
        return {}

    def prepare_inputs_for_generation(self, *arguments: Any, **kwargs: Any) -> dict[str, object]:
        """Prepare the inputs of a step, without the tokenizer that the loop passes along."""
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
        **extra: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of tokens.

        Args:
            input_ids: Integers of shape [batch, sequence]: the tokens after the cached tokens.
            attention_mask: Integers of shape [batch, cached + sequence], 0 for padding; None: no padding.
            position_ids: Integers of shape [batch, sequence]; None: continued from the cache.
            past_key_values: Name of ``cache`` before transformers 5.24.
            use_cache: If True, return a cache; None: if the graph has a cache.
            return_dict: Must not be False: the result is a record.
            cache: Cache of the previous output, changed in place; None: start a new text.
            **extra: Further inputs that a caller may pass as None.

        Returns:
            ``logits`` of shape [batch, sequence or 1, vocabulary], and the cache for the next call: ``cache``, or
            ``past_key_values`` before transformers 5.24.

        Raises:
            UsageError: an input is missing, unknown or of an unsupported shape; or the cache belongs to another model.
            StageError: ONNX Runtime fails.
        """
        self._refuse_inputs(input_ids, use_cache, return_dict, extra)
        keeps = self.graph.has_cache if use_cache is None else use_cache
        tokens = as_array(input_ids)
        mask = None if attention_mask is None else as_array(attention_mask)
        positions = None if position_ids is None else as_array(position_ids)
        cache = _resolve_cache(cache, past_key_values)
        if cache is None and self.graph.has_cache:
            cache = self.graph.empty_cache(len(tokens))
        logits = to_torch(self.graph.run(tokens, mask, positions, cache))
        return _make_output(CausalLMOutputWithPast, logits, cache if keeps else None)

    __call__ = forward

    def _set_graph(self, graph: Any, folder: Path) -> None:
        """Set the graph, and the configs from a folder.

        Raises:
            InputError: the folder has no config.
        """
        config = config_beside(folder / "model.onnx")
        if config is None:
            raise InputError(
                f"{folder}: the generation loop of transformers needs a config there",
                hint=f"Build the model again without {opt.no_tokenizer}.",
            )
        self.graph, self.config, self.tokenizer_folder = graph, config, folder
        self.generation_config = generation_config_beside(folder, config, has_cache=graph.has_cache)

    def _refuse_inputs(self, tokens: Any, use_cache: bool | None, return_dict: bool | None, extra: Any) -> None:
        """Refuse unknown or missing inputs, and options that the graph does not support.

        Raises:
            UsageError: names the input or the option.
        """
        unexpected = [name for name, value in extra.items() if value is not None]
        if tokens is None or unexpected:
            problem = f"unexpected input {unexpected[0]!r}" if unexpected else "missing input_ids"
            raise UsageError(
                f"{problem}: {self.graph.name} takes {', '.join(spec.name for spec in self.graph.inputs)}",
                hint="Pass input_ids, and attention_mask if rows are padded.",
            )
        _refuse_tuple(return_dict)
        if use_cache and not self.graph.has_cache:
            raise UsageError(
                f"use_cache=True, but {self.graph.name} has no KV cache",
                hint=f"Omit it, or build the model again without {opt.no_cache}.",
            )


class EncoderDecoderModel(DecoderModel):
    """Adapter of the two graphs of an encoder-decoder to transformers' generation loop.

    Attributes:
        graph: The graphs in their sessions.
        config: The model's config.
        generation_config: Default generation settings of a call.
    """

    graph: EncoderDecoder
    base_model_prefix = ""
    """Read by transformers' loop: the model has no inner base model."""

    def _set_graph(self, graph: EncoderDecoder, folder: Path) -> None:
        super()._set_graph(graph, folder)
        # For a decoder inside another model, the config of the whole model does not state it.
        self.config.is_encoder_decoder = True
        if (text := graph.text) is not None:
            self.generation_config.decoder_start_token_id = text.first
            self.generation_config.eos_token_id = list(text.ends) or self.generation_config.eos_token_id
        self.main_input_name = graph.encoder.inputs[0].name
        self.encoder = _LoopEncoder(graph.encoder)
        self._folder = files_folder(folder / "model.onnx")

    def generate(self, *inputs: object, **settings: Any) -> Any:
        """Generate texts with transformers' loop; see ``GenerationMixin.generate``.

        Args:
            *inputs: As in ``GenerationMixin.generate``.
            **settings: As in ``GenerationMixin.generate``; also ``language`` and ``task`` of a speech model. Without
                ``decoder_input_ids``, a text begins with the tokens of these, or of the language and task in the files.
                A recording longer than the encoder's input, ``return_timestamps`` and the like are handled by
                transformers' loop for such models.

        Raises:
            InputError: the model has no such language or task.
        """
        loop: Any = own_loop(self.config)
        if loop is not None and not isinstance(self, loop):
            return _combine_with_loop(loop, self).generate(*inputs, **settings)
        requested = {key: settings.pop(key, None) for key in ("language", "task")}
        if settings.get("decoder_input_ids") is None and (allowed := read_prompt(self._folder, **requested)):
            first_suppressed = tuple(getattr(self.generation_config, "begin_suppress_tokens", None) or ())
            processor = _PromptProcessor(allowed, first_suppressed)
            settings["logits_processor"] = LogitsProcessorList([*(settings.get("logits_processor") or ()), processor])
            self._raise_token_limit(settings, len(allowed))
        general_loop: Any = super()  # declared for models of torch
        return general_loop.generate(*inputs, **settings)

    def _raise_token_limit(self, settings: dict[str, Any], count: int) -> None:
        """Increase an explicit limit of new tokens: of a call, its config, or the model's config.

        transformers' loop for such a model does not count the forced first tokens as new; the general loop does.
        """
        call_config = settings.get("generation_config")
        requested = self.generation_config.max_new_tokens
        if call_config is not None and call_config.max_new_tokens is not None:
            requested = call_config.max_new_tokens
        requested = settings.get("max_new_tokens", requested)
        if requested is None:
            return
        positions = position_limit(self._folder)
        # The first token takes a position, too.
        longest = requested + count if positions is None else max(requested, min(requested + count, positions - 1))
        if call_config is None or "max_new_tokens" in settings:
            settings["max_new_tokens"] = longest
        else:
            settings["generation_config"] = call_config = copy.deepcopy(call_config)
            call_config.max_new_tokens = longest

    def get_encoder(self, *_modality: object) -> _LoopEncoder:
        """Return the encoder; transformers' loop calls it once."""
        return self.encoder

    def forward(  # type: ignore[override]  # an encoder-decoder's own names
        self,
        decoder_input_ids: Any = None,
        encoder_outputs: Any = None,
        attention_mask: object = None,
        past_key_values: GraphCache | None = None,
        use_cache: bool | None = None,
        cache: GraphCache | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Compute the logits of decoder tokens.

        Args:
            decoder_input_ids: Integers of shape [batch, sequence]: the tokens after the cached tokens.
            encoder_outputs: Outputs of :meth:`get_encoder`; None: ``kwargs`` are encoded now.
            attention_mask: Mask of the encoder's tokens, 0 for padding.
            past_key_values: Name of ``cache`` before transformers 5.24.
            use_cache: If True or None, return a cache.
            cache: Cache of the previous output, changed in place; None: start a new text.
            **kwargs: Inputs of the encoder.

        Returns:
            ``logits`` of shape [batch, sequence, vocabulary], and the cache for the next call: ``cache``, or
            ``past_key_values`` before transformers 5.24.

        Raises:
            UsageError: an input is missing, unknown or of an unsupported shape.
            StageError: ONNX Runtime fails.
        """
        if decoder_input_ids is None:
            raise UsageError("missing decoder_input_ids", hint="Pass the tokens of the decoder, or call generate().")
        encoder_inputs = {name: value for name, value in kwargs.items() if value is not None and name != "return_dict"}
        self._refuse_unknown_inputs(encoder_inputs, attention_mask, return_dict=kwargs.get("return_dict"))
        cache = _resolve_cache(cache, past_key_values)
        if cache is None:
            if encoder_outputs is None:
                encoder_outputs = self.get_encoder()(**encoder_inputs, attention_mask=attention_mask)
            encoded = {name: to_numpy(encoder_outputs[_field_name(name)]) for name in self.graph.encoded}
            cache = self.graph.empty_cache(len(decoder_input_ids), encoded)
        logits = to_torch(self.graph.run(as_array(decoder_input_ids), cache=cache))
        return _make_output(Seq2SeqLMOutput, logits, cache if use_cache is None or use_cache else None)

    def _refuse_unknown_inputs(self, inputs: Mapping[str, object], mask: Any, *, return_dict: bool | None) -> None:
        """Refuse inputs that the encoder does not take, and a mask that hides tokens.

        Raises:
            UsageError: names the input.
        """
        names = {spec.name for spec in self.graph.encoder.inputs}
        unknown = [name for name in inputs if name not in names]
        # transformers' loop passes a mask that hides no token to every model.
        if mask is not None and "attention_mask" not in names and not torch.as_tensor(mask).bool().all():
            unknown.append("attention_mask")
        if unknown:
            raise UsageError(
                f"unexpected input {unknown[0]!r}: the encoder takes {', '.join(sorted(names))}; the decoder "
                "takes decoder_input_ids",
                hint="Omit it: no decoder token is masked.",
            )
        _refuse_tuple(return_dict)

    __call__ = forward  # type: ignore[assignment]  # an encoder-decoder's own names


class _PromptProcessor(LogitsProcessor):
    """Logits processor that forces language and task tokens, and suppresses forbidden tokens after them."""

    def __init__(self, allowed: Mapping[int, tuple[int, ...]], first_suppressed: tuple[int, ...]) -> None:
        self._allowed, self._first_suppressed = allowed, list(first_suppressed)
        self._free = max(allowed) + 1

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Return the scores of one step."""
        masked: Any = scores.clone()
        allowed = self._allowed.get(input_ids.shape[1])
        if allowed is not None:
            masked.fill_(-torch.inf)
            # A single allowed token stays allowed even if it is suppressed otherwise.
            masked[:, list(allowed)] = 0.0 if len(allowed) == 1 else scores[:, list(allowed)]
        elif input_ids.shape[1] == self._free:
            masked[:, self._first_suppressed] = -torch.inf
        return masked


class _LoopEncoder:
    """The encoder as called by transformers' loop; its signature names the inputs of the graph."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.main_input_name = encoder.inputs[0].name
        kind = inspect.Parameter.KEYWORD_ONLY
        names = [inspect.Parameter(spec.name, kind, default=None) for spec in encoder.inputs]

        def forward(**inputs: Any) -> ModelOutput:
            return self(**inputs)

        forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]  # what inspect reads
        self.forward = forward

    def __call__(self, **inputs: object) -> ModelOutput:
        """Encode the inputs that the graph takes, and ignore all others; every output has one entry per row."""
        names = {spec.name for spec in self._encoder.inputs}
        arrays = {key: as_array(value) for key, value in inputs.items() if key in names and value is not None}
        encoded = self._encoder.encode(arrays)
        fields: Mapping[str, Any] = {_field_name(name): to_torch(value) for name, value in encoded.items()}
        return ModelOutput(fields)  # type: ignore[no-untyped-call]


def _field_name(name: str) -> str:
    """Return the attribute name of an output, whose name may contain dots."""
    return name.replace(".", "_")


def own_loop(config: object) -> type | None:
    """Return transformers' class with a special generation loop for a speech model, or None."""
    model_class = _speech_model_class(config)
    return next((base for base in model_class.__mro__ if _is_loop(base)), None) if model_class is not None else None


def _combine_with_loop(loop: type, model: Any) -> Any:
    """Combine the special loop of a model class with a model that generates the text of each segment.

    Args:
        loop: See :func:`own_loop`.
        model: The model that generates the segments.
    """
    model_class: Any = _speech_model_class(model.config)

    class Pieces(type(model)):  # type: ignore[misc]  # of a class that is known here only
        """Writes one piece."""

        def generate(self, *inputs: object, **settings: Any) -> Any:
            """Generate one segment with the general loop, without its cache."""
            if settings.get("output_attentions") or settings.get("return_token_timestamps"):
                raise UsageError(
                    "token-level timestamps require attentions, which the graphs do not return",
                    hint="Use return_timestamps=True for timestamps of segments.",
                )
            if "attention_mask" not in {spec.name for spec in self.graph.encoder.inputs}:
                # The mask gives the length of each recording, which is read before.
                settings.pop("attention_mask", None)
            mask = settings.pop("decoder_attention_mask", None)
            if mask is not None and not torch.as_tensor(mask).bool().all():
                raise UsageError(
                    "the previous tokens of the segments have different lengths, but the decoder takes no mask "
                    "for them",
                    hint="Pass one audio file at a time, or omit condition_on_prev_tokens.",
                )
            output = super().generate(*inputs, **settings)
            if not isinstance(output, ModelOutput):
                return output
            # A loop that calls the general one would take the cache to pieces.
            return type(output)(**{name: value for name, value in output.items() if name not in CACHE_ARGUMENTS})

    looping: Any = type(f"{loop.__name__}OfGraphs", (loop, Pieces), {})
    created = looping.__new__(looping)
    vars(created).update(vars(model))
    with torch.device("meta"):
        # The loop reads how many frames become one state.
        created.model = model_class(model.config).model
    return created


def _speech_model_class(config: Any) -> Any:
    """Return transformers' speech recognition class for a config, or None."""
    from transformers import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    return MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING.get(type(config), None)


def _is_loop(base: type) -> bool:
    """Return True if a class defines ``generate`` and is no model."""
    is_model = issubclass(base, (PreTrainedModel, torch.nn.Module))
    return (
        issubclass(base, GenerationMixin) and base is not GenerationMixin and not is_model and "generate" in vars(base)
    )


class VisionLanguageModel(DecoderModel):
    """Adapter of the three graphs of a vision-language model to transformers' generation loop.

    Attributes:
        graph: The graphs in their sessions.
        config: The model's config.
        generation_config: Default generation settings of a call.
    """

    graph: VisionLanguageDecoder

    @property
    def _extra_argument_names(self) -> tuple[str, ...]:
        """Names of the arguments that a call may pass besides tokens."""
        kinds = (TOKEN_TYPES,) if self.graph.takes_kinds else ()
        by_image = (KINDS_PARAMETER,) if self.graph.position_rows is not None else ()
        return (*(spec.name for spec in self.graph.embedder.image_inputs), PIXEL_MASK, *kinds, *by_image)

    @cached_property
    def _positions(self) -> ImagePositions:
        """Calculator of token positions, of the model's own class."""
        return ImagePositions(self.config, self.graph.position_rows or 1)

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: Mapping[str, Any]) -> Any:
        # Called by transformers' loop: for text alone, the general positions; with images, those of the model.
        if self.graph.position_rows is None:
            loop: Any = super()  # declared for models of torch
            return loop._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        return self._positions.of_prompt(model_kwargs.get("input_ids", inputs_tensor), model_kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, object]) -> None:
        # Called by transformers' loop, which knows the names in a signature only.
        names = {*self._extra_argument_names, "labels", TOKEN_TYPES}
        model_kwargs.pop("labels", None)  # outputs of processors for training; no forward takes them
        general = {name: value for name, value in model_kwargs.items() if name not in names}
        loop: Any = super()  # declared for models of torch
        loop._validate_model_kwargs(general)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> Any:
        # Called by transformers' loop, which repeats the rows of every tensor for beams: patches are no rows.
        loop: Any = super()  # declared for models of torch
        specs = self.graph.embedder.image_inputs
        pixels = {spec.name: model_kwargs[spec.name] for spec in specs if model_kwargs.get(spec.name) is not None}
        if expand_size > 1 and pixels and any(spec.grid is not None for spec in specs):
            encoded = self.graph.embedder.encode_images({name: to_numpy(value) for name, value in pixels.items()})
            counts = [self.graph.embedder.count_places(to_numpy(row)) for row in input_ids]
            # An array: the loop repeats tensors.
            model_kwargs = {name: value for name, value in model_kwargs.items() if name not in pixels}
            model_kwargs[_IMAGES_KEY] = {
                name: _repeat_rows(value, counts, expand_size) for name, value in encoded.items()
            }
        return loop._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: object = None,
        past_key_values: GraphCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: GraphCache | None = None,
        **images: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of tokens; see :meth:`DecoderModel.forward`.

        Args:
            input_ids: Integers of shape [batch, sequence]; image placeholders are allowed.
            attention_mask: See :meth:`DecoderModel.forward`.
            position_ids: See :meth:`DecoderModel.forward`; rows of positions for a decoder with several per token.
                None: computed as by the model from text and images.
            past_key_values: See :meth:`DecoderModel.forward`.
            use_cache: See :meth:`DecoderModel.forward`.
            return_dict: See :meth:`DecoderModel.forward`.
            cache: See :meth:`DecoderModel.forward`.
            **images: Inputs of the vision encoder, such as ``pixel_values``; with a cache, of the images whose
                placeholders are in these tokens. Ignored without placeholders. Also ``token_type_ids``, if the decoder
                takes token types.

        Raises:
            UsageError: an input is missing, unknown or of an unsupported shape.
            StageError: ONNX Runtime fails.
        """
        cache = _resolve_cache(cache, past_key_values)
        names = self._extra_argument_names
        if self.graph.position_rows is not None and position_ids is None and input_ids is not None:
            beside = {"attention_mask": attention_mask, loop_cache_name(): cache, **images}
            position_ids = self._positions.of_prompt(torch.as_tensor(input_ids), beside)
            position_ids = position_ids[..., -len(input_ids[0]) :]
        images.pop(KINDS_PARAMETER, None)
        if not self.graph.takes_kinds:
            images.pop(TOKEN_TYPES, None)  # the embeddings mark the tokens of images
        seen_before = images.pop(_IMAGES_KEY, None)
        image_arrays = {name: to_numpy(images.pop(name)) for name in names if images.get(name) is not None}
        if seen_before is not None:
            image_arrays = {name: array for name, array in image_arrays.items() if name == TOKEN_TYPES}
        if cache is None and input_ids is not None:
            cache = self.graph.start(image_arrays, len(input_ids))
            cache.encoded |= seen_before or {}
        elif image_arrays.keys() - {TOKEN_TYPES} and self.graph.embedder.count_places(input_ids) and cache is not None:
            cache.encoded = self.graph.encode(image_arrays)
        extra = {name: value for name, value in images.items() if name not in names}
        return super().forward(input_ids, attention_mask, position_ids, None, use_cache, return_dict, cache, **extra)

    __call__ = forward


def model_of_graph(graph: DecoderGraph, folder: Path) -> Any:
    """Return the model that transformers' loop runs, made of an open graph and the configs in a folder."""
    if isinstance(graph, VisionLanguageDecoder):
        return VisionLanguageModel.of_graph(graph, folder)
    return (EncoderDecoderModel if isinstance(graph, EncoderDecoder) else DecoderModel).of_graph(graph, folder)


def _repeat_rows(vectors: Any, counts: Sequence[int], times: int) -> Any:
    """Repeat the vectors of each row.

    Args:
        vectors: Vectors of all rows, concatenated.
        counts: Number of vectors per row.
        times: Number of repetitions.
    """
    pieces = np.split(vectors, np.cumsum(counts)[:-1])
    return np.concatenate([piece for piece in pieces for _ in range(times)])


class ImagePositions:
    """Computes the positions of tokens with the model class of a config."""

    def __init__(self, config: Any, rows: int) -> None:
        """Build the model, without its weights.

        Args:
            config: Config of the model.
            rows: Number of positions per token.
        """
        from transformers import AutoModelForImageTextToText

        make: Any = AutoModelForImageTextToText
        failure = "the model of config.json cannot be built"
        with local_files_only(), foreign_parser(failure, hint="Correct or replace it."), torch.device("meta"):
            self._model = make.from_config(config)
        self._rows = rows

    def of_prompt(self, tokens: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return the positions of tokens, and store the offset of later positions from their index.

        Args:
            tokens: Tokens of shape [batch, sequence].
            arguments: Further arguments of ``generate()``, such as image grids and token types.

        Returns:
            Integers of shape [rows, batch, sequence].

        Raises:
            UsageError: image grids are passed without the types of the tokens.
        """
        grids = [name for name in arguments if name.endswith("grid_thw") and arguments[name] is not None]
        if grids and arguments.get(KINDS_PARAMETER) is None:
            raise UsageError(
                f"{grids[0]} requires {KINDS_PARAMETER}, which marks the image tokens",
                hint="Pass all outputs of the model's processor for the text and the images.",
            )
        positions = self._model._prepare_position_ids_for_generation(tokens, dict(arguments))
        several: torch.Tensor = positions[-self._rows :].expand(self._rows, *tokens.shape[:1], -1)
        return several


def generation_config_beside(folder: Path, config: PretrainedConfig, *, has_cache: bool) -> GenerationConfig:
    """Read the generation settings from the files in a folder.

    Args:
        folder: The folder.
        config: The model's config, used without a ``generation_config.json``.
        has_cache: True if the graph has a cache.

    Raises:
        InputError: a file is damaged, or transformers refuses its values.
        UsageError: an unsupported decoding strategy is requested.
    """
    path = folder / GENERATION_CONFIG_NAME
    values = {key: value for key, value in read_generation_config(folder).items() if key not in SPEED_ONLY}
    with foreign_parser(f"{path}: transformers rejects it", hint="Correct it in this file."):
        result = GenerationConfig.from_dict(values) if path.is_file() else GenerationConfig.from_model_config(config)
    result.use_cache = has_cache
    return result


def generation_call(model: DecoderModel, **arguments: Any) -> Any:
    """Call ``generate()``, with the tokenizer if a stop string is set.

    Raises:
        InputError: transformers refuses the settings beside the model, or the tokenizer cannot be read.
        WinMLError: a run of a graph fails.
    """
    folder = model.tokenizer_folder
    if "max_new_tokens" in arguments:
        model.generation_config.max_length = None  # transformers warns if both are set
    ends_by_strings = (arguments.get("stop_strings") or model.generation_config.stop_strings) is not None
    if ends_by_strings:
        arguments["tokenizer"] = open_tokenizer(folder)
    try:
        with tokenizer_call(folder) if ends_by_strings else contextlib.nullcontext():
            return model.generate(**arguments)
    except (ValueError, TypeError) as error:  # its message for incompatible settings
        if _comes_from_graph(error):
            raise
        raise InputError(
            f"{folder / GENERATION_CONFIG_NAME}: the generation loop of transformers rejects it: {first_line(error)}",
            hint="Correct or remove this key.",
        ) from error


def _comes_from_graph(error: Exception) -> bool:
    """Return True if an error comes from a run of a graph or from this package: then no setting is wrong."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = __name__.partition(".")[0]
    ours = [frame for frame in frames if str(frame.f_globals.get("__name__")).partition(".")[0] == package]
    return frames[-1] in ours or any(frame.f_code.co_name == "forward" for frame in ours)


def loop_arguments(settings: GenerationSettings) -> dict[str, Any]:
    """Return the arguments of ``generate()`` for settings that a user can change."""
    loop_options = settings.for_transformers or {}
    return {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": settings.is_sampled,
        "repetition_penalty": settings.repetition_penalty,
        "num_beams": loop_options.get("num_beams", 1),
        **({"stop_strings": loop_options["stop_strings"]} if "stop_strings" in loop_options else {}),
        **settings.drawn,
    }


def generate_with_loop(
    model: Any, inputs: Mapping[str, torch.Tensor], prompt_count: int, settings: GenerationSettings
) -> Iterator[GeneratedToken]:
    """Yield the tokens chosen by transformers' loop; with beams, all of them at the end.

    Args:
        model: The model that the loop runs.
        inputs: Inputs of one row, by argument of ``generate()``.
        prompt_count: Number of prompt tokens at the start of the output; 0: a loop of the model type removes them, and
            returns all tokens at the end.
        settings: Generation settings, in addition to the configs.

    Raises:
        WinMLError: a run of a graph fails.
    """
    set_seed(settings.seed)
    generate = partial(generation_call, model, **inputs, **loop_arguments(settings))
    before = time.perf_counter()
    streams = prompt_count > 0 and settings.is_stepwise
    for token in _stream_tokens(generate) if streams else generate()[0, prompt_count:].tolist():
        now = time.perf_counter()
        yield GeneratedToken(token, now - before, "eos" if token in settings.eos_token_ids else "")
        before = now


def _stream_tokens(generate: Callable[..., Any]) -> Iterator[int]:
    """Yield the tokens of a call of ``generate()`` as they are chosen, in a thread that ends with the iterator.

    An iterator that is closed ends the call at its next token.

    Raises:
        BaseException: an error of the call.
    """
    streamer = _Streamer()
    # A thread that runs code of torch while Python exits would abort the process.
    with ThreadPoolExecutor(1) as thread:
        end = thread.submit(copy_context().run, partial(generate, streamer=streamer))
        end.add_done_callback(lambda _: streamer.tokens.put(None))
        try:
            yield from iter(streamer.tokens.get, None)
        finally:
            streamer.is_closed = True
    end.result()


class _Streamer(BaseStreamer):
    """Hands each token to another thread."""

    def __init__(self) -> None:
        self.tokens: queue.Queue[int | None] = queue.Queue()
        self.is_closed = False
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Receive the prompt, then token after token."""
        if self.is_closed:
            raise GeneratorExit
        if not self._is_prompt:
            self.tokens.put(int(value))
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: the end is signalled when ``generate`` returns."""
