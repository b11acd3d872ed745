"""Variational inference with a prior over functions."""
