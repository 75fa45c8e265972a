"""A change of the optimizer: ``winml optimize --enable-idempotent-removal``.

Imported for every ``--help`` that lists capabilities, so it names the pass and does not import it.
"""

from __future__ import annotations

from winml.modelkit.extend import Capability

IDEMPOTENT_REMOVAL = Capability(
    "idempotent_removal",
    "remove the second of two equal operators in a row that change nothing the second time: Relu, Abs, Sign, rounding",
    "basic",
    "winml",
    implementation="winml_example.passes:IdempotentRemovalPass",
)
