"""Names of a cache in the arguments of a forward, in its result and in the generation loop."""

from __future__ import annotations

import inspect

import pytest
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from winml.modelkit.models.caches.layout import argument_of, cache_argument, cache_field, loop_cache_name


@pytest.mark.parametrize(
    ("field", "parameters", "argument"),
    [
        ("cache", ("input_ids", "cache"), "cache"),
        # Code of a checkpoint in transformers 5.24, which renames the field of its result.
        ("cache", ("input_ids", "past_key_values"), "past_key_values"),
        ("cache", ("input_ids", "cache_params"), "cache_params"),
        ("state", ("input_ids", "state"), "state"),
        ("logits", ("input_ids", "cache"), None),
        ("cache", ("input_ids",), None),
    ],
)
def test_argument_is_read_from_the_result_field_of_the_same_name(
    field: str, parameters: tuple[str, ...], argument: str | None
) -> None:
    """The argument's value is read from the same field again."""
    assert argument_of(field, parameters) == argument
    if argument is not None:
        assert cache_field({"logits": 0, field: 1}, argument) == field


def test_loop_and_records_and_forwards_of_transformers_have_one_name() -> None:
    """The name of the loop is that of a model's parameter, and of a field of its record."""
    name = loop_cache_name()
    assert cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters) == name
    assert [name] == list(CausalLMOutputWithPast(**{name: 1}))
