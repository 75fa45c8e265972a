"""How is the command started? By its entry point, or as ``python -m winml.modelkit``."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):  # from 3.11 on
    # ``python -m`` put the working directory first, and modules there are no part of the command.
    del sys.path[0]

import signal


def main() -> None:
    """Run ``winml`` and leave the process."""
    # Neither is it searched by what libraries start.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing is there to tidy up before a verb runs; Python would show where it was interrupted.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from winml.modelkit.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
