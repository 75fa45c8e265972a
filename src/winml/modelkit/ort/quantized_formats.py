"""Formats of quantized operators that an execution provider runs: asked of the installed provider, or recorded.

The one source for quantization, tuning, inspection, notes and documents. The installed provider is asked once for each
of its versions with the graphs of ``probe_graphs``; the answers are stored in the cache. For a provider that is not
installed, ``recorded_formats.json`` holds the answers of a stated version, or what its documentation states.
Only providers that compile are asked, without engines of graphics processors: providers with kernels list them
(``kernels``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import NoAnswerError, StageError, UsageError, WriteError
from winml.modelkit.onnx.files.named_paths import FORMATS_FOLDER, cache_root, pause_recording
from winml.modelkit.onnx.files.placing import file_digest
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS
from winml.modelkit.records import Record
from winml.modelkit.version import __version__

if TYPE_CHECKING:
    from winml.modelkit.ort.devices import ChosenProvider

_RECORDED = Path(__file__).with_name("recorded_formats.json")
_GRAPHS = Path(__file__).with_name("probe_graphs.py")
_SECONDS = 120
"""Time limit of one graph. Chosen: a hundred times the time on an idle machine."""
_LEAST_SQNR_DB = 20.0
"""Minimum SQNR of a graph on the provider relative to the CPU provider. Chosen: below float16 and a rounding step of 8
bits; wrong results have none."""


class QuantizedFormats(Record):
    """Formats of quantized operators, and the reason for each that a provider does not run."""

    provider: str
    """Short name of the provider."""
    source: str
    """Versions and device that were asked, or the address of the documentation."""
    is_installed: bool
    """True if the installed provider was asked; False for recorded answers."""
    answers: Mapping[str, str]
    """Key of a format (``probe_graphs.PROBES``) → reason why the provider does not run it; ``""`` if it does."""

    def refusal(self, key: str) -> str:
        """Return the reason why the provider does not run a format; ``""`` if it does."""
        return self.answers.get(key, "no graph asks for this format")

    @property
    def source_words(self) -> str:
        """The source as a clause."""
        return f"asked of {self.source}" if self.is_installed else f"recorded of {self.source}"


def quantized_formats(ep: str | None) -> QuantizedFormats | None:
    """Return the formats that a provider runs; `None` if nothing is known.

    Args:
        ep: Short name of the provider.
    """
    provider = None if ep is None or ep not in EXECUTION_PROVIDERS else EXECUTION_PROVIDERS[ep]
    # GPU engines, such as TensorRT's, are built for seconds to minutes each.
    if ep is None or provider is None or not provider.compiles or provider.devices[0] == "gpu":
        return None
    return _find_formats(ep, provider.library)


@functools.cache
def _find_formats(ep: str, _library: str) -> QuantizedFormats | None:
    """Return the formats of a provider that compiles; the library of its plug-in may be named between two calls."""
    with contextlib.suppress(StageError, UsageError):  # the provider finds no device, or does not answer
        if (formats := _formats_of_installed(ep)) is not None:
            return formats
    return recorded_formats(ep)


def recorded_formats(ep: str) -> QuantizedFormats | None:
    """Return the recorded formats of a provider; `None` without a record."""
    record = _load_records().get(ep)
    return (
        None
        if record is None
        else QuantizedFormats(ep, record["source"], is_installed=False, answers=record["answers"])
    )


@functools.cache
def _load_records() -> dict[str, Any]:
    records: dict[str, Any] = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return records


def _formats_of_installed(ep: str) -> QuantizedFormats | None:
    """Return the formats of an installed provider, from the cache if it was asked before.

    `None` if it is not installed, or if ONNX Runtime does not report the placement of nodes.

    Raises:
        UsageError: the provider finds no device on this machine.
        StageError: it cannot be loaded, or did not answer in time.
    """
    import onnxruntime as ort

    from winml.modelkit.ort.devices import choose_provider, present_providers, provider_version
    from winml.modelkit.ort.kernels import reports_placement

    provider = EXECUTION_PROVIDERS[ep]
    if provider.name not in present_providers() or not reports_placement():
        return None
    chosen = choose_provider(ep, None, {})
    if chosen.stand_in:
        chosen = choose_provider(ep, None, provider.simulation_options)
    options = "".join(f", {key} {value}" for key, value in provider.simulation_options.items() if chosen.stand_in)
    source = f"{ep} {provider_version(provider)}, ONNX Runtime {ort.__version__} ({chosen.device_words}{options})"
    graphs = file_digest(_GRAPHS)
    identity = hashlib.sha256(
        json.dumps([source, __version__, graphs, dict(chosen.options), provider.library]).encode()
    ).hexdigest()
    path = cache_root() / FORMATS_FOLDER / f"{identity}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return QuantizedFormats(ep, source, is_installed=True, answers=dict(read_json_file(path)["answers"]))
    formats = QuantizedFormats(ep, source, is_installed=True, answers=_ask_provider(chosen))
    with contextlib.suppress(WriteError, OSError), pause_recording():  # a read-only cache only costs time
        write_atomically(path, json.dumps(formats.as_record()))
    return formats


def _ask_provider(chosen: ChosenProvider) -> dict[str, str]:
    """Ask a provider with all graphs; return key of a format → reason against it.

    Raises:
        NoAnswerError: it did not answer in time, which tells nothing of a format.
    """
    import onnx

    from winml.modelkit.ort.kernels import RuntimeProcess
    from winml.modelkit.ort.probe_graphs import PROBES

    answers: dict[str, str] = {}
    question = {
        "providers": list(chosen.names), "options": dict(chosen.options), "as_compiled": True, "is_run": True
    }  # fmt: skip
    with temporary_folder() as folder, RuntimeProcess.open(chosen.provider.name) as runtime:
        for number, (key, probe) in enumerate(PROBES.items()):
            path = folder / f"{number}.onnx"
            onnx.save(probe.make(), path)
            try:
                reported, reasons = runtime.ask({**question, "model": str(path)}, _SECONDS)
                answers[key] = _find_refusal(reported, reasons, chosen.provider.name)
            except NoAnswerError:
                raise
            except StageError as error:
                answers[key] = error.message
    return answers


def _find_refusal(reported: Mapping[str, Any], reasons: Mapping[str, str], provider: str) -> str:
    """Return the reason why a provider does not run a graph; ``""`` if it does."""
    from winml.modelkit.ort.kernels import AT_THE_EDGE
    from winml.modelkit.ort.probe_graphs import EDGES

    if "problem" in reported:
        return str(reported["problem"])
    for ep, name, operator, _ in reported["assigned"]:
        reason = reasons.get(name, "")
        if ep != provider and name not in EDGES and not any(message in reason for message in AT_THE_EDGE):
            return f"{operator} runs on the CPU: {reason or 'the provider states no reason'}"
    sqnr = reported["sqnr_db"]
    return "" if sqnr is None or sqnr >= _LEAST_SQNR_DB else f"its result is wrong (SQNR {sqnr:.0f} dB)"
