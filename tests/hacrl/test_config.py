"""The configuration tree: recipes, dotted overrides, errors that name the field."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hacrl.config import ConfigError, RunConfig, find_recipe, load_config, parse_overrides, recipes


def test_load_config_quickstart_has_two_heterogeneous_agents() -> None:
    config = load_config("quickstart")
    assert {agent.model for agent in config.agents.values()} == {"tiny:digits", "tiny:pairs"}


@pytest.mark.parametrize("recipe", recipes())
def test_load_config_every_shipped_recipe_is_valid_and_warns_of_nothing(recipe: str) -> None:
    assert load_config(recipe).warnings() == []


def test_load_config_override_by_dotted_name_reaches_the_field() -> None:
    config = load_config("quickstart", {"checkpoint.every": 2, "agents.digits.learning_rate": "1e-3"})
    assert config.checkpoint.every == 2
    assert config.agents["digits"].learning_rate == 1e-3


def test_to_toml_read_back_gives_the_same_configuration() -> None:
    config = load_config("quickstart", {"objective.beta": 0.1, "agents.pairs.system": "Think."})
    assert RunConfig.model_validate(tomllib.loads(config.to_toml())) == config


def test_parse_overrides_reads_toml_values_and_falls_back_to_text() -> None:
    parsed = parse_overrides(["--steps", "3", "--task.seed=7", "--device", "cpu", "--task.config", "{min_terms = 2}"])
    assert parsed == {"steps": 3, "task.seed": 7, "device": "cpu", "task.config": {"min_terms": 2}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["steps", "3"], "expected --FIELD VALUE, got 'steps'"), (["--steps"], "--steps needs a value")],
)
def test_parse_overrides_of_something_else_raises(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_overrides(arguments)


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        ({"stepz": 3}, ["stepz", "no such field", "Did you mean 'steps'?"]),
        ({"checkpoint.evry": 3}, ["checkpoint.evry", "Did you mean 'every'?"]),
        ({"agents.digits.learning_rat": 1}, ["agents.digits.learning_rat", "Did you mean 'learning_rate'?"]),
        ({"steps": "many"}, ["steps", "valid integer", "'many'"]),
        ({"steps": 0}, ["steps", "greater than 0", "0"]),
        ({"sampling.temperature": -1}, ["sampling.temperature", "greater than 0"]),
        ({"objective.method": "ppo"}, ["objective.method", "'hacpo', 'gspo', 'grpo' or 'naive'", "'ppo'"]),
        ({"objective.cross_clip_low": 2.0}, ["objective", "cross_clip_low must be <= cross_clip_high"]),
        ({"agents.digits.model.name": "x"}, ["agents.digits.model is a value, not a section"]),
        ({"agents.a b.model": "x"}, ["agents", "letters, digits"]),
        ({"update.updates_per_step": 65}, ["updates_per_step = 65", "prompts_per_step = 64"]),
        ({"update.prompts_per_step": 30000}, ["prompts_per_step = 30000", "task.size = 20000"]),
    ],
)
def test_load_config_bad_field_is_named_with_what_it_got(overrides: dict[str, object], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", overrides)
    for message in messages:
        assert message in str(error.value)


def test_load_config_missing_field_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[agents.a]\nmodel = 'm'\n")
    with pytest.raises(ConfigError, match="task: this field is required"):
        load_config(recipe)


def test_load_config_without_agents_raises(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("agents = {}\n[task]\nname = 'chain_mod'\n")
    with pytest.raises(ConfigError, match="agents: there must be at least one agent"):
        load_config(recipe)


def test_load_config_file_that_is_not_toml_raises(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("steps 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(recipe)


@pytest.mark.parametrize(
    ("name", "message"), [("quickstat", "Did you mean 'quickstart'"), ("nowhere/x.toml", "there is no file")]
)
def test_find_recipe_unknown_name_raises(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_recipe(name)


def test_warnings_schedule_that_closes_the_cross_bounds_is_named() -> None:
    config = load_config(
        "quickstart",
        {"objective.cross_clip_high": 1.0, "objective.cross_clip_low": 0.9, "objective.cross_clip_step": 0.1},
    )
    assert "at update 1 of 2" in config.warnings()[0]


def test_objective_build_takes_the_method_s_own_clip_radii_unless_given() -> None:
    overrides = {"objective.method": "grpo"}
    objective = load_config("quickstart", overrides).objective
    assert objective.build().ratio == "token"
    assert objective.build().epsilon_low == objective.epsilon_low  # the recipe sets it
    assert objective.model_copy(update={"epsilon_low": None}).build().epsilon_low == 0.2
