"""The network's floating-point type is kept, whatever the data comes in."""

from __future__ import annotations

import torch

from knowable.testing.subject import Subject, expect

_OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}


def check_dtype_is_kept(subject: Subject) -> None:
    """A float32 network gives float32 and a float64 network float64, also when the data is of the other kind."""
    for dtype in _OTHER:
        case = subject.case(dtype=dtype)
        for kind in (dtype, _OTHER[dtype]):
            posterior = subject.fit(case, data=(case.x.to(kind), case.y.to(kind)))
            _expect_dtype(posterior.mean(), dtype, "mean()")
            _expect_dtype(posterior.sample(2), dtype, "sample()")
            prediction = posterior.predict(case.x.to(kind), samples=3)
            moments = {
                "samples": prediction.samples,
                "total": prediction.total,
                "log_prob": prediction.log_prob(case.y),
            }
            _expect_dtype(moments, dtype, "prediction")


def _expect_dtype(tensors: dict[str, torch.Tensor], dtype: torch.dtype, what: str) -> None:
    for name, value in tensors.items():
        expect(value.dtype == dtype, f"{what}[{name!r}] is {value.dtype} for a {dtype} network.")
