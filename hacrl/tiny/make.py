"""Build the two tiny agents: `python -m hacrl.tiny.make --output DIR [--seed N]`.

Both agents are trained from scratch on worked chains (`hacrl.tiny.chain`), with the loss on the response only, and both
stop as soon as their averaged weights reach the target accuracy. Multiplications by large numbers are rare in training
problems, so that both agents are sure of the same facts and unsure of the same others: an agent that solves about half
of the problems has mixed groups, and two agents that are unsure of the same things assign similar probabilities to
each other's responses, which sharing rollouts needs. The same seed, machine and library versions give the same files.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hacrl.tiny.chain import OPERATORS, ChainModConfig, ChainModDataset, Problem, work_out

# Seeds of the problems that measure accuracy; training problems come from streams of their own.
STOP_SEED = 90_001
REPORT_SEED = 90_002

# The default of 0.02 suits wide models; at width 64 it leaves attention flat and learning takes several times longer.
INITIALIZER_RANGE = 0.1

DIGITS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'A:' + message['content'] + eos_token }}"
    "{% else %}{{ 'Q:' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)

PAIRS_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """How an agent is warmed up.

    Training has two phases. In the first the learning rate is high and the loss falls steeply. Below `turn_loss` the
    second begins: a low learning rate and averaged weights, until the average reaches the target. A model stopped in
    the steep phase would be unsure of everything instead of sure of most facts and ignorant of some.

    Attributes:
        target: greedy accuracy of the averaged weights at which training stops.
        max_steps: optimizer steps after which it stops anyway.
        batch_size: problems in a step.
        num_operations: length of the chains.
        max_operand: operands are drawn from 1 to this number.
        rare_from: multiplications by this number or a larger one are rare in training problems.
        rare_share: how often such a multiplication is drawn relative to any other operation, from 0 to 1.
        learning_rate: of AdamW in the first phase, after `warmup_steps` steps of linear rise.
        warmup_steps: steps of the rise.
        turn_loss: smoothed loss in nats per response at which the second phase begins.
        turn_factor: what the learning rate is multiplied by in the second phase.
        average_decay: decay per step of the exponential moving average of the weights in the second phase.
        check_every: steps of the second phase between two checks of the accuracy.
        check_size: problems in a check.
    """

    target: float = 0.46
    max_steps: int = 4000
    batch_size: int = 64
    num_operations: int = 6
    max_operand: int = 5
    rare_from: int = 3
    rare_share: float = 0.06
    learning_rate: float = 1.5e-3
    warmup_steps: int = 100
    turn_loss: float = 3.0
    turn_factor: float = 0.2
    average_decay: float = 0.98
    check_every: int = 25
    check_size: int = 1024


def _byte_level(merges: list[tuple[str, str]], special_tokens: list[str], specials_first: bool) -> Tokenizer:
    """A byte-level BPE: it has a token for every byte, so that any text survives encoding and decoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [left + right for left, right in merges]
    words = special_tokens + words if specials_first else words + special_tokens
    tokenizer = Tokenizer(BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def digits_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of `digits`: one token per byte, special tokens at the end of the vocabulary, padding of its own."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level([], ["<s>", "</s>", "<pad>"], specials_first=False),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=DIGITS_TEMPLATE,
    )


def pairs_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of `pairs`: two digits are one token, special tokens come first, the end token is also the padding."""
    merges = [(str(tens), str(units)) for tens in range(10) for units in range(10)]
    roles = ["<|user|>", "<|assistant|>", "<|system|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(merges, ["<|end|>", *roles], specials_first=True),
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=roles,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=PAIRS_TEMPLATE,
    )


def digits_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained OLMo 2 for `digits`: norms after attention and MLP, normalised queries and keys."""
    config = Olmo2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Olmo2ForCausalLM(config)


def pairs_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained Qwen3 for `pairs`: normalised queries and keys, shared key heads, embeddings not tied."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


BUILDERS: dict[
    str,
    tuple[Callable[[], PreTrainedTokenizerFast], Callable[[PreTrainedTokenizerFast], PreTrainedModel]],
] = {"digits": (digits_tokenizer, digits_model), "pairs": (pairs_tokenizer, pairs_model)}


def render(tokenizer: PreTrainedTokenizerFast, questions: list[str]) -> list[str]:
    """The prompts of `questions`, as the tokenizer's chat template writes them."""
    # The template is rendered once and filled in: rendering it for every training problem takes longer than a step.
    mark = "QUESTION"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
    )
    before, after = str(prompt).split(mark)
    return [before + question + after for question in questions]


def draw_problem(rng: Random, num_operations: int, max_operand: int, rare_from: int, rare_share: float) -> Problem:
    """Draw a training problem, in which multiplications by large numbers are rare.

    Args:
        rng: source of randomness; advanced.
        num_operations: length of the chain.
        max_operand: largest operand.
        rare_from: smallest operand whose multiplications are rare.
        rare_share: how often such a multiplication is drawn relative to any other operation, from 0 to 1.

    Returns:
        The problem.
    """
    choices = [(operator, operand) for operator in OPERATORS for operand in range(1, max_operand + 1)]
    weights = [rare_share if operator == "*" and operand >= rare_from else 1.0 for operator, operand in choices]
    return work_out(rng.randint(1, max_operand), rng.choices(choices, weights, k=num_operations))


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Training rows of problems of one length.

    Args:
        tokenizer: of the agent.
        problems: all with the same number of tokens, as chains of one length over single-digit operands have.

    Returns:
        Token ids (B, T) int64 of prompt, response and end token, and labels (B, T), which are -100 in the prompt.
    """
    prompts = tokenizer(render(tokenizer, [problem.question for problem in problems]), add_special_tokens=False)
    responses = tokenizer([problem.response for problem in problems], add_special_tokens=False)
    prompt_ids = torch.tensor(prompts["input_ids"])
    response_ids = torch.tensor(responses["input_ids"])
    end = torch.full((len(problems), 1), tokenizer.eos_token_id)
    input_ids = torch.cat([prompt_ids, response_ids, end], dim=1)
    labels = input_ids.clone()
    labels[:, : prompt_ids.shape[1]] = -100
    return input_ids, labels


@torch.no_grad()
def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    size: int,
    num_operations: int = 6,
    max_operand: int = 5,
    sample: bool = False,
) -> float:
    """Share of problems that the agent solves.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        seed: of the dataset.
        size: number of problems.
        num_operations: length of the chains.
        max_operand: largest operand.
        sample: draw at temperature 1 instead of decoding greedily.

    Returns:
        A number from 0 to 1.
    """
    config = ChainModConfig(num_operations=num_operations, max_operand=max_operand, seed=seed, size=size)
    dataset = ChainModDataset(config)
    entries = [dataset[index] for index in range(size)]
    prompts = render(tokenizer, [entry["question"] for entry in entries])
    inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=4 * num_operations,
        do_sample=sample,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(dataset.score_answer(text, entry) for text, entry in zip(texts, entries, strict=True)) / size


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    seed: int,
    report: Callable[[str], None],
) -> PreTrainedModel:
    """Train a model until its averaged weights reach the target accuracy.

    Args:
        model: untrained; it is overwritten.
        tokenizer: its tokenizer.
        recipe: settings of the training.
        seed: of the problems.
        report: called with a line of text at every check.

    Returns:
        A model with the averaged weights.
    """
    rng = Random(f"warm-up:{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    averaged: PreTrainedModel | None = None
    smoothed = float("inf")
    turn = 0
    for step in range(1, recipe.max_steps + 1):
        problems = [
            draw_problem(rng, recipe.num_operations, recipe.max_operand, recipe.rare_from, recipe.rare_share)
            for _ in range(recipe.batch_size)
        ]
        input_ids, labels = encode(tokenizer, problems)
        rate = recipe.learning_rate * min(1.0, step / recipe.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate if averaged is None else rate * recipe.turn_factor
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # Per response and not per token: then the turn comes at the same skill whatever the tokenizer.
        response_loss = loss.item() * int((labels[0] != -100).sum())
        smoothed = response_loss if step == 1 else 0.9 * smoothed + 0.1 * response_loss
        if averaged is None:
            if step % 100 == 0:
                report(f"step {step} loss {smoothed:.2f} nats per response ({time.monotonic() - start:.0f} s)")
            if smoothed < recipe.turn_loss:
                averaged, turn = copy.deepcopy(model).eval(), step
            continue
        with torch.no_grad():
            for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 1 - recipe.average_decay)
        if (step - turn) % recipe.check_every == 0:
            solved = accuracy(
                averaged,
                tokenizer,
                seed=STOP_SEED,
                size=recipe.check_size,
                num_operations=recipe.num_operations,
                max_operand=recipe.max_operand,
            )
            report(
                f"step {step} loss {smoothed:.2f} nats per response, accuracy of the average {solved:.3f} "
                f"({time.monotonic() - start:.0f} s)"
            )
            if solved >= recipe.target:
                break
    return model.eval() if averaged is None else averaged


def make(name: str, folder: Path, recipe: Recipe, seed: int, report: Callable[[str], None]) -> None:
    """Build, train and save one agent.

    Args:
        name: a key of `BUILDERS`.
        folder: where model, tokenizer and generation settings go; made if missing.
        recipe: settings of the training.
        seed: of weights and problems.
        report: called with lines of text about the progress.
    """
    build_tokenizer, build_model = BUILDERS[name]
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    report(f"{name}: {sum(weight.numel() for weight in model.parameters())} parameters")
    model = warm_up(model, tokenizer, recipe, seed, lambda line: report(f"{name}: {line}"))
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for sample in (False, True):
        solved = accuracy(
            model,
            tokenizer,
            seed=REPORT_SEED,
            size=1000,
            num_operations=recipe.num_operations,
            max_operand=recipe.max_operand,
            sample=sample,
        )
        report(f"{name}: held-out accuracy {solved:.3f} {'at temperature 1' if sample else 'greedy'}")


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m hacrl.tiny.make", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that gets one folder per agent")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and training problems")
    parser.add_argument("--only", choices=sorted(BUILDERS), help="build one agent")
    parser.add_argument("--target", type=float, default=Recipe.target, help="greedy accuracy at which training stops")
    parser.add_argument("--max-steps", type=int, default=Recipe.max_steps, help="training stops here at the latest")
    parser.add_argument("--rare-share", type=float, default=Recipe.rare_share, help="weight of the rare facts")
    options = parser.parse_args(arguments)
    # With one thread the order of every sum is fixed, and so are the files.
    torch.set_num_threads(1)
    recipe = Recipe(target=options.target, max_steps=options.max_steps, rare_share=options.rare_share)
    for name in [options.only] if options.only else sorted(BUILDERS):
        make(name, options.output / name, recipe, options.seed, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
