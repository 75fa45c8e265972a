"""Query of ONNX Runtime in a separate process for placement or kernels of a provider, or compilation.

A failing provider may end its process and print anything; listing the kernels ends the process of
onnxruntime-openvino 1.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import _pybind_state as ort_state

from winml.modelkit.errors import WinMLError
from winml.modelkit.ort.device_trace import take_device_trace
from winml.modelkit.ort.plug_ins import ORT_ERRORS, named_providers, ort_reason
from winml.modelkit.ort.processes import answer_questions
from winml.modelkit.ort.session_settings import SHARE_CONTEXTS, SessionSettings

_SEVERITY_VERBOSE = 0
"""Specified: some providers state only at this severity why they do not run a node."""

_EQUAL_DB = 200.0
"""SQNR of equal outputs, in place of infinity, which JSON lacks. Chosen."""


def _answer_question(task: Mapping[str, Any], _content: bytes) -> dict[str, object]:
    """Answer a question.

    Args:
        task: ``kernels_of`` (a provider), or ``model``, ``providers`` and ``options``; beside them ``as_compiled``
            (whether the graph is divided as for compiling) and ``is_run`` (whether it is also run there and on the
            CPU); or, instead of ``model``, ``compile`` (pairs of a model and the file that the provider is to write)
            and ``embed``.
    """
    if "kernels_of" in task:
        return _list_kernels(task["kernels_of"])
    return _compile_models(task) if "compile" in task else _query_assignment(task)


def _query_assignment(task: Mapping[str, Any]) -> dict[str, object]:
    """Open a session; return node assignments, or the problem of the session."""
    options = SessionSettings().options()
    options.log_severity_level = _SEVERITY_VERBOSE
    # Optimization level of a default session before its providers are asked; compiling asks them first.
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_DISABLE_ALL if task["as_compiled"] else level.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        providers = named_providers(options, task["providers"], task["options"])
        session = ort.InferenceSession(task["model"], sess_options=options, **providers, enable_fallback=0)
    except WinMLError as error:
        return {"problem": error.message}
    except ORT_ERRORS as error:
        return {"problem": ort_reason(error)}
    answer: dict[str, object] = {
        "assigned": [
            [part.ep_name, node.name, node.op_type, node.domain]
            for part in session.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        ]
    }
    return {**answer, "sqnr_db": _compare_with_cpu(session, task["model"])} if task.get("is_run") else answer


def _compare_with_cpu(session: ort.InferenceSession, model: str) -> float | None:
    """Run a session on random values; return the SQNR of its first output relative to the CPU provider in dB.

    `None` if the CPU provider cannot run the model. At most :data:`_EQUAL_DB`, for equal outputs. A session that fails
    or returns values that are not finite has -:data:`_EQUAL_DB`.
    """
    random, settings = np.random.default_rng(0), ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    feeds = {
        value.name: np.zeros(value.shape, np.int64)
        if value.type == "tensor(int64)"
        else random.uniform(-1, 1, value.shape).astype(np.float16 if "16" in value.type else np.float32)
        for value in session.get_inputs()
    }
    try:
        reference = ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        expected = reference.run(None, feeds)[0].astype(np.float64)
    except ORT_ERRORS:
        return None
    try:
        noise = float(np.square(session.run(None, feeds)[0] - expected).sum())
    except ORT_ERRORS:
        return -_EQUAL_DB
    signal = float(np.square(expected).sum())
    if not noise < np.inf:
        return -_EQUAL_DB
    return min(_EQUAL_DB, 10 * math.log10(signal / noise)) if noise else _EQUAL_DB


def _compile_models(task: Mapping[str, Any]) -> dict[str, object]:
    """Compile models to files, several ones into a common context, up to the first failure.

    Return the ``compiled`` models in their order: of each, the operators and reasons of its trace, the problem, or the
    refusal of options.
    """
    files, compiled = task["compile"], list[dict[str, object]]()
    for model, target in files:
        options = ort.SessionOptions()
        if len(files) > 1:
            options.add_session_config_entry(SHARE_CONTEXTS, "1")
            # The context is written with the last model.
            options.add_session_config_entry("ep.stop_share_ep_contexts", str(int(model == files[-1][0])))
        if failure := _compile_model(model, target, options, task):
            return {"compiled": [*compiled, failure]}
        compiled.append(vars(take_device_trace(Path())))
    return {"compiled": compiled}


def _compile_model(model: str, target: str, options: ort.SessionOptions, task: Mapping[str, Any]) -> dict[str, object]:
    """Compile a model to a file; return the problem or the refusal of options, ``{}`` on success."""
    name = task["providers"][0]
    options.log_severity_level = _SEVERITY_VERBOSE
    try:
        if "providers" in named_providers(options, task["providers"], task["options"]):
            options.add_provider(name, dict(task["options"]))
    except WinMLError as error:
        return {"refused_options": error.message}
    except ORT_ERRORS as error:
        return {"refused_options": f"{name} does not accept {task['options']}: {ort_reason(error)}"}
    try:
        ort.ModelCompiler(options, model, embed_compiled_data_into_model=task["embed"]).compile_to_file(target)
    except ORT_ERRORS as error:
        return {"problem": ort_reason(error)}
    return {}


def _list_kernels(provider: str) -> dict[str, object]:
    """Return the kernels of a provider, and the schemas of all operators."""
    return {
        "kernels": [
            [kernel.domain, kernel.op_name, *kernel.version_range, kernel.type_constraints]
            for kernel in ort_state.get_all_opkernel_def()
            if kernel.provider == provider
        ],
        "schemas": [
            [
                schema.domain,
                schema.name,
                schema.since_version,
                [[value.name, value.typeStr] for value in schema.inputs],
                [[value.name, value.typeStr] for value in schema.outputs],
            ]
            for schema in ort_state.get_all_operator_schema()
        ],
    }


if __name__ == "__main__":
    answer_questions(_answer_question)
