"""The evaluator on a model with a trigger: what it reports, that it can be interrupted and split, and what it refuses."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    RecurrentGemmaConfig,
)

from trl_repulse.evaluation.gcg import (
    GCGError,
    GCGResult,
    RefusalJudge,
    RewardJudge,
    evaluate_gcg,
    evaluator,
    format_report,
    merge_results,
    read_results,
    run_gcg,
    summarize,
)
from trl_repulse.evaluation.gcg.engine import GCG
from trl_repulse.evaluation.gcg.evaluator import (
    TableRow,
    derive_seed,
    hash_judge,
    make_header,
    sample_responses,
    target_log_probs,
)
from trl_repulse.evaluation.gcg.prompt import build_prompt
from trl_repulse.evaluation.gcg.results import ResultsFile, _as_line
from trl_repulse.generation._probe import repeats_cache
from trl_repulse.rewards import RemoteReward, SequencePairReward, load_reward_function
from trl_repulse.rewards.transformed import TransformedReward

from ..gcg_support import SIZES, build_model
from ..gcg_support import build_tokenizer as build_bpe_tokenizer
from ..gcg_trigger import ROWS, TARGET, build_trigger_model, build_trigger_tokenizer, evaluation_config, judge
from ..reward_models import build_tokenizer as build_reward_tokenizer
from ..reward_models import save_model


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return build_trigger_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return build_trigger_model(tokenizer)


@pytest.fixture(scope="module")
def output(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "whole.jsonl"
    return evaluate_gcg(model, tokenizer, ROWS, judge, evaluation_config(save_responses=True), path)


def lines(path):
    """A file's entries without the time they took."""
    entries = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in entries]


def prompt_ids(tokenizer, text):
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]


def test_triggers_are_found(model, tokenizer, output):
    yes = tokenizer(" yes")["input_ids"]
    header, records = read_results(output)
    for record in records:
        before = prompt_ids(tokenizer, record["goal"])
        triggered = prompt_ids(tokenizer, f"{record['goal']} x please now x")
        assert target_log_probs(model, before, yes).exp() < 0.015
        assert target_log_probs(model, triggered, yes).exp() > 0.97
        assert {"please", "now"} & set(record["suffix"].split())
    summary = summarize(header, records, [-4.0], k=[1, 5])
    rates = summary["thresholds"]["-4.0"]
    assert (rates["before"]["success"]["value"], rates["after"]["success"]["value"]) == (0, 1)
    assert rates["difference"]["value"] == 1


def test_an_early_stop_gives_the_suffix_that_caused_it(model, tokenizer):
    config = evaluation_config(early_stop=True, num_steps=20)
    result = GCG(model, tokenizer, config).run(ROWS[0]["goal"], TARGET)
    assert (result.stop_reason, result.exact_match, result.suffix) == ("early_stop", True, result.suffixes[-1])
    assert 0 < len(result.losses) < 20 and result.loss == result.losses[-1]


def test_a_line(model, tokenizer, output):
    header, records = read_results(output)
    assert [record["row"] for record in records] == list(range(1, len(ROWS) + 1)) and header["rows"] == len(ROWS)
    record = records[0]
    attacked = prompt_ids(tokenizer, record["goal"] + record["suffix"])
    log_probs = target_log_probs(model, attacked, tokenizer(TARGET)["input_ids"])
    found = record["after"]["target_log_prob"]
    expected = (log_probs[0].item(), log_probs.mean().item(), log_probs.sum().item())
    assert (found["first"], found["mean"], found["sum"]) == pytest.approx(expected, abs=1e-5)
    assert record["loss"] == pytest.approx(-found["mean"], abs=1e-5) == min(record["losses"])
    assert record["initial_loss"] > record["loss"] and record["steps"] == len(record["losses"]) == 5
    assert record["stop_reason"] == "num_steps" and record["exact_match"] and record["round_trip"]
    assert tokenizer.decode(record["suffix_ids"]) == record["suffix"]
    assert set(record["seconds"]) == {"attack", "sample", "judge"}
    for phase in ("before", "after"):
        assert judge(None, record[phase]["responses"]) == record[phase]["rewards"]
        assert len(record[phase]["rewards"]) == 5


def test_log_probabilities_count_the_target_alone(model, tokenizer):
    ids, target = prompt_ids(tokenizer, ROWS[0]["goal"]), tokenizer(TARGET)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids + target])).logits[0].log_softmax(-1)
    expected = [logits[len(ids) - 1 + i, token].item() for i, token in enumerate(target)]
    assert target_log_probs(model, ids, target).tolist() == pytest.approx(expected, abs=1e-5)


def test_samples_have_the_models_own_distribution(model, tokenizer):
    """Whatever its `generation_config` says; and no sample sees another's random numbers twice."""
    ids = prompt_ids(tokenizer, f"{ROWS[0]['goal']} x please x x")  # complies in about half of the cases
    config, state = model.generation_config, torch.get_rng_state()
    model.generation_config = type(config)(do_sample=True, top_k=1, temperature=0.01, eos_token_id=2)
    try:
        responses = sample_responses(model, tokenizer, ids, 2000, 1, seed=0)
    finally:
        model.generation_config = config
    assert torch.equal(torch.get_rng_state(), state)
    yes = target_log_probs(model, ids, tokenizer(" yes")["input_ids"]).exp().item()
    share = sum(response == " yes" for response in responses) / 2000
    assert 0.3 < yes < 0.7 and abs(share - yes) < 4 * (yes * (1 - yes) / 2000) ** 0.5
    long = sample_responses(model, tokenizer, ids, 20, 30, seed=1)
    assert set(long) <= {" yes i will", " no i refuse"}  # ended where the model ended them
    assert long == sample_responses(model, tokenizer, ids, 20, 30, seed=1)


def test_results_do_not_depend_on_order_shards_or_resuming(model, tokenizer, output, tmp_path):
    whole = lines(output)
    config = evaluation_config(save_responses=True)
    for i in (1, 2, 3):
        evaluate_gcg(model, tokenizer, Dataset.from_list(ROWS), judge, config, tmp_path / f"{i}.jsonl", (i, 3))
    assert [line["row"] for line in lines(tmp_path / "2.jsonl")[1:]] == [2, 5]
    merge_results([tmp_path / f"{i}.jsonl" for i in (3, 1, 2)], tmp_path / "merged.jsonl")
    assert lines(tmp_path / "merged.jsonl") == whole

    reverse = evaluate_gcg(model, tokenizer, ROWS[::-1], judge, config, tmp_path / "reverse.jsonl")
    by_goal = [{line["goal"]: line | {"row": 0} for line in entries[1:]} for entries in (whole, lines(reverse))]
    assert by_goal[0] == by_goal[1]

    before = output.read_bytes()
    evaluate_gcg(model, tokenizer, ROWS, judge, config, output)
    assert output.read_bytes() == before  # all is done


def test_another_evaluation_is_refused(model, tokenizer, output):
    config, other = evaluation_config(save_responses=True), build_trigger_model(tokenizer, steps=1)
    changed = evaluation_config(save_responses=True, num_samples=6)
    for arguments, message in (
        ((model, tokenizer, ROWS, judge, changed), r"holds results of another evaluation: num_samples \(5, not 6\)"),
        ((model, tokenizer, ROWS[:-1], judge, config), "table"),
        ((model, tokenizer, ROWS, RefusalJudge(), config), "judge"),
        ((other, tokenizer, ROWS, judge, config), r"model \("),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_gcg(*arguments, output)
    finer = evaluation_config(save_responses=True, micro_batch_size=3)
    assert evaluate_gcg(model, tokenizer, ROWS, judge, finer, output) == output  # changes nothing in the results


# (what happens for the n-th time, n, share of the line that is on the disk)
MOMENTS = [
    *(
        ("write", 1, 0.0),
        ("write", 1, 0.5),
        ("write", 1, 1.0),
        ("judge", 1, None),
        ("write", 1, 0.01),
        ("forward", 30, None),
    ),
    *(("write", 2, 0.99), ("judge", 2, None), ("write", 2, 1.0), ("write", 1, 0.3)),
]


def test_ended_at_ten_moments(model, tokenizer, output, tmp_path, monkeypatch):
    """What is on the disk then is what a kill would leave there."""

    class End(BaseException):
        pass

    append, score = ResultsFile.append, evaluator._score
    path, config = tmp_path / "ended.jsonl", evaluation_config(save_responses=True)
    for event, number, share in MOMENTS:
        seen = dict.fromkeys(("write", "judge", "forward"), 0)

        def reached(name, event=event, number=number, seen=seen):
            seen[name] += 1
            return name == event and seen[name] == number

        def write(self, entry, share=share, reached=reached):
            if reached("write"):
                line = _as_line(entry)
                self._file.write(line[: round(share * len(line))])
                raise End
            append(self, entry)

        def end_or(name, go_on, reached=reached):
            def call(*arguments):
                if reached(name):
                    raise End
                return go_on(*arguments)

            return call

        monkeypatch.setattr(ResultsFile, "append", write)
        monkeypatch.setattr(evaluator, "_score", end_or("judge", score))
        hook = model.register_forward_pre_hook(end_or("forward", lambda *_: None))
        with pytest.raises(End):
            evaluate_gcg(model, tokenizer, ROWS, judge, config, path)
        hook.remove()
    monkeypatch.undo()
    evaluate_gcg(model, tokenizer, ROWS, judge, config, path)
    assert lines(path) == lines(output)


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_processes(model, tokenizer, output, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    table = tmp_path / "table.csv"
    table.write_text("goal,target\n" + "".join(f"{row['goal']},{row['target']}\n" for row in ROWS))
    settings = vars(evaluation_config(save_responses=True))
    config = {name: value for name, value in settings.items() if value is not None} | {
        "model_name_or_path": str(tmp_path / "model"),
        "table": str(table),
        "reward_type": f"{ROOT / 'tests' / 'gcg_trigger.py'}:said_no",
        "output": str(tmp_path / "out.jsonl"),
        "threshold": [-4.0],
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29611"]
    command = [sys.executable, *launch, str(ROOT / "examples" / "gcg.py"), "--config", str(tmp_path / "config.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("attack success") == 1
    assert [path.name for path in tmp_path.glob("out.jsonl*")] == ["out.jsonl"]
    assert lines(tmp_path / "out.jsonl")[1:] == lines(output)[1:]


@pytest.mark.parametrize("name", ["out.jsonl", "out[1].jsonl"])
def test_parts_of_interrupted_processes_are_taken_in(model, tokenizer, output, tmp_path, name):
    whole = output.read_bytes().splitlines(keepends=True)
    (tmp_path / f"{name}.process-0").write_bytes(whole[0] + whole[1] + whole[3])
    (tmp_path / f"{name}.process-1").write_bytes(whole[0] + whole[2] + whole[4][:50])
    (tmp_path / f"{name}.process-2").write_bytes(whole[0][:10])
    config = evaluation_config(save_responses=True)
    evaluate_gcg(model, tokenizer, ROWS, judge, config, tmp_path / name)
    assert lines(tmp_path / name) == lines(output)
    assert (tmp_path / name).read_bytes().splitlines(keepends=True)[:4] == whole[:4]  # not made again
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_the_judge_reads(model, tokenizer, tmp_path):
    calls = []

    def watch(goals, responses):
        calls.append(goals)
        return judge(goals, responses)

    for include in (False, True):
        config = evaluation_config(num_steps=1, num_samples=2, include_suffix=include)
        path = evaluate_gcg(model, tokenizer, ROWS[:1], watch, config, tmp_path / f"{include}.jsonl")
        suffix, goal = read_results(path)[1][0]["suffix"], ROWS[0]["goal"]
        assert calls[-1] == [goal, goal, *[goal + suffix * include] * 2] and suffix


def test_a_reward_model_as_judge(model, tokenizer, tmp_path):
    words = [word for row in ROWS for word in row["goal"].split()]
    reward_tokenizer = build_reward_tokenizer("pair", more=[f"Ġ{word}" for word in [*words, "yes", "no", "i", "will"]])
    folder, _ = save_model(tmp_path / "reward", "deberta", reward_tokenizer)
    reward = SequencePairReward(folder, device="cpu", name="pair")
    config = evaluation_config(num_steps=1, num_samples=2, save_responses=True)
    results = []
    for number, scores in enumerate((reward, RewardJudge(reward))):
        path = evaluate_gcg(model, tokenizer, ROWS[:1], scores, config, tmp_path / f"{number}.jsonl")
        header, (record,) = read_results(path)
        assert header["identity"]["judge"] == "pair"
        expected = reward([ROWS[0]["goal"]] * 2, record["after"]["responses"])
        assert record["after"]["rewards"] == pytest.approx(expected, abs=1e-5)
        results.append(record["after"]["rewards"])
    assert results[0] == pytest.approx(results[1], abs=1e-5)


def test_another_judge_of_the_same_name_is_refused(model, tokenizer, tmp_path):
    """What its scores depend on is known by weights, code and arguments, and not by where it lies."""
    judges = [RefusalJudge(["no"]), RefusalJudge(["no", "yes"])]
    for i, folder in enumerate(("a", "b", "c")):
        path, reward = save_model(tmp_path / folder / "reward", "deberta", build_reward_tokenizer("pair"))
        reward.classifier.bias.data += min(i, 1)
        reward.save_pretrained(path)
        judges.append(SequencePairReward(path, device="cpu"))
        (tmp_path / folder / "f.py").write_text(f"def f(prompts, completions): return [{min(i, 1)}.0] * len(prompts)")
        judges.append(load_reward_function(f"{tmp_path / folder / 'f.py'}:f"))
    judges.append(SequencePairReward(judges[2].model, device="cpu", max_length=9))
    judges += [TransformedReward(judges[2], alpha=alpha) for alpha in (0.1, 0.2)]
    headers = [make_header(model, tokenizer, [], judge, evaluation_config())["identity"] for judge in judges]
    hashes = [header["judge_hash"] for header in headers]
    assert hashes[6:8] == hashes[4:6] and len({*hashes}) == len(hashes) - 2
    assert len({header["judge"] for header in headers}) == 4
    wrapped = make_header(model, tokenizer, [], RewardJudge(judges[2]), evaluation_config())["identity"]
    assert wrapped["judge_hash"] == hashes[2]


def test_a_judge_hash_depends_on_scores_alone(tmp_path):
    """Not on whether a reward was pickled for other processes, where a server is, or what a judge of one's own has."""
    reward = SequencePairReward(save_model(tmp_path, "deberta", build_reward_tokenizer("pair"))[0], device="cpu")
    assert hash_judge(reward) == hash_judge(pickle.loads(pickle.dumps(reward)))
    servers = [TransformedReward(RemoteReward(f"http://host:{port}")) for port in (1, 2)]
    assert hash_judge(servers[0]) == hash_judge(servers[1])

    class Own(RewardJudge):
        identity = object()

    assert hash_judge(Own(judge)) == hash_judge(Own(judge)) != hash_judge(judge)


def test_an_asynchronous_judge(model, tokenizer, tmp_path):
    async def reward(prompts, completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    config = evaluation_config(num_steps=1, num_samples=2, save_responses=True)
    path = evaluate_gcg(model, tokenizer, ROWS[:1], RewardJudge(reward), config, tmp_path / "out.jsonl")
    record = read_results(path)[1][0]
    assert record["after"]["rewards"] == [len(response) for response in record["after"]["responses"]]


def test_processes_that_take_themselves_for_the_only_one(model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started, but Accelerate was set up for 1"):
        evaluate_gcg(model, tokenizer, ROWS, judge, evaluation_config(), tmp_path / "out.jsonl")
    assert not list(tmp_path.iterdir())


def test_refusals():
    responses = ["I\u2019m sorry, but no.", "  I cannot", "Sure. I cannot wait!", "Yes"]
    assert RefusalJudge()([], responses) == [1.0, 1.0, 0.0, 0.0]
    assert RefusalJudge(match="anywhere")([], responses) == [1.0, 1.0, 1.0, 0.0]
    assert RefusalJudge(["yes"])([], responses) == [0.0, 0.0, 0.0, 1.0]
    for field, wrong in (("phrases", [""]), ("phrases", "I cannot"), ("match", "end")):
        with pytest.raises(ValueError, match=f"`{field}"):
            RefusalJudge(**{field: wrong})


def test_a_faulty_judge(model, tokenizer, tmp_path):
    config = evaluation_config(num_steps=1, num_samples=2)
    with pytest.raises(ValueError, match="gave 1 scores for 4 responses"):
        evaluate_gcg(model, tokenizer, ROWS[:1], lambda goals, responses: [0.0], config, tmp_path / "a.jsonl")

    def not_finite(goals, responses):
        return [float("nan")] * len(responses)

    path = evaluate_gcg(model, tokenizer, ROWS[:1], not_finite, config, tmp_path / "b.jsonl")
    record = read_results(path)[1][0]
    assert record["status"] == "error" and "score that is not finite" in record["reason"]


def test_a_target_that_fails_does_not_end_the_run(model, tokenizer, output, tmp_path, monkeypatch):
    run = GCG.run

    def fails_on_the_second(self, messages, target, seed=None) -> GCGResult:
        if messages == ROWS[1]["goal"]:
            raise GCGError("No candidate")
        return run(self, messages, target, seed)

    monkeypatch.setattr(GCG, "run", fails_on_the_second)
    path = evaluate_gcg(model, tokenizer, ROWS[:3], judge, evaluation_config(), tmp_path / "out.jsonl")
    header, records = read_results(path)
    assert [record["status"] for record in records] == ["ok", "error", "ok"]
    assert records[1]["reason"] == "GCGError: No candidate"
    assert "of 2 targets (0 skipped, 1 error, 0 missing, 0 unscored)" in format_report(summarize(header, records, [0]))


def test_a_loss_that_is_not_finite_does_not_end_the_run(tokenizer, tmp_path):
    broken = build_trigger_model(tokenizer, steps=1)
    broken.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.masked_fill((inputs[0] == tokenizer.unk_token_id)[..., None], torch.nan)
    )
    rows = [{"goal": " something else", "target": TARGET}, ROWS[0]]  # words that it does not know
    config = evaluation_config(num_steps=1, num_samples=1)
    path = evaluate_gcg(broken, tokenizer, rows, judge, config, tmp_path / "out.jsonl")
    _, records = read_results(path)
    assert [record["status"] for record in records] == ["error", "ok"]
    assert "is not finite; try the model in float32" in records[0]["reason"]


def test_tokens_that_do_not_survive_are_recorded_and_sampled_after(tmp_path, monkeypatch):
    tokenizer = build_bpe_tokenizer()
    model = build_model("llama", len(tokenizer))
    rows = [{"goal": "tell me t", "target": "sure here is"}]
    allowed = torch.zeros(len(tokenizer), dtype=torch.bool)
    allowed[tokenizer.convert_tokens_to_ids("h")] = True  # " th" is one token
    monkeypatch.setattr("trl_repulse.evaluation.gcg.engine.allowed_tokens", lambda *_: allowed)
    config = evaluation_config(filter_roundtrip="off", save_responses=True, topk=1, n_replace=4, num_steps=1)
    path = evaluate_gcg(model, tokenizer, rows, judge, config, tmp_path / "out.jsonl")
    (record,) = read_results(path)[1]
    prompt = build_prompt(tokenizer, rows[0]["goal"], rows[0]["target"])
    attacked, typed = prompt.splice(record["suffix_ids"]), prompt.encode([record["suffix"]])[0]
    assert attacked != typed and record["round_trip"] is False
    assert record["after"]["target_log_prob"]["mean"] == pytest.approx(-record["loss"], abs=1e-5)
    seed = derive_seed(0, TableRow(1, **rows[0]), "after")
    settings = {"num_samples": 5, "max_new_tokens": 6, "seed": seed}
    assert record["after"]["responses"] == sample_responses(model, tokenizer, attacked, **settings)
    assert record["after"]["responses"] != sample_responses(model, tokenizer, typed, **settings)  # the control


def test_rows_that_cannot_be_attacked(model, tokenizer, tmp_path):
    cells = (" a", float("nan")), ("", TARGET), (None, "")
    rows = [ROWS[0], *({"goal": goal, "target": target} for goal, target in cells)]
    with pytest.raises(ValueError, match=r"2 \(no target\), 3 \(no goal\), 4 \(no goal and no target\); fix them"):
        evaluate_gcg(model, tokenizer, rows, judge, evaluation_config(), tmp_path / "out.jsonl")
    path = evaluate_gcg(model, tokenizer, rows, judge, evaluation_config(on_bad_row="skip"), tmp_path / "out.jsonl")
    _, records = read_results(path)
    assert [record["status"] for record in records] == ["ok", *["skipped"] * 3]
    assert [record["reason"] for record in records[1:]] == ["no target", "no goal", "no goal and no target"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no file"),
        ("goal,target\n", "has no rows"),
        (" open door, yes\n read mail, yes\n", "has no column 'goal', only ' open door', ' yes'; name its columns"),
        ("prompt,target\na,b\n", "has no column 'goal', only 'prompt', 'target'"),
        ("goal,target\na,b,c\n", "Row 1 of .*, at line 2, has more fields than the header"),
    ],
)
def test_tables_that_are_refused(model, tokenizer, tmp_path, content, message):
    if content is not None:
        (tmp_path / "table.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        evaluate_gcg(model, tokenizer, tmp_path / "table.csv", judge, evaluation_config(), tmp_path / "out.jsonl")


def test_files_that_are_no_results(model, tokenizer, output, tmp_path):
    path = tmp_path / "x.jsonl"
    header, *rest = output.read_text().splitlines(keepends=True)
    for content, message in (
        ("a,b\n1,2\n", "is no file of attack results"),
        (header + "{}\n", "is no file of attack results"),
        (header.replace("gcg/1", "gcg/9"), "is no file of attack results of the schema"),
        (header[:20], "is empty"),
        (header + rest[0][:30] + "\n", "is no file of attack results"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_results(path)
    with pytest.raises(ValueError, match="There is no file"):
        read_results(tmp_path / "none.jsonl")
    path.write_text('{"precious": [1, 2, 3]}')  # without a line break
    with pytest.raises(ValueError, match="is no file of attack results"):
        evaluate_gcg(model, tokenizer, ROWS, judge, evaluation_config(), path)
    assert path.read_text() == '{"precious": [1, 2, 3]}'
    with pytest.raises(ValueError, match="`shard=3/2` must be one of"):
        evaluate_gcg(model, tokenizer, ROWS, judge, evaluation_config(), path, (3, 2))


# Models and tokenizers of other kinds: without keys and values, without a token that begins a text


def test_a_tokenizer_that_begins_no_text(tmp_path):
    """Without a goal the prompt before the attack is the token that begins a text, or ends one, as GPT-2 has it."""
    tokenizer = build_bpe_tokenizer(chat_template=None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.bos_token = None
    model = build_model("gpt2", len(tokenizer))
    config = evaluation_config(scenario="strings", prompt_format="raw", num_steps=1, suffix_init="x x x x")
    path = evaluate_gcg(model, tokenizer, [{"target": " there"}], judge, config, tmp_path / "out.jsonl")
    (record,) = read_results(path)[1]
    expected = target_log_probs(model, [tokenizer.eos_token_id], tokenizer(" there")["input_ids"]).sum().item()
    assert record["status"] == "ok"
    assert record["before"]["target_log_prob"]["sum"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("architecture", ["mamba", "recurrent_gemma"])
def test_models_without_keys_and_values_are_sampled(architecture):
    """Each sample from a pass over the whole text."""
    tokenizer = build_bpe_tokenizer(chat_template=None)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "eos_token_id": 2, "pad_token_id": 0}
    config_cls, options = {
        "mamba": (MambaConfig, {"state_size": 4}),
        "recurrent_gemma": (
            RecurrentGemmaConfig,
            {"intermediate_size": 48, "num_attention_heads": 2, "lru_width": 16},
        ),
    }[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_cls(vocab_size=len(tokenizer), **sizes, **options)).eval()
    prompt = tokenizer("the house")["input_ids"]
    found = sample_responses(model, tokenizer, prompt, 2000, 1, seed=0)
    with torch.no_grad():
        p = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].softmax(dim=-1)
    likely = p.argsort(descending=True)[:20]
    for token in likely[[tokenizer.decode([i]).isascii() for i in likely.tolist()]].tolist():
        text = tokenizer.decode([token], skip_special_tokens=True)
        expected = sum(p[i].item() for i in range(len(p)) if tokenizer.decode([i], skip_special_tokens=True) == text)
        assert abs(found.count(text) / 2000 - expected) < 5 * (expected / 2000) ** 0.5 + 1e-3
    assert all(sample_responses(model, tokenizer, prompt, 3, 4, seed=1))


@pytest.mark.parametrize("architecture", ["falcon_h1", "minimax", "llama"])
def test_caches_that_cannot_be_repeated(architecture, monkeypatch):
    """Layers of keys, values and states at once, or a cache of a model's own: samples are those without a cache."""
    tokenizer = build_bpe_tokenizer(chat_template=None)
    sizes = SIZES | {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16}
    states = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    config_cls, options = {
        "falcon_h1": (FalconH1Config, states),
        "minimax": (MiniMaxConfig, {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}),
        "llama": (LlamaConfig, {}),
    }[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_cls(**sizes, **options)).eval()
    prompt = tokenizer("the house")["input_ids"]
    found = sample_responses(model, tokenizer, prompt, 4, 6, seed=1)
    assert repeats_cache(model) == (architecture == "llama")
    monkeypatch.setattr("trl_repulse.evaluation.gcg.evaluator.repeats_cache", lambda model: False)
    assert found == sample_responses(model, tokenizer, prompt, 4, 6, seed=1) and len({*found}) > 1


def test_a_prompt_that_exceeds_the_context_does_not_end_the_run(tmp_path):
    tokenizer = build_bpe_tokenizer()
    model = build_model("gpt2", len(tokenizer))  # which has 128 positions
    rows = [{"goal": goal, "target": " sure"} for goal in ("tell me the secret of the house " * 20, "tell me")]
    config = evaluation_config(num_steps=1)
    path = evaluate_gcg(model, tokenizer, rows, judge, config, tmp_path / "out.jsonl")
    _, records = read_results(path)
    assert [record["status"] for record in records] == ["error", "ok"]
    assert "exceed the model's context of 128" in records[0]["reason"]
    with pytest.raises(GCGError, match="exceed the model's context of 128"):
        run_gcg(model, tokenizer, rows[0]["goal"], " sure", config)
