"""Drives an encoder and a decoder by the generation loop of transformers.

The loop encodes once and hands what came of it to every step; rows that beams need more of are repeated by it.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils.generic import ModelOutput

from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import files_folder
from winml.modelkit.generate.generation.causal_lm import (
    DecoderModel,
    open_sessions,
    passed_cache,
    refuse_tuple,
    with_cache,
)
from winml.modelkit.generate.generation.decoder_prompt import read_prompt
from winml.modelkit.generate.generation.settings import position_limit
from winml.modelkit.models.caches.layout import CACHE_ARGUMENTS
from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.ort.decoding.decoder import GraphCache
from winml.modelkit.ort.decoding.encoder_decoder import EncoderDecoder


class EncoderDecoderModel(DecoderModel):
    """What transformers' loop asks of an encoder-decoder, answered by two graphs.

    Attributes:
        graphs: The graphs in their sessions.
        config: The model's config.
        generation_config: What decides how it generates where a call says nothing.
    """

    def __init__(self, encoder: str | os.PathLike[str], decoder: str | os.PathLike[str], **options: Any) -> None:
        """Open both graphs; config and tokenizer are in the folder of the decoder.

        Args:
            encoder: ONNX file of the encoder.
            decoder: ONNX file of the decoder.
            **options: Where they run; see :func:`~winml.modelkit.generate.generation.causal_lm.open_sessions`.

        Raises:
            InputError: the files do not belong together, or there is no config beside them.
            UsageError: the provider is unknown or not installed.
            StageError: ONNX Runtime cannot load a file.
        """
        self._take_graphs(EncoderDecoder(*open_sessions((encoder, decoder), **options)), Path(decoder).parent)

    base_model_prefix = ""
    """Read by transformers' loop: the model has no other inside."""

    @classmethod
    def of_graphs(cls, graphs: EncoderDecoder, folder: Path) -> EncoderDecoderModel:
        """Return the model of graphs that are open already.

        Raises:
            InputError: there is no config in the folder.
        """
        model = cls.__new__(cls)
        model._take_graphs(graphs, folder)
        return model

    def _take_graphs(self, graphs: EncoderDecoder, folder: Path) -> None:
        self._take_graph(graphs.decoder, folder)
        self.graphs = graphs
        # Of a decoder inside another model, the config of the whole does not say it.
        self.config.is_encoder_decoder = True
        if (text := graphs.text) is not None:
            self.generation_config.decoder_start_token_id = text.first
            self.generation_config.eos_token_id = list(text.ends) or self.generation_config.eos_token_id
        self.main_input_name = graphs.inputs[0].name
        self.encoder = _Encoder(graphs)
        self._folder = files_folder(folder / "model.onnx")

    def generate(self, *inputs: object, **settings: Any) -> Any:
        """Let transformers' loop write texts; see ``GenerationMixin.generate``.

        Args:
            *inputs: As there.
            **settings: As there; besides them ``language`` and ``task`` of a model that writes what it hears. Without
                ``decoder_input_ids``, a text begins with the tokens of these, or of those that the files name. A longer
                recording than the encoder takes, ``return_timestamps`` and the like are left to the loop that
                transformers has for such a model.

        Raises:
            InputError: the model has no such language or task.
        """
        loop: Any = own_loop(self.config)
        if loop is not None and not isinstance(self, loop):
            return _looping_model(loop, self).generate(*inputs, **settings)
        requested = {key: settings.pop(key, None) for key in ("language", "task")}
        if settings.get("decoder_input_ids") is None and (allowed := read_prompt(self._folder, **requested)):
            first = tuple(getattr(self.generation_config, "begin_suppress_tokens", None) or ())
            own = _PromptProcessor(allowed, first)
            settings["logits_processor"] = LogitsProcessorList([*(settings.get("logits_processor") or ()), own])
            self._lengthen(settings, len(allowed))
        general_loop: Any = super()  # declared for models of torch
        return general_loop.generate(*inputs, **settings)

    def _lengthen(self, settings: dict[str, Any], count: int) -> None:
        """Allow more new tokens where their number is given: in a call, its config, or that of the model.

        transformers' loop for such a model counts the tokens of the beginning as given, and this one as new.
        """
        passed = settings.get("generation_config")
        requested = self.generation_config.max_new_tokens
        if passed is not None and passed.max_new_tokens is not None:
            requested = passed.max_new_tokens
        requested = settings.get("max_new_tokens", requested)
        if requested is None:
            return
        positions = position_limit(self._folder)
        # The first token stands at a position, too.
        longest = requested + count if positions is None else max(requested, min(requested + count, positions - 1))
        if passed is None or "max_new_tokens" in settings:
            settings["max_new_tokens"] = longest
        else:
            settings["generation_config"] = passed = copy.deepcopy(passed)
            passed.max_new_tokens = longest

    def get_encoder(self, *_modality: object) -> _Encoder:
        """Return what encodes; transformers' loop calls it once."""
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
        """Answer tokens of the decoder.

        Args:
            decoder_input_ids: Integers of shape [batch, sequence]: those after what ``cache`` stands for.
            encoder_outputs: What :meth:`get_encoder` answered; None: ``kwargs`` are encoded now.
            attention_mask: Of the encoder's tokens, 0 for padding.
            past_key_values: ``cache`` by its name before transformers 5.24.
            use_cache: Whether the answer brings a cache along; None: it does.
            cache: That of the answer before, which this one changes in place; None: a new text begins.
            **kwargs: Inputs of the encoder.

        Returns:
            ``logits`` of shape [batch, sequence, vocabulary], and the cache for the next call: ``cache``, or
            ``past_key_values`` before transformers 5.24.

        Raises:
            UsageError: an input is missing, unknown or of a shape the graphs do not take.
            StageError: ONNX Runtime fails.
        """
        if decoder_input_ids is None:
            raise UsageError("missing decoder_input_ids", hint="Pass the tokens of the decoder, or call generate().")
        passed = {name: value for name, value in kwargs.items() if value is not None and name != "return_dict"}
        self._refuse_unknown(passed, attention_mask, return_dict=kwargs.get("return_dict"))
        cache = passed_cache(cache, past_key_values)
        if cache is None:
            if encoder_outputs is None:
                encoder_outputs = self.get_encoder()(**passed, attention_mask=attention_mask)
            encoded = {name: to_numpy(encoder_outputs[_field(name)]) for name in self.graph.encoded}
            cache = self.graph.empty_cache(len(decoder_input_ids), encoded)
        logits = to_torch(self.graph.run(to_numpy(torch.as_tensor(decoder_input_ids)), cache=cache))
        return with_cache(Seq2SeqLMOutput, logits, cache if use_cache is None or use_cache else None)

    def _refuse_unknown(self, passed: Mapping[str, object], mask: Any, *, return_dict: bool | None) -> None:
        names = {item.name for item in self.graphs.inputs}
        unknown = [name for name in passed if name not in names]
        # transformers' loop gives a mask that hides nothing to every model.
        if mask is not None and "attention_mask" not in names and not torch.as_tensor(mask).bool().all():
            unknown.append("attention_mask")
        if unknown:
            raise UsageError(
                f"unexpected input {unknown[0]!r}: the encoder takes {', '.join(sorted(names))}; the decoder "
                "takes decoder_input_ids",
                hint="Omit it: no decoder token is masked.",
            )
        refuse_tuple(return_dict)

    __call__ = forward  # type: ignore[assignment]  # an encoder-decoder's own names


class _PromptProcessor(LogitsProcessor):
    """Leaves only the tokens of language and task at their places, and no others that must not follow them."""

    def __init__(self, allowed: Mapping[int, tuple[int, ...]], first_suppressed: tuple[int, ...]) -> None:
        self._allowed, self._first_suppressed = allowed, list(first_suppressed)
        self._free = max(allowed) + 1

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Return the scores of one step."""
        retained: Any = scores.clone()
        allowed = self._allowed.get(input_ids.shape[1])
        if allowed is not None:
            retained.fill_(-torch.inf)
            # A token alone stands there even where it is suppressed otherwise.
            retained[:, list(allowed)] = 0.0 if len(allowed) == 1 else scores[:, list(allowed)]
        elif input_ids.shape[1] == self._free:
            retained[:, self._first_suppressed] = -torch.inf
        return retained


class _Encoder:
    """The encoder as transformers' loop calls it; its signature names the inputs of the graph."""

    def __init__(self, graphs: EncoderDecoder) -> None:
        self._graphs = graphs
        self.main_input_name = graphs.inputs[0].name
        kind = inspect.Parameter.KEYWORD_ONLY
        names = [inspect.Parameter(item.name, kind, default=None) for item in graphs.inputs]

        def forward(**passed: Any) -> ModelOutput:
            return self(**passed)

        forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]  # what inspect reads
        self.forward = forward

    def __call__(self, **passed: object) -> ModelOutput:
        """Encode; every tensor of the answer has one entry for each row."""
        names = {item.name for item in self._graphs.inputs}
        arrays = {
            key: to_numpy(torch.as_tensor(value)) for key, value in passed.items() if key in names and value is not None
        }
        encoded = self._graphs.encode(arrays)
        fields: Mapping[str, Any] = {_field(name): to_torch(value) for name, value in encoded.items()}
        return ModelOutput(fields)  # type: ignore[no-untyped-call]


def _field(name: str) -> str:
    return name.replace(".", "_")


def own_loop(config: object) -> type | None:
    """Return transformers' class with the generation loop of a model that writes what it hears; None: it has none."""
    model_class = _model_class(config)
    return next((base for base in model_class.__mro__ if _is_loop(base)), None) if model_class is not None else None


def _looping_model(loop: type, model: Any) -> Any:
    """Return a model whose ``generate()`` is a loop of transformers, and whose pieces another model writes.

    Args:
        loop: See :func:`own_loop`.
        model: Writes the pieces.
    """
    model_class: Any = _model_class(model.config)

    class Pieces(type(model)):  # type: ignore[misc]  # of a class that is known here only
        """Writes one piece."""

        def generate(self, *inputs: object, **settings: Any) -> Any:
            """Let the general loop write a piece; what it keeps is not handed on."""
            if settings.get("output_attentions") or settings.get("return_token_timestamps"):
                raise UsageError(
                    "token-level timestamps require attentions, which the graphs do not return",
                    hint="Use return_timestamps=True for timestamps of segments.",
                )
            if "attention_mask" not in {item.name for item in self.graphs.inputs}:
                # It tells how long each recording is, which is read before.
                settings.pop("attention_mask", None)
            displayed = settings.pop("decoder_attention_mask", None)
            if displayed is not None and not torch.as_tensor(displayed).bool().all():
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


def _model_class(config: Any) -> Any:
    from transformers import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    return MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING.get(type(config), None)


def _is_loop(base: type) -> bool:
    is_model = issubclass(base, (PreTrainedModel, torch.nn.Module))
    return (
        issubclass(base, GenerationMixin) and base is not GenerationMixin and not is_model and "generate" in vars(base)
    )
