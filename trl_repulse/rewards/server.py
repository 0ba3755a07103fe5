"""A reward function behind HTTP, in the form that `RemoteReward` and OpenRLHF's clients ask for."""

import math
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from .remote import read_token


_NOT_INSTALLED = 'Serving a reward needs FastAPI and uvicorn: pip install "trl-repulse[serve]".'


class RewardServer:
    """
    Serves one reward function, until it is closed. Needs the extra `serve`.

    A request is a POST to `/get_reward` of `{"query": [...], "prompts": [...], "labels": [...]}`, one entry a
    completion, and the answer `{"rewards": [...]}`. A query is its prompt with the completion after it: text, or a
    list of messages. Labels may be missing; the function gets them as the column `labels`, and no `completion_ids`.
    GET `/health` answers `{"status": "ok", "reward": name}`.

    Everything else is answered by `{"detail": message}`: status 400 for a request that is not of that form, naming the
    field; 401 without the token; 403 for pages of the web that are not in `allow_origins`; 404 and 405 for other addresses
    and methods; 413 for a request over a limit; 415 for another type than `application/json`; 500 if the function fails or
    returns anything but one finite number a completion.

    Requests are read at the same time and scored one after another. There is no encryption, and no limit on how slowly a
    request may arrive: let others reach the server through a proxy that has both.

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
            Seconds that a connection is kept between two requests; also how long closing waits for requests that are being
            answered.
        max_connections (`int`, *optional*, defaults to `64`):
            Most connections at a time. Requests beyond it get status 503, which clients repeat.
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
        import uvicorn

        from ._serving import build_app

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
        self._reward: Callable[..., Any] | None = reward
        self._name = getattr(reward, "__name__", type(reward).__name__)
        token = None if token_variable is None else read_token(token_variable)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        # Inherited by connections; else an answer waits 40 ms for its head to be acknowledged
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = self._socket.getsockname()[:2]
        self._scorer = ThreadPoolExecutor(1)
        config = uvicorn.Config(
            build_app(
                lambda columns: self._reward(**columns, completion_ids=None),
                self._name,
                self._scorer,
                self._address[0],
                max_batch_size,
                max_request_bytes,
                allow_origins,
                token,
            ),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=max_connections + 1,  # uvicorn counts the one that asks
            timeout_keep_alive=math.ceil(timeout),
            timeout_graceful_shutdown=math.ceil(timeout),
        )
        self._server = uvicorn.Server(config)
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


def check_installed() -> None:
    """
    Refuses to serve where the extra is missing, before anything is loaded.

    Raises:
        `ImportError`: It says how to install it.
    """
    if any(find_spec(name) is None for name in ("fastapi", "uvicorn")):
        raise ImportError(_NOT_INSTALLED)
