"""Inspect: the task and the metrics give what `trl-repulse evaluate` gives of the same completions."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet  # noqa: F401
import pytest

from trl_repulse import embedded
from trl_repulse.cli.main import main
from trl_repulse.evaluation import tails
from trl_repulse.evaluation.records import load_samples
from trl_repulse.evaluation.report import tail_report

from ..evaluation_support import write_samples


pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]
inspect_ai = pytest.importorskip("inspect_ai")
integration = pytest.importorskip("trl_repulse.evaluation.inspect")


@pytest.fixture(autouse=True)
def logging_is_left():
    """Inspect sets the level of the root logger, which would silence what later tests wait for."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


PLAIN = "{{ messages[0].content }}"


def scores_of(rewards):
    from inspect_ai.scorer import SampleScore, Score

    return [
        SampleScore(score=Score(value=float(value)), sample_id=prompt)
        for prompt, row in enumerate(rewards)
        for value in row
    ]


def test_metrics_are_those_of_the_tail_report():
    rewards = np.random.default_rng(0).normal(size=(6, 50))
    for made, name, expected in (
        (integration.prob_bad(-1.5), "prob_bad", tails.prob_below(rewards, -1.5)),
        (integration.cvar(0.5), "cvar", tails.cvar(rewards, 0.5)),
    ):
        found = made(scores_of(rewards))
        assert found == {name: expected.value, f"{name}_low": expected.low, f"{name}_high": expected.high}
    assert "cvar_low" not in integration.cvar(0.01)(scores_of(rewards))  # three samples in the tail bound nothing


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = Path(embedded.prompts_path("unseen")).read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
    return path


def evaluate(prompts, folder, policy=None, chat_template=PLAIN, limits=None, **options):
    settings = {"reward_model_path": str(embedded.reward_model_path()), "num_samples": 8, "max_completion_length": 8}
    made = integration.tail(str(prompts), threshold=0.0, **settings | options)
    model_args = {"model_path": str(policy or embedded.policy_path()), "device": "cpu"}
    model_args |= {} if chat_template is None else {"chat_template": chat_template}
    (log,) = inspect_ai.eval(
        *(made, "hf/policy"),
        **{"model_args": model_args, "log_dir": str(folder), "display": "none", "log_level": "error"} | (limits or {}),
    )
    return log


def test_a_log_holds_what_evaluate_reports(prompts, tmp_path, capsys):
    log = evaluate(prompts, tmp_path / "logs")
    assert log.status == "success"
    (path,) = (tmp_path / "logs").glob("*.eval")
    samples = load_samples(path)
    assert samples.num_samples == 8
    assert samples.prompts == [row["prompt"] for row in embedded.load_prompts("unseen").select(range(3))]
    assert len(set(samples.table["completion"].to_pylist())) > 12  # drawn, not the likeliest

    reward = integration.as_function(str(embedded.reward_model_path()), None, "cpu")[1]
    columns = {name: samples.table[name].to_pylist() for name in ("prompt", "completion")}
    again = reward(prompts=columns["prompt"], completions=columns["completion"])
    assert samples.column().ravel() == pytest.approx(again, abs=1e-4)

    (found,) = log.results.scores
    expected = tail_report(samples, thresholds=[0.0]).overall["P(r < 0)"]
    assert 0 < expected.value < 1
    assert found.metrics["prob_bad"].value == expected.value
    assert found.metrics["prob_bad_high"].value == expected.high

    assert main(["evaluate", str(path), "--thresholds", "0"]) == 0
    assert f"| P(r < 0) | {expected.value:.4g} |" in capsys.readouterr().out
    shutil.copy(path, tmp_path / "again.eval")
    assert main(["evaluate", str(path), str(tmp_path / "again.eval")]) == 1
    assert "are of the same model" in capsys.readouterr().err
    for each in log.samples:
        each.scores["other"] = inspect_ai.scorer.Score(value=1.0)
    inspect_ai.log.write_eval_log(log, str(tmp_path / "two.eval"))
    assert main(["evaluate", str(tmp_path / "two.eval"), "--column", "rewards/other"]) == 0
    assert "| mean | 1 |" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "two.eval")]) == 1
    assert "no column of numbers `reward`; it has prompt_index, sample_index, rewards/reward, rewards/other" in (
        capsys.readouterr().err
    )


def test_the_models_own_generation_defaults_have_no_effect(prompts, tmp_path):
    policy = shutil.copytree(embedded.policy_path(), tmp_path / "policy")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    model.generation_config.suppress_tokens = [token for token in range(model.config.vocab_size) if token != 20]
    model.save_pretrained(policy)
    log = evaluate(prompts, tmp_path / "logs", policy)
    assert log.status == "success"
    assert len({each.output.completion for each in log.samples}) > 12


def test_other_tokens_than_in_training_are_refused(prompts, tmp_path):
    log = evaluate(prompts, tmp_path / "logs", chat_template="user: {{ messages[0].content }}")
    assert log.status == "error" and "which is not what training gives it" in log.error.message
    (path,) = (tmp_path / "logs").glob("*.eval")
    with pytest.raises(ValueError, match="eval-retry"):
        load_samples(path)


def test_prompts_that_leave_no_room_are_refused(prompts, tmp_path):
    for number, options in enumerate(({"max_completion_length": 5000}, {})):
        log = evaluate(prompts, tmp_path / str(number), limits={} if options else {"max_tokens": 5000}, **options)
        assert log.status == "error" and "`max_completion_length=5000` exceed the model's context" in log.error.message


def test_failed_samples_of_a_log_are_named(prompts, tmp_path):
    """Also where the log is finished in spite of them, and where a scorer gives no number."""
    (tmp_path / "mine.py").write_text(
        "def judge(prompts, completions, **_):\n    return [None if prompts[0].startswith(FIRST) else 1.0]\n".replace(
            "FIRST", repr(embedded.load_prompts("unseen")["prompt"][0])
        )
    )
    options = {"reward_model_path": None, "reward_type": f"{tmp_path / 'mine.py'}:judge", "num_samples": 2}
    log = evaluate(prompts, tmp_path / "logs", limits={"fail_on_error": False}, **options)
    assert log.status == "success"
    (path,) = (tmp_path / "logs").glob("*.eval")
    with pytest.raises(
        ValueError, match="has 2 failed samples .sample 0, epoch 1: .*judge.* sample 0, epoch 2.*eval-retry"
    ):
        load_samples(path)
    log.samples = [each for each in log.samples if each.error is None]
    log.eval.config.epochs = 2
    log.samples[1].scores["reward"].value = "good"
    inspect_ai.log.write_eval_log(log, str(tmp_path / "text.eval"))
    with pytest.raises(ValueError, match="has no scorer that gives every sample a number"):
        load_samples(tmp_path / "text.eval")


def test_numbers_out_of_range_are_refused_before_anything_is_drawn(prompts):
    reward = str(embedded.reward_model_path())
    for options in ({"threshold": np.nan}, {"threshold": 0.0, "level": 2.0}):
        with pytest.raises(ValueError, match="`threshold` is NaN|`level=2.0`"):
            integration.tail(str(prompts), reward_model_path=reward, **options)


def test_what_is_no_log_is_refused(tmp_path):
    path = tmp_path / "a.eval"
    path.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read as a log of Inspect"):
        load_samples(path)


def test_logs_of_conversations_are_compared_by_what_was_drawn(tmp_path):
    """Inspect gives each message an id of its own; the settings of a task are in its plan."""
    from transformers import AutoTokenizer

    prompts = tmp_path / "chats.jsonl"
    rows = [[{"role": "user", "content": text}] for text in embedded.load_prompts("unseen")["prompt"][:2]]
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), encoding="utf-8")
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    sources = {"a": embedded.policy_path(), "b": embedded.policy_path(), "judge": embedded.reward_model_path()}
    models = {name: shutil.copytree(source, tmp_path / name) for name, source in sources.items()}
    for folder in models.values():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    samples = []
    for name in ("a", "b"):
        log = evaluate(prompts, tmp_path / f"logs-{name}", models[name], None, reward_model_path=str(models["judge"]))
        assert log.status == "success", log.error
        (path,) = (tmp_path / f"logs-{name}").glob("*.eval")
        samples.append(load_samples(path))
    assert samples[0].header["settings"]["max_tokens"] == 8
    assert tail_report(samples, thresholds=[0.0]).seeds == 2
    samples[1].header["settings"]["max_tokens"] = 9
    with pytest.raises(ValueError, match="another `settings.max_tokens`"):
        tail_report(samples)


def test_answers_are_shown_worst_first_and_side_by_side(tmp_path, capsys):
    """The log is read by Inspect: messages, rewards and log-probabilities; and is refused as samples."""
    rewards = np.array([[1.0, -3.0], [0.0, -9.0]])
    for name, shift in (("before", 0), ("after", 2)):
        write_samples(tmp_path / name, rewards + shift, name, completions=[f"{name} {i}" for i in range(4)])
    sets = {name: load_samples(tmp_path / name) for name in ("before", "after")}
    chat = [
        json.dumps([{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"{i}"}]) for i in "0011"
    ]
    for each in sets.values():
        columns = {"messages": pa.array(chat), "log_prob": pa.array([-1.0, -2.0, -3.0, float("-inf")])}
        object.__setattr__(
            each, "table", pa.table({name: each.table[name] for name in each.table.column_names} | columns)
        )
    integration.write_inspect_log(tmp_path / "log.eval", sets, threshold=-2.0)
    log = inspect_ai.log.read_eval_log(str(tmp_path / "log.eval"))
    assert [each.scores["before"].value for each in log.samples] == [-9.0, -3.0, 0.0, 1.0]
    assert [each.scores["after"].answer for each in log.samples] == ["after 3", "after 1", "after 2", "after 0"]
    worst = log.samples[0]
    said = ["Be kind.", "1", "before, reward -9:\n\nbefore 3", "after, reward -7:\n\nafter 3"]
    assert [each.content for each in worst.messages] == said and worst.output.completion == "before 3"
    assert [each.role for each in worst.messages] == ["system", "user", "assistant", "assistant"]
    assert worst.scores["after"].metadata["log_prob"] is None  # JSON has no infinity
    assert log.samples[1].scores["before"].metadata["log_prob"] == -2.0
    assert log.eval.viewer.trust_content is False  # the viewer renders nothing that a model wrote
    bad = {each.name: each.metrics["P(bad)"].value for each in log.results.scores}
    expected = tails.prob_below(rewards + 2, -2.0)
    assert bad == {"before": 0.5, "after": expected.value}
    assert log.results.scores[1].metrics["high"].value == expected.high

    integration.write_inspect_log(tmp_path / "return.eval", sets, threshold=-2.0, column="return")
    log = inspect_ai.log.read_eval_log(str(tmp_path / "return.eval"))
    assert [each.scores["before"].value for each in log.samples] == [-10.0, -4.0, -1.0, 0.0]
    assert log.results.scores[0].metrics["P(bad)"].value == tails.prob_below(rewards - 1, -2.0).value

    folders = [str(tmp_path / name) for name in ("before", "after")]
    for command, words in (("compare", folders), ("evaluate", folders[:1])):
        path = tmp_path / f"{command}.eval"
        assert main([command, *words, "--thresholds", "-2", "--inspect_log", str(path)]) == 0
        scores = inspect_ai.log.read_eval_log(str(path)).samples[0].scores
        assert {name: each.value for name, each in scores.items()} == dict(
            zip(("before", "after")[: len(words)], (-9.0, -7.0), strict=False)
        )
    assert main(["evaluate", folders[0], "--column", "return", "--inspect_log", str(path)]) == 0
    assert inspect_ai.log.read_eval_log(str(path)).samples[0].scores["before"].value == -10.0
    assert main(["evaluate", str(path), "--thresholds", "-2"]) == 1
    assert "was written for `inspect view`" in capsys.readouterr().err
    assert main(["evaluate", folders[0], "--inspect_log", str(tmp_path / "a.json")]) == 1
    assert "`--inspect_log" in (err := capsys.readouterr().err) and "end it with .eval" in err


def test_answers_of_samples_that_are_not_complete_are_to_the_same_prompts(tmp_path):
    """Of the prompts that all have."""
    for name, done in (("before", 4), ("after", 5)):
        completions = [f"{name} {i}" for i in range(36)]
        write_samples(tmp_path / name, np.zeros((6, 6)), name, shards=6, completions=completions)
        (tmp_path / name / "complete.json").unlink()
        for shard in sorted((tmp_path / name).glob("shard*"))[done:]:
            shard.unlink()
    path = tmp_path / "log.eval"
    flags = ["--thresholds", "0", "--partial", "--inspect_log", str(path)]
    assert main(["compare", *(str(tmp_path / name) for name in ("before", "after")), *flags]) == 0
    samples = inspect_ai.log.read_eval_log(str(path)).samples
    assert len(samples) == 24
    for each in samples:
        assert {f"prompt {int(score.answer.split()[1]) // 6}" for score in each.scores.values()} == {each.input}


def test_attacks_on_a_behaviour_are_side_by_side(tmp_path):
    """Also those that ask for it in several ways."""
    prompts = [f"{ask} {i}" for i in range(2) for ask in ("Please", "PLEASE", "plesae")]
    write_samples(tmp_path / "prompt", [[0.0, 1.0, 2.0], [3.0, 4.0, -5.0]], "a")
    write_samples(tmp_path / "augmented", [[-1.0], [-2.0], [9.0], [-7.0], [8.0], [7.0]], "a", prompts)
    sets = {name: load_samples(tmp_path / name) for name in ("prompt", "augmented")}
    integration.write_inspect_log(tmp_path / "log.eval", sets)
    samples = inspect_ai.log.read_eval_log(str(tmp_path / "log.eval")).samples
    assert [each.input for each in samples[:2]] == ["Please 1", "PLEASE 0"]  # as the worst answer was asked for
    assert [tuple(score.value for score in each.scores.values()) for each in samples[:2]] == [
        (-5.0, -7.0),
        (0.0, -2.0),
    ]


def test_a_runs_completions_are_shown(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path), "--inspect_log", str(tmp_path / "log.eval")]) == 2  # no run
    (tmp_path / "completions").mkdir()
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"log_history": [{"step": 1, "reward": 0.5, "loss": 0.1}]})
    )
    assert main(["diagnose", str(tmp_path), "--inspect_log", str(tmp_path / "log.eval")]) == 2
    assert "train with `log_completions=True`" in capsys.readouterr().err
    for step, rewards in ((1, [0.5, -1.0]), (2, [None, -3.0])):
        texts = {"prompt": ["hello", "bye"], "completion": [[{"role": "assistant", "content": f"{step}"}]] * 2}
        table = pa.table({"step": [step] * 2, **texts, "judge": rewards, "advantage": [0.0, 0.0]})
        pa.parquet.write_table(table, tmp_path / "completions" / f"completions_0000{step}.parquet")
    main(["diagnose", str(tmp_path), "--inspect_log", str(tmp_path / "log.eval")])
    log = inspect_ai.log.read_eval_log(str(tmp_path / "log.eval"))
    assert [(each.scores["policy"].value, each.output.completion) for each in log.samples] == [
        (-3.0, "2"),
        (-1.0, "1"),
        (0.5, "1"),
    ]
    assert log.samples[0].scores["policy"].metadata["step"] == 2
