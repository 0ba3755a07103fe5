"""
Kills an evaluation at ten moments and takes it up again each time: `python gcg_kill_run.py MODEL_FOLDER OUTPUT`.

The program is loaded once; every attempt is a fork of it that ends by SIGKILL, the last one excepted.
"""

import os
import signal
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.gcg_trigger import ROWS, evaluation_config, judge
from trl_repulse.evaluation.gcg import evaluate_gcg, evaluator
from trl_repulse.evaluation.gcg.results import ResultsFile, _as_line


# (what happens for the n-th time, n, share of the line that is on the disk)
MOMENTS = [
    ("write", 1, 0.0),
    ("write", 1, 0.5),
    ("write", 1, 1.0),
    ("judge", 1, None),
    ("write", 1, 0.01),
    ("forward", 30, None),
    ("write", 2, 0.99),
    ("judge", 2, None),
    ("write", 2, 1.0),
    ("write", 1, 0.3),
]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def attempt(model, tokenizer, output, moment):
    event, number, share = moment
    seen = dict.fromkeys(("write", "judge", "forward"), 0)

    def reached(name):
        seen[name] += 1
        return name == event and seen[name] == number

    def write(self, entry):
        if reached("write"):
            line = _as_line(entry)
            self._file.write(line[: round(share * len(line))])
            self._file.flush()
            die()
        whole_write(self, entry)

    def score(judge, goals, responses):
        if reached("judge"):
            die()
        return whole_score(judge, goals, responses)

    whole_write, ResultsFile.append = ResultsFile.append, write
    whole_score, evaluator._score = evaluator._score, score
    model.register_forward_pre_hook(lambda *_: die() if reached("forward") else None)
    evaluate_gcg(model, tokenizer, ROWS, judge, evaluation_config(), output)


def main(folder, output):
    torch.set_num_threads(1)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for moment in [*MOMENTS, ("none", 0, None)]:
        child = os.fork()
        if child == 0:
            attempt(model, tokenizer, output, moment)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        expected = signal.SIGKILL if moment[0] != "none" else 0
        if status != expected:
            sys.exit(f"{moment} ended with {status}")
    print("killed", len(MOMENTS))


if __name__ == "__main__":
    main(*sys.argv[1:])
