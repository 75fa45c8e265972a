"""Which execution providers can be used here, and which of them serves a device?

Asks the installed ONNX Runtime. That a provider is installed does not say its driver is there: opening a session does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnxruntime as ort

from winml.modelkit.errors import UsageError
from winml.modelkit.runtime.execution_providers import (
    EXECUTION_PROVIDERS,
    Device,
    ExecutionProvider,
    find_execution_provider,
    short_name,
)
from winml.modelkit.runtime.sessions import CPU

__all__ = ["ChosenProvider", "choose_provider", "present_providers"]


@dataclass(frozen=True)
class ChosenProvider:
    """Where a graph is to run."""

    provider: ExecutionProvider
    device: Device
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the provider, that of the device among them."""

    @property
    def names(self) -> tuple[str, ...]:
        """The providers for a session: what the chosen one leaves out runs on the CPU."""
        return tuple(dict.fromkeys((self.provider.name, *CPU)))


def present_providers() -> list[str]:
    """Return the names of the providers the installed ONNX Runtime has, in its own order of preference."""
    return list(ort.get_available_providers())


def choose_provider(ep: str | None, device: Device | None, options: Mapping[str, str]) -> ChosenProvider:
    """Decide where a graph runs.

    Args:
        ep: Name of a provider, short or ONNX Runtime's; None: the one for the device, the CPU's without one.
        device: Kind of processor; None: the one the provider takes by itself.
        options: Options of the provider.

    Raises:
        UsageError: the provider is unknown, is not installed, has no options, or does not run on the device; or none
            that is installed runs on it.
    """
    provider = find_execution_provider(ep) if ep is not None else _provider_for(device or "cpu")
    present = present_providers()
    if provider.name not in present:
        raise UsageError(
            f"--ep {ep}: {provider.name} is not part of the installed ONNX Runtime, which has {_words(present)}",
            hint=_where_from(provider),
        )
    chosen = device or provider.devices[0]
    if chosen not in provider.devices:
        raise UsageError(
            f"--device {chosen}: {provider.name} runs on {' or '.join(provider.devices)}",
            hint="Leave --device out, or give another --ep.",
        )
    if options and not provider.has_options:
        raise UsageError(
            f"--ep-options {next(iter(options))}: {provider.name} has no options",
            hint="--threads sets the number of threads.",
        )
    asked = provider.device_options.get(device) if device is not None else None
    return ChosenProvider(provider, chosen, {**dict([asked] if asked else []), **options})


def _provider_for(device: Device) -> ExecutionProvider:
    present = present_providers()
    for provider in EXECUTION_PROVIDERS.values():
        if provider.name in present and device in provider.devices:
            return provider
    others = [short for short, provider in EXECUTION_PROVIDERS.items() if _is_installable(provider, device)]
    raise UsageError(
        f"--device {device}: no installed execution provider runs on it; ONNX Runtime has {_words(present)}",
        hint=f"Those for it on this platform: {', '.join(others) or 'none'}; winml sys says how to install them.",
    )


def _is_installable(provider: ExecutionProvider, device: Device) -> bool:
    return device in provider.devices and sys.platform in provider.packages


def _words(names: list[str]) -> str:
    return ", ".join(map(short_name, names))


def _where_from(provider: ExecutionProvider) -> str:
    package = provider.packages.get(sys.platform)
    if package is None:
        return "No package of ONNX Runtime brings it to this platform."
    return f'pip install "{package}" brings it, in place of the package of ONNX Runtime that is installed.'
