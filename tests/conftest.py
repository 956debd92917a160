"""Settings of the whole suite, made before TensorFlow is imported."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest  # noqa: E402 - after the settings


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """With TFLOOP_TEST_PLAIN=1 every fast path is off: what holds, holds without them."""
    if os.environ.get("TFLOOP_TEST_PLAIN"):
        from tfloop import _cells, _launch, _update

        monkeypatch.setattr(_cells, "_FEW", 10**9)
        monkeypatch.setattr(_launch, "_gains", lambda concrete: False)
        monkeypatch.setattr(_update, "_LARGE", 2**62)
