"""A reward function behind HTTP, for `RemoteReward` and OpenRLHF's clients."""

import math
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from ._texts import is_async
from .remote import read_token


class RewardServer:
    """
    Serves one reward function until it is closed. Needs the extra `serve`.

    A request is a POST to `/get_reward` of `{"query": [...], "prompts": [...], "labels": [...]}`, one entry a completion;
    the answer is `{"rewards": [...]}`. A query is the prompt followed by its completion: text, or a list of messages. Labels
    are optional; the function gets them as the column `labels`, and no `completion_ids`. GET `/health` answers
    `{"status": "ok", "reward": name}`. Errors are answered by a status and `{"detail": message}`.

    Requests are read in parallel and scored one after another. There is no encryption and no limit on slow requests: use a
    proxy with both to open the server to others.

    Args:
        reward (`Callable`): Reward function as a trainer takes it.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen at; by default only for the same machine, `"0.0.0.0"` for all.
        port (`int`, *optional*, defaults to `5000`): Port to listen at; 0 takes a free one, see `url`.
        max_batch_size (`int`, *optional*, defaults to `1024`): Most completions of one request.
        max_request_bytes (`int`, *optional*, defaults to `16777216`): Most bytes of one request.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds for which an idle connection is kept, and for which closing waits for running requests.
        max_connections (`int`, *optional*, defaults to `64`):
            Most connections at a time. Further requests get status 503, after which clients retry.
        allow_origins (`Sequence[str]`, *optional*):
            Origins, such as `"https://my.page"`, whose pages may send requests from a browser. By default none.
        token_variable (`str`, *optional*):
            Environment variable with a bearer token that requests need. By default none is needed.

    Raises:
        `ValueError`: If a limit is not positive, the reward is asynchronous, an origin is invalid, or the variable holds no token.
        `OSError`: If the address cannot be used.
        `ImportError`: If FastAPI or uvicorn is not installed.
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
        import uvicorn

        from ._serving import build_app

        limits = {"max_batch_size": max_batch_size, "max_request_bytes": max_request_bytes}
        for name, value in (limits | {"timeout": timeout, "max_connections": max_connections}).items():
            if value <= 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        if is_async(reward):
            raise ValueError(f"`reward` is asynchronous ({reward!r:.60}); serve a function that returns its rewards.")
        for origin in allow_origins:
            parts = urlsplit(origin)
            if origin != f"{parts.scheme}://{parts.netloc}" or not parts.scheme or not parts.netloc:
                raise ValueError(
                    f"`allow_origins` has {origin!r}; an origin is like 'https://host' or 'http://host:port'."
                )
        self._reward: Callable[..., Any] | None = reward
        self.name = getattr(reward, "__name__", type(reward).__name__)
        token = read_token(token_variable)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        # Inherited by connections; avoids a delay of 40 ms between the header and body of an answer
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = self._socket.getsockname()[:2]
        self._scorer = ThreadPoolExecutor(1)
        config = uvicorn.Config(
            build_app(
                lambda columns: self._reward(**columns, completion_ids=None),
                *(self.name, self._scorer, self._address[0]),
                *(max_batch_size, max_request_bytes, allow_origins, token),
            ),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=max_connections + 1,  # uvicorn counts the current one
            timeout_keep_alive=math.ceil(timeout),
            timeout_graceful_shutdown=math.ceil(timeout),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the route for rewards."""
        host, port = self._address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/get_reward"

    def close(self) -> None:
        """Stops taking requests, answers the running ones, frees the port and releases the reward."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self._scorer.shutdown(wait=False)
        self._reward = None  # FastAPI keeps a reference to this object

    def __enter__(self) -> "RewardServer":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def check_installed() -> None:
    """Raises `ImportError`, with the command to install it, if the extra `serve` is missing."""
    if any(find_spec(name) is None for name in ("fastapi", "uvicorn")):
        raise ImportError('Serving a reward needs FastAPI and uvicorn: pip install "trl-repulse[serve]".')
