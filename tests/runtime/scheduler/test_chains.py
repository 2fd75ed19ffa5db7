"""Guesses of a head on the device change no answer, and are the same wherever the tokens before them come from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eagle_heads import heard, write_head
from support.runtime_constraints import Constrained, Toy, follows, only
from support.runtime_engine import VOCAB, Harness, prompt
from support.runtime_grammars import MODEL, WithGrammars
from support.runtime_graphs import ComputedGraphs
from support.runtime_models import edit, reference, save
from support.tiered_engine import PROMPTS, engine, round_of
from tokenizers import Tokenizer
from treeline_runtime.messages import Grammar, SleepReq, WakeReq
from treeline_runtime.models import ModelError
from treeline_runtime.models.draft_model import DraftModel
from treeline_runtime.scheduler import chains, drafting
from treeline_runtime.scheduler.administration import WARM_UP_TOKENS
from treeline_runtime.scheduler.chains import Chains

FEW = (2, 3, 5)
"""All that the head can guess. Where no other tokens are allowed, many of its guesses are right."""
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 512}
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"allowed_token_ids": FEW},
    {"temperature": 1.0, "allowed_token_ids": FEW},
    {"temperature": 0.8, "logit_bias": dict.fromkeys(FEW, 6.0), "repetition_penalty": 1.2},
    {"logit_bias": dict.fromkeys(FEW, 9.0), "stop_token_ids": (5,), "min_new_tokens": 6},
)


@pytest.fixture(scope="module")
def head(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "head", tiny, (0, 1, 1), vocab=FEW, own_embedding=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says one of `FEW` most of the time."""
    model = reference("Llama", SMALL)
    with torch.no_grad():
        model.lm_head.weight[[i for i in range(VOCAB) if i not in FEW]] = 0
    return save(model, tmp_path_factory.mktemp("small"))


@pytest.fixture(params=["EAGLE3", "STANDALONE"])
def drafter(request: pytest.FixtureRequest, head: Path, small: Path) -> Path:
    return head if request.param == "EAGLE3" else small


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every request that decodes have four guesses."""
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.0, 4),)),))
    monkeypatch.setattr(drafting, "WAIT", -1.0)


def with_head(head: Path) -> dict[str, Any]:
    algorithm = "EAGLE3" if "Eagle" in (head / "config.json").read_text() else "STANDALONE"
    return {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head)}


def ask(made: Constrained, seed: int) -> dict[str, list[int]]:
    """Submit prompts with a common beginning and all kinds of parameters."""
    rng, prompts = random.Random(seed), dict[str, list[int]]()
    for i in range(5):
        rid = str(i)
        prompts[rid] = prompt(1, rng.randint(1, 50)) + prompt(50 + i, rng.randint(1, 20))
        options = dict(rng.choice(SAMPLING)) | {
            "seed": rng.randint(0, 99),
            "max_new_tokens": rng.choice([1, 6, 19, 40]),
        }
        options["min_new_tokens"] = min(options.get("min_new_tokens", 0), options["max_new_tokens"])
        rule = None if "allowed_token_ids" in options else rng.choice([None, follows, only(*FEW, 9)])
        shows = rng.random() < 0.3
        made.ask(
            rid, prompts[rid], None if rule is None else Toy(rule), return_logprob=not shows, top_logprobs_num=2,
            return_hidden_states=shows, **options,
        )  # fmt: skip
    return prompts


@settings(max_examples=8)
@given(
    uses_head=st.booleans(),
    depth=st.integers(0, 1),
    seed=st.integers(0, 1 << 16),
    page_size=st.sampled_from([1, 4, 16]),
    mixed=st.booleans(),
    graphs=st.booleans(),
    retracts=st.booleans(),
)
def test_answers_and_guesses_are_the_same_whatever_happens(
    tiny: Path,
    head: Path,
    small: Path,
    uses_head: bool,
    depth: int,
    seed: int,
    page_size: int,
    mixed: bool,
    graphs: bool,
    retracts: bool,
) -> None:
    drafter = with_head(head if uses_head else small)
    options: dict[str, Any] = {"page_size": page_size, "mixed_chunk": mixed, "chunked_prefill_size": 32}
    options |= {"max_total_tokens": 256, "enable_return_hidden_states": True}
    plain = Constrained(tiny, **options)
    prompts = ask(plain, seed)
    plain.run()
    made = Constrained(tiny, overlap_depth=depth, **options, **drafter)
    if graphs:
        made.executor._graphs = ComputedGraphs(made.executor, 64)  # type: ignore[assignment]
    found, rng = heard(made), random.Random(seed)
    ask(made, seed)
    while made.step():
        if retracts and rng.random() < 0.1:
            made.retract_one(rng)
    made.run()
    for rid in prompts:
        assert made.tokens(rid) == plain.tokens(rid)
        assert made.finish(rid) == plain.finish(rid)
        assert [token for _, token in made.logprobs(rid)] == [token for _, token in plain.logprobs(rid)]
    # the guesses are those of an engine that computes all tokens of a request in one step
    alone = Harness(tiny, max_total_tokens=1024, prefix_cache="off", **drafter)
    again = heard(alone)
    for i, tokens in enumerate(rng.sample(sorted(found), min(6, len(found)))):
        last = {"logit_bias": {tokens[-1]: 1e4}}
        alone.generate(str(i), list(tokens[:-1]), max_new_tokens=1, **last)
        assert tokens in again or len(tokens) == 1
        assert found[tokens] == again[tokens][: len(found[tokens])]


def test_the_warm_up_computes_all_that_a_step_does(tiny: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So memory that a full step of the draft model lacks is missed at the start."""
    made, kept, keep = Harness(tiny, **with_head(small)), list[int](), DraftModel.keep
    monkeypatch.setattr(
        DraftModel, "keep", lambda self, ids, context: kept.append(len(ids)) or keep(self, ids, context)
    )
    made.residence.warm_up()
    assert WARM_UP_TOKENS in kept
    assert len(made.generate("a", prompt(1, 20))) == 8


def test_right_guesses_save_steps(tiny: Path, drafter: Path) -> None:
    made = Harness(tiny, **with_head(drafter))
    found = heard(made)
    made.generate("a", prompt(1, 9), max_new_tokens=60, temperature=1.0, allowed_token_ids=FEW)
    assert len(found) >= len(made.outs["a"]) - 1, "guesses come with each result, whatever was right before"
    speculated = made.last("a").speculated
    assert speculated is not None
    assert speculated.right > 4
    assert made.steps < 60
    assert made.stats.accepted_per_position[0] > made.stats.accepted_per_position[1] > 0


@pytest.mark.parametrize("hit", [4, 8, 16, 20])
def test_a_prefix_hit_gives_the_same_guesses_as_none(tiny: Path, drafter: Path, hit: int) -> None:
    """What a page has for its last token depends on no token after it."""
    ids, made = prompt(1, 23), Harness(tiny, **with_head(drafter))
    made.generate("other", ids[:hit] + prompt(2, 9), max_new_tokens=3)
    uncached = Harness(tiny, prefix_cache="off", **with_head(drafter))
    found, expected = heard(made), heard(uncached)
    assert made.generate("a", ids, max_new_tokens=12) == uncached.generate("a", ids, max_new_tokens=12)
    assert made.last("a").cached_tokens == hit
    assert found == expected
    assert len(found) > 5


def test_pages_of_the_host_bring_what_the_drafter_needs(tiny: Path, drafter: Path) -> None:
    alone = Harness(tiny, **with_head(drafter))
    expected = heard(alone)
    answers = [alone.generate(str(i), ids) for i, ids in enumerate(PROMPTS)]
    with engine(tiny, **with_head(drafter)) as made:
        for name in "ab":
            round_of(made, name, answers)
        found = heard(made)
        assert round_of(made, "c", answers) == [96] * 6
        assert found == expected


@pytest.mark.parametrize("level", [1, 2])
def test_the_drafter_sleeps_and_wakes_with_the_model(tiny: Path, drafter: Path, level: int) -> None:
    made = Harness(tiny, **with_head(drafter))
    found, ids = heard(made), prompt(1, 23)
    answer = made.generate("a", ids)
    expected = dict(found)
    found.clear()
    made.inbox += [SleepReq("s", level), WakeReq("w")]
    made.run()
    assert all(reply.ok for reply in made.replies)
    assert made.generate("b", ids) == answer
    assert found == expected


def test_pages_are_of_no_use_to_an_engine_with_another_head(tiny: Path, head: Path, tmp_path: Path) -> None:
    other = write_head(tmp_path / "head", tiny, (0, 1, 1), vocab=FEW, own_embedding=True, seed=1)
    forms = [
        Harness(tiny, **options).residence.page_format()
        for options in ({}, with_head(head), with_head(other), with_head(head))
    ]
    assert len({form.fingerprint for form in forms}) == 3
    assert forms[1] == forms[3]
    assert forms[1].nbytes - forms[0].nbytes == 4 * (2 * 2 * 16 + 32) * 4


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_may_be_aborted_at_every_point(tiny: Path, head: Path, depth: int) -> None:
    asked = {str(i): prompt(i, 9 + 4 * i) for i in range(3)}
    options: dict[str, Any] = {"max_new_tokens": 20, "allowed_token_ids": FEW}
    plain = Harness(tiny)
    answers = {rid: plain.generate(rid, ids, **options) for rid, ids in asked.items()}
    for point in range(9):
        made = Harness(tiny, overlap_depth=depth, **with_head(head))
        for rid, ids in asked.items():
            made.submit(rid, ids, **options)
        for _ in range(point):
            made.step()
        made.abort("1")
        made.run()
        assert [made.tokens(rid) for rid in "02"] == [answers[rid] for rid in "02"]


def test_launches_that_fail_are_repeated(tiny: Path, drafter: Path) -> None:
    asked = {str(i): prompt(i, 9 + 4 * i) for i in range(3)}
    plain, made = Harness(tiny), Harness(tiny, **with_head(drafter))
    for each in (plain, made):
        for rid, ids in asked.items():
            each.submit(rid, ids, max_new_tokens=20, allowed_token_ids=FEW)
    plain.run()
    made.run_with_failing_launches()
    assert {rid: made.tokens(rid) for rid in asked} == {rid: plain.tokens(rid) for rid in asked}


def test_guesses_end_with_the_context(tiny: Path, drafter: Path) -> None:
    ids, sizes = prompt(9, 41), {"context_length": 64, "max_total_tokens": 64}
    plain = Harness(tiny, **sizes).generate("a", ids, max_new_tokens=100, allowed_token_ids=FEW)
    made = Harness(tiny, **sizes, **with_head(drafter))
    assert made.generate("a", ids, max_new_tokens=100, allowed_token_ids=FEW) == plain
    assert made.finish("a").type == "length"


def test_the_device_guesses_seldom_where_it_does_not_pay(
    tiny: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.4, 3),)),))
    made_so_far, guess = [], Chains.guess

    def counted(self: Chains, plan: Any, ids: Any) -> Any:
        made_so_far.append(plan.chain)
        return guess(self, plan, ids)

    monkeypatch.setattr(Chains, "guess", counted)
    made = Harness(tiny, **with_head(head))
    made.generate("a", prompt(1, 9), max_new_tokens=100, logit_bias=dict.fromkeys(FEW, -100.0))  # no guess is right
    made_so_far = made_so_far[1:]  # without the one of the warm-up
    assert made_so_far[0] == 3
    assert 5 <= len(made_so_far) - made_so_far.index(1) < 20
    assert set(made_so_far[made_so_far.index(1) :]) == {1}


QUESTIONS = ("What is the capital of France?", "What is 17 + 25?", "Count from 31 to 44.", "Spell castle.")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_trained_head_is_mostly_right(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.undo()
    plain, made = WithGrammars(), WithGrammars(**with_head(MODEL.parent / "tiny-eagle3"))
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 60}
    for rid, question in enumerate(QUESTIONS):
        ids = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        assert made.generate(str(rid), ids, **options) == plain.generate(str(rid), ids, **options)
    load = made.load()
    assert sum(load.accepted_per_position) > 0.5 * load.total_draft_tokens
    assert sum(load.accepted_per_position) > 2 * load.total_drafts
    assert made.steps < 0.6 * plain.steps


def test_nothing_is_guessed_for_more_keys_than_may_be_copied(
    tiny: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "MOST_BYTES", 10 * 4 * 2 * 2 * 16 * 4)  # of ten pages of the head
    made = Harness(tiny, **with_head(head))
    found = heard(made)
    made.generate("a", prompt(1, 30), max_new_tokens=30)
    assert min(map(len, found)) == 31
    assert 36 < max(map(len, found)) <= 41


def test_a_long_text_takes_no_guesses_of_others(tiny: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = Harness(tiny, **with_head(drafter)), {"long": prompt(1, 90), "a": prompt(2, 9), "b": prompt(3, 5)}
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "allowed_token_ids": FEW}
    plain = Harness(tiny)
    answers = {rid: plain.generate(rid, ids, **options) for rid, ids in asked.items()}
    bytes_of_page = made.executor._chains._page_bytes  # type: ignore[union-attr]
    monkeypatch.setattr(chains, "MOST_BYTES", 2 * 8 * bytes_of_page)  # of two texts of 32 tokens
    found = heard(made)
    for rid, ids in asked.items():
        made.submit(rid, ids, **options)
    made.run()
    assert {rid: made.tokens(rid) for rid in asked} == answers
    alone = heard(again := Harness(tiny, **with_head(drafter)))
    for rid in "ab":
        again.generate(rid, asked[rid], **options)
    assert {tokens[:5] for tokens in found} == {tuple(asked[rid][:5]) for rid in "ab"}
    same = found.keys() & alone.keys()
    assert [found[tokens] for tokens in same] == [alone[tokens] for tokens in same]
    assert len(same) > 8


def test_grammars_get_the_guesses_that_they_allow() -> None:
    trained = with_head(MODEL.parent / "tiny-eagle3")
    ids = random.Random(1).choices(range(300, 4000), k=12)
    for grammar in (Grammar("regex", "(red|green|blue), [a-f]{3,6}( and [a-f]{2})*"), None):
        options: dict[str, Any] = {"grammar": grammar, "temperature": 1.0, "seed": 5, "max_new_tokens": 30}
        plain, made = WithGrammars(), WithGrammars(**trained)
        assert made.generate("a", ids, **options) == plain.generate("a", ids, **options)
        assert made.stats.total_jumps == plain.stats.total_jumps


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Other"]}, "draft model .*model: architecture Other"),
        ({"vocab_size": 95}, "95 tokens, the model's 96"),
        ({"max_position_embeddings": 256}, "256 positions"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}, "windows"),
    ],
    ids=str,
)
def test_models_that_cannot_guess_are_refused(tiny: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    model = reference("Llama", SMALL | {key: value for key, value in changes.items() if key == "vocab_size"})
    path = edit(save(model, tmp_path / "model"), **changes)
    with pytest.raises(ModelError, match=says):
        Harness(tiny, **with_head(path))


def test_a_draft_model_has_the_tokens_of_the_model(tmp_path: Path) -> None:
    path = save(reference("Llama", SMALL | {"vocab_size": 4096}), tmp_path / "model")
    content = json.loads((MODEL / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<|other|>"
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="other tokens"):
        WithGrammars(**with_head(path))
    for broken in ({}, {"model": []}, {"model": {}, "added_tokens": [1]}):
        (path / "tokenizer.json").write_text(json.dumps(broken))
        with pytest.raises(ModelError, match="no tokenizer"):
            WithGrammars(**with_head(path))
