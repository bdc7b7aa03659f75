r"""Train a small GPT-2 or Llama with Hugging Face's Trainer; nothing here knows of K-FAC.

The same command with and without K-FAC, as the JSON says:

    deepspeed --num_gpus 2 --module ds_kfac.run launch/hf_trainer.py \
        --deepspeed configs/hf_kfac.json
    deepspeed --num_gpus 2 --module ds_kfac.run launch/hf_trainer.py \
        --deepspeed configs/hf_adamw.json

Draw the runs made so far:

    python launch/hf_trainer.py --plot runs/hf_adamw runs/hf_kfac
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

from launch import cpu  # noqa: E402

cpu.prepare_environment()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from launch import data, hf_curves  # noqa: E402

BYTES = 256


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--deepspeed", type=Path, help="DeepSpeed JSON")
    cli.add_argument("--model", choices=("gpt2", "llama"), default="gpt2", help="(gpt2)")
    cli.add_argument("--steps", type=int, default=200, help="optimizer steps (200)")
    cli.add_argument("--seq-len", type=int, default=64, help="bytes per sequence (64)")
    cli.add_argument("--width", type=int, default=64, help="model dimension (64)")
    cli.add_argument("--layers", type=int, default=2, help="transformer blocks (2)")
    cli.add_argument("--lr", type=float, default=3e-3, help='what "auto" becomes (3e-3)')
    cli.add_argument("--batch", type=int, default=8, help="sequences per rank and pass (8)")
    cli.add_argument("--accumulation", type=int, default=1, help="passes per step (1)")
    cli.add_argument("--save-steps", type=int, default=0, help="between checkpoints (0: none)")
    cli.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    cli.add_argument("--text", type=Path, help="file or folder (the standard library's sources)")
    cli.add_argument("--out", type=Path, help="output folder (runs/NAME_OF_THE_JSON)")
    cli.add_argument("--plot", type=Path, nargs="+", help="draw these output folders and stop")
    cli.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return cli


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Byte sequences of a text, drawn at random but the same in every run.

    Args:
        text: [bytes] uint8.
        seq_len: Bytes per sequence.
        count: Sequences.
    """

    def __init__(self, text: Tensor, *, seq_len: int, count: int) -> None:
        self._batches = data.Batches(text, seq_len, count, seed=0)
        self._rows = next(self._batches.micro_batches(0, rank=0, world=1, count=1))[0]

    def __len__(self) -> int:
        """Sequences."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tokens; the model shifts the labels itself."""
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def build_model(kind: str, *, width: int, layers: int, seq_len: int) -> Any:
    """An untrained model from a configuration: GPT-2 (Conv1D layers) or Llama (Linear layers)."""
    import transformers

    heads = max(1, width // 32)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=BYTES,
                n_positions=seq_len,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=BYTES,
            max_position_embeddings=seq_len,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=True,
        )
    )


def training_arguments(args: argparse.Namespace, out: Path) -> Any:
    """The Trainer's settings; the JSON's "auto" values come from here."""
    import transformers

    return transformers.TrainingArguments(
        output_dir=str(out),
        deepspeed=str(args.deepspeed),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=args.lr,
        weight_decay=0.1,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 10),
        logging_steps=1,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        report_to=[],
        seed=0,
        use_cpu=not cpu.has_accelerator(),
        dataloader_pin_memory=cpu.has_accelerator(),
        disable_tqdm=True,
    )


def train(args: argparse.Namespace) -> None:
    """Train and leave the loss of every step in OUT/loss.csv (rank 0)."""
    import transformers

    if "RANK" not in os.environ:
        raise SystemExit("start this script with the deepspeed launcher, see --help")
    cpu.disable_native_operators()
    out = args.out or Path("runs") / args.deepspeed.stem
    settings = training_arguments(args, out)
    text = data.load_text(args.text)
    text.require(args.seq_len)
    transformers.set_seed(0)
    model = build_model(args.model, width=args.width, layers=args.layers, seq_len=args.seq_len)
    per_step = args.batch * args.accumulation * settings.world_size
    rows = Sequences(text.train, seq_len=args.seq_len, count=per_step * min(args.steps, 500))
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train(resume_from_checkpoint=args.resume)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        table = hf_curves.write(out, [(entry["step"], entry["loss"]) for entry in history])
        last = [entry["loss"] for entry in history[-20:]]
        print(f"mean loss of the last {len(last)} steps: {sum(last) / len(last):.4f}")
        print(f"CSV: {table}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args(arguments)
    if args.plot:
        print(f"PNG: {hf_curves.draw(args.plot)}")
        return 0
    if args.deepspeed is None:
        raise SystemExit("give a DeepSpeed JSON with --deepspeed")
    train(args)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
