"""A reward function behind HTTP, in the form that `RemoteReward` and OpenRLHF's clients ask for."""

import json
import logging
import math
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from ._numbers import as_number, as_values
from ._texts import Messages
from .remote import read_token


logger = logging.getLogger(__name__)

_NOT_INSTALLED = 'Serving a reward needs FastAPI and uvicorn: pip install "trl-repulse[serve]".'


class Refusal(Exception):
    """A request that gets no rewards: the status of the answer, and what it says."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class RewardServer:
    """
    Serves one reward function, until it is closed. Needs the extra `serve`.

    A request is a POST to `/get_reward` of `{"query": [...], "prompts": [...], "labels": [...]}`, one entry a
    completion, and the answer `{"rewards": [...]}`. A query is its prompt with the completion after it: text, or a
    list of messages. Labels may be missing; the function gets them as the column `labels`, and no `completion_ids`.
    GET `/health` answers `{"status": "ok", "reward": name}`.

    Everything else is answered by `{"error": message}`: status 400 for a request that is not of that form, naming the
    field; 401 without the token; 403 for pages of the web that are not in `allow_origins`; 404 and 405 for other addresses
    and methods; 413 for a request over a limit; 415 for another type than `application/json`; 500 if the function fails or
    returns anything but one finite number a completion.

    Requests are read at the same time and scored one after another. There is no encryption: let others reach the server
    through a proxy that has it.

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
            Seconds in which a request must be there as a whole, from its connection or from the answer before it; also
            how long closing waits for requests that are being answered.
        max_connections (`int`, *optional*, defaults to `64`):
            Most connections at a time. Beyond it the one that has waited longest without a request is closed, and where all
            have one the new request gets status 503, which clients repeat.
        allow_origins (`Sequence[str]`, *optional*):
            Origins, such as `"https://my.page"`, whose pages a browser may send requests from. By default none may.
        token_variable (`str`, *optional*):
            Environment variable with a bearer token that requests must have. By default whoever reaches the port may ask.

    Raises:
        `ValueError`: If a limit is not positive, an origin is none, or the variable holds no token.
        `OSError`: If the address cannot be used.
        `ImportError`: If FastAPI or uvicorn is not installed.

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
        max_connections: int = 64,
        allow_origins: Sequence[str] = (),
        token_variable: str | None = None,
    ):
        check_installed()
        from ._serving import build_app, build_server

        limits = {
            "max_batch_size": max_batch_size,
            "max_request_bytes": max_request_bytes,
            "timeout": timeout,
            "max_connections": max_connections,
        }
        for name, value in limits.items():
            if value <= 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        for origin in allow_origins:
            parts = urlsplit(origin)
            if origin != f"{parts.scheme}://{parts.netloc}" or not parts.scheme or not parts.netloc:
                raise ValueError(
                    f"`allow_origins` has {origin!r}; an origin is like 'https://host' or 'http://host:port'."
                )
        self.max_batch_size = max_batch_size
        self.max_request_bytes = max_request_bytes
        self.max_connections = max_connections
        self._reward: Callable[..., Any] | None = reward
        self._name = getattr(reward, "__name__", type(reward).__name__)
        token = None if token_variable is None else read_token(token_variable)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self._address = self._socket.getsockname()[:2]
        self._scorer = ThreadPoolExecutor(1)
        app = build_app(self, self._scorer, self._address[0], allow_origins, token)
        self._server = build_server(app, timeout, max_connections)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the reward."""
        return self._name

    @property
    def url(self) -> str:
        """Address to ask for rewards."""
        host, port = self._address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/get_reward"

    def close(self) -> None:
        """Takes no more requests, answers those it has, frees the port and lets the reward go."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self._scorer.shutdown(wait=False)
        self._reward = None  # FastAPI keeps the routes, and this object with them

    def __enter__(self) -> "RewardServer":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def score(self, columns: dict[str, list[Any]]) -> list[float]:
        """
        Rewards of one request; not for two threads at a time.

        Args:
            columns (`dict[str, list]`):
                What [`read_request`] made of it.

        Returns:
            `list[float]`: One finite number a completion.
        """
        count = len(columns["prompts"])
        if count == 0:
            return []
        try:
            return _check_rewards(self._reward(**columns, completion_ids=None), count)
        except Exception as error:
            logger.exception("The reward function %s failed", self.name)
            raise Refusal(500, f"The reward function `{self.name}` failed: {type(error).__name__}: {error}") from error


def check_installed() -> None:
    """
    Refuses to serve where the extra is missing, before anything is loaded.

    Raises:
        `ImportError`: It says how to install it.
    """
    if any(find_spec(name) is None for name in ("fastapi", "uvicorn")):
        raise ImportError(_NOT_INSTALLED)


def read_request(body: bytes, max_batch_size: int) -> dict[str, list[Any]]:
    """
    Takes a request apart.

    Args:
        body (`bytes`):
            Its JSON.
        max_batch_size (`int`):
            Most completions.

    Returns:
        `dict[str, list]`: Columns `prompts`, `completions` and `labels`.

    Raises:
        [`Refusal`]: If it has another form; it names the field.
    """
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"The request is not JSON: {error}.") from error
    if not isinstance(payload, dict):
        raise Refusal(400, 'The request must be like {"query": [...], "prompts": [...], "labels": [...]}.')
    columns = {}
    for name in ("query", "prompts", "labels"):
        values = payload.get(name)
        if name == "labels" and values is None:
            values = [""] * len(columns["query"])
        if not isinstance(values, list):
            raise Refusal(400, f"`{name}` must be a list, one entry a completion, got {values!r:.40}.")
        columns[name] = values
    count = len(columns["query"])
    if count > max_batch_size:
        raise Refusal(413, f"`query` has {count} entries, more than the {max_batch_size} of a request; send fewer.")
    for name, values in columns.items():
        if len(values) != count:
            raise Refusal(400, f"`{name}` has {len(values)} entries and `query` {count}; send one a completion.")
    for name in ("query", "prompts"):
        for i, value in enumerate(columns[name]):
            if not isinstance(value, str) and not _are_messages(value):
                raise Refusal(400, f"`{name}` {i} must be a text or a list of messages, got {value!r:.40}.")
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
        raise Refusal(400, f"`query` {i} does not begin with its entry of `prompts`; a query is prompt + completion.")
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
