"""Exact inference, where it exists."""

from knowable.inference.exact.linear import ExactLinear, LinearNormal
from knowable.inference.exact.student_t import LinearStudentT

__all__ = ["ExactLinear", "LinearNormal", "LinearStudentT"]
