"""Entry point of the command and of ``python -m winml.modelkit``."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):  # from 3.11 on
    # ``python -m`` puts the working directory first, and modules there are not part of the command.
    del sys.path[0]

import signal


def main() -> None:
    """Run ``winml`` and exit the process."""
    # Child processes of libraries do not search the working directory either.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # Read by ``ort/library_imports.py``: this process and its workers do nothing beside the command.
    os.environ["_WINML_COMMAND"] = "1"
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # No cleanup is needed before a verb runs, and Python would print a traceback of the interruption.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from winml.modelkit.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
