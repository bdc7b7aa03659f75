"""``ds-kfac``: small tools around the library."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ds_kfac import __version__
from ds_kfac.cli import convert, doctor, plan_arguments
from ds_kfac.config import schema
from ds_kfac.errors import KFACError

WRONG_ARGUMENTS = 2  # as argparse


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: Command line without the program name; default ``sys.argv``.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="ds-kfac", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ds_kfac {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("schema", help="print the JSON schema of the kfac section").set_defaults(
        run=_schema
    )
    inspect = commands.add_parser("inspect", help="verify and describe the K-FAC state on disk")
    inspect.add_argument("checkpoint", type=Path, help="folder of a checkpoint")
    inspect.add_argument("--plot", type=Path, metavar="FILE", help="draw the factors' spectra")
    inspect.set_defaults(run=_inspect)
    plan = commands.add_parser(
        "plan", help="owners, memory, bytes and times of a run, without starting it"
    )
    plan_arguments.add_arguments(plan)
    plan.set_defaults(run=_plan, failed=WRONG_ARGUMENTS)
    examine = commands.add_parser("doctor", help="check this machine, with a dry run")
    doctor.add_arguments(examine)
    examine.set_defaults(run=doctor.report)
    change = commands.add_parser("convert", help="a saved state for another number of tensor ranks")
    convert.add_arguments(change)
    change.set_defaults(run=convert.report)
    options = parser.parse_args(arguments)
    try:
        done: str | tuple[str, int] = options.run(options)
    except KFACError as error:
        sys.stderr.write(f"{error}\n")
        return int(getattr(options, "failed", 1))
    text, code = (done, 0) if isinstance(done, str) else done
    sys.stdout.write(text)
    return code


def _schema(options: argparse.Namespace) -> str:
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


def _inspect(options: argparse.Namespace) -> str:
    from ds_kfac.cli import inspect  # needs torch, which the schema does not

    text, spectra = inspect.report(options.checkpoint)
    if options.plot is not None:
        inspect.plot(spectra, options.plot)
    return text


def _plan(options: argparse.Namespace) -> str:
    from ds_kfac.cli import plan

    return plan.report(options)


if __name__ == "__main__":
    sys.exit(main())
