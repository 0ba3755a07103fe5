"""`trl-repulse serve-reward`: a reward behind HTTP."""

import argparse
import contextlib
import signal
import threading

from ._fields import add_reward


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reward(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is all (%(default)s)")
    parser.add_argument("--port", type=int, default=5000, help="port; 0 takes a free one (%(default)s)")
    parser.add_argument("--token_variable", help="environment variable with a bearer token that requests need")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, then answers the requests it has and returns 0."""
    from ..rewards import RewardServer, loading

    if args.reward_type is None:
        raise ValueError("`--reward_type` is needed; give a kind of reward, or `path/to/file.py:function`.")
    labels = {"label_column": "labels"} if ".py:" in args.reward_type else {}
    reward = loading.load_reward(args.reward_type, args.reward_model_path, **labels | args.reward_kwargs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = RewardServer(reward, args.host, args.port, args.token_variable)
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"Serving {server.name} at {server.url}; stop with Ctrl+C.", flush=True)
        threading.Event().wait()
    print("Stopped.", flush=True)
    return 0
