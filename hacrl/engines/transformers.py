"""The default engine: transformers' own `generate`, with the agent's weights as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..seeding import derive_seed, seeded


@dataclass(frozen=True)
class Generated:
    """One sampled response: its ids, the end token included when `finished`."""

    ids: list[int]
    finished: bool


def end_token_ids(generation_config: Any) -> tuple[int, ...]:
    """The end tokens of a generation configuration, which holds an int, a list or None."""
    ids = generation_config.eos_token_id
    if ids is None:
        return ()
    return (int(ids),) if isinstance(ids, int) else tuple(int(token) for token in ids)


def cut_at_end(ids: Sequence[int], end_ids: Sequence[int]) -> Generated:
    """A generated row up to its first end token.

    The length comes from the end token, never from the padding id, which may be the same token.
    """
    for position, token in enumerate(ids):
        if token in end_ids:
            return Generated(list(ids[: position + 1]), True)
    return Generated(list(ids), False)


class TransformersEngine:
    """Samples with `model.generate`; nothing needs to be synchronised after an update."""

    def __init__(self, model: Any, end_ids: Sequence[int]) -> None:
        self.model = model
        self.end_ids = tuple(end_ids)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        samples: int,
        seed: int,
        max_new_tokens: int,
        batch_size: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        greedy: bool = False,
    ) -> list[list[Generated]]:
        """`samples` responses to each prompt, in the prompts' order.

        Args:
            prompts: ids of each prompt, at least one id each.
            samples: responses per prompt.
            seed: the same seed, prompts and weights give the same responses.
            batch_size: responses generated at once; the prompts are split accordingly.
            greedy: take the most probable token instead of sampling.
        """
        per_batch = max(1, batch_size // samples)
        result: list[list[Generated]] = []
        training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(prompts), per_batch):
                chunk = prompts[start : start + per_batch]
                with seeded(derive_seed(seed, "batch", start), self.model.device):
                    rows = self._generate(chunk, samples, max_new_tokens, temperature, top_p, top_k, greedy)
                for index in range(len(chunk)):
                    group = rows[index * samples : (index + 1) * samples]
                    result.append([cut_at_end(row, self.end_ids) for row in group])
        finally:
            self.model.train(training)
        return result

    def _generate(
        self,
        prompts: Sequence[list[int]],
        samples: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        greedy: bool,
    ) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        # an id that fills the left; the attention mask keeps it out whatever it is
        filler = self.end_ids[0] if self.end_ids else 0
        input_ids = torch.full((len(prompts), width), filler)
        attention_mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for index, prompt in enumerate(prompts):
            input_ids[index, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[index, width - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if not greedy:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        output = self.model.generate(
            input_ids=input_ids.to(self.model.device),
            attention_mask=attention_mask.to(self.model.device),
            num_return_sequences=samples,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self.end_ids) or None,
            pad_token_id=filler,
            **sampling,
        )
        rows: list[list[int]] = output[:, width:].tolist()
        return rows
