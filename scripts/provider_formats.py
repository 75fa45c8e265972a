"""Writes docs/reference/provider_formats.md from the recorded answers of execution providers.

python scripts/provider_formats.py [--check]
python scripts/provider_formats.py --record PROVIDER   # ask the installed provider, and record its answers first
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from winml.modelkit.ort import quantized_formats
from winml.modelkit.ort.probe_graphs import PROBES
from written_document import write_or_check

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "provider_formats.md"
RECORDS = Path(quantized_formats.__file__).with_name("recorded_formats.json")
HEAD = """# Formats of providers

Formats of quantized operators that execution providers run, each asked with a tiny graph. Written by
`scripts/provider_formats.py` from recorded answers. `winml quantize`, `tune` and `inspect` use these answers for a
provider that is not installed. An installed provider is asked itself, once for each of its versions; its answers are
stored in the [cache](../guide/build.md). A format runs if the provider takes every node, and if its outputs are near
those of the CPU provider (20 dB or more).

`w8a16`: weights in 8 bits, activations in 16. A weight has one scale, a scale for each channel, or blocks of 32 values.
"""


def record_answers(name: str) -> None:
    """Ask an installed provider, and write its answers into the records."""
    formats = quantized_formats.quantized_formats(name)
    if formats is None or not formats.is_installed:
        raise SystemExit(f"{name} is not installed, or finds no device")
    records = json.loads(RECORDS.read_text(encoding="utf-8"))
    records[name] = {"source": formats.source, "answers": dict(formats.answers)}
    RECORDS.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def formats_page() -> str:
    """Return the page: a table of formats, and the reasons of each provider."""
    names = [*json.loads(RECORDS.read_text(encoding="utf-8"))]
    found = [formats for name in names if (formats := quantized_formats.recorded_formats(name)) is not None]
    return "\n".join([HEAD, *_table(found), *_reasons(found)])


def _table(found: list[quantized_formats.QuantizedFormats]) -> Iterator[str]:
    yield f"| format | {' | '.join(formats.provider for formats in found)} |"
    yield f"| --- |{' --- |' * len(found)}"
    for key, probe in PROBES.items():
        yield f"| {probe.words} | {' | '.join('no' if formats.refusal(key) else 'yes' for formats in found)} |"
    yield ""


def _reasons(found: list[quantized_formats.QuantizedFormats]) -> Iterator[str]:
    for formats in found:
        yield f"## {formats.provider}\n"
        yield f"Asked: {formats.source}.\n"
        by_reason: dict[str, list[str]] = {}
        for key, reason in formats.answers.items():
            by_reason.setdefault(reason, []).append(f"`{key}`")
        for reason, keys in by_reason.items():
            if reason:
                yield f"* {reason}:"
                yield from (f"  {', '.join(keys[start : start + 4])}" for start in range(0, len(keys), 4))
        yield ""


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if not argument.startswith("--"):
            record_answers(argument)
    write_or_check(TARGET, formats_page())
