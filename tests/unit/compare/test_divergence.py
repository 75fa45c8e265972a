"""The first module with an error of its own: equal inputs, different outputs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from winml.modelkit.compare.by_module.module_comparison import ModuleErrors, first_divergence, own_error
from winml.modelkit.compare.fidelity import FidelityInfo, OutputFidelity, QualitySamples, SampleSpread
from winml.modelkit.compare.records import ComparedModule, ComparedOutput, ModelComparison, ProofReplay
from winml.modelkit.tags.address import ModuleIdentity

EXACT = ModuleErrors(0.0, 0.0)
LIMIT = 1e-3


@pytest.mark.parametrize(
    ("errors", "own"),
    [
        (ModuleErrors(3.0, 5.0), 4.0),
        (ModuleErrors(5.0, 3.0), 0.0),
        (ModuleErrors(None, 5.0), None),
        (ModuleErrors(0.1, math.inf), math.inf),
        (ModuleErrors(math.inf, math.inf), 0.0),
        # An inner module has an error of 3, the nodes after the module 4.
        (ModuleErrors(0.0, 5.0, before=((0.0, 0.0),), last_fed=3.0), 4.0),
        # The nodes before the inner module have an error of 2, which the module passes on.
        (ModuleErrors(0.0, 2.0, before=((0.0, 2.0),), last_fed=2.0), 2.0),
        # An error that vanishes before the output, as before a scale of 1e-6, does not count.
        (ModuleErrors(0.0, 1e-7, before=((0.0, 0.01),), last_fed=0.01), 1e-7),
        (ModuleErrors(3.0, 5.0, before=((3.0, 500.0),), last_fed=500.0), 4.0),
    ],
)
def test_own_error_excludes_inherited_errors(errors: ModuleErrors, own: float | None) -> None:
    """Squared errors add up: the error that an inner module passes on is not an own error."""
    assert own == own_error(errors)


def test_first_module_with_equal_inputs_is_selected() -> None:
    """A module with wrong inputs, an unchanged one, and one with unknown inputs are not blamed."""
    unknown, unchanged = ModuleErrors(None, 0.5), ModuleErrors(0.0, 0.5, is_passing_on=True)
    wrong, behind = ModuleErrors(1e-7, 0.3), ModuleErrors(0.3, 0.9)
    modules = [EXACT, unknown, unchanged, wrong, behind]
    assert 3 == first_divergence(modules, LIMIT, is_rounded=False)
    assert first_divergence([EXACT, unknown, unchanged, behind], LIMIT, is_rounded=False) is None


@pytest.mark.parametrize("is_rounded", [False, True])
def test_overflow_is_an_error_of_the_module_whatever_the_error_of_its_inputs(is_rounded: bool) -> None:
    """Inputs with an error beyond the tolerance do not excuse outputs that are not finite."""
    overflow = ModuleErrors(2e-3, math.inf, is_overflowing=True)
    behind = ModuleErrors(math.inf, math.inf)
    zeros = ModuleErrors(2e-3, math.inf)  # of a reference of zeros
    assert 2 == first_divergence([ModuleErrors(0.0, 2e-4), zeros, overflow, behind], LIMIT, is_rounded=is_rounded)


def test_overflow_of_a_rounded_module_precedes_finite_errors() -> None:
    """Of rounded modules, one that is far off explains no NaN; of others, it may."""
    modules = [ModuleErrors(0.0, 0.5), ModuleErrors(0.5, math.inf, is_overflowing=True)]
    assert 1 == first_divergence(modules, LIMIT, is_rounded=True)
    assert 0 == first_divergence(modules, LIMIT, is_rounded=False)


def test_rounded_modules_must_exceed_the_usual_error() -> None:
    """A rounded module has to exceed the usual own error and its input error.

    A difference of large numbers amplifies rounding.
    """
    usual = [ModuleErrors(0.01, 0.015)] * 4
    assert first_divergence(usual, LIMIT, is_rounded=True) is None
    assert 0 == first_divergence([ModuleErrors(0.0, 0.015)], LIMIT, is_rounded=False)
    assert 4 == first_divergence([*usual, ModuleErrors(0.01, 0.2)], LIMIT, is_rounded=True)
    assert first_divergence([*usual, ModuleErrors(0.05, 0.2)], LIMIT, is_rounded=True) is None


def test_origin_of_a_growth_is_no_module_that_amplifies_and_not_the_root() -> None:
    """The own error of a module that amplifies an inherited one, and of the root, may be larger."""
    output = OutputFidelity("y", 40.0, 1.0, 1e-2, 1e-2)
    errors = {"a": (1e-7, 1e-7), "b": (2e-7, 5e-3), "c": (5e-3, 1.4e-2), "": (0.0, 2e-2)}
    replay = ProofReplay(
        reference="",
        candidate="",
        samples=QualitySamples("random", 1, 0),
        outputs=(ComparedOutput(output),),
        threshold=None,
        modules=tuple(
            ComparedModule(ModuleIdentity(name, f"/Net/{name}".rstrip("/"), "Net"), output, fed, own)
            for name, (fed, own) in errors.items()
        ),
    )
    before = {(module.identity.tag, 1): 1e-7 for module in replay.modules or ()}
    origin = replay.find_origin(before)
    assert origin is not None
    assert "b" == origin.identity.module
    assert replay.find_origin({}) is None
    only_root = replay.find_origin({**dict.fromkeys(before, 1.0), ("/Net", 1): 1e-7})
    assert only_root is not None
    assert "" == only_root.identity.module


def test_worst_output_has_the_lowest_end_of_an_interval_in_every_command() -> None:
    """A comparison, its record, and the verification of a file name the same output: also states of an encoder."""
    outputs = [
        OutputFidelity(name, total, 1.0, 1e-2, 1e-2, spread=SampleSpread(total, low, low, total))
        for name, total, low in (("last_hidden_state", 29.5, 29.0), ("present.1.encoder.key", 29.8, 28.8))
    ]
    samples = QualitySamples("random", 4, 0)
    encoder = ModelComparison("", "", samples, tuple(map(ComparedOutput, outputs)), None)
    logits = OutputFidelity("logits", 30.9, 1.0, 1e-2, 1e-2)
    decoder = replace(encoder, outputs=(ComparedOutput(logits), ComparedOutput(replace(outputs[1], sqnr_db=1.0))))
    whole = ModelComparison.of_parts("", "", {"encoder": encoder, "decoder": decoder})
    assert (whole.worst.part, whole.worst.fidelity.name) == ("encoder", "present.1.encoder.key")
    assert encoder.quality["worst_output"] == encoder.worst.fidelity.name == "present.1.encoder.key"
    assert FidelityInfo(tuple(outputs), 6.0, True, 4, samples=samples).worst is outputs[1]
    assert decoder.worst.fidelity is logits
