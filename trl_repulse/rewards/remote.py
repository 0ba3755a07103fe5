"""Rewards from a server, over HTTP."""

import asyncio
import json
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any

from huggingface_hub.utils import httpx

from ._address import Address, hide, parse_address
from ._texts import Messages, as_queries, pick_labels


_LARGEST = 3.4e38  # TRL keeps rewards in single precision
_TRY_AGAIN = (408, 425, 429)  # of the answers that blame the client, those that may pass with time
_MOST_BYTES = 2**24  # of an answer
# Process -> the loop of its requests: a forked process begins its own, and leaves its parent's alone
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
_LOCKS: dict[int, threading.Lock] = {}
_THREAD = "trl-repulse requests"


def _not_of_a_reward(record: logging.LogRecord) -> bool:
    return threading.current_thread().name != _THREAD


# The HTTP library logs addresses with their queries, and the headers of answers, which may repeat them
for _name in (httpx.__name__, httpx.__name__.replace("httpx", "httpcore") + ".http11"):
    logging.getLogger(_name).addFilter(_not_of_a_reward)


@dataclass(eq=False, repr=False)
class RemoteReward:
    """
    Reward from one server or several, in the form that OpenRLHF's remote reward models have.

    A request is a POST of `{"query": [...], "prompts": [...], "labels": [...]}`, one entry a completion, and the
    answer `{"rewards": [...]}`, one finite number each. A query is the prompt with its completion. Of plain prompts
    all of this is text; of conversations, prompts and queries are lists of messages, so that the server can use its
    own template.

    Args:
        url (`str` or `list[str]`):
            Address of the server, `http` or `https`. Several take turns, and work at the same time on what does not
            fit one request. User info and query are sent, and appear in no message, log or file.
        batch_size (`int`, *optional*, defaults to `64`):
            Completions of one request.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds after which a request has failed, unless its whole answer is there.
        retries (`int`, *optional*, defaults to `3`):
            How often a request that failed is sent again, to the next server if there are several. An unreachable
            server and an answer of status 5xx, 408, 425 or 429 are failures of that kind; other answers are errors at
            once.
        backoff (`float`, *optional*, defaults to `1.0`):
            Seconds before the first retry; each further wait is twice as long.
        label_column (`str`, *optional*):
            Column of the data set that is sent as `labels`. Without one, labels are empty texts.
        name (`str`, *optional*, defaults to `"RemoteReward"`):
            Name in the metrics, `rewards/NAME/mean`, and in results, which are never taken up with a reward of another name.
        token_variable (`str`, *optional*):
            Environment variable that holds a bearer token for the servers. It is read with each call, and kept nowhere.

    Raises:
        `ValueError`: If an argument is none of its allowed values, or there is no such variable; when called, if the data set lacks the column of
            labels, or a server refuses a request or answers with anything but its rewards.
        `ConnectionError`: When called, if a request still fails after the last retry.

    Example:

    ```python
    >>> from trl_repulse.rewards import RemoteReward

    >>> reward = RemoteReward(["http://10.0.0.1:5000/get_reward", "http://10.0.0.2:5000/get_reward"], timeout=120)
    ```
    """

    url: str | list[str]
    _: KW_ONLY
    batch_size: int = 64
    timeout: float = 60.0
    retries: int = 3
    backoff: float = 1.0
    label_column: str | None = None
    name: str = "RemoteReward"
    token_variable: str | None = None

    def __post_init__(self):
        self._addresses = [parse_address(url) for url in ([self.url] if isinstance(self.url, str) else self.url)]
        self._sent = 0  # requests so far: says whose turn it is
        self._clients: dict[int, httpx.AsyncClient] = {}  # by process
        if not self._addresses:
            raise ValueError("`url` is empty; give the address of at least one server.")
        for field, least in (("batch_size", 1), ("retries", 0), ("backoff", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"`{field}` must be at least {least}, got {getattr(self, field)}.")
        if self.timeout <= 0:
            raise ValueError(f"`timeout` must be positive, got {self.timeout}.")
        if self.token_variable is not None and any(address.auth for address in self._addresses):
            raise ValueError("`url` has user info and `token_variable` is set; a request takes one of them.")
        self._token()

    @property
    def shown_urls(self) -> list[str]:
        """The addresses without user info and query, as messages and results may show them."""
        return [address.shown for address in self._addresses]

    def __repr__(self) -> str:
        return f"RemoteReward({self.shown_urls}, name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_clients": {}}

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(
        self,
        prompts: list[str] | list[Messages],
        completions: list[str] | list[Messages],
        completion_ids: list[list[int]] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """
        Rewards of completions, as TRL calls a reward function.

        Args:
            prompts (`list`):
                Prompts, plain text or messages.
            completions (`list`):
                One completion a prompt, in the same form.
            completion_ids (`list[list[int]]`, *optional*):
                Unused.
            kwargs:
                Further columns of the data set, of which `label_column` is sent.

        Returns:
            `list[float]`: one reward a completion.

        Raises:
            `ValueError`: If a server refuses a request or answers with anything but its rewards.
            `ConnectionError`: If a request still fails after the last retry.
        """
        columns = {
            "query": as_queries(prompts, completions),
            "prompts": list(prompts),
            "labels": pick_labels(kwargs, self.label_column, len(prompts)),
        }
        payloads = [
            {key: values[start : start + self.batch_size] for key, values in columns.items()}
            for start in range(0, len(prompts), self.batch_size)
        ]
        turns = range(self._sent, self._sent + len(payloads))
        self._sent += len(payloads)
        token = self._token()
        with ThreadPoolExecutor(len(self._addresses)) as pool:  # a request a server at any time
            asked = pool.map(lambda *request: self._request(*request, token), payloads, turns)
            return [reward for rewards in asked for reward in rewards]

    def _token(self) -> str | None:
        return None if self.token_variable is None else read_token(self.token_variable)

    def _request(self, payload: dict[str, list[Any]], turn: int, token: str | None) -> list[float]:
        """Rewards of one request, which goes to the server whose turn it is, and on failure to those after it."""
        body, failures = json.dumps(payload).encode(), {}
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            address = self._addresses[(turn + attempt) % len(self._addresses)]
            secrets = address.secrets | ({token} if token else set())
            status, answer = self._post(address, body, token)
            if status is not None and 200 <= status < 300:
                return _read_rewards(answer, len(payload["query"]), address.shown, secrets)
            said = hide(answer.decode(errors="replace"), secrets)
            if status is not None:
                said = f"status {status}, {said[:200]!r}"
                if status < 500 and status not in _TRY_AGAIN:
                    more = "; redirects are not followed" if status < 400 else ""
                    raise ValueError(f"The reward server {address.shown} refused a request: {said}{more}.")
            failures[address.shown] = said
        raise ConnectionError(
            f"{self.retries + 1} requests for rewards failed: "
            + "; ".join(f"{url} ({said})" for url, said in failures.items())
            + ". See whether the server runs, or raise `timeout` or `retries`."
        )

    def _post(self, address: Address, body: bytes, token: str | None) -> tuple[int | None, bytes]:
        """
        Status and answer of one request, or `None` and what went wrong.

        No error of the HTTP library leaves here, not even as the cause of another: it holds the request and its headers.
        """
        asked = asyncio.run_coroutine_threadsafe(self._send(address, body, token), _loop())
        try:
            return asked.result()
        except TimeoutError:
            return None, b"timed out"
        except (httpx.HTTPError, OSError) as error:
            return None, _reason(error).encode()
        finally:
            asked.cancel()  # where something else has ended the wait

    async def _send(self, address: Address, body: bytes, token: str | None) -> tuple[int, bytes]:
        client = self._clients.get(os.getpid())
        if client is None:
            limits = httpx.Limits(keepalive_expiry=30)  # the next step of training is to find the connection open
            client = self._clients[os.getpid()] = httpx.AsyncClient(timeout=None, limits=limits)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        options = {"content": body, "headers": headers, "auth": address.auth}
        answer = bytearray()
        # The library's own limits are those of one read, which a server that sends a byte now and then never meets
        async with asyncio.timeout(self.timeout), client.stream("POST", address.url, **options) as response:
            try:
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > _MOST_BYTES:
                        return response.status_code, bytes(answer[:_MOST_BYTES])
            except httpx.HTTPError as error:
                if response.is_success:
                    raise
                answer[:] = f"broken off ({type(error).__name__})".encode()
        return response.status_code, bytes(answer)


def read_token(variable: str) -> str:
    """
    A bearer token from the environment.

    Args:
        variable (`str`):
            Name of the variable.

    Returns:
        `str`: The token, without white space around it.

    Raises:
        `ValueError`: If the variable is missing or empty, or a header cannot hold its value, which is not shown.
    """
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"`token_variable={variable!r}` is no environment variable with a token in it; set it.")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError(
            f"The environment variable `{variable}` holds no bearer token: letters, digits and signs alone."
        )
    return token


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of all requests of this process, in a thread of its own: connections that are kept belong to one loop."""
    process = os.getpid()
    with _LOCKS.setdefault(process, threading.Lock()):
        if process not in _LOOPS:
            _LOOPS[process] = asyncio.new_event_loop()
            threading.Thread(target=_LOOPS[process].run_forever, name=_THREAD, daemon=True).start()
        return _LOOPS[process]


def _reason(error: BaseException | None) -> str:
    """What went wrong, in the words of the operating system if it was asked."""
    said = str(error) or type(error).__name__
    while error is not None:
        if isinstance(error, BaseExceptionGroup):  # one error for each address of a host
            error = error.exceptions[0]
        if isinstance(error, OSError) and error.errno:
            said = os.strerror(error.errno) if isinstance(error, ConnectionError) else str(error)
        error = error.__cause__ or error.__context__
    return said


def _read_rewards(body: bytes, count: int, url: str, secrets: frozenset[str]) -> list[float]:
    """
    The rewards in a server's answer.

    Raises:
        `ValueError`: If it is not `count` finite numbers under the name `rewards`; what it shows of it holds no secret.
    """
    answer = _parse(body)
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        said = hide(body.decode(errors="replace"), secrets)[:100]
        wrong = ", which is not JSON" if answer is None else ' instead of {"rewards": [...]}'
        raise ValueError(f"The reward server {url} answered {said!r}{wrong}.")
    if len(rewards) != count:
        raise ValueError(f"The reward server {url} answered {len(rewards)} rewards for {count} completions.")
    for i, reward in enumerate(rewards):
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= _LARGEST:
            raise ValueError(
                f"The reward server {url} answered {hide(repr(reward), secrets):.60} for completion {i} of {count}; a "
                "reward must be a finite number."
            )
    return [float(reward) for reward in rewards]


def _parse(body: bytes) -> Any:
    """What the JSON of an answer says; `None` if it is none, or says nothing."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
