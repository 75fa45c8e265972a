"""Options of the optimizer, declared once: general options, and an option for each capability of the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from winml.modelkit.fields import DEVICE, declare
from winml.modelkit.optimize.capabilities import CAPABILITIES, LEVEL_WORDS, STANDARD_OPSET, Level, Operators

OPTIMIZATION = "Optimization"
"""Group of what the optimizer changes, and where."""
_CAPABILITY_GROUP = "Graph optimizations"
"""Group of the options that switch one capability on or off."""


OPERATORS: Mapping[str, Any] = {
    "default": "onnxruntime",
    "text": "Operators to fuse into. `onnxruntime`: those of ONNX Runtime (`com.microsoft`) that the execution "
    f"provider supports. `standard`: those of ONNX, at opset {STANDARD_OPSET} unless `opset` is set, for other "
    "readers; no operator of ONNX Runtime is written.",
}
"""Declaration of the option, which several verbs have, apart from its group."""


@dataclass(kw_only=True)
class _NamedFields:
    """Everything but the capabilities."""

    level: Level = declare(
        "none",
        OPTIMIZATION,
        text=f"Optimization level. {'. '.join(f'`{name}`: {words}' for name, words in LEVEL_WORDS.items())}.",
        is_common=True,
    )
    ep: str | None = declare(None, DEVICE, metavar="NAME", min_length=1, default_words="any", is_common=True)
    """Target execution provider, such as `qnn`. Optimizations whose operators it does not support are skipped."""
    operators: Operators = declare(**OPERATORS, group=OPTIMIZATION)
    opset: int | None = declare(None, OPTIMIZATION, minimum=7, default_words="no conversion", is_common=True)
    """Convert the model to this opset version first."""
    module: tuple[str, ...] = declare(
        (), OPTIMIZATION, metavar="SELECTOR", min_length=1, default_words="all", is_common=True
    )
    """Optimize only these modules. Submodules are included."""
    exclude: tuple[str, ...] = declare((), OPTIMIZATION, metavar="SELECTOR", min_length=1, is_common=True)
    """Do not optimize these modules. Submodules are included. They are still normalized."""


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
                    _CAPABILITY_GROUP,
                    text=f"{entry.words[0].upper()}{entry.words[1:]}.",
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
