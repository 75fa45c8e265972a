"""Kernel times charged to the modules of their nodes, each exactly once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.ort.kernel_times import KernelTime, RunProfile
from winml.modelkit.profile.module_profile import ModuleProfile, charge_modules
from winml.modelkit.profile.module_records import ModuleRatio
from winml.modelkit.profile.torch_modules import charge_torch_modules, compare_modules


def _profile(*kernels: tuple[str, str, float], runs: int = 1) -> RunProfile:
    times = tuple(
        KernelTime(node, op_type, run, 0.0, self_us, self_us, 8, None, "CPUExecutionProvider")
        for run in range(runs)
        for node, op_type, self_us in kernels
    )
    return RunProfile(times, tuple(1.5 * sum(value for _, _, value in kernels) for _ in range(runs)))


TAGS = {
    "/layer.0/MatMul": "/Net/Layer.0",
    "/layer.0/act/Erf": "/Net/Layer.0/GELU",
    "/layer.1/MatMul": "/Net/Layer.1",
    "/Add": "/Net",
}
MODULES = [("/Net", "", "Net"), ("/Net/Layer.0", "layer.0", "Layer"), ("/Net/Layer.1", "layer.1", "Layer")]


def _charged(runs: int = 1) -> ModuleProfile:
    kernels = [("/layer.0/MatMul", "MatMul", 4000.0), ("/layer.0/act/Erf", "Erf", 1000.0)]
    kernels += [("/layer.1/MatMul", "MatMul", 3000.0), ("/Add", "Add", 500.0), ("stray", "Cast", 1500.0)]
    return charge_modules(_profile(*kernels, runs=runs), TAGS, MODULES)


def test_module_total_is_its_own_time_plus_its_children() -> None:
    """Times are milliseconds per run, however many runs there were."""
    for runs in (1, 4):
        times = {module.tag: (module.self_ms, module.total_ms) for module in _charged(runs).modules()}
        assert {
            "/Net": (0.5, pytest.approx(8.5)),
            "/Net/Layer.0": (4.0, pytest.approx(5.0)),
            "/Net/Layer.0/GELU": (1.0, 1.0),
            "/Net/Layer.1": (3.0, 3.0),
        } == times


def test_interrupted_run_of_a_kernel_moves_no_share() -> None:
    """A run interrupted for 90 ms by another program counts neither for the kernel nor for the time outside."""
    calm = _profile(("/layer.0/MatMul", "MatMul", 4000.0), ("/Add", "Add", 1000.0), runs=8)
    late = replace(calm.kernels[1], duration_us=90_000.0, self_us=90_000.0)
    kernels = (calm.kernels[0], late, *calm.kernels[2:])
    profile = charge_modules(RunProfile(kernels, (100_000.0, *calm.run_us[1:])), TAGS, MODULES)
    assert {"/Net": 1.0, "/Net/Layer.0": 4.0, "/Net/Layer.1": 0.0} == {
        module.tag: module.self_ms for module in profile.modules()
    }
    assert (5.0, 2.5, 7.5) == (profile.kernel_ms, profile.outside_ms, profile.whole_ms)


def test_cycles_of_a_kernel_are_the_minimum_of_its_runs() -> None:
    """Cycles of waiting threads are counted in most runs: the mean over the middle half would include them."""
    calm = _profile(("/layer.0/MatMul", "MatMul", 4000.0), ("/Add", "Add", 1000.0), runs=4)
    waiting = [replace(kernel, self_us=90_000.0) if kernel.run else kernel for kernel in calm.kernels]
    profile = charge_modules(RunProfile(tuple(waiting), (200_000.0,) * 4, "cycles"), TAGS, MODULES)
    assert ("kcycles", 5.0) == (profile.unit, profile.kernel_ms)


def test_node_that_runs_several_times_counts_with_its_sum() -> None:
    """A node in a loop counts with the sum of its runs; parallel kernels leave no time outside."""
    profile = charge_modules(_profile(("/Add", "Add", 10.0), ("/Add", "Add", 20.0), runs=5), TAGS, MODULES)
    assert ([2.0], 0.03) == ([root.kernels for root in profile.roots], profile.kernel_ms)
    parallel = RunProfile(profile.profile.kernels, (20.0,) * 5)
    assert charge_modules(parallel, TAGS, MODULES).outside_ms == 0


def test_container_kernels_are_the_kernels_of_its_children() -> None:
    """A module without a kernel of its own counts the kernels below it."""
    assert {"/Net": 4, "/Net/Layer.0": 2, "/Net/Layer.0/GELU": 1, "/Net/Layer.1": 1} == {
        module.tag: module.total_kernels for module in _charged(2).modules()
    }


def test_node_without_module_is_unattributed_by_name() -> None:
    """Nodes without a module are named and counted, and their time is not spread over other modules."""
    profile = _charged()
    assert {"stray": 1.5} == profile.unattributed
    assert profile.unattributed_share == pytest.approx(0.15)


def test_module_the_tree_does_not_list_is_added_with_its_class() -> None:
    """A tag deeper than the tree is added below its parent, with the class from the tag."""
    gelu = next(module for module in _charged().modules() if module.tag.endswith("GELU"))
    assert ("GELU", "", 1.0, {"Erf": 1.0}) == (gelu.class_name, gelu.path, gelu.kernels, gelu.operators)


def test_class_inside_its_own_class_counts_once() -> None:
    """A Block in a Block does not make Block take twice its time; both are instances."""
    tags = {"a": "/Net/Block", "b": "/Net/Block/Block"}
    profile = charge_modules(_profile(("a", "Add", 1000.0), ("b", "Mul", 2000.0)), tags, [])
    block = next(entry for entry in profile.by_class() if entry.class_name == "Block")
    assert (2, pytest.approx(3.0), pytest.approx(3.0)) == (block.instances, block.total_ms, block.self_ms)
    assert ["Mul", "Add"] == list(block.operators)


def test_modules_keep_the_order_of_the_tree() -> None:
    """Modules are listed in the order of the tree, not of their kernels."""
    reverse = _profile(("/layer.1/MatMul", "MatMul", 1.0), ("/layer.0/MatMul", "MatMul", 1.0))
    tags = [module.tag for module in charge_modules(reverse, TAGS, MODULES).modules()]
    assert ["/Net", "/Net/Layer.0", "/Net/Layer.1"] == tags


_segment = st.sampled_from(["A", "B", "C.0", "C.1"])
_tag = st.one_of(st.just(""), st.lists(_segment, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts)))


@given(st.lists(st.tuples(_tag, st.integers(0, 10**6)), min_size=1, max_size=30))
def test_times_add_up_for_every_tree(kernels: list[tuple[str, int]]) -> None:
    """Self times and unattributed times add up to the sum of ONNX Runtime; so do the totals of the roots."""
    named = [(f"n{position}", "Add", float(time)) for position, (_, time) in enumerate(kernels)]
    tags = {f"n{position}": tag for position, (tag, _) in enumerate(kernels)}
    profile = charge_modules(_profile(*named), tags, [])
    kernel_ms = sum(time for _, time in kernels) / 1000
    assert pytest.approx(kernel_ms) == profile.kernel_ms
    assert pytest.approx(kernel_ms) == sum(module.self_ms for module in profile.modules()) + profile.unattributed_ms
    assert pytest.approx(kernel_ms) == sum(root.total_ms for root in profile.roots) + profile.unattributed_ms
    assert all(module.total_ms >= module.self_ms for module in profile.modules())


def test_times_of_pytorch_are_charged_to_the_owner_of_a_fused_module() -> None:
    """A module without kernels of its own counts for the module that it was fused into, on both sides."""
    modules = [("/Net", "", "Net"), ("/Net/Conv", "conv", "Conv"), ("/Net/Norm", "norm", "Norm")]
    session = charge_modules(_profile(("a", "Conv", 1000.0)), {"a": "/Net/Conv"}, modules, {"a": ["/Net/Norm"]})
    times = _profile(("", "", 500.0), ("conv", "", 2000.0), ("norm", "", 3000.0))

    torch = charge_torch_modules(times, session)
    ratios = {row.tag: row for row in compare_modules(session, torch, 1)}

    assert {"/Net": 5.5, "/Net/Conv": 5.0, "/Net/Norm": 0.0} == {row.tag: row.total_ms for row in torch.modules()}
    assert ratios["/Net/Norm"].ratio is None
    assert ratios["/Net/Conv"].ratio is not None
    assert math.isclose(0.2, ratios["/Net/Conv"].ratio.value)
    assert "undecided" == ratios["/Net/Conv"].verdict  # one pair of runs has no interval


def test_ratio_of_equal_layers_is_that_of_their_sums() -> None:
    """Times, ratio, interval and verdict are of the same blocks."""
    layers = [
        ModuleRatio.of_blocks(f"/Net/Layer.{number}", f"layer.{number}", "Layer", torch_ms, model_ms, 1.0)
        for number, (torch_ms, model_ms) in enumerate([([2.0] * 6, [1.0] * 6), ([4.0] * 6, [2.0] * 5 + [8.0])])
    ]
    joined = ModuleRatio.of_layers(layers)
    assert (6.0, 3.0) == (joined.baseline_ms, joined.model_ms)
    assert joined.ratio is not None
    assert (0.5, 0.5, 1.5) == (joined.ratio.value, joined.ratio.low, joined.ratio.high)
    assert "undecided" == joined.verdict_words
    assert layers[0] is ModuleRatio.of_layers(layers[:1])
    slowed = ModuleRatio.of_blocks("/Net", "", "Net", [2.0] * 6, [1.8] * 6, 2.0)
    assert "undecided (other load)" == slowed.verdict_words
