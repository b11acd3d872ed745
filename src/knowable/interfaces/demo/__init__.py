"""``knowable demo``: several methods on two real problems, scored and reported."""

from knowable.interfaces.demo.demo import run_demo

__all__ = ["run_demo"]
