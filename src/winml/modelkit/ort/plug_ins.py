"""Registration of execution providers in separate packages, as plug-ins of the installed ONNX Runtime.

A plug-in is a library, registered once in a process; it then offers its devices. ``execution_providers`` maps
providers to packages; ``devices`` chooses the provider of a graph.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from winml.modelkit.errors import StageError, UsageError, first_line, opt
from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS, ExecutionProvider
from winml.modelkit.ort.host import is_x86

ORT_ERRORS: tuple[type[Exception], ...] = (
    # These have no common base class; the Python binding itself raises RuntimeError and ValueError.
    *(value for value in vars(ort_errors).values() if isinstance(value, type) and issubclass(value, Exception)),
    RuntimeError,
    ValueError,
)
"""The exceptions that ONNX Runtime raises."""


def ort_reason(error: Exception) -> str:
    """Return the reason in an error of ONNX Runtime, without error codes and source locations."""
    # "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from ... failed": the first three fields are codes.
    reason = first_line(error).rpartition("[ONNXRuntimeError] : ")[2].split(" : ", 2)[-1]
    return _NODE_FAILED.sub(_node_words, _SOURCE_LOCATION.sub("", reason))


def missing_kernel_hint(reason: str) -> str:
    """Return a remedy if ONNX Runtime has no kernel for an operator; ``""`` for another reason."""
    if "is not a registered function/op" in reason:
        return f"Name the library of the operator with {opt.custom_ops}."
    if "Could not find an implementation" not in reason:
        return ""
    if _is_of_unsupported_opset(reason):
        from winml.modelkit.onnx.validity import OLDEST_OPSET  # imports onnx

        return (
            f"ONNX Runtime runs opsets from {OLDEST_OPSET} on: convert the file with winml optimize --opset "
            f"{_RECOMMENDED_OPSET}."
        )
    return (
        f"The provider has no kernel of this operator for its dtype. Export a model in 16 bits with {opt.dtype} fp32."
    )


def _is_of_unsupported_opset(reason: str) -> bool:
    """Return True if the operator without a kernel was replaced by another version in an opset that has kernels."""
    if (match := _MISSING_KERNEL.search(reason)) is None:
        return False
    import onnx

    from winml.modelkit.onnx.validity import OLDEST_OPSET

    try:
        newer = onnx.defs.get_schema(match[1], OLDEST_OPSET)
    except onnx.defs.SchemaError:  # an operator of another domain
        return False
    return int(match[2]) < newer.since_version


_RECOMMENDED_OPSET = 17
"""Chosen: as the exports of winml."""
_MISSING_KERNEL = re.compile(r"Could not find an implementation for (\w+)\((\d+)\)")
"""Format of ONNX Runtime's message with the operator and its version."""


def _node_words(match: re.Match[str]) -> str:
    """Describe a failed node: name, operator and reason."""
    operator, name, reason = match.groups()
    return f"node {name or 'without a name'} ({operator}): {reason}"


def failed_node(reason: str) -> str:
    """Return the name of the node in a reason of :func:`ort_reason`; ``""`` without a node."""
    match = _FAILED_NODE.search(reason)
    return match[1] if match is not None else ""


_FAILED_NODE = re.compile(r"\bnode (?!without a name )(.+?) \(\w+\): ")
"""Format of the node's name in :func:`_node_words`."""

_NODE_FAILED = re.compile(
    r"(?:Error in execution: )?Non-zero status code returned while running (\w+) node\. Name:'(.*?)' "
    r"Status Message: (?:[^.]+ was false\. )?(.*)",
    re.DOTALL,
)
"""Start of ONNX Runtime's message if a node refuses its values; the C++ condition adds no information."""


_SOURCE_LOCATION = re.compile(
    r"/\S+\.(?:cc|cpp|h|hpp):\d+ [^()]*(?:\((?:[^()]|\([^()]*\))*\))+(?: const)?(?: \[with [^\]]*\])?"
    r"(?:::<lambda\(\)>)? (?:.{1,200}? was false\. )?"
)
"""Location of an error in ONNX Runtime's own source: a path of its build machine, a signature, and a C++ condition."""


def installed_plug_ins() -> tuple[str, ...]:
    """Return the names of the providers installed as plug-ins, without loading the plug-ins.

    Providers contained in the installed ONNX Runtime are excluded.
    """
    # ONNX Runtime also lists registered plug-ins as available; their devices state a library.
    registered = {device.ep_name for device in ort.get_ep_devices() if "library_path" in device.ep_metadata}
    contained = set(ort.get_available_providers()) - registered
    return tuple(
        provider.name
        for provider in EXECUTION_PROVIDERS.values()
        if provider.library
        or (
            provider.plug_in
            and provider.name not in contained
            and importlib.util.find_spec(provider.plug_in) is not None
        )
    )


def _register_plug_in(provider: ExecutionProvider) -> None:
    """Register the plug-in of a provider with ONNX Runtime, once in a process.

    Raises:
        StageError: its package is damaged, or ONNX Runtime cannot load its library, such as a library for another
            version.
        UsageError: a user-specified library belongs to another provider.
    """
    if not provider.library:
        _register_package(provider.name, provider.plug_in)
        return
    register_library(provider.name, Path(provider.library))
    offered = {device.ep_name for device in ort.get_ep_devices() if _comes_from(device, provider.library)}
    if offered and provider.name not in offered:
        offered_words = ", ".join(sorted(offered))
        raise UsageError(
            f"{opt.ep_library}: {Path(provider.library).name} contains {offered_words}, not {provider.name}",
            hint=f"Use {opt.ep_library} {min(offered)}={provider.library} {opt.ep} {min(offered)}.",
        )


def refuse_misspelled_options(provider: ExecutionProvider, options: Mapping[str, str]) -> None:
    """Refuse options unknown to a plug-in whose library contains a similar name.

    A library holds the names of its options as text. Many plug-ins, such as QNN's, ignore unknown names. A name without
    a similar name is passed on: the library may compose names at run time.

    Args:
        provider: The provider, with its plug-in registered.
        options: The user's options, by name.

    Raises:
        UsageError: an option is misspelled; names the nearest.
    """
    paths = {
        device.ep_metadata.get("library_path") for device in ort.get_ep_devices() if device.ep_name == provider.name
    }
    path = next((Path(path) for path in paths if path), None)
    if not options or path is None or not path.is_file():
        return
    library = path.read_bytes()
    for key in options:
        if key.encode() in library or key.encode("utf-16-le") in library:
            continue
        names = {match.decode() for match in re.findall(rb"(?<![\w])[A-Za-z][A-Za-z0-9_]{3,48}(?![\w])", library)}
        if close := difflib.get_close_matches(key, names, n=1, cutoff=_MISSPELLED):
            raise UsageError(
                f"{opt.ep_options} {key}={options[key]}: {path.name} has no such option",
                hint=f"Did you mean {close[0]}? The documentation of {provider.name} lists its options.",
            )


_MISSPELLED = 0.8
"""Minimum similarity to report a name as misspelled. Chosen: one or two letters of ten."""


def library_version(provider: ExecutionProvider) -> str:
    """Return the version stated by a user-specified library; ``unknown`` before it is registered."""
    devices = (device for device in ort.get_ep_devices() if _comes_from(device, provider.library))
    return next((device.ep_metadata.get("version", "unknown") for device in devices), "unknown")


def device_kinds(provider: ExecutionProvider) -> list[str]:
    """Return the kinds of the devices that a plug-in finds on this machine, in its order."""
    _register_plug_in(provider)
    return list(dict.fromkeys(map(_kind_of, _devices_of(provider.name))))


def _comes_from(device: ort.OrtEpDevice, library: str) -> bool:
    """Return True if a device belongs to the plug-in in a library."""
    return Path(device.ep_metadata.get("library_path", "")) == Path(library)


@functools.cache
def _register_package(name: str, module: str) -> None:
    """Register the library in the package of a plug-in, once in a process.

    Raises:
        StageError: the package cannot be imported, or ONNX Runtime cannot load the library.
    """
    try:
        library = Path(importlib.import_module(module).get_library_path())
    except (ImportError, AttributeError) as error:
        raise StageError(
            f"package {module}, which contains {name}, cannot be imported: {first_line(error)}",
            hint="Reinstall it in a version for the installed ONNX Runtime.",
        ) from error
    register_library(name, library)


def register_library(name: str, library: Path) -> None:
    """Register a library as the plug-in of a provider, unless the calling program has registered one.

    Raises:
        StageError: the installed ONNX Runtime cannot load it as a plug-in.
    """
    if _devices_of(name):
        return
    try:
        ort.register_execution_provider_library(name, str(library))
    except ORT_ERRORS as error:
        raise StageError(
            f"ONNX Runtime {ort.__version__} cannot load {library.name} as the plug-in of {name}: {ort_reason(error)}",
            hint="It may be for a different version of ONNX Runtime or a different processor; winml sys shows what "
            "is installed.",
        ) from error


def _add_plug_in(options: ort.SessionOptions, name: str, provider_options: Mapping[str, str]) -> None:
    """Add the device of a plug-in that fits its options to the options of a session, in place.

    Args:
        options: Options of the session.
        name: Name of the provider in ONNX Runtime.
        provider_options: Options of the provider.

    Raises:
        UsageError: the plug-in does not find the device on this machine, or refuses an option.
        StageError: its plug-in cannot be loaded.
    """
    provider = next(candidate for candidate in EXECUTION_PROVIDERS.values() if candidate.name == name)
    _register_plug_in(provider)
    devices = _devices_of(name)
    kind = fitting_kind(provider, list(map(_kind_of, devices)), provider_options)
    device = next(device for device in devices if _kind_of(device) == kind)
    try:
        options.add_provider_for_devices([device], dict(provider_options))
    except ORT_ERRORS as error:
        raise UsageError(f"{name} does not accept {dict(provider_options)}: {ort_reason(error)}") from error


def named_providers(
    options: ort.SessionOptions, providers: Sequence[str], provider_options: Mapping[str, str]
) -> dict[str, object]:
    """Return the session arguments with the providers; for a plug-in, add its device to ``options`` instead, in place.

    Raises:
        UsageError: the plug-in finds no device, or refuses an option.
        StageError: the plug-in cannot be loaded.
    """
    if providers[0] not in installed_plug_ins():
        return {
            "providers": list(providers),
            "provider_options": [dict(provider_options), *({} for _ in providers[1:])],
        }
    _add_plug_in(options, providers[0], provider_options)
    return {}  # nodes unsupported by the plug-in run on the CPU provider implicitly


def stand_in_kind(provider: ExecutionProvider, options: Mapping[str, str]) -> str:
    """Return the kind of device on which a plug-in simulates the selected device; ``""`` without simulation.

    Raises:
        UsageError: the plug-in does not find the device on this machine.
        StageError: its plug-in cannot be loaded.
    """
    _register_plug_in(provider)
    kind = fitting_kind(provider, list(map(_kind_of, _devices_of(provider.name))), options)
    selected = _selected_kinds(provider, options) or set(provider.simulates).intersection(provider.devices[:1])
    return kind if selected and kind not in selected else ""


def fitting_kind(provider: ExecutionProvider, present: Sequence[str], options: Mapping[str, str]) -> str:
    """Choose the kind of device.

    Args:
        provider: A plug-in.
        present: Kinds of devices found on this machine.
        options: Options of the plug-in, which may select a kind.

    Raises:
        UsageError: no device is found, or the selected device is neither found nor simulated.
    """
    if not present:
        supported = f"Its plug-in supports {provider.plug_in_devices} only. " if provider.plug_in_devices else ""
        raise UsageError(
            f"{provider.name} finds no supported device on this machine",
            hint=f"{supported}winml sys lists the devices of every provider.",
        )
    selected = _selected_kinds(provider, options)
    if fitting := next((kind for kind in present if kind in selected), ""):
        return fitting
    if not selected or (is_x86() and selected <= set(provider.simulates)):
        return present[0]
    raise UsageError(
        f"{provider.name} finds no {' or '.join(sorted(selected))} on this machine, which has {', '.join(present)}",
        hint=f"Choose an available device with {opt.device}; winml sys lists the devices of every provider.",
    )


def _selected_kinds(provider: ExecutionProvider, options: Mapping[str, str]) -> set[str]:
    """Return the kinds of device selected by options; empty without such an option."""
    return {kind for kind, (key, value) in provider.device_options.items() if options.get(key) == value}


def _devices_of(name: str) -> list[ort.OrtEpDevice]:
    return [device for device in ort.get_ep_devices() if device.ep_name == name]


def _kind_of(device: ort.OrtEpDevice) -> str:
    return str(device.device.type.name).lower()
