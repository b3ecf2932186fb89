"""Two small trained agents that ship with the package, and what made them.

`digits` (an OLMo 2) reads single characters, `pairs` (a Qwen3) reads two digits at a time: different architectures,
vocabularies, special tokens and chat templates, for the same task (`hacrl.tiny.chain`). Each folder is an ordinary
`save_pretrained` folder for `AutoModelForCausalLM` and `AutoTokenizer`. `python -m hacrl.tiny.make` builds them.
"""

from pathlib import Path

NAMES: tuple[str, ...] = ("digits", "pairs")

__all__ = ["NAMES", "path"]


def path(name: str) -> Path:
    """Folder of the shipped agent called `name`.

    Args:
        name: one of `NAMES`.

    Returns:
        The folder that `from_pretrained` reads.

    Raises:
        ValueError: there is no shipped agent of that name.
    """
    if name not in NAMES:
        raise ValueError(f"path: name must be one of {', '.join(NAMES)}, got {name!r}.")
    return Path(__file__).resolve().parent / name
