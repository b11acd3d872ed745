"""The Laplace approximation: a normal distribution around the mode."""

from knowable.inference.laplace.laplace import Laplace

__all__ = ["Laplace"]
