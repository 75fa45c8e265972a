"""How is a model loaded? Each option is declared here, once.

The options of the command, the ``loader`` section of a build config, the keywords of the Python functions and the
request in a manifest are made from these declarations: a new option needs a field here, and the code that obeys it.
Standard library only, because the help of a verb is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from winml.modelkit.fields import Field, fields_of

__all__ = ["LoadOptions", "declared_options", "is_not_default"]

Dtype = Literal["fp32", "fp16", "bf16"]
Logits = Literal["all", "last"]
Group = Literal["source", "random", "weights"]
"""Options that a verb offers together: where the model comes from, what is drawn at random, how weights are kept."""

LARGEST_PROMPT = 2**20
"""Chosen: more than any model has positions."""
LARGEST_SEED = 2**63 - 1
"""Specified: what torch.manual_seed takes."""


def _declared(help: str, group: Group, **limits: object) -> dict[str, object]:
    return {"help": help, "group": group, **limits}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded, apart from which model it is and what its inputs are."""

    task: str | None = field(
        default=None,
        metadata=_declared(
            "What the model is for, such as feature-extraction; else decided from its config.", "source", short="-t"
        ),
    )
    model_class: str | None = field(
        default=None,
        metadata=_declared(
            "Class to load it with, such as BertForMaskedLM; decides the task where none is given.", "source"
        ),
    )
    revision: str | None = field(default=None, metadata=_declared("Branch, tag or commit of a Hub id.", "source"))
    trust_remote_code: bool = field(
        default=False, metadata=_declared("Allow code that comes with the checkpoint to run.", "source")
    )
    cache: bool = field(
        default=True,
        metadata=_declared("Give a model that generates text its cache as inputs and outputs.", "source"),
    )
    logits: Logits | None = field(
        default=None,
        metadata=_declared(
            "Return scores for all tokens of a run, or for the last one only; all unless asked otherwise.", "source"
        ),
    )
    prompt_length: int | None = field(
        default=None,
        metadata=_declared(
            "Of a decoder of fixed sizes, as a provider such as qnn needs it: also make a graph that reads a prompt so "
            "many tokens at a time.",
            "source",
            minimum=2,
            maximum=LARGEST_PROMPT,
        ),
    )
    submodel: tuple[str, ...] = field(
        default=(),
        metadata=_declared(
            "Only this part of a model of several, such as decoder; repeatable.", "source", metavar="PART"
        ),
    )
    adapter: tuple[str, ...] = field(
        default=(),
        metadata=_declared(
            "Folder of a LoRA adapter as peft saves it, to merge into the weights; as NAME=PATH it is switched at run "
            "time instead. Repeatable.",
            "source",
            metavar="[NAME=]PATH",
        ),
    )
    random_weights: bool = field(
        default=False, metadata=_declared("Build from the config alone, with seeded random weights.", "random")
    )
    seed: int = field(
        default=0,
        metadata=_declared(
            "Seed of random weights and inputs.", "random", minimum=0, maximum=LARGEST_SEED, is_for_onnx=True
        ),
    )
    dtype: Dtype | None = field(
        default=None,
        metadata=_declared(
            "Cast floating point weights to this type; else they stay as the checkpoint has them.", "weights"
        ),
    )


def declared_options() -> tuple[Field, ...]:
    """Return every option of loading, in the order in which they are declared."""
    return fields_of(LoadOptions)


def is_not_default(name: str, value: object) -> bool:
    """Say whether the value of an option, of loading or of a verb, is not what it has where nobody gives one."""
    default = next((option.default for option in declared_options() if option.name == name), None)
    return value not in (None, False, ()) if default is not True else value is False
