"""How is the command started? By its entry point, or as ``python -m winml.modelkit``."""

from __future__ import annotations

import signal

__all__ = ["main"]


def main() -> None:
    """Run ``winml`` and leave the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing is there to tidy up before a verb runs; Python would show where it was interrupted.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from winml.modelkit.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
