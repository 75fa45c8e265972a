"""Loads the weights of a checkpoint folder into a model and checks that they fit.

Safetensors are mapped into memory; pickles are read with ``weights_only``, so no code in them runs. A model some of
whose weights would be random is refused: its answers would mean nothing. Reads the disk only.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from winml.modelkit.errors import CheckpointError
from winml.modelkit.models.checkpoints.quantized.formats import CodedCheckpoint
from winml.modelkit.models.checkpoints.weight_files import StoredEntry, WeightFiles, stored_entries, tensor_shapes
from winml.modelkit.onnx.coded_weights import CodedTensor, joined, stacked
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues
from winml.modelkit.words import count_noun

_UNUSED_WITHOUT_TRAINING = ("masked_spec_embed", "num_batches_tracked")
"""Weights only training reads (measured: old audio and converted CNN checkpoints lack them)."""

_OPTIONAL_PART = "pooler"
"""Part of base models that checkpoints trained with another head lack; only the pooled output depends on it."""

_SMALL_FLOATS = ("float8", "f8", "f6", "f4")
"""How the names of float types begin that are too small to hold weights without a scale."""

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

_DISPLAYED = 3
"""Tensors named in a message; more would bury the rest of it."""

_PICKLE_ERRORS = (
    pickle.UnpicklingError,
    UnicodeDecodeError,
    IndexError,
    AssertionError,
    EOFError,
    struct.error,
)
"""What torch raises at bytes that are no pickle of tensors (measured over 4000 damaged files)."""

_MESSAGE_LENGTH = 200
"""Characters kept of a foreign message."""


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
    """Load weight files into a new model of ``model_class``; without a dtype, in that they were saved in.

    Args:
        model_class: A transformers class.
        config: Its config.
        weights: The weight files.
        dtype: Type of floating point parameters.
        trust_remote_code: Whether code that the checkpoint brings along may run.
        coded: Its weights in few bits; None where it has none.
        is_deferred: Whether parameters and buffers become tensors that refer to the files instead of holding values.
        seed: Seed of the parameters that the checkpoint lacks. The caller's random state is left as it was.

    Returns:
        The model, in evaluation mode, and notes for the user.

    Raises:
        CheckpointError: a file cannot be read, holds code, or lacks weights of the model or has them in other shapes.
        NotDeferrableError: the values are needed to load them.
    """
    tensors = _deferred_tensors(weights, coded) if is_deferred or coded is not None else None
    pickle_errors = _PICKLE_ERRORS if weights.format == "pickle" else ()
    try:
        with (
            foreign_parser(
                f"{_listed_files(weights.files)}: {model_class.__name__} cannot be loaded",
                error=CheckpointError,
                hint="Download or save the checkpoint again.",
                reason=_first_sentence,
                spared=(*pickle_errors, ImportError, NotDeferrableError),
            ),
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
        ):
            torch.manual_seed(seed)
            # torch asks to report pickles of newer protocols to it, which nobody here can act on.
            warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
            model, loading = model_class.from_pretrained(
                str(weights.folder) if tensors is None else None,
                state_dict=tensors,
                config=config,
                dtype=dtype or "auto",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                weights_only=True,
                ignore_mismatched_sizes=True,  # so that all of them are reported, and by us
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
        _realize(model)
    return model.eval(), tuple(notes)


def _deferred_tensors(weights: WeightFiles, coded: CodedCheckpoint | None) -> dict[str, DeferredTensor]:
    """Return the tensors of a checkpoint by name, none of them read; codes as the numbers that they stand for."""
    if coded is None:
        return deferred_entries(stored_entries(weights.files))
    plain = {name: entry for name, entry in coded.entries.items() if name not in coded.consumed}
    return {**deferred_entries(plain), **{name: _defer(tensor) for name, tensor in coded.tensors.items()}}


def _realize(model: torch.nn.Module) -> None:
    """Pass a model whose parameters and buffers refer to files their values, in place; what is shared stays shared."""
    realized: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            values: Any = parameter  # a parameter is of the class of its tensor
            if isinstance(values, DeferredTensor):
                if id(values) not in realized:
                    realized[id(values)] = torch.nn.Parameter(values.realized(), requires_grad=False)
                setattr(module, name, realized[id(values)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if isinstance(buffer, DeferredTensor):
                setattr(module, name, buffer.realized())


def _pickle_error(weights: WeightFiles, error: Exception) -> CheckpointError:
    """Return the error for what torch refuses to unpickle: something that could run code, or no pickle at all."""
    files = _listed_files(weights.files)
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
    """Refuse weights of a small float type that would be taken without the scales that lie beside them."""
    left = sorted(name for name in unused if "scale" in name.rpartition(".")[2])
    if not left or weights.format != "safetensors":
        return
    for name, entry in stored_entries(weights.files).items():
        if entry.dtype.startswith(_SMALL_FLOATS):
            raise CheckpointError(
                f"{entry.path}: tensor {name!r} is {entry.dtype}, with scales ({left[0]}) that are not read",
                hint="Its config.json lacks the quantization_config; or download the weights as bfloat16, float16 or "
                "float32.",
            )


def _check_missing(
    names: Iterable[str], model: torch.nn.Module, config: Any, weights: WeightFiles, seed: int
) -> list[str]:
    """Return notes about weights that may be missing, and refuse to go on without the others."""
    missing = [name for name in sorted(names) if name.rpartition(".")[2] not in _UNUSED_WITHOUT_TRAINING]
    optional = [name for name in missing if _OPTIONAL_PART in name.split(".")]
    needed = [name for name in missing if name not in optional]
    if needed:
        total = len(model.state_dict())
        raise CheckpointError(
            f"{_listed_files(weights.files)}: lacks {len(needed)} of the {total} tensors of {type(model).__name__}, "
            f"which would be random: {_first_names(needed)}",
            hint=f"{_why_missing(type(model).__name__, config.architectures or ())}; or --random-weights if values do "
            "not matter.",
        )
    if optional:
        return [f"the checkpoint has no weights for the {_OPTIONAL_PART}: the pooled output is random (seed {seed})"]
    return []


def _why_missing(class_name: str, architectures: Sequence[str]) -> str:
    """Return what may be the matter with a checkpoint that lacks tensors, and what helps."""
    incomplete = "the checkpoint is incomplete: download or save it again"
    if class_name in architectures:
        return f"It was saved from {class_name}, so {incomplete}"
    if architectures:
        return f"It was saved from {', '.join(architectures)}: choose a --task of that; or {incomplete}"
    return f"Either it was saved from another class: choose another --task; or {incomplete}"


def _notes_on_casts(model: torch.nn.Module, weights: WeightFiles) -> list[str]:
    """Return a note where weights of a floating point type are stored as integers or as small floats.

    They are taken as the numbers they are. Integer weights may be intended; a missing scale is more likely.
    """
    if weights.format != "safetensors":
        return []
    stored = stored_entries(weights.files)
    cast = {
        name: entry.dtype
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point()
        and (entry := _stored_entry(name, stored)) is not None
        and _is_unscaled(entry.dtype)
    }
    if not cast:
        return []
    dtypes = " and ".join(dict.fromkeys(cast.values()))
    count = count_noun(len(cast), "tensor", "are")
    return [f"{count} stored as {dtypes} and cast without a scale, so 100 stays 100: {_first_names([*cast])}"]


def _stored_entry(name: str, stored: Mapping[str, StoredEntry]) -> StoredEntry | None:
    """Return where a tensor of the model lies; names in files may lack its first part."""
    return stored.get(name) or stored.get(name.partition(".")[2])


def _is_unscaled(dtype: str) -> bool:
    return dtype.startswith(_SMALL_FLOATS) or dtype in _INTEGERS


def _notes_on_unused(names: Iterable[str]) -> list[str]:
    unused = sorted(names)
    count = count_noun(len(unused), "checkpoint tensor", "are")
    return [f"{count} not part of the model: {_first_names(unused)}"] if unused else []


def _file_of_tensor(tensor: str, weights: WeightFiles) -> Path:
    """Return the file a tensor of the model was read from; names in files may lack or have a prefix."""
    if weights.format == "safetensors":
        for file in weights.files:
            if any(f".{tensor}".endswith(f".{name}") or name.endswith(f".{tensor}") for name in tensor_shapes(file)):
                return file
    return weights.files[0]


def _listed_files(files: tuple[Path, ...]) -> str:
    further = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    return f"{files[0]}{further}"


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:_DISPLAYED]) + (", …" if len(names) > _DISPLAYED else "")


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of a foreign message: what follows is advice that does not apply here."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    sentence = re.split(r"\.\s", line, maxsplit=1)[0]
    return sentence if len(sentence) <= _MESSAGE_LENGTH else f"{sentence[:_MESSAGE_LENGTH]}…"


# --- Tensors with a shape and an element type whose values are read from weight files when they are asked for.
#
# Operations on such a tensor are recorded instead of computed. So a checkpoint can be loaded with them – its tensors
# renamed, merged, cast and tied – and the results are read later, one tensor at a time. Where a value decides which
# operation comes next (are these two equal?), it is read at once.


aten = torch.ops.aten

_DECIDING = frozenset({aten.equal.default, aten._local_scalar_dense.default, aten.is_nonzero.default})
"""Operations whose answer is a Python value: they are done at once."""

_SAME_VALUES = frozenset({aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.view.default,
                          aten._unsafe_view.default, aten.lift_fresh.default, aten.clone.default})  # fmt: skip
"""Operations that change no value and no order; where the shape is the same too, nothing has happened."""


class NotDeferrableError(Exception):
    """Something writes into a tensor that has no values."""


@dataclass(frozen=True)
class RecordedOperation:
    """A recorded operation that values come out of."""

    operation: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    position: int
    """Which of the tensors it returns."""

    @property
    def is_view(self) -> bool:
        """Whether what comes out shares its memory with what went in."""
        return any(returned.alias_info is not None for returned in self.operation._schema.returns)

    def compute(self, evaluate: Callable[[object], object]) -> torch.Tensor:
        """Do the operation.

        Args:
            evaluate: Takes a leaf of the arguments, and returns an ordinary tensor for a tensor without values.
        """
        outputs = self.operation(*tree_map(evaluate, self.arguments), **tree_map(evaluate, self.keywords))
        values: torch.Tensor = tree_leaves(outputs)[self.position]
        return values


_UnreadTensorT = TypeVar("_UnreadTensorT", bound="UnreadTensor")


class UnreadTensor(torch.Tensor):
    """A tensor on the CPU that has shape and element type, and no values in memory.

    Attributes:
        origin: Where its values come from.
        like: A tensor on ``meta`` of the same shape, strides and element type.
    """

    origin: Any
    like: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way to say: none

    @staticmethod
    def __new__(cls: type[_UnreadTensorT], origin: object, like: torch.Tensor) -> _UnreadTensorT:
        """Make one that is like another."""
        tensor: _UnreadTensorT = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=0, dtype=like.dtype, device=torch.device("cpu")
        )
        tensor.origin, tensor.like = origin, like
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch says Any
        """Return what is known without reading."""
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.origin})"

    @classmethod
    def recorded(
        cls,
        operation: Any,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        origin_of: Callable[[RecordedOperation, torch.Tensor], object] = lambda recorded, _like: recorded,
    ) -> Any:
        """Return what an operation returns, with its tensors unread.

        Args:
            operation: An operation of torch.
            arguments: Its arguments.
            keywords: Its keyword arguments.
            origin_of: Takes what was recorded and a tensor on ``meta`` like the output; returns its origin.
        """
        outputs, spec = tree_flatten(
            operation(*tree_map(_without_values, arguments), **tree_map(_without_values, keywords))
        )
        unread = [
            cls(origin_of(RecordedOperation(operation, arguments, keywords, position), output), output)
            if isinstance(output, torch.Tensor)
            else output
            for position, output in enumerate(outputs)
        ]
        return spec.unflatten(unread)


class DeferredTensor(UnreadTensor):
    """A tensor of a checkpoint, or computed of such tensors, that is read when its values are needed."""

    origin: StoredTensor | CodedTensor | RecordedOperation

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents and calls it
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record the operation."""
        kwargs = kwargs or {}
        if func in _DECIDING:
            return func(*tree_map(_realize_deferred, args), **tree_map(_realize_deferred, kwargs))
        if func._schema.is_mutable:
            return cls._record_write(func, args, kwargs)
        return cls.recorded(func, args, kwargs, _origin_of_output)

    @classmethod
    def _record_write(cls, func: object, args: Any, kwargs: Any) -> Any:
        """Record an operation that writes into a tensor which shares its memory with no other.

        Raises:
            NotDeferrableError: something does, or may.
        """
        target = args[0] if args else None
        if (
            not isinstance(target, DeferredTensor)
            or not isinstance(before := target.origin, RecordedOperation)
            or before.is_view
            or kwargs.get("out") is not None
        ):
            raise NotDeferrableError(f"{func} on a tensor of the checkpoint")
        earlier = cls(before, target.like)
        target.origin = RecordedOperation(func, (earlier, *args[1:]), kwargs, 0)
        return target

    def realized(self) -> torch.Tensor:
        """Return an ordinary tensor with the values, in memory of its own.

        Raises:
            CheckpointError: the file became shorter.
        """
        if isinstance(self.origin, (StoredTensor, CodedTensor)):
            return _from_numpy(self.origin)
        return self.origin.compute(_realize_deferred)

    def by_reference(self, name: str) -> ir.TensorProtocol:
        """Return the tensor for a graph; its values are read when it is written."""
        if isinstance(self.origin, (StoredTensor, CodedTensor)):
            return self.origin.named(name)

        def evaluate() -> ir.TensorProtocol:
            return tensor_adapters.TorchTensor(self.realized().contiguous(), name=name)

        dtype = tensor_adapters.from_torch_dtype(self.dtype)
        return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(self.shape), name=name)


def deferred_entries(entries: Mapping[str, StoredEntry]) -> dict[str, DeferredTensor]:
    """Return the tensors of weight files by name, none of them read.

    Raises:
        NotDeferrableError: torch has no such element type.
    """
    return {name: _defer_entry(name, entry) for name, entry in entries.items()}


def _defer_entry(name: str, entry: StoredEntry) -> DeferredTensor:
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise NotDeferrableError(f"{name} is {entry.dtype}")
    stored = StoredValues(entry.path, entry.offset, tensor_adapters.from_torch_dtype(dtype), entry.shape, name)
    return DeferredTensor(StoredTensor(stored), torch.empty(entry.shape, dtype=dtype, device="meta"))


def _defer(tensor: CodedTensor) -> DeferredTensor:
    dtype = tensor_adapters.to_torch_dtype(tensor.dtype)
    return DeferredTensor(tensor, torch.empty(tuple(tensor.shape.numpy()), dtype=dtype, device="meta"))


def _origin_of_output(
    recorded: RecordedOperation, output: torch.Tensor
) -> StoredTensor | CodedTensor | RecordedOperation:
    """Return where the values of an output come from: a file, where the operation changes nothing or only casts."""
    first = recorded.arguments[0] if recorded.arguments else None
    if isinstance(first, (list, tuple)) and (coded := _merged_codes(recorded)) is not None:
        return coded
    if isinstance(first, DeferredTensor) and first.shape == output.shape and output.is_contiguous():
        before = first.origin
        if recorded.operation in _SAME_VALUES and first.dtype == output.dtype:
            return before
        if recorded.operation is aten._to_copy.default and isinstance(before, (StoredTensor, CodedTensor)):
            if first.dtype == output.dtype:
                return before
            if isinstance(before, CodedTensor):
                exact = before.dtype == ir.DataType.FLOAT
                return before.cast(tensor_adapters.from_torch_dtype(output.dtype)) if exact else recorded
            if before.dtype == before.stored.dtype and first.is_floating_point() and output.is_floating_point():
                return before.cast(tensor_adapters.from_torch_dtype(output.dtype))
    return recorded


def _merged_codes(recorded: RecordedOperation) -> CodedTensor | None:
    """Return the codes of weights that are merged: experts into one weight, or rows of several below each other."""
    tensors, *rest = recorded.arguments
    axis = rest[0] if rest else recorded.keywords.get("dim", 0)
    origins = [tensor.origin if isinstance(tensor, DeferredTensor) else None for tensor in tensors]
    coded = [origin for origin in origins if isinstance(origin, CodedTensor) and origin.permutation is None]
    if len(coded) != len(origins) or len({origin.dtype for origin in coded}) != 1:
        return None
    weights = [origin.weight for origin in coded]
    if recorded.operation is aten.stack.default and axis == 0:
        merged = stacked(weights)
    elif recorded.operation is aten.cat.default and axis in (len(weights[0].shape) - 2, -2):
        merged = joined(weights)
    else:
        return None
    return None if merged is None else CodedTensor(merged, dtype=coded[0].dtype)


def _without_values(value: object) -> Any:
    if isinstance(value, UnreadTensor):
        return value.like
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _realize_deferred(value: object) -> Any:
    return value.realized() if isinstance(value, DeferredTensor) else value


def _from_numpy(tensor: StoredTensor | CodedTensor) -> torch.Tensor:
    """Return the values; numpy and torch share no names for the small float types, only their bytes."""
    dtype = tensor_adapters.to_torch_dtype(tensor.dtype)
    values = tensor.numpy()
    if values.size == 0:
        return torch.empty(values.shape, dtype=dtype)
    return torch.frombuffer(values, dtype=dtype).reshape(values.shape)
