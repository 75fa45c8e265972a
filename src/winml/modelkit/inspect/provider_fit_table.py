"""Describes whether a provider runs a file, what keeps nodes from it, and what to do."""

from __future__ import annotations

from winml.modelkit.inspect.provider_fit import ProviderFit
from winml.modelkit.report import document as doc

DISPLAYED_MODULES = 3
"""Modules of a finding unless all are asked for. Chosen: they fit on a line."""

_SAID_BY = {"provider": "the provider itself", "kernels": "its list of kernels", "document": "its documentation"}


def provider_fit_document(fit: ProviderFit) -> doc.Document:
    """Describe how many nodes a provider takes, and each finding that keeps nodes from it."""
    verb = "lists" if fit.basis == "document" else "takes"
    output = f"{verb} all {fit.nodes} nodes" if fit.runs_all else f"{verb} {fit.taken} of {fit.nodes} nodes"
    fields: list[doc.Field] = [
        ("provider", f"{fit.name}, for the {fit.device}: {output}"),
        ("said by", f"{_SAID_BY[fit.basis]} ({fit.source})"),
        *(("limit", f"{limit.count} {limit.operator}: {limit.limit}") for limit in fit.limits),
        *doc.note_fields(fit.notes),
    ]
    remedies = dict.fromkeys(finding.remedy for finding in fit.findings)
    return doc.Document(
        [
            doc.Fields(fields),
            doc.Table(
                doc.columns("keeps nodes from it", ("nodes", "count"), "why", "modules"),
                [
                    [
                        f"{finding.kind} {finding.what}",
                        sum(finding.modules.values()) or "all",
                        finding.reason,
                        doc.first_of(
                            [f"{module or '(the root)'} {count}" for module, count in finding.modules.items()],
                            DISPLAYED_MODULES,
                            "and {} more",
                        ),
                    ]
                    for finding in fit.findings
                ],
            ),
            doc.Fields(
                [
                    *(("do", remedy) for remedy in remedies),
                    *(
                        ("node", f"{name} ({finding.what})", doc.Detail.VERBOSE)
                        for finding in fit.findings
                        for name in finding.nodes
                    ),
                ]
            ),
        ]
    )
