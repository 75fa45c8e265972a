"""``winml perf --generation``: how fast does a decoder begin, and how fast does it go on?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._answers import show_answer
from winml.modelkit.cli._runnable_models import exported_path
from winml.modelkit.cli._streams import library_output_to_stderr
from winml.modelkit.errors import UsageError

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import FoundModel
    from winml.modelkit.measure.latency import LatencyOptions
    from winml.modelkit.runtime.opened_model import RunOptions

__all__ = ["check_generation", "few_runs", "generation_option", "show_generation"]

_F = TypeVar("_F", bound=Callable[..., Any])

_RUNS, _WARMUP = 20, 2
"""Chosen: a prompt of a thousand tokens takes seconds, and each length is measured on its own."""


def generation_option(command: _F) -> _F:
    """Add the option that measures a decoder by prompt and step."""
    return click.option(
        "--generation",
        is_flag=True,
        help="Of a model with a cache: time to the first token by length of the prompt, tokens/s by what is cached.",
    )(command)


def check_generation(options: Mapping[str, Any]) -> None:
    """Refuse what does not go together.

    Raises:
        UsageError: an option that says what a run is fed, or that measures something else.
    """
    if not options["generation"]:
        return
    if not options["io_binding"]:
        raise UsageError(
            "--no-io-binding has no meaning with --generation, whose cache always stays in memory of ONNX Runtime",
            hint="Leave it out.",
        )
    for name in ("by_module", "module", "baseline", "input_data", "shape_config", "batch_size"):
        if options[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} has no meaning with --generation, which chooses prompts and steps itself",
                hint="Give one of them.",
            )


def few_runs(latency: LatencyOptions, iterations: int | None) -> LatencyOptions:
    """Return how often each length is measured: seldom, unless ``--iterations`` says otherwise."""
    return replace(latency, iterations=iterations or _RUNS, warmup=min(latency.warmup, _WARMUP))


def show_generation(
    model: FoundModel, run_options: RunOptions, latency: LatencyOptions, options: Mapping[str, Any]
) -> None:
    """Measure and show the table."""
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.inference.generation.measuring import measure_generation
    from winml.modelkit.report.generation_perf import print_generation_perf

    with library_output_to_stderr():
        result = measure_generation(
            exported_path(model, None if options["quiet"] else show_step),
            run_options.shown,
            run_options.choose_provider(),
            threads=run_options.threads,
            seed=run_options.seed,
            latency=few_runs(latency, options["iterations"]),
        )
    show_answer(result.as_record(), options, lambda console: print_generation_perf(result, console))
