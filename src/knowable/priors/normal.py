"""The normal prior, which lives in the core because it is every model's default."""

from knowable.core.model.normal import Normal

__all__ = ["Normal"]
