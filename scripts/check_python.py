"""Checks that this Python version is supported, before an environment is made with it.

Any Python 3 can run this file, so that an unsupported one ends with a clear message instead of an error of pip.
"""

import sys

OLDEST = (3, 10)
NEWEST = (3, 13)

if not OLDEST <= sys.version_info[:2] <= NEWEST:
    sys.exit(
        "winml needs Python 3.10 to 3.13; this is Python %d.%d (%s).\n"  # noqa: UP031 -- an older Python has to parse it
        "Name another one: make PYTHON=python3.12 demo" % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
