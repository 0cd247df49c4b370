"""Python package of Halfstep: watch(), the spool, recipes, the API client and the command."""

import importlib
import sys
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from halfstep.version import __version__ as __version__

if TYPE_CHECKING:
    from halfstep.api_client.errors import ApiError as ApiError
    from halfstep.client import Client as Client
    from halfstep.precision_lab.diff import precision_diff as precision_diff
    from halfstep.precision_lab.plan import precision_plan as precision_plan
    from halfstep.session.logged_values import Audio as Audio
    from halfstep.session.logged_values import Histogram as Histogram
    from halfstep.session.logged_values import Html as Html
    from halfstep.session.logged_values import Video as Video
    from halfstep.session.run_start import watch as watch
    from halfstep.session.watch_session import Watch as Watch


#: Our own names, except while a run of the W&B drop-in is active: then the drop-in's.
SHARED = ("Audio", "Histogram", "Html", "Video", "watch")
#: Names that `import halfstep as wandb` offers, see halfstep.wandb_compat.
DROP_IN = frozenset(
    [
        "AlertLevel",
        "Artifact",
        "Image",
        "Object3D",
        "Plotly",
        "Table",
        "alert",
        "config",
        "define_metric",
        "finish",
        "init",
        "log",
        "log_artifact",
        "log_code",
        "log_model",
        "run",
        "save",
        "summary",
        "sweep",
        "use_artifact",
        "use_model",
    ]
)
#: Modules that integrate frameworks.
ADAPTERS = (
    "deepspeed",
    "fastai",
    "hydra",
    "keras",
    "lightning",
    "optuna",
    "stable_baselines3",
    "transformers",
    "ultralytics",
)


def _is_named_trackio(frame: FrameType) -> bool:
    """Return whether the code of a frame has imported this package under the name `trackio`."""
    code, ours = frame.f_code, sys.modules[__name__]
    if "trackio" in code.co_varnames + code.co_freevars + code.co_cellvars:
        return frame.f_locals.get("trackio") is ours
    return frame.f_globals.get("trackio") is ours


def __getattr__(name: str) -> Any:
    """Import a public name on first access, which keeps `import halfstep` cheap."""
    if not name.startswith("_") and _is_named_trackio(sys._getframe(1)):
        from halfstep import trackio_compat

        if name in trackio_compat.SERVED:
            return trackio_compat.SERVED[name]
    if name == "agent":
        from halfstep import sweep_agent

        return sweep_agent.agent
    if name in ("ApiError", "Client"):
        from halfstep import client

        return getattr(client, name)
    if name in DROP_IN or (name in SHARED and "halfstep.wandb_compat.calls" in sys.modules):
        from halfstep.wandb_compat import calls

        return calls.get_attribute(name)
    if name in ("Audio", "Histogram", "Html", "Video"):
        from halfstep.session import logged_values

        return getattr(logged_values, name)
    if name in ("Watch", "watch"):
        from halfstep.session import run_start

        return getattr(run_start, name)
    if name == "precision_diff":
        from halfstep.precision_lab import diff

        return diff.precision_diff
    if name == "precision_plan":
        from halfstep.precision_lab import plan

        return plan.precision_plan
    if name == "plot" or name in ADAPTERS:  # an adapter imports its framework too
        try:
            return importlib.import_module(f"halfstep.{name}")
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0].replace("hydra", "hydra-core")
            text = f"halfstep.{name} needs {package}: pip install {package}"
            raise ModuleNotFoundError(text, name=error.name) from None
    if not name.startswith("_"):
        from halfstep.wandb_compat.unsupported import ERRORS, UNSERVED, Unserved

        if name in ERRORS:
            return ERRORS[name]
        if name == "errors":
            return SimpleNamespace(**ERRORS)
        if name in UNSERVED:
            return Unserved(name)
    raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
