"""Which options say how modules are quantized, and what do they ask for? Declared here, once, for every verb."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from winml.modelkit.cli._options import columns_option, split_option
from winml.modelkit.errors import UsageError
from winml.modelkit.quantize.options import MODES, Algorithm, BlockSize, CalibrationMethod, QuantizeOptions

if TYPE_CHECKING:
    from winml.modelkit.builds.config import QuantSection

__all__ = ["filled_section", "given_values", "quantization_options", "refuse_flags_without_stage"]

_F = TypeVar("_F", bound=Callable[..., Any])


def quantization_options(
    precisions: Sequence[str], *, unset: str, auto: str = "", more_of_samples: str = ""
) -> Callable[[_F], _F]:
    """Return what gives a verb the options that say how modules are quantized.

    Args:
        precisions: Those the verb takes.
        unset: What is done where no precision is given.
        auto: What is said of a precision that stands for another one.
        more_of_samples: What ``--samples`` means besides.
    """

    def with_options(command: _F) -> _F:
        for option in reversed(_declared_options(precisions, unset, auto, more_of_samples)):
            command = option(command)
        return command

    return with_options


def _declared_options(
    precisions: Sequence[str], unset: str, auto: str, more_of_samples: str
) -> tuple[Callable[[_F], _F], ...]:
    ways = "; ".join(f"{name}: {rules.words}" for name, rules in MODES.items())
    return (
        click.option(
            "-p",
            "--precision",
            type=click.Choice(precisions),
            help=f"Bits of what is quantized{auto}.  [default: {unset}]",
        ),
        click.option(
            "--mode",
            type=click.Choice(list(MODES)),
            help=f"How; the usual one of the precision where left out. {ways}.",
        ),
        click.option(
            "--exclude", metavar="SELECTOR", multiple=True, help="Modules that stay as they are, and those below them."
        ),
        click.option(
            "--include", metavar="SELECTOR", multiple=True, help="The only modules that change, with all below them."
        ),
        click.option(
            "--per-module",
            metavar="JSON",
            help='Precision by selector, such as {"BertPooler": "fp32"}; the first that matches wins; a file or text.',
        ),
        click.option(
            "--per-channel/--per-tensor", default=None, help="A scale for each output channel, or one for a weight."
        ),
        click.option(
            "--block-size",
            type=click.Choice(get_args(BlockSize)),
            help="Weight-only: values of a weight that share a scale.  [default: 32 in 4 bits, 64 in 8 bits]",
        ),
        click.option(
            "--algorithm",
            type=click.Choice(get_args(Algorithm)),
            help="Weight-only: how scales are found: round to nearest, or searched for, which takes longer.  "
            "[default: rtn]",
        ),
        click.option("--symmetric/--asymmetric", default=None, help="Weights without a zero point, or with one."),
        *_range_options(more_of_samples),
        click.option(
            "--min-sqnr", "min_sqnr_db", type=float, metavar="DB", help="Ratio in dB every output has to reach."
        ),
    )


def _range_options(more_of_samples: str) -> tuple[Callable[[_F], _F], ...]:
    return (
        click.option(
            "--calibration-data",
            metavar="DATA",
            help="What qdq finds the ranges of activations with: an .npz file or a folder of them, one array per input "
            "and one file a sample; or a data set for the tokenizer or image processor beside the model: .txt, .csv, "
            ".jsonl, .parquet, a folder of images, a name at the Hub. Else random values.",
        ),
        split_option,
        columns_option,
        click.option(
            "--samples",
            type=click.IntRange(min=1),
            help=f"Samples to find ranges with.  [default: at most 128; 16 random ones]{more_of_samples}",
        ),
        click.option(
            "--method",
            type=click.Choice(get_args(CalibrationMethod)),
            help="How a range is made of the values seen: all of them, or without those that are rare.  "
            "[default: minmax]",
        ),
    )


def given_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options about quantization that were given, as JSON values by key of the section.

    Raises:
        ConfigError: the rules of modules are no JSON.
        UsageError: columns are no pairs of a role and a column.
    """
    from winml.modelkit.evaluate.columns import parse_columns
    from winml.modelkit.options import read_json

    given = {name: options[name] for name in QuantizeOptions.model_fields if options.get(name) not in (None, ())}
    if "per_module" in given:
        given["per_module"], _ = read_json(options["per_module"], "--per-module")
    if "columns" in given:
        given["columns"] = parse_columns(options["columns"])
    return given


def filled_section(section: QuantSection | None, options: Mapping[str, Any]) -> QuantSection | None:
    """Return a section with what the options say; an option wins, and begins a section that is null.

    Raises:
        ConfigError: a value is wrong.
    """
    from winml.modelkit.builds.config import QuantSection
    from winml.modelkit.options import parse_options

    given = given_values(options)
    if not given:
        return section
    base = {} if section is None else section.model_dump(mode="json", exclude_unset=True)
    return parse_options(QuantSection, {**base, **given}, "options")


def refuse_flags_without_stage(options: Mapping[str, Any]) -> None:
    """Refuse options about quantization where the stage is left out.

    Raises:
        UsageError: names the first of them.
    """
    given = [name for name in QuantizeOptions.model_fields if options.get(name) not in (None, ())]
    if given:
        flags = {item.name: item.opts[-1] for item in click.get_current_context().command.params}
        raise UsageError(f"{flags[given[0]]} has no meaning with --no-quant", hint="Leave one of them out.")
