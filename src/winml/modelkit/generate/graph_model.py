"""Calls of an ONNX file with arrays by name: types, shapes and padding are fitted to the graph. Needs no PyTorch."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from winml.modelkit.arrays import Array, Arrays, numpy_dtype
from winml.modelkit.compare.fidelity import output_fidelity
from winml.modelkit.compare.outputs import compare_outputs
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import files_folder
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx.bundle import described_model
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.graph_inputs import array_words, graph_inputs, refuse_other_than_arrays, restore_dtype
from winml.modelkit.ort.graph_sessions import are_numbers_fixed, draws_numbers, fixed_random_numbers, open_session
from winml.modelkit.samples.processors import open_config, open_processor
from winml.modelkit.words import count_noun

if TYPE_CHECKING:
    from winml.modelkit.ort.sessions import Session

_LEAST_FILLER_SQNR_DB = 6.0
"""Chosen: the least SQNR that ``winml quantize`` accepts of 8-bit activations; another filler may change as much."""

_MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""Tokens → the mask that hides positions of theirs."""

_FILLERS = {"attention_mask": 1, "decoder_attention_mask": 1, "token_type_ids": 0}
"""Optional inputs → the default value in transformers' models."""

_PER_TOKEN_RANKS = {
    "last_hidden_state": 3, "logits": 3, "prediction_logits": 3, "encoder_last_hidden_state": 3,
    "start_logits": 2, "end_logits": 2,
}  # fmt: skip
"""Outputs with one entry for each token, along the second axis → their rank."""


_TOKEN_COPIES = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that pass tokens on unchanged."""


@dataclass(frozen=True)
class _Padding:
    """Lengths of the tokens of one side before and after padding."""

    input_length: int
    graph_length: int


class GraphModel:
    """An ONNX file that is called with arrays by name.

    Attributes:
        path: The ONNX file.
        inputs: Inputs of the graph, in order.
        task: Task of the model; None if the file does not state it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ep: str | None = None,
        device: Literal["cpu", "gpu", "npu"] | None = None,
        ep_options: Mapping[str, str] | None = None,
        threads: int | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        """Load an ONNX file.

        In a block of :func:`fixed_random_numbers`, a graph that draws random numbers is opened on the CPU.

        Args:
            path: The file.
            ep: Execution provider to run it on, such as ``openvino``; None: the provider for the device.
            device: Kind of processor; None: the provider's default, or the CPU without a provider.
            ep_options: Options of the provider.
            threads: Number of threads per operator; None: the runtime's default.
            pad_token_id: Padding token of short rows, if the graph takes a fixed number of tokens; None: from the
                config or the tokenizer next to the file.

        Raises:
            UsageError: the provider is unknown or not installed.
            StageError: ONNX Runtime cannot load the file.
        """
        self.path = os.fspath(path)
        self._opened = functools.partial(choose_provider(ep, device, ep_options or {}).open, threads=threads)
        if are_numbers_fixed() and draws_numbers(Path(path)):
            self._session = open_session(Path(path), as_written=False)
        else:
            self._session = self._opened(self.path)
        self.inputs: tuple[InputTensorSpec, ...] = graph_inputs(self._session)
        self._described = described_model(Path(path))
        self.task: str | None = self._described.get("task")
        self._pad_token_argument = pad_token_id
        self._forward_parameters = _UNUSED_TENSORS
        """Inputs that are left out if the graph does not take them."""
        self._checked: set[tuple[tuple[str, _Padding], ...]] = set()
        """Paddings known not to affect the outputs."""

    @functools.cached_property
    def config(self) -> Any:
        """The config next to the file; None without one."""
        return config_beside(Path(self.path))

    @functools.cached_property
    def pad_token_id(self) -> int | None:
        """Padding token of short rows, if the graph takes a fixed number of tokens; None: such rows are refused."""
        requested = self._pad_token_argument
        return requested if requested is not None else pad_token_beside(Path(self.path), self.config)

    @staticmethod
    def _to_array(value: Any) -> Array:
        """Return the value of an input as an array."""
        return np.asarray(value)

    def run(self, *tensors: Any, **by_name: Any) -> dict[str, Array]:
        """Run the graph on one set of inputs and return the outputs by name.

        Args:
            *tensors: Inputs in the order of :attr:`inputs`, or one mapping of them.
            **by_name: Inputs by name.

        Raises:
            UsageError: an input is missing or unknown, or has an unsupported shape or type; or rows need padding that
                affects the outputs.
            StageError: ONNX Runtime fails.
        """
        arrays = self._named_arrays(tensors, by_name)
        padding = self._find_paddings(arrays)
        outputs = self._run_padded(self._session, arrays, padding, self.pad_token_id or 0)
        self._refuse_leak(arrays, padding, outputs)
        return outputs

    def _named_arrays(self, tensors: tuple[Any, ...], by_name: Mapping[str, Any]) -> dict[str, Array]:
        """Return the inputs as arrays, by name; missing optional inputs get defaults.

        Raises:
            UsageError: an input is missing or unknown.
        """
        names = [spec.name for spec in self.inputs]
        if len(tensors) == 1 and isinstance(tensors[0], Mapping):
            return self._named_arrays((), {**tensors[0], **by_name})
        if len(tensors) > len(names):
            raise UsageError(f"got {len(tensors)} inputs, but the model takes {len(names)}: {', '.join(names)}")
        values = {**dict(zip(names, tensors, strict=False)), **by_name}
        # Inputs of the model's own forward that the graph does not use do not affect the outputs.
        unused = [name for name in values if name not in names and name in self._forward_parameters]
        # A mask that hides no pixel, as pipelines pass for one image, does not affect the outputs either.
        if "pixel_mask" in values and "pixel_mask" not in names and bool(self._to_array(values["pixel_mask"]).all()):
            unused.append("pixel_mask")
        values = {name: value for name, value in values.items() if name not in unused}
        unknown = [name for name in values if name not in names]
        if unknown:
            raise UsageError(f"the model has no input {unknown[0]!r}: it takes {', '.join(names)}", hint="Omit it.")
        arrays = {name: self._to_array(value) for name, value in values.items()}
        for name in names:
            if name in _FILLERS and name not in arrays and (tokens := arrays.get(_tokens_beside(name))) is not None:
                arrays[name] = np.full_like(tokens, _FILLERS[name])
        missing = [name for name in names if name not in arrays]
        if missing:
            raise UsageError(f"input {missing[0]!r} is missing: the model takes {', '.join(names)}")
        return arrays

    def _find_paddings(self, arrays: Arrays) -> dict[str, _Padding]:
        """Return token input → lengths before and after padding, for inputs that need padding."""
        shapes = {spec.name: spec.shape for spec in self.inputs}
        paddings = {}
        for tokens, mask in _MASKS.items():
            if tokens not in shapes or mask not in shapes or arrays[tokens].ndim != 2:
                continue
            graph_length, input_length = shapes[tokens][1], arrays[tokens].shape[1]
            if isinstance(graph_length, int) and input_length < graph_length and self.pad_token_id is not None:
                paddings[tokens] = _Padding(input_length, graph_length)
        return paddings

    def _run_padded(
        self, session: Session, arrays: Arrays, padding: Mapping[str, _Padding], filler: int
    ) -> dict[str, Array]:
        """Run a session with padded inputs, and remove the padding from the outputs."""
        feeds = {spec.name: self._fit_input(spec, arrays, padding, filler) for spec in self.inputs}
        return {name: _remove_padding(name, value, padding) for name, value in session.run(feeds).items()}

    def _refuse_leak(self, arrays: Arrays, padding: Mapping[str, _Padding], outputs: Arrays) -> None:
        """Run the model with another padding token and compare the outputs, once for each padding length.

        Not every model respects its mask everywhere: a convolution over the tokens reads the padding.

        Args:
            arrays: The inputs.
            padding: Input → its length and the length of the graph.
            outputs: Outputs for the inputs, padded as usual.

        Raises:
            UsageError: the outputs differ by more than rounding.
        """
        key = tuple(padding.items())
        if not key or key in self._checked:
            return
        session = self._session
        if draws_numbers(Path(self.path)):
            # Only a session on the CPU fixes random numbers; otherwise each run differs.
            with fixed_random_numbers():
                session = open_session(Path(self.path), as_written=False)
            outputs = self._run_padded(session, arrays, padding, self.pad_token_id or 0)
        filler = _choose_other_filler(arrays, padding, self.pad_token_id)
        refilled_answers = self._run_padded(session, arrays, padding, filler)
        # If a model searches the padding token itself, to find the last token, its output for the row may depend on it.
        by_token_only = _compares_tokens(Path(self.path), padding)
        evaluated = [name for name, value in outputs.items() if _has_no_padding(name, value, padding, by_token_only)]
        compared = compare_outputs([{name: outputs[name] for name in evaluated}], [refilled_answers]).comparisons
        worst = max(compared, key=lambda output: output.relative_diff / (output.threshold or 1), default=None)
        are_equal = worst is None or all(output.is_equal for output in compared)
        if worst is None or are_equal or self._is_rounding(outputs, refilled_answers, evaluated):
            self._checked.add(key)
            return
        tokens, sizes = next(iter(padding.items()))
        raise UsageError(
            f"input {tokens!r} has {sizes.input_length} tokens, the model was built for {sizes.graph_length}, "
            f"and padding affects its outputs: {worst.name} changes by {worst.relative_diff:.1%} with a "
            "different padding value",
            hint=f"Pass {sizes.graph_length} tokens, or build the model for {sizes.input_length} tokens, or with a "
            "dynamic number of tokens (config={'export': {'dynamic_sequence': True}}).",
        )

    def _is_rounding(self, outputs: Arrays, refilled: Arrays, names: Sequence[str]) -> bool:
        """Return True if the difference of the outputs is explained by quantized activations.

        Their scale depends on all tokens, including padding: another padding token changes the rounding of every token.
        """
        if QUANTIZATION_KEY not in self._session.metadata:
            return False
        return all(
            output_fidelity(name, [outputs[name]], [refilled[name]]).sqnr_db >= _LEAST_FILLER_SQNR_DB for name in names
        )

    def _fit_input(self, spec: InputTensorSpec, arrays: Arrays, padding: Mapping[str, _Padding], filler: int) -> Any:
        """Return an input in the type and shape the graph takes.

        Args:
            spec: The input.
            arrays: Values of the user.
            padding: Input with padding → its length and the length of the graph.
            filler: Value of padding in tokens and masks.

        Raises:
            UsageError: the input cannot be converted.
        """
        array = arrays[spec.name]
        sizes = padding.get(_tokens_beside(spec.name))
        if sizes is not None and array.ndim == 2 and array.shape[1] == sizes.input_length:
            fill = filler if spec.name in _MASKS else 0
            array = np.pad(array, ((0, 0), (0, sizes.graph_length - sizes.input_length)), constant_values=fill)
        refuse_other_than_arrays([spec])
        if not spec.takes_sizes(array.shape):
            raise UsageError(
                f"input {spec.name!r} is {array_words(arrays[spec.name])}, but the model was built for {spec.words}",
                hint=self._suggest_fitting(spec, array),
            )
        return _cast_to_graph(array, spec)

    def _suggest_fitting(self, spec: InputTensorSpec, array: Array) -> str:
        """Return advice on bringing an input to the size of the model."""
        if array.ndim != len(spec.shape):
            return f"Pass an array of {count_noun(len(spec.shape), 'dimension')}."
        others = "or build the model for a different size or with this dimension dynamic."
        if spec.name not in {*_MASKS, *_MASKS.values(), *_FILLERS}:
            return f"Pad or resize it to this size, {others}"
        ways = "tokenizers: padding='max_length', max_length=…"
        graph_length = spec.shape[1] if len(spec.shape) == 2 == array.ndim else None
        is_short = isinstance(graph_length, int) and array.shape[1] < graph_length
        is_tokens = spec.name in _MASKS and _MASKS[spec.name] in {entry.name for entry in self.inputs}
        if is_short and is_tokens:
            ways = f"for short rows, load the model with pad_token_id=…; {ways}"
        return f"Pad or resize it to this size ({ways}), {others}"


_UNUSED_TENSORS = frozenset({"attention_mask", "token_type_ids", "position_ids"})
"""Inputs of a forward that a graph may lack, because the model was exported without them or never reads them."""


def _tokens_beside(name: str) -> str:
    """Return the token input whose positions an input is aligned with."""
    return "decoder_input_ids" if name.startswith("decoder_") else "input_ids"


def _cast_to_graph(array: Array, spec: InputTensorSpec) -> Array:
    """Return the values in the graph's type; kinds of numbers are not mixed.

    Raises:
        UsageError: integers are passed for floats, or floats for integers.
    """
    array = restore_dtype(spec.dtype, array)
    if (array.dtype.kind == "U") != (spec.dtype == "string"):
        raise UsageError(f"input {spec.name!r} is {array_words(array)}, but the model takes {spec.words}")
    if spec.dtype == "string":
        return array
    graph_dtype = numpy_dtype(spec.dtype)
    if array.dtype == graph_dtype:
        return array
    if _is_float(array.dtype) != _is_float(graph_dtype):
        raise UsageError(f"input {spec.name!r} is {array_words(array)}, but the model takes {spec.words}")
    return array.astype(graph_dtype)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind not in "iub"


def _remove_padding(name: str, value: Array, padding: Mapping[str, _Padding]) -> Array:
    """Remove the positions of padding."""
    rank = _PER_TOKEN_RANKS.get(name)
    is_decoded = "decoder_input_ids" in padding and not name.startswith("encoder_")
    sizes = padding.get("decoder_input_ids" if is_decoded else "input_ids")
    if rank is None or sizes is None or value.ndim != rank or value.shape[1] != sizes.graph_length:
        return value
    return np.ascontiguousarray(value[:, : sizes.input_length])


def _choose_other_filler(arrays: Arrays, padding: Mapping[str, _Padding], filler: int | None) -> int:
    """Return a token of the rows that is not the filler; tokens of the rows are certainly in the vocabulary."""
    tokens = (int(token) for name in padding for token in arrays[name].flat if token != filler)
    return next(tokens, 0 if filler else 1)


def _has_no_padding(name: str, value: Array, padding: Mapping[str, _Padding], by_token_only: bool) -> bool:
    """Return True if a truncated output contains no value of padding."""
    if name in _PER_TOKEN_RANKS or name == "pooler_output":
        return not by_token_only or _PER_TOKEN_RANKS.get(name) == value.ndim
    # The token axis of other outputs is unknown; an axis of another length cannot be it.
    return not by_token_only and not {sizes.graph_length for sizes in padding.values()} & set(value.shape[1:])


def _compares_tokens(path: Path, padding: Mapping[str, _Padding]) -> bool:
    """Return True if a graph compares the tokens with something, rather than only looking them up."""
    tokens = set(padding)
    for node in read_structure(path).graph.node:
        if tokens.isdisjoint(node.input):
            continue
        if node.op_type == "Equal":
            return True
        if node.op_type in _TOKEN_COPIES:
            tokens.update(node.output)
    return False


def config_beside(model: Path) -> Any:
    """Return the config in the folder of a model or in its parent; None if there is none."""
    try:
        return open_config(files_folder(model))
    except InputError:
        return None


def pad_token_beside(model: Path, config: Any) -> int | None:
    """Return the token that fills short rows up: the config's, else that of the tokenizer in the folder of a model.

    `None` without a config, without a readable tokenizer, or if neither declares the token.
    """
    pad_token = getattr(config, "pad_token_id", None)
    if pad_token is not None or config is None:
        return pad_token
    try:
        tokenizer = open_processor("tokenizer", files_folder(model), "padding")
    except (InputError, UsageError):
        return None
    token: int | None = tokenizer.pad_token_id
    return token
