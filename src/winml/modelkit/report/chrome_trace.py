"""How does a timeline viewer see the modules? A Chrome trace whose kernels lie in frames of their modules.

Source of the format: the Trace Event Format of Chromium, complete events (``ph`` X) that nest by time. Perfetto,
``chrome://tracing`` and speedscope read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from winml.modelkit.hierarchy import address
from winml.modelkit.measure.module_profile import ModuleProfile
from winml.modelkit.results.profiled_modules import ProfiledModules
from winml.modelkit.runtime.kernel_times import KernelTime

__all__ = ["chrome_trace_json", "chrome_trace_record"]

_PROCESS, _THREAD = 1, 1

Event = dict[str, Any]


def chrome_trace_json(profiled: ProfiledModules) -> str:
    """Return the trace of a profiled model as JSON text."""
    return json.dumps(chrome_trace_record(profiled.profile), ensure_ascii=False)


def chrome_trace_record(profile: ModuleProfile) -> dict[str, Any]:
    """Return the trace: every kernel of every run, in microseconds, inside frames of the modules it belongs to.

    A module has one frame per stretch of kernels of its own and of modules below it; one that is entered again gets
    another.
    """
    return {"traceEvents": [*_frames(profile), *map(_kernel_event, _with_tags(profile))], "displayTimeUnit": "ms"}


def _with_tags(profile: ModuleProfile) -> Iterator[tuple[KernelTime, str]]:
    for kernel in profile.profile.kernels:
        yield kernel, profile.tags.get(kernel.node, "")


def _kernel_event(entry: tuple[KernelTime, str]) -> Event:
    kernel, tag = entry
    details = {"node": kernel.node, "tag": tag, "run": kernel.run, "provider": kernel.provider}
    return _event(kernel.op_type or kernel.node, "kernel", kernel.start_us, kernel.duration_us, details)


def _frames(profile: ModuleProfile) -> Iterator[Event]:
    """Yield the module frames; a frame opens with its first kernel and closes with its last before another module's."""
    opened: list[tuple[str, float]] = []
    run, end_us = -1, 0.0
    for kernel, tag in _with_tags(profile):
        segments = address.parse_tag(tag) if tag else ()
        shared = 0
        if kernel.run == run:
            shared = _shared_length([name for name, _ in opened], segments)
        yield from _close(opened, shared, end_us)
        opened += [(segment, kernel.start_us) for segment in segments[shared:]]
        run, end_us = kernel.run, max(end_us, kernel.start_us + kernel.duration_us)
    yield from _close(opened, 0, end_us)


def _shared_length(opened: list[str], segments: tuple[str, ...]) -> int:
    shared = 0
    for left, right in zip(opened, segments, strict=False):
        if left != right:
            break
        shared += 1
    return shared


def _close(opened: list[tuple[str, float]], kept: int, end_us: float) -> Iterator[Event]:
    while len(opened) > kept:
        segment, start_us = opened.pop()
        yield _event(segment, "module", start_us, end_us - start_us, {})


def _event(name: str, category: str, start_us: float, duration_us: float, details: dict[str, Any]) -> Event:
    place = {"pid": _PROCESS, "tid": _THREAD}
    return {"name": name, "cat": category, "ph": "X", "ts": start_us, "dur": duration_us, **place, "args": details}
