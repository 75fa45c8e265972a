"""Options of the provider and of latency measurement, declared once for every command that runs a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.fields import DEVICE, declare
from winml.modelkit.ort.execution_providers import find_execution_provider, parse_ep_options

if TYPE_CHECKING:
    from winml.modelkit.ort.devices import ChosenProvider
    from winml.modelkit.profile.latency import LatencyOptions

_MOST_THREADS = 1024
"""Maximum number of threads. Chosen: more than any processor has cores; ONNX Runtime starts any requested number, and
crashes if it is too large."""
_MOST_RUNS = 100_000_000
"""Maximum number of runs. Chosen: a day of runs of a millisecond; the time of each run is stored."""
_LONGEST_S = 86_400
"""Maximum duration in seconds. Chosen: a day; refuses ``inf``, which would measure until the memory is full."""
MEASUREMENT = "Measurement"
"""Help group of the measurement options."""


@dataclass(frozen=True, kw_only=True)
class DeviceFields:
    """Options of the execution provider and device."""

    ep: str | None = declare(None, DEVICE, metavar="NAME", default_words="cpu, or by --device", is_common=True)
    """Execution provider, such as openvino."""
    device: Literal["cpu", "gpu", "npu"] | None = declare(None, DEVICE, short="-d", is_common=True)
    """Kind of device."""
    ep_options: dict[str, str] = declare({}, DEVICE, metavar="KEY=VALUE", is_repeatable=True, read=parse_ep_options)
    """Option of the execution provider."""

    @property
    def provider_options(self) -> dict[str, Any]:
        """Name of a field → value, for ``RunOptions``."""
        return {field: getattr(self, field) for field in DeviceFields.__dataclass_fields__}

    def refuse_unknown_provider(self) -> None:
        """Refuse an unknown provider name, before heavy imports.

        Raises:
            UsageError: no provider has this name.
        """
        if self.ep is not None:
            find_execution_provider(self.ep)

    def choose_provider(self) -> ChosenProvider:
        """Return the selected provider and device on this machine.

        Raises:
            UsageError: the provider is unknown or not installed.
        """
        from winml.modelkit.ort.devices import choose_provider

        return choose_provider(self.ep, self.device, self.ep_options)


@dataclass(frozen=True, kw_only=True)
class ProviderFields(DeviceFields):
    """Options of the execution provider, device and threads."""

    threads: int | None = declare(None, DEVICE, minimum=1, maximum=_MOST_THREADS, default_words="that of ONNX Runtime")
    """CPU threads per operator (intra-op)."""

    @property
    def provider_options(self) -> dict[str, Any]:
        """Name of a field → value, for ``RunOptions``."""
        return {**super().provider_options, "threads": self.threads}


@dataclass(frozen=True, kw_only=True)
class LatencyFields:
    """Options of latency measurement."""

    iterations: int | None = declare(
        None, MEASUREMENT, minimum=1, maximum=_MOST_RUNS, default_words="100", is_common=True
    )
    """Number of measured runs."""
    warmup: int = declare(10, MEASUREMENT, minimum=0, maximum=_MOST_RUNS)
    """Warm-up runs, which are not measured."""
    duration: float | None = declare(None, MEASUREMENT, above=0, maximum=_LONGEST_S, metavar="SECONDS", is_common=True)
    """Measure for this many seconds, instead of a number of runs."""
    io_binding: bool = declare(True, MEASUREMENT)
    """Bind inputs and outputs to device memory (IO binding), instead of passing arrays in every run."""

    @property
    def latency(self) -> LatencyOptions:
        """Validated settings of the measurement.

        Raises:
            UsageError: both a number of runs and a duration are set.
        """
        if self.iterations is not None and self.duration is not None:
            raise UsageError(
                f"{opt.iterations} {self.iterations} and {opt.duration} {self.duration:g} cannot be combined",
                hint="Use one of them.",
            )
        from winml.modelkit.profile.latency import LatencyOptions

        return LatencyOptions(self.iterations or 100, self.warmup, self.duration)
