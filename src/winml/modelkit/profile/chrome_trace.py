"""Rendering of a profile as a Chrome trace, in which each kernel lies inside the frames of its modules.

Format: the Trace Event Format of Chromium, complete events (``ph`` X) nested by time, readable by Perfetto,
``chrome://tracing`` and speedscope.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from winml.modelkit.ort.kernel_times import KernelTime
from winml.modelkit.profile.module_profile import ModuleProfile
from winml.modelkit.profile.module_records import ProfiledDecoder, ProfiledModules
from winml.modelkit.tags import address
from winml.modelkit.words import json_printable

_PROCESS, _THREAD = 1, 1

Event = dict[str, object]


def chrome_trace_json(profiled: ProfiledModules | ProfiledDecoder) -> str:
    """Render the trace of a profiled model as JSON text; prompt and step of a decoder are two processes."""
    if isinstance(profiled, ProfiledModules):
        record = chrome_trace_record(profiled.profile)
    else:
        events: list[Event] = []
        for process, (name, phase) in enumerate(profiled.phases.items(), _PROCESS):
            title = {"name": "process_name", "ph": "M", "pid": process, "tid": _THREAD, "args": {"name": name}}
            phase_events = chrome_trace_record(phase.profile)["traceEvents"]
            events += [title, *({**event, "pid": process} for event in phase_events)]
        record = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json_printable(json.dumps(record, ensure_ascii=False))


def chrome_trace_record(profile: ModuleProfile) -> dict[str, Any]:
    """Build the trace: every kernel of every run, in microseconds, inside the frames of its modules.

    A module has one frame for each uninterrupted sequence of its kernels and those of its children.
    """
    return {
        "traceEvents": [
            *_module_frames(profile),
            *(_kernel_event(kernel, profile) for kernel in profile.profile.kernels),
        ],
        "displayTimeUnit": "ms",
    }


def _kernel_event(kernel: KernelTime, profile: ModuleProfile) -> Event:
    tag = profile.tags.get(kernel.node, "")
    details = {"node": kernel.node, "tag": tag, "run": kernel.run, "provider": kernel.provider}
    return _trace_event(kernel.op_type or kernel.node, "kernel", kernel.start_us, kernel.duration_us, details)


def _module_frames(profile: ModuleProfile) -> Iterator[Event]:
    """Yield the module frames. A frame ends with its last kernel before a kernel outside the module."""
    open_frames: list[tuple[str, float]] = []
    run, end_us = -1, 0.0
    for kernel in profile.profile.kernels:
        segments = address.parse_tag(profile.tags.get(kernel.node, ""))
        depth = 0
        if kernel.run == run:
            open_segments = [name for name, _ in open_frames]
            pairs = zip(open_segments, segments, strict=False)
            depth = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        yield from _close_frames(open_frames, depth, end_us)
        open_frames += [(segment, kernel.start_us) for segment in segments[depth:]]
        run, end_us = kernel.run, max(end_us, kernel.start_us + kernel.duration_us)
    yield from _close_frames(open_frames, 0, end_us)


def _close_frames(open_frames: list[tuple[str, float]], depth: int, end_us: float) -> Iterator[Event]:
    """Close the frames deeper than ``depth``, the innermost first."""
    while len(open_frames) > depth:
        segment, start_us = open_frames.pop()
        yield _trace_event(segment, "module", start_us, end_us - start_us, {})


def _trace_event(name: str, category: str, start_us: float, duration_us: float, details: Mapping[str, Any]) -> Event:
    thread = {"pid": _PROCESS, "tid": _THREAD}
    return {"name": name, "cat": category, "ph": "X", "ts": start_us, "dur": duration_us, **thread, "args": details}
