"""Attention metadata: what of it recorded segments read, and how it gets there at each call."""

from torch_bcg.metadata.bound import bind_metadata, current_metadata
from torch_bcg.metadata.refreshing import refresh
from torch_bcg.metadata.registration import Registration, register_metadata_binding

__all__ = [
    "Registration",
    "bind_metadata",
    "current_metadata",
    "refresh",
    "register_metadata_binding",
]
