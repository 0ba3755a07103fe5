"""A served reward over a real socket: what it answers, whom it refuses, who waits for whom."""

import contextlib
import functools
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trl_repulse.rewards import ChatReward, RemoteReward, RewardServer

from ..reward_models import ANSWERS, CHAT_TEMPLATE, QUESTIONS, build_tokenizer, messages, save_model


PROMPTS, COMPLETIONS = ["the", "the cat", "a"], [" dog", "", " fish ran"]
QUERIES = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
PAYLOAD = {"query": QUERIES, "prompts": PROMPTS, "labels": ["x", "", "yy"]}


def lengths(prompts, completions, labels, completion_ids=None, **kwargs):
    return [len(p) + 10 * len(c) + 100 * len(x) for p, c, x in zip(prompts, completions, labels, strict=True)]


EXPECTED = [float(value) for value in lengths(PROMPTS, COMPLETIONS, PAYLOAD["labels"])]


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with contextlib.ExitStack() as servers:
        yield lambda reward=lengths, **options: servers.enter_context(RewardServer(reward, port=0, **options))


@pytest.fixture(scope="module")
def standing():
    """One server for requests that leave nothing behind."""
    with RewardServer(lengths, port=0) as server:
        yield server


def connect(server):
    host, port = server.url.removeprefix("http://").removesuffix("/get_reward").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=30)


class Slow:
    """A reward that waits until it may go on, and keeps what it was asked."""

    def __init__(self):
        self.entered, self.go_on, self.scored = threading.Event(), threading.Event(), []

    def __call__(self, completions, **columns):
        self.scored.append(completions)
        self.entered.set()
        assert self.go_on.wait(timeout=30)
        return [1.0] * len(completions)

    @contextlib.contextmanager
    def asked(self, server):
        """While it scores a request, whose answer stands in the list then."""
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(server, PAYLOAD)))
        asking.start()
        assert self.entered.wait(timeout=30)
        yield answers
        self.go_on.set()
        asking.join(timeout=30)


JSON = {"Content-Type": "application/json"}


def ask(server, body=None, method="POST", path="/get_reward", headers=JSON):
    """Status and parsed JSON of one request, whose body is sent as it is or as JSON."""
    connection = connect(server)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, headers)
    response = connection.getresponse()
    answer = response.read()
    assert response.headers["Content-Type"] == "application/json"
    connection.close()
    return response.status, json.loads(answer)


@pytest.mark.parametrize("form", ["plain", "messages"])
def test_a_served_reward_is_the_reward(serve, tmp_path, form):
    path, _ = save_model(tmp_path / "model", "llama", build_tokenizer("bos", CHAT_TEMPLATE))
    reward = ChatReward(path, device="cpu")
    prompts, completions = QUESTIONS, ANSWERS
    if form == "messages":
        both = [messages(question, answer) for question, answer in zip(QUESTIONS, ANSWERS, strict=True)]
        prompts, completions = [prompt for prompt, _ in both], [completion for _, completion in both]
    expected = reward(prompts, completions)
    assert len({round(value, 4) for value in expected}) > 1
    remote = RemoteReward(serve(reward).url, batch_size=2)
    assert remote(prompts, completions) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert remote(prompts, completions[::-1]) != pytest.approx(expected, rel=1e-4, abs=1e-5)  # the control


def test_the_form_of_requests_and_answers(serve):
    server = serve()
    assert ask(server, PAYLOAD) == (200, {"rewards": EXPECTED})
    assert ask(server, PAYLOAD, path="/") == ask(server, PAYLOAD, path="/get_reward?again=1") == ask(server, PAYLOAD)
    unlabelled = [float(value) for value in lengths(PROMPTS, COMPLETIONS, [""] * 3)]
    for payload in ({"query": QUERIES, "prompts": PROMPTS}, PAYLOAD | {"labels": None, "other": 1}):
        assert ask(server, payload) == (200, {"rewards": unlabelled})
    assert ask(server, {"query": [], "prompts": [], "labels": []}) == (200, {"rewards": []})


USER = {"role": "user", "content": "the"}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"{", "Expecting property name"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (b"[" * 100_000, "maximum recursion depth"),
        ([1], "`query` must be a list"),
        ({}, "`query` must be a list"),
        (PAYLOAD | {"query": "the dog"}, "`query` must be a list"),
        ({"query": QUERIES}, "`prompts` must be a list"),
        (PAYLOAD | {"labels": ["x"]}, "`labels` must be a list, with one entry a completion"),
        (PAYLOAD | {"prompts": PROMPTS[:2]}, "`prompts` must be a list, with one entry a completion"),
        (PAYLOAD | {"query": [*QUERIES[:2], None]}, "`query` 2 must be text"),
        (PAYLOAD | {"prompts": [1, 2, 3]}, "`query` 0 must be text"),
        (PAYLOAD | {"prompts": ["the", "cat", "a"]}, "`query` 1 must be text, or a list of messages, that begins"),
        ({"query": ["the dog"], "prompts": [[USER]]}, "`query` 0 must be text"),
        ({"query": [[]], "prompts": [[USER]]}, "`query` 0 must be text"),
    ],
)
def test_bad_payloads_are_refused_by_field(standing, payload, message):
    status, answer = ask(standing, payload)
    assert status == 400 and message in answer["detail"] and set(answer) == {"detail"}
    assert ask(standing, PAYLOAD)[0] == 200


def test_a_failing_reward_is_named_and_the_server_lives_on(serve):
    failures = [True]

    def moody(completions, **columns):
        if failures:
            raise RuntimeError("out of memory")
        return [1.0] * len(completions)

    server = serve(moody)
    assert ask(server, PAYLOAD) == (500, {"detail": "The reward function `moody` failed: RuntimeError: out of memory"})
    with pytest.raises(ConnectionError, match="status 500, .*`moody` failed: RuntimeError: out of memory"):
        RemoteReward(server.url, retries=1, backoff=0.01)(PROMPTS, COMPLETIONS)
    failures.clear()
    assert RemoteReward(server.url)(PROMPTS, COMPLETIONS) == [1.0] * 3


def test_what_is_no_reward_is_not_sent(serve):
    status, answer = ask(serve(lambda **columns: [1.0, 2.0, float("-inf")]), PAYLOAD)
    assert status == 500 and "it returned -inf for completion 2 of 3" in answer["detail"]
    assert RemoteReward(serve(lambda **columns: [1.0, None, 2.0]).url)(PROMPTS, COMPLETIONS) == [1.0, None, 2.0]


async def asynchronous(completions, **columns):
    return [1.0] * len(completions)


class Asynchronous:
    async def __call__(self, completions, **columns):
        return [1.0] * len(completions)


@pytest.mark.parametrize("reward", [asynchronous, Asynchronous(), functools.partial(asynchronous, labels=None)])
def test_an_asynchronous_reward_is_refused_at_once(reward):
    with pytest.raises(ValueError, match=r"is asynchronous; serve one that returns `asyncio.run\("):
        RewardServer(reward, port=0)


def test_one_request_at_a_time_has_the_model(serve):
    inside, most, entered, go_on = 0, 0, threading.Event(), threading.Event()

    def slow(completions, **columns):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        entered.set()
        assert go_on.wait(timeout=30)
        time.sleep(0.01)
        inside -= 1
        return [float(len(c)) for c in completions]

    server = serve(slow)
    with ThreadPoolExecutor(5) as clients:
        results = [clients.submit(RemoteReward(server.url), ["a"], ["b" * i]) for i in range(5)]
        assert entered.wait(timeout=30)
        go_on.set()
    assert [each.result() for each in results] == [[float(i)] for i in range(5)] and most == 1


def test_closing_answers_what_is_asked_and_frees_the_port(serve):
    reward = Slow()
    server = serve(reward)
    with reward.asked(server) as answers:
        closing = threading.Thread(target=server.close)
        closing.start()
        closing.join(timeout=0.5)
        assert closing.is_alive()  # it waits
        with pytest.raises(ConnectionError):
            ask(server, PAYLOAD)
        reward.go_on.set()
        closing.join(timeout=30)
    assert not closing.is_alive() and answers == [(200, {"rewards": [1.0] * 3})]
    with RewardServer(lengths, port=connect(server).port) as again:
        assert ask(again, PAYLOAD)[0] == 200
        with pytest.raises(OSError, match="in use"):
            RewardServer(lengths, port=connect(server).port)


def test_requests_whose_clients_have_left_are_not_scored(serve):
    reward = Slow()
    server = serve(reward)
    with reward.asked(server):
        for _ in range(3):
            with pytest.raises(ConnectionError, match="timed out"):
                RemoteReward(server.url, timeout=0.2, retries=0)(["a"], ["left"])
    assert RemoteReward(server.url)(["a"], ["stays"]) == [1.0]
    assert reward.scored == [COMPLETIONS, ["stays"]]


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain; a=application/json", None],
)
def test_json_alone_is_read(standing, kind):
    """The types that a page may send elsewhere without asking are not among what is read."""
    status, answer = ask(standing, PAYLOAD, headers={} if kind is None else {"Content-Type": kind})
    assert status == 415 and "must be application/json" in answer["detail"]
    for good in ("application/json; charset=utf-8", "Application/JSON"):
        assert ask(standing, PAYLOAD, headers={"Content-Type": good})[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_pages_of_the_web_are_refused(serve, origin):
    """Browsers send the page's origin with every POST, also where a page's name points to this machine."""
    calls = []
    server = serve(lambda **columns: calls.append(columns))
    status, answer = ask(server, PAYLOAD, headers=JSON | {"Origin": origin})
    assert status == 415 and "no browser's page may ask" in answer["detail"] and not calls
    connection = connect(server)
    connection.request("OPTIONS", "/get_reward", headers={"Origin": origin})
    assert connection.getresponse().headers["Access-Control-Allow-Origin"] is None


def test_a_token(serve, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "geheim\n")
    monkeypatch.setenv("OTHER_TOKEN", "geheim2")
    server = serve(token_variable="REWARD_TOKEN")
    for given in (None, "geheim", "Bearer geheim2", "Bearer gehei", "Bearer ", "Bearer gehe\xefm", "Basic geheim"):
        status, answer = ask(server, PAYLOAD, headers=JSON | ({} if given is None else {"Authorization": given}))
        assert (status, answer) == (401, {"detail": "The request lacks the server's bearer token."})
    assert ask(server, PAYLOAD, headers=JSON | {"Authorization": "Bearer geheim"})[0] == 200
    assert RemoteReward(server.url, token_variable="REWARD_TOKEN")(["a"], ["b"]) == [11.0]
    for reward in (RemoteReward(server.url), RemoteReward(server.url, token_variable="OTHER_TOKEN")):
        with pytest.raises(ValueError, match="refused a request: status 401"):
            reward(["a"], ["b"])
    monkeypatch.delenv("OTHER_TOKEN")
    with pytest.raises(ValueError, match="`token_variable='OTHER_TOKEN'` is no environment variable with a token"):
        RewardServer(lengths, port=0, token_variable="OTHER_TOKEN")
