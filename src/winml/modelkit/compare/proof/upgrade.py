"""Upgrade check: a verification compared with the result of one in another environment, by module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pydantic

from winml.modelkit.compare.fidelity import LOSS_DB, ROUNDING, ROUNDING_DB, is_loss
from winml.modelkit.compare.proof.execution import ExecutedModule, RunTimes
from winml.modelkit.compare.proof.records import ProofBase
from winml.modelkit.compare.records import ModuleChange, UpgradeCheck, changed_counts
from winml.modelkit.errors import InputError, UsageError, WinMLError, opt
from winml.modelkit.options import parse_options, read_json_file
from winml.modelkit.ort.execution_providers import short_name
from winml.modelkit.ort.sessions import CPU
from winml.modelkit.verdicts import DISTURBED, Verdict
from winml.modelkit.words import count_noun, sqnr_words

if TYPE_CHECKING:
    from winml.modelkit.compare.proof.records import ProofPart
    from winml.modelkit.compare.records import ProofReplay
    from winml.modelkit.ort.devices import ChosenProvider

_GROWTH = 10 ** (LOSS_DB / 20)
"""The loss as a ratio of errors."""
_LEAST_RATIO = 1.6
"""Ratio of times from which they differ. Measured: up to 1.52 between idle processes of one environment."""
_OTHER_LOAD = 0.1
"""Share of all cores that other programs may use. Chosen: an idle system is far below, a program on one of two to eight
cores is above."""
_LEAST_SHARE = 0.01
"""Share of a run below which the time of a module is not compared. Chosen: kernels are timed to a microsecond."""


class _BaselineOutput(ProofBase):
    name: str
    sqnr_db: float | None = None
    problem: str = ""


class _BaselineModule(ProofBase):
    tag: str
    call: int = 1
    own_error: float | None = None


class _Recorded(ProofBase):
    sha256: str


class Baseline(ProofBase):
    """JSON of ``winml verify`` in another environment, as far as it is compared."""

    schema_version: Literal[1]
    provider: str | None = None
    versions: dict[str, str]
    sha256: str = ""
    """SHA-256 of the verified file; empty for several parts."""
    outputs: tuple[_BaselineOutput, ...]
    modules: tuple[_BaselineModule, ...] | None = None
    recorded: _Recorded | None = None
    run_times: RunTimes | None = None
    machine: str = ""
    execution: tuple[ExecutedModule, ...] | None = None
    parts: dict[str, Baseline] = pydantic.Field(default_factory=dict)


def read_baseline(path: Path) -> Baseline:
    """Read the JSON of an earlier verification.

    Raises:
        UsageError: there is no such file.
        InputError: the file is damaged, or is another JSON.
    """
    if not path.exists():
        raise UsageError(
            f"{opt.baseline} {path}: no such file",
            hint=f"Write it in the other environment: winml verify FOLDER -f json > {path.name}",
        )
    try:
        return parse_options(Baseline, read_json_file(path), str(path))
    except (WinMLError, OSError, ValueError) as error:
        reason = error.message if isinstance(error, WinMLError) else str(error)
        raise InputError(
            f"{path}: no result of winml verify: {reason.removeprefix(f'{path}: ')}",
            hint=f"Write it in the other environment: winml verify FOLDER -f json > {path.name}",
        ) from error


def refuse_other_baseline(baseline: Baseline, part: ProofPart, provider: ChosenProvider | None, name: str) -> None:
    """Refuse an earlier verification of another build, or on another provider.

    Args:
        baseline: The earlier verification of a part.
        part: The proof of the part.
        provider: The execution provider of this verification; ``None``: the CPU provider.
        name: Name of the file of the earlier one.

    Raises:
        UsageError: says what differs.
    """
    if baseline.recorded is None or baseline.recorded.sha256 != part.sha256:
        raise UsageError(
            f"{name} is the result of another build than the proof of {part.file}",
            hint="Verify the folder that it was made with; a new build of the model is compared with "
            f"{opt.against} NEW.",
        )
    before, now = (baseline.provider or CPU[0]), (CPU[0] if provider is None else provider.provider.name)
    if before != now:
        raise UsageError(
            f"{name} is of {before}, and this run is on {now}", hint=f"Select the same: {opt.ep} {short_name(before)}"
        )


def check_upgrade(result: ProofReplay, baseline: Baseline) -> UpgradeCheck:
    """Compare the verification of one part with an earlier one.

    Args:
        result: The verification, with its modules and its execution where they could be measured.
        baseline: The earlier verification of the same part, on the same provider.
    """
    times = baseline.run_times, result.run_times
    before, after = baseline.execution, result.execution
    is_same_machine = baseline.machine == result.machine
    errors = {(module.tag, module.call): module.own_error for module in baseline.modules or ()}
    origin = result.find_origin(errors)
    return UpgradeCheck(
        versions={
            package: versions
            for package in {**baseline.versions, **result.environment}
            if len({*(versions := (baseline.versions.get(package), result.environment.get(package)))}) > 1
        },
        outputs={
            output.name: (output.sqnr_db, found)
            for output in baseline.outputs
            if (found := _sqnr_db(result, output.name)) != output.sqnr_db
        },
        quality=_judge_quality(result, baseline),
        placement=_judge_placement(before, after, result.provider_name),
        time=_judge_time(*times, is_same_machine),
        run_ms=(None if times[0] is None else times[0].median_ms, result.run_ms),
        modules=tuple(_changed_modules(result, baseline, is_timed=is_same_machine and _is_changed(*times))),
        origin="" if origin is None else origin.identity.tag,
    )


def _sqnr_db(result: ProofReplay, name: str) -> float | None:
    """Return the SQNR of an output; `None` if it cannot be compared."""
    found = (output.fidelity for output in result.outputs if output.fidelity.name == name)
    return next((fidelity.sqnr_db for fidelity in found if not fidelity.problem), None)


def _judge_quality(result: ProofReplay, baseline: Baseline) -> Verdict:
    """Return the verdict on the errors of all outputs."""
    losses = []
    for output in baseline.outputs:
        before, after = output.sqnr_db, _sqnr_db(result, output.name)
        if output.problem or before is None or (after is not None and not is_loss(before, after)):
            continue
        losses.append(f"{output.name} from {sqnr_words(before)} to {result.quality_words(output.name)}")
    reason = ", ".join(losses) or f"{count_noun(len(baseline.outputs), 'output')} compared"
    return Verdict.of(f"no output has lost {LOSS_DB:g} dB and fallen below {ROUNDING_DB:g} dB", not losses, reason)


def _judge_placement(
    before: Sequence[ExecutedModule] | None, after: Sequence[ExecutedModule] | None, provider: str
) -> Verdict:
    """Return the verdict on the providers of the nodes: whether more kernels run elsewhere."""
    question = f"no more nodes run outside of {provider}"
    if before is None or after is None:
        where = "in this environment" if after is None else "in the baseline"
        return Verdict.undecided(question, f"kernels were not recorded {where}", "a provider that records its kernels")

    def strays(modules: Sequence[ExecutedModule]) -> int:
        return sum(count for module in modules for name, count in module.providers.items() if name != provider)

    counts = strays(before), strays(after)
    return Verdict.of(question, counts[1] <= counts[0], f"{counts[0]} before, {counts[1]} now")


def _judge_time(before: RunTimes | None, after: RunTimes | None, is_same_machine: bool) -> Verdict:
    """Return the verdict on the time of a run."""
    question = "a run is not slower"
    if before is None or after is None:
        return Verdict.undecided(question, "runs of one side were not timed", "the time of both")
    words = f"{before.median_ms:.3g} ms before, {after.median_ms:.3g} ms now"
    if not is_same_machine:
        return Verdict.undecided(question, f"{words}, on different machines", "both runs on one machine")
    if (change := _compare_times(before, after)) is None:
        return Verdict.undecided(question, f"{words}, while other programs ran", "an idle machine")
    return Verdict.of(question, change != "slower", f"{words}: {change}")


def _compare_times(before: RunTimes, after: RunTimes) -> Literal["slower", "faster", "no difference found"] | None:
    """Compare times of two processes; `None` if other load on the machine may explain the difference.

    The fastest runs are compared. Their ratio has to exceed that of the median to the fastest run on either side.
    """
    ratio = after.fastest_ms / max(before.fastest_ms, 1e-9)
    spread = max(times.median_ms / max(times.fastest_ms, 1e-9) for times in (before, after))
    if max(before.other_load, after.other_load) > _OTHER_LOAD:
        return None
    limit = max(_LEAST_RATIO, spread)
    if ratio > limit:
        return "slower"
    if ratio < 1 / limit:
        return "faster"
    return None if spread > DISTURBED else "no difference found"


def _is_changed(before: RunTimes | None, after: RunTimes | None) -> bool:
    """Return True if a run is slower or faster."""
    return before is not None and after is not None and _compare_times(before, after) in ("slower", "faster")


def _changed_modules(result: ProofReplay, baseline: Baseline, *, is_timed: bool) -> Iterator[ModuleChange]:
    """Yield the modules that differ.

    Args:
        result: The verification.
        baseline: The earlier one.
        is_timed: Compare times: without a difference of the whole run, those of modules are noise.
    """
    errors = _changed_errors(result, baseline)
    before, after = dict[str, ExecutedModule](), dict[str, ExecutedModule]()
    if baseline.execution is not None and result.execution is not None:
        before, after = ({module.tag: module for module in side} for side in (baseline.execution, result.execution))
    names = {tag: (module.module, module.class_name) for tag, module in {**before, **after}.items()}
    names |= {
        module.identity.tag: (module.identity.module, module.identity.class_name) for module in result.modules or ()
    }
    least_ms = _LEAST_SHARE * (result.run_times.median_ms if result.run_times else math.inf)
    for tag, (path, class_name) in names.items():
        executions = [side.get(tag, _NOT_EXECUTED) for side in (before, after)]
        change = ModuleChange(
            path,
            tag,
            class_name,
            own_error=errors.get(tag),
            nodes=changed_counts(*(module.nodes for module in executions)),
            kernels=changed_counts(*(module.operators for module in executions)),
            providers=changed_counts(*(module.providers for module in executions))
            if len({name for module in executions for name in module.providers}) > 1
            else {},
            ms=_changed_ms(executions[0].times, executions[1].times, least_ms) if is_timed else None,
        )
        if change.is_changed:
            yield change


_NOT_EXECUTED = ExecutedModule(module="", tag="", class_name="", nodes={}, kernels={})
"""Stands for a module that only the other side has."""


def _changed_ms(before: RunTimes | None, after: RunTimes | None, least_ms: float) -> tuple[float, float] | None:
    """Return the fastest times of a module if they differ by more than the noise and a share of the run."""
    if before is None or after is None or abs(after.fastest_ms - before.fastest_ms) < least_ms:
        return None
    return (before.fastest_ms, after.fastest_ms) if _is_changed(before, after) else None


def _changed_errors(result: ProofReplay, baseline: Baseline) -> dict[str, tuple[float, float]]:
    """Tag → own error before and after, of modules whose error has doubled or halved, beyond rounding.

    The error of a module that now has NaN or infinity is infinite.
    """
    before = {(module.tag, module.call): module.own_error for module in baseline.modules or ()}
    changed: dict[str, tuple[float, float]] = {}
    for module in result.modules or ():
        earlier, now = before.get((module.identity.tag, module.identity.call)), module.own_error
        if earlier is None or now is None:
            continue
        if max(earlier, now) > ROUNDING and max(earlier, now) > _GROWTH * min(earlier, now):
            changed.setdefault(module.identity.tag, (earlier, now))
    return changed
