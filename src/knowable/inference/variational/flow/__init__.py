"""Normalising flows."""
