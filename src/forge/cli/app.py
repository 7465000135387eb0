"""The commands and what surrounds them: parsing, one-line errors, exit codes.

A command is imported when it is called, so that `forge --help` starts at once.
"""

from __future__ import annotations

import io
import signal
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Sequence
from typing import Any

from cyclopts import App, CycloptsError, UnknownOptionError

from forge.cli.elsewhere import hint
from forge.cli.output import ReaderLeftError, silence
from forge.errors import DeviceLostError, ForgeError, NonFiniteError, OutOfMemoryError
from forge.run.interrupt import EXIT_INTERRUPTED, leave, with_hangup

# Exit codes, which scripts may rely on; 1 is `verify`'s, for a check that failed. BUG is sysexits'
# EX_SOFTWARE: a mistake in Forge itself.
DONE, USER, NON_FINITE, MACHINE, BUG = 0, 2, 3, 4, 70

EPILOGUE = """\
Exit codes: 0 done, 1 a check failed, 2 a mistake in what was asked, 3 stopped on a number that \
is not finite, 4 the machine failed (disk, memory, GPU), 130 interrupted (Ctrl-C, SIGTERM, SIGHUP, \
or a reader of what train or verify prints that left). With --debug an error \
shows where in the code it happened."""


def make_app(called: str = "") -> App:
    """The commands, by name; the one that is `called` explains itself in its own words."""
    import forge

    app = App(
        name="forge",
        help="Train and run GPTs on a tape that a reader can follow.",
        help_epilogue=EPILOGUE,
        version=forge.__version__,
        result_action="return_value",
    )
    for name, help in (
        ("train", "Train a GPT; with nothing else, on text that this machine already has."),
        ("generate", "Continue a prompt with a trained model."),
        ("eval", "Measure how well a trained model predicts a text."),
        ("plot", "Draw the losses of one or more runs."),
        ("verify", "Hold every op's kernels and gradients on this machine to their definitions."),
        ("kernels", "Show which implementation serves which op."),
        ("bench", "Measure how fast this machine trains and decodes."),
    ):
        function = {"eval": "evaluate"}.get(name, name)
        short = None if name == called else help
        app.command(f"forge.cli.{name}:{function}", name=name, help=short, help_epilogue="")
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    if arguments is None:
        for number in with_hangup(signal.SIGTERM):
            signal.signal(number, leave)
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal's encoding lacks is no reason to stop.
            stream.reconfigure(errors="replace")
    debug = "--debug" in words
    if debug:
        words.remove("--debug")
    code: Any = DONE
    try:
        code = make_app(*words[:1])(words, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read our output has left, as `head` does: nothing is wrong, and nobody to tell.
        silence(sys.stdout)
    except ReaderLeftError as error:
        return _report(error, EXIT_INTERRUPTED)
    except (KeyboardInterrupt, BdbQuit):
        return _report("interrupted", EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - each is reported, and decides the exit code
        if debug:
            traceback.print_exc()
        return _report(*explain(error))
    return code if isinstance(code, int) else DONE


def explain(error: Exception) -> tuple[str, int]:
    """One line about an error, and the exit code it means."""
    if isinstance(error, NonFiniteError):
        return str(error), NON_FINITE
    if isinstance(error, OutOfMemoryError | DeviceLostError):
        return str(error), MACHINE
    if isinstance(error, ForgeError):
        return str(error), USER
    if isinstance(error, CycloptsError):
        return f"[command line] {_usage(error)}", USER
    if isinstance(error, MemoryError):
        return f"[memory] expected enough of it, got too little; {error}", MACHINE
    if isinstance(error, OSError):
        return _machine(error), MACHINE
    kind = type(error).__name__
    return f"[bug] {kind}: {error}; please report it with what --debug shows", BUG


def _usage(error: CycloptsError) -> str:
    """The parser's words, with a hint of ours for what other programs have, before one of its."""
    if isinstance(error, UnknownOptionError) and error.command_chain:
        option = (error.token.keyword or error.token.value).partition("=")[0]
        known = hint(error.command_chain[0], option)
        if known:
            return f"Unknown option: {option}{known}"
    return str(error)


def _machine(error: OSError) -> str:
    text = error.strerror or str(error)
    if text.startswith("["):
        return text
    where = f" for {error.filename}" if error.filename else ""
    return f"[system] expected files and devices to work, got: {text}{where}"


def _report(text: Any, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:
        # What its buffer still holds would fail again when Python ends, with an exit code of 120.
        silence(sys.stdout)
    try:
        print(f"forge: {' '.join(str(text).split())}", file=sys.stderr)
    except OSError:
        # It was a terminal that is gone, and nobody is left to tell: the code says it alone.
        silence(sys.stderr)
    return code
