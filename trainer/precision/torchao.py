"""torchao, which few runs need: an extra, loaded by those alone."""

import logging
import os
from importlib.util import find_spec

from halfstep.run_config import ConfigError


def load_torchao(setting: str) -> None:
    """Make it ready to be imported. setting: what wants it.  Raises ConfigError without it."""
    if find_spec("torchao") is None:
        raise ConfigError(
            f"{setting} takes torchao, which this worker has not: pip install "
            "'halfstep-service[torchao]'"
        )
    # Kernels that nobody here calls: each that does not load would be a line of the run's log.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    import torchao  # noqa: F401

    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
