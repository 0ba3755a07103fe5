"""Rewards from a server, over HTTP."""

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.parse import urlsplit

from ._texts import Messages, as_queries, pick_labels


_LARGEST = 3.4e38  # TRL keeps rewards in single precision
_TRY_AGAIN = (408, 425, 429)  # of the answers that blame the client, those that time can mend


@dataclass(eq=False)
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
            fit one request.
        batch_size (`int`, *optional*, defaults to `64`):
            Completions of one request.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds without a sign of the server after which a request has failed.
        retries (`int`, *optional*, defaults to `3`):
            How often a request that failed is sent again, to the next server if there are several. An unreachable
            server and an answer of status 5xx, 408, 425 or 429 are failures of that kind; other answers are errors at
            once.
        backoff (`float`, *optional*, defaults to `1.0`):
            Seconds before the first retry; each further wait is twice as long.
        label_column (`str`, *optional*):
            Column of the data set that is sent as `labels`. Without one, labels are empty texts.
        name (`str`, *optional*, defaults to `"RemoteReward"`):
            Name in the metrics, `rewards/NAME/mean`.

    Raises:
        `ValueError`: If an argument is none of its allowed values; when called, if the data set lacks the column of
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

    def __post_init__(self):
        self._urls = [url.strip() for url in ([self.url] if isinstance(self.url, str) else self.url)]
        self._sent = 0  # requests so far: says whose turn it is
        if not self._urls:
            raise ValueError("`url` is empty; give the address of at least one server.")
        for url in self._urls:
            if not _is_address(url):
                raise ValueError(f"`url` must be like 'http://host:port/path', got {url!r}.")
        for field, least in (("batch_size", 1), ("retries", 0), ("backoff", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"`{field}` must be at least {least}, got {getattr(self, field)}.")
        if self.timeout <= 0:
            raise ValueError(f"`timeout` must be positive, got {self.timeout}.")

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
        with ThreadPoolExecutor(len(self._urls)) as pool:  # a request a server at any time
            return [reward for rewards in pool.map(self._request, payloads, turns) for reward in rewards]

    def _request(self, payload: dict[str, list[Any]], turn: int) -> list[float]:
        """Rewards of one request, which goes to the server whose turn it is, and on failure to those after it."""
        failures = {}
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            url = self._urls[(turn + attempt) % len(self._urls)]
            try:
                return _read_rewards(self._post(url, payload), len(payload["query"]), url)
            except urllib.error.HTTPError as error:
                said = f"status {error.code}, {_read_start(error)!r}"
                if error.code < 500 and error.code not in _TRY_AGAIN:
                    raise ValueError(f"The reward server {url} refused a request: {said}.") from error
                failures[url] = said
            except (OSError, http.client.HTTPException) as error:
                failures[url] = str(getattr(error, "reason", error)) or type(error).__name__
        raise ConnectionError(
            f"{self.retries + 1} requests for rewards failed: "
            + "; ".join(f"{url} ({said})" for url, said in failures.items())
            + ". See whether the server runs, or raise `timeout` or `retries`."
        )

    def _post(self, url: str, payload: dict[str, list[Any]]) -> bytes:
        request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            return response.read()


def _is_address(url: str) -> bool:
    """Whether a request can be sent there; `http.client` takes neither white space nor letters outside of ASCII."""
    try:
        parts = urlsplit(url)
        valid_port = parts.port is None or parts.port > 0  # one that is no port is a `ValueError`
    except ValueError:
        return False
    path = parts.path + parts.query
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and valid_port
        and path.isascii()
        and not re.search(r"\s", url)
    )


def _read_start(error: urllib.error.HTTPError) -> str:
    """What a server said beside its status, as far as it came."""
    try:
        with error:
            return error.read(200).decode(errors="replace")
    except (OSError, http.client.HTTPException) as broken:
        return f"broken off ({type(broken).__name__})"


def _read_rewards(body: bytes, count: int, url: str) -> list[float]:
    """
    The rewards in a server's answer.

    Raises:
        `ValueError`: If it is not `count` finite numbers under the name `rewards`.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The reward server {url} answered {body[:100]!r}, which is not JSON.") from error
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise ValueError(f'The reward server {url} answered {body[:100]!r} instead of {{"rewards": [...]}}.')
    if len(rewards) != count:
        raise ValueError(f"The reward server {url} answered {len(rewards)} rewards for {count} completions.")
    for i, reward in enumerate(rewards):
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= _LARGEST:
            raise ValueError(
                f"The reward server {url} answered {reward!r} for completion {i} of {count}; a reward must be a "
                "finite number."
            )
    return [float(reward) for reward in rewards]
