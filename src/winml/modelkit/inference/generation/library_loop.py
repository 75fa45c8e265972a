"""Lets a generation loop that transformers has for one kind of model drive our graphs.

Such a loop cuts long recordings into pieces, each of which it lets the general loop write, and reads the times in what
was written. Which models have one is said by transformers' classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.generic import ModelOutput

from winml.modelkit.errors import UsageError

__all__ = ["asks_own_loop", "looping_model", "own_loop"]

_CACHES = ("past_key_values",)
"""Of an answer of the general loop: what a loop that calls it would take to pieces."""
_KNOWN = frozenset({"language", "task", "attention_mask", "temperature", "kwargs", "self"})
"""Arguments of such a loop that the general one is given here as well."""


def own_loop(config: object) -> type | None:
    """Return transformers' class with the generation loop of a model that writes what it hears; None: it has none."""
    model_class = _model_class(config)
    return next((base for base in model_class.__mro__ if _is_loop(base)), None) if model_class is not None else None


def asks_own_loop(loop: type, settings: Mapping[str, object], frames: int | None, most: int | None) -> bool:
    """Say whether a call of ``generate()`` needs a loop of its own.

    Args:
        loop: See :func:`own_loop`.
        settings: Arguments of the call.
        frames: Length of the recording; None: it is not given.
        most: Frames that the encoder takes; None: any number.
    """
    own = {*inspect.signature(loop.generate).parameters} - {*inspect.signature(GenerationMixin.generate).parameters}  # type: ignore[attr-defined]
    named = {name for name, value in settings.items() if value is not None} & (own - _KNOWN)
    is_long = frames is not None and most is not None and frames > most
    return is_long or bool(named - {"input_features"}) or isinstance(settings.get("temperature"), (list, tuple))


def looping_model(loop: type, model: Any) -> Any:
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
                    "times of single tokens are asked for, and the graphs give no attentions",
                    hint="Ask for return_timestamps, which are those of segments.",
                )
            if "attention_mask" not in {item.name for item in self.graphs.inputs}:
                # It tells how long each recording is, which is read before.
                settings.pop("attention_mask", None)
            displayed = settings.pop("decoder_attention_mask", None)
            if displayed is not None and not torch.as_tensor(displayed).bool().all():
                raise UsageError(
                    "the tokens before a piece are of several lengths, and the decoder takes no mask over them",
                    hint="Give one recording at a time, or leave out condition_on_prev_tokens.",
                )
            output = super().generate(*inputs, **settings)
            if not isinstance(output, ModelOutput):
                return output
            return type(output)(**{name: value for name, value in output.items() if name not in _CACHES})

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
