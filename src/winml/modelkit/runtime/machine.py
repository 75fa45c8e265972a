"""What is this machine, as far as a bug report needs it?

Versions, execution providers, processors and memory. Names no path, no user and no host, and imports none of the
libraries whose versions it tells but ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
import psutil

from winml.modelkit.runtime.devices import present_providers
from winml.modelkit.runtime.execution_providers import EXECUTION_PROVIDERS, short_name
from winml.modelkit.version import __version__

__all__ = ["LIBRARIES", "DeviceInfo", "Machine", "ProviderInfo", "look_at_machine"]

LIBRARIES = (
    "torch", "transformers", "onnx", "onnxruntime", "onnxscript", "onnx-ir", "numpy", "ml_dtypes", "protobuf",
    "safetensors", "huggingface_hub",
)  # fmt: skip
"""Distributions whose versions decide what a graph becomes."""


@dataclass(frozen=True)
class ProviderInfo:
    """One execution provider."""

    short: str
    name: str
    """As ONNX Runtime calls it."""
    is_present: bool
    """Whether the installed ONNX Runtime has it; its driver may be missing all the same."""
    devices: tuple[str, ...]
    """Kinds of processors it runs on, where we know."""
    package: str | None
    """Distribution that brings it to this platform, as pip is asked for it; None where none does."""


@dataclass(frozen=True)
class DeviceInfo:
    """One processor ONNX Runtime found, and the provider that offers it."""

    kind: str
    vendor: str
    name: str
    """What the system calls it, or an empty string."""
    provider: str
    """Short name."""


@dataclass(frozen=True)
class Machine:
    """Everything ``winml sys`` tells."""

    versions: dict[str, str | None]
    """Distribution → version; None where it is not installed."""
    system: str
    """Operating system and its release."""
    architecture: str
    processor: str
    physical_cores: int | None
    logical_cores: int | None
    usable_cores: int | None
    """Those this process may run on, where the system limits them."""
    total_bytes: int
    available_bytes: int
    providers: tuple[ProviderInfo, ...]
    devices: tuple[DeviceInfo, ...]
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """Return the JSON of ``winml sys``."""
        return {
            "versions": self.versions,
            "system": self.system,
            "architecture": self.architecture,
            "processor": {
                "name": self.processor,
                "physical_cores": self.physical_cores,
                "logical_cores": self.logical_cores,
                "usable_cores": self.usable_cores,
            },
            "memory": {"total_bytes": self.total_bytes, "available_bytes": self.available_bytes},
            "execution_providers": [asdict(provider) for provider in self.providers],
            "devices": [asdict(device) for device in self.devices],
            "notes": list(self.notes),
        }


def look_at_machine() -> Machine:
    """Find out what there is to tell."""
    memory = psutil.virtual_memory()
    return Machine(
        versions={
            "winml-modelkit": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in LIBRARIES},
            **{name: version for name in sorted(_other_packages()) if (version := _version(name)) is not None},
        },
        system=_system(),
        architecture=platform.machine(),
        processor=_processor(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        usable_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        total_bytes=int(memory.total),
        available_bytes=int(memory.available),
        providers=tuple(_providers()),
        devices=tuple(_devices()),
        notes=tuple(_notes()),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _other_packages() -> set[str]:
    """Return the distributions that bring ONNX Runtime, other than the plain one."""
    every = {package for provider in EXECUTION_PROVIDERS.values() for package in provider.packages.values()}
    return {package.partition("<")[0] for package in every} - {"onnxruntime"}


def _system() -> str:
    system = platform.system()
    if system == "Linux":
        with contextlib.suppress(OSError, KeyError):  # not every distribution says its name
            system = platform.freedesktop_os_release()["PRETTY_NAME"]
        return f"{system}, kernel {platform.release()}"
    return f"macOS {platform.mac_ver()[0]}" if system == "Darwin" else f"{system} {platform.version()}"


def _processor() -> str:
    """Return the model of the processor as the system calls it, or its architecture."""
    name = ""
    if sys.platform == "linux":
        name = _linux_processor()
    elif sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
    return " ".join((name or platform.processor() or platform.machine()).split())


def _linux_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    # Arm kernels tell no model name, only numbers of the maker's.
    return next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")


def _providers() -> Iterator[ProviderInfo]:
    present = present_providers()
    for short, provider in EXECUTION_PROVIDERS.items():
        package = provider.packages.get(sys.platform)
        if provider.name in present or package is not None:
            yield ProviderInfo(short, provider.name, provider.name in present, provider.devices, package)
    known = {provider.name for provider in EXECUTION_PROVIDERS.values()}
    for name in present:
        if name not in known:
            yield ProviderInfo(short_name(name), name, is_present=True, devices=(), package=None)


def _devices() -> Iterator[DeviceInfo]:
    for found in ort.get_ep_devices():
        # Of what a provider says about a device only this is looked at: the rest may hold paths and serial numbers.
        name = found.device.metadata.get("Description", "")
        yield DeviceInfo(found.device.type.name.lower(), found.device.vendor, name, short_name(found.ep_name))


def _notes() -> Iterator[str]:
    installed = [name for name in sorted({"onnxruntime", *_other_packages()}) if _version(name) is not None]
    if len(installed) > 1:
        yield (
            f"{' and '.join(installed)} are installed together and overwrite each other's files: keep one of them, "
            "and install it again"
        )
