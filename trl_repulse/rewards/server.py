"""A reward function behind HTTP, in the form that `RemoteReward` and OpenRLHF's clients ask for."""

import json
import logging
import math
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ._numbers import as_number, as_values
from ._texts import Messages


logger = logging.getLogger(__name__)

_PATHS = ("/get_reward", "/")  # of rewards; the first is OpenRLHF's
_HEALTH = "/health"
_CHUNK = 2**16
_MOST_DRAINED = 2**28  # bytes of a refused request that are still taken, so that its client reads the refusal


class _Refusal(Exception):
    """A request that gets no rewards: the status of the answer, and what it says."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class RewardServer:
    """
    Serves one reward function, until it is closed.

    A request is a POST to `/get_reward` of `{"query": [...], "prompts": [...], "labels": [...]}`, one entry a
    completion, and the answer `{"rewards": [...]}`. A query is its prompt with the completion after it: text, or a
    list of messages. Labels may be missing; the function gets them as the column `labels`, and no `completion_ids`.
    GET `/health` answers `{"status": "ok", "reward": name}`.

    Everything else is answered by `{"error": message}`: status 400 for a request that is not of that form, naming the
    field; 404 and 405 for other addresses and methods; 411 and 413 for a request of unknown length or over a limit;
    500 if the function fails or returns anything but one finite number a completion.

    Requests are read at the same time and scored one after another. There is neither encryption nor authentication:
    whoever reaches the port may ask.

    Args:
        reward (`Callable`):
            Reward function as a trainer takes it.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen at; the default is reached from the same machine alone, `"0.0.0.0"` from everywhere.
        port (`int`, *optional*, defaults to `5000`):
            Port to listen at; 0 takes one that is free, which `url` then names.
        max_batch_size (`int`, *optional*, defaults to `1024`):
            Most completions of one request.
        max_request_bytes (`int`, *optional*, defaults to `16777216`):
            Most bytes of one request.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds without a sign of a client after which it is given up; also how long closing waits for requests
            that are being answered.

    Raises:
        `ValueError`: If a limit is not positive.
        `OSError`: If the address cannot be used.

    Example:

    ```python
    >>> from trl_repulse.rewards import RemoteReward, RewardServer, SequencePairReward

    >>> with RewardServer(SequencePairReward("OpenAssistant/reward-model-deberta-v3-large-v2"), port=0) as server:
    ...     RemoteReward(server.url)(["What is the capital of France?"], ["Paris."])
    ```
    """

    def __init__(
        self,
        reward: Callable[..., list[float]],
        host: str = "127.0.0.1",
        port: int = 5000,
        max_batch_size: int = 1024,
        max_request_bytes: int = 2**24,
        timeout: float = 60.0,
    ):
        limits = {"max_batch_size": max_batch_size, "max_request_bytes": max_request_bytes, "timeout": timeout}
        for name, value in limits.items():
            if value <= 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        self.max_batch_size = max_batch_size
        self.max_request_bytes = max_request_bytes
        self.timeout = timeout
        self._reward = reward
        self._lock = threading.Lock()  # one request at a time has the model
        self._answering = 0
        self._answered = threading.Condition()
        self._http = _Http(self, host, port)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the reward."""
        return getattr(self._reward, "__name__", type(self._reward).__name__)

    @property
    def url(self) -> str:
        """Address to ask for rewards."""
        host, port = self._http.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{_PATHS[0]}"

    def close(self) -> None:
        """Takes no more requests, answers those it has, and frees the port."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        with self._answered:
            self._answered.wait_for(lambda: self._answering == 0, self.timeout)

    def __enter__(self) -> "RewardServer":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Inside, a request is being answered, which [`close`] waits for."""
        with self._answered:
            self._answering += 1
        try:
            yield
        finally:
            with self._answered:
                self._answering -= 1
                self._answered.notify_all()

    def score(self, body: bytes) -> list[float]:
        """
        Rewards of one request.

        Args:
            body (`bytes`):
                JSON of the request.

        Returns:
            `list[float]`: One finite number a completion.
        """
        columns = _read_request(body, self.max_batch_size)
        count = len(columns["prompts"])
        if count == 0:
            return []
        try:
            with self._lock:
                result = self._reward(**columns, completion_ids=None)
            return _check_rewards(result, count)
        except Exception as error:
            logger.exception("The reward function %s failed", self.name)
            raise _Refusal(
                500, f"The reward function `{self.name}` failed: {type(error).__name__}: {error}"
            ) from error


def _read_request(body: bytes, max_batch_size: int) -> dict[str, list[Any]]:
    """Columns `prompts`, `completions` and `labels` of a request."""
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refusal(400, f"The request is not JSON: {error}.") from error
    if not isinstance(payload, dict):
        raise _Refusal(400, 'The request must be like {"query": [...], "prompts": [...], "labels": [...]}.')
    columns = {}
    for name in ("query", "prompts", "labels"):
        values = payload.get(name)
        if name == "labels" and values is None:
            values = [""] * len(columns["query"])
        if not isinstance(values, list):
            raise _Refusal(400, f"`{name}` must be a list, one entry a completion, got {values!r:.40}.")
        columns[name] = values
    count = len(columns["query"])
    if count > max_batch_size:
        raise _Refusal(413, f"`query` has {count} entries, more than the {max_batch_size} of a request; send fewer.")
    for name, values in columns.items():
        if len(values) != count:
            raise _Refusal(400, f"`{name}` has {len(values)} entries and `query` {count}; send one a completion.")
    for name in ("query", "prompts"):
        for i, value in enumerate(columns[name]):
            if not isinstance(value, str) and not _are_messages(value):
                raise _Refusal(400, f"`{name}` {i} must be a text or a list of messages, got {value!r:.40}.")
    pairs = zip(columns.pop("query"), columns["prompts"], strict=True)
    return columns | {"completions": [_completion(query, prompt, i) for i, (query, prompt) in enumerate(pairs)]}


def _are_messages(value: Any) -> bool:
    """Whether this is a conversation: messages of a role, with text or with parts of texts."""

    def is_content(content: Any) -> bool:
        if isinstance(content, list):
            return all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in content)
        return isinstance(content, str)

    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and is_content(message.get("content"))
        for message in value
    )


def _completion(query: str | Messages, prompt: str | Messages, i: int) -> str | Messages:
    if type(query) is not type(prompt) or query[: len(prompt)] != prompt:
        raise _Refusal(400, f"`query` {i} does not begin with its entry of `prompts`; a query is prompt + completion.")
    return query[len(prompt) :]


def _check_rewards(result: Any, count: int) -> list[float]:
    """
    Rewards as plain numbers.

    Raises:
        `ValueError`: If they are not one finite number a completion.
    """
    values = as_values(result)
    if values is None:
        raise ValueError(f"it returned {result!r:.60} instead of a list")
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} rewards for {count} completions")
    rewards = [as_number(value) for value in values]
    for i, reward in enumerate(rewards):
        if reward is None or not math.isfinite(reward):
            raise ValueError(
                f"it returned {values[i]!r:.60} for completion {i} of {count}; only finite numbers can be sent"
            )
    return rewards


class _Http(ThreadingHTTPServer):
    """The listening socket; a thread of its own for each connection."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, owner: RewardServer, host: str, port: int):
        self.owner = owner
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks the network for the host's full name
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.warning("The connection of %s broke off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection, one request."""

    server: _Http
    server_version = "trl-repulse"
    sys_version = ""

    def setup(self) -> None:
        self.timeout = self.server.owner.timeout
        super().setup()

    @property
    def _address(self) -> str:
        return self.path.partition("?")[0]

    def do_GET(self) -> None:
        if self._address == _HEALTH:
            self._send(200, {"status": "ok", "reward": self.server.owner.name})
        else:
            self._refuse_address("POST")

    def do_POST(self) -> None:
        if self._address not in _PATHS:
            return self._refuse_address("GET")
        try:
            body = self._read_body()
            with self.server.owner._busy():
                self._send(200, {"rewards": self.server.owner.score(body)})
        except _Refusal as refusal:
            self._send(refusal.status, {"error": str(refusal)})

    def _refuse_address(self, method: str) -> None:
        self._drain()
        if self._address in (*_PATHS, _HEALTH):
            self._send(405, {"error": f"{self._address} takes {method} and not {self.command}."}, Allow=method)
        else:
            self._send(404, {"error": f"There is no {self._address}; POST to {_PATHS[0]} or GET {_HEALTH}."})

    def _read_body(self) -> bytes:
        length, most = self._length(), self.server.owner.max_request_bytes
        if length is None:
            raise _Refusal(411, "The request does not say how long it is; send its Content-Length.")
        if length > most:
            self._drain()
            raise _Refusal(413, f"The request has {length} bytes, more than the {most} allowed; send fewer texts.")
        body = self.rfile.read(length)
        if len(body) < length:
            raise _Refusal(400, f"The request ended after {len(body)} of its {length} bytes.")
        return body

    def _length(self) -> int | None:
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else None

    def _drain(self) -> None:
        """Takes a body that nobody wants: a client that is still sending would miss the answer."""
        left = min(self._length() or 0, _MOST_DRAINED)
        while left > 0:
            taken = self.rfile.read(min(left, _CHUNK))
            if not taken:
                return
            left -= len(taken)

    def _send(self, status: int, answer: dict[str, Any], **headers: str) -> None:
        data = json.dumps(answer, allow_nan=False).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            logger.info("A client left before its answer")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library answers by itself, to requests that are no HTTP or of other methods."""
        self._send(code, {"error": message or self.responses.get(code, ("refused",))[0]})

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s " + format, self.address_string(), *args)
