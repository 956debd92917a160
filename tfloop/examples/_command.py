"""How an example meets its command line: flags in, one clear line for what the user got wrong."""

import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import absl.app
import absl.flags
import absl.logging

import tfloop

absl.flags.DEFINE_boolean("tf_log", False, "Show TensorFlow's own log lines.")


class UnusableInput(Exception):
    """Something the user named can't be used; the text is for the terminal."""


def run(main: Callable[[Any], None], argv: Sequence[str] | None = None) -> None:
    """Parses the flags, runs `main(config)` and exits.

    Exit codes: 0, or 2 with one line on stderr for a bad flag, value, file or folder, or 130
    after Ctrl-C. Any other exception is a fault of the program and keeps its traceback.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return absl.flags.FLAGS(argv)
        except absl.flags.Error as error:
            _fail(error)

    def with_config(argv: Sequence[str]) -> None:
        if not absl.flags.FLAGS.tf_log:
            absl.logging.set_verbosity(absl.logging.ERROR)  # TFDS tells much.
        if len(argv) > 1:
            _fail(f"Unexpected argument {argv[1]!r}: settings are flags, as in --lr 1e-3.")
        try:
            config = tfloop.flags.config()
        except (ValueError, OSError) as error:
            _fail(error)
        try:
            main(config)
        except UnusableInput as error:
            _fail(error)
        except KeyboardInterrupt:
            sys.exit(130)

    flags = absl.flags.FLAGS
    flags.register_key_flag_for_module(sys.argv[0], flags["tf_log"])  # so that --help shows it
    absl.app.run(with_config, argv=argv, flags_parser=parse)


def warn(problem: str) -> None:
    """One line on stderr about something that the user may not have meant."""
    print("warning:", problem, file=sys.stderr, flush=True)


def need(*modules: str) -> None:
    """Says which of the packages that only the examples use aren't installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UnusableInput(
            f"The examples need {' and '.join(missing)}: got the library alone. Install the rest "
            "from the checkout: pip install '.[examples]'"
        )


@contextlib.contextmanager
def blaming(flag: str) -> Iterator[None]:
    """Turns what a value or a file of the user's made impossible into one line about its flag."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UnusableInput(f"{flag} can't be used: {error}") from error


def _fail(problem: object) -> NoReturn:
    print("error:", re.sub(r"\s+", " ", str(problem)).strip(), file=sys.stderr)
    sys.exit(2)
