"""Collected where TFLOOP_CONFORMANCE=1 asks for it: a part of the pairs takes minutes, all of them
(with TFLOOP_ALL_PAIRS=1, spread by `-n auto --dist=loadgroup`) the better part of an hour.
"""

import os

collect_ignore_glob = [] if os.environ.get("TFLOOP_CONFORMANCE") else ["test_*.py"]
