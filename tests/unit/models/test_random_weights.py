"""Random weights that do not hide mistakes."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    ConvNextConfig,
    ConvNextModel,
    EfficientNetConfig,
    EfficientNetModel,
    EncodecConfig,
    EncodecModel,
    MobileNetV2Config,
    MobileNetV2Model,
)

from winml.modelkit.errors import CheckpointError
from winml.modelkit.models.random_weights import build_random_model, calibrate_batch_norms

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def test_random_weights_are_seeded_and_leave_the_callers_state() -> None:
    """The seed decides the weights, and the caller's random state is unchanged."""
    before = torch.get_rng_state()
    first, again, other = (build_random_model(BertModel, BertConfig(**SMALL), seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    weights = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not torch.equal(weights[0]["pooler.dense.weight"], weights[2]["pooler.dense.weight"])
    assert not first.training


def test_random_weights_have_no_two_equal_tensors() -> None:
    """No parameter is constant, and no two parameters are equal."""
    parameters = [p.detach().flatten() for p in build_random_model(BertModel, BertConfig(**SMALL), 0).parameters()]
    assert all(len(values.unique()) > 1 for values in parameters)
    seen = {tuple(values.tolist()) for values in parameters}
    assert len(parameters) == len(seen)


def test_random_weights_that_a_config_wants_minute_are_spread() -> None:
    """Weights of 1e-10 would give equal outputs for all inputs."""
    model = build_random_model(BertModel, BertConfig(**SMALL, initializer_range=1e-10), 0)
    assert all(float(parameter.detach().std()) > 1e-2 for parameter in model.parameters())


def test_random_weights_open_branches_that_start_closed() -> None:
    """A branch scaled by 1e-6 would hide every mistake in the branch."""
    config = ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2)
    model = build_random_model(ConvNextModel, config, 0)
    scales = [p for name, p in model.named_parameters() if "layer_scale" in name]
    assert scales
    assert all(float(p.detach().abs().mean()) > 1e-3 for p in scales)


def test_random_weights_fill_codebooks() -> None:
    """Learned tables that are kept as buffers begin empty, and every input would have the same code."""
    config = EncodecConfig(num_filters=4, hidden_size=8, codebook_size=16, codebook_dim=8, num_lstm_layers=1)
    model = build_random_model(EncodecModel, config, 0)
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("codebook.embed")]
    assert tables
    assert all(len(table.unique(dim=0)) == len(table) for table in tables)


def test_batch_norms_after_calibration_keep_deep_activations_at_scale() -> None:
    """Uncalibrated, the outputs of this deep network fade; calibrated, they carry signal."""
    config = MobileNetV2Config(depth_multiplier=0.35, image_size=64)
    model = build_random_model(MobileNetV2Model, config, 0)
    pixels, others = torch.randn(2, 1, 3, 64, 64)
    with torch.no_grad():
        faded = model(pixels).last_hidden_state - model(others).last_hidden_state
        calibrate_batch_norms(model, [{"pixel_values": pixels}], {})
        assert faded.std() < 1e-6
        assert 0.1 < model(pixels).last_hidden_state.std() < 10
        assert 0.1 < (model(pixels).last_hidden_state - model(others).last_hidden_state).std() < 100


def test_batch_norm_with_one_value_per_channel_is_not_erased() -> None:
    """Calibration with one value per channel does not subtract the value."""
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(4)).eval()
    values = torch.randn(1, 4, 1, 1) * 50
    calibrate_batch_norms(model, [{"input": values}], {})
    assert 0.5 < float(model(values).detach().square().mean()) < 2


def test_batch_norm_statistics_come_from_several_draws() -> None:
    """Deep layers see few pixels of an image; statistics of one draw make the values of the next explode."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(12) for layer in (torch.nn.Conv2d(8, 8, 1), torch.nn.BatchNorm2d(8), torch.nn.SiLU())
    ]
    model = torch.nn.Sequential(*layers).eval()
    draws = [{"input": torch.randn(1, 8, 2, 2)} for _ in range(9)]
    largest = []
    with torch.no_grad():
        for count in (1, 8):
            calibrate_batch_norms(model, draws[:count], {})
            largest.append(float(model(**draws[8]).abs().max()))
    alone, together = largest
    assert alone > 10 * together


def test_batch_norms_of_a_librarys_own_class_are_calibrated() -> None:
    """Detectors freeze theirs in a class that is no torch batch norm."""

    class Frozen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(4))
            self.register_buffer("running_var", torch.ones(4))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            mean, variance = (values[:, None, None] for values in (self.running_mean, self.running_var))
            return (input - mean) / variance.sqrt()

    model, values = torch.nn.Sequential(Frozen()), torch.randn(2, 4, 8, 8) * 50 + 7
    calibrate_batch_norms(model, [{"input": values}], {})
    assert 0.9 < float(model(values).std()) < 1.1


def test_batch_norms_of_a_model_that_refuses_its_inputs_are_left() -> None:
    """The error is left to the later run of the model, where names and shapes are reported."""
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(4)).eval()
    calibrate_batch_norms(model, [{"input": torch.randn(1, 3, 2, 2)}], {})
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 3, 2, 2))


def test_scales_that_begin_near_zero_are_lifted() -> None:
    """Scales near zero grow in training; without training, a stack of such layers lets no values through."""
    config = EfficientNetConfig(image_size=32, hidden_dim=64, width_coefficient=0.2, depth_coefficient=0.2)
    model = build_random_model(EfficientNetModel, config, 0)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert norms
    assert all(0.9 < float(module.weight.detach().mean()) < 1.1 for module in norms)


def test_random_weights_of_impossible_config_are_refused() -> None:
    """A config with contradictory sizes is an error of the checkpoint."""
    with pytest.raises(CheckpointError, match="BertModel cannot"):
        build_random_model(BertModel, BertConfig(**{**SMALL, "hidden_size": 15}), 0)
