"""Loading of a checkpoint's weights into a model, with checks of names, shapes and types.

Safetensors are mapped into memory; pickles are read with ``weights_only``, without running code. A model with missing
weights is refused: they would be random, and the outputs meaningless. Reads the disk only.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from winml.modelkit.errors import CheckpointError, opt
from winml.modelkit.models.checkpoints.deferred_tensors import (
    DeferredTensor,
    NotDeferrableError,
    defer_coded,
    deferred_entries,
)
from winml.modelkit.models.checkpoints.quantized.formats import CodedCheckpoint
from winml.modelkit.models.checkpoints.weight_files import WeightFiles, stored_entries
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.words import count_noun, first_words

_UNUSED_WITHOUT_TRAINING = ("masked_spec_embed", "num_batches_tracked")
"""Weights read only in training (measured: old audio and converted CNN checkpoints lack them)."""

_OPTIONAL_PART = "pooler"
"""Part of base models that checkpoints trained with another head lack; only the pooled output depends on the pooler."""

_SMALL_FLOATS = ("float8", "f8", "f6", "f4")
"""Prefixes of float types that are too small to hold weights without a scale."""

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

_NAME_LIMIT = 3
"""Tensors named in a message; more would bury the rest of the message."""

_PICKLE_ERRORS = (
    pickle.UnpicklingError,
    UnicodeDecodeError,
    IndexError,
    AssertionError,
    EOFError,
    struct.error,
)
"""Errors of torch on bytes that are no pickle of tensors (measured over 4000 damaged files)."""

_MESSAGE_LENGTH = 200
"""Maximum characters of a foreign message."""


def load_checkpoint(
    model_class: Any,
    config: object,
    weights: WeightFiles,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    coded: CodedCheckpoint | None = None,
    is_deferred: bool = False,
    seed: int = 0,
) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """Load weight files into a new model of ``model_class``; the default dtype is the stored dtype.

    Args:
        model_class: A transformers class.
        config: Its config.
        weights: The weight files.
        dtype: Type of floating point parameters.
        trust_remote_code: Whether code of the checkpoint may run.
        coded: Its quantized weights; `None` if it has none.
        is_deferred: Whether parameters and buffers become tensors that refer to the files instead of holding values.
        seed: Seed of the parameters that the checkpoint lacks. The caller's random state is left unchanged.

    Returns:
        The model, in evaluation mode, and notes for the user.

    Raises:
        CheckpointError: a file cannot be read, contains code, or has missing weights or weights of other shapes.
        NotDeferrableError: loading needs the values.
    """
    tensors = _deferred_tensors(weights, coded) if is_deferred or coded is not None else None
    pickle_errors = _PICKLE_ERRORS if weights.format == "pickle" else ()
    try:
        with (
            foreign_parser(
                f"{_shorten_files(weights.files)}: {model_class.__name__} cannot be loaded",
                error=CheckpointError,
                hint="Download or save the checkpoint again.",
                reason=_first_sentence,
                spared=(*pickle_errors, ImportError, NotDeferrableError),
            ),
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
        ):
            torch.manual_seed(seed)
            # torch asks to report pickles of newer protocols to its developers; a user here cannot act on the warning.
            warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
            model, loading = model_class.from_pretrained(
                str(weights.folder) if tensors is None else None,
                state_dict=tensors,
                config=config,
                dtype=dtype or "auto",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                weights_only=True,
                ignore_mismatched_sizes=True,  # all mismatches are reported by _check_shapes
                output_loading_info=True,
            )
    except pickle_errors as error:
        raise _pickle_error(weights, error) from error
    except ImportError as error:
        raise CheckpointError(
            f"{weights.folder}: {model_class.__name__} needs a package that is not installed: {_first_sentence(error)}",
            hint="Install that package.",
        ) from error
    _check_shapes(loading["mismatched_keys"], weights)
    if coded is None:
        _check_scales(loading["unexpected_keys"], weights)
    notes = _check_missing(loading["missing_keys"], model, config, weights, seed)
    notes += [*_notes_on_unused(loading["unexpected_keys"]), *([] if coded else _notes_on_casts(model, weights))]
    if coded is not None and not is_deferred:
        _realize_tensors(model)
    return model.eval(), tuple(notes)


def _deferred_tensors(weights: WeightFiles, coded: CodedCheckpoint | None) -> dict[str, DeferredTensor]:
    """Return the tensors of a checkpoint by name, without reading values; codes as dequantized tensors."""
    if coded is None:
        return deferred_entries(stored_entries(weights.files))
    unquantized = {name: entry for name, entry in coded.entries.items() if name not in coded.consumed}
    return {**deferred_entries(unquantized), **{name: defer_coded(tensor) for name, tensor in coded.tensors.items()}}


def _realize_tensors(model: torch.nn.Module) -> None:
    """Read the values of parameters and buffers that refer to files, in place; shared parameters stay shared."""
    realized: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            values: Any = parameter  # a parameter has the class of its tensor
            if isinstance(values, DeferredTensor):
                if id(values) not in realized:
                    realized[id(values)] = torch.nn.Parameter(values.realized(), requires_grad=False)
                setattr(module, name, realized[id(values)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if isinstance(buffer, DeferredTensor):
                setattr(module, name, buffer.realized())


def _pickle_error(weights: WeightFiles, error: Exception) -> CheckpointError:
    """Return the error for a file that torch refuses to unpickle: it could run code, or is no pickle."""
    files = _shorten_files(weights.files)
    names = re.findall(r"(?:GLOBAL|global) ([\w.]+)", str(error))
    if names:
        return CheckpointError(
            f"{files}: contains {names[0]}, which is not a tensor and could run code; it was not unpickled",
            hint="Download the checkpoint as safetensors, or convert it if you trust the file.",
        )
    return CheckpointError(
        f"{files}: not a pickle of tensors only: it is damaged or could run code; it was not unpickled",
        hint="Download the checkpoint again, better as safetensors.",
    )


def _check_shapes(mismatched: Iterable[tuple[str, Any, Any]], weights: WeightFiles) -> None:
    entries = sorted((name, tuple(stored), tuple(expected)) for name, stored, expected in mismatched)
    if entries:
        name, stored, expected = entries[0]
        further = f" ({len(entries) - 1} more tensors differ)" if len(entries) > 1 else ""
        raise CheckpointError(
            f"{_file_of_tensor(name, weights)}: tensor {name!r} has shape {list(stored)}, the config requires "
            f"{list(expected)}{further}",
            hint="The config and the weights belong to different models: download the checkpoint again.",
        )


def _check_scales(unused: Iterable[str], weights: WeightFiles) -> None:
    """Refuse weights of a small float type with stored scales that would be ignored.

    Raises:
        CheckpointError: names the scales.
    """
    scale_names = sorted(name for name in unused if "scale" in name.rpartition(".")[2])
    if not scale_names or weights.format != "safetensors":
        return
    for name, entry in stored_entries(weights.files).items():
        if entry.dtype.startswith(_SMALL_FLOATS):
            raise CheckpointError(
                f"{entry.path}: tensor {name!r} is {entry.dtype}, with scales ({scale_names[0]}) that are not read",
                hint="Its config.json lacks the quantization_config; or download the weights as bfloat16, float16 or "
                "float32.",
            )


def _check_missing(
    names: Iterable[str], model: torch.nn.Module, config: Any, weights: WeightFiles, seed: int
) -> list[str]:
    """Return notes on missing optional weights, and refuse missing required weights.

    Args:
        names: Names of weights that the files lack.
        model: The model.
        config: Its config.
        weights: The weight files.
        seed: Seed of the random values of optional weights, for the note.

    Raises:
        CheckpointError: the files lack a required weight.
    """
    missing_names = [name for name in sorted(names) if name.rpartition(".")[2] not in _UNUSED_WITHOUT_TRAINING]
    optional = [name for name in missing_names if _OPTIONAL_PART in name.split(".")]
    needed = [name for name in missing_names if name not in optional]
    if needed:
        total = len(model.state_dict())
        random_remedy = f"; or {opt.random_weights} if values do not matter" if opt.random_weights else ""
        raise CheckpointError(
            f"{_shorten_files(weights.files)}: lacks {len(needed)} of the {total} tensors of {type(model).__name__}, "
            f"which would be random: {_shorten_names(needed)}",
            hint=f"{_why_missing(type(model).__name__, config.architectures or ())}{random_remedy}.",
        )
    if optional:
        return [f"the checkpoint has no weights for the {_OPTIONAL_PART}: the pooled output is random (seed {seed})"]
    return []


def _why_missing(class_name: str, architectures: Sequence[str]) -> str:
    """Return the likely reason why a checkpoint lacks tensors, with a remedy."""
    incomplete = "the checkpoint is incomplete: download or save it again"
    if class_name in architectures:
        return f"It was saved from {class_name}, so {incomplete}"
    if architectures:
        return f"It was saved from {', '.join(architectures)}: choose a {opt.task} of that; or {incomplete}"
    return f"Either it was saved from another class: choose another {opt.task}; or {incomplete}"


def _notes_on_casts(model: torch.nn.Module, weights: WeightFiles) -> list[str]:
    """Return a note if weights of a floating point type are stored as integers or as small floats.

    The weights are cast without a scale. Integer weights may be intended; a missing scale is more likely.
    """
    if weights.format != "safetensors":
        return []
    entries = stored_entries(weights.files)
    cast_dtypes = {
        name: entry.dtype
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point()
        # Names in files may lack their first component.
        and (entry := entries.get(name) or entries.get(name.partition(".")[2])) is not None
        and (entry.dtype.startswith(_SMALL_FLOATS) or entry.dtype in _INTEGERS)
    }
    if not cast_dtypes:
        return []
    dtypes = " and ".join(dict.fromkeys(cast_dtypes.values()))
    count = count_noun(len(cast_dtypes), "tensor", "are")
    return [f"{count} stored as {dtypes} and cast without a scale, so 100 stays 100: {_shorten_names([*cast_dtypes])}"]


def _notes_on_unused(names: Iterable[str]) -> list[str]:
    unused_names = sorted(names)
    count = count_noun(len(unused_names), "checkpoint tensor", "are")
    return [f"{count} not part of the model: {_shorten_names(unused_names)}"] if unused_names else []


def _file_of_tensor(tensor: str, weights: WeightFiles) -> Path:
    """Return the file of a tensor of the model; names in files may lack or have a prefix."""
    if weights.format == "safetensors":
        for file in weights.files:
            if any(f".{tensor}".endswith(f".{name}") or name.endswith(f".{tensor}") for name in stored_entries([file])):
                return file
    return weights.files[0]


def _shorten_files(files: tuple[Path, ...]) -> str:
    return first_words(files, 1, "more files")


def _shorten_names(names: list[str]) -> str:
    return ", ".join(names[:_NAME_LIMIT]) + (", …" if len(names) > _NAME_LIMIT else "")


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of a foreign message: further sentences give advice that does not apply here."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    sentence = re.split(r"\.\s", line, maxsplit=1)[0]
    return sentence if len(sentence) <= _MESSAGE_LENGTH else f"{sentence[:_MESSAGE_LENGTH]}…"
