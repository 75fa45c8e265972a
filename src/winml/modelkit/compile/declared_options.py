"""Options of the compile stage, declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from winml.modelkit.fields import DEVICE, VERIFICATION, declare
from winml.modelkit.ort.execution_providers import Device, parse_ep_options

DEFAULT_MIN_SQNR_DB = 20.0
"""Default minimum SQNR for providers that compute with fewer bits than the graph states, as NPUs do. Chosen: below
float16 on QNN, which reaches 29.5 dB for MiniLM and 36 to 63 dB for other graphs (measured); a wrong graph is near
0 dB."""

MARGIN_DB = 6.0
"""Default loss of SQNR of a compiled file against its quantized source, both relative to the float file: the error may
double. Chosen: a device that rounds as much as the quantized file loses 3 dB."""

_GROUP = "Compilation"


@dataclass(kw_only=True)
class CompileFields:
    """The options of the compile stage."""

    ep: str | None = declare(None, DEVICE, metavar="NAME", min_length=1, is_common=True)
    """Execution provider to compile for, such as `qnn`; `--list` lists them. In a build config, it also applies to the
    sections that name none. Without one, a build does not compile."""
    device: Device | None = declare(
        None, DEVICE, short="-d", default_words="that of the execution provider", is_common=True
    )
    """Kind of device."""
    ep_options: Mapping[str, str] | None = declare(
        None, DEVICE, metavar="KEY=VALUE", is_repeatable=True, read=parse_ep_options, is_common=True
    )
    """Option of the execution provider."""
    embed: bool | None = declare(None, _GROUP, default_words="beside it", is_common=True)
    """Store the compiled context and the weights inside the ONNX file, or in files beside it."""
    max_outside: int | None = declare(None, _GROUP, metavar="N", minimum=0, default_words="unlimited")
    """Maximum number of nodes that run on the CPU provider instead. With more, no file is written."""
    max_parts: int | None = declare(None, _GROUP, metavar="N", minimum=1, default_words="unlimited")
    """Maximum number of compiled subgraphs. With more, no file is written."""
    min_sqnr_db: float | None = declare(
        None,
        VERIFICATION,
        spelling="--min-sqnr",
        metavar="DB",
        default_words=f"{DEFAULT_MIN_SQNR_DB:.0f} dB; with a float reference, at most {MARGIN_DB:.0f} dB below the "
        "SQNR of the quantized source",
        is_common=True,
    )
    """Minimum SQNR (dB) of every output, if the execution provider computes with fewer bits than the file states."""
