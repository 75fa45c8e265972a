"""How is the command run without an entry point on the path? As ``python -m winml.modelkit``."""

from __future__ import annotations

from winml.modelkit.cli.main import main

if __name__ == "__main__":
    main()
