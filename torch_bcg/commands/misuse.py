"""The one way in which a subcommand refuses what it was asked."""

from __future__ import annotations


class MisuseError(Exception):
    """Said in a sentence, without a traceback; exit code 2."""
