"""Choice of a provider for a request, and refusals."""

from __future__ import annotations

from typing import get_args

import onnxruntime as ort
import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.ort.devices import choose_provider, present_providers
from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS, Device


@pytest.mark.parametrize(
    ("ep", "device"), [(None, None), ("cpu", None), ("CPUExecutionProvider", "cpu"), ("CPU", None)]
)
def test_cpu_is_chosen_by_any_of_its_names(ep: str | None, device: None) -> None:
    """The CPU is the default."""
    chosen = choose_provider(ep, device, {})
    assert (("CPUExecutionProvider",), "cpu", {}) == (chosen.names, chosen.device, chosen.options)


def test_missing_provider_is_refused_with_the_installed_providers() -> None:
    """The hint has the package of the provider, if there is one."""
    missing = next(short for short, ep in EXECUTION_PROVIDERS.items() if ep.name not in ort.get_available_providers())
    with pytest.raises(
        UsageError, match=f"--ep {missing}: .* is not part of the installed ONNX Runtime, which has"
    ) as e:
        choose_provider(missing, None, {})
    assert "cpu" in e.value.message
    assert e.value.hint


def test_unserved_device_is_refused() -> None:
    """The hint lists the providers for the device on this platform."""
    served = {kind for ep in EXECUTION_PROVIDERS.values() if ep.name in present_providers() for kind in ep.devices}
    for kind in get_args(Device):
        if kind not in served:
            with pytest.raises(UsageError, match=f"--device {kind}: no installed execution provider supports it"):
                choose_provider(None, kind, {})


def test_device_a_provider_does_not_run_on_is_refused() -> None:
    """The message names the devices of the provider."""
    with pytest.raises(UsageError, match="--device gpu: CPUExecutionProvider"):
        choose_provider("cpu", "gpu", {})


def test_options_of_a_provider_without_any_are_refused() -> None:
    """An option without an effect is not accepted."""
    with pytest.raises(UsageError, match="--ep-options x: CPUExecutionProvider"):
        choose_provider("cpu", None, {"x": "1"})


def test_device_options_name_devices_the_provider_runs_on() -> None:
    """The table does not contradict itself."""
    for ep in EXECUTION_PROVIDERS.values():
        assert ep.devices
        assert set(ep.device_options) <= set(ep.devices)
        assert set(ep.packages) <= {"linux", "win32", "darwin"}
