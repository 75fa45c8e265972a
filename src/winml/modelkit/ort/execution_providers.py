"""The table of execution providers: names, devices, options and packages.

Data only: which of them are installed is answered in ``devices``. Imports nothing heavy.
"""

from __future__ import annotations

import os
import shlex
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
    """Its name in ONNX Runtime."""
    devices: tuple[Device, ...]
    """Kinds of processors it runs on, its default first."""
    takes_dynamic: bool = True
    """Whether it runs, or compiles, graphs with dynamic dimensions; specified by its documentation."""
    device_options: Mapping[Device, tuple[str, str]] = field(default_factory=dict)
    """Name and value of the provider option that selects a device; specified by its documentation."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Platform (``sys.platform``) → requirement of the Python package that contains it, for pip."""
    has_options: bool = True
    """Whether it has options of its own."""
    plug_in: str = ""
    """Python module of the package that brings it as a plug-in for the installed ONNX Runtime; its
    ``get_library_path()`` returns the path of the library. Empty where there is none."""
    plug_in_devices: str = ""
    """Which devices alone the plug-in takes, in words; empty where it takes any of its kinds."""
    simulates: tuple[Device, ...] = ()
    """Kinds of processors that it simulates on x86-64 where they are absent; specified by its documentation."""
    library: str = ""
    """Path of the library of its plug-in, as somebody named it; empty: that of ``plug_in``."""
    compiles: bool = False
    """Whether it writes what it compiled into a file (``EPContext``); specified by its documentation."""
    node_profile: Mapping[str, str] = field(default_factory=dict)
    """Options with which it writes the time of each node that it compiled to a file, ``{file}`` in place of its path;
    empty where it has none."""

    @property
    def has_compiled_form(self) -> bool:
        """Whether there is a form for a file of what it compiled; of the CPU provider it is the optimized graph."""
        return self.compiles or self.name == "CPUExecutionProvider"

    def is_beside(self, package: str) -> bool:
        """Say whether a package of it is the plug-in, and stands beside ONNX Runtime; any other one contains it."""
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
        # For Intel alone: the plug-in, which reads back what it compiled. The package above lacks that on Linux.
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
    "webgpu": ExecutionProvider("WebGpuExecutionProvider", ("gpu",)),
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
        compiles=True,
        node_profile={"profiling_level": "detailed", "profiling_file_path": "{file}"},
    ),
    "vitisai": ExecutionProvider("VitisAIExecutionProvider", ("npu",), takes_dynamic=False, compiles=True),
    "nnapi": ExecutionProvider("NnapiExecutionProvider", ("npu",), takes_dynamic=False),
}


def _problem_of(short: str, provider: ExecutionProvider) -> str:
    """Return why a provider of a plug-in package cannot be used; empty where it can."""
    if short != short.lower():
        return f"short names are of small letters: {short.lower()}"
    if not provider.name.endswith("ExecutionProvider") or any(provider.name == own.name for own in _BUILT_IN.values()):
        return f"its name in ONNX Runtime is {provider.name}; expected one of its own that ends in ExecutionProvider"
    return "" if provider.plug_in else "it names no module with get_library_path() in plug_in"


LIBRARY_VARIABLE = "WINML_EP_LIBRARY"
"""Environment variable that names libraries of plug-ins: ``NAME=PATH``, several with the separator of ``PATH`` between
them. Processes that a command starts have them as well."""
_SUFFIX = "ExecutionProvider"


def _named_libraries() -> dict[str, tuple[str, str]]:
    """Return the libraries that the environment names: short name → name in ONNX Runtime, and path.

    Raises:
        UsageError: one is not ``NAME=PATH``, is no file, or is for the CPU provider.
    """
    texts = filter(None, os.environ.get(LIBRARY_VARIABLE, "").split(os.pathsep))
    return {short: (name, path) for short, name, path in map(_read_library, texts)}


def _read_library(text: str) -> tuple[str, str, str]:
    written, equals, path = text.partition("=")
    if not equals or not written.strip() or not path.strip():
        raise UsageError(
            f"{opt.ep_library} {text!r}: expected NAME=PATH",
            hint="For example qnn=libonnxruntime_providers_qnn.so. For a provider that winml does not know, use its "
            "name in ONNX Runtime: MyExecutionProvider=PATH.",
        )
    short = written.strip().lower().removesuffix(_SUFFIX.lower())
    if short == "cpu":
        raise UsageError(f"{opt.ep_library} {text}: the CPU provider is part of every ONNX Runtime", hint="Omit it.")
    if not Path(path).is_file():
        raise UsageError(f"{opt.ep_library} {text}: {path} is not a file", hint="Pass the path of the plug-in library.")
    own = _BUILT_IN.get(short)
    stem = written.strip()[: -len(_SUFFIX)] if written.strip().lower().endswith(_SUFFIX.lower()) else written.strip()
    return short, f"{stem}{_SUFFIX}" if own is None else own.name, str(Path(path).absolute())


def with_library(text: str, libraries: str) -> str:
    """Return the value of the environment variable with one more library, which wins over one of the same name.

    Args:
        text: ``NAME=PATH``.
        libraries: The value so far.

    Raises:
        UsageError: it is not ``NAME=PATH``, is no file, or is for the CPU provider.
    """
    _, name, path = _read_library(text)
    return os.pathsep.join(filter(None, (libraries, f"{name}={path}")))


class _Providers(Registry[ExecutionProvider]):
    """The providers of winml and of packages, and those whose library somebody names."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in _named_libraries()

    def __getitem__(self, name: str) -> ExecutionProvider:
        named = _named_libraries().get(name)
        if named is None:
            return super().__getitem__(name)
        if super().__contains__(name):
            return replace(super().__getitem__(name), library=named[1])
        # Nobody knows what it runs on: its library says it.
        return ExecutionProvider(named[0], get_args(Device), library=named[1], compiles=True)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from (name for name in _named_libraries() if not super(_Providers, self).__contains__(name))


EXECUTION_PROVIDERS: Registry[ExecutionProvider] = _Providers(
    "providers", "execution provider", _BUILT_IN, lambda: ExecutionProvider, _problem_of
)
"""Short name → provider."""


def find_execution_provider(name: str) -> ExecutionProvider:
    """Return the provider of a short name (``qnn``) or of ONNX Runtime's (``QNNExecutionProvider``); case is ignored.

    Raises:
        UsageError: no provider has this name; suggests the nearest.
    """
    short = name.lower().removesuffix("executionprovider")
    if short in EXECUTION_PROVIDERS:
        return EXECUTION_PROVIDERS[short]
    from winml.modelkit.options import nearest  # imports pydantic, which the help of a verb does without

    guess = nearest(short, EXECUTION_PROVIDERS)
    hint = f"Did you mean {guess!r}?" if guess else f"Known: {', '.join(EXECUTION_PROVIDERS)}."
    hint += f" For any other plug-in, pass the library: {opt.ep_library} NAME=PATH."
    raise UsageError(f"{opt.ep} {name}: no such execution provider", hint=hint)


def short_name(name: str) -> str:
    """Return the short name of a provider, or ONNX Runtime's name where it has none.

    >>> short_name("CPUExecutionProvider"), short_name("AzureExecutionProvider")
    ('cpu', 'AzureExecutionProvider')
    """
    return next((short for short, provider in EXECUTION_PROVIDERS.items() if provider.name == name), name)


def _options_for_compiled(record: str) -> str:
    """Return the options that select the provider of a compiled file, as on a command line; empty for any other file.

    Args:
        record: What the file says of its compilation (``winml.compile``); empty: it was not compiled.

    >>> _options_for_compiled('{"provider": "QNNExecutionProvider", "device": "npu", "options": {"soc_model": "60"}}')
    '--ep qnn --ep-options soc_model=60'
    """
    from winml.modelkit.options import load_metadata  # imports pydantic, which the help of a verb does without

    try:
        stated = load_metadata(record)
        name, device, options = str(stated["provider"]), stated.get("device"), dict(stated.get("options") or {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    short = short_name(name)
    provider = EXECUTION_PROVIDERS.get(short)
    if short == "cpu":
        return ""
    words = [spell_flag("ep"), short]
    if provider is not None and provider.library:
        words += [spell_flag("ep_library"), f"{short}={provider.library}"]
    if provider is not None and device in provider.devices[1:]:
        words += [spell_flag("device"), str(device)]
    by_device = dict(provider.device_options.values()) if provider is not None else {}
    for key, value in options.items():
        words += [] if key in by_device else [spell_flag("ep_options"), f"{key}={value}"]
    return shlex.join(words)


def provider_options_of(path: Path) -> str:
    """Return the options that select the provider an ONNX file is compiled for; see :func:`_options_for_compiled`.

    Raises:
        WinMLError: there is no such file, or it is no ONNX file.
    """
    from winml.modelkit.onnx.files.reading import read_structure  # imports onnx

    metadata = {item.key: item.value for item in read_structure(path).metadata_props}
    return _options_for_compiled(metadata.get(COMPILE_KEY, ""))


def refuse_dynamic(ep: str | None, *, is_dynamic: bool, allow_dynamic: bool) -> None:
    """Refuse dynamic dimensions where the provider needs fixed sizes.

    Args:
        ep: Name of the provider; None: any.
        is_dynamic: Whether some dimension is open.
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
    """Refuse to compile for a provider that has no form for a file of what it compiled.

    Raises:
        UsageError: the provider is unknown, or has none.
    """
    provider = find_execution_provider(ep)
    if not provider.has_compiled_form:
        raise UsageError(
            f"{opt.ep} {ep}: {provider.name} does not support compiled files",
            hint="Run the file without compiling: the provider compiles it when a session is created. winml compile "
            "--list shows the providers that support compiled files.",
        )


def parse_ep_options(texts: Sequence[str]) -> dict[str, str]:
    """Read ``--ep-options``, given any number of times.

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
