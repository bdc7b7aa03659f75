"""Run megatron-core on a machine without an accelerator, with gloo.

megatron-core asks CUDA for devices, streams and random numbers wherever it goes. Call `install()`
before megatron is imported: what it asks for then comes from the CPU. This is for tests, trying
things out and small demonstrations. It changes `torch` for the whole process and its forks, so
give it a process of its own.
"""

import collections
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

CPU = torch.device("cpu")
MARK = "_runs_megatron_on_cpu"
# What makes a tensor and takes `device=`; the methods are those of torch.Tensor.
FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace logspace ones "
    "ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor tensor "
    "tril_indices triu_indices zeros zeros_like"
).split()
METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()
# Megatron's optimizers sort parameters by these names.
TYPE_NAMES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.int16: "ShortTensor",
    torch.int8: "CharTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}
MEMORY = 1 << 34


def install() -> None:
    """Answer for CUDA from the CPU, then repair what megatron-core lacks there. Idempotent.

    Raises:
        RuntimeError: This build of torch has CUDA, or megatron has been imported already.
    """
    if getattr(torch, MARK, False):
        return
    if torch.version.cuda is not None:
        raise RuntimeError("this torch has CUDA: run Megatron on the accelerator instead")
    if "megatron.core" in sys.modules:
        raise RuntimeError("call launch.megatron_cpu.install() before importing megatron")
    setattr(torch, MARK, True)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists on it
    # It keeps a table of torch's functions, which have to be the original ones.
    importlib.import_module("torch._dynamo")
    # One generator plays all of them, which Megatron would report at every dropout.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    _bring_triton()
    _bring_weight_gradient_fusion()
    _redirect_devices()
    _answer_for_cuda()
    _adapt_gloo()
    torch.compile = _no_compilation  # jit_fuser would start a compiler per fused function
    from launch import megatron_cpu_patches  # imports megatron

    megatron_cpu_patches.apply()


def is_cuda(device: Any) -> bool:
    """Whether a `device` argument means an accelerator: a name, a number or a torch.device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class Stream:
    """A stream on which everything has happened already."""

    cuda_stream = stream_id = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what torch.cuda.Stream takes."""

    def __enter__(self) -> "Stream":
        """As a context: nothing changes."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing to restore."""

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def query(self) -> bool:
        """Everything is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or Stream()

    def elapsed_time(self, other: Any) -> float:
        """No time has passed."""
        return 0.0


def _no_compilation(model: Any = None, **kwargs: Any) -> Any:
    return (lambda function: function) if model is None else model


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu


def _redirect_devices() -> None:
    for owner, names in ((torch, FACTORIES), (torch.Tensor, METHODS)):
        for name in names:
            setattr(owner, name, _redirected(getattr(owner, name)))
    owners: tuple[Any, ...] = (torch.Tensor, torch.nn.Module)
    for owner in owners:
        owner.to = _moved(owner.to)
        owner.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.to_empty = _redirected(torch.nn.Module.to_empty)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = _none  # type: ignore[method-assign]
    torch.Tensor.type = _type_of(torch.Tensor.type)  # type: ignore[method-assign]


def _moved(to: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda(args[0]):
            args = (CPU, *args[1:])
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    return moved


def _type_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_of(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and self.dtype in TYPE_NAMES:
            return "torch.cuda." + TYPE_NAMES[self.dtype]
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, *args, **kwargs)

    return type_of


def _none(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _answer_for_cuda() -> None:
    generator = torch.default_generator
    properties = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=MEMORY, multi_processor_count=1
    )
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_call": lambda callback, **kwargs: callback(),
        "get_device_capability": lambda *args: (properties.major, properties.minor),
        "get_device_name": lambda *args: properties.name,
        "get_device_properties": lambda *args: properties,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "initial_seed": generator.initial_seed,
        "default_generators": (generator,) * 64,
        "mem_get_info": lambda *args: (MEMORY, MEMORY),
        "memory_stats": lambda *args: collections.defaultdict(int),
        "memory_summary": lambda *args, **kwargs: "",
        "current_stream": lambda *args: Stream(),
        "default_stream": lambda *args: Stream(),
        "CUDAGraph": type("CUDAGraph", (), {}),
    }
    answers |= dict.fromkeys(("Stream", "ExternalStream", "Event"), Stream)
    answers |= dict.fromkeys(("stream", "device"), _nothing_around)
    done = "init _lazy_init set_device set_stream synchronize empty_cache ipc_collect"
    done += " reset_peak_memory_stats reset_max_memory_allocated"
    answers |= dict.fromkeys(done.split(), _none)
    used = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    answers |= dict.fromkeys(used.split(), lambda *args: 0)
    for name in TYPE_NAMES.values():
        answers[name] = getattr(torch, name)
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, answer in answers.items():
            # The parts of torch.cuda get what they have, and nothing new.
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, answer)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _none)


def _adapt_gloo() -> None:
    """What NCCL promises and gloo does not."""
    c10d.isend = torch.distributed.isend = _owning_what_is_sent(c10d.isend)
    for module in (c10d, torch.distributed):
        gather, reduce = module.all_gather, module.reduce_scatter
        module.all_gather = _of_any_sizes(gather)  # type: ignore[attr-defined]
        module.reduce_scatter = _to_any_sizes(reduce)  # type: ignore[attr-defined]


def _owning_what_is_sent(isend: Callable[..., Any]) -> Callable[..., Any]:
    def owning(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Gloo reads the memory later, and Megatron frees what it has sent at once.
        return isend(tensor.detach().clone(), *args, **kwargs)

    return owning


def _of_any_sizes(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Experts get different numbers of tokens; gloo gathers equal ones."""

    def gather(
        outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        group = group or c10d._get_default_group()
        outputs[group.rank()].copy_(tensor)
        for index, output in enumerate(outputs):
            torch.distributed.broadcast(output, group=group, group_src=index)
        return None

    return gather


def _to_any_sizes(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: Any = c10d.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({tensor.shape for tensor in inputs}) == 1:
            return reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        group = group or c10d._get_default_group()
        for index, tensor in enumerate(inputs):
            total = tensor.contiguous().clone()
            torch.distributed.all_reduce(total, op=op, group=group)
            if index == group.rank():
                output.copy_(total)
        return None

    return scatter


class _Kernel:
    """Any object of triton while modules are imported; nothing of it ever runs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # used as a decorator
        return _Kernel()

    def __getattr__(self, name: str) -> "_Kernel":
        return _Kernel()

    def __getitem__(self, key: Any) -> "_Kernel":
        return _Kernel()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()


def _bring_weight_gradient_fusion() -> None:
    """What `gradient_accumulation_fusion` takes from Apex: products added to `main_grad`."""

    def add(inputs: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor) -> None:
        total.add_((gradients.t().float() @ inputs.float()).to(total.dtype))

    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.__dict__.update(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    sys.modules.setdefault(module.__name__, module)


def _bring_triton() -> None:
    """Megatron imports triton for kernels that run on an accelerator only."""
    if importlib.util.find_spec("triton") is not None:
        return

    def attribute(name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel()

    for name in ("", ".language", ".language.extra", ".runtime", ".tools"):
        module = types.ModuleType("triton" + name)
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__dict__.update(__path__=[], __version__="0.0.0", __getattr__=attribute)
        sys.modules[module.__name__] = module
