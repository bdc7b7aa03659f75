"""Packaging of ds_kfac; the settings of the development tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

VERSION = "0.1.0"

DEEPSPEED = ["deepspeed>=0.19"]
# The training script draws with matplotlib and shows its progress with tqdm.
PLOTS = ["matplotlib>=3.8", "tqdm>=4.66"]
MEGATRON = ["megatron-core>=0.14"]
HUGGING_FACE = ["accelerate>=1", "transformers>=4.50"]
TOOLS = ["hypothesis>=6.100", "mypy>=1.11", "numpy>=1.26", "peft>=0.13", "pytest>=8.2", "ruff>=0.6"]

README = Path(__file__).parent / "README.md"

setup(
    name="ds_kfac",
    version=VERSION,
    description="Distributed K-FAC for models trained with DeepSpeed or plain PyTorch",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["ds_kfac", "ds_kfac.*"]),
    package_data={"ds_kfac": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["pydantic>=2", "safetensors>=0.4", "torch>=2.4"],
    # NVIDIA Apex is used where it is installed, but never required here: the package of that
    # name on the registry is an unrelated project.
    extras_require={
        "deepspeed": DEEPSPEED,
        "hugging_face": HUGGING_FACE,
        "megatron": MEGATRON,
        "plots": PLOTS,
        "dev": [*DEEPSPEED, *MEGATRON, *PLOTS, *HUGGING_FACE, *TOOLS],
    },
    entry_points={"console_scripts": ["ds-kfac = ds_kfac.cli.__main__:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
