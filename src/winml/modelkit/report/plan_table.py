"""Table of a plan."""

from __future__ import annotations

from winml.modelkit.report import document as doc
from winml.modelkit.report.plan import Plan


def plan_document(plan: Plan) -> doc.Document:
    """Describe a plan: what is recovered first, what is read, written and removed, and in which steps."""
    fields: list[doc.Field] = [
        *(
            (
                "recovery",
                f"{found.folder}, of a command that was killed or still runs: "
                + (f"would put in place {', '.join(found.completes)}" if found.completes else "would be removed"),
            )
            for found in plan.interrupted
        ),
        *(("reads", str(path)) for path in plan.reads),
        *((f"{number}. {step.name}", step.words) for number, step in enumerate(plan.steps, 1)),
        *(
            (
                "would write",
                f"{file.path}{' (replaced)' * file.replaces}{f' if {file.only_if}' if file.only_if else ''}",
            )
            for file in plan.writes
        ),
        *(("would remove", f"{path}, if nothing uses it") for path in plan.removes),
        *doc.note_fields(plan.notes),
        ("wrote", "nothing: this is a plan"),
    ]
    return doc.Document([doc.Fields(fields)])
