"""Which options does the optimizer have? Each is declared here, once, and one for each capability of the registry."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from winml.modelkit.fields import declare
from winml.modelkit.optimize.capabilities import CAPABILITIES, LEVEL_WORDS, Level

__all__ = ["OptimizeFields"]

_GROUP = "Optimization"


@dataclass(kw_only=True)
class _NamedFields:
    """Everything but the capabilities."""

    level: Level = declare(
        "none",
        f"How much is done by default. {'; '.join(f'`{name}`: {words}' for name, words in LEVEL_WORDS.items())}.",
        _GROUP,
    )
    ep: str | None = declare(
        None,
        "Execution provider that the result is for, such as `qnn`: leaves out what it has no operators for. Any where "
        "left out.",
        _GROUP,
        metavar="NAME",
        min_length=1,
    )
    opset: int | None = declare(
        None, "Convert to this version of ONNX's operators first. As it is where left out.", _GROUP, minimum=7
    )
    module: tuple[str, ...] = declare(
        (),
        "The only modules that change, with all below them, as selectors. All where left out.",
        _GROUP,
        metavar="SELECTOR",
        min_length=1,
    )
    exclude: tuple[str, ...] = declare(
        (),
        "Modules that stay as they are apart from the plain form, with all below them, as selectors.",
        _GROUP,
        metavar="SELECTOR",
        min_length=1,
    )


if TYPE_CHECKING:
    OptimizeFields = _NamedFields
else:
    OptimizeFields = dataclasses.make_dataclass(
        "OptimizeFields",
        [
            (
                entry.name,
                bool | None,
                declare(
                    None,
                    f"{entry.words[0].upper()}{entry.words[1:]}.",
                    "Capabilities",
                    spelling=f"--enable-{entry.flag}/--disable-{entry.flag}",
                ),
            )
            for entry in CAPABILITIES.values()
        ],
        bases=(_NamedFields,),
        kw_only=True,
        # Nobody makes one: methods that nobody calls would cost the help of the verb milliseconds.
        init=False,
        repr=False,
        eq=False,
    )
