"""A DeepSpeed script whose author has never heard of K-FAC: trains and writes what it saw.

Usage: user_script.py OUT_FOLDER [--imported] --deepspeed --deepspeed_config FILE
"""

import argparse
import collections
import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # read while DeepSpeed is imported

import deepspeed
import deepspeed.ops
import torch
from deepspeed import initialize

deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)  # nothing is compiled


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--imported", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    start = initialize if args.imported else deepspeed.initialize
    engine, _, _, _ = start(args=args, model=model, model_parameters=model.parameters())
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(args.local_rank))
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
    kfac = getattr(engine, "kfac", None)
    report = {
        "argv": sys.argv,
        "local_rank": args.local_rank,
        "accelerator": deepspeed.get_accelerator().device_name(),
        "kfac_steps": None if kfac is None else kfac.counters.steps,
        "layers": None if kfac is None else [spec.name for spec in kfac.layers.layers],
        "optimizer": type(engine.basic_optimizer).__name__,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    }
    (args.out / f"rank{deepspeed.comm.get_rank()}.json").write_text(json.dumps(report))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
