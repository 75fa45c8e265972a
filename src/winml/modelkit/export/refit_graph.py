"""The traced graph of a part without its weights, from which ``winml refit`` makes the file for other weights.

The graph is stored as the exporter returned it, with tags, before normalization: every weight still is an entry of the
model's state dict, and no constant has been computed of weights. In the file, weights are inputs without values.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import onnx
import onnx_ir as ir
import torch
from google.protobuf.message import DecodeError
from onnx_ir import tensor_adapters
from torch import nn

from winml.modelkit.errors import CheckpointError, InputError, UsageError, opt
from winml.modelkit.export.config import ExporterUse
from winml.modelkit.metadata_keys import MODULE_KEY, REFIT_KEY
from winml.modelkit.models.fake_parameters import WEIGHT_ENTRY, is_fake, weight_by_reference
from winml.modelkit.models.resolution import DTYPES
from winml.modelkit.onnx.assumptions import Assumption
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec
from winml.modelkit.tags.torch_modules import CallTrace

_VERSION = 1
"""Raised when a key of the record changes its meaning."""
_MAX_NAMED = 4
"""Chosen: differences that an error names."""

_OTHER_SCALE = 1.25
"""Chosen: changes a buffer, such as a variance, beyond rounding of any type, within its usual range."""

_CONFIG_KEYS_WITHOUT_EFFECT = frozenset({
    "_commit_hash", "_name_or_path", "architectures", "attn_implementation", "dtype", "finetuning_task", "id2label",
    "initializer_factor", "initializer_range", "label2id", "prefix", "problem_type", "quantization_config",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys of a config that change no graph: names, labels, initialization; dtype and format are compared separately."""
_GENERATION_KEYS = frozenset({
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "pad_token_id",
})  # fmt: skip
"""Keys of a config that control generation; a few forwards read them, such as those that pool the last token."""
_BASE_CLASS = "transformers.modeling_utils"
"""Module of the base class of models, whose functions warn about these keys and compute nothing."""
_PADDING = "padding_idx"
"""Name under which modules of transformers keep the ``pad_token_id``."""
_DROPOUT = "drop"
"""Part of the config keys of dropout, such as ``resid_pdrop``, which has an effect in training only."""


_DROPOUTS: tuple[type[nn.Module], ...] = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@dataclass(frozen=True)
class RefitGraph:
    """The traced graph of a part without weights, and the findings of its export."""

    content: bytes
    """The ONNX model; its inputs are those of the part, then its weights."""
    initializers: tuple[str, ...]
    """Initializers in order, weights included."""
    weights: Mapping[str, str]
    """Weight in the graph → entry of the state dict."""
    trace: CallTrace
    """Module calls of the part."""
    all_parts: CallTrace | None
    """Module calls of all parts; None for a single part."""
    exporter: ExporterUse
    source: Mapping[str, Any]
    """Properties of the model that the graph depends on: class, config, format of quantized weights."""
    output_shapes: Mapping[str, tuple[int | str, ...]] | None = None
    """Output → shape in terms of input dimensions; None without dynamic dimensions."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """Dynamic dimensions, within the bounds that the graph supports."""
    assumed: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Mapping[str, int] | None = None
    """Sizes that the exporter had to fix, by key of ``--shape-config``."""

    def as_bytes(self) -> bytes:
        """Return the content of the file."""
        record = {
            "version": _VERSION,
            "initializers": list(self.initializers),
            "weights": dict(self.weights),
            "trace": self.trace.as_record(),
            "all_parts": None if self.all_parts is None else self.all_parts.as_record(),
            "exporter": [self.exporter.name, self.exporter.reason],
            "source": dict(self.source),
            "output_shapes": None
            if self.output_shapes is None
            else {name: list(shape) for name, shape in self.output_shapes.items()},
            "dimensions": [dimension.model_dump(mode="json") for dimension in self.dimensions],
            "assumed": [assumption.as_record() for assumption in self.assumed],
            "notes": list(self.notes),
            "sizes": dict(self.sizes or {}),
        }
        model = onnx.ModelProto.FromString(self.content)
        model.metadata_props.add(key=REFIT_KEY, value=json.dumps(record, ensure_ascii=False, separators=(",", ":")))
        return bytes(model.SerializeToString(deterministic=True))

    def with_weights(self, model: nn.Module, stored: Mapping[str, ir.TensorProtocol] | None) -> ir.Model:
        """Return the graph with the weights of a model, by reference.

        Args:
            model: The model; its parameters may have no values.
            stored: Entry of the state dict → values, for a model without values.

        Raises:
            CheckpointError: a weight of the graph is missing in the model, or has another shape or dtype.
        """
        graph_model = ir.serde.deserialize_model(onnx.ModelProto.FromString(self.content))
        graph = graph_model.graph
        inputs = {value.name or "": value for value in graph.inputs}
        values = {**inputs, **graph.initializers}
        graph.inputs[:] = [value for name, value in inputs.items() if name not in self.weights]
        graph.initializers.clear()
        tensors, problems, other_types = model.state_dict(keep_vars=True), list[str](), list[str]()
        dtype_names: dict[ir.DataType | None, str] = {
            tensor_adapters.from_torch_dtype(dtype): name for name, dtype in DTYPES.items()
        }
        remedies = set[str | None]()
        for name in self.initializers:
            value, entry = values[name], self.weights.get(name)
            if entry is not None:
                tensor = tensors.get(entry)
                if tensor is not None and tensor.is_complex() and len(value.shape or ()) > tensor.dim():
                    tensor = torch.view_as_real(tensor.detach().resolve_conj())
                if tensor is None or tuple(tensor.shape) != tuple(value.shape or ()):
                    problems.append(_shape_difference(entry, value, tensor))
                    continue
                dtype = tensor_adapters.from_torch_dtype(tensor.dtype)
                if value.dtype != dtype:
                    other_types.append(f"{entry} is {str(dtype).lower()}, not {str(value.dtype).lower()}")
                    remedies.add(dtype_names.get(value.dtype))
                    continue
                value.const_value = weight_by_reference(entry, tensor, stored)
                value.meta[WEIGHT_ENTRY] = entry
            graph.initializers[name] = value
        if problems:
            raise _other_architecture(problems)
        if other_types:
            raise _other_architecture(
                other_types,
                f"{opt.dtype} {next(iter(remedies))} converts the weights of the checkpoint."
                if len(remedies) == 1 and None not in remedies
                else "Save the checkpoint with the types of the build, or build it with winml build.",
            )
        return graph_model


def _shape_difference(entry: str, value: ir.Value, tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return f"{entry} is missing"
    return f"{entry} has shape {list(tensor.shape)}, not {list(value.shape or ())}"


def _other_architecture(
    problems: Sequence[str], hint: str = "Only weights may differ. winml build builds another architecture."
) -> CheckpointError:
    """Return the error of a model that differs from the model of a graph by more than weights."""
    more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
    return CheckpointError(
        f"the checkpoint does not fit the graph of the build: {'; '.join(problems[:_MAX_NAMED])}{more}",
        hint=hint,
    )


def read_refit_graph(path: Path) -> RefitGraph:
    """Read the graph of a part from its file.

    Raises:
        InputError: the file is damaged, or of another version of winml.
    """
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
        text = next(entry.value for entry in model.metadata_props if entry.key == REFIT_KEY)
        properties = [entry for entry in model.metadata_props if entry.key != REFIT_KEY]
        del model.metadata_props[:]
        model.metadata_props.extend(properties)
        record = json.loads(text)
        if record["version"] != _VERSION:
            raise InputError(
                f"{path}: version {record['version']} of the graph for winml refit, this winml reads {_VERSION}",
                hint=f"Build the checkpoint again, with {opt.refittable}.",
            )
        shapes = record["output_shapes"]
        return RefitGraph(
            content=model.SerializeToString(deterministic=True),
            initializers=tuple(record["initializers"]),
            weights=record["weights"],
            trace=CallTrace.of_record(record["trace"]),
            all_parts=None if record["all_parts"] is None else CallTrace.of_record(record["all_parts"]),
            exporter=ExporterUse(*record["exporter"]),
            source=record["source"],
            output_shapes=None if shapes is None else {name: tuple(shape) for name, shape in shapes.items()},
            dimensions=tuple(map(DynamicDimension.model_validate, record["dimensions"])),
            assumed=tuple(Assumption(**assumption) for assumption in record["assumed"]),
            notes=tuple(record["notes"]),
            sizes=record["sizes"],
        )
    except InputError:
        raise
    except (OSError, DecodeError, ValueError, LookupError, TypeError, StopIteration) as error:
        raise InputError(
            f"{path}: not a graph for winml refit ({type(error).__name__})",
            hint=f"Build the checkpoint again, with {opt.refittable}.",
        ) from error


def graph_without_weights(model: ir.Model) -> tuple[bytes, tuple[str, ...], dict[str, str]]:
    """Serialize a captured graph without weights; return its bytes, the initializers in order, and weight → entry."""
    initializers = dict(model.graph.initializers)
    weights = {name: value.meta[WEIGHT_ENTRY] for name, value in initializers.items() if WEIGHT_ENTRY in value.meta}
    with _weights_as_inputs(model.graph, initializers, weights):
        content = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    return content, tuple(initializers), weights


@contextmanager
def _weights_as_inputs(
    graph: ir.Graph, initializers: Mapping[str, ir.Value], weights: Mapping[str, str]
) -> Iterator[None]:
    """Make the weights of a graph inputs until the block ends; in place, undone at the end."""
    inputs = list(graph.inputs)
    untyped = [value for name, value in initializers.items() if name in weights and value.type is None]
    shapeless = [value for name, value in initializers.items() if name in weights and value.shape is None]
    try:
        for name in weights:
            value = graph.initializers.pop(name)
            assert value.const_value is not None  # a weight has values
            value.type = value.type or ir.TensorType(value.const_value.dtype)
            value.shape = value.shape or ir.Shape(value.const_value.shape.numpy())
            graph.inputs.append(value)
        yield
    finally:
        graph.inputs[:] = inputs
        graph.initializers.clear()
        for name, value in initializers.items():
            graph.initializers[name] = value
        for value in untyped:
            value.type = None
        for value in shapeless:
            value.shape = None


@contextmanager
def with_other_buffers(model: nn.Module) -> Iterator[None]:
    """Change the values of the floating-point buffers of a model until the block ends; signs and zeros stay."""
    entries = model.state_dict(keep_vars=True)
    buffers = [value for name, value in model.named_buffers() if name in entries and value.is_floating_point()]
    originals = [value.clone() for value in buffers]
    try:
        for value in buffers:
            value.mul_(_OTHER_SCALE)
        yield
    finally:
        for value, original in zip(buffers, originals, strict=True):
            value.copy_(original)


def refuse_value_dependence(content: bytes, other: bytes) -> None:
    """Refuse a graph that differs from the graph of the same model with other weights.

    Raises:
        UsageError: names the module of the first different node.
    """
    if content == other:
        return
    nodes, other_nodes = (onnx.ModelProto.FromString(graph).graph.node for graph in (content, other))
    different = next((one for one, two in zip(nodes, other_nodes, strict=False) if one != two), None)
    module = "" if different is None else next((p.value for p in different.metadata_props if p.key == MODULE_KEY), "")
    raise UsageError(
        f"{opt.refittable}: the graph depends on values of weights, in module {module or '(the root)'}: its forward "
        "reads a weight as a number",
        hint=f"Omit {opt.refittable}, and build each checkpoint, or compute with the tensor in the forward.",
    )


def describe_source(model: nn.Module, class_name: str, source_format: str | None) -> dict[str, Any]:
    """Return the properties of a model that its graph depends on, as JSON values.

    Of a model with a config: its values. Of another model: the numbers and texts of its modules, such as the stride of
    a convolution.
    """
    config: Any = getattr(model, "config", None)
    record = {
        "class": class_name,
        "format": source_format,
        "config": dict(_list_config_values(config, _names_in_forwards(model))) if hasattr(config, "to_dict") else {},
        "modules": {} if hasattr(config, "to_dict") else dict(_list_module_values(model)),
        "shared": _list_shared_entries(model),
    }
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str, sort_keys=True))
    return plain


def _list_config_values(config: Any, read: AbstractSet[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a config and of the configs within, and their values, as far as a graph may depend on them.

    Args:
        config: The config of transformers.
        read: Names in the code of the forwards.
        prefix: Path of the config in the config of the model.
    """
    for key, value in config.to_dict().items():
        if key in _CONFIG_KEYS_WITHOUT_EFFECT or _DROPOUT in key:
            continue
        if key in _GENERATION_KEYS and not read & ({key, _PADDING} if key == "pad_token_id" else {key}):
            continue
        inner = getattr(config, key, None)
        if hasattr(inner, "to_dict"):
            yield from _list_config_values(inner, read, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _names_in_forwards(model: nn.Module) -> AbstractSet[str]:
    """Return the names in the code of the forwards of a model's modules, and of the functions that they call."""
    names, seen = set[str](), set[CodeType]()

    def add(owner: type, function: Any) -> None:
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None)
        if code is None or code in seen or function.__module__ == _BASE_CLASS:
            return
        seen.add(code)
        names.update(code.co_names)
        for name in code.co_names:
            called = inspect.getattr_static(owner, name, None) or function.__globals__.get(name)
            called = getattr(called, "fget", None) or getattr(called, "__func__", called)
            if inspect.isfunction(called):
                add(owner, called)

    # The modules of torch have options of their own with these names.
    for owner in {type(module) for module in model.modules()}:
        if owner.__module__.partition(".")[0] != "torch":
            add(owner, owner.forward)
    return names


def _list_module_values(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of modules that are numbers or texts, and their values; of constant tensors, digests."""
    entries = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for path, module in model.named_modules():
        if isinstance(module, _DROPOUTS):
            continue
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
            key = f"{path}.{name}".lstrip(".")
            if isinstance(value, torch.Tensor) and id(value) not in entries and not is_fake(value):
                content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                yield key, f"a constant with SHA-256 {hashlib.sha256(content).hexdigest()[:12]}"
            items = value if isinstance(value, (tuple, list)) else (value,)
            is_plain = all(item is None or isinstance(item, (bool, int, float, str)) for item in items)
            if is_plain and not name.startswith("_") and name != "training":
                yield key, value


def _list_shared_entries(model: nn.Module) -> list[list[str]]:
    """Return the entries of the state dict that are one tensor, such as an embedding and a head that are tied."""
    entries: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        entries.setdefault(id(tensor), []).append(name)
    return sorted(names for names in entries.values() if len(names) > 1)


def refuse_other_parts(graphs: Mapping[str, RefitGraph], parts: Sequence[str]) -> None:
    """Refuse a model with other parts than those with a graph.

    Raises:
        CheckpointError: names the parts.
    """
    if {*graphs} != {*parts}:
        raise _other_architecture([f"its parts are {', '.join(parts)}, not {', '.join(graphs)}"])


def refuse_other_inputs(model: ir.Model, inputs: Sequence[InputTensorSpec]) -> None:
    """Refuse a part whose inputs differ from those of its graph, as by another version of transformers.

    Raises:
        CheckpointError: names the inputs.
    """
    before = {value.name: None if value.dtype is None else str(value.dtype.numpy()) for value in model.graph.inputs}
    current = {spec.name: spec.dtype for spec in inputs}
    if before.keys() != current.keys():
        raise _other_architecture([f"its inputs are {', '.join(current)}, not {', '.join(map(str, before))}"])
    if changed := [name for name, dtype in current.items() if before[name] not in (None, dtype)]:
        raise _other_architecture([f"input {name} is {current[name]}, not {before[name]}" for name in changed])


def refuse_other_source(before: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse a model of another class, config or format of weights than the model of a graph.

    Raises:
        CheckpointError: names the differences.
    """
    if before["class"] != current["class"]:
        raise _other_architecture([f"its class is {current['class']}, not {before['class']}"])
    if before["format"] != current["format"]:
        words = [value or "float" for value in (current["format"], before["format"])]
        raise _other_architecture([f"its weights are {words[0]}, not {words[1]}"])
    if before["shared"] != current["shared"]:
        sides = [", ".join("=".join(names) for names in side["shared"]) or "none" for side in (current, before)]
        raise _other_architecture([f"its tied weights are {sides[0]}, not {sides[1]}"])
    # A key that one side lacks is of a tool, or of another version of transformers.
    for kind, place in (("config", " of its config"), ("modules", "")):
        old, new = before[kind], current[kind]
        changed = [key for key in sorted({*old} & {*new}) if old[key] != new[key]]
        if changed:
            raise _other_architecture([f"{key}{place} is {new[key]!r}, not {old[key]!r}" for key in changed])
