"""Settings of the whole suite, made before TensorFlow is imported.

With TFLOOP_TEST_ALL=1, as `.ci/run` sets it, no test is left out, and there are more random
histories, killed runs and pairs of tests/conformance; TFLOOP_TEST_PAIRS=1 runs all pairs.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest  # noqa: E402 - after the settings


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """With TFLOOP_TEST_PLAIN=1 every fast path is off: what holds, holds without them."""
    if os.environ.get("TFLOOP_TEST_PLAIN"):
        from tfloop._compile import launch
        from tfloop._update import cell_update, fused

        monkeypatch.setattr(fused, "_FEW", 10**9)
        monkeypatch.setattr(launch, "_gains", lambda concrete: False)
        monkeypatch.setattr(cell_update, "_LARGE", 2**62)


# The files that take longest. What is one worker's and left for the end would have the others wait.
LONG = ("replicas", "multi_worker", "examples", "mnist_example", "update", "learner", "laws")


def pytest_collection_modifyitems(items):
    """The long files first, the others in their order; what is thorough where it is asked for."""

    def place(item):
        name = item.path.stem.removeprefix("test_")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)
    if not os.environ.get("TFLOOP_TEST_ALL"):
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="it takes long: TFLOOP_TEST_ALL=1"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file is one worker's; of the pairs, those that share a reference or a process."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            shared = test.partition("[")[2].partition("-")[0] if "test_pairs" in file else ""
            return f"{file}::{shared}"

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
