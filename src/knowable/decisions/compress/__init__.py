"""Compression: prune by the posterior, cut out what is dead, round to what is known, write in few bytes."""

from knowable.decisions.compress.compressed import Change, Compressed, CompressedLayer
from knowable.decisions.compress.compression import compress
from knowable.decisions.compress.saving import load_compressed

__all__ = ["Change", "Compressed", "CompressedLayer", "compress", "load_compressed"]
