"""The configuration of a run: one tree of models, from a TOML recipe and dotted overrides of the command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from hacpo_kernels import HACPOConfig

RECIPES = Path(__file__).resolve().parent / "recipes"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TaskConfig(_Section):
    """What the agents are asked, and how a response is scored."""

    name: str = Field(description="a reasoning-gym dataset")
    size: PositiveInt = Field(10_000, description="number of training prompts")
    seed: NonNegativeInt = 0
    config: dict[str, Any] = Field(default_factory=dict, description="settings of the dataset")
    answer: Literal["text", "tag", "last_number"] = "text"
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.99
    workers: NonNegativeInt = Field(2, description="processes that score; 0: in this process, without a deadline")
    timeout: PositiveFloat = Field(5.0, description="seconds to score one response")


class SamplingConfig(_Section):
    """How responses are sampled."""

    group_size: PositiveInt = Field(8, description="responses per prompt and agent")
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = Field(0, description="0: no limit")
    max_new_tokens: PositiveInt = 512
    batch_size: PositiveInt = Field(256, description="responses generated at once")


class ObjectiveConfig(_Section):
    """The objective. `method` sets what is shared; the bounds apply to it where it has them."""

    method: Literal["hacpo", "gspo", "grpo", "naive"] = "hacpo"
    alpha: NonNegativeFloat = 1.0
    cross_clip_low: PositiveFloat = 0.8
    cross_clip_step: NonNegativeFloat = 0.025
    cross_clip_high: PositiveFloat = 1.0
    epsilon_low: NonNegativeFloat | None = Field(None, description="None: 3e-4, or 0.2 for grpo")
    epsilon_high: NonNegativeFloat | None = Field(None, description="None: 4e-4, or 0.28 for grpo")
    beta: NonNegativeFloat = Field(0.0, description="weight of the KL term to the initial policy")
    ratio_length: Literal["own", "source"] = Field("own", description="what divides the learner's sum of log-probs")
    cross_baseline: Literal["learner", "source"] = "learner"
    baseline_cap: float | Literal["reward_max", "none"] = Field(
        "reward_max", description="largest baseline; reward_max: the task's own"
    )

    @property
    def shares(self) -> bool:
        """Whether an agent learns from the others' responses."""
        return self.method in ("hacpo", "naive")

    def build(self) -> HACPOConfig:
        """The objective of the kernels."""
        presets = {
            "hacpo": HACPOConfig(
                alpha=self.alpha,
                cross_clip_low=self.cross_clip_low,
                cross_clip_step=self.cross_clip_step,
                cross_clip_high=self.cross_clip_high,
            ),
            "gspo": HACPOConfig.gspo(),
            "grpo": HACPOConfig.grpo(),
            "naive": HACPOConfig.naive(),
        }
        preset = presets[self.method]
        low = preset.epsilon_low if self.epsilon_low is None else self.epsilon_low
        high = preset.epsilon_high if self.epsilon_high is None else self.epsilon_high
        return dataclasses.replace(preset, epsilon_low=low, epsilon_high=high, beta=self.beta)

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        self.build()
        return self


class CapabilityConfig(_Section):
    """The capability of the agents, from their mean rewards."""

    window: PositiveInt = Field(5, description="steps in the window, the current one included")
    warmup_steps: NonNegativeInt = Field(0, description="first steps with omega = 1")


class AgentConfig(_Section):
    """One agent: its policy and how it is trained."""

    model: str = Field(description="a folder in Hugging Face format, a hub name, or tiny:NAME for a shipped agent")
    learning_rate: PositiveFloat = 1e-6
    warmup_updates: NonNegativeInt = Field(0, description="updates over which the learning rate rises linearly")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    chat_template: bool = True
    system: str | None = None
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="for example enable_thinking = false")


class UpdateConfig(_Section):
    """How a step's responses become optimizer updates."""

    prompts_per_step: PositiveInt = 128
    updates_per_step: PositiveInt = 2
    tokens_per_micro_batch: PositiveInt = Field(16_384, description="padded tokens that go through the model at once")

    @model_validator(mode="after")
    def _check(self) -> UpdateConfig:
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step = {self.updates_per_step} must be <= prompts_per_step = {self.prompts_per_step}: "
                "every update needs a prompt"
            )
        return self


class EvaluationConfig(_Section):
    """Greedy accuracy on held-out problems, before, during and after training."""

    size: PositiveInt = 512
    every: NonNegativeInt = Field(0, description="steps between evaluations; 0: only before and after")


class CheckpointConfig(_Section):
    every: NonNegativeInt = Field(0, description="steps between checkpoints; 0: none but on SIGTERM")
    keep: PositiveInt = Field(2, description="checkpoints kept")


class RunConfig(_Section):
    """A whole run."""

    seed: NonNegativeInt = 0
    steps: PositiveInt = 100
    output: str | None = Field(None, description="run folder; None: runs/<recipe>-<time>")
    threads: PositiveInt | None = Field(None, description="CPU threads of torch; None: torch's choice")
    device: str = Field("auto", description="auto: cuda when there is one, else cpu")
    task: TaskConfig
    agents: dict[str, AgentConfig]
    sampling: SamplingConfig = SamplingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    capability: CapabilityConfig = CapabilityConfig()
    update: UpdateConfig = UpdateConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @field_validator("agents")
    @classmethod
    def _check_agents(cls, agents: dict[str, AgentConfig]) -> dict[str, AgentConfig]:
        if not agents:
            raise ValueError("there must be at least one agent")
        wrong = [name for name in agents if not re.fullmatch(r"[A-Za-z0-9_-]+", name)]
        if wrong:
            raise ValueError(
                f"an agent's name is also the name of its folder: letters, digits, - and _ only, got {wrong}"
            )
        return agents

    @model_validator(mode="after")
    def _check_sizes(self) -> RunConfig:
        if self.update.prompts_per_step > self.task.size:
            raise ValueError(
                f"update.prompts_per_step = {self.update.prompts_per_step} must be <= task.size = {self.task.size}"
            )
        return self

    def to_toml(self) -> str:
        """The resolved configuration as TOML; reading it back gives the same configuration."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    def warnings(self) -> list[str]:
        """What is allowed and probably not meant."""
        found = []
        closes = self.objective.build().cross_closes_at()
        if closes is not None and closes < self.update.updates_per_step and len(self.agents) > 1:
            found.append(
                f"the lower cross bound reaches the upper one at update {closes} of {self.update.updates_per_step}: "
                "from there on no agent learns from another one. Lower objective.cross_clip_step or "
                "update.updates_per_step."
            )
        if self.objective.shares and len(self.agents) == 1:
            found.append("there is one agent, so nothing is shared: this is GSPO.")
        return found


def recipes() -> list[str]:
    """Names of the recipes that ship with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(name: str) -> Path:
    """The TOML file called `name`: a path, or the name of a shipped recipe.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        if not path.is_file():
            raise ConfigError(f"recipe: there is no file {name}.")
        return path
    shipped = RECIPES / f"{name}.toml"
    if not shipped.is_file():
        close = difflib.get_close_matches(name, recipes(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"recipe: {name!r} is neither a .toml file nor one of {', '.join(recipes())}.{hint}")
    return shipped


def load_config(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A recipe with overrides by dotted name, validated.

    Args:
        recipe: path of a TOML file or name of a shipped recipe.
        overrides: for example {"checkpoint.every": 2, "agents.digits.learning_rate": "1e-4"}; texts are converted to
            the field's type.

    Raises:
        ConfigError: one line per problem, each naming the field, what it got and what it wants.
    """
    path = find_recipe(str(recipe))
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for name, value in (overrides or {}).items():
        _set(tree, name.split("."), value)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(problem, RunConfig) for problem in error.errors(include_url=False)]
        raise ConfigError(f"{path}: " + "\n".join(lines)) from None


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """["--checkpoint.every", "2", "--task.seed=3"] -> {"checkpoint.every": 2, "task.seed": 3}.

    A value is read as TOML where it is TOML (numbers, true, lists, quoted strings) and as text otherwise.

    Raises:
        ConfigError: something that is not a pair of a name and a value.
    """
    overrides: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or len(argument) == 2:
            raise ConfigError(f"command line: expected --FIELD VALUE, got {argument!r}.")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigError(f"command line: --{name} needs a value.")
            value = remaining.pop(0)
        overrides[name.replace("-", "_") if "." not in name else name] = _toml_value(value)
    return overrides


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        branch = tree.setdefault(key, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"{'.'.join(keys)}: {'.'.join(keys[: depth + 1])} is a value, not a section.")
        tree = branch
    tree[keys[-1]] = value


def _explain(problem: Any, root: type[BaseModel]) -> str:
    """One problem as a line that begins with the dotted name of the field."""
    location = [str(part) for part in problem["loc"]]
    name = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _fields_at(root, location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return f"{name}: there is no such field; known here: {', '.join(known)}.{hint}"
    if problem["type"] == "missing":
        return f"{name}: this field is required."
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    shown = "" if isinstance(given, dict) else f", got {given!r}"
    return f"{name}: {message}{shown}." if name else f"{message}."


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    for key in location:
        field = model.model_fields.get(key)
        annotation = field.annotation if field is not None else None
        if annotation is None:  # a key of a table of sections, such as an agent's name
            continue
        arguments = getattr(annotation, "__args__", ())
        candidates = [annotation, *arguments]
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if inner:
            model = inner[0]
    return sorted(model.model_fields)
