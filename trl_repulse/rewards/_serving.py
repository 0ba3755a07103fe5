"""Routes of a reward server."""

import asyncio
import hmac
import ipaddress
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from ._texts import read_rewards


logger = logging.getLogger(__name__)


class _Message(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]]


class _Payload(BaseModel):
    """A request."""

    query: list[str | list[_Message]]
    prompts: list[str | list[_Message]]
    labels: list[Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> "_Payload":
        count = len(self.query)
        for name in ("prompts", "labels"):
            if (values := getattr(self, name)) is not None and len(values) != count:
                raise ValueError(f"`{name}` has {len(values)} entries and `query` {count}; send one a completion")
        for i, (query, prompt) in enumerate(zip(self.query, self.prompts, strict=True)):
            if type(query) is not type(prompt) or query[: len(prompt)] != prompt:
                raise ValueError(f"`query` {i} does not begin with its entry of `prompts`; send prompt + completion")
        return self


def build_app(
    score: Callable[[dict[str, list[Any]]], Any],
    name: str,
    scorer: Executor,
    host: str,
    max_batch_size: int,
    max_request_bytes: int,
    allow_origins: Sequence[str],
    token: str | None,
) -> FastAPI:
    """The FastAPI app of a reward server at the numeric address `host`; `score` gives the rewards of a request's columns
    and runs in `scorer`, which has a single thread."""
    turn = asyncio.Lock()  # one request at a time uses the model
    everywhere, scoring = _build_checks(host, allow_origins, token)
    app = FastAPI(openapi_url=None, redirect_slashes=False, dependencies=everywhere)
    if allow_origins:
        methods, headers = ["GET", "POST"], ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=allow_origins, allow_methods=methods, allow_headers=headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "reward": name}

    @app.post("/", dependencies=scoring)
    @app.post("/get_reward", dependencies=scoring)  # OpenRLHF's
    async def get_reward(request: Request) -> dict[str, list[float]]:
        try:
            body = await _read_body(request, max_request_bytes)
            columns = await asyncio.to_thread(_read_columns, body, max_batch_size)
            async with turn:
                if await request.is_disconnected():  # the client has stopped waiting
                    raise ClientDisconnect()
                run = asyncio.get_running_loop().run_in_executor(scorer, _check_rewards, score, columns)
                try:
                    return {"rewards": await run}
                except Exception as error:
                    logger.exception("The reward function %s failed", name)
                    reason = f"{type(error).__name__}: {error}"
                    raise HTTPException(500, f"The reward function `{name}` failed: {reason}") from error
        except ClientDisconnect:
            raise HTTPException(400, "The client has left.") from None  # which nobody reads

    return app


def _build_checks(host: str, allow_origins: Sequence[str], token: str | None) -> tuple[list[Any], list[Any]]:
    """Checks of all requests, and further checks of requests for rewards."""
    names = {"localhost", "127.0.0.1", "[::1]", host} if ipaddress.ip_address(host).is_loopback else set()

    async def check_sender(request: Request) -> None:
        # DNS rebinding: a web page's host name may point to this machine
        asked = re.sub(r":\d+$", "", request.headers.get("Host", "").lower())
        if names and asked not in names:
            raise HTTPException(
                400, f"This server is reached as localhost alone; have a proxy send that, not {asked!r:.99}."
            )
        # Browsers send the page's origin with every POST and cross-origin request
        origin = request.headers.get("Origin")
        if origin is not None and origin not in allow_origins:
            raise HTTPException(403, f"Pages of {origin!r:.100} may not send requests; see `allow_origins`.")

    async def check_headers(request: Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "The request lacks the server's bearer token.", {"WWW-Authenticate": "Bearer"})
        kind = request.headers.get("Content-Type", "none")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, f"The `Content-Type` must be application/json, got {kind!r:.60}.")

    return [Depends(check_sender)], [Depends(check_headers)]


async def _read_body(request: Request, most: int) -> bytes:
    """The request's body, with a length header or in chunks."""
    body = bytearray()
    if int(request.headers.get("Content-Length", 0)) <= most:  # h11 refuses other than numbers
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                break
        else:
            return bytes(body)
    raise HTTPException(413, f"The request has more than the {most} bytes allowed; send fewer texts.")


def _read_columns(body: bytes, max_batch_size: int) -> dict[str, list[Any]]:
    """Columns `prompts`, `completions` and `labels` of a request."""
    try:
        payload = _Payload.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][:2]))
        raise HTTPException(
            400, f"{f'`{place}`: ' if place else ''}{first['msg'].removeprefix('Value error, ')}."
        ) from None
    count = len(payload.query)
    if count > max_batch_size:
        raise HTTPException(413, f"`query` has {count} entries, more than {max_batch_size}; send fewer in a request.")
    completions = [query[len(prompt) :] for query, prompt in zip(payload.query, payload.prompts, strict=True)]
    labels = [""] * count if payload.labels is None else payload.labels
    return {"prompts": payload.prompts, "completions": completions, "labels": labels}


def _check_rewards(score: Callable[[dict[str, list[Any]]], Any], columns: dict[str, list[Any]]) -> list[float]:
    """Rewards, checked to be one finite number a completion."""
    count = len(columns["prompts"])
    if count == 0:
        return []
    rewards = read_rewards(score(columns), "it", count)
    if None in rewards:
        raise ValueError(f"it returned None for completion {rewards.index(None)} of {count}; send finite numbers")
    return rewards
