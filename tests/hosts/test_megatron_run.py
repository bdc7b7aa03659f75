"""``ds_kfac.run --megatron``: flags and the optimizer of a script that knows nothing of K-FAC.

Modules that stand in for ``megatron.training`` show what is registered and wrapped, and nothing of
Megatron's behaviour. A real checkout is used where ``DS_KFAC_MEGATRON_LM`` names one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("DS_KFAC_MEGATRON_LM")
STAND_INS = {
    "__init__.py": """
ARGS = None
def get_args(): return ARGS
def print_rank_0(text): print(text)
""",
    "arguments.py": """
import argparse
def add_megatron_arguments(parser):
    parser.add_argument("--lr", type=float)
    for name in ("--save", "--ckpt-format"):
        parser.add_argument(name)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    return parser
def parse_args():
    import megatron.training as training
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    training.ARGS = parser.parse_args()
""",
    "training.py": """
def get_megatron_optimizer(config, model_chunks):
    return "megatron's optimizer"
def get_megatron_muon_optimizer(config, model_chunks):
    return "megatron's muon"
""",
}
SCRIPT = """
import sys, types
from megatron.training import arguments, get_args, training

class Told:
    def coverage(self): return "told"

def attach(chunks, optimizer, config):
    print("attached", chunks, optimizer, config.damping)
    return Told()

sys.modules["ds_kfac.hosts.megatron"] = types.SimpleNamespace(attach=attach)  # needs torch
arguments.parse_args()
print("lr", get_args().lr)
if len(sys.argv) > 1 and "MUON" in __import__("os").environ:
    training.get_megatron_muon_optimizer("config", ["chunk"])
print(training.get_megatron_optimizer("config", ["chunk"]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    for name, content in STAND_INS.items():
        (package / name).write_text(content)
    path = tmp_path / "examples" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds_kfac.run", "--megatron", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_the_switch_the_script_runs_as_it_is(script: Path) -> None:
    done = run(str(script), "--lr", "0.5")
    assert done.stdout.splitlines() == ["lr 0.5", "megatron's optimizer"], done.stderr


def test_flags_stand_beside_megatrons_and_reach_attach(script: Path) -> None:
    done = run(str(script), "--lr", "0.5", "--kfac", "--kfac-damping", "0.25")
    assert done.stdout.splitlines() == [
        "lr 0.5",
        "attached ['chunk'] megatron's optimizer 0.25",
        "ds_kfac: told",
        "megatron's optimizer",
    ], done.stderr


def test_the_scripts_help_shows_them(script: Path) -> None:
    text = run(str(script), "--help").stdout
    assert "--lr" in text and "--kfac-damping" in text and "preconditioning" in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--kfac", "--kfac-damping", "-1"], "damping"),
        (["--kfac-damping", "1"], "--kfac-damping without --kfac"),
        (["--kfac", "--kfac-dampin", "1"], "unrecognized arguments"),
    ],
)
def test_wrong_flags_stop_before_a_model_is_built(
    script: Path, words: list[str], problem: str
) -> None:
    done = run(str(script), *words)
    assert done.returncode != 0 and problem in done.stderr
    assert "lr" not in done.stdout


def test_muon_is_refused_not_ignored(script: Path) -> None:
    done = run(str(script), "--kfac", MUON="1")
    assert done.returncode != 0 and "leave out --kfac" in done.stderr


def test_a_format_that_would_lose_state_is_refused(script: Path) -> None:
    words = ("--kfac", "--save", "x", "--ckpt-format", "torch", "--data-parallel-size")
    assert run(str(script), *words, "1").returncode == 0
    done = run(str(script), *words, "2")
    assert done.returncode != 0 and "use --ckpt-format torch_dist" in done.stderr


def test_a_script_outside_of_a_checkout_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("")
    done = run(str(path))
    assert done.returncode == 2
    assert "no folder above it has megatron/training" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_version_without_the_function_is_named(script: Path) -> None:
    (script.parents[1] / "megatron" / "training" / "training.py").write_text("")
    done = run(str(script))
    assert done.returncode == 2
    assert "no megatron.training.training.get_megatron_optimizer" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="DS_KFAC_MEGATRON_LM names no Megatron-LM checkout")
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_the_real_script_trains_with_kfac(tmp_path: Path) -> None:
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 4 "
        "--lr 1e-2 --transformer-impl local --distributed-backend gloo --no-rope-fusion "
        "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
        "--eval-iters 1 --eval-interval 1000 --log-interval 1 --num-workers 0 --mock-data "
        "--no-create-attention-mask-in-dataloader --tokenizer-type NullTokenizer --vocab-size 255 "
        "--kfac --kfac-factor-update-steps 1 --kfac-inv-update-steps 2"
    ).split()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m"]
        + ["launch.megatron_on_cpu", "-m", "ds_kfac.run"]
        + ["--megatron", f"{CHECKOUT}/pretrain_gpt.py", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout + done.stderr)]
    assert done.returncode == 0, done.stderr[-4000:]
    assert "K-FAC preconditions 8 layers" in done.stdout + done.stderr
    assert len(losses) == 4 and losses[-1] < losses[0]
