"""Rewards from servers over a real socket: good, slow, failing and lying ones."""

import json
import pickle
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from trl.trainer.utils import get_callable_name

from trl_repulse.rewards import RemoteReward


PROMPTS = [f"the {i}" for i in range(5)]
COMPLETIONS = [" cat" * i for i in range(5)]
LENGTHS = [float(len(p + c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


def good(payload):
    return {"rewards": [len(query) for query in payload["query"]]}


class Server:
    """Answers requests with `behave(payload)`: what to send as JSON, bytes to send as they are, or (status, ...)."""

    def __init__(self, behave=good):
        self.payloads = payloads = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                payload = json.loads(body)
                payloads.append(payload)
                answer = behave(payload)
                status, answer = answer if isinstance(answer, tuple) else (200, answer)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client of a slow server has gone

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(behave=good):
        servers.append(Server(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def failing(times, status=503):
    """Fails the first requests."""
    count = iter(range(10**6))
    return lambda payload: (status, b"not now") if next(count) < times else good(payload)


def test_a_good_server(serve):
    server = serve()
    reward = RemoteReward(server.url)
    result = reward(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=None, trainer_state=None)
    assert result == LENGTHS and all(type(value) is float for value in result)
    queries = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert server.payloads == [{"query": queries, "prompts": PROMPTS, "labels": [""] * 5}]


def test_batches_and_labels(serve):
    server = serve()
    result = RemoteReward(server.url, batch_size=2, label_column="answer")(PROMPTS, COMPLETIONS, answer=list("abcde"))
    assert result == LENGTHS
    assert [payload["labels"] for payload in server.payloads] == [["a", "b"], ["c", "d"], ["e"]]
    assert all(set(payload) == {"query", "prompts", "labels"} for payload in server.payloads)
    with pytest.raises(ValueError, match="has no column `answer` of labels"):
        RemoteReward(server.url, label_column="answer")(PROMPTS, COMPLETIONS)


def test_conversations_are_sent_as_messages(serve):
    server = serve()
    prompt, completion = [{"role": "user", "content": "the"}], [{"role": "assistant", "content": "cat"}]
    assert RemoteReward(server.url)([prompt], [completion]) == [2.0]
    assert server.payloads[0]["query"] == [prompt + completion] and server.payloads[0]["prompts"] == [prompt]


def test_nothing_to_score(serve):
    server = serve()
    assert RemoteReward(server.url)([], []) == [] == server.payloads


def test_servers_take_turns_also_between_calls_and_work_at_once(serve):
    together = threading.Barrier(2)

    def behave(payload):
        if "wait" in payload["labels"]:
            together.wait(timeout=30)  # breaks, and the request fails, if one server works alone
        return good(payload)

    servers = [serve(behave), serve(behave)]
    reward = RemoteReward([server.url for server in servers], batch_size=1, retries=0, label_column="label")
    assert reward(PROMPTS[:4], COMPLETIONS[:4], label=["wait"] * 4) == LENGTHS[:4]
    assert [len(server.payloads) for server in servers] == [2, 2]
    for _ in range(3):
        reward(PROMPTS[:1], COMPLETIONS[:1], label=[""])
    assert [len(server.payloads) for server in servers] == [4, 3]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_failing_server_is_asked_again_after_ever_longer_waits(serve, monkeypatch, status):
    waits = []
    monkeypatch.setattr("trl_repulse.rewards.remote.time.sleep", waits.append)
    server = serve(failing(3, status))
    assert RemoteReward(server.url, backoff=0.5)(PROMPTS, COMPLETIONS) == LENGTHS
    assert waits == [0.5, 1.0, 2.0] and len(server.payloads) == 4


def test_a_server_that_always_fails_is_named(serve):
    server = serve(failing(10**6))
    with pytest.raises(ConnectionError, match=rf"^3 requests .*{server.url} \(status 503, 'not now'\)\. See whether"):
        RemoteReward(server.url, retries=2, backoff=0.01)(PROMPTS, COMPLETIONS)
    assert len(server.payloads) == 3


def test_the_next_server_stands_in(serve):
    bad, other = serve(failing(10**6)), serve()
    reward = RemoteReward([bad.url, other.url], retries=1, backoff=0.01, batch_size=2)
    assert reward(PROMPTS, COMPLETIONS) == LENGTHS
    assert len(bad.payloads) == 2 and len(other.payloads) == 3
    with pytest.raises(ConnectionError, match=rf"{bad.url} \(.*\); {bad.url}/2 \("):
        RemoteReward([bad.url, bad.url + "/2"], retries=1, backoff=0.01)(PROMPTS, COMPLETIONS)


def test_an_answer_that_breaks_off_behind_its_status_is_asked_for_again():
    listener = socket.create_server(("127.0.0.1", 0))
    asked = []

    def reset():
        for _ in range(2):
            connection, _ = listener.accept()
            asked.append(connection.recv(65536))
            connection.sendall(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nno")
            connection.close()

    threading.Thread(target=reset, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    with pytest.raises(ConnectionError, match=rf"^2 requests .*{url} \(status 503, 'broken off \(\w+\)'\)"):
        RemoteReward(url, retries=1, backoff=0.01)(PROMPTS, COMPLETIONS)
    listener.close()
    assert len(asked) == 2


def test_a_refusal_is_not_repeated(serve):
    server = serve(lambda payload: (404, b"no such path"))
    with pytest.raises(ValueError, match=rf"{server.url} refused a request: status 404, 'no such path'"):
        RemoteReward(server.url)(PROMPTS, COMPLETIONS)
    assert len(server.payloads) == 1


def test_a_slow_server(serve):
    done = threading.Event()

    def behave(payload):
        if len(server.payloads) == 1:
            done.wait(timeout=30)
        return good(payload)

    server = serve(behave)
    try:
        assert RemoteReward(server.url, timeout=0.5, backoff=0.01)(PROMPTS, COMPLETIONS) == LENGTHS
        assert len(server.payloads) == 2
        server.payloads.clear()
        with pytest.raises(ConnectionError, match=rf"^1 requests .*{server.url} \(timed out\)"):
            RemoteReward(server.url, timeout=0.2, retries=0)(PROMPTS, COMPLETIONS)
    finally:
        done.set()


def test_no_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with pytest.raises(ConnectionError, match=rf"{url} \(.*refused\)"):
        RemoteReward(url, retries=1, backoff=0.01)(PROMPTS, COMPLETIONS)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"rewards": [1.0] * 4}, "answered 4 rewards for 5 completions"),
        ({"rewards": ["1.0"] * 5}, "answered '1.0' for completion 0 of 5; a reward must be a finite number"),
        (b'{"rewards": [1, NaN, 1, 1, 1]}', "answered nan for completion 1 of 5"),
        (b'{"rewards": [1, 1, Infinity, 1, 1]}', "answered inf for completion 2 of 5"),
        (b'{"rewards": [1, 1, 1, 1e39, 1]}', r"answered 1e\+39 for completion 3"),
        ({"rewards": [10**400] * 5}, "answered 1000"),
        ({"rewards": [None] * 5}, "answered None for completion 0"),
        ({"rewards": [True] * 5}, "answered True for completion 0"),
        ({"rewards": [[1.0]] * 5}, r"answered \[1.0\] for completion 0"),
        ({"rewards": 1.0}, r'instead of \{"rewards": \[...\]\}'),
        ({"scores": [1.0] * 5}, r'instead of \{"rewards": \[...\]\}'),
        ([1.0] * 5, r'instead of \{"rewards": \[...\]\}'),
        (b"<html>", "answered '<html>', which is not JSON"),
        (b"\xff\xfe\x00", "which is not JSON"),
        (b"[" * 100_000, "which is not JSON"),
    ],
)
def test_a_lying_server_is_named_and_not_asked_again(serve, answer, message):
    server = serve(lambda payload: answer)
    with pytest.raises(ValueError, match=rf"^The reward server {server.url} .*{message}"):
        RemoteReward(server.url)(PROMPTS, COMPLETIONS)
    assert len(server.payloads) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": []}, "`url` is empty"),
        ({"url": "localhost:5000"}, "must be like 'http://host:port/path', got 'localhost:5000'"),
        ({"url": ["http://a/", "file:///etc/hosts"]}, "got 'file:///etc/hosts'"),
        ({"url": "http://a:5000x/"}, "must be like 'http://host:port/path', got 'http://a:5000x/'"),
        ({"url": "http://a:99999/"}, "got 'http://a:99999/'"),
        ({"url": "http://a b/"}, "got 'http://a b/'"),
        ({"url": "http://a/größe"}, "got 'http://a/größe'"),
        ({"url": "http://[::1/"}, r"got 'http://\[::1/'"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"retries": -1}, "`retries` must be at least 0, got -1"),
        ({"backoff": -0.5}, "`backoff` must be at least 0"),
        ({"timeout": 0}, "`timeout` must be positive"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RemoteReward(**{"url": "http://a/"} | options)


def test_pickling_and_name(serve):
    server = serve()
    reward = pickle.loads(pickle.dumps(RemoteReward([server.url], batch_size=3, name="judge")))
    assert reward(PROMPTS, COMPLETIONS) == LENGTHS
    assert get_callable_name(reward) == "judge" and get_callable_name(RemoteReward("http://a/")) == "RemoteReward"
