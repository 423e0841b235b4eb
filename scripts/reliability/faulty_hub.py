"""A local HTTP server in the place of the hub, which fails in the ways that networks do.

    python scripts/reliability/faulty_hub.py TOKENIZER

reads every shard through the server, in a process of its own, since the hub's client reads its settings when it is
imported, and prints the outcome as JSON. The back-off of the client and our own is cut short; nothing else is replaced.
"""

import contextlib
import gzip
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

REPOSITORY = "/api/datasets/allenai/c4"
TIMES = 3  # answers that go wrong before a shard is served whole
FAULTS = ("none", "503", "429", "reset", "stall", "short", "cut")  # each with a shard of this name
NAME = "c4-train.{:05d}-of-00003.json.gz"
GONE = NAME.format(1)
DOCUMENTS = 700


def texts_of(name: str) -> list[str]:
    """The documents of a shard; random letters, so that compressed it still takes many packets."""
    pick = random.Random(name)
    return [f"{name} {k} " + "".join(pick.choices("abcdefgh ", k=400)) for k in range(DOCUMENTS)]


def shard(name: str) -> bytes:
    """Return the content of a shard as C4 has it: JSON lines, gzipped."""
    return gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts_of(name)).encode())


class Hub(BaseHTTPRequestHandler):
    """The request handler: answers as huggingface_hub expects, or with a fault."""

    asked: ClassVar[Counter] = Counter()
    shards: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        """Send a shard, or the hub's description of a repository, or a fault in its place."""
        name = self.path.rpartition("/")[2].partition(".json.gz")[0]
        name = name if name in (*FAULTS, "down") else self.path.rpartition("/")[2]
        self.asked[name] += 1
        failing = self.asked[name] <= TIMES
        if self.path.startswith("/api/"):
            return self.refuse(503) if failing else self.answer(json.dumps({"id": "allenai/c4"}).encode())
        if name == GONE:
            return self.refuse(404, {"X-Error-Code": "EntryNotFound"})
        if name == "down" or (failing and name in ("503", "429")):
            return self.refuse(503 if name == "down" else int(name), {"Retry-After": "1"})
        return self.answer(self.shards[name], name if failing and name in FAULTS else "none")

    def refuse(self, status: int, headers: dict[str, str] | None = None) -> None:
        """An error without a body."""
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(key, value)
        self.end_headers()

    def answer(self, body: bytes, fault: str = "none") -> None:
        """Send the body from the offset that the request asks for, or half of that and then the fault."""
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        self.send_response(206 if start else 200)
        if fault != "cut":  # without a length the client takes an early end for the end
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        self.wfile.write(rest if fault == "none" else rest[: len(rest) // 2])
        self.wfile.flush()
        if fault == "stall":
            with contextlib.suppress(OSError):
                self.connection.recv(1)  # until the client gives up
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def log_message(self, *args: object) -> None:
        """Print nothing: requests are not logged."""


class Server(ThreadingHTTPServer):
    """A server with one thread per request."""

    daemon_threads = True

    def shutdown_request(self, request: socket.socket) -> None:
        """Close the connection of a request, if it is still open."""
        with contextlib.suppress(OSError):  # the handler has reset it already
            super().shutdown_request(request)

    def handle_error(self, *args: object) -> None:
        """Print nothing: clients that disconnect in the middle of an answer are expected here."""


def main(tokenizer: str) -> None:
    """Read every shard through the server, and training batches from the C4 shards; print the outcome as JSON."""
    names = [*FAULTS, *(NAME.format(k) for k in range(3)), "c4-validation.00000-of-00001.json.gz"]
    Hub.shards = {name: shard(name) for name in names}
    server = Server(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    os.environ |= {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1", "NO_PROXY": "127.0.0.1"}
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.01))

    from salaad.common.errors import UserError
    from salaad.config.run import DataConfig
    from salaad.data import batches, documents, text

    found = {}
    for name in (*FAULTS, "down"):
        address = f"hf://datasets/allenai/c4/en/{name}.json.gz"
        try:
            found[name] = list(documents.read_documents(address, retries=4 if name != "down" else 1))
        except UserError as error:
            found[name] = str(error)

    documents.C4_SHARDS.update(train=3, validation=1)
    runs = []
    for allowed in (0, 1):
        config = DataConfig(source="c4", tokenizer=tokenizer, sequence_length=32, streams=1, max_lost_files=allowed)
        stream = batches.TrainingStream(text.open_text(config, vocab_size=512), config, batch=20)
        rows = []
        while len(rows) < 2 * DOCUMENTS and stream.error is None:
            rows += next(stream)["input_ids"].tolist()
        counts = batches.counts_in(stream.state_dict())
        runs.append({"error": stream.error and str(stream.error), "counts": counts, "rows": rows})
        stream.close()
    print(json.dumps({"found": found, "asked": Hub.asked, "runs": runs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
