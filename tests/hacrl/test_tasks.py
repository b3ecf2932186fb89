from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import reasoning_gym

from hacrl.rewards import Scorer
from hacrl.tasks import ReasoningGymTask, extract_answer

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def chain_sum(**changes: Any) -> ReasoningGymTask:
    return ReasoningGymTask(**{"name": "chain_sum", "size": 10, "seed": 3, "config": EASY, **changes})


def test_prompt_is_the_datasets_item() -> None:
    item = reasoning_gym.create_dataset("chain_sum", size=10, seed=3, **EASY)[4]
    prompt = chain_sum().prompt(4)
    assert (prompt.index, prompt.question, prompt.entry["answer"]) == (4, item["question"], item["answer"])


def test_prompt_same_index_twice_is_the_same() -> None:
    task = chain_sum()
    assert task.prompt(2) == task.prompt(2)


@pytest.mark.parametrize("index", [-1, 10])
def test_prompt_outside_the_task_raises(index: int) -> None:
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        chain_sum().prompt(index)


def test_task_length_is_its_size() -> None:
    assert len(chain_sum(size=7)) == 7


def test_held_out_shares_no_item_with_the_task() -> None:
    task = chain_sum(config={"min_terms": 4, "max_terms": 4, "min_digits": 4, "max_digits": 4})
    held_out = task.held_out(5)
    questions = {task.prompt(index).question for index in range(10)}
    assert len(held_out) == 5
    assert questions.isdisjoint(held_out.prompt(index).question for index in range(5))


def test_score_right_answer_is_one() -> None:
    task = chain_sum()
    entry = task.prompt(0).entry
    assert task.score(f" {entry['answer']}\n", entry) == 1.0


def test_score_wrong_answer_is_zero() -> None:
    task = chain_sum()
    assert task.score("1000", task.prompt(0).entry) == 0.0


def test_score_right_answer_inside_a_longer_text_is_zero() -> None:
    task = ReasoningGymTask("gcd", 3, 0)
    entry = task.prompt(0).entry
    assert task._dataset.score_answer(f"it is {entry['answer']}", entry) > 0  # partial credit of the dataset
    assert task.score(f"it is {entry['answer']}", entry) == 0.0


@pytest.mark.parametrize("text", ["", "  \n", "no tag here"])
def test_score_without_an_answer_is_zero_where_the_dataset_gives_points(text: str) -> None:
    task = ReasoningGymTask("countdown", 3, 0, threshold=0.01, answer="tag")
    entry = task.prompt(0).entry
    assert task._dataset.score_answer(None, entry) == 0.01
    assert task.score(text, entry) == 0.0


def test_score_threshold_decides_what_is_right() -> None:
    tasks = [ReasoningGymTask("gcd", 3, 0, threshold=threshold) for threshold in (0.1, 0.99)]
    entry = tasks[0].prompt(0).entry
    assert [task.score(f"it is {entry['answer']}", entry) for task in tasks] == [1.0, 0.0]


def test_score_exception_of_the_dataset_passes_through() -> None:
    task = chain_sum()
    with pytest.raises(KeyError):
        task.score("1", {})


def test_score_nan_of_the_dataset_stays_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    task = chain_sum()
    monkeypatch.setattr(task._dataset, "score_answer", lambda answer, entry: math.nan)
    assert math.isnan(task.score("1", task.prompt(0).entry))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 7.", "7"),
        ("3 + 4 = 7", "7"),
        ("first 3, then -4", "-4"),
        ("x=-4", "-4"),
        ("10-4", "4"),
        ("(2)-4", "4"),
        ("1,234", "1234"),
        ("1,234,567.5 in all", "1234567.5"),
        ("1, 2,3", "3"),
        ("12,3456", "3456"),
        ("0.50", "0.50"),
        (".5", ".5"),
        ("$\\boxed{42}$", "42"),
        ("no number", None),
        ("", None),
    ],
)
def test_extract_answer_last_number(text: str, number: str | None) -> None:
    assert extract_answer(text, "last_number") == number


@pytest.mark.parametrize(
    ("text", "tagged"),
    [
        ("<answer>8</answer>", "8"),
        ("<answer>1</answer> no, <answer> 8\n</answer> done", "8"),
        ("in <answer> tags: <answer>8</answer>", "8"),
        ("<answer></answer>", None),
        ("<answer>8", None),
        ("8", None),
    ],
)
def test_extract_answer_last_tag(text: str, tagged: str | None) -> None:
    assert extract_answer(text, "tag") == tagged


def test_extract_answer_text_is_the_whole_response_stripped() -> None:
    assert extract_answer(" 3 + 4\n", "text") == "3 + 4"


def test_task_unknown_name_names_close_matches() -> None:
    with pytest.raises(ValueError, match=r"no dataset 'chain_sums'.*'chain_sum'"):
        chain_sum(name="chain_sums")


def test_task_own_dataset_is_among_the_close_matches() -> None:
    with pytest.raises(ValueError, match="'chain_mod'"):
        chain_sum(name="chain_mood", config={})


def test_task_unknown_config_field_is_named_with_close_matches() -> None:
    with pytest.raises(ValueError, match=r"no config field 'min_term'.*'min_terms'"):
        chain_sum(config={"min_term": 2})


@pytest.mark.parametrize("field", ["size", "seed"])
def test_task_argument_in_config_raises(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is an argument of its own"):
        chain_sum(config={field: 1})


@pytest.mark.parametrize(
    ("config", "field"),
    [({"min_terms": 0}, "min_terms"), ({"max_digits": "two", "min_terms": 2}, "max_digits")],
)
def test_task_bad_config_value_is_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"refuses its config; look at {{'{field}': [^,]*}}"):
        chain_sum(config=config)


def test_task_config_values_that_disagree_are_both_named() -> None:
    config = {"min_digits": 3, "max_digits": 2, "allow_negation": True}
    with pytest.raises(ValueError, match=r"look at {'min_digits': 3, 'max_digits': 2}\. "):
        chain_sum(config=config)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"size": 0}, "size"),
        ({"seed": -1}, "seed"),
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": 1.5}, "threshold"),
        ({"answer": "number"}, "answer"),
    ],
)
def test_task_argument_outside_range_raises(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"ReasoningGymTask: {name}"):
        chain_sum(**changes)


@pytest.mark.parametrize("spec", [{"name": "chain_sums"}, {"nam": "chain_sum"}])
def test_task_composite_with_a_bad_table_raises(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'composite' refuses its config; look at {'datasets'"):
        ReasoningGymTask("composite", 3, 0, {"datasets": [spec]})


def test_task_composite_takes_tables_and_scores_with_the_right_dataset() -> None:
    specs = [{"name": "chain_sum", "weight": 2.0, "config": EASY}, {"name": "spell_backward"}]
    task = ReasoningGymTask("composite", 12, 0, {"datasets": specs})
    entries = [task.prompt(index).entry for index in range(12)]
    assert {entry["metadata"]["source_dataset"] for entry in entries} == {"chain_sum", "spell_backward"}
    assert all(task.score(entry["answer"], entry) == 1.0 for entry in entries)


def test_task_unpickled_has_its_dataset_at_once() -> None:
    assert "_dataset" in pickle.loads(pickle.dumps(chain_sum())).__dict__


# the first two hold what cannot be pickled; the others have scores of their own
@pytest.mark.parametrize("name", ["arc_1d", "string_manipulation", "countdown", "gcd", "puzzle24"])
def test_task_dataset_survives_pickling(name: str) -> None:
    task = ReasoningGymTask(name, 3, 0)
    copy = pickle.loads(pickle.dumps(task))
    assert copy.prompt(1) == task.prompt(1)


@pytest.mark.parametrize("name", ["basic_arithmetic", "leg_counting", "gsm_symbolic", "number_sorting", "ab"])
def test_prompt_can_be_sent_to_a_worker(name: str) -> None:
    prompt = ReasoningGymTask(name, 2, 0).prompt(1)
    assert pickle.loads(pickle.dumps(prompt)) == prompt


def test_score_in_a_worker_is_the_score_in_this_process() -> None:
    task = chain_sum(answer="last_number")
    prompts = [task.prompt(index) for index in range(4)]
    pairs = [(f"it is {prompt.entry['answer'] if prompt.index % 2 else 1000}", prompt.entry) for prompt in prompts]
    with Scorer(task.score, workers=1) as scorer:
        assert [score.reward for score in scorer.score(pairs)] == [0.0, 1.0, 0.0, 1.0]


def test_score_in_a_worker_unscorable_answer_costs_that_response_only() -> None:
    task = chain_sum()
    entry = task.prompt(0).entry
    with Scorer(task.score, workers=1) as scorer:
        scores = scorer.score([(entry["answer"], entry), ("1", {}), (entry["answer"], entry)])
    assert [score.reward for score in scores] == [1.0, None, 1.0]
    assert "KeyError" in (scores[1].error or "")
