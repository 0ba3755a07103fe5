"""What a reward server refuses: too many clients, too much of a request, pages of the web, requests without its token."""

import contextlib
import gc
import json
import threading
import time
import weakref

import pytest

from trl_repulse.rewards import RemoteReward, RewardServer

from .test_rewards_server import COMPLETIONS, EXPECTED, JSON, PAYLOAD, ask, connect, lengths


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


def test_a_closed_server_lets_the_reward_and_its_thread_go(serve):
    class Reward:
        def __call__(self, completions, **columns):
            return [1.0] * len(completions)

    def serve_once():
        reward = Reward()
        with RewardServer(reward, port=0) as server:
            assert ask(server, PAYLOAD)[0] == 200
        return weakref.ref(reward)

    serve_once()
    gc.collect()
    before = threading.active_count()
    rewards = [serve_once() for _ in range(3)]
    gc.collect()
    assert [reward() for reward in rewards] == [None] * 3 and threading.active_count() <= before


def test_an_answer_does_not_wait_for_its_head_to_be_acknowledged(standing):
    """It took 40 ms over a connection that stays open."""
    connection, start = connect(standing), time.monotonic()
    for _ in range(50):
        connection.request("POST", "/get_reward", json.dumps(PAYLOAD), JSON)
        assert connection.getresponse().read()
    assert time.monotonic() - start < 1.5


def test_a_request_that_is_scored_has_all_the_time_it_needs(serve):
    def slow(completions, **columns):
        time.sleep(1)
        return [1.0] * len(completions)

    assert ask(serve(slow, timeout=0.3), PAYLOAD) == (200, {"rewards": [1.0] * 3})


def test_where_all_are_answered_others_come_back_later(serve):
    entered, go_on = threading.Event(), threading.Event()

    def slow(completions, **columns):
        entered.set()
        assert go_on.wait(timeout=30)
        return [1.0] * len(completions)

    server = serve(slow, max_connections=1)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, PAYLOAD)))
    asking.start()
    assert entered.wait(timeout=30)
    with pytest.raises(ConnectionError, match="status 503, .*Service Unavailable"):
        RemoteReward(server.url, retries=0)(["a"], ["b"])
    threading.Timer(0.3, go_on.set).start()
    assert RemoteReward(server.url, backoff=0.2)(["a"], ["b"]) == [1.0]
    asking.join(timeout=30)
    assert answers == [(200, {"rewards": [1.0] * 3})]


def test_requests_whose_clients_have_left_are_not_scored(serve):
    entered, go_on, scored = threading.Event(), threading.Event(), []

    def slow(completions, **columns):
        scored.append(completions)
        entered.set()
        assert go_on.wait(timeout=30)
        return [1.0] * len(completions)

    server = serve(slow)
    asking = threading.Thread(target=ask, args=(server, PAYLOAD))
    asking.start()
    assert entered.wait(timeout=30)
    for _ in range(3):
        with pytest.raises(ConnectionError, match="timed out"):
            RemoteReward(server.url, timeout=0.2, retries=0)(["a"], ["left"])
    go_on.set()
    asking.join(timeout=30)
    assert RemoteReward(server.url)(["a"], ["stays"]) == [1.0]
    assert scored == [COMPLETIONS, ["stays"]]


def chunks(size, count):
    return (b" " * size for _ in range(count))


def test_a_body_in_chunks_has_the_same_limit(serve):
    server = serve(max_request_bytes=10_000)
    connection = connect(server)
    connection.request("POST", "/get_reward", (part.encode() for part in json.dumps(PAYLOAD)), JSON)
    response = connection.getresponse()
    assert response.status == 200 and json.loads(response.read()) == {"rewards": EXPECTED}
    connection = connect(server)
    connection.request("POST", "/get_reward", chunks(1000, 2000), JSON)
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.status == 413
    assert answer == {"detail": "The request has more than the 10000 bytes allowed; send fewer texts."}


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


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "https://my.page.evil.example"]
)
def test_pages_of_the_web_are_refused(serve, origin):
    calls = []
    server = serve(lambda **columns: calls.append(columns), allow_origins=["https://my.page"])
    for headers, method, path in ((JSON, "POST", "/"), (JSON, "POST", "/get_reward"), ({}, "GET", "/health")):
        status, answer = ask(server, PAYLOAD if method == "POST" else None, method, path, headers | {"Origin": origin})
        assert status == 403 and "allow_origins" in answer["detail"] and not calls


def test_pages_that_are_allowed(serve):
    server, headers = serve(allow_origins=["https://my.page"]), JSON | {"Origin": "https://my.page"}
    assert ask(server, PAYLOAD, headers=headers)[0] == 200
    for origin, allowed in (("https://my.page", "https://my.page"), ("https://evil.example", None)):
        connection = connect(server)
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        connection.request("OPTIONS", "/get_reward", headers=asked | {"Origin": origin})
        assert connection.getresponse().headers["Access-Control-Allow-Origin"] == allowed
    with pytest.raises(ValueError, match="an origin is like 'https://host'"):
        serve(allow_origins=["my.page"])


def test_a_name_that_points_here_is_not_this_machines(standing):
    port = connect(standing).port
    for host in ("evil.example", f"evil.example:{port}", "[evil", "localhost.evil.example"):
        status, answer = ask(standing, PAYLOAD, headers=JSON | {"Host": host})
        assert status == 400 and "is reached as localhost alone" in answer["detail"]
    for host in (f"localhost:{port}", "LOCALHOST", f"[::1]:{port}"):
        assert ask(standing, PAYLOAD, headers=JSON | {"Host": host})[0] == 200


def test_an_address_that_ends_in_a_slash_is_not_redirected(standing):
    status, answer = ask(standing, PAYLOAD, path="/get_reward/")
    assert (status, answer) == (404, {"detail": "Not Found"})


def test_a_token(serve, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "geheim\n")
    monkeypatch.setenv("OTHER_TOKEN", "geheim2")
    server = serve(token_variable="REWARD_TOKEN")
    for given in (None, "geheim", "Bearer geheim2", "Bearer gehei", "Bearer ", "Bearer gehe\xefm", "Basic geheim"):
        status, answer = ask(server, PAYLOAD, headers=JSON | ({} if given is None else {"Authorization": given}))
        assert (status, answer) == (401, {"detail": "The request lacks the server's bearer token."})
    assert ask(server, PAYLOAD, headers=JSON | {"Authorization": "Bearer geheim"})[0] == 200
    assert ask(server, None, "GET", "/health")[0] == 200
    assert RemoteReward(server.url, token_variable="REWARD_TOKEN")(["a"], ["b"]) == [11.0]
    for reward in (RemoteReward(server.url), RemoteReward(server.url, token_variable="OTHER_TOKEN")):
        with pytest.raises(ValueError, match="refused a request: status 401"):
            reward(["a"], ["b"])
    monkeypatch.delenv("OTHER_TOKEN")
    with pytest.raises(ValueError, match="`token_variable='OTHER_TOKEN'` is no environment variable with a token"):
        RewardServer(lengths, port=0, token_variable="OTHER_TOKEN")


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr("trl_repulse.rewards.server.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "trl-repulse\[serve\]"'):
        RewardServer(lengths, port=0)
