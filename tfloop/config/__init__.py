"""Settings of a run as frozen, checked values that are JSON files too.

`_config` has the classes, `_errors` says what is wrong with settings in one message.
"""

from tfloop.config._config import AdamConfig, Config, OptimizerConfig

__all__ = ["AdamConfig", "Config", "OptimizerConfig"]
