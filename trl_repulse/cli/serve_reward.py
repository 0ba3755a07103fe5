"""`trl-repulse serve-reward`: a reward behind HTTP."""

import argparse
import logging
import signal
import threading
from typing import Any

from ..rewards.server import RewardServer, check_installed
from ._fields import add_reward


# Arguments of the server
_SERVER = (
    *("host", "port", "max_batch_size", "max_request_bytes", "timeout", "max_connections"),
    *("allow_origins", "token_variable"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_reward(parser.add_argument_group("reward"))
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is all of them (%(default)s)"
    )
    group.add_argument("--port", type=int, default=5000, help="port; 0 takes a free one (%(default)s)")
    limit = {"type": int, "metavar": "N"}
    group.add_argument("--max_batch_size", default=1024, help="most completions of a request (%(default)s)", **limit)
    group.add_argument("--max_request_bytes", default=2**24, help="most bytes of a request (%(default)s)", **limit)
    group.add_argument("--max_connections", default=64, help="most connections at a time (%(default)s)", **limit)
    group.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="that an idle connection is kept (%(default)s)"
    )
    group.add_argument(
        "--allow_origin",
        dest="allow_origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="pages that a browser may send requests from, e.g. https://my.page (none)",
    )
    group.add_argument(
        "--token_variable", metavar="NAME", help="environment variable with a bearer token that requests must have"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, then answers the requests it has and returns 0."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    check_installed()
    if args.reward_type is None:
        raise ValueError("`--reward_type` is needed; give a kind of reward, or `path/to/file.py:function`.")
    from ..rewards.loading import load_reward

    labels = {"label_column": "labels"} if ".py:" in args.reward_type else {}
    reward = load_reward(args.reward_type, args.reward_model_path, **labels, **args.reward_kwargs)
    server = RewardServer(reward, **{name: getattr(args, name) for name in _SERVER})
    stop = threading.Event()

    def end(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # the second one does not wait for answers

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with server:
        print(f"Serving {server.name} at {server.url}; stop with Ctrl+C.", flush=True)
        while not stop.wait(1):  # wakes now and then: a plain wait hears no signal on Windows
            pass
    print("Stopped.", flush=True)
    return 0
