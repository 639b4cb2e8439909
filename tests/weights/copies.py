"""Versions as a worker holds them when it has fetched them."""

from typing import Any

from polyrl.weights import tensors
from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import table_of
from polyrl.weights.manifest import Manifest, encode
from polyrl.weights.shelf import HostCopy
from polyrl.weights.store import Blob


def copy_of(state: Any, version: int, dtype: str = "float32") -> HostCopy:
    """Of a model's state dict."""
    layout = tensors.layout_of(state, dtype)
    buffer = Buffer(layout.num_bytes)
    tensors.snapshot(state, layout, buffer.view)
    manifest = Manifest(version, layout, table_of(buffer.view), "")
    blob = Blob(manifest.digest, "full", version, encode(manifest), manifest.chunks, buffer, complete=True)
    return HostCopy(blob, manifest)
