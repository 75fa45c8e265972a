"""The frozen options of the optimize stage, with a flag for each capability. Fields are declared in
``declared_options.py``. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pydantic

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.optimize.capabilities import (
    ATTENTION_VARIANT,
    CAPABILITIES,
    DECODER_FUSIONS,
    LEAST_STANDARD_OPSET,
    LEVELS,
    STANDARD_OPSET,
    WHOLE_GRAPH,
    Capability,
)
from winml.modelkit.optimize.declared_options import OptimizeFields
from winml.modelkit.options import Options
from winml.modelkit.ort.execution_providers import checked_short_name
from winml.modelkit.ort.opsets import refuse_unsupported_opset

_ATTENTION_FUSION = CAPABILITIES["group_query_attention_fusion"]


class OptimizeOptions(OptimizeFields, Options):
    """Options of the optimize stage. A capability that is null is enabled by the level."""

    _short_ep = pydantic.field_validator("ep")(checked_short_name)

    @pydantic.model_validator(mode="after")
    def _refuse_unsupported_opset(self) -> OptimizeOptions:
        """Refuse an opset that ONNX Runtime does not support, or without the standard operators to fuse into."""
        refuse_unsupported_opset(self.opset_after(None))
        if self.operators == "standard" and self.opset is not None and self.opset < LEAST_STANDARD_OPSET:
            raise UsageError(
                f"{self.spelled('operators')} standard: opset {self.opset} has no Attention, RMSNormalization and "
                "RotaryEmbedding",
                hint=f"Use {self.spelled('opset')} {LEAST_STANDARD_OPSET} or {STANDARD_OPSET}, or omit it.",
            )
        return self

    @property
    def is_empty(self) -> bool:
        """True if no capability and no conversion is requested."""
        return self.opset_after(None) is None and not any(True for _ in self.enabled())

    def opset_after(self, current: int | None) -> int | None:
        """Return the opset after the optimization of a graph; `None` if unknown.

        Args:
            current: Opset of the graph; None: unknown.
        """
        if self.opset is not None or self.operators != "standard":
            return self.opset or current
        return max(STANDARD_OPSET, current or 0)

    @property
    def folds_constants(self) -> bool:
        """True unless constant folding is disabled by name."""
        return self._flag_of(CAPABILITIES["constant_folding"]) is not False

    @property
    def is_limited(self) -> bool:
        """True if the optimization is limited to selected modules."""
        return bool(self.module or self.exclude)

    def refuse_whole_graph_options(self) -> None:
        """Refuse selected modules together with options for the whole graph, or without an optimization.

        Raises:
            UsageError: the message names the option.
        """
        if not self.is_limited:
            return
        flag = spell("module" if self.module else "exclude")
        whole_graph = [CAPABILITIES[name] for name in WHOLE_GRAPH if self._flag_of(CAPABILITIES[name])]
        if self.opset_after(None) is not None or whole_graph:
            converting = "opset" if self.opset is not None else "operators"
            reason = (
                f"{self.spelled(whole_graph[0].name)} reads" if whole_graph else f"{self.spelled(converting)} converts"
            )
            raise UsageError(
                f"{flag} cannot be combined: {reason} the whole graph", hint="Run them in separate commands."
            )
        if self.is_empty:
            raise UsageError(
                f"{flag} selects modules, but no optimization is requested",
                hint=f"Set a {opt.level}, or enable an optimization by name.",
            )

    def refuse_older_opset(self, opset: int) -> None:
        """Refuse capabilities enabled by name without operators at the opset of the graph.

        If the execution provider lacks the operators of ONNX Runtime, a capability creates ONNX operators, some of them
        only in newer opsets.

        Args:
            opset: Version of ONNX's operators in the graph, once it is converted.

        Raises:
            UsageError: names the capabilities, and the version that they need.
        """
        idle = [
            entry
            for entry in CAPABILITIES.values()
            if self._flag_of(entry) and not self._suits_target(entry) and entry.since_opset > opset
        ]
        if not idle:
            return
        needed = max(entry.since_opset for entry in idle)
        raise UsageError(
            f"{', '.join(self.spelled(entry.name) for entry in idle)}: execution provider {self.ep} does not "
            f"support the resulting operators in opset {opset}",
            hint=f"They are standard ONNX from opset {needed}: convert the graph with {self.spelled('opset')} "
            f"{needed}, omit the option, or use a different provider.",
        )

    def with_decoder_fusions(self, variant: Collection[str] = ()) -> OptimizeOptions:
        """Return the options with the fusions of a decoder with a cache enabled.

        With an explicit level, only the variant is enabled. Explicit flags stay, and fusions unsupported by the
        execution provider stay off.

        Args:
            variant: Names of :data:`ATTENTION_VARIANT`, for an attention over a cache that is fused.
        """
        if "level" in self.model_fields_set:
            return self.with_attention_variant(variant)
        fused = self._with_enabled(variant)._with_enabled(DECODER_FUSIONS)
        return fused if fused.is_enabled(_ATTENTION_FUSION) else self._with_enabled(DECODER_FUSIONS)

    def with_attention_variant(self, variant: Collection[str]) -> OptimizeOptions:
        """Return the options with a variant of the attention over a cache, if such an attention is fused.

        Args:
            variant: Names of :data:`ATTENTION_VARIANT`. Explicit flags stay.
        """
        changed = self._with_enabled(variant)
        return changed if changed.is_enabled(_ATTENTION_FUSION) else self

    def _with_enabled(self, names: Collection[str]) -> OptimizeOptions:
        """Return the options with capabilities enabled that have no flag and that the provider supports."""
        entries = [CAPABILITIES[name] for name in names if not (self.is_limited and name in WHOLE_GRAPH)]
        options = self
        for entry in entries:
            if options._flag_of(entry) is None and options._suits_target(entry):
                options = options.model_copy(update={entry.name: True})
        return options

    def with_plain_layers(self, operators: Collection[str]) -> OptimizeOptions:
        """Return the options without fusions that put one of these operators into an operator of ONNX Runtime.

        A fusion that is enabled by name stays on.
        """
        entries = [entry for entry in CAPABILITIES.values() if entry.layer in operators and self._is_default(entry)]
        return self.model_copy(update={entry.name: False for entry in entries if self._flag_of(entry) is None})

    def enabled(self) -> Iterator[Capability]:
        """Yield the enabled capabilities, in the order of the registry.

        Raises:
            UsageError: see :meth:`is_enabled`.
        """
        return (entry for entry in CAPABILITIES.values() if self.is_enabled(entry))

    def named(self) -> Iterator[Capability]:
        """Yield the capabilities enabled by name, except the capabilities that builds enable for every decoder."""
        by_builds = {*DECODER_FUSIONS, *WHOLE_GRAPH, *ATTENTION_VARIANT}
        return (entry for entry in CAPABILITIES.values() if self._flag_of(entry) and entry.name not in by_builds)

    def is_enabled(self, capability: Capability) -> bool:
        """Return True if a capability is enabled.

        Raises:
            UsageError: it is enabled by name and the execution provider does not run the operators it creates.
        """
        flag = self._flag_of(capability)
        if flag is None:
            return self._is_default(capability)
        if flag and not self._suits_target(capability) and not capability.transformers:
            if self.operators == "standard":
                raise UsageError(
                    f"{self.spelled(capability.name)}: opset {self.opset_after(None)} of ONNX does not have the "
                    "resulting operators",
                    hint=f"Omit it, or {self.spelled('operators')} standard.",
                )
            raise UsageError(
                f"{self.spelled(capability.name)}: execution provider {self.ep} does not support the resulting "
                "operators",
                hint=f"Omit it, or use one of these providers: {', '.join(capability.providers)}.",
            )
        return flag

    def uses_contrib(self, capability: Capability) -> bool:
        """Return True if an enabled capability may create operators of ONNX Runtime."""
        is_level_reached = LEVELS.index(self.level) >= LEVELS.index("extended")
        return self._suits_target(capability) and (is_level_reached or self._flag_of(capability) is True)

    def plug_ins(self) -> dict[str, str]:
        """Return enabled capability of a plug-in → its package and version."""
        sources = {entry.name: CAPABILITIES.source(entry.name) for entry in self.enabled()}
        return {name: source for name, source in sources.items() if source}

    def _flag_of(self, capability: Capability) -> bool | None:
        flag: bool | None = getattr(self, capability.name)
        return flag

    def _is_default(self, capability: Capability) -> bool:
        """Return True if the level enables a capability that the provider supports."""
        if self.is_limited and capability.name in WHOLE_GRAPH:
            return False
        if capability.level is None or LEVELS.index(self.level) < LEVELS.index(capability.level):
            return False
        return self._suits_target(capability) or bool(capability.transformers)

    def _suits_target(self, capability: Capability) -> bool:
        """Return True if the operators that a capability creates are those requested, and the provider has them."""
        if self.operators == "standard" and capability.providers:
            return 0 < capability.standard_opset <= (self.opset_after(None) or 0)
        providers = self.judging_capability(capability).providers
        return self.ep is None or not providers or self.ep in providers

    def judging_capability(self, capability: Capability) -> Capability:
        """Return the capability whose kernels a capability needs: an enabled one that replaces them, or itself."""
        changes = (
            entry
            for entry in CAPABILITIES.values()
            if entry.replaces_kernels and entry.sets is not None and entry.sets[0] == capability.name
        )
        return next((entry for entry in changes if self._flag_of(entry)), capability)
