"""`trl-repulse serve-reward`: one of the reward classes, or a function from a file, behind HTTP."""

import argparse
import logging
import signal
import sys
import threading
from typing import Any

from .. import rewards
from ..rewards.server import RewardServer, check_installed
from ._fields import parse_boolean, parse_object


Options = dict[str, dict[str, Any]]


def _label(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


def _switch(text: str) -> dict[str, Any]:
    return {"type": parse_boolean, "nargs": "?", "const": True, "metavar": "true|false", "help": text}


# Options are the arguments of the reward classes, by their names; those not given keep the class's default
_MODEL: Options = {
    "batch_size": {"type": int, "help": "texts of one forward pass (16)"},
    "dtype": {"help": "precision of the weights, e.g. bfloat16 (that of the checkpoint)"},
    "device": {"help": "where the model runs (the accelerator if there is one)"},
    "trust_remote_code": _switch("run Python code that comes with the model"),
    "revision": {"help": "branch, tag or commit on the Hub"},
    "name": {"help": "name of the reward (the last part of MODEL)"},
}
_CLASSIFIER: Options = {"label": {"type": _label, "help": "label whose logit is the reward, a number or a name"}}
_CHAT: Options = {
    "chat_template_kwargs": {
        "type": parse_object,
        "metavar": "JSON",
        "help": "further variables of the chat template",
    },
    "drop_system": _switch("leave out system messages"),
}
_CUT: Options = {"max_length": {"type": int, "help": "tokens of a text; longer ones are cut"}}
# Kind -> class, what it reads, options
KINDS: dict[str, tuple[str, str, Options]] = {
    "pair": (
        "SequencePairReward",
        "sequence classifier of a question and its answer",
        {
            **_CLASSIFIER,
            **_CUT,
            "question": {"choices": ("last", "conversation"), "help": "what is the question in a conversation (last)"},
        },
    ),
    "chat": ("ChatReward", "sequence classifier with a chat template", {**_CLASSIFIER, **_CHAT}),
    "guard": (
        "GuardReward",
        'language model that answers "safe" or "unsafe"',
        {
            **_CHAT,
            "safe": {"help": "the verdict on good texts (safe)"},
            "unsafe": {"help": "the verdict on bad texts (unsafe)"},
            "leads": {"nargs": "+", "help": "white space that may come before the verdict"},
        },
    ),
    "toxicity": (
        "ToxicityReward",
        "sequence classifier of a whole text",
        {
            **_CLASSIFIER,
            **_CUT,
            "output": {"choices": ("logit", "log_odds"), "help": "what the reward is (logit)"},
            "negate": _switch("change the sign, for a label that says what is bad"),
            "include_prompt": _switch("whether the text begins with the prompt (true)"),
        },
    ),
}

# Arguments of the server
_SERVER = (
    *("host", "port", "max_batch_size", "max_request_bytes", "timeout", "max_connections"),
    *("allow_origins", "token_variable"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a sub-command for each kind of reward, with the arguments of its class and of the server."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, (cls, summary, options) in KINDS.items():
        subparser = kinds.add_parser(kind, help=summary, description=f"Serve `{cls}`: a {summary}.")
        subparser.add_argument("model", metavar="MODEL", help="path or Hub id of the model and its tokenizer")
        group = subparser.add_argument_group("reward")
        for name, settings in (options | _MODEL).items():
            group.add_argument(f"--{name}", default=argparse.SUPPRESS, **settings)
        _add_server_arguments(subparser)
    summary = "function in a Python file"
    subparser = kinds.add_parser("function", help=summary, description=f"Serve a {summary}, which is run.")
    subparser.add_argument("function", metavar="FILE:FUNCTION", help="e.g. my_rewards.py:short_answers")
    _add_server_arguments(subparser)
    parser.set_defaults(run=run)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; then answers the requests it has and returns 0, or 1 if it cannot serve."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        check_installed()
        if args.kind == "function":
            reward = rewards.load_reward_function(args.function, label_column="labels")
        else:
            cls, _, options = KINDS[args.kind]
            given = {name: value for name, value in vars(args).items() if name in options | _MODEL}
            reward = getattr(rewards, cls)(args.model, **given)
        server = RewardServer(reward, **{name: getattr(args, name) for name in _SERVER})
    except (ValueError, OSError, OverflowError, ImportError) as error:
        print(f"trl-repulse serve-reward: {error}", file=sys.stderr)
        return 1
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
