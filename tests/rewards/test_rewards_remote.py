"""Rewards from servers over a real socket: good, slow, failing and lying ones; a token stays secret."""

import contextlib
import json
import logging
import socket
import threading
import traceback
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trl_repulse.rewards import RemoteReward
from trl_repulse.rewards.loading import load_reward


PROMPTS = [f"the {i}" for i in range(5)]
COMPLETIONS = [" cat" * i for i in range(5)]
LENGTHS = [float(len(p + c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


def good(payload):
    return {"rewards": [len(query) for query in payload["query"]]}


class Server:
    """Answers requests with `behave(payload, handler)`: what to send as JSON, bytes to send as they are, or (status, one of both,
    *headers). Remembers connections, and the payload, path and headers of each request."""

    def __init__(self, behave=lambda payload, handler: good(payload)):
        self.connections, self.requests, self.payloads = connections, requests, payloads = [], [], []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                connections.append(self.client_address)

            def do_POST(self):
                assert self.headers["Content-Type"] == "application/json"
                payloads.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                requests.append((self.path, dict(self.headers)))
                answer = behave(payloads[-1], self)
                status, answer, *headers = answer if isinstance(answer, tuple) else (200, answer)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with contextlib.suppress(OSError):  # the client of a slow server has gone
                    self.send_response(status)
                    for header in [("Content-Length", str(len(data))), *headers]:
                        self.send_header(*header)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.address = f"127.0.0.1:{self.server.server_port}/get_reward"
        self.url = f"http://{self.address}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with contextlib.ExitStack() as servers:

        def start(*behave):
            server = Server(*behave)
            servers.callback(server.close)
            return server

        yield start


def failing(times, status=503):
    """Fails the first requests."""
    count = iter(range(10**6))
    return lambda payload, _: (status, b"not now") if next(count) < times else good(payload)


def test_a_good_server(serve):
    server = serve()
    reward = RemoteReward(server.url)
    result = reward(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=None, trainer_state=None)
    assert result == LENGTHS and all(type(value) is float for value in result)
    queries = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert server.payloads == [{"query": queries, "prompts": PROMPTS, "labels": [""] * 5}]
    prompt, completion = [{"role": "user", "content": "the"}], [{"role": "assistant", "content": "cat"}]
    assert reward([prompt], [completion]) == [2.0] and reward([], []) == []
    assert server.payloads[1:] == [{"query": [prompt + completion], "prompts": [prompt], "labels": [""]}]


def test_batches_and_labels(serve):
    server = serve()
    result = RemoteReward(server.url, batch_size=2, label_column="answer")(PROMPTS, COMPLETIONS, answer=list("abcde"))
    assert result == LENGTHS
    assert [payload["labels"] for payload in server.payloads] == [["a", "b"], ["c", "d"], ["e"]]
    assert all(set(payload) == {"query", "prompts", "labels"} for payload in server.payloads)
    with pytest.raises(ValueError, match="has no column `answer` of labels"):
        RemoteReward(server.url, label_column="answer")(PROMPTS, COMPLETIONS)


def test_servers_take_turns_also_between_calls_and_work_at_once(serve):
    together = threading.Barrier(2)

    def behave(payload, handler):
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


def test_the_next_server_stands_in(serve):
    bad, other = serve(failing(10**6)), serve()
    reward = RemoteReward([bad.url, other.url], retries=1, backoff=0.01, batch_size=2)
    assert reward(PROMPTS, COMPLETIONS) == LENGTHS
    assert len(bad.payloads) == 2 and len(other.payloads) == 3
    bad.payloads.clear()
    message = rf"^2 requests .*{bad.url} \(status 503, 'not now'\); {bad.url}/2 \(.*\)\. See whether"
    with pytest.raises(ConnectionError, match=message):
        RemoteReward([bad.url, bad.url + "/2"], retries=1, backoff=0.01)(PROMPTS, COMPLETIONS)
    assert len(bad.payloads) == 2


def test_an_answer_that_breaks_off_behind_its_status_is_asked_for_again():
    listener = socket.create_server(("127.0.0.1", 0))
    asked = []

    def reset():
        for _ in range(2):
            connection, _ = listener.accept()
            asked.append(b"")
            while not asked[-1].endswith(b"}"):  # what is left unread would reset the connection
                asked[-1] += connection.recv(65536)
            connection.sendall(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nno")
            connection.close()

    threading.Thread(target=reset, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    with pytest.raises(ConnectionError, match=rf"^2 requests .*{url} \(peer closed connection"):
        RemoteReward(url, retries=1, backoff=0.01)(PROMPTS, COMPLETIONS)
    listener.close()
    assert len(asked) == 2


def test_a_slow_server(serve):
    done = threading.Event()

    def behave(payload, handler):
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


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"rewards": [1.0] * 4}, "returned 4 rewards for 5 completions"),
        ({"rewards": ["1.0"] * 5}, "returned .*1.0.* for completion 0 of 5; return a finite number"),
        (b'{"rewards": [1, NaN, 1, 1, 1]}', "returned nan for completion 1 of 5"),
        (b'{"rewards": [1, 1, Infinity, 1, 1]}', "returned inf for completion 2 of 5"),
        (b'{"rewards": [1, 1, 1, 1e39, 1]}', r"returned 1e\+39 for completion 3"),
        ({"rewards": [10**400] * 5}, "returned 1000"),
        ({"rewards": [True] * 5}, "returned .*True.* for completion 0"),
        ({"rewards": [[1.0]] * 5}, r"returned .*\[1.0\].* for completion 0"),
        ({"rewards": 1.0}, r'instead of \{"rewards": \[...\]\}'),
        ([1.0] * 5, r'instead of \{"rewards": \[...\]\}'),
        (b"<html>", "answered '<html>', which is not JSON"),
        (b"\xff\xfe\x00", "which is not JSON"),
        (b"[" * 100_000, "which is not JSON"),
    ],
)
def test_a_lying_server_is_named_and_not_asked_again(serve, answer, message):
    server = serve(lambda payload, _: answer)
    with pytest.raises(ValueError, match=rf"^The reward server {server.url} .*{message}"):
        RemoteReward(server.url)(PROMPTS, COMPLETIONS)
    assert len(server.payloads) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": []}, "`url` is empty"),
        ({"url": "localhost:5000"}, "must be like 'http://host:port/path', got 'localhost:5000'"),
        ({"url": ["http://a/", "file:///etc/hosts"]}, "got 'file:///etc/hosts'"),
        ({"url": "http://a:99999/"}, "got 'http://a:99999/'"),
        ({"url": "http://a/größe"}, "got 'http://a/größe'"),
        ({"url": "http://[::1/"}, r"got 'http://\[::1/'"),
        ({"batch_size": 0}, "`batch_size=0` must be at least 1"),
        ({"retries": -1}, "`retries=-1` must be at least 0"),
        ({"backoff": -0.5}, "`backoff=-0.5` must be at least 0"),
        ({"timeout": 0}, "`timeout` must be positive"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RemoteReward(**{"url": "http://a/"} | options)


# Secrets, and connections


TOKEN = "hidden-token"


def ask(reward):
    return reward(PROMPTS, COMPLETIONS)


def everything(error):
    """All that a traceback could show of an error and of those it came from."""
    texts = ["".join(traceback.format_exception(error))]
    while error is not None:
        texts += [str(error), repr(error), repr(vars(error)), repr(error.args)]
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


@pytest.mark.parametrize("status", [200, 404, 307, 503])
@pytest.mark.parametrize("said", ["{}", '{{"rewards": ["{}", 1, 1, 1, 1]}}'])
def test_no_token_in_errors_logs_and_texts(serve, caplog, monkeypatch, status, said):
    """Of a server that repeats the header of the request."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    server = serve(lambda payload, handler: (status, said.format(handler.headers["Authorization"]).encode()))
    reward = RemoteReward(server.url, retries=1, backoff=0, token_variable="REWARD_TOKEN")
    with pytest.raises((ValueError, ConnectionError)) as caught:
        ask(reward)
    texts = everything(caught.value) + repr(reward) + str(reward) + caplog.text
    assert server.address in texts and "***" in texts and TOKEN not in texts
    assert server.requests[0][1]["Authorization"] == f"Bearer {TOKEN}"  # the control: it was sent


def test_nobody_answers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        reward = RemoteReward(f"http://127.0.0.1:{free.getsockname()[1]}/", retries=1, backoff=0)
    with pytest.raises(ConnectionError, match=r"127.0.0.1:\d+/ \(.*refused\)"):
        ask(reward)


WITH_KEYS = ("http://hidden:hidden@host:port/", "http://u:hidden?x@a b/", "host?key=hidden", "http://host/ #hidden")


@pytest.mark.parametrize("url", WITH_KEYS)
def test_an_address_that_may_hold_a_key_is_refused_and_not_shown(url):
    for make in (RemoteReward, partial(load_reward, "remote")):
        with pytest.raises(ValueError, match="`url` has a user, a query or a fragment.*`token_variable`") as caught:
            make(url)
        assert "hidden" not in everything(caught.value)


def test_an_address_that_is_given_for_a_model():
    for kind in (None, "chat"):
        with pytest.raises(ValueError, match="`reward_model_path` is the address of a server") as caught:
            load_reward(kind, WITH_KEYS[0])
        assert "hidden" not in everything(caught.value)


def test_a_token_is_kept_nowhere(serve, monkeypatch):
    server = serve()
    url = server.url
    monkeypatch.setenv("REWARD_TOKEN", f" {TOKEN}\n")
    reward = RemoteReward(url, token_variable="REWARD_TOKEN")
    assert ask(reward) == LENGTHS and server.requests[0][1]["Authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in repr(vars(reward))
    for value in ("", "hidden\nheader: x", "hidden token", "hiddén"):
        monkeypatch.setenv("REWARD_TOKEN", value)
        for use in (lambda: RemoteReward(url, token_variable="REWARD_TOKEN"), lambda: ask(reward)):
            with pytest.raises(ValueError, match="REWARD_TOKEN") as caught:
                use()
            assert "hidd" not in everything(caught.value)


@pytest.mark.parametrize("status", [301, 307, 404])
def test_refusals_are_not_repeated_and_redirects_not_followed(serve, status):
    elsewhere = serve()
    server = serve(lambda payload, handler: (status, b"", ("Location", elsewhere.url)))
    message = f"{server.url} refused a request: status {status}, ''" + "; redirects are not followed" * (status < 400)
    with pytest.raises(ValueError, match=message):
        ask(RemoteReward(server.url))
    assert not elsewhere.requests and len(server.requests) == 1


def test_the_requests_of_a_call_share_a_connection(serve):
    server = serve()
    assert ask(RemoteReward(server.url, batch_size=1)) == LENGTHS
    assert len(server.requests) == 5 and len(server.connections) == 1
