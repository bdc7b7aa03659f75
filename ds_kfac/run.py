"""Start an unmodified DeepSpeed or Megatron-LM script with K-FAC.

    deepspeed --module ds_kfac.run script.py --deepspeed --deepspeed_config config.json
    torchrun -m ds_kfac.run -m package.module ...
    torchrun -m ds_kfac.run --megatron Megatron-LM/pretrain_gpt.py --kfac ...

Every ``deepspeed.initialize`` of the script, of Hugging Face's ``Trainer`` and of ``accelerate``
becomes ``ds_kfac.initialize``: its configuration decides whether anything changes.

With ``--megatron`` the script's own command line takes ``--kfac`` and ``--kfac-*`` (see the
script's ``--help``), and Megatron's optimizer gets K-FAC if ``--kfac`` is given.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from ds_kfac.errors import KFACError
from ds_kfac.hosts.deepspeed_patch import patch_on_import

_USAGE = (
    "deepspeed --module ds_kfac.run SCRIPT [arguments of the script]\n"
    "       deepspeed --module ds_kfac.run -m MODULE [arguments of the module]\n"
    "       torchrun -m ds_kfac.run --megatron SCRIPT [--kfac ...] [arguments of the script]"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script or module as ``__main__`` with ``deepspeed.initialize`` replaced.

    Args:
        arguments: The command line without the program's name; by default the process's own.

    Raises:
        SystemExit: The command line names nothing that can be run (code 2).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_megatron = words[:1] == ["--megatron"]
    launcher, is_module, target, rest = _split(words[1:] if is_megatron else words)
    if is_megatron and is_module:
        _fail("--megatron takes the path of a script")
    # DeepSpeed's launcher puts --local_rank before the script, which expects it among its own.
    sys.argv = [target, *launcher, *rest]
    if is_megatron:
        _prepare_megatron(target)
    else:
        patch_on_import()
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(target))  # as for `python script.py`
    runpy.run_path(target, run_name="__main__")


def _prepare_megatron(script: str) -> None:
    from ds_kfac.hosts import megatron_patch

    try:
        megatron_patch.patch(script)
    except KFACError as error:
        _fail(str(error))


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, str, list[str]]:
    """Launcher's options, whether a module is meant, script or module, and its arguments."""
    rest = list(arguments)
    launcher: list[str] = []
    while rest and rest[0].replace("-", "_").startswith("__local_rank"):
        launcher += [rest.pop(0)]
        if "=" not in launcher[-1] and rest:
            launcher += [rest.pop(0)]
    if rest and rest[0] in ("-h", "--help"):
        _parser().print_help()
        raise SystemExit(0)
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest:
        _fail("give a module after -m" if is_module else "give a script, or -m and a module")
    target = rest.pop(0)
    if target.startswith("-"):
        _fail(f"expected a script or -m MODULE before other options, got {target!r}")
    if not is_module and not os.path.exists(target):
        _fail(f"no such script: {target!r}")
    return launcher, is_module, target, rest


def _fail(problem: str) -> NoReturn:
    _parser().error(problem)


def _parser() -> argparse.ArgumentParser:
    """For its messages: the script's options are none of our business."""
    return argparse.ArgumentParser(
        prog="ds_kfac.run",
        usage=_USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )


if __name__ == "__main__":
    main()
