"""One agent: policy, tokenizer, optimizer, engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batching import TokenBatch
from .config import AgentConfig, ConfigError
from .engines.transformers import Generated, TransformersEngine, end_token_ids
from .policy import Policy
from .prompting import encode_prompt

TINY_PREFIX = "tiny:"


def resolve_model(name: str, field: str = "model") -> str:
    """Where to load a model from: a shipped agent, a folder, or a hub name.

    Raises:
        ConfigError: a shipped agent or a folder that does not exist.
    """
    if name.startswith(TINY_PREFIX):
        from . import tiny

        try:
            return str(tiny.path(name.removeprefix(TINY_PREFIX)))
        except ValueError as error:
            raise ConfigError(f"{field}: {error}") from None
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{field}: the folder {name} holds no config.json; a model in Hugging Face format has one."
            )
        return str(path)
    # a hub name is "name" or "owner/name": everything else can only have been meant as a path
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise ConfigError(f"{field}: there is no folder {name}.")
    return name


def load_pretrained(name: str, dtype: torch.dtype, device: torch.device, field: str = "model") -> tuple[Any, Any]:
    """(model, tokenizer) by transformers' Auto classes.

    Raises:
        ConfigError: it cannot be found or loaded; the message names the field and the cause.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    source = resolve_model(name, field)
    logging.disable_progress_bar()  # loading a shard is not what a run's progress is about
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ConfigError(f"{field}: cannot load {name!r}: {cause}") from error
    return model.to(device), tokenizer


class Agent:
    """A policy with its own weights, tokenizer, optimizer, reference and engine (no tool-calling agent).

    Attributes:
        end_ids: ids that end a response, from the generation configuration or else the tokenizer; the first is
            appended to responses of other agents.
        updates: optimizer updates done so far: the version of the policy.
        reference: the initial policy, only when a KL term needs it.
    """

    def __init__(
        self,
        name: str,
        config: AgentConfig,
        *,
        temperature: float,
        max_response_length: int,
        device: torch.device,
        with_reference: bool = False,
    ) -> None:
        self.name = name
        self.config = config
        self.max_response_length = max_response_length
        self.device = device
        model, self.tokenizer = load_pretrained(
            config.model, getattr(torch, config.dtype), device, f"agents.{name}.model"
        )
        self.end_ids = end_token_ids(model.generation_config)
        if not self.end_ids and self.tokenizer.eos_token_id is not None:
            self.end_ids = (int(self.tokenizer.eos_token_id),)
        if not self.end_ids:
            raise ConfigError(
                f"agents.{name}.model: {config.model!r} has no end token, neither in its generation configuration "
                "nor in its tokenizer: responses could not end."
            )
        self.reference: Policy | None = None
        if with_reference:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self.reference = Policy(frozen.eval(), temperature)
        # dropout would make the old and the new policy differ at equal weights
        self.policy = Policy(model.eval(), temperature)
        self.engine = TransformersEngine(model, self.end_ids)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        self.updates = 0
        self._prompt_cache: dict[str, list[int]] = {}

    @property
    def model(self) -> Any:
        return self.policy.model

    def prompt_ids(self, question: str) -> list[int]:
        """The agent's own rendering of a prompt."""
        if question not in self._prompt_cache:
            if len(self._prompt_cache) > 65_536:
                self._prompt_cache.clear()
            self._prompt_cache[question] = encode_prompt(
                self.tokenizer,
                question,
                chat_template=self.config.chat_template,
                system=self.config.system,
                template_kwargs=self.config.template_kwargs or None,
            )
        return self._prompt_cache[question]

    def generate(self, questions: Sequence[str], *, samples: int, seed: int, **settings: Any) -> list[list[Generated]]:
        """`samples` responses to each question; see `TransformersEngine.generate`."""
        prompts = [self.prompt_ids(question) for question in questions]
        return self.engine.generate(
            prompts, samples=samples, seed=seed, max_new_tokens=self.max_response_length, **settings
        )

    @torch.no_grad()
    def score(
        self, pairs: Sequence[tuple[list[int], list[int]]], token_budget: int, *, reference: bool = False
    ) -> list[Tensor]:
        """Per-token log-probabilities (float32, on CPU) of (prompt ids, response ids) pairs, in their order.

        The forward is the one of training, so that old and new policy at equal weights have ratio 1.
        """
        policy = self.reference if reference else self.policy
        assert policy is not None
        order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]) - len(pairs[index][1]))
        scored: dict[int, Tensor] = {}
        while order:
            longest = sum(map(len, pairs[order[0]]))
            count = max(1, token_budget // longest)
            chunk, order = order[:count], order[count:]
            batch = TokenBatch.build([pairs[index] for index in chunk], self.device)
            logprobs = policy.logprobs(batch).float().cpu()
            parts = logprobs.split([len(pairs[index][1]) for index in chunk])
            scored.update(zip(chunk, parts, strict=True))
        return [scored[index] for index in range(len(pairs))]

    def optimizer_step(self) -> float:
        """Clips the gradient, updates the weights, and returns the gradient's norm before clipping.

        An update without any gradient (every sequence dead) leaves weights and optimizer as they are.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if not parameters:
            return 0.0
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        if math.isfinite(norm) and norm > 0:
            rise = min(1.0, (self.updates + 1) / max(self.config.warmup_updates, 1))
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.learning_rate * rise
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def save_pretrained(self, folder: Path) -> None:
        """Model and tokenizer in Hugging Face format."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
