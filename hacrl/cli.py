"""The command line: hacrl train, evaluate, plot."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .config import AgentConfig, ConfigError, RunConfig, load_config, parse_overrides, recipes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hacrl", description="Train several language models together on verifiable tasks, sharing their rollouts."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train the agents of a recipe",
        description="Train the agents of a recipe. Any field of the configuration can be set by its dotted name, for "
        "example --checkpoint.every 2 or --agents.digits.learning_rate 1e-4.",
    )
    train.add_argument("recipe", help=f"a .toml file or one of: {', '.join(recipes())}")
    train.add_argument("--output", type=Path, help="run folder (default: runs/RECIPE-TIME)")
    train.add_argument("--resume", action="store_true", help="continue the run in --output from its last checkpoint")
    evaluate = commands.add_parser(
        "evaluate",
        help="accuracy of models on the held-out problems of a recipe",
        description="Accuracy of models on the held-out problems of a recipe or of a run's config.toml.",
    )
    evaluate.add_argument("recipe", help="a .toml file or the name of a recipe: it gives task and sampling settings")
    evaluate.add_argument("models", nargs="+", help="folders in Hugging Face format, hub names, or tiny:NAME")
    evaluate.add_argument(
        "--samples", type=int, default=0, help="also sample N responses a problem: avg@N, best@N, pass@1"
    )
    plot = commands.add_parser("plot", help="learning curves of one or more run folders")
    plot.add_argument("runs", nargs="+", type=Path)
    plot.add_argument("--to", type=Path, help="figure file (default: plots/learning_curves.png of the first run)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. A configuration that cannot be used gives one paragraph and status 2."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    try:
        if arguments.command == "train":
            return _train(arguments, rest)
        if arguments.command == "evaluate":
            return _evaluate(arguments, rest)
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return _plot(arguments)
    except ConfigError as error:
        print(f"hacrl {arguments.command}: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(f"hacrl {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hacrl {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _train(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    overrides = parse_overrides(rest)
    output: Path | None = arguments.output
    recipe: str | Path = arguments.recipe
    if arguments.resume:
        if output is None:
            raise ConfigError("--resume needs --output: the run folder to continue.")
        # the run's own configuration, so that what it was started with need not be repeated
        if (output / "config.toml").is_file():
            recipe = output / "config.toml"
    config = load_config(recipe, overrides)
    if output is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        output = Path(config.output or f"runs/{Path(str(arguments.recipe)).stem}-{stamp}")
    from .run import train

    train(config.model_copy(update={"output": str(output)}), output, resume=arguments.resume)
    return 0


def _evaluate(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    config = load_config(arguments.recipe, parse_overrides(rest))
    if arguments.samples < 0:
        raise ConfigError(f"--samples must be >= 0, got {arguments.samples}.")
    from .evaluate import average_at_k, best_at_k, evaluate_rewards, pass_at_k
    from .rewards import Scorer
    from .run import build_agent, build_tasks

    _, held_out = build_tasks(config)
    size, batch_size = config.evaluation.size, config.sampling.batch_size
    with Scorer(held_out.score, config.task.workers, config.task.timeout) as scorer:
        for name in arguments.models:
            agent = build_agent(config, name, _settings_of(config, name))
            greedy = average_at_k(evaluate_rewards(agent, held_out, scorer, size, batch_size))
            line = f"{name}: greedy {greedy:.3f}"
            if arguments.samples:
                rewards = evaluate_rewards(
                    agent, held_out, scorer, size, batch_size, samples=arguments.samples,
                    temperature=config.sampling.temperature, seed=config.seed,
                )  # fmt: skip
                line += f", avg@{arguments.samples} {average_at_k(rewards):.3f}"
                line += f", best@{arguments.samples} {best_at_k(rewards):.3f}, pass@1 {pass_at_k(rewards, 1):.3f}"
            print(f"{line} ({size} problems)")
    return 0


def _settings_of(config: RunConfig, model: str) -> AgentConfig:
    """How a model is prompted: as the agent of the recipe that has its name or its weights, else by the defaults."""
    for name, agent in config.agents.items():
        if model == agent.model or Path(model).name == name:
            return agent.model_copy(update={"model": model})
    return AgentConfig(model=model)


def _plot(arguments: argparse.Namespace) -> int:
    from .plots import learning_curves

    target = arguments.to or arguments.runs[0] / "plots" / "learning_curves.png"
    print(learning_curves(arguments.runs, target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
