"""A reward function behind HTTP, for `RemoteReward` and OpenRLHF's clients."""

import hmac
import json
import select
import socket
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from ._texts import is_async, read_rewards
from .remote import read_token


class RewardServer(ThreadingTCPServer):
    """
    Context manager that serves one reward function at `url`, without encryption. Requests are scored one after another.

    A request is a POST of `{"query": [...], "prompts": [...], "labels": [...]}`, one entry a completion; the answer is
    `{"rewards": [...]}`, or a status and `{"detail": message}`. A query is the prompt followed by its completion: text, or
    a list of messages. Labels are optional; the function gets them as the column `labels`.

    Args:
        reward (`Callable`): Reward function as a trainer takes it. An asynchronous one is refused with a `ValueError`.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address to listen at; `"0.0.0.0"` is all of the machine's.
        port (`int`, *optional*, defaults to `5000`): Port to listen at; 0 takes a free one.
        token_variable (`str`, *optional*): Environment variable with a bearer token that requests need.
    """

    allow_reuse_address, request_queue_size = True, 128

    def __init__(self, reward: Any, host: str = "127.0.0.1", port: int = 5000, token_variable: str | None = None):
        self.name = getattr(reward, "__name__", type(reward).__name__)
        if is_async(reward):
            raise ValueError(f"`{self.name}` is asynchronous; serve one that returns `asyncio.run({self.name}(...))`.")
        self.reward, self.token, self.turn = reward, read_token(token_variable), threading.Lock()
        super().__init__((host, port), _Handler)
        self.url = "http://{}:{}/get_reward".format(*self.server_address)
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        """Stops taking requests, answers the running ones, and frees the port."""
        self.shutdown()
        self.server_close()

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is printed of a client that has left, or is silent for too long."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 60  # seconds that a client may be silent

    def do_POST(self) -> None:
        """Checks the request's type and token, and answers with rewards."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token, given = self.server.token, self.headers.get("Authorization", "").encode()
        if "Origin" in self.headers or self.headers.get_content_type() != "application/json":
            self._answer(415, detail="The `Content-Type` must be application/json, and no browser's page may ask.")
        elif token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            self._answer(401, detail="The request lacks the server's bearer token.")
        else:
            self._score(body)

    def _score(self, body: bytes) -> None:
        """Answers with the rewards of a request's columns, or with what is wrong: 400 for the request, 500 for the function."""
        try:
            columns = _read_columns(body)
        except (ValueError, RecursionError) as error:
            return self._answer(400, detail=f"{error}.")
        with self.server.turn:  # one request at a time uses the model
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                return  # the client has stopped waiting
            try:
                rewards = read_rewards(self.server.reward(**columns), "it", len(columns["prompts"]))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                return self._answer(500, detail=f"The reward function `{self.server.name}` failed: {reason}")
        self._answer(200, rewards=rewards)

    def _answer(self, status: int, **answer: Any) -> None:
        """Sends a status, and the keywords as a JSON object, to the client."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: Any) -> None:
        """Nothing is printed of a request."""


def _read_columns(body: bytes) -> dict[str, Any]:
    """A request as the columns of a reward function. Raises `ValueError` that names the field."""
    columns = json.loads(body)
    queries, prompts, labels = map((columns if isinstance(columns, dict) else {}).get, ("query", "prompts", "labels"))
    for name, values in (("query", queries), ("prompts", prompts), ("labels", queries if labels is None else labels)):
        if not isinstance(values, list) or len(values) != len(queries):
            raise ValueError(f"`{name}` must be a list, with one entry a completion")
    for i, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
        if not isinstance(query, str | list) or type(query) is not type(prompt) or query[: len(prompt)] != prompt:
            raise ValueError(
                f"`query` {i} must be text, or a list of messages, that begins with its entry of `prompts`"
            )
    completions = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    labels = [""] * len(queries) if labels is None else labels
    return {"prompts": prompts, "completions": completions, "labels": labels, "completion_ids": None}
