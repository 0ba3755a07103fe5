"""Rewards from a server, over HTTP."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub.utils import httpx

from ._texts import Messages, as_queries, pick_labels, read_rewards


_TRY_AGAIN = (408, 425, 429)  # 4xx statuses that are worth a retry


def check_url(url: str) -> str:
    """A server's address, without white space around it. Raises a `ValueError`, which shows no key, if it is none or may hold one."""
    url = url.strip()
    if re.search("[@?#]", url):
        raise ValueError(
            "`url` has a user, a query or a fragment, which would be written into results with it; put a bearer token into an "
            "environment variable, and name that in `token_variable`."
        )
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        valid = False
    if not valid or not parts.path.isascii() or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(f"`url` must be like 'http://host:port/path', got {url!r}.")
    return url


@dataclass(eq=False, repr=False)
class RemoteReward:
    """
    Reward from one or several servers, in the format of OpenRLHF's remote reward models.

    A request is a POST of `{"query": [...], "prompts": [...], "labels": [...]}`, one entry a completion; the answer is
    `{"rewards": [...]}`, one finite number or `null` each. A query is the prompt followed by its completion: text, or a list of
    messages, to which the server can apply its own template. The requests of a call share connections.

    Args:
        url (`str` or `list[str]`):
            Address of the server, `http` or `https`, without a user or a query. Several servers take turns and work in parallel.
        batch_size (`int`, *optional*, defaults to `64`): Completions of one request.
        timeout (`float`, *optional*, defaults to `60.0`): Seconds to wait for a connection, and for the answer.
        retries (`int`, *optional*, defaults to `3`):
            How often a failed request is repeated, at the next server if there are several. Failures are unreachable
            servers and statuses 5xx, 408, 425 and 429; other answers raise an error at once.
        backoff (`float`, *optional*, defaults to `1.0`): Seconds before the first retry, doubled for each further one.
        label_column (`str`, *optional*): Column of the data set sent as `labels`. Without it, labels are empty texts.
        name (`str`, *optional*, defaults to `"RemoteReward"`):
            Name in the metrics, `rewards/NAME/mean`, and in results, which are not resumed with a reward of another name.
        token_variable (`str`, *optional*):
            Environment variable with a bearer token for the servers. It is read on each call and not stored.

    Raises:
        `ValueError`: If an argument is invalid or the variable is missing; when called, if the data set lacks the
            column of labels, or a server refuses a request or does not answer with its rewards.
        `ConnectionError`: When called, if a request fails after the last retry.
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

    @property
    def required_columns(self) -> list[str]:
        """Names of the columns that a call must get."""
        return [] if self.label_column is None else [self.label_column]

    def __post_init__(self):
        self.urls = [check_url(url) for url in ([self.url] if isinstance(self.url, str) else self.url)]
        self._sent = 0  # number of requests, which decides the next server
        if not self.urls:
            raise ValueError("`url` is empty; give the address of at least one server.")
        for option, least in (("batch_size", 1), ("retries", 0), ("backoff", 0)):
            if getattr(self, option) < least:
                raise ValueError(f"`{option}={getattr(self, option)}` must be at least {least}.")
        if self.timeout <= 0:
            raise ValueError(f"`timeout` must be positive, got {self.timeout}.")
        read_token(self.token_variable)

    def __repr__(self) -> str:
        return f"RemoteReward({self.urls}, name={self.name!r})"

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(
        self,
        prompts: list[str] | list[Messages],
        completions: list[str] | list[Messages],
        completion_ids: list[list[int]] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Rewards of completions, as TRL calls a reward function; of `kwargs`, the column `label_column` is sent."""
        columns = {
            "query": as_queries(prompts, completions),
            "prompts": list(prompts),
            "labels": pick_labels(kwargs, self.label_column, len(prompts)),
        }
        payloads = [
            {key: values[start : start + self.batch_size] for key, values in columns.items()}
            for start in range(0, len(prompts), self.batch_size)
        ]
        token = read_token(self.token_variable)
        headers = {"Content-Type": "application/json"}
        headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        turns = range(self._sent, self._sent + len(payloads))
        self._sent += len(payloads)
        # As many requests are under way as there are servers
        with httpx.Client(timeout=self.timeout, headers=headers) as client, ThreadPoolExecutor(len(self.urls)) as pool:
            answers = pool.map(lambda payload, turn: self._request(client, payload, turn, token), payloads, turns)
            return [reward for rewards in answers for reward in rewards]

    def _request(
        self, client: httpx.Client, payload: dict[str, list[Any]], turn: int, token: str | None
    ) -> list[float | None]:
        """Rewards of one request, sent to the server whose turn it is and, after failures, to the next ones."""
        failures = {}
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            url = self.urls[(turn + attempt) % len(self.urls)]
            try:
                answer = client.post(url, content=json.dumps(payload))
            except (httpx.HTTPError, OSError) as error:  # not kept as a cause: it holds the request with its token
                failures[url] = "timed out" if isinstance(error, httpx.TimeoutException) else str(error) or repr(error)
                continue
            if answer.is_success:
                return _read_rewards(answer.content, len(payload["query"]), url, token)
            said = f"status {answer.status_code}, {_hide(answer.text, token)[:200]!r}"
            if answer.status_code < 500 and answer.status_code not in _TRY_AGAIN:
                more = "; redirects are not followed" if answer.is_redirect else ""
                raise ValueError(f"The reward server {url} refused a request: {said}{more}.")
            failures[url] = said
        raise ConnectionError(
            f"{self.retries + 1} requests for rewards failed: "
            + "; ".join(f"{url} ({said})" for url, said in failures.items())
            + ". See whether the server runs, or raise `timeout` or `retries`."
        )


def read_token(variable: str | None) -> str | None:
    """The bearer token in an environment variable, without white space around it. Raises `ValueError`, which does not
    show it, if there is none or it is no valid header."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"`token_variable={variable!r}` is no environment variable with a token in it; set it.")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError(
            f"The environment variable `{variable}` holds no bearer token: letters, digits and signs alone."
        )
    return token


def _read_rewards(body: bytes, count: int, url: str, token: str | None) -> list[float | None]:
    """The rewards in an answer. Raises `ValueError`, without the token, if they are not `count` finite numbers or `null`."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        said = _hide(body.decode(errors="replace"), token)[:100]
        wrong = ", which is not JSON" if answer is None else ' instead of {"rewards": [...]}'
        raise ValueError(f"The reward server {url} answered {said!r}{wrong}.")
    # Text, which is refused, in place of what is no number, among it JSON's `true`
    rewards = [each if type(each) in (int, float, type(None)) else _hide(repr(each), token) for each in rewards]
    return read_rewards(rewards, f"The reward server {url}", count)


def _hide(text: str, token: str | None) -> str:
    """A server's words without the bearer token, which it may repeat."""
    return text.replace(token, "***") if token else text
