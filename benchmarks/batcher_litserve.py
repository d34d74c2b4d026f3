"""LitServe around the 4.9 M network, for `batcher_peers.py`: python benchmarks/batcher_litserve.py PORT ROWS

`ROWS`: the most that a batch has. A module of its own, since LitServe pickles the class for its worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from batcher import network

try:
    import litserve
except ImportError:  # where only `answers` is wanted
    Base: Any = object
else:
    Base = litserve.LitAPI

WAIT_S = 0.005


def answers(net: torch.nn.Module, rows: Sequence[torch.Tensor]) -> list[Any]:
    """Policy and value of each row."""
    with torch.no_grad():
        policy, value = net(torch.stack(list(rows)))
    return list(zip(policy, value, strict=True))


class Network(Base):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.net = network()[0].eval()

    def decode_request(self, request):  # type: ignore[no-untyped-def] # FastAPI would read an annotation
        return torch.tensor(request["row"])

    def batch(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return inputs

    def predict(self, rows: Any) -> list[Any]:
        return answers(self.net, rows if isinstance(rows, list) else [rows])

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"policy": output[0].tolist(), "value": output[1].tolist()}


if __name__ == "__main__":
    port, rows = map(int, sys.argv[1:])
    api = Network(max_batch_size=rows, batch_timeout=WAIT_S)
    litserve.LitServer(api, accelerator="cpu", devices=1).run(
        host="127.0.0.1", port=port, log_level="error", generate_client_file=False
    )
