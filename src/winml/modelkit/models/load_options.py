"""Options of loading, declared once.

The options of the command, the ``loader`` section of a build config, the keywords of the Python functions and the
request in a manifest are made from these declarations: a new option needs a field here, and code that reads the field.
Standard library only, because the help of a command is made from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.fields import ADVANCED, GENERATION, MODEL, SIZES, Field, declare, fields_of

Dtype = Literal["fp32", "fp16", "bf16"]
DTYPE_NAMES: Mapping[str, Dtype] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Type of torch and numpy → its name in options."""
Logits = Literal["all", "last"]
Group = Literal["source", "export", "random", "weights"]
"""Options offered together by a command: source, export, random values, type of the weights."""

_LARGEST_PROMPT = 2**20
"""Chosen: more than any model has positions."""
LARGEST_SEED = 2**63 - 1
"""Specified: the largest seed of torch.manual_seed."""


def _read_lengths(texts: tuple[str, ...]) -> tuple[int, ...]:
    """Parse comma-separated lengths of prompt graphs.

    Raises:
        UsageError: a length is no number, or outside of its range.
    """
    words = [word.strip() for text in texts for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or not 2 <= int(word) <= _LARGEST_PROMPT:
            raise UsageError(
                f"{opt.prompt_length} {word or repr(word)}: expected a number of tokens from 2 to {_LARGEST_PROMPT}",
                hint="Separate several numbers by commas, such as 16,64.",
            )
    return tuple(map(int, words))


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of loading, without the model and its inputs."""

    task: str | None = declare(
        None, MODEL, offered_with="source", short="-t", metavar="TASK", default_words="from the model", is_common=True
    )
    """Task of the model, such as text-classification."""
    model_class: str | None = declare(None, MODEL, offered_with="source", metavar="CLASS", default_words="by the task")
    """Class to load, such as BertForMaskedLM. Without `--task`, it determines the task."""
    revision: str | None = declare(None, MODEL, offered_with="source", default_words="main")
    """Branch, tag or commit on the Hub."""
    trust_remote_code: bool = declare(False, MODEL, offered_with="source")
    """Allow Python code from the checkpoint to run."""
    cache: bool = declare(True, GENERATION, offered_with="export")
    """Export a generative model with its KV cache as inputs and outputs."""
    logits: Logits | None = declare(None, GENERATION, offered_with="export", default_words="all")
    """Output the logits of all tokens, or of the last token only."""
    prompt_length: int | tuple[int, ...] | None = declare(
        None,
        GENERATION,
        offered_with="export",
        minimum=2,
        maximum=_LARGEST_PROMPT,
        metavar="N[,N]",
        is_repeatable=True,
        read=_read_lengths,
    )
    """Also write a prompt graph that reads N tokens per run, or one graph for each of several numbers, such as 16,64.
    For decoders with fixed sizes, which execution providers such as qnn require."""
    submodel: tuple[str, ...] = declare((), MODEL, offered_with="export", metavar="PART")
    """Part of a model with several parts, such as decoder."""
    adapter: tuple[str, ...] = declare((), MODEL, offered_with="source", metavar="[NAME=]PATH")
    """Folder of a LoRA adapter (PEFT format), which is merged into the weights. With NAME=PATH it remains separate and
    is selected at run time."""
    random_weights: bool = declare(False, ADVANCED, offered_with="random")
    """Initialize the weights at random from the config; no weights are loaded."""
    seed: int = declare(0, ADVANCED, offered_with="random", minimum=0, maximum=LARGEST_SEED, is_for_onnx=True)
    """Seed of random weights and inputs."""
    dtype: Dtype | None = declare(None, MODEL, offered_with="weights", default_words="as in the checkpoint")
    """Convert floating-point weights to this type."""


@dataclass(frozen=True, kw_only=True)
class InputFields:
    """The inputs of a model, as stated for a command."""

    shape_config: str | None = declare(None, SIZES, metavar="JSON", is_common=True)
    """Sizes by name, such as sequence_length=64, or JSON. The JSON is text or a file. A name instead of a number makes
    the dimension dynamic."""
    batch_size: int | None = declare(None, SIZES, minimum=1, default_words="1")
    """Batch size."""
    input_specs: str | None = declare(None, SIZES, metavar="JSON")
    """Shape, and if needed dtype and value range, of inputs by name: JSON text, a file or pairs such as
    `input_ids=int64[batch,16]`. Other inputs remain as the model has them. Takes precedence over --shape-config."""


def declared_options() -> tuple[Field, ...]:
    """Return every option of loading, in the order of declaration."""
    return fields_of(LoadOptions)


def is_not_default(name: str, value: object) -> bool:
    """Return True if the value of an option, of loading or of a command, differs from its default."""
    default = next((option.default for option in declared_options() if option.name == name), None)
    return value not in (None, False, ()) if default is not True else value is False
