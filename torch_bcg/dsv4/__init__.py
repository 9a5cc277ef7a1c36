"""DeepSeek-V4 on the bcg backend: model, paged memory, metadata, and requests through them."""

from torch_bcg.dsv4.configuration import DSV4Config
from torch_bcg.dsv4.convert import convert_from_transformers
from torch_bcg.dsv4.engine import Engine
from torch_bcg.dsv4.fields import DSV4AttnMetadata, ExtendBatch
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import DSV4Metadata
from torch_bcg.dsv4.model import DeepseekV4
from torch_bcg.dsv4.pools import Pools
from torch_bcg.dsv4.random import random_model
from torch_bcg.dsv4.requests import Request, Scheduler, inputs, run_requests

__all__ = [
    "DSV4AttnMetadata",
    "DSV4Config",
    "DSV4Metadata",
    "DeepseekV4",
    "Engine",
    "ExtendBatch",
    "Layout",
    "Pools",
    "Request",
    "Scheduler",
    "convert_from_transformers",
    "inputs",
    "random_model",
    "run_requests",
]
