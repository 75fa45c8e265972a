"""Reading of tokens after earlier ones, found on shapes: number of tokens, mask and sliding windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from checkpoints import build_model
from winml.modelkit.errors import UsageError
from winml.modelkit.models.caches.arguments import cache_of
from winml.modelkit.models.caches.finding import find_cache, streams_of
from winml.modelkit.models.caches.inputs import fixed_sizes_of, open_by_default, with_cache_inputs
from winml.modelkit.models.caches.layout import CacheLayout
from winml.modelkit.models.caches.traced_layers import DroppingLayer, TracedAttentionLayer
from winml.modelkit.models.inputs.decision import AxisMeanings, InputDecision
from winml.modelkit.models.inputs.sizes import SizeBounds
from winml.modelkit.onnx.specs import InputTensorSpec

TOKENS = InputTensorSpec(name="input_ids", shape=(1, 8), dtype="int64", value_range=(0, 119))
MASK = InputTensorSpec(name="attention_mask", shape=(1, 8), dtype="int64", value_range=(0, 1))
KEYWORDS = {"use_cache": True, "return_dict": True}


class Widening(transformers.LlamaForCausalLM):  # type: ignore[misc]  # transformers has no types
    """A Llama model that widens the mask by four tokens before every cache."""

    widen: Any

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None, **more: Any
    ) -> Any:
        """Widen the mask if there is a cache."""
        if past_key_values is not None:
            attention_mask = self.widen(attention_mask)
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **more)


def four(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of four tokens."""
    return torch.ones_like(mask[:, :1]).expand(-1, 4)


def written(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with four more tokens, filled by assignment."""
    longer = torch.ones(mask.shape[0], mask.shape[1] + 4, dtype=mask.dtype, device=mask.device)
    longer[:, 4:] = mask
    return longer


def copied(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with four more tokens, filled by ``copy_``."""
    longer = torch.ones(mask.shape[0], mask.shape[1] + 4, dtype=mask.dtype, device=mask.device)
    longer[:, 4:].copy_(mask)
    return longer


WAYS: dict[str, Any] = {
    "cat": lambda mask: torch.cat([four(mask), mask], dim=-1),
    "cat of what is made of it": lambda mask: torch.cat([four(mask).bool(), mask.ne(0)], dim=-1),
    "hstack": lambda mask: torch.hstack([four(mask), mask]),
    "pad": lambda mask: torch.nn.functional.pad(mask, (4, 0), value=1),
    "writing": written,
    "copying": copied,
}


class Single(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model that reads a prompt and then one token in each run."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None, **more: Any
    ) -> Any:
        """Assert that at most one token follows a cache."""
        assert past_key_values is None or input_ids.shape[1] == 1
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **more)


def small_model(kind: Any) -> Any:
    """Return a small model without storage."""
    return kind(build_model("llama").config).eval().to("meta")


def layout_of_kind(kind: Any) -> CacheLayout:
    """Return the cache of a small model."""
    layout = find_cache(small_model(kind), (TOKENS, MASK), KEYWORDS)
    assert isinstance(layout, CacheLayout)
    return layout


@pytest.mark.parametrize("way", WAYS)
def test_widened_mask_is_no_input(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widened mask would hide other tokens than the mask says; a note says that attention_mask is missing."""
    monkeypatch.setattr(Widening, "widen", staticmethod(WAYS[way]), raising=False)
    layouts = [layout_of_kind(kind) for kind in (Widening, transformers.LlamaForCausalLM)]
    assert [False, True] == [layout.is_masked for layout in layouts]
    config = build_model("llama").config
    decisions = [with_cache_inputs(InputDecision((TOKENS, MASK)), item, {}, config, {}) for item in layouts]
    assert [False, True] == ["attention_mask" in [spec.name for spec in item.inputs] for item in decisions]
    notes = [fixed_sizes_of({}, {}, layout)[1] for layout in layouts]
    assert "takes no attention_mask" in notes[0][0]
    assert not notes[1]


def test_longer_tensor_of_the_mask_type_does_not_widen_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor made beside the mask has none of its values."""

    def unchanged(mask: torch.Tensor) -> torch.Tensor:
        mask.new_zeros(mask.shape[0], mask.shape[1] + 4)
        return mask

    monkeypatch.setattr(Widening, "widen", staticmethod(unchanged), raising=False)
    assert layout_of_kind(Widening).is_masked


def test_forward_with_another_single_token_branch_is_refused() -> None:
    """No single graph could serve the prompt and the steps."""
    with pytest.raises(UsageError, match="one token") as caught:
        find_cache(small_model(Single), (TOKENS, MASK), KEYWORDS)
    assert "--no-cache" in str(caught.value.hint)


@pytest.mark.parametrize(("class_name", "is_dropping"), [("MistralForCausalLM", False), ("MoshiForCausalLM", True)])
def test_window_that_no_mask_knows_is_seen(class_name: str, is_dropping: bool) -> None:
    """Both models have a window of 4; in one of them, only the cache hides tokens beyond the window."""
    model_class = getattr(transformers, class_name)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = model_class.config_class(**sizes, vocab_size=120, head_dim=8, ffn_dim=16, sliding_window=4, pad_token_id=0)
    with torch.device("meta"):
        layout = find_cache(model_class(config).eval(), (TOKENS, MASK), KEYWORDS)
    assert isinstance(layout, CacheLayout)
    assert (4, {4} if is_dropping else set()) == (layout.states[0].window, layout.dropping_windows)
    notes = fixed_sizes_of({}, {}, layout)[1]
    assert is_dropping == any("window of 4" in note for note in notes)


class Mixed(transformers.MistralForCausalLM):  # type: ignore[misc]
    """A Mistral model with a smaller window in its second layer than its masks know."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        """Make a cache."""
        if past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
            past_key_values.layers[1] = DynamicSlidingWindowLayer(sliding_window=4)
        return super().forward(input_ids, past_key_values=past_key_values, **more)


def test_each_window_is_decided_separately() -> None:
    """Only the window that no mask knows is a dropping window; a layer with full attention has no window."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MistralConfig(**sizes, num_hidden_layers=2, head_dim=8, vocab_size=120, sliding_window=8)
    kinds = ["sliding_attention", "full_attention"]
    both = transformers.Gemma3TextConfig(
        **sizes, num_hidden_layers=2, head_dim=8, vocab_size=120, sliding_window=8, layer_types=kinds
    )
    with torch.device("meta"):
        models = [Mixed(config).eval(), transformers.Gemma3ForCausalLM(both).eval()]
    mixed, alternating = (find_cache(model, (TOKENS, MASK), KEYWORDS) for model in models)
    assert isinstance(mixed, CacheLayout)
    assert isinstance(alternating, CacheLayout)
    assert ({4}, frozenset()) == (mixed.dropping_windows, alternating.dropping_windows)
    assert [8, 8, 4, 4] == [state.window for state in mixed.states]
    assert [8, 8, None, None] == [state.window for state in alternating.states]
    tensors = {state.input: torch.zeros(state.shape(1, 3)) for state in mixed.states}
    assert [TracedAttentionLayer, DroppingLayer] == [type(layer) for layer in cache_of(mixed, tensors).layers]


def test_sliding_layer_returns_the_tokens_of_transformers() -> None:
    """The layer returns the same keys, values and mask sizes as DynamicSlidingWindowLayer, and keeps all tokens."""
    own = DynamicSlidingWindowLayer(sliding_window=4)
    keys, values = torch.arange(24.0).reshape(1, 1, 12, 2), -torch.arange(24.0).reshape(1, 1, 12, 2)
    start = 0
    for count in (2, 1, 1, 1, 4, 3):
        layer = DroppingLayer({("key", None): keys[:, :, :start], ("value", None): values[:, :, :start]}, 4)
        assert own.get_mask_sizes(count) == layer.get_mask_sizes(count)
        new = [tensor[:, :, start : start + count] for tensor in (keys, values)]
        for expected, given in zip(own.update(*new), layer.update(*new), strict=True):
            assert torch.equal(expected, given)
        start += count
        assert torch.equal(keys[:, :, :start], layer.keys)


def test_streams_of_tokens_have_rows_of_their_own() -> None:
    """Other inputs and the cache have one row for all streams; the number of streams is fixed."""
    tokens = TOKENS.model_copy(update={"shape": (4, 8)})
    assert {"input_ids": 4, "attention_mask": 1} == streams_of((tokens, MASK))
    layout = layout_of_kind(transformers.LlamaForCausalLM)
    config = build_model("llama").config
    decision = with_cache_inputs(InputDecision((tokens, MASK)), layout, {}, config, {"batch_size": 2})
    assert [8, 2, 2] == [spec.shape[0] for spec in decision.inputs][:3]
    placed = MASK.model_copy(update={"name": "position_ids", "shape": (3, 8, 8)})
    rows = [item.model_copy(update={"shape": (8, 8)}) for item in (TOKENS, MASK)]
    decision = with_cache_inputs(
        InputDecision((*rows, placed)), layout, {"position_ids": None}, config, {"batch_size": 8}
    )
    assert [8, 8, 3] == [spec.shape[0] for spec in decision.inputs][:3]
    meanings = AxisMeanings(bounds={"batch_size": SizeBounds(fixed="each row is one of every stream")})
    assert {"sequence_length", "past_sequence_length"} == {*open_by_default({}, {}, layout, meanings)}
    assert "batch_size" in open_by_default({}, {}, layout, AxisMeanings())
