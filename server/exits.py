"""Exit codes of every command."""

from __future__ import annotations

OK = 0
USAGE = 1
SOME_FAILED = 2
ALL_FAILED = 3
UNAVAILABLE = 4
INTERRUPTED = 130
