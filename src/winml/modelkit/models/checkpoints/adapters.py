"""Reading of LoRA adapters, in the format of the package peft.

Only the config and the header of the weights are read: the kind of an adapter, the modules it changes, and unsupported
features. Neither peft nor torch is imported. ``merging.py`` applies an adapter to a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import CheckpointError, ModelPathError, UsageError, opt
from winml.modelkit.models.checkpoints.weight_files import StoredEntry, check_safetensors, stored_entries
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.onnx.files.named_paths import named_path
from winml.modelkit.options import JsonError, read_json_file

if TYPE_CHECKING:
    from winml.modelkit.arrays import Array

ADAPTER_CONFIG_NAME = "adapter_config.json"
_ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
"""Specified by peft: names of the two files of an adapter."""

_NAME = re.compile(r"^[A-Za-z0-9][\w.-]{0,63}$", re.ASCII)
"""Chosen: valid as the stem of a file on every system."""

_PREFIX = "base_model.model."
"""Specified by peft: prefix of tensor names."""

_PAIR = re.compile(r"^(?P<path>.*?)\.?(?P<kind>lora_(embedding_)?[AB])(\.(?P<leaf>weight|bias))?$")
_MAGNITUDE = re.compile(r"^(?P<path>.*?)\.?lora_magnitude_vector(\.weight)?$")

_REFUSED_KEYS = {
    "layer_replication": "repeats layers of the base model",
    "megatron_config": "is for modules of Megatron",
    "trainable_token_indices": "trains single tokens of an embedding",
    "alora_invocation_tokens": "is active only after certain tokens (aLoRA)",
    "use_qalora": "is a QALoRA",
    "target_parameters": "targets parameters instead of modules",
    "use_bdlora": "is a block-diagonal LoRA",
    "arrow_config": "routes between several adapters",
    "kasa_config": "is a KaSA",
    "velora_config": "is a VeLoRA",
    "monteclora_config": "is a MonteCLoRA",
}
"""Keys of the config with weights other than W + scaling · B · A."""

_INERT_KEYS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
})  # fmt: skip
"""Keys that are read here, or that only affect the training of an adapter.

``fan_in_fan_out`` follows from the class of the module, as in peft.
"""

_ORIGINAL_WEIGHTS = frozenset({"gaussian", "eva", "orthogonal"})
"""Initializations of an adapter, by name, that leave the base model unchanged; other values, such as pissa, do not."""

_PATTERNS = ("rank_pattern", "alpha_pattern")
_MODULE_NAME = re.compile(r"\^?(?:[\w.-]|\\\.){1,1000}\$?")
"""Keys of the patterns that are plain paths instead of expressions: the end of a path, or after ``^`` a whole path."""
_NUMBER_LIMIT = 10**9
"""Chosen: limit of a rank or an alpha; ranks are at most some thousands."""
_EXPECTED_NUMBER = f"expected a number above 0 and below {_NUMBER_LIMIT:_}"
_MAX_TEXT = 100
"""Maximum characters of a value in a message."""
_DTYPES = frozenset({
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
    "bool", "uint8", "int8", "int16", "int32", "int64",
})  # fmt: skip
"""Element types of the tensors of an adapter; integers occur in buffers that are saved whole."""

_MERGE_HINT = "Merge it into its base model with peft (merge_and_unload), save that, and pass the result with -m."
_RESAVE = "Save the adapter again with the save_pretrained of peft."


@dataclass(frozen=True)
class NamedAdapter:
    """Parsed value of one ``--adapter``."""

    folder: Path
    name: str | None = None
    """Name for switching at run time; `None`: the adapter is merged into the weights."""

    @property
    def words(self) -> str:
        """The option as it was written, for messages."""
        return f"{opt.adapter} {self.folder}" if self.name is None else f"{opt.adapter} {self.name}={self.folder}"


@dataclass(frozen=True)
class LoraPair:
    """The two matrices by which an adapter changes one weight: W + scaling · B · A."""

    a: str
    """Tensor of the first matrix: rank × input channels (for a convolution, followed by its kernel)."""
    b: str
    """Tensor of the second matrix: output channels × rank."""
    rank: int
    scaling: float
    is_embedding: bool = False
    bias: str | None = None
    """Tensor that is scaled and added to the bias of the module; `None` without such a tensor."""
    magnitude: str | None = None
    """Tensor with the length of each row of the weight (DoRA); `None` without DoRA."""


@dataclass(frozen=True)
class Adapter:
    """One adapter, with weights not yet read."""

    requested: NamedAdapter
    file: Path
    tensors: Mapping[str, StoredEntry]
    """Tensor name in the file → its position."""
    pairs: Mapping[str, LoraPair]
    """Path of the module in the base model → its matrices."""
    replaced: Mapping[str, str]
    """Parameter of the base model that is saved whole → tensor of the file."""
    base_name: str = ""
    """Name of the base model in the config; empty if unknown."""

    @property
    def name(self) -> str | None:
        """Name for switching at run time; `None`: the adapter is merged."""
        return self.requested.name

    def error(self, problem: str, hint: str = "") -> CheckpointError:
        """Return the error for an adapter that cannot be applied."""
        return CheckpointError(f"{self.requested.words}: {problem}", hint=hint)


def named_adapter(text: str) -> NamedAdapter:
    """Parse ``PATH`` or ``NAME=PATH``. An existing folder with ``=`` in its name is a path.

    Raises:
        UsageError: the name is not usable as a file name, or there is no path.
    """
    name, sign, path = text.partition("=")
    if not sign or named_path(text).is_dir() or {*name} & {"/", "\\"}:
        if not text.strip():
            raise UsageError(f"{opt.adapter}: empty path", hint="Pass the folder that peft saved, or NAME=FOLDER.")
        return NamedAdapter(named_path(text).absolute())
    if not _NAME.match(name) or not path.strip():
        raise UsageError(
            f"{opt.adapter} {text}: expected PATH or NAME=PATH, with a NAME of letters, digits, '_', '-' and '.'",
            hint="Pass the folder that peft saved; with a NAME, the adapter remains swappable.",
        )
    return NamedAdapter(named_path(path).absolute(), name)


def read_adapters(requested: Sequence[str]) -> tuple[Adapter, ...]:
    """Read the headers of the adapters in a request.

    Raises:
        UsageError: two adapters have one name, or an option is malformed.
        ModelPathError: a folder contains no adapter.
        CheckpointError: an adapter is damaged, or of an unsupported kind.
    """
    adapters = [named_adapter(text) for text in requested]
    names = [adapter.name.lower() for adapter in adapters if adapter.name is not None]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"{opt.adapter} {repeated}=…: two adapters have this name", hint="Use a separate name for each."
        )
    return tuple(_read_adapter(adapter) for adapter in adapters)


def _read_adapter(requested: NamedAdapter) -> Adapter:
    config_path = _find_adapter_file(requested, ADAPTER_CONFIG_NAME)
    try:
        config = read_json_file(config_path)
    except JsonError as error:
        raise CheckpointError(f"{config_path}: {error}", hint=_RESAVE) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_path}: expected a JSON object", hint=_RESAVE)
    _refuse_config(requested, config)
    weights_path = _find_adapter_file(requested, _ADAPTER_WEIGHTS_NAME)
    check_safetensors(weights_path)
    return _AdapterReader(requested, config, stored_entries([weights_path])).read(weights_path)


def _find_adapter_file(requested: NamedAdapter, name: str) -> Path:
    """Return the path of a file of an adapter.

    Raises:
        ModelPathError: the folder or the file does not exist, or the file is no regular file of the folder.
    """
    folder = requested.folder
    if not folder.is_dir():
        raise ModelPathError(f"{requested.words}: no such folder", hint="Pass the folder that peft saved.")
    try:
        return file_below(folder, name)
    except ForeignNameError as error:
        hint = f"Pass the folder that peft saved, with {ADAPTER_CONFIG_NAME} and {_ADAPTER_WEIGHTS_NAME}."
        if (folder / "adapter_model.bin").is_file():
            hint = "adapter_model.bin is a pickle, which is not read: save the adapter as safetensors."
        raise ModelPathError(f"{requested.words}: {name}: {error}", hint=hint) from None


def _refuse_config(requested: NamedAdapter, config: Mapping[str, Any]) -> None:
    """Refuse an adapter that is no LoRA, and a LoRA whose weights have an unsupported formula.

    Raises:
        CheckpointError: names the key, its value and the supported kinds.
    """

    def refusal(key: str, because: str, hint: str = _MERGE_HINT) -> CheckpointError:
        return CheckpointError(
            f"{requested.words}: {ADAPTER_CONFIG_NAME}: {key} is {_shorten_repr(config.get(key))}: {because}", hint=hint
        )

    if str(config.get("peft_type")).upper() != "LORA":
        raise refusal("peft_type", "expected LORA, the only supported kind")
    for key, reason in _REFUSED_KEYS.items():
        if config.get(key):
            raise refusal(key, f"the adapter {reason}, which is not supported")
    initial = config.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower() not in (*_ORIGINAL_WEIGHTS, "true", "false"):
        raise refusal(
            "init_lora_weights", "such an adapter also changes the weights of its base model, which is not supported"
        )
    for key in config:
        if key not in _REFUSED_KEYS and key not in _INERT_KEYS and config[key] not in (None, False, [], {}, ""):
            raise refusal(key, "the key is unknown to this version, and may change the weights")
    for key in ("r", "lora_alpha"):
        if not _is_positive(config.get(key)):
            raise refusal(key, _EXPECTED_NUMBER, _RESAVE)
    for key in _PATTERNS:
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
            expected = f"expected an object: path of a module → {_EXPECTED_NUMBER.removeprefix('expected ')}"
            raise refusal(key, expected, _RESAVE)
        expression = next((name for name in pattern if not _MODULE_NAME.fullmatch(name)), None)
        if expression is not None:
            raise CheckpointError(
                f"{requested.words}: {ADAPTER_CONFIG_NAME}: {key} has the key {expression[:_MAX_TEXT]!r}: expected the "
                "path of a module or its end; regular expressions are not evaluated",
                hint=_MERGE_HINT,
            )


def _shorten_repr(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer beyond the digit limit of Python
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _NUMBER_LIMIT


@dataclass(frozen=True)
class _AdapterReader:
    """Assigns the tensors of an adapter to the modules that they change."""

    requested: NamedAdapter
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredEntry]

    def read(self, weights_path: Path) -> Adapter:
        """Return the adapter.

        Raises:
            CheckpointError: a tensor has no counterpart, another shape than the config says, or an unknown name.
        """
        names_by_path: dict[str, dict[str, str]] = {}
        replacements: dict[str, str] = {}
        for tensor, entry in self.tensors.items():
            if entry.dtype not in _DTYPES:
                raise self._error(tensor, f"is {entry.dtype}, expected {', '.join(sorted(_DTYPES))}")
        for tensor in self.tensors:
            name = tensor.removeprefix(_PREFIX).replace(".base_layer", "").replace(".modules_to_save", "")
            if match := _PAIR.match(name):
                kind = f"{match['kind']}{'.bias' if match['leaf'] == 'bias' else ''}"
                names_by_path.setdefault(match["path"], {})[kind] = tensor
            elif match := _MAGNITUDE.match(name):
                names_by_path.setdefault(match["path"], {})["magnitude"] = tensor
            elif "lora_" in name:
                raise self._error(tensor, "is of an unsupported kind")
            else:
                replacements[name] = tensor
        if not names_by_path:
            problem = f"{self.requested.words}: {_ADAPTER_WEIGHTS_NAME} contains no LoRA weights"
            raise CheckpointError(problem, hint=_RESAVE)
        ranks, alphas = (_ValuesByModule(self.config.get(key) or {}) for key in _PATTERNS)
        pairs = {}
        for path, tensor_names in names_by_path.items():
            rank, alpha = ranks.of(path, self.config["r"]), alphas.of(path, self.config["lora_alpha"])
            pairs[path] = self._make_pair(tensor_names, int(rank), float(alpha))
        base = self.config.get("base_model_name_or_path")
        base_name = base[:_MAX_TEXT] if isinstance(base, str) else ""
        return Adapter(self.requested, weights_path, self.tensors, pairs, replacements, base_name)

    def _make_pair(self, tensor_names: Mapping[str, str], rank: int, alpha: float) -> LoraPair:
        """Return the matrices of one module, whose tensors are named by kind.

        Raises:
            CheckpointError: a matrix is missing, does not fit its counterpart, or contradicts the config.
        """
        is_embedding = "lora_embedding_A" in tensor_names or "lora_embedding_B" in tensor_names
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        if missing_kind := next((name for name in names if name not in tensor_names), None):
            raise self._error(next(iter(tensor_names.values())), f"has no matching {missing_kind}")
        a, b = (tensor_names[name] for name in names)
        shape_a, shape_b = self.tensors[a].shape, self.tensors[b].shape
        if min(len(shape_a), len(shape_b)) < 2 or len(shape_a) != len(shape_b):
            raise self._error(a, f"does not fit {b} of shape {list(shape_b)}")
        if shape_a[0] != rank or shape_b[1] != rank:
            ranks = f"has rank {shape_a[0]}, and {b} has rank {shape_b[1]}"
            raise self._error(a, f"{ranks}; expected {rank} by {ADAPTER_CONFIG_NAME}")
        scaling = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        magnitude = tensor_names.get("magnitude")
        if magnitude is not None and not self.config.get("use_dora"):
            raise self._error(magnitude, "belongs to a DoRA, which the config does not declare")
        if magnitude is None and self.config.get("use_dora"):
            raise self._error(a, "lacks its magnitudes")
        return LoraPair(a, b, rank, scaling, is_embedding, tensor_names.get("lora_B.bias"), magnitude)

    def _error(self, tensor: str, problem: str) -> CheckpointError:
        shape = list(self.tensors[tensor].shape)
        return CheckpointError(f"{self.requested.words}: tensor {tensor!r} of shape {shape} {problem}", hint=_RESAVE)


class _ValuesByModule:
    """The numbers of ``rank_pattern`` or ``alpha_pattern``.

    peft interprets the keys as regular expressions for the end of the path of a module. Text of a file is never
    compiled here, because matching time has no bound: names are looked up, and :func:`_refuse_config` refuses other
    expressions.
    """

    def __init__(self, pattern: Mapping[str, float]) -> None:
        self._values: dict[str, tuple[int, float]] = {}
        for position, (name, value) in enumerate(pattern.items()):
            self._values.setdefault(name.replace("\\.", ".").removesuffix("$"), (position, float(value)))
        self._longest = max(map(len, self._values), default=0)

    def of(self, path: str, default: float) -> float:
        """Return the number of a module: the value of the first key that its path ends with."""
        matches = [self._values[f"^{path}"]] if f"^{path}" in self._values else []
        start = len(path)
        while start > 0 and len(path) - start <= self._longest:
            start = path.rfind(".", 0, start)
            if (ending := path[start + 1 :]) in self._values:
                matches.append(self._values[ending])
        return min(matches)[1] if matches else default


def adapter_values(adapter: Adapter, inputs: Mapping[str, tuple[str, str]], dtype: Any) -> dict[str, Array]:
    """Return input of the graph → values from an adapter, with the scaling applied.

    Args:
        adapter: A swappable adapter.
        inputs: Path of a module in the graph → the names of its inputs.
        dtype: Element type of the inputs in numpy or ``ml_dtypes``.

    Raises:
        CheckpointError: the graph has no inputs for a module, or the file became shorter.
    """
    import numpy as np

    from winml.modelkit.models.checkpoints.quantized.stored import stored_values

    values = {}
    for path, pair in adapter.pairs.items():
        # One of the two paths may start with the prefix of the base model.
        candidates = (name for name in inputs if name.endswith(f".{path}") or path.endswith(f".{name}"))
        module_name = path if path in inputs else next(candidates, None)
        if module_name is None:
            raise adapter.error(f"the graph has no inputs for module {path!r}", "Export the model again.")
        a, b = (stored_values(adapter.tensors[name], name).read().astype(np.float32) for name in (pair.a, pair.b))
        input_a, input_b = inputs[module_name]
        values[input_a] = np.ascontiguousarray(a.T).astype(dtype)
        values[input_b] = np.ascontiguousarray(b.T * np.float32(pair.scaling)).astype(dtype)
    return values


def adapter_files(adapters: Sequence[Adapter]) -> dict[str, Path]:
    """Return the files of adapters: number and file name → path."""
    return {
        f"{number}/{name}": adapter.requested.folder / name
        for number, adapter in enumerate(adapters)
        for name in (ADAPTER_CONFIG_NAME, adapter.file.name)
    }
