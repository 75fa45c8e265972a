"""Finding the cache of a model from the result of its forward, and refusals of unsupported caches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

from checkpoints import build_model
from winml.modelkit.errors import UsageError
from winml.modelkit.models.caches.arguments import arguments_with_cache, empty_states, forward_with_states
from winml.modelkit.models.caches.decision import open_cached_inputs
from winml.modelkit.models.caches.finding import find_cache
from winml.modelkit.models.caches.inputs import fixed_sizes_of, refuse_several_rows, with_cache_inputs
from winml.modelkit.models.caches.layout import CacheLayout, CacheState, cache_argument, loop_cache_name
from winml.modelkit.models.caches.traced_layers import TracedAttentionLayer, layer_tensors
from winml.modelkit.models.inputs.decision import InputDecision
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import InputTensorSpec

TOKENS = InputTensorSpec(name="input_ids", shape=(1, 8), dtype="int64", value_range=(0, 119))
KEYWORDS = {"use_cache": True, "return_dict": True}


def small(model_class: str, **config: Any) -> Any:
    """Return a model without storage."""
    found = getattr(transformers, model_class)
    with torch.device("meta"):
        return found(found.config_class(**config)).eval()


def test_keys_and_values_of_every_layer_are_detected_without_weights() -> None:
    """The layout has the shapes of heads, the names of inputs and outputs, and the sliding windows."""
    model = build_model("llama", class_name="MistralForCausalLM", sliding_window=6).to("meta")
    layout = find_cache(model, (TOKENS,), KEYWORDS)
    assert isinstance(layout, CacheLayout)
    assert (loop_cache_name(), ("DynamicSlidingWindowLayer",) * 2) == (layout.argument, layout.layer_classes)
    assert CacheState(1, "value", (2, 8), "float32", window=6) == layout.states[3]
    assert ("past_key_values.1.value", "present.1.value") == (layout.states[3].input, layout.states[3].output)
    assert (3, 2, 0, 8) == layout.states[3].shape(3, 0)
    assert "2 layers, key and value" == layout.words
    assert layout.grows
    assert not layout.is_recurrent


def test_states_of_a_recurrence_have_names_of_their_own() -> None:
    """Convolution and recurrence of each layer; zero before the first token."""
    sizes = {"vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "conv_kernel": 3}
    model = small("MambaForCausalLM", **sizes)
    layout = find_cache(model, (TOKENS,), KEYWORDS)
    assert isinstance(layout, CacheLayout)
    # The name differs from the one in the generation loop of transformers before 5.24.
    argument = cache_argument(inspect.signature(model.forward).parameters)
    assert (argument, True, False) == (layout.argument, layout.is_recurrent, layout.grows)
    names = [(state.input, state.output) for state in layout.states]
    assert [("past_conv.0", "present_conv.0"), ("past_recurrent.0", "present_recurrent.0")] == names[:2]
    empty = empty_states(layout, 2)
    assert [(2, 32, 3), (2, 32, 4)] == [tuple(empty[name].shape) for name, _ in names[:2]]
    assert not empty["past_conv.0"].any()


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((TOKENS,), "BertLMHeadModel returns no cache"),
        ((TOKENS, TOKENS.model_copy(update={"name": "boxes", "shape": (1, 8, 4)})), "boxes beside"),
    ],
)
def test_model_without_a_cache_has_a_reason(inputs: tuple[InputTensorSpec, ...], reason: str) -> None:
    """A model that scores tokens as an encoder has no cache."""
    model = build_model("bert", class_name="BertLMHeadModel").to("meta")
    assert reason in str(find_cache(model, inputs, KEYWORDS))


def test_model_without_a_cache_in_transformers_has_a_reason() -> None:
    """The forward takes no cache: generate() reads all tokens in each step as well."""
    model = small("OpenAIGPTLMHeadModel", vocab_size=120, n_embd=16, n_layer=1, n_head=2)
    assert "transformers has no cache for OpenAIGPTLMHeadModel either" == find_cache(model, (TOKENS,), {})


class CountingLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keeps more than keys and values."""


class Counting(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Returns a cache with a layer of its own."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **keywords: Any) -> Any:
        """Count as well."""
        past_key_values = DynamicCache()
        past_key_values.layers = [DynamicLayer(), CountingLayer()]
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **keywords)


class Paired(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Returns pairs of tensors, as models did before there were caches."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **keywords: Any) -> Any:
        """Return tuples."""
        outputs = super().forward(input_ids=input_ids, **keywords)
        outputs.past_key_values = tuple((layer.keys, layer.values) for layer in outputs.past_key_values.layers)
        return outputs


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [(Counting, "layer 1 .*CountingLayer"), (Paired, "past_key_values.0.0")],
)
def test_cache_of_another_kind_is_refused_by_layer_and_class(model_class: Any, reason: str) -> None:
    """The hint names --no-cache."""
    model = model_class(build_model("llama").config).eval().to("meta")
    with pytest.raises(UsageError, match=reason) as caught:
        find_cache(model, (TOKENS,), KEYWORDS)
    assert caught.value.hint is not None
    assert "--no-cache" in caught.value.hint


def test_flat_tensors_become_a_cache_and_its_tensors_become_outputs() -> None:
    """The cache is new in each call; the forward's other results stay."""
    model = build_model("llama")
    layout = find_cache(model, (TOKENS,), KEYWORDS)
    assert isinstance(layout, CacheLayout)
    arguments = arguments_with_cache(layout, ["input_ids"])
    assert ("input_ids", loop_cache_name()) == arguments.names
    tensors = {"input_ids": torch.tensor([[5, 6]]), **empty_states(layout, 1)}
    built, again = arguments.build(tensors), arguments.build(tensors)
    cache = built[loop_cache_name()]
    assert cache is not again[loop_cache_name()]
    assert all(isinstance(layer, TracedAttentionLayer) for layer in cache.layers)
    with torch.no_grad():
        results = arguments.results(model(**built, **KEYWORDS))
    assert ["logits", *(state.output for state in layout.states)] == list(results)
    assert (1, 2, 2, 8) == tuple(results["present.1.key"].shape)
    assert {("key", None), ("value", None)} == set(layer_tensors(cache.layers[0]))


class Remembering(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Keeps sums of the tokens read in a list, one for each layer, and nothing else."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **keywords: Any) -> Any:
        """Add the sums of the tokens to the states."""
        kept = past_key_values or [torch.zeros(input_ids.shape[0], 4) for _ in range(2)]
        outputs = super().forward(input_ids=input_ids)
        outputs.past_key_values = [state + input_ids.sum(1, keepdim=True) for state in kept]
        return outputs


def test_tensors_of_one_size_in_a_container_are_states() -> None:
    """Each state is replaced in a copy and read from the result of the forward."""
    model = Remembering(build_model("llama").config).eval()
    layout = find_cache(model, (TOKENS,), {})
    assert isinstance(layout, CacheLayout)
    assert ["past_recurrent.0.0", "past_recurrent.0.1"] == [state.input for state in layout.states]
    assert (True, "list") == (layout.is_recurrent, layout.class_of(0))
    arguments = arguments_with_cache(layout, ["input_ids"])
    tensors = {"input_ids": torch.tensor([[5, 6]]), **empty_states(layout, 1)}
    with torch.no_grad():
        results = arguments.results(model(**arguments.build(tensors)))
    assert [11.0] * 4 == results["present_recurrent.0.1"][0].tolist()
    assert all(state.is_meta for state in layout.template)


def test_decoder_without_an_encoder_keeps_the_cache_of_its_own_tokens() -> None:
    """The cache for the encoder, the second of the pair, stays empty and is left out."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    layout = find_cache(small("MegatronBertForCausalLM", is_decoder=True, **sizes), (TOKENS,), KEYWORDS)
    assert isinstance(layout, CacheLayout)
    assert ["past_key_values.0.key", "past_key_values.0.value"] == [state.input for state in layout.states]


def test_length_dependent_rotation_is_noted() -> None:
    """Positions are drawn within the length that the graph supports, and a note names the rotation."""
    rotation = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build_model("llama", max_position_embeddings=64, rope_parameters=rotation)
    layout = find_cache(model, (TOKENS,), KEYWORDS)
    assert isinstance(layout, CacheLayout)
    parameters = dict.fromkeys(("input_ids", "position_ids"))
    decision = with_cache_inputs(InputDecision((TOKENS,)), layout, parameters, model.config, {})
    assert any("(dynamic)" in note and "64 tokens" in note for note in decision.notes)
    assert (0, 63) == decision.inputs[1].value_range
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    assert not with_cache_inputs(InputDecision((TOKENS,)), layout, parameters, model.config, {}).notes


def doubled(state: Any, is_more: Any) -> Any:
    """Return another state if a condition on the count is true."""
    return state * 2 if is_more else state


USES: dict[str, Callable[[Any, Any, int], Any]] = {
    "multiplied": lambda state, before, _tokens: state * before,
    "added": lambda state, before, _tokens: state + before,
    "equal": lambda state, before, _tokens: doubled(state, before == 0),
    "unequal": lambda state, before, _tokens: doubled(state, before != 0),
    "beyond": lambda state, before, _tokens: doubled(state, before > 4),
    "true": lambda state, before, _tokens: doubled(state, before),
    "false": lambda state, before, _tokens: doubled(state, not before),
    "number": lambda state, before, _tokens: state * int(before),
    "index": lambda state, before, _tokens: state * len(range(before)),
    "member": lambda state, before, _tokens: doubled(state, before in (0, 4)),
    "rest": lambda state, before, _tokens: doubled(state, before % 2),
    "of one token": lambda state, before, tokens: state * before if tokens == 1 else state,
}
"""Operations of a forward on a state that counts the tokens before."""


class Counted(Remembering):
    """Keeps beside the sums how many tokens were read, and may compute with it."""

    counted: Any = staticmethod(lambda tokens: tokens.shape[1])
    use: Any = None
    as_tensor = False

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **keywords: Any) -> Any:
        """Count the tokens."""
        before = past_key_values[2] if past_key_values else self.first
        outputs = super().forward(input_ids, past_key_values and past_key_values[:2], **keywords)
        if self.use:
            outputs.past_key_values[0] = self.use(outputs.past_key_values[0], before, input_ids.shape[1])
        before += self.counted(input_ids)
        outputs.past_key_values.append(before)
        return outputs

    @property
    def first(self) -> Any:
        """Return the count of no tokens."""
        return torch.tensor(0) if self.as_tensor else 0


@pytest.fixture(scope="module")
def counting_model() -> Any:
    """A model shared by all uses of a count."""
    return Counted(build_model("llama").config).eval()


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("use", USES)
def test_count_used_in_computation_is_refused(counting_model: Any, use: str, *, as_tensor: bool) -> None:
    """The graph would contain the count of the run that found the state."""
    model = counting_model
    model.as_tensor, model.use, model.counted = as_tensor, USES[use], Counted.counted
    with pytest.raises(UsageError, match=r"past_key_values\.2"):
        find_cache(model, (TOKENS,), {})


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_unread_or_constant_count_is_no_state(counting_model: Any, *, as_tensor: bool) -> None:
    """A count that is only added to in place is not read, and a constant count can be part of the graph."""
    model = counting_model
    model.as_tensor, model.use, model.counted = as_tensor, None, Counted.counted
    assert isinstance(find_cache(model, (TOKENS,), {}), CacheLayout)
    model.use, model.counted = USES["multiplied"], lambda _tokens: 4
    assert isinstance(find_cache(model, (TOKENS,), {}), CacheLayout)


class Mixing(Remembering):
    """A model that mixes the rows when it reads a single token after a cache."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **keywords: Any) -> Any:
        """Mix the scores of all rows."""
        outputs = super().forward(input_ids, past_key_values, **keywords)
        if past_key_values and input_ids.shape[1] == 1:
            outputs.logits = outputs.logits + outputs.logits.transpose(0, 1)
        return outputs


def test_mixed_rows_limit_the_graph_to_one_row() -> None:
    """The graph takes one row; more rows, or a dynamic number, are refused."""
    config = build_model("llama").config
    layouts = [find_cache(kind(config).eval(), (TOKENS,), {}) for kind in (Mixing, Remembering)]
    assert [True, False] == [isinstance(layout, CacheLayout) and layout.is_of_one_row for layout in layouts]
    sizes, notes = fixed_sizes_of({}, {}, layouts[0])  # type: ignore[arg-type]  # as asserted
    assert {"batch_size": 1, "sequence_length": 1} == sizes
    assert any("one row" in note for note in notes)
    row = TOKENS.model_copy(update={"shape": (1, 1)})
    for rows in (2, "batch"):
        several = row.model_copy(update={"shape": (rows, 1)})
        refuse_several_rows((several,), layouts[1])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"input_ids of {rows} rows: .* mixes up the tokens") as caught:
            refuse_several_rows((row, several), layouts[0])  # type: ignore[arg-type]
        assert "--no-cache" in str(caught.value.hint)
    refuse_several_rows((row,), layouts[0])  # type: ignore[arg-type]


def test_several_requested_rows_are_refused() -> None:
    """The number of rows is requested as a fixed size or left open."""
    model = Mixing(build_model("llama").config).eval()
    layout = find_cache(model, (TOKENS,), {})
    assert isinstance(layout, CacheLayout)
    plain = InputDecision((TOKENS,))
    for request in (ModelRequest("m", batch_size=2), ModelRequest("m", shape_config=ShapeConfig(batch_size=2))):
        with pytest.raises(UsageError, match="input_ids of 2 rows"):
            open_cached_inputs(plain, layout, model, model.config, request)
    opened = open_cached_inputs(plain, layout, model, model.config, ModelRequest("m", batch_size=1))
    assert (1, 1) == opened.inputs[0].shape


def test_states_in_module_attributes_become_inputs_and_outputs() -> None:
    """Token by token with states as inputs and outputs, the model gives the outputs of a single run."""
    sizes = {"vocab_size": 120, "hidden_size": 16, "lru_width": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.RecurrentGemmaConfig(
        **sizes, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, block_types=["recurrent", "attention"]
    )
    torch.manual_seed(0)
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    block = model.model.layers[0].temporal_block
    layout = find_cache(model, (TOKENS,), KEYWORDS)
    assert isinstance(layout, CacheLayout)
    assert block.conv1d_state is None
    assert ["past_recurrent.0.0", "past_recurrent.0.1"] == [state.input for state in layout.states[:2]]
    assert ("RecurrentGemmaRecurrentBlock", True) == (layout.class_of(0), layout.is_recurrent)
    arguments = arguments_with_cache(layout, ["input_ids", "position_ids"])
    call = forward_with_states(layout.of_modules, layout.argument)(model)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 3, 2, 1]])
    states, scores = empty_states(layout, 2), []
    with torch.no_grad():
        for place in range(4):
            step = {"input_ids": tokens[:, place : place + 1], "position_ids": torch.full((2, 1), place)}
            results = arguments.results(call(**arguments.build({**step, **states}), **KEYWORDS))
            scores.append(results["logits"])
            states = {state.input: results[state.output] for state in layout.states}
        expected = call(input_ids=tokens, **KEYWORDS).logits
    # One product of sums in float32 instead of another: 1e-6 of scores around 1.
    torch.testing.assert_close(expected, torch.cat(scores, dim=1), rtol=1e-4, atol=1e-5)


class Tallying(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model that stores the tokens in an attribute of a module and updates its cache in place."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **keywords: Any) -> Any:
        """Keep the tokens."""
        self.model.layers[0].seen = input_ids
        outputs = super().forward(input_ids=input_ids, past_key_values=past_key_values, **keywords)
        return {"logits": outputs.logits}


def test_attribute_without_a_row_axis_is_refused_by_its_name() -> None:
    """The attribute grows with the tokens, and no axis is known to count them."""
    model = Tallying(build_model("llama").config).eval().to("meta")
    with pytest.raises(UsageError, match=r"model\.layers\.0\.seen"):
        find_cache(model, (TOKENS,), KEYWORDS)
    assert "seen" not in vars(model.model.layers[0])
