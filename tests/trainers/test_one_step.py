"""A default training step is short: the files of the package that it meets, the calls from file to file, the collective calls."""

import ast
import inspect
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import trl_repulse
from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.embedded import load_prompts, policy_path, reward_model_path


PACKAGE = str(Path(trl_repulse.__file__).parent)
ROOT = Path(__file__).parents[2]


class Trace(TrainerCallback):
    """Records the third update: calls between files of the package, each once, and collective calls that the package makes."""

    def __init__(self):
        self.files, self.crossings, self.collectives = set(), set(), []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            sys.setprofile(self.note)

    def on_step_end(self, args, state, control, **kwargs):
        sys.setprofile(None)

    def note(self, frame, event, argument):
        if event != "call":
            return
        caller, name = frame.f_back, frame.f_code.co_name
        if (
            name in ("gather", "reduce", "gather_object", "pad_across_processes")
            and "accelerate" in frame.f_code.co_filename
        ):
            if caller.f_code.co_filename.startswith(PACKAGE):
                self.collectives.append(f"{caller.f_code.co_qualname}: {name}")
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = frame.f_code.co_filename.removeprefix(PACKAGE)[1:]
        self.files.add(file)
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        before = "TRL" if caller is None else caller.f_code.co_filename.removeprefix(PACKAGE)[1:]
        if before != file:
            place = None if caller is None else (caller.f_code.co_qualname, caller.f_lineno)
            self.crossings.add((before, place, file, frame.f_code.co_qualname))


@pytest.mark.trainer
def test_a_step_is_short(tmp_path):
    """Of the README's world: 48 completions, 4 of a prompt, and as many hot ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    args = RePULSeConfig(
        str(tmp_path),
        bad_reward_threshold=-5.0,
        max_completion_length=24,
        num_generations=4,
        per_device_train_batch_size=48,
        max_steps=3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trace = Trace()
    trainer = RePULSeTrainer(policy_path(), reward_model_path(), args, train_dataset=load_prompts(), callbacks=[trace])
    trainer.train()
    torch.set_num_threads(threads)
    assert len(trace.files) <= FILES, sorted(trace.files)
    assert len(trace.crossings) <= CROSSINGS, sorted(map(str, trace.crossings))
    assert len(trace.collectives) <= COLLECTIVES, trace.collectives


FILES, CROSSINGS, COLLECTIVES = 12, 150, 8


def test_the_step_reads_as_algorithm_1():
    """Five verbs in at most 20 lines, which the page on the design shows."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for name in ("_generate_and_score_completions", "_compute_loss"):
        source = textwrap.dedent(inspect.getsource(vars(RePULSeTrainer)[name]))
        assert source.strip() in page, f"docs/design.md shows another `{name}`"
        assert len(source.splitlines()) <= 20
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(RePULSeTrainer._compute_loss))).body
    called = [
        node.func.attr for node in ast.walk(function) if isinstance(node, ast.Call) and hasattr(node.func, "attr")
    ]
    assert {"score", "_weigh", "_loss", "learn"} <= set(called)
