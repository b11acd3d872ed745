"""The same model behind LitServe: ``python -m benchmarks.serving_litserve RUN PORT BATCH``.

The model, its 64 draws and the content of the answers are those of ``knowable serve``; LitServe brings HTTP, processes
and batching.
"""

import sys
from pathlib import Path
from typing import Any

import litserve
import numpy as np
import torch

DRAWS = 64


class Predict(litserve.LitAPI):
    """Rows of numbers in; probabilities and the parts of the uncertainty out."""

    def setup(self, device: str) -> None:
        """Load the posterior."""
        import knowable as kn

        torch.set_num_threads(1)
        self.posterior = kn.load(Path(sys.argv[1]))
        self.posterior.predict(torch.zeros(2, 64), samples=DRAWS)

    def decode_request(self, request):  # LitServe reads annotations
        """The row of a request."""
        return np.array(request["rows"][0], dtype=np.float32)

    def predict(self, x: Any) -> Any:
        """All rows of a batch, or the one row."""
        from knowable.interfaces.serve.answers import describe

        rows = np.stack(x) if isinstance(x, list) or x.ndim == 2 else x[None]
        with torch.no_grad():
            answers = describe(self.posterior.predict(torch.from_numpy(rows), samples=DRAWS), 0.9, ())
        return answers if isinstance(x, list) or x.ndim == 2 else answers[0]

    def unbatch(self, output: Any) -> Any:
        """An answer each."""
        return output

    def encode_response(self, output: Any) -> dict[str, Any]:
        """As knowable answers it."""
        return {"predictions": [output]}


if __name__ == "__main__":
    size = int(sys.argv[3])
    batching: dict[str, Any] = {"max_batch_size": size, "batch_timeout": 0.002} if size > 1 else {}
    server = litserve.LitServer(Predict(**batching), accelerator="cpu", workers_per_device=1, timeout=30)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, log_level="error", generate_client_file=False
    )
