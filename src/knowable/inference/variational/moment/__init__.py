"""Sampling-free variational inference: moments through the layers."""
