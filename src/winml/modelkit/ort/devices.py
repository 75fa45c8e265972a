"""Choice of the execution provider for a device, or for compiling, from the installed ONNX Runtime.

An installed provider may still lack its driver; only opening a session detects that.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import onnxruntime as ort

from winml.modelkit.errors import UsageError, WinMLError, opt
from winml.modelkit.metadata_keys import COMPILE_KEY
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.options import load_metadata_record
from winml.modelkit.ort.execution_providers import (
    EXECUTION_PROVIDERS,
    Device,
    ExecutionProvider,
    find_execution_provider,
    refuse_uncompilable,
    short_name,
)
from winml.modelkit.ort.plug_ins import (
    device_kinds,
    fitting_kind,
    installed_plug_ins,
    library_version,
    refuse_misspelled_options,
    stand_in_kind,
)
from winml.modelkit.ort.sessions import CPU, Session


@dataclass(frozen=True)
class ChosenProvider:
    """The execution provider and the device a graph runs on."""

    provider: ExecutionProvider
    device: Device
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the provider, including the one that selects the device."""
    stand_in: str = ""
    """Kind of the device on which the provider simulates the absent ``device``; ``""`` without simulation."""

    @property
    def device_words(self) -> str:
        """The device, for people."""
        return f"{self.device}, simulated on the {self.stand_in}" if self.stand_in else self.device

    def device_record(self) -> dict[str, str]:
        """Return the executing device, and the simulated device if any."""
        return {"device": self.stand_in, "simulates": self.device} if self.stand_in else {"device": self.device}

    def simulated_sizes(self, inputs: Iterable[InputTensorSpec]) -> dict[str, int]:
        """Return the size of inputs at which a simulated device computes like a real one; ``{}`` without a limit."""
        most = self.provider.simulated_tokens if self.stand_in else None
        is_open = any("sequence_length" in spec.shape for spec in inputs)
        return {"sequence_length": most} if most is not None and is_open else {}

    def as_record(self) -> dict[str, object]:
        """Return provider, device and options as entries of a measurement."""
        return {"ep": self.provider.name, **self.device_record(), "ep_options": dict(self.options)}

    @property
    def names(self) -> tuple[str, ...]:
        """The providers for a session: operators unsupported by the chosen provider run on the CPU."""
        return tuple(dict.fromkeys((self.provider.name, *CPU)))

    def open(self, path: str | os.PathLike[str], **options: Any) -> Session:
        """Open a file as an application does; the options are those of :class:`~winml.modelkit.ort.sessions.Session`.

        Raises:
            UsageError: as :meth:`session_options`.
            WinMLError: as :class:`~winml.modelkit.ort.sessions.Session` raises.
        """
        return Session(path, **self.session_options(path), **options)

    def session_options(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the options of a session in which a file computes as in an application on this provider.

        Raises:
            UsageError: the file shares its weights with other parts, which a simulator does not support.
        """
        shares = self.provider.compiles and _shares_weights(Path(path))
        if shares and self.stand_in:
            raise UsageError(
                f"{path} shares its weights with another part in one file, which {self.provider.name} opens on an "
                f"{self.device} only, not in its simulator",
                hint=f"Run it on the device, or build it without {opt.share_weights}.",
            )
        return {
            "providers": self.names,
            "provider_options": self.options,
            "shares_contexts": shares,
            "as_device": False,
        }


def _shares_weights(path: Path) -> bool:
    """Return True if a file was compiled with weights that it shares with other parts; False for any other file."""
    from winml.modelkit.onnx.files.reading import read_metadata  # imports onnx

    try:
        metadata = read_metadata(path)
    except WinMLError:
        return False  # opening the file reports what is wrong with it
    return bool(load_metadata_record(metadata.get(COMPILE_KEY, "{}")).get("shares_weights"))


def processor_hint() -> str:
    """Return the hint for a target SoC that is not stated."""
    return f"Set the target SoC: {opt.ep_options} soc_model=N, with Qualcomm's number for it."


def missing_option_hint(chosen: ChosenProvider, reason: str) -> str | None:
    """Return the most likely missing option of a failed provider, as a hint; `None` if unknown."""
    if chosen.provider.name == "QNNExecutionProvider" and "MEM_ALLOC" in reason and "soc_model" not in chosen.options:
        return f"Without a target SoC, QNN may choose one with too little on-chip memory. {processor_hint()}"
    return None


def present_providers() -> list[str]:
    """Return the names of the usable providers, in ONNX Runtime's order of preference, plug-ins last."""
    return list(dict.fromkeys((*ort.get_available_providers(), *installed_plug_ins())))


def choose_provider(ep: str | None, device: Device | None, options: Mapping[str, str]) -> ChosenProvider:
    """Choose the execution provider of a graph.

    Args:
        ep: Name of a provider, short or ONNX Runtime's; None: a provider for the device, or the CPU provider.
        device: Kind of processor; None: the default of the provider.
        options: Options of the provider.

    Raises:
        UsageError: the provider is unknown, is not installed, has no options, does not support the device, or does not
            find it on this machine; or no installed provider supports it.
        StageError: the provider is a plug-in that the installed ONNX Runtime cannot load.
    """
    provider = find_execution_provider(ep) if ep is not None else _find_provider(device or "cpu")
    present = present_providers()
    if provider.name not in present:
        raise UsageError(
            f"{opt.ep} {ep}: {provider.name} is not part of the installed ONNX Runtime, which has "
            f"{_short_names(present)}",
            hint=_install_hint(provider),
        )
    if provider.library and not provider.device_options:
        return _choose_library_provider(provider, device, options)
    chosen = device or provider.devices[0]
    if chosen not in provider.devices:
        raise UsageError(
            f"{opt.device} {chosen}: {provider.name} runs on {' or '.join(provider.devices)}",
            hint=f"Omit {opt.device}, or use a different {opt.ep}.",
        )
    if options and not provider.has_options:
        raise UsageError(
            f"{opt.ep_options} {next(iter(options))}: {provider.name} has no options",
            hint=f"Omit {opt.ep_options}. winml perf sets the number of threads with {opt.threads}.",
        )
    is_plug_in = provider.name in installed_plug_ins()
    # A plug-in has no known default device.
    device_option = provider.device_options.get(chosen) if device is not None or is_plug_in else None
    all_options = {**dict([device_option] if device_option else []), **options}
    stand_in = stand_in_kind(provider, all_options) if is_plug_in else ""
    if is_plug_in:
        refuse_misspelled_options(provider, options)
    return ChosenProvider(provider, chosen, all_options, stand_in)


def _choose_library_provider(
    provider: ExecutionProvider, device: Device | None, options: Mapping[str, str]
) -> ChosenProvider:
    """Return a provider with a user-specified library, on its first device.

    Raises:
        UsageError: another device is requested, or the library finds no device.
    """
    kind_name = fitting_kind(provider, device_kinds(provider), {})
    kind: Device = next(device_kind for device_kind in get_args(Device) if device_kind == kind_name)
    if (stand_in := stand_in_kind(provider, {})) and device in (None, provider.devices[0]):
        return ChosenProvider(provider, provider.devices[0], dict(options), stand_in)
    if device is not None and device != kind:
        raise UsageError(
            f"{opt.device} {device}: {provider.name} selects the {kind} by default, and winml does not know the option "
            "that selects a different device",
            hint=f"Omit {opt.device}, and set that option with {opt.ep_options}.",
        )
    return ChosenProvider(provider, kind, dict(options))


def _find_provider(device: Device) -> ExecutionProvider:
    """Return the first installed provider for a device.

    Raises:
        UsageError: no installed provider supports the device.
    """
    present = present_providers()
    for provider in EXECUTION_PROVIDERS.values():
        if provider.name in present and device in provider.devices:
            return provider
    installable = [
        short
        for short, provider in EXECUTION_PROVIDERS.items()
        if device in provider.devices and sys.platform in provider.packages
    ]
    raise UsageError(
        f"{opt.device} {device}: no installed execution provider supports it; ONNX Runtime has {_short_names(present)}",
        hint=f"Providers for it on this platform: {', '.join(installable) or 'none'}; winml sys shows how to install "
        "them.",
    )


def _short_names(names: list[str]) -> str:
    return ", ".join(map(short_name, names))


def _install_hint(provider: ExecutionProvider) -> str:
    """Return the pip command that installs a provider, as a hint."""
    package = provider.packages.get(sys.platform)
    if package is None:
        return "No package of ONNX Runtime contains it on this platform."
    relation = "beside" if provider.is_beside(package) else "in place of"
    return f'Install it with: pip install "{package}", {relation} the installed package of ONNX Runtime.'


def provider_version(provider: ExecutionProvider) -> str:
    """Return the version of the package of a plug-in, or of the ONNX Runtime that contains the provider."""
    if provider.name not in installed_plug_ins():
        return str(ort.__version__)
    if provider.library:
        return library_version(provider)
    packages = importlib.metadata.packages_distributions().get(provider.plug_in, [])
    return importlib.metadata.version(packages[0]) if packages else "unknown"


def choose_compiler(ep: str | None, device: Device | None, options: Mapping[str, str]) -> ChosenProvider:
    """Choose a provider for compilation.

    Args:
        ep: Name of the provider, short or ONNX Runtime's.
        device: Kind of processor; None: the default of the provider.
        options: Options of the provider.

    Raises:
        UsageError: no provider is named, or it is unknown, not installed, or does not support compiled files.
        StageError: the provider is a plug-in that the installed ONNX Runtime cannot load.
    """
    if ep is None:
        raise UsageError(
            "no execution provider to compile for",
            hint=f"Set one with {opt.ep}; winml compile --list shows the available ones.",
        )
    refuse_uncompilable(ep)
    chosen = choose_provider(ep, device, options)
    if chosen.provider.compiles and not hasattr(ort, "ModelCompiler"):
        raise UsageError(
            f"{opt.ep} {ep}: ONNX Runtime {ort.__version__} cannot write compiled models",
            hint="Update to version 1.23 or later, which has ModelCompiler.",
        )
    return chosen


def unreadable_reason(chosen: ChosenProvider) -> str:
    """Return the reason why the provider cannot open its own compiled files, if visible in its package; else ``""``."""
    if chosen.provider.name != "OpenVINOExecutionProvider" or chosen.device != "cpu":
        return ""
    libraries = [path.name for path in (Path(ort.__file__).parent / "capi").glob("*openvino*")]
    if not libraries or any("ir_frontend" in name for name in libraries):
        return ""
    return (
        "the installed onnxruntime-openvino lacks OpenVINO's IR frontend (openvino_ir_frontend), which its CPU "
        "device needs to load compiled parts; the plug-in onnxruntime-ep-openvino, installed with onnxruntime, "
        "includes it"
    )
