"""Detection of passes that break their declared promise."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from graphs import parse, tags
from winml.modelkit.errors import NormalizeError
from winml.modelkit.onnx.stage import DeclaredPass, TagPolicy, run_passes
from winml.modelkit.tags.tagging import NodeTag, clear_tag, write_tag

BODY = "m (float[2] x, float[2] k) => (float[2] y, float[2] z) { y = Relu (x)  z = Add (y, k) }"


class _Pass(ir.passes.InPlacePass):
    def __init__(self, change: Callable[[ir.Model], bool]) -> None:
        self._change = change

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, self._change(model))


class IdlePass(_Pass):
    """A pass without effect."""

    def __init__(self) -> None:
        super().__init__(lambda _model: False)


def _rename_output(model: ir.Model) -> bool:
    model.graph.outputs[0].name = "other"
    return True


def _swap_inputs(model: ir.Model) -> bool:
    model.graph.inputs.reverse()
    return True


def _clear(model: ir.Model) -> bool:
    clear_tag(model.graph[0])
    return True


def _retag(model: ir.Model) -> bool:
    write_tag(model.graph[0], NodeTag("/M", "", "merged"))
    return True


def _append(model: ir.Model) -> bool:
    model.graph.append(ir.node("Neg", [model.graph.inputs[0]], name="/Neg"))
    return True


def _append_tagged(model: ir.Model) -> bool:
    _append(model)
    write_tag(model.graph[-1], NodeTag("/M", "", "inherited"))
    return True


def _fail(_model: ir.Model) -> bool:
    raise ValueError("out of luck")


def _run(change: Callable[[ir.Model], bool], policy: TagPolicy) -> bool:
    steps = (DeclaredPass(IdlePass(), "keeps"), DeclaredPass(_Pass(change), policy))
    return run_passes(parse(BODY), steps, NormalizeError)


@pytest.mark.parametrize(
    ("change", "policy", "reason"),
    [
        (_rename_output, "drops", "outputs .*y, z .*other, z"),
        (_swap_inputs, "drops", "graph inputs"),
        (_clear, "merges", "1 nodes .*/relu/Relu_0 .*merges"),
        (_append, "creates", "1 nodes .*/Neg"),
        (_append_tagged, "keeps", "node Neg /Neg.* keeps"),
        (_retag, "keeps", "node Relu"),
        (_fail, "drops", "failed: ValueError: out of luck"),
    ],
)
def test_broken_promise_names_step_pass_and_action(
    change: Callable[[ir.Model], bool], policy: TagPolicy, reason: str
) -> None:
    """The error names the step and the number of steps, the pass, its action and the earlier passes."""
    with pytest.raises(NormalizeError, match=rf"step 2 of 2, _Pass, .*{reason}.* \(done before: IdlePass\)") as raised:
        _run(change, policy)
    if change is _fail:
        assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("change", "policy"), [(_clear, "drops"), (_append, "drops"), (_append_tagged, "creates"), (_retag, "merges")]
)
def test_fulfilled_promise_passes(change: Callable[[ir.Model], bool], policy: TagPolicy) -> None:
    """A pass may make its declared changes."""
    assert _run(change, policy)


def test_passes_on_a_graph_without_tags_have_none_to_lose() -> None:
    """A graph from elsewhere can be worked on."""
    model = parse(BODY)
    for node in model.graph:
        clear_tag(node)
    assert run_passes(model, (DeclaredPass(_Pass(_append), "creates"),), NormalizeError)
    assert [None, None, None] == tags(model)


def test_pass_that_makes_a_node_invalid_is_named() -> None:
    """A graph that was invalid before is not blamed on a pass."""

    def add_axis(model: ir.Model) -> bool:
        model.graph[0].attributes["axis"] = ir.AttrInt64("axis", 1)
        return True

    model = parse(BODY)
    with pytest.raises(NormalizeError, match=r"_Pass, made Relu .* attribute axis") as raised:
        run_passes(model, (DeclaredPass(_Pass(add_axis), "keeps"),), NormalizeError)
    assert "_Pass" == raised.value.failed_pass
    assert run_passes(model, (DeclaredPass(_Pass(add_axis), "keeps"),), NormalizeError)
