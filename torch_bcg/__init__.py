"""CUDA graphs with eager operations in between, as a torch.compile backend: ``backend="bcg"``."""

from torch_bcg.counters import stats
from torch_bcg.dynamo import bcg
from torch_bcg.errors import BCGError
from torch_bcg.explain import explain
from torch_bcg.marking import eager_on_graph
from torch_bcg.metadata import bind_metadata, current_metadata, register_metadata_binding
from torch_bcg.options import Options
from torch_bcg.programs import programs, reset
from torch_bcg.report.files import dump_to
from torch_bcg.warm_up import warm_up

__version__ = "0.1.0"
__all__ = [
    "BCGError",
    "Options",
    "__version__",
    "bcg",
    "bind_metadata",
    "current_metadata",
    "dump_to",
    "eager_on_graph",
    "explain",
    "programs",
    "register_metadata_binding",
    "reset",
    "stats",
    "warm_up",
]
