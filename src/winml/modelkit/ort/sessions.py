"""ONNX Runtime sessions that run on numpy arrays.

All sessions that run a graph are opened here. Also supports ``ml_dtypes.bfloat16``, unlike ONNX Runtime's numpy
interface.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import InputError, StageError, UsageError
from winml.modelkit.file_names import unfinished_data_path
from winml.modelkit.metadata_keys import COMPILE_KEY
from winml.modelkit.onnx.files.output_files import write_error
from winml.modelkit.onnx.files.wire_format import has_half_floats
from winml.modelkit.onnx.specs import stated_bounds
from winml.modelkit.options import load_metadata
from winml.modelkit.ort.adapters import ActiveAdapter
from winml.modelkit.ort.execution_providers import provider_options_of
from winml.modelkit.ort.host import instruction_sets, saturates_integer_sums
from winml.modelkit.ort.ort_values import has_text, object_arrays, to_array, to_feed_objects, to_ort_value
from winml.modelkit.ort.plug_ins import (
    ORT_ERRORS,
    installed_plug_ins,
    missing_kernel_hint,
    named_providers,
    ort_reason,
)
from winml.modelkit.ort.session_settings import SHARE_CONTEXTS, SessionSettings
from winml.modelkit.words import command_line

# Older versions on Windows ignore the environment variable that ort/__init__.py sets.
ort.disable_telemetry_events()

Shape = tuple[int | str | None, ...]
"""Sizes of a value; a dynamic dimension is its name, or None without a name."""

CPU = ("CPUExecutionProvider",)
"""The provider every ONNX Runtime has."""

_EXACT_INTEGER_SUMS = "session.x64quantprecision"
"""Specified: entry of ONNX Runtime's session configuration; takes effect where graphs are optimized when opened."""

_PRODUCT_ACCURACY = "session.qdq_matmulnbits_accuracy_level"
"""Specified: entry of ONNX Runtime's session configuration; ONNX Runtime 1.32 computes products of dequantized weights
with activations that it rounds to 8 bits, unless the entry is 0."""

_UNWRITTEN = ("Failed to write external initializers", "Protobuf serialization failed")
"""Messages of ONNX Runtime if it cannot write the optimized graph."""


class Session:
    """A loaded graph that can be run any number of times."""

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        *,
        providers: Sequence[str] = CPU,
        provider_options: Mapping[str, str] | None = None,
        optimize: bool = True,
        threads: int | None = None,
        profile_prefix: str | os.PathLike[str] | None = None,
        optimized_path: str | os.PathLike[str] | None = None,
        memory_path: str | os.PathLike[str] | None = None,
        data_folder: str | os.PathLike[str] | None = None,
        name: str = "",
        source: Path | None = None,
        prepack: bool = True,
        in_written_order: bool = False,
        adapter: Path | None = None,
        weights: Mapping[str, ort.OrtValue] | None = None,
        folds_constants: bool = True,
        shares_contexts: bool = False,
        as_device: bool = True,
    ) -> None:
        """Load a graph.

        Args:
            model: Path of an ``.onnx`` file, or its bytes.
            providers: Execution providers, the preferred one first.
            provider_options: Options of the preferred provider.
            optimize: Optimize the graph first; False runs it as written, node by node.
            threads: Number of threads per operator; None: ONNX Runtime's default.
            profile_prefix: Record every kernel of every run in a file with this path prefix; see :meth:`end_profile`.
            optimized_path: Write the optimized graph to this file.
            memory_path: Write the memory of each node to this table when the session is closed.
            data_folder: Folder of the data files of a model passed as bytes.
            name: Name of a model passed as bytes, for messages.
            source: File that a model passed as bytes was read from: if loading fails, its data is checked for damage.
            prepack: Store a second copy of weights in the order that kernels read them, which is faster.
            in_written_order: Run nodes in the order of the file, which limits the lifetime of values.
            adapter: File of an adapter that is active in every run except prepared runs; None: the base model runs.
            weights: Name → value of initializers with external data in a model passed as bytes; used without copying
                instead of the data file.
            folds_constants: Fold constants in the optimizer, and hold the results.
            shares_contexts: Share compiled contexts with other sessions of this process.
            as_device: Keep the activations of products with dequantized weights in the precision of the file, as on a
                device; False: round them to 8 bits, as ONNX Runtime's CPU provider does by default, which is faster.

        Raises:
            UsageError: a provider is not part of the installed ONNX Runtime.
            InputError: the file, or one of its data files, is damaged or missing.
            StageError: ONNX Runtime cannot load the graph, or not on the preferred provider; names the file and the
                reason. Or its weights have the layout of another kind of processor.
            WriteError: the optimized graph cannot be written.
        """
        self.name = (name or "the model in memory") if isinstance(model, bytes) else os.fspath(model)
        self.model_path = None if isinstance(model, bytes) else Path(model)
        """The file of the graph; None if the model was passed as bytes."""
        source = self.model_path or source
        self.source_path = source
        """The file that the graph was read from; None for another graph in memory."""
        _refuse_unknown_providers(providers)
        self._adapter = None if adapter is None else ActiveAdapter(adapter)
        self._run_options = None if self._adapter is None else self._adapter.options
        self._weights = dict(weights or {})

        self.check_seconds = 0.0
        """Duration of the crash check, in a different process."""

        def create_session(*, exact_sums: bool) -> ort.InferenceSession:
            """Check the model for crashes, and create a session; ``check_seconds`` grows by the time of the check.

            Raises:
                StageError: ONNX Runtime crashes on the model.
            """
            settings = _make_settings(
                optimize, threads, prepack, in_written_order, data_folder, folds_constants, exact_sums, as_device
            )
            sent = model if isinstance(model, bytes) else os.fspath(model)
            if providers[0] in CPU:
                started = time.perf_counter()
                _refuse_crashing_model(sent, settings, self.name, self._weights)
                self.check_seconds += time.perf_counter() - started
            options = settings.options()
            _request_files(options, profile_prefix, optimized_path, memory_path)
            if shares_contexts:
                options.add_session_config_entry(SHARE_CONTEXTS, "1")
            if self._weights:
                options.add_external_initializers(list(self._weights), list(self._weights.values()))
            return ort.InferenceSession(
                sent,
                sess_options=options,
                **named_providers(options, providers, provider_options or {}),
                # Otherwise ONNX Runtime prints the failure on stdout and continues with another provider.
                enable_fallback=0,
            )

        exact_sums = optimize and optimized_path is None and providers[0] in CPU and saturates_integer_sums()
        try:
            if source is not None and not is_onnxruntime_at_least("1.24"):
                # These versions follow links of data files anywhere.
                _refuse_foreign_data(source)
            try:
                self._session = create_session(exact_sums=exact_sums)
            except ORT_ERRORS as error:
                # ONNX Runtime 1.31 converts a weight shared by nodes to unsigned twice, and fails.
                if not (exact_sums and "AddInitializedOrtValue" in str(error)):
                    raise
                self._session = create_session(exact_sums=False)
        except ORT_ERRORS as error:
            if optimized_path is not None and any(phrase in str(error) for phrase in _UNWRITTEN):
                raise write_error(
                    Path(optimized_path), OSError(errno.ENOSPC, "ONNX Runtime could not write it")
                ) from error
            if source is not None:
                _refuse_foreign_data(source)
            if source is not None and _EP_CONTEXT in str(error):
                _refuse_other_provider(source, self.name)
            raise _loading_error(self.name, error) from error
        _refuse_inactive(providers[0], self._session)
        try:
            inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
            self.metadata = dict(self._session.get_modelmeta().custom_metadata_map)
            """The custom metadata of the file, by key."""
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.name} is damaged: a name or its metadata is not UTF-8 text", hint="Export or download it again."
            ) from error
        _refuse_other_processor(self.name, self.metadata.get(COMPILE_KEY))
        self.inputs: dict[str, str] = {value.name: value.type for value in inputs}
        """Input name → type as ONNX Runtime writes it (``tensor(float)``), in order."""
        # torch names some fixed sizes by their number.
        self.input_shapes: dict[str, Shape] = {
            value.name: tuple(int(size) if str(size).isdigit() else size for size in value.shape) for value in inputs
        }
        self.unranked_inputs = _find_unranked(model, self.input_shapes)
        """Inputs without a declared rank, which ONNX Runtime reports like scalars; they take any shape."""
        self._bounds = stated_bounds(self.metadata)
        self.outputs: tuple[str, ...] = tuple(value.name for value in outputs)
        self._returns_objects = any(not value.type.startswith(("tensor", "optional(tensor")) for value in outputs)
        """True if an output is a sequence or a map, which ONNX Runtime returns as lists and dictionaries."""
        self.output_shapes: dict[str, Shape] = {
            value.name: tuple(value.shape) for value in outputs if value.type.startswith("tensor")
        }
        """Declared or inferred shapes of the outputs that are tensors."""

    def refuse_sizes(self, feeds: Arrays) -> None:
        """Refuse sizes beyond the bounds of the graph, with which outputs may be wrong without an error.

        Raises:
            UsageError: names the dimension and its bounds.
        """
        for name, array in feeds.items() if self._bounds else ():
            for key, size in zip(self.input_shapes.get(name, ()), array.shape, strict=False):
                bounds = self._bounds.get(key) if isinstance(key, str) else None
                if bounds is not None and (refusal := bounds.refusal(size)):
                    raise UsageError(
                        f"{self.name}: input {name}: {refusal}",
                        hint=f"Pass values of one of the sizes {bounds.words}, or export the model with this one.",
                    )

    def run(self, feeds: Arrays, output_names: Sequence[str] | None = None) -> dict[str, Array]:
        """Run the graph once.

        Args:
            feeds: One array per graph input, of its shape and dtype.
            output_names: Graph outputs to compute; None: all outputs.

        Returns:
            One array per graph output, in their order. A sequence of tensors is one array per entry, named
            ``output[0]``, ``output[1]``, …; a sequence of maps is one array of their values, [entries, keys], in the
            order of the keys, and one of the keys.

        Raises:
            UsageError: the names do not match the graph's inputs, or a size is beyond the bounds stated in the file.
            StageError: ONNX Runtime refuses the values or fails; states the reason.
        """
        return self._run_values(feeds, {}, self.outputs if output_names is None else output_names, ())[0]

    def run_with_states(
        self, feeds: Arrays, states: Mapping[str, ort.OrtValue], resident_outputs: Collection[str]
    ) -> tuple[dict[str, Array], dict[str, ort.OrtValue]]:
        """Run the graph once on arrays and on values of earlier runs, without copying the values.

        Args:
            feeds: An array for each graph input that is no state.
            states: Values of earlier runs by graph input.
            resident_outputs: Graph outputs that stay in ONNX Runtime's memory.

        Returns:
            The other outputs as arrays, and the retained outputs, by name.

        Raises:
            UsageError: the names do not match the graph's inputs.
            StageError: ONNX Runtime refuses the values or fails; states the reason.
        """
        return self._run_values(feeds, states, self.outputs, resident_outputs)

    def _run_values(
        self,
        feeds: Arrays,
        states: Mapping[str, ort.OrtValue],
        output_names: Sequence[str],
        resident_outputs: Collection[str],
    ) -> tuple[dict[str, Array], dict[str, ort.OrtValue]]:
        """Run once; return all outputs except ``resident_outputs`` as arrays, and the resident outputs as values.

        Args:
            feeds: Input → array.
            states: Input → value in ONNX Runtime's memory.
            output_names: Outputs to compute.
            resident_outputs: Outputs that stay in ONNX Runtime's memory.

        Raises:
            UsageError: the names do not match the graph's inputs, or a size is beyond the stated bounds.
            StageError: ONNX Runtime refuses the values or fails.
        """
        names = (*feeds, *states)
        if set(names) != set(self.inputs):
            raise UsageError(
                f"{self.name} takes {', '.join(self.inputs) or 'no inputs'}; got {', '.join(names) or 'none'}"
            )
        self.refuse_sizes(feeds)
        with _run_errors(self.name):
            if self._returns_objects or has_text(feeds):
                objects = self._session.run(list(output_names), {**to_feed_objects(feeds), **states}, self._run_options)
                return dict(object_arrays(zip(output_names, objects, strict=True))), {}
            values = {**{name: to_ort_value(array) for name, array in feeds.items()}, **states}
            outputs = self._compute(output_names, values, resident_outputs)
            values_by_name = dict(zip(output_names, outputs, strict=True))
            arrays = {name: to_array(value) for name, value in values_by_name.items() if name not in resident_outputs}
            return arrays, {name: value for name, value in values_by_name.items() if name in resident_outputs}

    def _compute(
        self, output_names: Sequence[str], values: Mapping[str, ort.OrtValue], resident_outputs: Collection[str]
    ) -> Sequence[ort.OrtValue]:
        """Run once; outputs that stay in ONNX Runtime's memory stay on their device.

        Args:
            output_names: Outputs to compute.
            values: Input → value.
            resident_outputs: Outputs that are passed to later runs.
        """
        resident = self._device_outputs.intersection(resident_outputs)
        # ONNX Runtime does not pass the values of an adapter to a run with bound values.
        if not resident or self._adapter is not None:
            outputs: Sequence[ort.OrtValue] = self._session.run_with_ort_values(
                list(output_names), dict(values), self._run_options
            )
            return outputs
        binding = self._session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in output_names:
            binding.bind_output(name, _RESIDENT_MEMORY if name in resident else "cpu")
        self._session.run_with_iobinding(binding)
        return list(binding.get_outputs())

    @functools.cached_property
    def _device_outputs(self) -> frozenset[str]:
        """Names of the outputs that may stay in device memory; :func:`to_array` reads no bfloat16 from there."""
        memory = _output_memory(self._session)
        outputs = (value.name for value in self._session.get_outputs() if value.type != "tensor(bfloat16)")
        return frozenset(name for name in outputs if memory[name] == _RESIDENT_MEMORY)

    @property
    def takes_states_in_place(self) -> bool:
        """True if :class:`InPlaceRun` may be used: all values are in the memory of the CPU, and no adapter is active.

        ONNX Runtime does not pass the values of an adapter to a run with bound values.
        """
        providers: list[str] = self._session.get_providers()
        return providers == list(CPU) and self._adapter is None

    def prepare(self, feeds: Arrays, *, io_binding: bool = True) -> PreparedRun:
        """Prepare a repeatable run on fixed values.

        Args:
            feeds: One array per graph input, of its shape and dtype.
            io_binding: Copy inputs to the device once, and leave outputs there; False passes arrays in each run and
                gets arrays back, as :meth:`run` does.

        Raises:
            UsageError: a size is beyond the bounds stated in the file.
            StageError: ONNX Runtime refuses the values.
        """
        self.refuse_sizes(feeds)
        return PreparedRun(self._session, self.name, feeds, io_binding=io_binding)

    def end_profile(self) -> Path:
        """Stop recording and return the file that was written; only with ``profile_prefix``."""
        return Path(self._session.end_profiling())


class InPlaceRun:
    """A run with states changed in place, repeatable with other inputs.

    States are bound once: their memory is neither reallocated nor copied in a step.
    """

    def __init__(self, session: Session, states: Mapping[str, ort.OrtValue], outputs: Mapping[str, str]) -> None:
        """Bind the states.

        Args:
            session: A session with :attr:`Session.takes_states_in_place`.
            states: The memory by graph input; changed by every run.
            outputs: Graph input → output that is its next value.

        Raises:
            StageError: ONNX Runtime refuses the values.
        """
        self._session = session
        bound = {outputs[state] for state in states}
        self._others = [name for name in session.outputs if name not in bound]
        self._fed: dict[str, Array] = {}
        with _run_errors(session.name):
            self._binding = session._session.io_binding()
            self._bind_outputs()  # first, so that their values come first
            for state, value in states.items():
                self._binding.bind_ortvalue_input(state, value)
                self._binding.bind_ortvalue_output(outputs[state], value)

    def _bind_outputs(self) -> None:
        """Bind the outputs other than states to new memory."""
        for name in self._others:
            self._binding.bind_output(name, "cpu")

    def __call__(self, feeds: Arrays, like: Mapping[str, Array] = {}) -> dict[str, Array]:
        """Run once.

        Args:
            feeds: An array for each graph input that is no state; an array of the run before stays bound.
            like: Outputs of an earlier run with the same sizes and types; binding outputs of unknown sizes takes 0.1 ms
                for 12 layers (measured).

        Returns:
            The outputs except states; never the arrays of an earlier run.

        Raises:
            UsageError: a size is beyond the bounds stated in the file.
            StageError: ONNX Runtime refuses the values or fails; states the reason.
        """
        self._session.refuse_sizes(feeds)
        with _run_errors(self._session.name):
            # Bound again: otherwise a run writes into the outputs of the run before, which a caller may hold.
            arrays = {name: np.empty_like(like[name]) for name in self._others if name in like}
            if len(arrays) < len(self._others):
                self._bind_outputs()
            for name, array in arrays.items():
                self._binding.bind_ortvalue_output(name, to_ort_value(array))
            for name, array in feeds.items():
                if self._fed.get(name) is not array:
                    # ONNX Runtime refers to the memory of the array, which is kept here, and reads it in every run.
                    self._fed[name] = np.ascontiguousarray(array)
                    self._binding.bind_ortvalue_input(name, to_ort_value(self._fed[name]))
            self._session._session.run_with_iobinding(self._binding, self._session._run_options)
            if len(arrays) == len(self._others):
                return arrays
            outputs = self._binding.get_outputs()[: len(self._others)]
            return {name: to_array(value) for name, value in zip(self._others, outputs, strict=True)}


_OTHER_SHAPE = "Got invalid dimensions for output"
"""Message of ONNX Runtime for output memory whose shape differs from the declared shape."""


class PreparedRun:
    """A repeatable run: inputs are bound once, and outputs stay in the memory where they are computed.

    Calling it adds 4 µs to the time of the graph on the CPU (measured); passing OrtValues in each run adds 36.

    Attributes:
        is_bound: False if arrays are passed in each run, which string inputs require.
        output_memory: Kinds of memory that hold the outputs: ``cpu``, ``cuda``, ``dml``, ``webgpu``.
    """

    def __init__(self, session: ort.InferenceSession, name: str, feeds: Arrays, *, io_binding: bool) -> None:
        """Bind the values; use :meth:`Session.prepare`."""
        self._session, self._name = session, name
        takes_text = has_text(feeds)
        self.is_bound = io_binding and not takes_text
        self._output_names = [value.name for value in session.get_outputs()]
        memory = _output_memory(session) if self.is_bound else dict.fromkeys(self._output_names, "cpu")
        self.output_memory: tuple[str, ...] = tuple(sorted(set(memory.values())))
        self._run_outputs: Sequence[Any] = []
        self._run_once: Callable[[], Any]
        if not self.is_bound:
            run_arrays = session.run if takes_text else functools.partial(_run_on_arrays, session)
            self._run_once = lambda: run_arrays(self._output_names, dict(feeds))
            return
        with _run_errors(name):
            # These refer to the arrays, which have to stay.
            self._values = {input_name: to_ort_value(array) for input_name, array in feeds.items()}
            self._binding = self._bind_values(memory)
        self._memory = memory
        self._run_once = self._run_on_last_outputs

    def __call__(self) -> None:
        """Run once.

        Raises:
            StageError: ONNX Runtime refuses the values, or fails; states the reason.
        """
        try:  # no context manager, whose time would be measured with that of the graph
            self._run_outputs = self._run_once()
        except ORT_ERRORS as error:
            raise _run_error(self._name, error) from error

    def outputs(self) -> dict[str, Array | None]:
        """Return the outputs of the last run by name; `None` for an output other than a numeric tensor.

        Outputs in device memory are computed by an additional run, whose outputs are copied.

        Raises:
            StageError: the additional run fails.
        """
        values = self._run_outputs if not self.is_bound else self._bound_outputs()
        arrays = [value if isinstance(value, np.ndarray) else None for value in values]
        return {
            name: None if array is None or array.dtype.kind in "USO" else array
            for name, array in zip(self._output_names, arrays, strict=True)
        }

    def _run_on_last_outputs(self) -> None:
        """Run into the memory of the last outputs; after an unexpected shape, switch to new memory for good."""
        try:
            self._session.run_with_iobinding(self._binding)
        except ORT_ERRORS as error:
            if _OTHER_SHAPE not in str(error):
                raise
            # The declared shape differs from the computed shape, and bound memory must have the declared shape.
            self._run_once = self._run_on_new_outputs
            self._run_on_new_outputs()

    def _run_on_new_outputs(self) -> None:
        """Run into new memory of the declared kinds."""
        self._binding.clear_binding_outputs()
        for name, kind in self._memory.items():
            self._binding.bind_output(name, kind)
        self._session.run_with_iobinding(self._binding)

    def _bind_values(self, memory: Mapping[str, str]) -> ort.IOBinding:
        """Bind the inputs, copied to their device, and each output to a kind of memory."""
        binding = self._session.io_binding()
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
        for name, kind in memory.items():
            binding.bind_output(name, kind)
        return binding

    def _bound_outputs(self) -> list[Array | None]:
        """Return the outputs as arrays; outputs in device memory are computed again on the CPU side."""
        binding = self._binding
        if self.output_memory != ("cpu",):
            with _run_errors(self._name):
                binding = self._bind_values(dict.fromkeys(self._output_names, "cpu"))
                self._session.run_with_iobinding(binding)
        return [to_array(value) if value.is_tensor() else None for value in binding.get_outputs()]


@contextmanager
def _run_errors(name: str) -> Iterator[None]:
    """Replace an error of ONNX Runtime in the block by a StageError that names the graph."""
    try:
        yield
    except ORT_ERRORS as error:
        raise _run_error(name, error) from error


def _run_error(name: str, error: Exception) -> StageError:
    return StageError(f"ONNX Runtime cannot run {name}: {ort_reason(error)}")


_RESIDENT_MEMORY = "webgpu"
"""Kind of memory in which states of a decoder stay from run to run. Chosen: tests read it back."""
_DEVICE_MEMORY = {"Cuda": "cuda", "DML": "dml", "WebGPU_Buf": "webgpu", "WebGPU_Buffer": "webgpu"}
"""Specified by ONNX Runtime: a provider's name of its device memory → the device kind for output binding."""


def _output_memory(session: ort.InferenceSession) -> dict[str, str]:
    """Return the kind of memory of each output of a session; ``cpu`` for unsupported kinds."""
    names = [output.name for output in session.get_outputs()]
    if not hasattr(session, "get_output_memory_infos"):  # before 1.24
        return dict.fromkeys(names, "cpu")
    infos = session.get_output_memory_infos()
    return {name: _DEVICE_MEMORY.get(info.name, "cpu") for name, info in zip(names, infos, strict=True)}


def _run_on_arrays(session: ort.InferenceSession, names: list[str], feeds: Arrays) -> list[Array | None]:
    """Run once; return an array per output, `None` for an output other than a tensor."""
    values = session.run_with_ort_values(names, {name: to_ort_value(array) for name, array in feeds.items()})
    return [to_array(value) if value.is_tensor() else None for value in values]


def onnxruntime_version() -> str:
    """Return the version of the installed ONNX Runtime."""
    return str(ort.__version__)


def _refuse_foreign_data(source: Path) -> None:
    """Raise an error if a file, or one of its data files, is damaged, missing or outside its folder."""
    from winml.modelkit.onnx.files.placing import external_files  # imports onnx

    external_files(source)


def is_onnxruntime_at_least(version: str) -> bool:
    """Return True if the installed ONNX Runtime is this version or newer, such as ``1.24``."""
    installed, needed = (tuple(map(int, text.split(".")[:2])) for text in (onnxruntime_version(), version))
    return installed >= needed


def _make_settings(
    optimize: bool,
    threads: int | None,
    prepack: bool,
    in_written_order: bool,
    data_folder: str | os.PathLike[str] | None,
    folds_constants: bool,
    exact_sums: bool,
    as_device: bool,
) -> SessionSettings:
    """Return the settings of a session for its options."""
    entries: dict[str, str] = {}
    if not (optimize and prepack):
        # Weights laid out for this processor are a second copy, which pays off after many runs only.
        entries["session.disable_prepacking"] = "1"
    if data_folder is not None:
        entries["session.model_external_initializers_file_folder_path"] = str(Path(data_folder).absolute())
    if not folds_constants:
        entries["optimization.disable_specified_optimizers"] = "ConstantFolding"
    if exact_sums:
        # Signed weights are converted to unsigned when the file is opened; their sums are exact on any processor.
        entries[_EXACT_INTEGER_SUMS] = "1"
    if optimize and as_device:
        # Measured on MiniLM in w8a16: 30.6 dB instead of 28.6, in 73 ms instead of 30.
        entries[_PRODUCT_ACCURACY] = "0"
    return SessionSettings("ORT_ENABLE_ALL" if optimize else "ORT_DISABLE_ALL", entries, threads, in_written_order)


def _refuse_crashing_model(
    model: str | bytes, settings: SessionSettings, name: str, weights: Mapping[str, ort.OrtValue] = {}
) -> None:
    """Refuse a model that crashes ONNX Runtime; only models with 16-bit floats are checked.

    Raises:
        StageError: ONNX Runtime crashes.
    """
    if settings.level != "ORT_DISABLE_ALL" and has_half_floats(model):
        from winml.modelkit.ort.crash_check import refuse_crashing_model

        refuse_crashing_model(model, settings, name, weights)


def refuse_crashing_file(path: Path) -> None:
    """Refuse a file that crashes ONNX Runtime when opened with default settings, if the file is of an affected kind.

    Raises:
        StageError: ONNX Runtime crashes.
    """
    _refuse_crashing_model(os.fspath(path), SessionSettings(), str(path))


def _request_files(
    options: ort.SessionOptions,
    profile_prefix: str | os.PathLike[str] | None,
    optimized_path: str | os.PathLike[str] | None,
    memory_path: str | os.PathLike[str] | None,
) -> None:
    """Set the files that a session writes, in place."""
    if memory_path is not None:
        options.add_session_config_entry("session.collect_node_memory_stats_to_file", os.fspath(memory_path))
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(profile_prefix)
    if optimized_path is not None:
        options.optimized_model_filepath = os.fspath(optimized_path)
        # One file could not hold more than 2 GB of weights.
        data_name = unfinished_data_path(Path(optimized_path)).name
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", data_name)


def _refuse_unknown_providers(providers: Sequence[str]) -> None:
    """Refuse providers outside the installed ONNX Runtime.

    Raises:
        UsageError: the hint lists the available providers.
    """
    available = (*ort.get_available_providers(), *installed_plug_ins())
    if unknown := [name for name in providers if name not in available]:
        raise UsageError(
            f"execution provider {unknown[0]} is not part of the installed ONNX Runtime",
            hint=f"Available: {', '.join(available)}.",
        )


def _find_unranked(model: str | os.PathLike[str] | bytes, shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Return the inputs whose rank a model does not declare.

    Args:
        model: Path of a file, or the bytes of a model.
        shapes: Input → shape as ONNX Runtime reports it; the model is read only if one is empty.
    """
    is_onnx = isinstance(model, bytes) or Path(model).suffix.lower() == ".onnx"
    if all(shapes.values()) or not is_onnx:
        return frozenset()
    import onnx  # late: few graphs have inputs without sizes

    from winml.modelkit.onnx.files.reading import read_structure

    read = onnx.ModelProto.FromString(model) if isinstance(model, bytes) else read_structure(Path(model))
    return frozenset(
        value.name
        for value in read.graph.input
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    )


def _refuse_inactive(provider: str, session: ort.InferenceSession) -> None:
    """Refuse a session without the preferred provider, replaced by ONNX Runtime.

    Raises:
        StageError: names the provider.
    """
    if provider not in (active := session.get_providers()):
        raise StageError(
            f"{provider} is installed but cannot be initialized; ONNX Runtime would use {', '.join(active)}",
            hint="Its driver or a vendor library is missing, or too old for this ONNX Runtime.",
        )


def _refuse_other_processor(name: str, reported: str | None) -> None:
    """Refuse a file with a weight layout for another vector width: ONNX Runtime would read wrong values.

    Raises:
        StageError: names both vector widths.
    """
    try:
        opened_for = load_metadata(reported or "{}").get("processor")
    except (ValueError, AttributeError):
        return  # the metadata is damaged
    if opened_for and opened_for != (here := instruction_sets()):
        raise StageError(
            f"{name} is compiled for {opened_for}, but this processor is {here}",
            hint="Compile its source file again on this machine: winml compile --ep cpu.",
        )


_EP_CONTEXT = "EPContext"
"""Specified by ONNX Runtime: operator of compiled content, named in errors of providers."""


def _refuse_other_provider(source: Path, name: str) -> None:
    """Refuse a file compiled for a provider outside the session.

    Raises:
        StageError: names the provider and the options that select it.
    """
    if options := provider_options_of(source):
        raise StageError(
            f"{name} is compiled for another execution provider",
            hint=f"winml run, perf, eval and generate run it with {command_line(options)}.",
        )


_DATA_LIMIT_BYTES = 1024
"""Initializers from this size on are written to the data file. Chosen: shapes and scalars stay in the graph."""


def rewrite_file(
    original: Path,
    target: Path,
    *,
    disabled: Iterable[str],
    with_layouts: bool = False,
    config: Mapping[str, str] | None = None,
) -> None:
    """Write the optimized graph of ONNX Runtime's CPU provider for ``original``.

    Weights are written to ``<target>.data``, so that models of any size can be written.

    Args:
        original: An ONNX file, with its data files in the same folder.
        target: The file to write, in the same folder.
        disabled: Graph transformers and rewrite rules that must not run.
        with_layouts: Also run transformers that choose layouts for this machine's processor.
        config: Further entries of the session's configuration.

    Raises:
        StageError: ONNX Runtime cannot load the graph; gives its reason.
    """
    entries = {
        "session.optimized_model_external_initializers_file_name": unfinished_data_path(target).name,
        "session.optimized_model_external_initializers_min_size_in_bytes": str(_DATA_LIMIT_BYTES),
        # The session never runs, so packed copies of the weights are not needed.
        "session.disable_prepacking": "1",
        "optimization.disable_specified_optimizers": ";".join(sorted(disabled)),
        **(config or {}),
    }
    settings = SessionSettings("ORT_ENABLE_ALL" if with_layouts else "ORT_ENABLE_EXTENDED", entries)
    _refuse_crashing_model(str(original), settings, "the graph")
    options = settings.options()
    options.optimized_model_filepath = str(target)
    try:
        ort.InferenceSession(str(original), sess_options=options, providers=list(CPU))
    except ORT_ERRORS as error:
        raise _loading_error("the graph", error) from error


def _loading_error(name: str, error: Exception) -> StageError:
    reason = ort_reason(error)
    return StageError(f"ONNX Runtime cannot load {name}: {reason}", hint=missing_kernel_hint(reason))
