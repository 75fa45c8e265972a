"""Boundaries at which an error of any kind may be caught.

Everywhere else a broad ``except`` would let a failure look like a result.
"""

from __future__ import annotations

import ast

from architecture.sources import functions, modules

BOUNDARIES: dict[str, str] = {
    "compare.verification.generated_text:generated_or_reason": "a foreign generate(); told as the reason",
    "compare.verification.parts_together:_EncoderDecoderParts._make_measured_reference": "as above: a foreign forward",
    "compare.verification.reference_run:run_reference": "said again with inputs and module",
    "compare.verification.reference_run:run_on_arrays": "a foreign forward raises what it likes; said with its values",
    "compare.by_module.first_wrong_module:name_first_wrong_module": "the failure stays as it is; says what went wrong",
    "builds.identity:ModelIdentity._compute_record": "raised again in the thread that asks for the record",
    "inspect.model_inspection:_run_with_values": "as above; without weights the reason was less clear",
    "cli._endings:exit_status": "turns a mistake of ours into a request for a report instead of a traceback",
    "export.dynamo.capturing:capture_dynamo": "the exporter raises what it likes; named with its operator",
    "export.torchscript.capturing:capture_torchscript": "the exporter raises what it likes; named with its operator",
    "onnx.files.foreign_files:foreign_parser": "parsers of foreign files raise what they like; said with the file",
    "onnx.files.placing:_read_data_names": "what is replaced may be anything at all; then it names no data of ours",
    "onnx.stage:run_passes": "a library pass raises what it likes; said again with its name and place",
    "samples.processors:tokenizer_call": "tokenizers raises nothing more narrow, and panics; the rest is raised",
    "samples.template_rendering:_render": "a template is foreign code; said again as its, with the folder",
    "inspect.model_inspection:run_weightless": "a foreign forward may need values; becomes a result with its reason",
    "models.inputs.axis_names:accepts_shapes.call": "a foreign forward; it does not take the shapes",
    "models.inputs.nested_arguments:_build_record": "a user's constructor; said again with its members",
    "models.inputs.nested_arguments:_try_copy": "a user's mapping; it is not copied then",
    "models.resolution:_guard_user_code": "a user's factory; said again with the line it stands in",
    "registries:_import_plug_in": "a plug-in raises what it likes; told as the reason why it cannot be used",
    "sweep.architecture_export:tried_export": "whatever goes wrong with one model is a row of the table",
    "sweep.architecture_export:_find_small_config": "a config that makes no model is a row of the table",
    "sweep.architecture_export:_try_config": "as above",
    "sweep.cell_work:upload": "each protocol of fsspec raises errors of its own; said again with the place",
    "sweep.cell_work:run_cell": "whatever goes wrong with one model is a row of the table",
}
"""``module:qualified.name`` → the reason that anything may be caught there."""


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Return True if a handler catches everything, also as a member of a tuple or when it raises again."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"}) for kind in caught
    )


def _is_cleanup(handler: ast.ExceptHandler) -> bool:
    """Return True if a handler always ends in a bare ``raise``: a cleanup hides nothing."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _broad_handlers() -> set[str]:
    found = set()
    for module in modules():
        inside: dict[int, str] = {}
        for name, function in functions(module.tree):  # outer before inner, so the inner name wins
            inside.update({id(node): name for node in ast.walk(function)})
        found |= {
            f"{module.name}:{inside.get(id(node), '<module>')}"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _is_cleanup(node)
        }
    return found


def test_broad_excepts_exist_only_at_listed_boundaries() -> None:
    """Every broad ``except`` is at a listed boundary, and every listed boundary still has one."""
    assert set(BOUNDARIES) == _broad_handlers()
