"""Inference methods, one file each, in families that do not import each other."""
