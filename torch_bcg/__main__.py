"""``python -m torch_bcg``: a demo that checks itself, a doctor, and ``explain`` from a shell.

Only arguments, exit codes and what is printed are decided here; each subcommand is a module of
``commands``. Exit codes: 0 all right, 1 not, 2 misuse, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._dynamo.exc import BackendCompilerFailed

from torch_bcg import __version__
from torch_bcg.commands import MisuseError, demo, doctor, explain, tables
from torch_bcg.commands.cases import BUILT_IN
from torch_bcg.commands.models import MODELS
from torch_bcg.commands.results import Asked
from torch_bcg.errors import BCGError
from torch_bcg.options import Options

COMMANDS = ("demo", "doctor", "explain")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code.

    Args:
        argv: arguments without the program; those of the process when left out.

    Raises:
        SystemExit: argparse refused the arguments (2), or printed help (0).
    """
    try:
        arguments = _parser().parse_args(_with_default(sys.argv[1:] if argv is None else argv))
        Options.make()  # a wrong TORCH_BCG_* variable is refused before anything is built
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (MisuseError, BCGError) as error:
        print(f"torch_bcg: {error}", file=sys.stderr)
        return 2
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, BCGError):
            raise
        print(f"torch_bcg: {error.inner_exception}", file=sys.stderr)
        return 2
    return code


def _with_default(argv: Sequence[str]) -> list[str]:
    """``demo`` where no subcommand is named."""
    if argv and argv[0] in (*COMMANDS, "-h", "--help", "--version"):
        return list(argv)
    if argv and not argv[0].startswith("-"):
        return list(argv)  # argparse says which subcommands exist
    return ["demo", *argv]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_bcg",
        description="CUDA graphs around the operations that cannot be recorded.",
        epilog="Without a subcommand: demo. Each one has --help.",
    )
    parser.add_argument("--version", action="version", version=f"torch_bcg {__version__}")
    commands = parser.add_subparsers(required=True, metavar="|".join(COMMANDS))
    _add_demo(commands)
    _add_doctor(commands)
    _add_explain(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "compile a small random model, compare every call with eager, show plan and times"
    parser = commands.add_parser("demo", help=about, description=about)
    parser.add_argument(
        "--model",
        choices=(BUILT_IN, *sorted(MODELS)),
        default=BUILT_IN,
        help="%(default)s is built in and runs mixed steps; the others are those of transformers",
    )
    parser.add_argument("--layers", type=_positive, default=4, metavar="N", help="%(default)s")
    parser.add_argument(
        "--lengths",
        type=_length,
        nargs="+",
        default=[16, 48, 96],
        metavar="L",
        help="tokens of one call (at most, of a step), each in turn; 16 48 96",
    )
    parser.add_argument("--calls", type=_calls, default=8, metavar="N", help="of each length; 8")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens; %(default)s")
    _add_output(parser)
    parser.set_defaults(run=_demo)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "say what was found on this machine, and try a small function"
    parser = commands.add_parser("doctor", help=about, description=about)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=_doctor)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "plan a callable for example arguments, under torch.inference_mode(), and print it"
    parser = commands.add_parser("explain", help=about, description=about)
    parser.add_argument(
        "target",
        metavar="pkg.module:make",
        help="make() returns (callable, args) or (callable, args, kwargs); it is called once",
    )
    parser.add_argument("--dump", type=_folder, metavar="DIR", help="write the plan there as well")
    parser.set_defaults(run=_explain)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dump", type=_folder, metavar="DIR", help="write plans and figures there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _demo(arguments: argparse.Namespace) -> int:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise MisuseError("--device cuda: torch finds no GPU here; python -m torch_bcg doctor.")
    if not arguments.json and importlib.util.find_spec("rich") is None:
        raise MisuseError("The table needs rich: pip install '.[demo]', or --json.")
    asked = Asked(
        model=arguments.model,
        layers=arguments.layers,
        lengths=tuple(dict.fromkeys(arguments.lengths)),
        calls=arguments.calls,
        device=device,
        seed=arguments.seed,
        dump=arguments.dump,
    )
    result = demo.run(asked, progress=not arguments.json and sys.stderr.isatty())
    if arguments.json:
        print(result.json())
    else:
        tables.show(result)
    return 0 if result.passed else 1


def _doctor(arguments: argparse.Namespace) -> int:
    found = doctor.examine()
    print(found.json() if arguments.json else found)
    return 0 if found.healthy else 1


def _explain(arguments: argparse.Namespace) -> int:
    print(explain.text_of(arguments.target, arguments.dump), end="")
    return 0


def _positive(text: str) -> int:
    return _at_least(1, text)


def _length(text: str) -> int:
    return _at_least(2, text)  # Dynamo never shares a graph between length 1 and others


def _calls(text: str) -> int:
    return _at_least(3, text)  # a new shape is replayed from its third call on


def _at_least(least: int, text: str) -> int:
    value = int(text) if text.isdecimal() else least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from {least} up")
    return value


def _folder(text: str) -> Path:
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: {error.strerror}") from None
    return path


if __name__ == "__main__":
    sys.exit(main())
