"""The tests with the versions that people have, and the types as users see them.

`nox -s middle` runs the whole suite on one pair, `nox -s lowest -- tests/test_laws.py` a part.
Pythons that aren't installed are said and left out.
"""

import nox

nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = False

# Where the range begins, of each library that the core needs.
LOWEST = ["tensorflow==2.20.0", "keras==3.10.0", "numpy==1.26.0"]
LOWEST += ["absl-py==2.1.0", "pydantic==2.11.0", "rich==13.0.0"]
MIDDLE = ["tensorflow==2.20.0", "keras==3.13.2"]  # what Colab ships


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The oldest of everything."""
    _tests(session, *LOWEST)


@nox.session(python="3.13")
def middle(session: nox.Session) -> None:
    """What many have."""
    _tests(session, *MIDDLE)


@nox.session(python=["3.11", "3.12", "3.13"])
def newest(session: nox.Session) -> None:
    """The newest releases."""
    _tests(session)


@nox.session(python="3.13")
def nightly(session: nox.Session) -> None:
    """What comes next."""
    session.install("-e", ".[dev]")
    # The nightlies lie in the same folders under other names, and TensorFlow's asks for Keras'.
    session.run_install("python", "-m", "pip", "uninstall", "-q", "-y", "tensorflow", "keras")
    session.install("--pre", "tf-nightly", "keras-nightly")
    _pytest(session)


@nox.session(python="3.11")
def types(session: nox.Session) -> None:
    """A program of a user, in the strict mode of mypy and Pyright."""
    session.install(".", "mypy==2.4.1", "pyright==1.1.414")
    program = f"{session.invoked_from}/tests/typed/program.py"
    session.chdir(session.create_tmp())  # so that the package is the installed one
    session.run("mypy", "--strict", program)
    session.run("pyright", "--pythonpath", f"{session.bin}/python", program)
    session.run("python", program)


def _tests(session: nox.Session, *versions: str) -> None:
    session.install("-e", ".[dev]", *versions)
    _pytest(session)


def _pytest(session: nox.Session) -> None:
    session.run("python", "-c", _VERSIONS)
    session.run("python", "-m", "pytest", "-n", "auto", *session.posargs)


_VERSIONS = """
import sys, keras, tensorflow as tf
print(f"Python {sys.version.split()[0]}, TensorFlow {tf.__version__}, Keras {keras.__version__}")
"""
