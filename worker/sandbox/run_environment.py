"""Environments of processes that run users' code: only listed variables are passed on."""

import os

from db.settings import Settings
from halfstep import data_paths
from worker.sandbox import sandbox

#: Variables of the worker that a command gets; others have to be set explicitly.
OF_COMMANDS = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "LANG", "LANGUAGE", "TMPDIR"}
OF_COMMANDS |= {"LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"}
OF_COMMANDS_FROM = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_")
#: Additional variables for a recipe, which runs in the worker's own Python.
OF_RECIPES = {"VIRTUAL_ENV", "XDG_CACHE_HOME", "TOKENIZERS_PARALLELISM", "HALFSTEP_RECIPES"}
OF_RECIPES |= {"HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_MODULES_CACHE"}
OF_RECIPES |= {"HF_DATASETS_OFFLINE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "MPLCONFIGDIR"}
OF_RECIPES |= {"HALFSTEP_EMULATE_FP8"}
OF_RECIPES_FROM = (
    *("PYTHON", "TORCH", "PYTORCH_", "TRITON_", "CUBLAS_", "CUDNN_"),
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "NUMEXPR_", "NUMBA_"),
)
PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}


def of_commands() -> dict[str, str]:
    """Return the variables of this process that a command gets."""
    return _select_variables(OF_COMMANDS, OF_COMMANDS_FROM)


def of_recipes(settings: Settings) -> dict[str, str]:
    """Return the environment of a process that loads recipes."""
    further = [word.strip() for word in settings.run_environment.split(",") if word.strip()]
    names = {name for name in further if not name.endswith("*")}
    beginnings = tuple(name.removesuffix("*") for name in further if name.endswith("*"))
    return {
        **_select_variables(
            OF_COMMANDS | OF_RECIPES | names, OF_COMMANDS_FROM + OF_RECIPES_FROM + beginnings
        ),
        **_proxies(),
        "HALFSTEP_DATA": str(settings.data),
        data_paths.ROOTS: settings.data_roots,
        data_paths.PRIVATE: os.pathsep.join(map(str, sandbox.private_paths(settings))),
    }


def _select_variables(names: set[str], beginnings: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(beginnings)
    }


def _proxies() -> dict[str, str]:
    """Return the proxy variables without a password."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper() in PROXIES and "@" not in value
    }
