"""Lazy import of torchao, an optional dependency that few runs need."""

import logging
import os
from importlib.util import find_spec

from halfstep.run_config import ConfigError


def load_torchao(setting: str) -> None:
    """Prepare the import of torchao.

    setting: the one that requires it.  Raises ConfigError if torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            f"{setting} requires torchao, which is not installed on this worker: pip install "
            "'halfstep-service[torchao]'"
        )
    # Unused kernels: each one that fails to load would print a line to the run's log.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    import torchao  # noqa: F401

    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
