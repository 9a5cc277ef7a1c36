"""What ``python -m torch_bcg`` does, one module a subcommand; nothing else imports this folder."""

from torch_bcg.commands.misuse import MisuseError

__all__ = ["MisuseError"]
