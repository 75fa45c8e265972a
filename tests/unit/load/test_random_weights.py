"""Do models without weights still show mistakes?"""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel, ConvNextConfig, ConvNextModel, MobileNetV2Config, MobileNetV2Model

from winml.modelkit.errors import CheckpointError
from winml.modelkit.load.random_weights import build_random_model, calibrate_batch_norms

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def test_random_weights_are_seeded_and_leave_the_callers_state() -> None:
    """The seed decides the weights, and nobody else's random numbers move."""
    before = torch.get_rng_state()
    first, again, other = (build_random_model(BertModel, BertConfig(**SMALL), seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    weights = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not torch.equal(weights[0]["pooler.dense.weight"], weights[2]["pooler.dense.weight"])
    assert not first.training


def test_random_weights_have_no_two_equal_tensors() -> None:
    """No parameter is constant, so none equals another."""
    parameters = [p.detach().flatten() for p in build_random_model(BertModel, BertConfig(**SMALL), 0).parameters()]
    assert all(len(values.unique()) > 1 for values in parameters)
    seen = {tuple(values.tolist()) for values in parameters}
    assert len(parameters) == len(seen)


def test_random_weights_open_branches_that_start_closed() -> None:
    """A branch scaled by 1e-6 would hide every mistake in it."""
    config = ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2)
    model = build_random_model(ConvNextModel, config, 0)
    scales = [p for name, p in model.named_parameters() if "layer_scale" in name]
    assert scales
    assert all(float(p.detach().abs().mean()) > 1e-3 for p in scales)


def test_batch_norms_after_calibration_keep_deep_activations_at_scale() -> None:
    """Uncalibrated, the outputs of this deep network fade; calibrated, they carry signal."""
    config = MobileNetV2Config(depth_multiplier=0.35, image_size=64)
    model = build_random_model(MobileNetV2Model, config, 0)
    pixels, others = torch.randn(2, 1, 3, 64, 64)
    with torch.no_grad():
        faded = model(pixels).last_hidden_state - model(others).last_hidden_state
        calibrate_batch_norms(model, {"pixel_values": pixels}, {})
        assert faded.std() < 1e-6
        assert 0.1 < model(pixels).last_hidden_state.std() < 10
        assert 0.1 < (model(pixels).last_hidden_state - model(others).last_hidden_state).std() < 100


def test_batch_norm_with_one_value_per_channel_is_not_erased() -> None:
    """Statistics of one value are not subtracted from it."""
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(4)).eval()
    values = torch.randn(1, 4, 1, 1) * 50
    calibrate_batch_norms(model, {"input": values}, {})
    assert 0.5 < float(model(values).detach().square().mean()) < 2


def test_random_weights_of_impossible_config_are_refused() -> None:
    """A config whose numbers do not fit together is the material's fault."""
    with pytest.raises(CheckpointError, match="BertModel cannot be built"):
        build_random_model(BertModel, BertConfig(**{**SMALL, "hidden_size": 15}), 0)
