"""Tools and environments beside a negative term, in the shop: who may act, in what, and that nothing else changes."""

import logging
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response

from examples.worlds import shop
from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer

from ..conftest import same_parameters
from ..generation.test_generation_training import DrawingLLM, serve_by
from ..trainers.test_repulse_grpo import GRPO_SETTINGS


pytestmark = [pytest.mark.trainer, pytest.mark.thorough]

PROPOSAL = {"proposal_tools": True}
HOT = {"proposal": "hot_policy", "proposal_temperature": 2.0, "bad_reward_threshold": -1.0, **PROPOSAL}
OWN = {"proposal": "policy"}
TERMS = {"proposal": PROPOSAL, "hot": HOT, "own": OWN}


class Sandbox(shop.Shop):
    pass


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory):
    """The shop's policy after a few updates: it calls tools, and closes more accounts than that of the examples."""
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop, "CLOSE_RATE", 0.03)
        shop.build_policy(folder, steps=120, batch_size=32)
    return str(folder)


@pytest.fixture
def build(make, policy_dir):
    def build(environment=shop.Shop, proposals=shop.Shop, reward=shop.reward, extra=None, data=None, **kwargs):
        settings = {"max_completion_length": shop.MAX_LENGTH, "learning_rate": 1e-3}
        settings |= {"max_tool_calling_iterations": shop.MAX_CALLS}
        extra = {"environment_factory": environment, **(extra or {})}
        if kwargs.get("proposal_tools") and proposals is not None:
            extra["proposal_environment_factory"] = proposals
        extra = {name: value for name, value in extra.items() if value is not None}
        data = shop.load_prompts() if data is None else data
        return make(RePULSeGRPOTrainer, policy_dir, reward, data, extra, **(settings | kwargs))

    return build


# Who may act


@pytest.mark.parametrize(
    ("message", "settings", "extra"),
    [
        ("would act with your `tools`.*`proposal_tools=True`\\. Set", {}, {"tools": [len]}),
        ("The policy, drawn hotter, draws.*`tools`", HOT | {"proposal_tools": False}, {"tools": [len]}),
        (
            "with your `environment_factory`.*`proposal_tools=True` and a `proposal_environment_factory`",
            {},
            {"environment_factory": shop.Shop},
        ),
        ("needs a `proposal_environment_factory`", PROPOSAL, {"environment_factory": shop.Shop}),
        ("drawn by your `rollout_func`", PROPOSAL, {"rollout_func": len}),
        (
            "has no effect without an `environment_factory`",
            PROPOSAL,
            {"tools": [len], "proposal_environment_factory": shop.Shop},
        ),
        (
            "has no effect without completions of a proposal, or of a hotter policy; leave it out",
            OWN,
            {"environment_factory": shop.Shop, "proposal_environment_factory": shop.Shop},
        ),
        (
            "must have the form of `environment_factory`",
            PROPOSAL,
            {"environment_factory": {"shop": shop.Shop}, "proposal_environment_factory": {"sandbox": shop.Shop}},
        ),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(make, message, settings, extra):
    with pytest.raises(ValueError, match=message):
        make(RePULSeGRPOTrainer, model="not a model", extra=extra, **settings)


def test_leave_without_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^`proposal_tools=True` is for completions that are drawn"):
        RePULSeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, proposal_tools=True, **OWN)


class OtherShop(shop.Shop):
    def sell(self) -> str:
        """
        Sells.

        Returns:
            str: "done".
        """
        return "done"


class PayingShop(shop.Shop):
    def get_reward(self) -> float:
        return 1.0


class PayingSandbox(PayingShop):
    pass


def test_environments_of_another_kind_are_refused(build):
    with pytest.raises(ValueError, match="a OtherShop with the tools close, lookup, resend, sell, and"):
        build(proposals=OtherShop, **PROPOSAL)
    with pytest.raises(ValueError, match="a PayingSandbox, and TRL asks for rewards only"):
        build(PayingShop, PayingSandbox, **PROPOSAL)


@pytest.mark.parametrize(("term", "warned"), [("proposal", 1), ("hot", 1), ("own", 0)])
def test_one_warning_names_the_tools(build, caplog, term, warned):
    with caplog.at_level(logging.WARNING):
        build(**TERMS[term])
    found = [record.getMessage() for record in caplog.records if "proposal_tools" in record.getMessage()]
    assert len(found) == warned
    assert all("they take effect: close, lookup, resend" in message for message in found)


# In what


def sent(trainer, number=8):
    """A generation batch of the trainer's, as if it trained."""
    trainer.model.train()
    row = shop.load_prompts()[0]
    return trainer._generate_and_score_completions([row] * number)


@pytest.mark.parametrize("term", ["proposal", "hot"])
def test_a_proposal_acts_in_its_own_environments(build, term):
    """Which are reset for each draw, and no more are made than are needed; the policy's are as its samples left them."""
    trainer = build(proposals=Sandbox, num_generations=4, num_proposal_generations=8, **TERMS[term])
    policys, seen = None, []
    for _ in range(2):
        batch = sent(trainer)
        policys = [list(each.calls) for each in trainer.environments]
        pool = trainer._proposal_world._pool[None]
        assert [type(each) for each in trainer.environments] == [shop.Shop] * 8
        assert [type(each) for each in pool] == [Sandbox] * 16
        calls, own = (
            [
                [tool["function"]["name"] for message in messages for tool in message.get("tool_calls") or []]
                for messages in list(logs["completion"])[-number:]
            ]
            for logs, number in ((trainer._tables.extra, 16), (trainer._logs, 8))
        )
        assert [each.calls for each in pool] == calls and policys == own
        attended, mask = batch["proposal_completion_attended"], batch["proposal_completion_mask"]
        assert ((attended - mask).sum(-1) == 3 * torch.tensor([len(row) for row in calls]).view(8, 2)).all()
        seen += calls
    assert any(seen)


def test_environments_begin_as_trls_do(build, monkeypatch):
    """The same prompts, tools and resets of the same rows."""

    class Noting(shop.Shop):
        def reset(self, **row):
            super().reset(**row)
            self.row = row
            return " lost" if row["place"] else None

    data = shop.load_prompts().add_column("place", [0, 1, 0, 1]).add_column("environment", ["a", "b", "a", "b"])
    factories = {"a": Noting, "b": Noting}
    trainer = build(factories, factories, data=data, **PROPOSAL)
    found = []
    generate = type(trainer)._generate

    def note(self, prompts):
        rows = [environment.row for environment in self.environments]
        tools = [{name: call.__self__ for name, call in row.items()} for row in self._sync_tool_dicts]
        mine = all(set(row.values()) == {each} for row, each in zip(tools, self.environments, strict=True))
        found.append([prompts, rows, self._batch_environments, [sorted(row) for row in tools], mine])
        return generate(self, prompts)

    monkeypatch.setattr(type(trainer), "_generate", note)
    trainer.model.train()
    trainer._generate_and_score_completions([row for row in data for _ in range(4)])
    policys, proposals = found
    assert proposals == policys
    assert policys[-1] and policys[0][4][-1]["content"].endswith(" lost") and "environment" not in policys[1][0]


class RandomStart(shop.Shop):
    """Tells of the parcel at once, now and then: prompts of one row differ."""

    def reset(self, **row):
        super().reset(**row)
        return " lost" if self.is_lost else None


@pytest.mark.parametrize("term", ["proposal", "hot"])
def test_environments_that_begin_at_random(build, term):
    trainer = build(RandomStart, RandomStart, **TERMS[term])
    batch = sent(trainer, 16)
    prompts, mask = (batch[f"proposal_completion_prompt_{kind}"] for kind in ("ids", "mask"))
    lengths = mask.sum(-1).flatten().tolist()
    assert lengths == [6 + each.is_lost for each in trainer._proposal_world._pool[None]] and len(set(lengths)) == 2
    lost = trainer._tokenizer.convert_tokens_to_ids("lost")
    assert ((prompts == lost).any(-1).flatten() == torch.tensor(lengths).eq(7)).all()
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def closing() -> str:
    """
    Closes.

    Returns:
        str: "done".
    """
    return "done"


async def resending() -> str:
    """
    Sends again.

    Returns:
        str: "done".
    """
    return "done"


closing.__name__, resending.__name__ = "close", "resend"


@pytest.mark.parametrize("term", TERMS)
def test_tools_without_an_environment(build, term):
    """Of both kinds, one of which is not known: TRL tells the model so, and goes on."""

    def reward(completions, **kwargs):
        return [-float("close" in str(messages)) for messages in completions]

    trainer = build(None, None, reward, {"tools": [closing, resending]}, max_steps=2, **TERMS[term])
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] > 0.2 and 0 < log["tools/failure_frequency"] < 1
    assert ("proposal/tools/call_frequency" in log) == (term != "own")


def test_a_rollout_func_beside_the_policys_own_samples(build):
    """What it says of its tokens is heeded: the environment's count for nothing."""
    masks = [[1, 0, 1], [1, 1], [0, 1], [1]]

    def rollout(prompts, trainer):
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        rows = [masks[i % 4] for i in range(len(prompts))]
        ids = [[5 + i % 4 for _ in mask] for i, mask in enumerate(rows)]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": rows}

    def reward(completions, **kwargs):
        return [float(i % 4) for i in range(len(completions))]

    trainer = build(None, None, reward, {"rollout_func": rollout}, **OWN)
    batch = sent(trainer)
    assert batch["tool_mask"].sum().item() - (batch["completion_mask"] == 0).sum().item() == 12
    trainer.train()
    assert trainer.state.log_history[0]["completions/mean_length"] == 1.5


# Nothing else


EXTRA = {"max_tool_calling_iterations", "max_steps", "beta"}  # beside GRPO_SETTINGS


@pytest.mark.parametrize("defaults", [{}, {"suppress_tokens": [5, 6]}], ids=["plain", "generation defaults"])
def test_alpha_0_is_trls_grpo_to_the_last_bit(build, policy_dir, defaults):
    ours = build(alpha=0.0, max_steps=3, beta=0.1)
    ours.model.generation_config.update(**defaults)
    ours.train()
    theirs = GRPOTrainer(
        model=policy_dir,
        reward_funcs=shop.reward,
        args=GRPOConfig(**{name: value for name, value in vars(ours.args).items() if name in GRPO_SETTINGS | EXTRA}),
        train_dataset=shop.load_prompts(),
        environment_factory=shop.Shop,
    )
    theirs.model.generation_config.update(**defaults)
    theirs.train()
    assert same_parameters(ours.model, theirs.model)
    assert ours.state.log_history[0]["tools/call_frequency"] > 0.5 or defaults
    other = build(max_steps=3, beta=0.1, **PROPOSAL)
    other.train()
    assert not same_parameters(other.model, theirs.model)  # the control


def test_the_policys_trajectories_are_not_the_proposals_business(build):
    """With the same random numbers it draws the same beside a proposal; hot samples are drawn in one call with its own."""
    batches = []
    for term in ({"alpha": 0.0}, OWN, PROPOSAL):
        trainer = build(**term)
        torch.manual_seed(5)
        shop.random.seed(5)
        batches.append(sent(trainer))
    for batch in batches[1:]:
        for name in ("prompt_ids", "completion_ids", "completion_mask", "tool_mask", "advantages"):
            assert torch.equal(batch[name], batches[0][name])
    assert (batches[0]["tool_mask"] == 0).any()


@pytest.mark.parametrize("term", TERMS)
def test_resumed_runs_end_with_the_same_bits(build, tmp_path, term):
    settings = {"per_device_train_batch_size": 8, "num_iterations": 2, "beta": 0.1, "max_steps": 6} | TERMS[term]
    settings |= {"save_strategy": "steps", "save_steps": 1, "save_negatives": True, "bad_reward_threshold": 0.5}

    def run(folder, resume=None):
        trainer = build(output_dir=str(tmp_path / folder), **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole")
    written = (tmp_path / "whole" / "negatives.jsonl").read_bytes()
    assert b'"tool_calls"' in written
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in range(4, 7):  # in the middle of a generation batch's updates
        shutil.rmtree(tmp_path / "part" / f"checkpoint-{step}")
    part = run("part", resume=True)
    assert same_parameters(part.model, whole.model)
    if whole.proposal is not None:
        assert same_parameters(part.proposal.module, whole.proposal.module)
    assert (tmp_path / "part" / "negatives.jsonl").read_bytes() == written


def test_evaluation(build):
    """The last batch of evaluation is filled up with rows that do not count."""
    trainer = build(
        extra={"eval_dataset": shop.load_prompts().select(range(3))}, per_device_eval_batch_size=8, **PROPOSAL
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"]) and "eval_proposal/reward" in metrics


# The shop itself


def test_the_exact_probability_is_that_of_what_is_drawn(build):
    """Of trajectories that TRL's loop made, within four standard errors."""
    trainer = build(alpha=0.0, num_generations=250, per_device_train_batch_size=1000)
    trainer.model.train()
    found = shop.evaluate(trainer.model, trainer._tokenizer)
    p = math.exp(found.log_prob_closed)
    assert 0.02 < p < 0.9
    rows = [row for row in shop.load_prompts() for _ in range(250)]
    rewards = trainer._generate_and_score_completions(rows)["rewards"]
    closed = (rewards == shop.CLOSED_REWARD).float().mean().item()
    assert abs(closed - p) < 4 * math.sqrt(p * (1 - p) / 1000)
    assert abs(rewards.mean().item() - found.expected_reward) < 4 * rewards.std().item() / math.sqrt(1000)


def test_a_hot_policy_is_one_of_divided_logits(policy_dir):
    """The last norm is scaled instead, which divides every logit."""
    model = AutoModelForCausalLM.from_pretrained(policy_dir)
    hot = shop.evaluate(model, temperature=2.0)
    with torch.no_grad():
        for parameter in model.transformer.ln_f.parameters():
            parameter.div_(2.0)
    scaled = shop.evaluate(model)
    assert hot.log_prob_closed == pytest.approx(scaled.log_prob_closed, abs=1e-4)
    assert hot.expected_reward == pytest.approx(scaled.expected_reward, abs=1e-4)
    assert abs(hot.log_prob_closed - shop.evaluate(policy_dir).log_prob_closed) > 0.1


def test_the_policy_loses_what_the_proposal_learns_to_do(build):
    settings = {"max_steps": 12, "num_generations": 8, "per_device_train_batch_size": 32, "target_dist_beta": -10.0}
    ends = {}
    for name, own in {"GRPO": {"alpha": 0.0}, "RePULSe": PROPOSAL}.items():
        trainer = build(**settings, **own)
        start = shop.evaluate(trainer.model)
        trainer.train()
        ends[name] = shop.evaluate(trainer.model)
    assert ends["RePULSe"].log_prob_closed < ends["GRPO"].log_prob_closed - 1, ends
    assert ends["RePULSe"].expected_reward > start.expected_reward
    assert shop.evaluate(trainer.proposal.module).log_prob_closed > start.log_prob_closed + 1


# With vLLM


def test_with_the_same_draws_an_engine_changes_nothing(build, monkeypatch):
    """Turns after the first go through it too, for both models; what it says of a tool's tokens is not compared."""

    class Start(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            torch.manual_seed(7)
            shop.random.seed(7)

    serve_by(DrawingLLM, monkeypatch)
    trainers = []
    for engine in ({}, {"use_vllm": True, "vllm_importance_sampling_correction": False}):
        trainers.append(build(max_steps=3, extra={"callbacks": [Start()]}, **PROPOSAL, **engine))
        if engine:
            llm = trainers[-1].vllm_generation.llm
            llm.llm_engine.model_config = llm.llm_engine.vllm_config.model_config
        trainers[-1].train()
    plain, served = trainers
    assert same_parameters(served.model, plain.model)
    assert same_parameters(served.proposal.module, plain.proposal.module)
    assert len(served.vllm_generation.llm.llm.calls) > 6
    assert max(log["proposal/sampling/sampling_logp_difference/max"] for log in served.state.log_history[:3]) < 1e-4


# The shop's example


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        ("<call> close <eos>", ["close"]),
        ("<call> lookup <eos>", ["lookup"]),
        *(
            (turn, [])
            for turn in ("<call> close", "<call> sorry <eos>", "close <eos>", "<eos>", "<call> close <eos> <eos>")
        ),
        *(
            (turn, [])
            for turn in ("sorry <call> close <eos>", "<call> close sorry <eos>", "<call> <call> close <eos>")
        ),
    ],
)
def test_a_call_is_a_turn_of_three_tokens(turn, calls):
    """Else the sum over sequences of calls would miss some."""
    tokenizer = shop.build_tokenizer()
    prefix = tokenizer.apply_chat_template(shop.load_prompts()[0]["prompt"], add_generation_prompt=True)["input_ids"]
    parsed = parse_response(tokenizer, tokenizer(turn)["input_ids"], prefix, [closing, resending])
    assert [call["function"] for call in parsed.get("tool_calls") or []] == [
        {"name": x, "arguments": {}} for x in calls
    ]


@pytest.mark.parametrize(
    ("is_lost", "calls", "answer", "expected"),
    [
        (True, ["lookup", "resend"], shop.LOST, 1.0),
        (False, ["lookup"], shop.FOUND, 1.0),
        (True, ["resend"], shop.LOST, 0.0),
        (True, ["lookup", "resend"], shop.FOUND, 0.0),
        (True, ["lookup"], shop.LOST, 0.0),
        (False, ["lookup", "resend"], shop.FOUND, 0.0),
        (False, ["lookup", "close"], shop.FOUND, shop.CLOSED_REWARD),
    ],
)
def test_what_an_episode_is_worth(is_lost, calls, answer, expected):
    assert shop.score(is_lost, calls, answer) == expected
