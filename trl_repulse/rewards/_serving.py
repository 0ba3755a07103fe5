"""
The HTTP side of a reward server: FastAPI's routes, and uvicorn with limits of its own on connections and their time.

uvicorn (0.54) limits how long a connection may be silent between two requests, but not how long a request may take to come. Its
limit on concurrency counts connections that ask for nothing, and closes none: idle ones would keep everybody else out.
"""

import asyncio
import hmac
import ipaddress
import math
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from .server import Refusal, read_request


if TYPE_CHECKING:
    from .server import RewardServer


_PATHS = ("/get_reward", "/")  # of rewards; the first is OpenRLHF's
_HEALTH = "/health"


def build_app(
    owner: "RewardServer", scorer: Executor, host: str, allow_origins: Sequence[str], token: str | None
) -> FastAPI:
    """
    The routes of a reward server.

    Args:
        owner ([`RewardServer`]):
            Whose rewards and limits they are.
        scorer (`concurrent.futures.Executor`):
            One thread, which always has the model.
        host (`str`):
            Address that the server listens at, in numbers.
        allow_origins (`Sequence[str]`):
            Origins whose pages may send requests.
        token (`str`, *optional*):
            Bearer token that requests for rewards must have.

    Returns:
        `fastapi.FastAPI`
    """
    turn, room = asyncio.Lock(), asyncio.Semaphore(owner.max_connections)  # one request at a time has the model
    is_local = ipaddress.ip_address(host).is_loopback

    async def check_host(request: Request) -> None:
        # A request for another name can be that of a page of the web whose own name points to this machine
        name = _host_name(request.headers.get("Host", ""))
        if is_local and name not in ("localhost", "127.0.0.1", "::1", host):
            raise HTTPException(
                400,
                f"This server is reached as localhost alone and not as {name!r:.100}; have a proxy send that name.",
            )

    async def check_origin(request: Request) -> None:
        # A browser names the page's origin wherever it matters: with all that changes something, or is read elsewhere
        origin = request.headers.get("Origin")
        if origin is not None and origin not in allow_origins:
            raise HTTPException(403, f"Pages of {origin!r:.100} may not send requests; see `allow_origins`.")

    async def check_token(request: Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "The request lacks the server's bearer token.", {"WWW-Authenticate": "Bearer"})

    async def check_type(request: Request) -> None:
        kind = request.headers.get("Content-Type", "none")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, f"The `Content-Type` must be application/json, got {kind!r:.60}.")

    checks = [Depends(check_host), Depends(check_origin)]
    app = FastAPI(openapi_url=None, redirect_slashes=False, dependencies=checks)
    if allow_origins:
        methods, headers = ["GET", "POST"], ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=allow_origins, allow_methods=methods, allow_headers=headers)

    @app.get(_HEALTH)
    async def health() -> dict[str, str]:
        return {"status": "ok", "reward": owner.name}

    async def get_reward(request: Request) -> JSONResponse:
        body = await _read_body(request, owner.max_request_bytes)
        if room.locked():
            raise Refusal(503, f"The server has {owner.max_connections} requests already; send this one again later.")
        async with room:
            columns = await asyncio.to_thread(read_request, body, owner.max_batch_size)
            return await score(request, columns)

    async def score(request: Request, columns: dict[str, list[Any]]) -> JSONResponse:
        async with turn:
            if await request.is_disconnected():  # nobody waits for it any more, and others do
                raise ClientDisconnect()
            rewards = await asyncio.get_running_loop().run_in_executor(scorer, owner.score, columns)
        return JSONResponse({"rewards": rewards})

    for path in _PATHS:
        app.post(path, dependencies=[Depends(check_token), Depends(check_type)])(get_reward)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        return JSONResponse({"error": str(refusal)}, refusal.status)

    @app.exception_handler(ClientDisconnect)
    async def leave(request: Request, error: ClientDisconnect) -> JSONResponse:
        return JSONResponse({"error": "The client has left."}, 400)  # which nobody reads

    @app.exception_handler(StarletteHTTPException)
    async def refuse_address(request: Request, error: StarletteHTTPException) -> JSONResponse:
        path, said = request.url.path, error.detail
        if error.status_code == 404:
            said = f"There is no {path}; POST to {_PATHS[0]} or GET {_HEALTH}."
        elif error.status_code == 405:
            said = f"{path} takes {'GET' if path == _HEALTH else 'POST'} and not {request.method}."
        return JSONResponse({"error": said}, error.status_code, error.headers)

    return app


def _host_name(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:  # brackets that are no address
        return header


async def _read_body(request: Request, most: int) -> bytes:
    """The body, which may say how long it is or come in chunks."""
    length = int(request.headers.get("Content-Length", 0))  # h11 has refused what is no number
    body = bytearray()
    if length <= most:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                break
    if max(length, len(body)) > most:
        size = f"{length} bytes, more" if length else "more bytes"
        raise Refusal(413, f"The request has {size} than the {most} allowed; send fewer texts.")
    return bytes(body)


def build_server(app: FastAPI, timeout: float, max_connections: int) -> uvicorn.Server:
    """
    The server of an app.

    Args:
        app (`fastapi.FastAPI`):
            The routes.
        timeout (`float`):
            Seconds in which a request must be there as a whole.
        max_connections (`int`):
            Most connections at a time.

    Returns:
        `uvicorn.Server`: It is run with a socket that listens.
    """

    class Connection(_Connection):
        seconds, most = timeout, max_connections

    config = uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(timeout),
        timeout_graceful_shutdown=math.ceil(timeout),
    )
    return uvicorn.Server(config)


class _Connection(H11Protocol):
    """
    A connection that is cut off unless its next request is there as a whole in time, and its answers are taken in.

    Depends on what uvicorn (0.54) keeps of a connection: `connections`, `transport`, `loop`, `flow`, and of its request,
    `cycle`, `more_body` and `response_complete`. Let it go once uvicorn has such limits (its issues 157 and 160).
    """

    seconds: float
    most: int
    deadline: TimerHandle | None = None

    @property
    def has_request(self) -> bool:
        """Whether a request is there as a whole and not yet answered, and its client takes in answers."""
        asked = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        return asked and not self.flow.write_paused

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        # asyncio does this for sockets that it made itself; without it an answer waits 40 ms for its head to be acknowledged
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()
        others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        waiting = [each for each in others if not each.has_request]
        if len(others) >= self.most and waiting:
            min(waiting, key=lambda each: each.deadline.when()).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.has_request:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()  # takes up the next request, if that is there already
        if self.has_request:
            self._stop_waiting()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.has_request:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self.deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
