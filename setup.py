"""Packages, dependencies and extras. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (root / "hacpo_kernels" / "__init__.py").read_text())[1]

setup(
    name="hacrl",
    version=version,
    description="Collaborative RL for LLMs: fused HACPO loss kernels and a thin multi-agent trainer",
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["hacpo_kernels*", "hacrl*"]),
    package_data={"hacrl": ["recipes/*.toml", "tiny/*/*"], "hacpo_kernels": ["py.typed"]},
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",
        "numpy",
        "transformers>=5.0,<6",
        "reasoning-gym>=0.1.25",
        "pydantic>=2.11",
        "rich>=13",
        "matplotlib",
        "tomli-w",
    ],
    extras_require={
        "flash-attn": ["flash-attn"],
        "liger": ["liger-kernel>=0.8"],
        "lora": ["peft>=0.17"],
        "math": ["math-verify>=0.9"],
        "test": [
            "pytest>=8",
            "pytest-benchmark",
            "pytest-cov",
            "pytest-xdist",
            "hypothesis",
            "peft>=0.17",
            "ruff",
            "mypy",
            "import-linter",
        ],
    },
    entry_points={"console_scripts": ["hacrl = hacrl.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Operating System :: OS Independent",
    ],
)
