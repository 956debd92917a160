"""Settings of the whole suite, made before TensorFlow is imported."""

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


# The files that take longest. A file is one worker's; a long one left for the end would have the
# others wait for it.
LONG = ("replicas", "multi_worker", "examples", "mnist_example", "update", "learner", "laws")


def pytest_collection_modifyitems(items):
    """The long files first, the others in their order."""

    def place(item):
        name = item.path.stem.removeprefix("test_")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)
