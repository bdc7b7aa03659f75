"""Jobs with a real Hugging Face Trainer and a real Accelerator, started unmodified.

`deepspeed.initialize` is replaced as `ds_kfac.run` does it; what follows is code as any user
of these libraries writes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.hosts import deepspeed_patch
from tests._harness import deepspeed_cpu
from tests.reference import DenseKFAC
from tests.reference.state import AuxOptions

VOCABULARY, LENGTH, WIDTH = 24, 6, 16
MICRO, ACCUMULATION, STEPS = 2, 2, 4
LR = 0.005
SETTINGS = {"direction": "natural", "damping": 1.0, "factor_update_steps": 1, "inv_update_steps": 1}

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    "zero_allow_untested_optimizer": True,  # SGD is not on DeepSpeed's list
}
SGD = {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9, "weight_decay": "auto"}}
# Averages, momentum, and bases from before the checkpoint: all of it has to come back.
REMEMBERING = {**SETTINGS, "inv_update_steps": STEPS, "momentum": 0.9, "resume": "require"}


def make_model(kind: str) -> Any:
    """A model built from a configuration: GPT-2 (Conv1D layers) or Llama (Linear layers)."""
    import transformers

    torch.manual_seed(3)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


def rows(count: int) -> list[dict[str, Tensor]]:
    """Random token sequences.

    The first label is never predicted; Trainer would count it among the loss terms all the same.
    """
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    labels = torch.cat([torch.full((count, 1), -100), tokens[:, 1:]], dim=1)
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def arguments(config: dict[str, Any], out: Path, **changes: Any) -> Any:
    """TrainingArguments with a DeepSpeed JSON file, as users pass it."""
    import transformers

    out.mkdir(parents=True, exist_ok=True)
    path = out / "deepspeed.json"
    # Every rank writes it and reads it at once: never let one see the other's half-written file.
    part = path.with_suffix(f".rank{os.environ.get('RANK', '0')}")
    part.write_text(json.dumps(config))
    part.replace(path)
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "deepspeed": str(path),
        "max_steps": STEPS,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": LR,
        "weight_decay": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**{**settings, **changes})


def train(
    rank: int, size: int, kind: str, config: dict[str, Any], out: Path, **changes: Any
) -> dict[str, Any]:
    """One Trainer run: batches of this rank, logged losses, final weights, K-FAC's record."""
    import transformers

    resume = changes.pop("resume", None)
    model = make_model(kind)
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            seen.append(kwargs["input_ids"].clone())

    model.register_forward_pre_hook(note, with_kwargs=True)
    settings = arguments(config, out, **changes)
    data = rows(size * MICRO * ACCUMULATION * STEPS)
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=data, eval_dataset=data[:4]
    )
    trainer.train(resume_from_checkpoint=resume)
    engine = trainer.model_wrapped
    kfac = engine.kfac
    result = {
        "batches": seen,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "optimizer": type(engine.basic_optimizer).__name__,
        "clipping": engine.gradient_clipping(),
        "kfac": None,
    }
    if kfac is not None:
        counters = dict(vars(kfac.counters))
        result["kfac"] = counters
        result["layers"] = [(spec.name, spec.kind) for spec in kfac.layers.layers]
        result["left out"] = {item.name: item.reason for item in kfac.layers.left_out}
        result["coverage"] = kfac.coverage()
        result["metrics"] = trainer.evaluate()
        assert dict(vars(kfac.counters)) == counters  # evaluation leaves no trace
        assert not kfac._session.pending
    engine.destroy()
    return result


def accelerate_loop(
    rank: int, size: int, settings: dict[str, Any] = SETTINGS, *, save: str = "", load: str = ""
) -> dict[str, Any]:
    """A training loop written with accelerate: client optimizer, accumulation, clipping.

    Args:
        rank: This rank.
        size: Ranks.
        settings: Of K-FAC.
        save: Folder for the state after half of the steps.
        load: Folder of such a state, to go on from.
    """
    import accelerate
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)  # Accelerator(cpu=True) would refuse to combine with DeepSpeed
    config = {**AUTO, "gradient_clipping": 0.5, "kfac": settings}
    config["gradient_accumulation_steps"] = ACCUMULATION
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
    accelerator = accelerate.Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION
    )
    model = make_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    loader = torch.utils.data.DataLoader(
        rows(size * MICRO * ACCUMULATION * STEPS), batch_size=MICRO, shuffle=False
    )
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    half = len(loader) // 2
    if load:
        accelerator.load_state(load)
        loader = accelerator.skip_first_batches(loader, half)
    seen = []
    for index, batch in enumerate(loader):
        if save and index == half:
            accelerator.save_state(save)
        with accelerator.accumulate(engine):
            seen.append(batch["input_ids"].clone())
            accelerator.backward(engine(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    state = engine.kfac.state_dict()
    result = {
        "batches": seen,
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "kfac": dict(vars(engine.kfac.counters)),
        "state": {
            f"{name}/{key}": value.clone()
            for name, layer in state["layers"].items()
            for key, value in layer.items()
            if isinstance(value, Tensor)
        },
        "layers": [(spec.name, spec.kind) for spec in engine.kfac.layers.layers],
    }
    engine.destroy()
    return result


def oracle(kind: str, batches: list[Tensor], *, weight_decay: float, own: bool) -> dict[str, Any]:
    """What the dense oracle makes of the micro-batches of all ranks, a whole step at a time.

    Returns:
        Weights before and after, and the last raw gradient's norm.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, batches)
    model = make_model(kind)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = layer_names(model, kind)
    model.double()
    options: dict[str, Any] = {"lr": LR, "weight_decay": weight_decay, "momentum": 0.95}
    options["aux"] = AuxOptions(lr=LR, weight_decay=weight_decay)
    if not own:
        sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=weight_decay)
        options = {"optimizer": sgd}
    reference = DenseKFAC(model, names, damping=1.0, kl_clip=1e-3, gradient_clipping=0.5, **options)
    for step in range(STEPS):
        chosen = slice(step * ACCUMULATION, (step + 1) * ACCUMULATION)
        tokens = torch.cat([batch for of_rank in gathered for batch in of_rank[chosen]])
        reference.step(lambda tokens=tokens: model(input_ids=tokens, labels=tokens).loss)
    end = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"start": start, "end": end, "norm": reference.raw_norm, "layer": names[0]}


def everything(rank: int, size: int, folder: str, configs: str) -> dict[str, Any]:
    """All scenarios in one set of processes: importing transformers dominates."""
    deepspeed_cpu.prepare()
    deepspeed_patch.patch()
    base = Path(folder)
    own = {"type": "KFAC", "params": {"lr": "auto", "weight_decay": "auto", **SETTINGS}}
    results = {
        "gpt2": train(rank, size, "gpt2", {**AUTO, "optimizer": own}, base / "gpt2"),
        "llama": train(
            rank, size, "llama", {**AUTO, "optimizer": SGD, "kfac": SETTINGS}, base / "llama"
        ),
        "plain": train(rank, size, "llama", {**AUTO, "optimizer": SGD}, base / "plain"),
        "trainers own": train(rank, size, "llama", {**AUTO, "kfac": SETTINGS}, base / "own"),
        "checkpointing": train(
            *(rank, size, "llama", {**AUTO, "optimizer": SGD, "kfac": SETTINGS}, base / "act"),
            gradient_checkpointing=True,
        ),
        "accelerate": accelerate_loop(rank, size),
    }
    remembering = {"type": "KFAC", "params": {**own["params"], **REMEMBERING}}
    for name, config in (
        ("section", {**AUTO, "optimizer": SGD, "kfac": REMEMBERING}),
        ("own", {**AUTO, "optimizer": remembering}),
    ):
        out = base / f"resume {name}"
        saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
        results[f"whole {name}"] = train(rank, size, "llama", config, out, **saving)
        results[f"resumed {name}"] = train(
            rank, size, "llama", config, out, resume=str(out / f"checkpoint-{STEPS // 2}")
        )
    folder = str(base / "accelerate")
    results["whole accelerate"] = accelerate_loop(rank, size, REMEMBERING, save=folder)
    results["resumed accelerate"] = accelerate_loop(rank, size, REMEMBERING, load=folder)
    for path in sorted(Path(configs).glob("hf_*.json")):
        config = json.loads(path.read_text())
        results[path.stem] = train(rank, size, "gpt2", config, base / path.stem)
    deepspeed_patch.unpatch()
    for name, kind, decay, own in (
        ("gpt2", "gpt2", 0.01, True),
        ("llama", "llama", 0.01, False),
        ("accelerate", "llama", 0.0, False),
    ):
        seen = results[name]["batches"]
        results[name]["oracle"] = oracle(kind, seen, weight_decay=decay, own=own)
    results["gpt2"]["parameters"] = sum(p.numel() for p in make_model("gpt2").parameters())
    return results


def layer_names(model: nn.Module, kind: str) -> list[str]:
    """Layers that are to be preconditioned: all linear ones except the output head."""
    types = {"gpt2": "Conv1D", "llama": "Linear"}
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ == types[kind] and name != "lm_head"
    ]
