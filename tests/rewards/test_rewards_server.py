"""A served reward over a real socket: what it answers, what it refuses, who waits for whom."""

import http.client
import json
import socket
import threading
import time

import pytest

from trl_repulse.rewards import (
    ChatReward,
    GuardReward,
    RemoteReward,
    RewardServer,
    SequencePairReward,
    ToxicityReward,
)

from ..reward_models import (
    ANSWERS,
    CHAT_TEMPLATE,
    QUESTIONS,
    build_tokenizer,
    messages,
    save_model,
)
from .test_rewards_guard import make_guard


PROMPTS, COMPLETIONS = ["the", "the cat", "a"], [" dog", "", " fish ran"]
QUERIES = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
PAYLOAD = {"query": QUERIES, "prompts": PROMPTS, "labels": ["x", "", "yy"]}


def lengths(prompts, completions, labels, completion_ids=None, **kwargs):
    return [len(p) + 10 * len(c) + 100 * len(x) for p, c, x in zip(prompts, completions, labels, strict=True)]


EXPECTED = [float(value) for value in lengths(PROMPTS, COMPLETIONS, PAYLOAD["labels"])]


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(reward=lengths, **options):
        servers.append(RewardServer(reward, port=0, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def standing():
    """One server for requests that leave nothing behind."""
    with RewardServer(lengths, port=0) as server:
        yield server


def connect(server):
    host, port = server.url.removeprefix("http://").removesuffix("/get_reward").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=30)


JSON = {"Content-Type": "application/json"}


def ask(server, body=None, method="POST", path="/get_reward", headers=JSON):
    """Status and parsed JSON of one request, whose body is sent as it is or as JSON."""
    connection = connect(server)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, headers)
    response = connection.getresponse()
    answer = response.read()
    assert response.headers["Content-Type"] == "application/json" and int(response.headers["Content-Length"]) > 0
    connection.close()
    return response.status, json.loads(answer)


def build(kind, folder):
    if kind == "pair":
        path, _ = save_model(folder / "model", "deberta", build_tokenizer("pair"))
        return SequencePairReward(path, device="cpu", max_length=12)
    if kind == "chat":
        path, _ = save_model(folder / "model", "llama", build_tokenizer("bos", CHAT_TEMPLATE))
        return ChatReward(path, device="cpu")
    if kind == "guard":
        return GuardReward(make_guard(folder / "model")[0], device="cpu")
    path, _ = save_model(folder / "model", "bert", build_tokenizer(), num_labels=2)
    return ToxicityReward(path, device="cpu", label=1, output="log_odds", negate=True)


@pytest.mark.parametrize("kind", ["pair", "chat", "guard", "toxicity"])
@pytest.mark.parametrize("form", ["plain", "messages"])
def test_a_served_reward_is_the_reward(serve, tmp_path, kind, form):
    reward = build(kind, tmp_path)
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
    assert ask(server, None, "GET", "/health") == (200, {"status": "ok", "reward": "lengths"})


USER = {"role": "user", "content": "the"}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"{", "Invalid JSON"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b"", "Invalid JSON"),
        ([1], "Input should be an object"),
        ({}, "`query`: Field required"),
        (PAYLOAD | {"query": "the dog"}, "`query`: Input should be a valid array"),
        ({"query": QUERIES}, "`prompts`: Field required"),
        (PAYLOAD | {"labels": "x"}, "`labels`: Input should be a valid array"),
        (PAYLOAD | {"labels": ["x"]}, "`labels` has 1 entries and `query` 3"),
        (PAYLOAD | {"prompts": PROMPTS[:2]}, "`prompts` has 2 entries and `query` 3"),
        (PAYLOAD | {"query": [*QUERIES[:2], None]}, "`query.2`: Input should be a valid string"),
        (PAYLOAD | {"prompts": [1, 2, 3]}, "`prompts.0`: Input should be a valid string"),
        (PAYLOAD | {"prompts": ["the", "cat", "a"]}, "`query` 1 does not begin with its entry of `prompts`"),
        ({"query": ["the dog"], "prompts": [[USER]]}, "`query` 0 does not begin with its entry of `prompts`"),
        ({"query": [[]], "prompts": [[USER]]}, "`query` 0 does not begin with its entry of `prompts`"),
        ({"query": [[{"content": "a"}]], "prompts": [[]]}, "`query.0`: "),
        ({"query": [[USER | {"content": 3}]], "prompts": [[]]}, "`query.0`: "),
    ],
)
def test_bad_payloads_are_refused_by_field(standing, payload, message):
    status, answer = ask(standing, payload)
    assert status == 400 and message in answer["detail"] and set(answer) == {"detail"}
    assert ask(standing, PAYLOAD)[0] == 200


def test_the_client_hears_why(serve):
    with pytest.raises(ValueError, match="refused a request: status 413, .*`query` has 3 entries, more than 2"):
        RemoteReward(serve(max_batch_size=2).url)(PROMPTS, COMPLETIONS)
    assert RemoteReward(serve(max_batch_size=2).url, batch_size=2)(PROMPTS, COMPLETIONS)


def test_a_request_over_the_limit_is_refused_while_its_client_still_sends(serve):
    server = serve(max_request_bytes=1000)
    status, answer = ask(server, PAYLOAD | {"labels": ["x" * 30_000_000] * 3})
    assert status == 413 and answer["detail"].endswith("more than the 1000 bytes allowed; send fewer texts.")
    assert ask(server, PAYLOAD)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/other", 404, "Not Found"),
        ("GET", "/", 405, "Method Not Allowed"),
        ("GET", "/get_reward", 405, "Method Not Allowed"),
        ("POST", "/health", 405, "Method Not Allowed"),
        ("GET", "/../etc/passwd", 404, "Not Found"),
        ("DELETE", "/get_reward", 405, "Method Not Allowed"),
    ],
)
def test_other_addresses_and_methods(standing, method, path, status, message):
    actual, answer = ask(standing, PAYLOAD if method == "POST" else None, method, path)
    assert actual == status and message in answer["detail"]


@pytest.mark.parametrize("length", ["abc", "-1", "9" * 30])
def test_a_length_that_is_none(standing, length):
    connection = connect(standing)
    connection.request("POST", "/get_reward", b"{}", JSON | {"Content-Length": length})
    assert connection.getresponse().status == 400
    assert ask(standing, PAYLOAD)[0] == 200


def test_what_is_no_http(standing):
    with socket.create_connection((connect(standing).host, connect(standing).port), timeout=30) as client:
        client.sendall(b"hello\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert ask(standing, PAYLOAD)[0] == 200


def returning(value):
    return lambda **columns: value


def test_a_failing_reward_is_named_and_the_server_lives_on(serve):
    failures = [True]

    def moody(completions, **columns):
        if failures:
            raise RuntimeError("out of memory")
        return [1.0] * len(completions)

    server = serve(moody)
    assert ask(server, PAYLOAD) == (
        500,
        {"detail": "The reward function `moody` failed: RuntimeError: out of memory"},
    )
    with pytest.raises(ConnectionError, match="status 500, .*`moody` failed: RuntimeError: out of memory"):
        RemoteReward(server.url, retries=1, backoff=0.01)(PROMPTS, COMPLETIONS)
    failures.clear()
    assert RemoteReward(server.url)(PROMPTS, COMPLETIONS) == [1.0] * 3


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0, 2.0], "it returned 2 rewards for 3 completions"),
        ([1.0, float("nan"), 2.0], "it returned nan for completion 1 of 3"),
        ([1.0, 2.0, float("-inf")], "it returned -inf for completion 2 of 3"),
        ([1.0, None, 2.0], "it returned None for completion 1 of 3"),
        (["1", "2", "3"], "it returned '1' for completion 0 of 3"),
        (None, "it returned None instead of a list"),
        ({"rewards": [1.0, 2.0, 3.0]}, "instead of a list"),
    ],
)
def test_what_is_no_reward_is_not_sent(serve, rewards, message):
    status, answer = ask(serve(returning(rewards)), PAYLOAD)
    assert status == 500 and message in answer["detail"]


def test_tensors_are_sent_as_numbers(serve):
    import torch

    assert ask(serve(returning(torch.tensor([1, 2, 3]))), PAYLOAD) == (200, {"rewards": [1.0, 2.0, 3.0]})


def test_one_request_at_a_time_has_the_model_and_health_needs_none(serve):
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
    results = []

    def client(i):
        results.append((i, RemoteReward(server.url)(["a"], ["b" * i])))

    clients = [threading.Thread(target=client, args=(i,)) for i in range(5)]
    for thread in clients:
        thread.start()
    assert entered.wait(timeout=30)
    assert ask(server, None, "GET", "/health")[0] == 200
    go_on.set()
    for thread in clients:
        thread.join(timeout=30)
    assert sorted(results) == [(i, [float(i)]) for i in range(5)] and most == 1


def test_closing_answers_what_is_asked_and_frees_the_port(serve):
    entered, go_on = threading.Event(), threading.Event()

    def slow(completions, **columns):
        entered.set()
        assert go_on.wait(timeout=30)
        return [1.0] * len(completions)

    server, results = serve(slow), []
    asking = threading.Thread(target=lambda: results.append(ask(server, PAYLOAD)))
    asking.start()
    assert entered.wait(timeout=30)
    closing = threading.Thread(target=server.close)
    closing.start()
    closing.join(timeout=0.5)
    assert closing.is_alive()  # it waits
    with pytest.raises(ConnectionError):
        ask(server, PAYLOAD)
    go_on.set()
    closing.join(timeout=30)
    asking.join(timeout=30)
    assert not closing.is_alive() and results == [(200, {"rewards": [1.0] * 3})]
    again = RewardServer(lengths, port=connect(server).port)
    assert ask(again, PAYLOAD)[0] == 200
    with pytest.raises(OSError, match="in use"):
        RewardServer(lengths, port=connect(server).port)
    again.close()


@pytest.mark.parametrize("name", ["max_batch_size", "max_request_bytes", "timeout", "max_connections"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"`{name}` must be positive, got 0"):
        RewardServer(lengths, port=0, **{name: 0})
