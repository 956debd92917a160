"""Python programs in forks of one process that has imported TensorFlow, and never used it.

    python -W error tests/forked.py

reads Python's arguments, `["examples/gan.py", "--quick"]`, a line for each program, runs it as
`python -W error` would, and answers with a line: its exit code and all it has printed. A fork has
devices, seeds and flags of its own, as any process, and spends no seconds on imports.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: F401
import tensorflow as tf  # noqa: F401

import tfloop  # noqa: F401


def run(form: str, *arguments: str) -> int:
    """Runs a program in this process, to its exit code."""
    try:
        if form == "-m":
            sys.argv = list(arguments)
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif form == "-c":
            sys.argv = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [form, *arguments]
            sys.path.insert(0, os.path.dirname(form))
            runpy.run_path(form, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def answer(command: list[str]) -> dict[str, int | str]:
    """What a program in a fork does."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = run(*command)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {
        "returncode": os.waitstatus_to_exitcode(status),
        "stdout": texts[0],
        "stderr": texts[1],
    }


if __name__ == "__main__":
    # A fork may wait for a thread that it hasn't got; what was only imported has no work for any.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
