"""Algorithm 1 of HACPO (arXiv 2603.02604), top to bottom: sample, score, capability, advantages, update every agent."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .advantage import group_advantages, unit_omega
from .agent import Agent
from .batching import Sample, micro_batches, reaches_model, split_updates, to_tensors
from .capability import CapabilityTracker
from .config import RunConfig
from .evaluate import greedy_accuracy
from .reencode import Reencoded, ReencodeReport, reencode
from .rewards import Scorer
from .rollout import Rollout, RolloutPool
from .seeding import derive_seed
from .tasks import Task
from .tokenization import response_text

Metrics = dict[str, Any]


@dataclass(slots=True)
class View:
    """What one learner makes of a step's responses.

    Attributes:
        rows: (rollout, advantage) of every scored response that the learner may use, groups in the pool's order.
        excluded: cross responses that have no ids in the learner's vocabulary.
    """

    rows: list[tuple[Rollout, float]] = field(default_factory=list)
    ids: dict[int, Reencoded] = field(default_factory=dict)
    excluded: int = 0


class Trainer:
    """Trains the agents of a run together. It holds no knowledge of how many there are."""

    def __init__(self, config: RunConfig, agents: Mapping[str, Agent], task: Task, held_out: Task) -> None:
        self.config = config
        self.agents = dict(agents)
        self.task = task
        self.held_out = held_out
        self.objective = config.objective.build()
        self.capability = CapabilityTracker(list(self.agents), config.capability.window, config.capability.warmup_steps)
        cap = config.objective.baseline_cap
        self.baseline_cap = task.reward_max if cap == "reward_max" else None if cap == "none" else float(cap)
        self.scorer = Scorer(task.score, config.task.workers, config.task.timeout)
        self.report = ReencodeReport()
        self.step_index = 0  # steps done

    def close(self) -> None:
        """Ends the scoring processes."""
        self.scorer.close()

    # One step -----------------------------------------------------------------------------------------------------

    def step(self) -> Metrics:
        """One step of Algorithm 1; returns its line of metrics."""
        step, clock = self.step_index, _Clock()
        self.report = ReencodeReport()
        with clock("sample"):
            pool = self.sample(step)
        with clock("score"):
            self.score(pool)
        self.capability.update(pool.mean_rewards(list(self.agents)))
        with clock("update"):
            views = {name: self.view(pool, agent) for name, agent in self.agents.items()}
            # before any update: old policies are those of the start of the step, for every learner
            self.record_source_logprobs(views)
            metrics = {name: self.update(agent, views[name], step) for name, agent in self.agents.items()}
        self.step_index += 1
        for name, numbers in metrics.items():
            own = [rollout for rollout in pool if rollout.source == name]
            scored = [rollout.reward for rollout in own if rollout.reward is not None]
            numbers["reward"] = math.fsum(scored) / len(scored) if scored else math.nan
            numbers["capability"] = self.capability.capability(name)
            numbers["response_length"] = sum(len(rollout.ids) for rollout in own) / len(own)
            numbers["truncated"] = sum(not rollout.finished for rollout in own) / len(own)
            numbers["unscored"] = len(own) - len(scored)
        sampled = sum(len(rollout.ids) for rollout in pool)
        updated = sum(numbers.pop("tokens") for numbers in metrics.values())
        return {
            "step": self.step_index,
            "agents": metrics,
            "seconds": clock.seconds,
            "tokens": {"sample": sampled, "update": updated},
            "reencode": self.report.metrics(),
        }

    def prompt_indices(self, step: int) -> list[int]:
        """Positions of a step's prompts in the task: every prompt once an epoch, in an order set by the seed."""
        count, size = self.config.update.prompts_per_step, len(self.task)
        # the rest of an epoch is left out: a step that mixed two epochs could hold a prompt twice
        per_epoch = size // count
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(derive_seed(self.config.seed, "order", epoch))
        order = torch.randperm(size, generator=generator)
        return order[place * count : (place + 1) * count].tolist()

    def sample(self, step: int) -> RolloutPool:
        """Every agent's responses to the step's prompts, by its policy of the start of the step."""
        settings = self.config.sampling
        prompts = [self.task.prompt(index) for index in self.prompt_indices(step)]
        pool = RolloutPool()
        for name, agent in self.agents.items():
            generated = agent.generate(
                [prompt.question for prompt in prompts],
                samples=settings.group_size,
                seed=derive_seed(self.config.seed, "sample", name, step),
                batch_size=settings.batch_size,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
            )
            pool.extend(
                Rollout(
                    prompt=prompt,
                    source=name,
                    policy_version=agent.updates,
                    ids=response.ids,
                    text=response_text(agent.tokenizer, response.ids, agent.end_ids),
                    finished=response.finished,
                )
                for prompt, group in zip(prompts, generated, strict=True)
                for response in group
            )
        return pool

    def score(self, pool: RolloutPool) -> None:
        """Fills in the rewards; a response that cannot be scored keeps None and the reason."""
        scores = self.scorer.score([(rollout.text, rollout.prompt.entry) for rollout in pool])
        for rollout, score in zip(pool, scores, strict=True):
            rollout.reward, rollout.reward_error = score.reward, score.error

    # What a learner sees ------------------------------------------------------------------------------------------

    def view(self, pool: RolloutPool, learner: Agent) -> View:
        """The responses that a learner uses, with its advantages, and its ids of the others' responses."""
        view = View()
        objective = self.config.objective
        omega = self.capability.omega if objective.method == "hacpo" else unit_omega
        for group in pool.groups():
            used = [r for r in group if objective.shares or r.source == learner.name]
            advantages = group_advantages(
                [rollout.reward for rollout in used],
                [rollout.source for rollout in used],
                learner.name,
                omega,
                cross_baseline=objective.cross_baseline,
                baseline_cap=self.baseline_cap,
            )
            for rollout, advantage in zip(used, advantages, strict=True):
                if advantage is None or not rollout.ids:
                    continue
                if rollout.source != learner.name:
                    encoded = self._reencode(rollout, learner)
                    if encoded.ids is None:
                        view.excluded += 1
                        continue
                    view.ids[id(rollout)] = encoded
                view.rows.append((rollout, advantage))
        return view

    def _reencode(self, rollout: Rollout, learner: Agent) -> Reencoded:
        source = self.agents[rollout.source]
        encoded = reencode(
            rollout,
            source.tokenizer,
            learner.tokenizer,
            learner.max_response_length,
            source_end_ids=source.end_ids,
            learner_end_id=learner.end_ids[0],
        )
        self.report.add(rollout, learner.name, encoded)
        return encoded

    def record_source_logprobs(self, views: Mapping[str, View]) -> None:
        """Every source scores its own responses with its training forward, before any update of the step.

        Responses that reach no model (advantage 0 for every learner, and no KL term) are left out.
        """
        token_ratio = self.objective.ratio == "token"
        needed: dict[int, Rollout] = {}
        for learner, view in views.items():
            for rollout, advantage in view.rows:
                if advantage != 0 or (self.objective.beta > 0 and rollout.source == learner):
                    needed[id(rollout)] = rollout
        for name, agent in self.agents.items():
            rollouts = [rollout for rollout in needed.values() if rollout.source == name]
            pairs = [(agent.prompt_ids(rollout.prompt.question), rollout.ids) for rollout in rollouts]
            scored = agent.score(pairs, self.config.update.tokens_per_micro_batch)
            for rollout, logprobs in zip(rollouts, scored, strict=True):
                rollout.source_mean_logprob = float(logprobs.double().mean())
                if token_ratio:
                    rollout.old_logprobs = logprobs

    def samples(self, agent: Agent, view: View) -> list[Sample]:
        """The learner's rows as samples, reference log-probabilities included where a KL term needs them."""
        source_length = self.config.objective.ratio_length == "source"
        hacpo = self.config.objective.method == "hacpo"
        samples = []
        for rollout, advantage in view.rows:
            is_cross = rollout.source != agent.name
            ids = view.ids[id(rollout)].ids if is_cross else rollout.ids
            assert ids is not None
            samples.append(
                Sample(
                    prompt_index=rollout.prompt.index,
                    prompt_ids=agent.prompt_ids(rollout.prompt.question),
                    response_ids=ids,
                    is_cross=is_cross,
                    advantage=advantage,
                    # source over learner: a stronger source's responses weigh more
                    weight=self.capability.omega(rollout.source, agent.name) if is_cross and hacpo else 1.0,
                    source_mean_logprob=rollout.source_mean_logprob or 0.0,
                    length=len(rollout.ids) if source_length else len(ids),
                    old_logprobs=rollout.old_logprobs,
                )
            )
        if self.objective.beta > 0:
            own = [sample for sample in samples if not sample.is_cross]
            pairs = [(sample.prompt_ids, sample.response_ids) for sample in own]
            scored = agent.score(pairs, self.config.update.tokens_per_micro_batch, reference=True)
            for sample, logprobs in zip(own, scored, strict=True):
                sample.ref_logprobs = logprobs
        return samples

    # Updating one learner -----------------------------------------------------------------------------------------

    def update(self, agent: Agent, view: View, step: int) -> Metrics:
        """The updates u = 0, 1, ... of one learner, and their metrics."""
        samples = self.samples(agent, view)
        totals = _Totals()
        if samples:
            updates = min(self.config.update.updates_per_step, len({sample.prompt_index for sample in samples}))
            seed = derive_seed(self.config.seed, "split", agent.name, step)
            for update_index, part in enumerate(split_updates(samples, updates, seed)):
                self._one_update(agent, part, update_index, totals)
        return {**totals.metrics(), "cross_excluded": view.excluded}

    def _one_update(self, agent: Agent, samples: Sequence[Sample], update_index: int, totals: _Totals) -> None:
        # counts of the whole update, dead sequences included: the split into micro-batches changes nothing
        num_self = sum(not sample.is_cross for sample in samples)
        live = [sample for sample in samples if reaches_model(sample, self.objective.beta)]
        totals.add_dead(samples, live)
        loss = torch.zeros((), device=agent.device)
        for group in micro_batches(live, self.config.update.tokens_per_micro_batch):
            batch, sequences = to_tensors(
                group,
                agent.device,
                with_ref=self.objective.beta > 0,
                with_old=self.objective.ratio == "token",
            )
            out = agent.policy.loss(
                batch,
                sequences,
                self.objective,
                update_index=update_index,
                num_sequences=len(samples),
                num_self_sequences=num_self,
            )
            out.loss.backward()
            loss += out.loss.detach()
            totals.add(group, out.ratios.cpu(), out.live.cpu(), batch.input_ids.numel())
        totals.add_update(float(loss), agent.optimizer_step())

    # Around the steps ---------------------------------------------------------------------------------------------

    def evaluate(self) -> Metrics:
        """Greedy accuracy of every agent on the held-out problems."""
        evaluation = {
            name: greedy_accuracy(
                agent, self.held_out, self.scorer, self.config.evaluation.size, self.config.sampling.batch_size
            )
            for name, agent in self.agents.items()
        }
        return {"step": self.step_index, "eval": evaluation}


class _Clock:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class _Totals:
    """Sums over the updates of a step, per kind of sequence."""

    def __init__(self) -> None:
        self.ratios: dict[str, list[float]] = {"self": [], "cross": []}
        self.clipped = {"self": 0, "cross": 0}
        self.sequences = {"self": 0, "cross": 0}
        self.dead = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.tokens = 0
        self.skipped = 0

    def add_dead(self, samples: Sequence[Sample], live: Sequence[Sample]) -> None:
        for sample in samples:
            self.sequences["cross" if sample.is_cross else "self"] += 1
        self.dead += len(samples) - len(live)

    def add(self, group: Sequence[Sample], ratios: Tensor, live: Tensor, tokens: int) -> None:
        self.tokens += tokens
        for sample, ratio, is_live in zip(group, ratios.tolist(), live.tolist(), strict=True):
            kind = "cross" if sample.is_cross else "self"
            self.dead += not is_live
            if sample.advantage != 0:
                self.ratios[kind].append(ratio)
                self.clipped[kind] += not is_live

    def add_update(self, loss: float, norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self.skipped += norm == 0.0 or not math.isfinite(norm)

    def metrics(self) -> Metrics:
        """Means over the step; NaN where there was nothing of a kind."""

        def mean(values: Sequence[float]) -> float:
            return math.fsum(values) / len(values) if values else math.nan

        total = sum(self.sequences.values())
        metrics: Metrics = {"loss": mean(self.losses), "grad_norm": mean(self.norms)}
        for kind, ratios in self.ratios.items():
            metrics[f"ratio_{kind}_mean"] = mean(ratios)
            metrics[f"ratio_{kind}_min"] = min(ratios, default=math.nan)
            metrics[f"ratio_{kind}_max"] = max(ratios, default=math.nan)
            count = self.sequences[kind]
            metrics[f"clipped_{kind}"] = self.clipped[kind] / count if count else math.nan
        metrics["dead"] = self.dead / total if total else math.nan
        metrics["sequences"] = total
        metrics["updates_skipped"] = self.skipped
        metrics["tokens"] = self.tokens
        return metrics
