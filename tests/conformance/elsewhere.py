"""Checks pairs in a process of its own, and prints a line of JSON for each.

    python tests/conformance/elsewhere.py WAY FOLDER PROGRAM ...

For ways that need two devices, set before TensorFlow has made a tensor, or a process that goes on
with what another one has left in FOLDER.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path[:0] = map(str, Path(__file__).parents[1:3])

import ways  # noqa: E402 - after the settings
from programs import PROGRAMS  # noqa: E402


def error_said(error):
    text = "".join(traceback.format_exception(error))
    return {"error": type(error).__name__, "text": str(error), "traceback": text[-4000:]}


def main(way, folder, *names):
    way = ways.WAYS[way]
    if way.process == "replicas":
        ways.two_replicas_strategy()
    ways.FOLDER["restored"] = folder
    for name in names:
        said = {"program": name, "error": None}
        try:
            ways.check(PROGRAMS[name], way)
        except Exception as error:
            said |= error_said(error)
        print("\nPAIR", json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
