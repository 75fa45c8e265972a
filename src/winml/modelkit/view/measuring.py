"""Measurements for a page, of what no earlier run has measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from winml.modelkit.view.known import EarlierResult, results_in

_SOURCE = Path("--measure")
"""Place of a file in the results of this run."""


def measure_missing(
    names: Sequence[str], prints: Sequence[set[str]], known: Iterable[EarlierResult]
) -> list[EarlierResult]:
    """Measure the time of each module, and of two models the error of each module, unless they are known.

    Args:
        names: One or two models, as passed by the user.
        prints: Fingerprints of the files of each model.
        known: Results of earlier runs.

    Raises:
        StageError: a model cannot be run.
        UsageError: two models take different inputs.
    """
    keys: dict[str, set[str]] = {}
    for result in known:
        keys.setdefault(result.fingerprint, set()).update(measure.key for measure in result.measures)

    def has(prefix: str, fingerprint: str) -> bool:
        return any(key.startswith(prefix) for key in keys.get(fingerprint, ()))

    results: list[EarlierResult] = []
    if not all(has("time", fingerprint) for side in prints for fingerprint in side):
        from winml.modelkit.profile.verb import profile_model

        profiled = profile_model(*names, by_module=True)
        for profile in profiled.values() if isinstance(profiled, dict) else [profiled]:
            results += results_in(profile.as_record(), _SOURCE)
    if len(names) > 1 and not all(has("own error", fingerprint) for fingerprint in prints[-1]):
        from winml.modelkit.builds.compared_models import compare_models

        results += results_in(compare_models(names[0], names[1], by_module=True).as_record(), _SOURCE)
    return results
