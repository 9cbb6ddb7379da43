"""A server with the calls of vLLM's weight transfer, which takes the tensors from a queue.

As with NCCL, `update_weights` waits for tensors, and the trainer must send them while it does.
"""

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from jax import Array

# What may come after what.
AFTER = {
    "get_world_size": (None,),
    "init_weight_transfer_engine": ("get_world_size",),
    "pause": ("init_weight_transfer_engine", "resume"),
    "start_weight_update": ("pause",),
    "update_weights": ("start_weight_update", "update_weights"),
    "finish_weight_update": ("update_weights",),
    "resume": ("finish_weight_update",),
}


class Server(ThreadingHTTPServer):
    """Its `weights` are those that it has; `calls` are the paths that it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[str] = []
        self.weights: dict[str, np.ndarray] = {}
        self.sent: queue.Queue[np.ndarray | int] = queue.Queue()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def join(self, world_size: int) -> Callable[[str, Array], None]:
        """Joins the group, as the trainer does; returns the function that sends a tensor."""
        self.sent.put(world_size)
        return lambda name, tensor: self.sent.put(np.asarray(tensor))

    def answer(self, path: str, body: dict) -> dict:
        before = self.calls[-1] if self.calls else None
        assert before in AFTER[path], f"{path} after {before}"
        self.calls.append(path)
        match path:
            case "get_world_size":
                return {"world_size": 2}
            case "init_weight_transfer_engine":
                info = body["init_info"]
                assert info.keys() == {"master_address", "master_port", "rank_offset", "world_size"}
                assert info["rank_offset"] == 1 and info["world_size"] == 3
                assert self.sent.get(timeout=60) == info["world_size"]
            case "update_weights":
                info = body["update_info"]
                assert info.keys() == {"names", "dtype_names", "shapes"}
                for name, dtype, shape in zip(*info.values(), strict=True):
                    tensor = self.sent.get(timeout=60)
                    assert tensor.dtype.name == dtype and list(tensor.shape) == shape, name
                    self.weights[name] = tensor
        return {"status": "done"}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        assert self.path == "/get_world_size"
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        try:
            status, answer = 200, self.server.answer(self.path.removeprefix("/"), body)
        except (AssertionError, KeyError, queue.Empty) as error:
            status, answer = 400, {"error": repr(error)}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
