"""What is secret of a reward server stays so, and connections to it: kept, bounded in time, one's own in each process."""

import base64
import contextlib
import json
import logging
import multiprocessing
import pickle
import socket
import threading
import time
import traceback
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from examples.worlds import two_tokens
from trl_repulse.cli.main import main
from trl_repulse.rewards import RemoteReward
from trl_repulse.rewards.loading import load_reward

from .test_rewards_remote import COMPLETIONS, LENGTHS, PROMPTS, good


USER, PASSWORD, KEY, TOKEN = "hidden-user", "hidden%2Fpass<word", "hidden&key", "hidden-token"
SECRETS = (USER, PASSWORD, "hidden/pass<word", "hidden/pass&lt;word", KEY, "hidden%26key", TOKEN)


def ask(reward):
    return reward(PROMPTS, COMPLETIONS)


class Server:
    """Answers over connections that stay open, and remembers them and the headers and paths it was asked with."""

    def __init__(self, behave):
        self.connections, self.requests = connections, requests = [], []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                connections.append(self.client_address)

            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                requests.append((self.path, dict(self.headers)))
                status, answer, *headers = behave(payload, self)
                self.send_response(status)
                for header in [("Content-Length", str(len(answer))), *headers]:
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.address = f"127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with contextlib.ExitStack() as servers:

        def start(behave=lambda payload, handler: (200, json.dumps(good(payload)).encode())):
            server = Server(behave)
            servers.callback(server.close)
            return server

        yield start


def everything(error):
    """All that a traceback could show of an error and of those it came from."""
    texts = ["".join(traceback.format_exception(error))]
    while error is not None:
        texts += [str(error), repr(error), repr(vars(error)), repr(error.args)]
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def echo(status):
    """An answer that repeats the request: its path, in two ways of writing, and its headers."""

    def behave(payload, handler):
        said = f"{handler.path} {handler.headers} {base64.b64decode((handler.headers['Authorization'] or 'a a').split()[1] + '==')}"
        return status, said.encode()

    return behave


@pytest.mark.parametrize("status", [200, 404, 307, 503])
def test_no_secret_in_errors_logs_and_texts(serve, caplog, monkeypatch, status):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    server = serve(echo(status))
    query = f"?key={KEY.replace('&', '%26')}"
    with_user = RemoteReward(f"http://{USER}:{PASSWORD}@{server.address}{query}", retries=1, backoff=0)
    with_token = RemoteReward(f"http://{server.address}{query}", retries=1, backoff=0, token_variable="REWARD_TOKEN")
    for reward in (with_user, with_token):
        with pytest.raises((ValueError, ConnectionError)) as caught:
            ask(reward)
        said = everything(caught.value) + repr(reward) + str(reward) + caplog.text
        assert server.address in said and "***" in said
        assert not [secret for secret in SECRETS if secret in said]
    (path, headers), (path_with_token, headers_with_token) = server.requests[0], server.requests[-1]
    assert path == path_with_token == "/get_reward" + query  # the control: they were sent
    user = base64.b64encode(f"{USER}:hidden/pass<word".encode()).decode()
    assert headers["Authorization"] == f"Basic {user}" and headers_with_token["Authorization"] == f"Bearer {TOKEN}"


def test_no_secret_where_nobody_answers(caplog):
    caplog.set_level(logging.DEBUG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        reward = RemoteReward(f"http://{USER}:pw@127.0.0.1:{free.getsockname()[1]}/?key={KEY}", retries=0)
    with pytest.raises(ConnectionError) as caught:
        ask(reward)
    said = everything(caught.value) + repr(reward) + caplog.text
    assert "127.0.0.1" in said and USER not in said and "hidden" not in said


NO_ADDRESSES = (
    *("http://hidden:hidden@host:port/", "http://hidden:hid/den@host", "http://u:hidden?x@a b/", "host?key=hidden"),
    *(
        "ftp://hidden@host",
        "http://host/ #hidden",
        "http://hidden@",
        "http://hidden:hidden@[::1",
        "http://a?b=@c hidden",
        "http://host/?\x01hidden",
    ),
)


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_no_secret_of_an_address_that_is_none(url):
    for make in (RemoteReward, partial(load_reward, "remote")):
        with pytest.raises(ValueError, match="`url` must be like 'http://host:port/path'") as caught:
            make(url)
        assert "hidden" not in everything(caught.value)


def test_an_address_that_is_given_for_a_model():
    for kind in (None, "chat"):
        with pytest.raises(ValueError, match="`reward_model_path` is the address of a server") as caught:
            load_reward(kind, NO_ADDRESSES[0])
        assert "hidden" not in everything(caught.value)


def test_a_token_is_kept_nowhere(serve, monkeypatch):
    server = serve()
    url = f"http://{server.address}"
    monkeypatch.setenv("REWARD_TOKEN", f" {TOKEN}\n")
    reward = RemoteReward(url, token_variable="REWARD_TOKEN")
    assert ask(reward) == LENGTHS and server.requests[0][1]["Authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in repr(vars(reward)) and TOKEN.encode() not in pickle.dumps(reward)
    for value in ("", "hidden\nheader: x", "hidden token", "hiddén"):
        monkeypatch.setenv("REWARD_TOKEN", value)
        for use in (lambda: RemoteReward(url, token_variable="REWARD_TOKEN"), lambda: ask(reward)):
            with pytest.raises(ValueError, match="REWARD_TOKEN") as caught:
                use()
            assert "hidd" not in everything(caught.value)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    with pytest.raises(ValueError, match="user info and `token_variable`"):
        RemoteReward(f"http://a:b@{server.address}", token_variable="REWARD_TOKEN")


@pytest.mark.parametrize("status", [301, 303, 307])
def test_redirects_are_not_followed(serve, caplog, status):
    """A server that redirects repeats the query in the address, which is a header of its answer."""
    caplog.set_level(logging.DEBUG)
    elsewhere = serve()
    server = serve(lambda payload, handler: (status, b"", ("Location", f"http://{elsewhere.address}?{KEY}")))
    with pytest.raises(ValueError, match=f"status {status}, ''; redirects are not followed") as caught:
        ask(RemoteReward(f"http://{server.address}"))
    assert not elsewhere.requests and len(server.requests) == 1
    assert KEY not in everything(caught.value) + caplog.text


def test_a_proxy_is_asked_for_the_whole_address(serve, monkeypatch):
    proxy = serve()
    monkeypatch.setenv("http_proxy", f"http://{proxy.address.partition('/')[0]}")
    assert ask(RemoteReward("http://reward.example/get_reward?key=a%26b")) == LENGTHS
    assert [path for path, _ in proxy.requests] == ["http://reward.example/get_reward?key=a%26b"]


def test_connections_are_kept(serve):
    server = serve()
    reward = RemoteReward(f"http://{server.address}", batch_size=1)
    for _ in range(3):
        assert ask(reward) == LENGTHS
    assert len(server.requests) == 15 and len(server.connections) == 1


def test_many_threads_may_ask(serve):
    server, results = serve(), []
    reward = RemoteReward(f"http://{server.address}", batch_size=2)

    def several():
        results.extend(ask(reward) for _ in range(5))

    threads = [threading.Thread(target=several) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [LENGTHS] * 40 and len(server.connections) <= 8


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_connections_of_its_own(serve):
    server = serve()
    reward = RemoteReward(f"http://{server.address}", retries=0, timeout=10)
    assert ask(reward) == LENGTHS
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=lambda: results.put([ask(reward) for _ in range(2)])) for _ in range(2)]
    for child in children:
        child.start()
    assert [results.get(timeout=30) for _ in children] == [[LENGTHS] * 2] * 2
    for child in children:
        child.join(timeout=30)
        assert child.exitcode == 0
    assert ask(reward) == LENGTHS and len(server.connections) == 3  # the parent's is still its own


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"])
def test_a_server_that_drips_holds_nobody_for_ever(head):
    listener, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def drip():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(head)
            while not stop.wait(0.05):
                connection.sendall(b"a")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    start = time.monotonic()
    threading.Timer(5, stop.set).start()  # so that the control ends as well
    with pytest.raises(ConnectionError, match="timed out"):
        ask(RemoteReward(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=0.5, retries=0))
    assert time.monotonic() - start < 3
    stop.set()
    thread.join(timeout=10)
    listener.close()


def test_an_endless_answer_is_no_answer(serve, monkeypatch):
    monkeypatch.setattr("trl_repulse.rewards.remote._MOST_BYTES", 1000)
    server = serve(lambda payload, handler: (200, b" " * 10_000_000))
    with pytest.raises(ValueError, match="which is not JSON"):
        ask(RemoteReward(f"http://{server.address}"))


def test_no_secret_in_the_file_of_suggest(serve, tmp_path, capsys, caplog):
    """The settings that it writes go on to be copied and committed."""
    query, file = "?key=hidden%26key", tmp_path / "repulse.yaml"
    servers = [serve(), serve()]
    urls = [f"http://{USER}:{PASSWORD}@{servers[0].address}{query}", f"http://{servers[1].address}"]
    arguments = ["suggest", "--model", two_tokens.policy_path(), "--prompts", two_tokens.prompts_path()]
    arguments += ["--num_samples", "50", "--max_completion_length", "2", "--output", str(file)]
    arguments += ["--reward_type", "remote"]
    assert main([*arguments, "--reward_model_path", ",".join(urls)]) == 0
    written, printed = file.read_text(), capsys.readouterr()
    said = written + printed.out + printed.err + caplog.text
    assert not [secret for secret in SECRETS if secret in said]
    assert all(f"--config {file} --reward_model_path ADDRESS" in text for text in (written, printed.out))
    shown = ",".join(f"http://{server.address}" for server in servers)
    assert yaml.safe_load(written)["reward_model_path"] == shown
    assert {path for path, _ in servers[0].requests} == {"/get_reward" + query}  # the control: they were sent
    assert main([*arguments, "--reward_model_path", urls[1]]) == 0  # without a secret the file trains as it is
    assert yaml.safe_load(file.read_text())["reward_model_path"] == urls[1] and "ADDRESS" not in file.read_text()
