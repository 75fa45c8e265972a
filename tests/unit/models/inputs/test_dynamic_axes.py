"""Selection of dynamic axes, and refusals with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from checkpoints import build_model
from winml.modelkit.errors import UsageError
from winml.modelkit.models.inputs.decision import InputDecision, decide_inputs
from winml.modelkit.models.inputs.dynamic_axes import fitting_example, open_axes
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.onnx.specs import DynamicDimension, DynamicRequest, InputTensorSpec, OpenSize


def opened(architecture: str, request: DynamicRequest, left_open: dict[str, OpenSize] | None = None) -> InputDecision:
    """Decide the inputs of a small model and leave axes open."""
    model = build_model(architecture)
    return open_axes(decide_inputs(model, model.config), request, left_open)


def shapes(decision: InputDecision) -> dict[str, tuple[int | str, ...]]:
    """Return the shape of every input."""
    return {spec.name: spec.shape for spec in decision.inputs}


def test_empty_request_has_no_effect() -> None:
    """Static stays the default."""
    model = build_model("bert")
    decision = decide_inputs(model, model.config)
    assert decision is open_axes(decision, DynamicRequest())


@pytest.mark.parametrize(
    ("architecture", "request_", "expected"),
    [
        ("bert", {"batch": True}, {"input_ids": ("batch_size", 64), "attention_mask": ("batch_size", 64)}),
        ("bert", {"sequence": True}, {"input_ids": (1, "sequence_length"), "token_type_ids": (1, "sequence_length")}),
        (
            "t5",
            {"sequence": True},
            {"input_ids": (1, "sequence_length"), "decoder_input_ids": (1, "decoder_sequence_length")},
        ),
        ("resnet", {"image_size": True}, {"pixel_values": (1, 3, "height", "width")}),
        ("wav2vec2", {"batch": True, "sequence": True}, {"input_values": ("batch_size", "audio_length")}),
        (
            "clip",
            {"batch": True, "sequence": True},
            {"input_ids": ("text_batch_size", "sequence_length"), "pixel_values": ("image_batch_size", 3, 32, 32)},
        ),
    ],
)
def test_meaning_names_its_axes(architecture: str, request_: dict[str, Any], expected: dict[str, Any]) -> None:
    """A dimension requested by meaning is found in every input that has such an axis."""
    actual = shapes(opened(architecture, DynamicRequest(**request_)))
    assert expected == {name: actual[name] for name in expected}


def test_axes_of_equal_meaning_become_dynamic_with_a_note() -> None:
    """The mask next to the tokens gets their name."""
    decision = opened("bert", DynamicRequest(axes={"input_ids": {1: "tokens"}}))
    assert {"input_ids": (1, "tokens"), "attention_mask": (1, "tokens"), "token_type_ids": (1, "tokens")} == shapes(
        decision
    )
    assert (
        "Also tokens, which has the same sequence_length: axis 1 of attention_mask and axis 1 of token_type_ids.",
    ) == decision.notes


def test_flag_takes_the_name_the_user_gave_the_same_size() -> None:
    """A name given by place is the name of the size, for a flag as well."""
    decision = opened("bert", DynamicRequest(batch=True, axes={"input_ids": {0: "rows"}}))
    assert {("rows", 64)} == set(shapes(decision).values())


def test_shape_config_range_bounds_and_sizes_the_dimension() -> None:
    """Min, max and example come through, under the conventional name."""
    decision = opened("bert", DynamicRequest(), {"sequence_length": OpenSize(min=4, max=32, example=16)})
    assert (DynamicDimension(name="sequence_length", min=4, max=32, example=16),) == decision.dimensions


def test_limit_of_positions_becomes_the_maximum() -> None:
    """The maximum is the number of positions of the model."""
    assert (DynamicDimension(name="sequence_length", min=1, max=64, example=48),) == opened(
        "bert", DynamicRequest(sequence=True)
    ).dimensions


@pytest.mark.parametrize("name", ["batch_size", "batch"])
def test_bounds_by_name_come_through(name: str) -> None:
    """A config that records bounds is obeyed; one of winml 0.2 calls the rows otherwise."""
    request = DynamicRequest(batch=True, dimensions=(DynamicDimension(name=name, max=8, example=4),))
    assert (DynamicDimension(name="batch_size", max=8, example=4),) == opened("bert", request).dimensions


@pytest.mark.parametrize(
    ("architecture", "request_", "left_open", "words"),
    [
        ("bert", {"axes": {"input_idz": {0: "b"}}}, {}, "'input_ids'?"),
        ("bert", {"axes": {"input_ids": {2: "b"}}}, {}, "no axis 2"),
        ("bert", {"image_size": True}, {}, "no image"),
        ("resnet", {"sequence": True}, {}, "no sequence"),
        ("vit", {"image_size": True}, {}, "32x32 pixels"),
        ("vit", {"axes": {"pixel_values": {1: "c"}}}, {}, "3 only"),
        ("bert", {}, {"height": OpenSize()}, "height cannot"),
        ("bert", {}, {"sequence_length": OpenSize(max=65)}, "64 at most"),
        ("bert", {}, {"sequence_length": OpenSize(min=64)}, "single size"),
        ("wav2vec2", {}, {"audio_length": OpenSize(example=50)}, "size 50"),
        (
            "bert",
            {"axes": {"input_ids": {1: "a"}}},
            {"sequence_length": OpenSize(name="b")},
            "'a' by --dynamic-axes",
        ),
        ("bert", {"batch": True, "dimensions": (DynamicDimension(name="bach"),)}, {}, "'batch_size'"),
    ],
)
def test_request_the_model_cannot_follow_is_refused(
    architecture: str, request_: dict[str, Any], left_open: dict[str, OpenSize], words: str
) -> None:
    """The message names the problem and the alternatives."""
    with pytest.raises(UsageError) as caught:
        opened(architecture, DynamicRequest(**request_), left_open)
    assert words in str(caught.value)


def described(*inputs: tuple[str, tuple[int | str, ...]]) -> InputDecision:
    """Return inputs of an unknown model."""
    return InputDecision(tuple(InputTensorSpec(name=name, shape=shape, dtype="float32") for name, shape in inputs))


def test_batch_of_an_unknown_model_is_the_first_axis_all_share() -> None:
    """The first axis is the batch if the meaning of the axes is unknown."""
    decision = open_axes(described(("x", (1, 8)), ("y", (1, 4))), DynamicRequest(batch=True), are_sizes_firm=True)
    assert {"x": ("batch_size", 8), "y": ("batch_size", 4)} == shapes(decision)
    assert ("batch_size is traced with 2: a size of 1 would be traced as a constant.",) == decision.notes


def test_batch_of_an_unknown_model_without_common_rows_is_refused() -> None:
    """Different first sizes are not the rows of one batch."""
    with pytest.raises(UsageError, match="first axis"):
        open_axes(described(("x", (1, 8)), ("y", (2, 4))), DynamicRequest(batch=True), are_sizes_firm=True)


def test_two_example_sizes_for_one_name_are_refused() -> None:
    """A dimension has one size at a time."""
    request = DynamicRequest(axes={"x": {1: "n"}, "y": {1: "n"}})
    with pytest.raises(UsageError, match="4 and 8"):
        open_axes(described(("x", (1, 8)), ("y", (1, 4))), request, are_sizes_firm=True)


def test_names_in_shapes_stay() -> None:
    """A manifest may name dynamic axes itself."""
    decision = open_axes(described(("x", ("batch_size", 3, "height", "width"))), DynamicRequest())
    assert {"batch_size": 2, "height": 224, "width": 192} == {d.name: d.example for d in decision.dimensions}


def test_example_is_used_only_at_the_traced_sizes() -> None:
    """Values of another size than is traced are left aside."""
    fitting = open_axes(described(("x", (3, 8))), DynamicRequest(batch=True), are_sizes_firm=True)
    raised = open_axes(described(("x", (1, 8))), DynamicRequest(batch=True), are_sizes_firm=True)
    assert fitting_example({"x": torch.zeros(3, 8)}, fitting) is not None
    assert fitting_example({"x": torch.zeros(1, 8)}, raised) is None
    assert fitting_example(None, raised) is None


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"input_ids": {1: "a"}, "attention_mask": {1: "b"}}, "sequence_length"),
        ({"input_ids": {0: "n", 1: "n"}}, "batch_size.*sequence_length"),
    ],
)
def test_names_contradicting_the_meaning_of_axes_are_refused(axes: dict[str, dict[int, str]], words: str) -> None:
    """Each meaning has one name; the name of the rows is used for no other axis."""
    with pytest.raises(UsageError, match=words):
        opened("bert", DynamicRequest(axes=axes))


def test_option_for_sizes_with_a_fixed_size_names_the_option_for_the_open_size() -> None:
    """Whisper takes recordings of one length and text of any; the advised option is accepted."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    special = {"decoder_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.WhisperConfig(
        vocab_size=20, num_mel_bins=8, max_source_positions=10, max_target_positions=16, **sizes, **special
    )
    decision = decide_inputs(transformers.WhisperForConditionalGeneration(config), config)
    with pytest.raises(UsageError, match=r"num_frames.*20 only") as caught:
        open_axes(decision, DynamicRequest(sequence=True))
    assert "--dynamic-axes 'decoder_input_ids:1=decoder_sequence_length'" in caught.value.hint
    advised = open_axes(decision, DynamicRequest(axes={"decoder_input_ids": {1: "decoder_sequence_length"}}))
    assert (1, "decoder_sequence_length") == shapes(advised)["decoder_input_ids"]


def test_traced_length_bounds_a_graph_with_a_computed_table() -> None:
    """The module makes a larger table for longer rows in PyTorch; the graph keeps the one of the trace."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = transformers.M2M100Model(
        transformers.M2M100Config(vocab_size=60, max_position_embeddings=40, **sizes, **heads)
    ).eval()
    for length, most in ((None, 40), (30, 40), (50, 50)):
        shape = ShapeConfig() if length is None else ShapeConfig(sequence_length=length)
        decision = open_axes(decide_inputs(model, model.config, shape=shape), DynamicRequest(sequence=True))
        assert most == {dimension.name: dimension.max for dimension in decision.dimensions}["sequence_length"]
