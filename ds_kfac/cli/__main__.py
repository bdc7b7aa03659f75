"""``ds-kfac``: small tools around the library."""

from __future__ import annotations

import argparse
import json
import sys

from ds_kfac import __version__
from ds_kfac.config import schema


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
    commands.add_parser("schema", help="print the JSON schema of the kfac section")
    parser.parse_args(arguments)
    sys.stdout.write(json.dumps(schema(), indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
