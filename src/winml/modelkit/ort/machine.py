"""Machine information for bug reports: versions, execution providers, processors and memory.

Contains no user or host name, and no path but those of libraries that Windows installed. Of the listed libraries, only
ONNX Runtime is imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import field

import onnxruntime as ort
import psutil

from winml.modelkit.errors import opt
from winml.modelkit.ort.devices import present_providers
from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS, ExecutionProvider, short_name
from winml.modelkit.ort.host import cpuinfo_value, has_integer_dot_products, read_cpuinfo
from winml.modelkit.records import Record, entry
from winml.modelkit.registries import PlugIn, installed_plug_ins
from winml.modelkit.version import __version__

LIBRARIES = (
    "torch", "transformers", "onnx", "onnxruntime", "onnxscript", "onnx-ir", "numpy", "ml_dtypes", "protobuf",
    "safetensors", "huggingface_hub",
)  # fmt: skip
"""Distributions whose versions influence the exported graph."""


class ProviderInfo(Record):
    """One execution provider."""

    short: str
    name: str
    """Name in ONNX Runtime."""
    is_present: bool
    """True if the installed ONNX Runtime contains it; its driver may still be missing."""
    devices: tuple[str, ...]
    """Kinds of supported processors; ``()`` if unknown."""
    package: str | None
    """pip requirement of the package with the provider on this platform; None without a package."""


class DeviceInfo(Record):
    """A processor found by ONNX Runtime, and the provider that offers it."""

    kind: str
    vendor: str
    name: str
    """Name in the system; ``""`` without a name."""
    provider: str
    """Short name."""


class Machine(Record):
    """Everything ``winml sys`` reports."""

    versions: dict[str, str | None]
    """Distribution → version; None if not installed."""
    system: str
    """Operating system and its release."""
    architecture: str
    processor: str = field(metadata=entry("name", within="processor"))
    physical_cores: int | None = field(metadata=entry(within="processor"))
    logical_cores: int | None = field(metadata=entry(within="processor"))
    usable_cores: int | None = field(metadata=entry(within="processor"))
    """Cores this process may use; None if the system does not report them."""
    has_integer_dot_products: bool | None = field(metadata=entry(within="processor"))
    """True if the processor has instructions for sums of 8-bit products (VNNI); None if unknown."""
    total_bytes: int = field(metadata=entry(within="memory"))
    available_bytes: int = field(metadata=entry(within="memory"))
    providers: tuple[ProviderInfo, ...] = field(metadata=entry("execution_providers"))
    devices: tuple[DeviceInfo, ...]
    plug_ins: tuple[PlugIn, ...]
    """Names that installed packages add to winml."""
    notes: tuple[str, ...]


def look_at_machine() -> Machine:
    """Collect the description of this machine."""
    memory = psutil.virtual_memory()
    return Machine(
        versions={
            "winml-modelkit": __version__,
            "python": platform.python_version(),
            **{name: _package_version(name) for name in LIBRARIES},
            **{
                name: version
                for name in sorted(_package_names(EXECUTION_PROVIDERS.values()) - {"onnxruntime"})
                if (version := _package_version(name)) is not None
            },
        },
        system=_system_name(),
        architecture=platform.machine(),
        processor=_processor_name(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        usable_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        has_integer_dot_products=has_integer_dot_products(),
        total_bytes=int(memory.total),
        available_bytes=int(memory.available),
        providers=tuple(_list_providers()),
        devices=tuple(_list_devices()),
        plug_ins=installed_plug_ins(),
        notes=(*_installation_notes(), *_catalogue_notes()),
    )


def _package_version(name: str) -> str | None:
    """Return the installed version of a distribution; `None` if not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_names(providers: Iterable[ExecutionProvider]) -> set[str]:
    """Return the names of packages, without their version requirements."""
    return {re.split("[<>=]", package)[0] for provider in providers for package in provider.packages.values()}


def _system_name() -> str:
    system = platform.system()
    if system == "Linux":
        with contextlib.suppress(OSError, KeyError):  # not every distribution states its name
            system = platform.freedesktop_os_release()["PRETTY_NAME"]
        return f"{system}, kernel {platform.release()}"
    return f"macOS {platform.mac_ver()[0]}" if system == "Darwin" else f"{system} {platform.version()}"


def _processor_name() -> str:
    """Return the model name of the processor, or its architecture."""
    name = ""
    if sys.platform == "linux":
        name = cpuinfo_value(read_cpuinfo(), "model name") or ""  # Arm kernels report none, only vendor numbers
    elif sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
    return " ".join((name or platform.processor() or platform.machine()).split())


def _list_providers() -> Iterator[ProviderInfo]:
    present = present_providers()
    for short, provider in EXECUTION_PROVIDERS.items():
        package = provider.packages.get(sys.platform)
        if provider.name in present or package is not None:
            yield ProviderInfo(short, provider.name, provider.name in present, provider.devices, package)
    listed_names = {provider.name for provider in EXECUTION_PROVIDERS.values()}
    for name in present:
        if name not in listed_names:
            yield ProviderInfo(short_name(name), name, is_present=True, devices=(), package=None)


def _list_devices() -> Iterator[DeviceInfo]:
    for ep_device in ort.get_ep_devices():
        # The rest of a device's metadata may contain paths and serial numbers.
        name = ep_device.device.metadata.get("Description", "")
        yield DeviceInfo(
            ep_device.device.type.name.lower(), ep_device.device.vendor, name, short_name(ep_device.ep_name)
        )


def _catalogue_notes() -> Iterator[str]:
    """Yield a note for each plug-in of Windows ML's catalogue, if the package ``windowsml`` is installed on Windows."""
    if platform.system() != "Windows" or importlib.util.find_spec("windowsml") is None:
        return
    # The package loads a library when it is imported.
    with contextlib.suppress(ImportError, OSError), importlib.import_module("windowsml").EpCatalog() as catalog:
        for entry in catalog.find_all_providers():
            state, path = entry.ready_state.name, entry.library_path
            use = f"{opt.ep} {entry.name} {opt.ep_library} {entry.name}={path}"
            if state != "Ready" or not path:
                use = "its ensure_ready() in the package windowsml installs it"
            yield f"the Windows ML catalog has {entry.name} {entry.version} ({state}): {use}".replace("  ", " ")


def _installation_notes() -> Iterator[str]:
    """Warn of several packages that each contain ONNX Runtime."""
    # A plug-in is installed next to ONNX Runtime; the other packages each contain ONNX Runtime.
    with_runtime = _package_names(
        provider
        for provider in EXECUTION_PROVIDERS.values()
        if not any(map(provider.is_beside, provider.packages.values()))
    )
    installed = [package for package in sorted(with_runtime) if _package_version(package) is not None]
    if len(installed) > 1:
        yield (
            f"{' and '.join(installed)} are installed together and overwrite each other's files: uninstall all "
            "but one, and reinstall that one"
        )
