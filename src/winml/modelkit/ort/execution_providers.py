"""Table of execution providers: names, devices, options and packages.

Data only: ``devices`` finds the installed providers. No heavy imports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from winml.modelkit.errors import UsageError, opt, spell_flag
from winml.modelkit.metadata_keys import COMPILE_KEY
from winml.modelkit.registries import Registry

Device = Literal["cpu", "gpu", "npu"]


@dataclass(frozen=True)
class ExecutionProvider:
    """One backend of ONNX Runtime."""

    name: str
    """Name in ONNX Runtime."""
    devices: tuple[Device, ...]
    """Kinds of supported processors, the default first."""
    takes_dynamic: bool = True
    """True if it runs, or compiles, graphs with dynamic dimensions; specified by its documentation."""
    device_options: Mapping[Device, tuple[str, str]] = field(default_factory=dict)
    """Name and value of the provider option that selects a device; specified by its documentation."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Platform (``sys.platform``) → requirement of the Python package that contains it, for pip."""
    has_options: bool = True
    """True if it has options."""
    plug_in: str = ""
    """Python module of the package with its plug-in for the installed ONNX Runtime; its ``get_library_path()`` returns
    the path of the library. ``""`` without a plug-in.
    """
    plug_in_devices: str = ""
    """Devices supported by the plug-in, as text; ``""`` if it supports all its kinds."""
    simulates: tuple[Device, ...] = ()
    """Kinds of processors that it simulates on x86-64 if absent; specified by its documentation."""
    simulation_options: Mapping[str, str] = field(default_factory=dict)
    """Options of a simulated processor for questions that name none."""
    simulated_tokens: int | None = None
    """Most tokens for which a simulated processor computes attention like a real one; None without a limit."""
    library: str = ""
    """User-specified path of its plug-in's library; ``""``: the library of ``plug_in``."""
    compiles: bool = False
    """True if it writes its compiled content to a file (``EPContext``); specified by its documentation."""
    node_profile: Mapping[str, str] = field(default_factory=dict)
    """Options to write the time of each compiled node to a file, ``{file}`` for its path; ``{}`` if not supported."""
    node_trace: Mapping[str, str] = field(default_factory=dict)
    """Options to write the source nodes of each operator on the device, and the reasons of unsupported nodes, to a file
    in ``{folder}``; ``{}`` if not supported."""

    def trace_options(self, folder: str | Path) -> dict[str, str]:
        """Return the options to write the trace of a compilation into a folder."""
        return {key: value.format(folder=folder) for key, value in self.node_trace.items()}

    @property
    def has_compiled_form(self) -> bool:
        """True if its compiled content can be stored in a file; for the CPU provider, the optimized graph."""
        return self.compiles or self.name == "CPUExecutionProvider"

    def is_beside(self, package: str) -> bool:
        """Return True if a package is the provider's plug-in; other packages contain a whole ONNX Runtime."""
        return bool(self.plug_in) and package.startswith(self.plug_in.replace("_", "-"))


_BUILT_IN: Mapping[str, ExecutionProvider] = {
    "cpu": ExecutionProvider(
        "CPUExecutionProvider",
        ("cpu",),
        packages={"linux": "onnxruntime", "win32": "onnxruntime", "darwin": "onnxruntime"},
        has_options=False,
    ),
    "cuda": ExecutionProvider(
        "CUDAExecutionProvider", ("gpu",), packages={"linux": "onnxruntime-gpu", "win32": "onnxruntime-gpu"}
    ),
    "tensorrt": ExecutionProvider(
        "TensorrtExecutionProvider",
        ("gpu",),
        packages={"linux": "onnxruntime-gpu", "win32": "onnxruntime-gpu"},
        compiles=True,
    ),
    "nvtensorrtrtx": ExecutionProvider(
        "NvTensorRTRTXExecutionProvider", ("gpu",), packages={"win32": "onnxruntime-trt-rtx"}, compiles=True
    ),
    "dml": ExecutionProvider(
        "DmlExecutionProvider",
        ("gpu", "npu"),
        device_options={"gpu": ("device_filter", "gpu"), "npu": ("device_filter", "npu")},
        packages={"win32": "onnxruntime-directml"},
    ),
    "openvino": ExecutionProvider(
        "OpenVINOExecutionProvider",
        ("cpu", "gpu", "npu"),
        device_options={
            "cpu": ("device_type", "CPU"),
            "gpu": ("device_type", "GPU"),
            "npu": ("device_type", "NPU"),
        },
        packages={"linux": "onnxruntime-openvino", "win32": "onnxruntime-openvino"},
        # For Intel only: the plug-in, which can load its compiled content. The package above cannot on Linux.
        plug_in="onnxruntime_ep_openvino",
        plug_in_devices="Intel's processors",
        compiles=True,
    ),
    "migraphx": ExecutionProvider("MIGraphXExecutionProvider", ("gpu",), packages={"linux": "onnxruntime-migraphx"}),
    "coreml": ExecutionProvider(
        "CoreMLExecutionProvider",
        ("npu", "gpu", "cpu"),
        device_options={
            "cpu": ("MLComputeUnits", "CPUOnly"),
            "gpu": ("MLComputeUnits", "CPUAndGPU"),
            "npu": ("MLComputeUnits", "CPUAndNeuralEngine"),
        },
        packages={"darwin": "onnxruntime"},
    ),
    "webgpu": ExecutionProvider(
        "WebGpuExecutionProvider",
        ("gpu",),
        packages=dict.fromkeys(("linux", "win32", "darwin"), "onnxruntime-ep-webgpu"),
        plug_in="onnxruntime_ep_webgpu",
        plug_in_devices="GPUs, or a graphics driver in software with ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1,",
        simulates=("gpu",),
        # Measured with version 0.4.0 on SwiftShader and llvmpipe: from 32 tokens on, the kernel of fused attention
        # skips keys, since it expects subgroups of 32 lanes; these drivers have 4 and 8.
        simulated_tokens=31,
    ),
    "xnnpack": ExecutionProvider("XnnpackExecutionProvider", ("cpu",)),
    # These compile a graph ahead for a processor with planned memory.
    "qnn": ExecutionProvider(
        "QNNExecutionProvider",
        ("npu", "gpu", "cpu"),
        takes_dynamic=False,
        device_options={
            "cpu": ("backend_type", "cpu"),
            "gpu": ("backend_type", "gpu"),
            "npu": ("backend_type", "htp"),
        },
        # From version 2 on, the package is a plug-in. On x86-64 it compiles for the NPU, and simulates it.
        packages={"linux": "onnxruntime-qnn>=2", "win32": "onnxruntime-qnn>=2"},
        plug_in="onnxruntime_qnn",
        simulates=("npu",),
        # Snapdragon X Elite. Without an option, QNN may choose a processor with too little on-chip memory.
        simulation_options={"soc_model": "60"},
        compiles=True,
        node_profile={"profiling_level": "detailed", "profiling_file_path": "{file}"},
        node_trace={"enable_framework_op_trace": "1", "framework_op_trace_dir": "{folder}"},
    ),
    "vitisai": ExecutionProvider("VitisAIExecutionProvider", ("npu",), takes_dynamic=False, compiles=True),
    "nnapi": ExecutionProvider("NnapiExecutionProvider", ("npu",), takes_dynamic=False),
}


def _find_problem(short: str, provider: ExecutionProvider) -> str:
    """Return the problem of a provider of a plug-in package; ``""`` if it is valid."""
    if short != short.lower():
        return f"short names are of small letters: {short.lower()}"
    if not provider.name.endswith("ExecutionProvider") or any(
        provider.name == built_in.name for built_in in _BUILT_IN.values()
    ):
        return f"its name in ONNX Runtime is {provider.name}; expected one of its own that ends in ExecutionProvider"
    return "" if provider.plug_in else "it names no module with get_library_path() in plug_in"


LIBRARY_VARIABLE = "WINML_EP_LIBRARY"
"""Environment variable with the libraries of plug-ins: ``NAME=PATH``, several separated as in ``PATH``. Inherited by
started processes.
"""
_SUFFIX = "ExecutionProvider"


def _named_libraries() -> dict[str, tuple[str, str]]:
    """Return the libraries listed in the environment: short name → name in ONNX Runtime, and path.

    Raises:
        UsageError: one is not ``NAME=PATH``, is no file, or is for the CPU provider.
    """
    texts = filter(None, os.environ.get(LIBRARY_VARIABLE, "").split(os.pathsep))
    return {short: (name, path) for short, name, path in map(_parse_library, texts)}


def _parse_library(text: str) -> tuple[str, str, str]:
    """Parse and check ``NAME=PATH``; return short name, name in ONNX Runtime, and absolute path.

    Raises:
        UsageError: the text is not ``NAME=PATH``, names no file, or is for the CPU provider.
    """
    name, equals, path = text.partition("=")
    if not equals or not name.strip() or not path.strip():
        raise UsageError(
            f"{opt.ep_library} {text!r}: expected NAME=PATH",
            hint="For example qnn=libonnxruntime_providers_qnn.so. For a provider that winml does not know, use its "
            "name in ONNX Runtime: MyExecutionProvider=PATH.",
        )
    short = name.strip().lower().removesuffix(_SUFFIX.lower())
    if short == "cpu":
        raise UsageError(f"{opt.ep_library} {text}: the CPU provider is part of every ONNX Runtime", hint="Omit it.")
    if not Path(path).is_file():
        raise UsageError(f"{opt.ep_library} {text}: {path} is not a file", hint="Pass the path of the plug-in library.")
    built_in = _BUILT_IN.get(short)
    stem = name.strip()[: -len(_SUFFIX)] if name.strip().lower().endswith(_SUFFIX.lower()) else name.strip()
    return short, f"{stem}{_SUFFIX}" if built_in is None else built_in.name, str(Path(path).absolute())


def add_library(text: str, libraries: str) -> str:
    """Return the value of the environment variable with one more library, which replaces a library of the same name.

    Args:
        text: ``NAME=PATH``.
        libraries: The value so far.

    Raises:
        UsageError: the text is not ``NAME=PATH``, names no file, or is for the CPU provider.
    """
    _, name, path = _parse_library(text)
    return os.pathsep.join(filter(None, (libraries, f"{name}={path}")))


class _Providers(Registry[ExecutionProvider]):
    """Providers of winml and of packages, and providers with a user-specified library."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in _named_libraries()

    def __getitem__(self, name: str) -> ExecutionProvider:
        library = _named_libraries().get(name)
        if library is None:
            return super().__getitem__(name)
        if super().__contains__(name):
            return replace(super().__getitem__(name), library=library[1])
        # The supported devices are unknown until its library is loaded.
        return ExecutionProvider(library[0], get_args(Device), library=library[1], compiles=True)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from (name for name in _named_libraries() if not super(_Providers, self).__contains__(name))


EXECUTION_PROVIDERS: Registry[ExecutionProvider] = _Providers(
    "providers", "execution provider", _BUILT_IN, lambda: ExecutionProvider, _find_problem
)
"""Short name → provider."""


_OTHER_NAMES: Mapping[str, str] = {
    "directml": "dml", "hexagon": "qnn", "htp": "qnn", "ov": "openvino", "ryzenai": "vitisai", "snapdragon": "qnn",
    "trt": "tensorrt",
}  # fmt: skip
"""Name of a device or library → its provider, for a hint."""


def find_execution_provider(name: str) -> ExecutionProvider:
    """Return the provider of a short name (``qnn``) or of ONNX Runtime's (``QNNExecutionProvider``); case is ignored.

    Raises:
        UsageError: no provider has this name; suggests the nearest.
    """
    short = name.lower().removesuffix("executionprovider")
    if short in EXECUTION_PROVIDERS:
        return EXECUTION_PROVIDERS[short]
    from winml.modelkit.options import suggest  # imports pydantic, which the help of a command does not import

    listing = f"Known: {', '.join(EXECUTION_PROVIDERS)}."
    remedy = f"For any other plug-in, pass the library: {opt.ep_library} NAME=PATH."
    raise UsageError(
        f"{opt.ep} {name}: no such execution provider",
        hint=suggest(_OTHER_NAMES.get(short, short), EXECUTION_PROVIDERS, otherwise=listing, also=remedy),
    )


def short_name(name: str) -> str:
    """Return the short name of a provider, or ONNX Runtime's name if no short name exists.

    >>> short_name("CPUExecutionProvider"), short_name("AzureExecutionProvider")
    ('cpu', 'AzureExecutionProvider')
    """
    return next((short for short, provider in EXECUTION_PROVIDERS.items() if provider.name == name), name)


def checked_short_name(name: str | None) -> str | None:
    """Return the short name of a known provider, `None` without a provider; for fields of options.

    Raises:
        UsageError: no provider has this name.
    """
    return None if name is None else short_name(find_execution_provider(name).name)


def library_words(ep: str) -> list[str]:
    """Return the words of a command for the user-specified library of a provider; ``[]`` without a library."""
    short = ep.lower().removesuffix(_SUFFIX.lower())
    library = EXECUTION_PROVIDERS[short].library if short in EXECUTION_PROVIDERS else ""
    return [spell_flag("ep_library"), f"{ep}={library}"] if library else []


def _options_for_compiled(record: str) -> tuple[str, ...]:
    """Return the command options for the provider of a compiled file; ``()`` for other files, and for the CPU provider.

    Args:
        record: Compile metadata of the file (``winml.compile``); ``""``: not compiled.

    >>> _options_for_compiled('{"provider": "QNNExecutionProvider", "device": "npu", "options": {"soc_model": "60"}}')
    ('--ep', 'qnn', '--ep-options', 'soc_model=60')
    """
    from winml.modelkit.options import load_metadata  # imports pydantic, which the help of a command does not import

    try:
        compile_record = load_metadata(record)
        name, device, options = (
            str(compile_record["provider"]),
            compile_record.get("device"),
            dict(compile_record.get("options") or {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()
    short = short_name(name)
    provider = EXECUTION_PROVIDERS.get(short)
    if short == "cpu":
        return ()
    arguments = [spell_flag("ep"), short, *library_words(short)]
    if provider is not None and device in provider.devices[1:]:
        arguments += [spell_flag("device"), str(device)]
    by_device = dict(provider.device_options.values()) if provider is not None else {}
    for key, value in options.items():
        arguments += [] if key in by_device else [spell_flag("ep_options"), f"{key}={value}"]
    return tuple(arguments)


def provider_options_of(path: Path) -> tuple[str, ...]:
    """Return the command options for the provider of a compiled ONNX file; see :func:`_options_for_compiled`.

    Raises:
        WinMLError: the file does not exist, or is no ONNX file.
    """
    from winml.modelkit.onnx.files.reading import read_metadata  # imports onnx

    metadata = read_metadata(path)
    return _options_for_compiled(metadata.get(COMPILE_KEY, ""))


def refuse_dynamic(ep: str | None, *, is_dynamic: bool, allow_dynamic: bool) -> None:
    """Refuse dynamic dimensions if the provider needs fixed sizes.

    Args:
        ep: Name of the provider; None: any.
        is_dynamic: True if a dimension is dynamic.
        allow_dynamic: Accept dynamic dimensions for any provider.

    Raises:
        UsageError: the provider is unknown, or needs fixed sizes.
    """
    if ep is None:
        return
    provider = find_execution_provider(ep)
    if is_dynamic and not provider.takes_dynamic and not allow_dynamic:
        raise UsageError(
            f"{opt.ep} {ep}: {provider.name} requires fixed sizes, but dynamic dimensions were requested",
            hint=f"Omit the dynamic options, or add {opt.allow_dynamic} and fix the sizes later.",
        )


def refuse_uncompilable(ep: str) -> None:
    """Refuse a provider without support for compiled files.

    Raises:
        UsageError: the provider is unknown, or does not support compiled files.
    """
    provider = find_execution_provider(ep)
    if not provider.has_compiled_form:
        raise UsageError(
            f"{opt.ep} {ep}: {provider.name} does not support compiled files",
            hint="Run the file without compiling: the provider compiles it when a session is created. winml compile "
            "--list shows the providers that support compiled files.",
        )


def parse_ep_options(texts: Sequence[str]) -> dict[str, str]:
    """Parse the values of ``--ep-options``, a repeatable option.

    Raises:
        UsageError: a text that is not ``KEY=VALUE``, or a key with two values.
    """
    values: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{opt.ep_options} {text!r}: expected KEY=VALUE", hint="For example device_type=GPU.")
        if values.setdefault(key.strip(), value) != value:
            raise UsageError(
                f"{opt.ep_options}: {key.strip()} has two values, {values[key.strip()]!r} and {value!r}",
                hint="Set it once.",
            )
    return values
