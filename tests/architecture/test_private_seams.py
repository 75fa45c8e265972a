"""Private names of libraries: files with such names, and tests that fail when a name moves.

A private name is one with a leading underscore, or one below ``onnxruntime.capi``. Imports, attributes of imported
modules, names in ``patch(owner, "_name")`` calls, and private attributes of other objects count. Reasons of these
seams: docs/decisions/0004-private-seams.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from architecture.sources import REPOSITORY, Module, functions, modules

LIBRARIES = frozenset({"huggingface_hub", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch", "transformers"})
PRIVATE_PACKAGES = ("onnxruntime.capi.",)
DOCUMENTED = frozenset({"_asdict", "_exit"})
"""Names with an underscore that their library documents as public."""

_TORCHSCRIPT = "tests/unit/export/torchscript"
_DYNAMO = "tests/unit/export/dynamo"
_LOAD = "tests/unit/models"
_LARGE_EXPORT = "tests/e2e/test_large_models.py::test_export_without_weights_in_memory_is_verified"

_STREAMED = "tests/unit/compare/verification/test_streamed_reference.py"
SEAMS: dict[str, dict[str, str]] = {
    "samples.local_files": {
        "._generate_tables": "tests/unit/evaluate/test_foreign_data_sets.py::"
        "test_parquet_file_that_declares_too_much_is_refused",
    },
    "export.dynamo.capturing": {
        "torch._ops": f"{_DYNAMO}/test_capturing.py::test_capture_that_fails_names_operator_size_line_and_module",
        "torch.fx.experimental.proxy_tensor": f"{_DYNAMO}/test_capturing.py::"
        "test_capture_names_and_scopes_are_the_paths_of_the_modules_that_ran",
    },
    "export.dynamo.example_values": dict.fromkeys(
        (
            "torch._functorch",
            "torch._subclasses.fake_impls",
            "torch._subclasses.fake_tensor",
            "torch._subclasses.meta_utils",
            "torch.ops.aten",
            "torch.fx.experimental.symbolic_shapes",
            "torch.utils._mode_utils",
        ),
        f"{_DYNAMO}/test_example_values.py::test_capture_with_example_values_follows_their_branches_and_names_the_line",
    ),
    "export.dynamo.operator_forms": {
        "torch.onnx._internal.exporter": "tests/integration/test_exact_operators.py::"
        "test_loop_body_belongs_to_the_calling_module",
    },
    "export.dynamo.shortcuts": dict.fromkeys(
        (
            "._cdata",
            "._maybe_promote_node",
            "._schema",
            "._set_current_node",
            "._target_to_str",
            "torch._C",
            "torch._export.utils",
            "torch._ops",
            "torch._prims_common",
            "torch._subclasses.fake_tensor",
            "torch.onnx._internal.exporter",
            "torch.onnx._internal.fx.passes",
            "torch.fx.experimental.proxy_tensor",
            "torch.ops.aten",
            "torch.utils._pytree",
        ),
        f"{_DYNAMO}/test_shortcuts.py::test_graph_equals_the_graph_of_torch",
    ),
    "export.dynamo.transformers_patches": {
        "._ONNX_TRANSLATION_TABLE": f"{_DYNAMO}/test_transformers_patches.py::"
        "test_patches_are_active_inside_the_block_only",
    },
    "models.fake_parameters": {
        "torch._subclasses.fake_tensor": f"{_DYNAMO}/test_capturing.py::"
        "test_capture_without_values_gets_values_from_the_caller",
    },
    "models.inputs.repeated_operators": dict.fromkeys(
        ("._cdata", "._schema", "torch._subclasses.fake_tensor"),
        f"{_DYNAMO}/test_repeated_operators.py::test_program_of_equal_layers_is_the_same_after_fewer_inferences",
    ),
    "models.preparation": {
        "._forward_hooks": "tests/integration/test_forward_hooks.py::"
        "test_root_hooks_get_arguments_and_result_of_the_forward",
        "._forward_pre_hooks": "tests/integration/test_forward_hooks.py::"
        "test_root_hooks_get_arguments_and_result_of_the_forward",
        "torch.jit._script": "tests/unit/models/test_preparation.py::"
        "test_prepared_for_export_scripted_module_is_refused_by_its_path",
    },
    "models.state_restoration": {
        "._version": "tests/integration/test_export_restoration.py::"
        "test_large_buffer_is_not_copied_and_its_changes_are_noted",
        "torch.export._trace": f"{_DYNAMO}/test_capturing.py::"
        "test_capture_that_fails_names_operator_size_line_and_module",
    },
    "export.torchscript.capturing": {
        "torch.onnx._internal.torchscript_exporter": f"{_TORCHSCRIPT}/test_operators.py::"
        "test_further_operators_are_removed_after_the_block",
        "torch.onnx.symbolic_helper": f"{_TORCHSCRIPT}/test_operators.py::test_diff_equals_torch",
    },
    "export.torchscript.tracing": {
        "torch._C": f"{_TORCHSCRIPT}/test_missing_values.py::"
        "test_capture_without_values_is_that_with_values_and_refers_to_the_callers",
        "torch._convolution": f"{_TORCHSCRIPT}/test_missing_values.py::"
        "test_convolution_without_values_is_captured_as_with_values",
        "torch._subclasses.fake_tensor": f"{_TORCHSCRIPT}/test_missing_values.py::"
        "test_capture_that_needs_values_is_refused",
        "torch.jit": f"{_TORCHSCRIPT}/test_scopes.py::test_scopes_read_back_the_exact_call_stack",
        "torch.onnx._internal.torchscript_exporter.utils": f"{_TORCHSCRIPT}/test_scopes.py::"
        "test_applied_prints_nothing_with_verbose",
    },
    "tags.torch_modules": {
        "._compiled_call_impl": "tests/unit/tags/test_compiled_modules.py::"
        "test_compiled_parts_are_put_back_after_an_error",
        "._modules": "tests/unit/tags/test_compiled_modules.py::test_compiled_module_represents_its_original",
    },
    "inspect.model_inspection": {
        "torch._subclasses.fake_tensor": "tests/unit/inspect/test_weightless.py::"
        "test_run_weightless_module_without_storage_runs_all_the_same",
    },
    "models.caches.finding": {
        "._base": f"{_LOAD}/caches/test_after_others.py::test_widened_mask_is_no_input",
    },
    "models.checkpoints.deferred_tensors": {
        "torch.Tensor._make_wrapper_subclass": f"{_LOAD}/checkpoints/test_deferred_tensors.py::"
        "test_deferred_tensors_have_shape_type_device_and_values",
        "torch._C": f"{_LOAD}/checkpoints/test_deferred_tensors.py::"
        "test_deferred_tensors_have_shape_type_device_and_values",
        "torch.utils._pytree": f"{_LOAD}/checkpoints/test_deferred_tensors.py::"
        "test_deferred_tensor_is_computed_on_read",
        "._local_scalar_dense": f"{_LOAD}/checkpoints/test_deferred_tensors.py::"
        "test_deferred_tensors_are_compared_by_their_values",
        "._schema": f"{_LOAD}/checkpoints/test_deferred_tensors.py::"
        "test_writing_into_a_tensor_of_the_checkpoint_is_refused",
        "._to_copy": f"{_LOAD}/checkpoints/test_deferred_tensors.py::"
        "test_deferred_tensor_merely_cast_stays_a_reference",
        "._unsafe_view": f"{_LOAD}/checkpoints/test_deferred_tensors.py::"
        "test_deferred_tensor_merely_cast_stays_a_reference",
    },
    "models.programs": dict.fromkeys(
        (
            "._modules",
            "._ty",
            "torch._export.serde.serialize",
            "torch.export.pt2_archive._package",
            "torch.jit._script.RecursiveScriptModule",
            "torch.jit._trace.TopLevelTracedModule",
        ),
        "tests/integration/test_programs.py::test_program_is_exported_with_the_tags_of_its_modules",
    ),
    "models.script_modules": dict.fromkeys(
        (
            "._c",
            "._get_method",
            "._has_method",
            "._type",
            "torch._C",
            "torch.jit._recursive.wrap_cpp_module",
            "torch.jit._script.RecursiveScriptModule",
        ),
        "tests/integration/test_programs.py::test_program_is_exported_with_the_tags_of_its_modules",
    ),
    "models.random_weights": {
        "._from_config": f"{_LOAD}/test_random_weights.py::test_random_weights_are_seeded_and_leave_the_callers_state",
    },
    "models.families.image_grids": {
        "._attn_implementation": "tests/integration/test_vision_language_models.py::"
        "test_images_of_any_size_equal_pytorch",
    },
    "models.families.vision_language": {
        "._attn_implementation": "tests/integration/test_vision_language_models.py::"
        "test_images_with_mutual_attention_are_not_cut",
    },
    "models.inputs.nested_arguments": {
        "torch.utils._pytree": f"{_LOAD}/inputs/test_nested_arguments.py::"
        "test_flatten_arguments_names_every_tensor_by_its_path",
    },
    "models.inputs.shape_run": {
        "torch.utils._python_dispatch": f"{_LOAD}/inputs/test_shape_run.py::"
        "test_shape_run_computes_sizes_that_follow_from_whole_numbers",
        "torch.utils._pytree": f"{_LOAD}/inputs/test_shape_run.py::"
        "test_shape_run_computes_sizes_that_follow_from_whole_numbers",
    },
    "models.resolution": {
        "._experts_implementation": "tests/integration/test_resolution_agrees.py::"
        "test_inspect_tree_equals_a_real_forward",
        "._from_config": f"{_LOAD}/test_resolution.py::test_resolve_model_takes_no_storage_and_no_weights",
    },
    "export.loading": {
        "torch._subclasses.fake_tensor": f"{_LOAD}/test_weightless.py::test_weightless_model_reads_no_weight",
        "._buffers": f"{_LOAD}/test_weightless.py::test_weightless_model_is_bound_to_the_weights_of_from_pretrained",
        "._parameters": f"{_LOAD}/test_weightless.py::test_weightless_model_is_bound_to_the_weights_of_from_pretrained",
    },
    "normalize.passes": {
        "onnx_ir.passes.common._c_api_utils": "tests/unit/normalize/test_shape_inference.py::"
        "test_inference_reads_no_large_weight",
    },
    "ort.half_precision": {
        "onnxruntime.capi": "tests/unit/quantize/test_float_engine.py::test_float16_inside_and_float32_at_the_edges",
    },
    "ort.plug_ins": {
        "onnxruntime.capi": "tests/unit/ort/test_sessions.py::test_session_of_a_broken_file_names_file_and_reason",
    },
    "ort.placement_query": {
        "onnxruntime.capi": "tests/unit/inspect/test_provider_check.py::test_listed_kernels_equal_session_kernels",
    },
    "ort.processes": {
        "._args_from_interpreter_flags": "tests/unit/ort/test_processes.py::"
        "test_process_searches_the_path_without_the_working_directory",
    },
    "compare.verification.reference_run": {
        "torch._export.utils": _LARGE_EXPORT,
        "torch._subclasses.fake_tensor": _LARGE_EXPORT,
    },
    "compare.verification.rounding": {
        "torch.utils._pytree": "tests/unit/compare/verification/test_rounding.py::"
        "test_draw_decided_by_rounding_is_set_aside",
    },
    "compare.verification.python_reads": {
        "torch.utils._python_dispatch": "tests/integration/test_input_values.py::"
        "test_value_fixed_by_the_trace_fails_the_verification",
        "torch.utils._pytree": "tests/integration/test_input_values.py::"
        "test_value_fixed_by_the_trace_fails_the_verification",
        "._schema": "tests/integration/test_assumptions.py::test_line_that_reads_values_in_a_roundabout_way_is_named",
    },
    "compare.verification.streamed_reference": {
        "torch.utils._pytree": f"{_STREAMED}::test_other_operations_equal_weights_in_memory",
        "._parameters": f"{_STREAMED}::test_large_matrices_equal_matrices_in_memory",
        "._schema": f"{_STREAMED}::test_forward_that_writes_into_a_parameter_is_refused",
        "._to_copy": f"{_STREAMED}::test_other_operations_equal_weights_in_memory",
    },
}
"""Module → prefix of its private names (``.name``: an attribute of an object) → the test that fails when they move."""


def _is_private(dotted: str) -> bool:
    names = dotted.split(".")
    return dotted.startswith(PRIVATE_PACKAGES) or any(map(_is_private_word, names))


def _is_private_word(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name not in DOCUMENTED


def _dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a chain of attributes, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """Return local name → dotted name in its library."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                imported[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {name: dotted for name, dotted in imported.items() if dotted.split(".")[0] in LIBRARIES}


def _defined_names(tree: ast.AST) -> set[str]:
    """Return the attributes, functions and variables that a module defines itself."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _dotted(node.value) == "self":
            names.add(node.attr)
    return names


def _private_names(module: Module) -> set[str]:
    """Return the private names of libraries a module uses: dotted ones, and ``.name`` for attributes of objects."""
    imported, defined = _imported_names(module.tree), _defined_names(module.tree)
    return {
        name
        for name in (*imported.values(), *_attribute_names(module.tree, imported, defined))
        if _is_private(name.removeprefix("."))
    }


def _attribute_names(tree: ast.AST, imported: dict[str, str], defined: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = _dotted(node).partition(".")
            if root in imported:
                yield f"{imported[root]}.{rest}"
            elif root not in ("self", "cls") and node.attr not in defined:
                yield f".{node.attr}"
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            # A name that is patched: patch(torch._C, "_jit_pass", replacement).
            owner, name = _dotted(node.args[0]), node.args[1]
            root, _, rest = owner.partition(".")
            if root in imported and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield ".".join(filter(None, (imported[root], rest, name.value)))


def _uses(module: Module) -> dict[str, set[str]]:
    """Return the listed seams of a module with the private names each covers; unlisted names under ``""``."""
    uses: dict[str, set[str]] = {}
    for name in _private_names(module):
        seams = [seam for seam in SEAMS.get(module.name, {}) if name == seam or name.startswith(f"{seam}.")]
        uses.setdefault(max(seams, key=len, default=""), set()).add(name)
    return uses


def test_private_names_are_used_only_in_listed_files() -> None:
    """Every private name of a library is listed with its file, and every listed seam is still used."""
    used = {module.name: _uses(module) for module in modules()}
    assert {} == {name: uses for name, uses in used.items() if uses.keys() != SEAMS.get(name, {}).keys()}


def test_listed_files_exist() -> None:
    """No entry names a file that was moved or deleted."""
    assert SEAMS.keys() <= {module.name for module in modules()}


@pytest.mark.parametrize("test_id", sorted({test for seams in SEAMS.values() for test in seams.values()}))
def test_seam_names_an_existing_test(test_id: str) -> None:
    """The test of each seam exists in the repository."""
    path, _, name = test_id.partition("::")
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    assert name in {function for function, _node in functions(tree)}
