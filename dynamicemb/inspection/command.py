"""The command: its arguments, what it prints where, and its exit status."""

import argparse
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from dynamicemb.checkpoint.disk.io import DISK, FileSystem
from dynamicemb.inspection.collect import Inspection, NoDumpError
from dynamicemb.inspection.facts import DumpFacts, KeyFacts
from dynamicemb.inspection.report import Report

OK = 0
DAMAGED = 1
UNUSABLE = 2

_DESCRIPTION = """Show what is in a dump, or in a full dump and its increments in order: what the manifest says, scores,
norms, and what should not be there. Exit status: 0, or 1 if a load would refuse the dump, or 2 if there is no dump or
an argument is wrong."""
_DEFAULT_ROWS = 100_000


def main(arguments: Sequence[str] | None = None, disk: FileSystem = DISK) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names may have characters that the terminal has not.
            stream.reconfigure(errors="backslashreplace")
    errors = Console(stderr=True, highlight=False)
    try:
        inspection = Inspection.open(options.paths, options.table, disk)
    except (NoDumpError, OSError) as error:
        errors.print(Text(f"error: {error}"), soft_wrap=True)
        return UNUSABLE
    if options.verify:
        inspection.verify()
    dumps = inspection.facts(options.rows, look=not options.key)
    found = inspection.look_up(list(dict.fromkeys(options.key)), options.full)
    damage = inspection.damage.messages
    console = Console(highlight=False)
    if options.json:
        console.out(_json(dumps, found, damage, options.verify), highlight=False)
    else:
        _print(Report(console), dumps, found, with_tables=not options.key)
        if options.verify and not damage:
            known = all(facts.kind is not None for facts in dumps)
            verdict = "every file is as it was written" if known else "all sizes fit; no checksums without a manifest"
            console.print(Text(f"verified: {verdict}", "green"))
    for message in damage:
        errors.print(Text(message, "red"), soft_wrap=True)
    return DAMAGED if damage else OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dynamicemb.inspect", description=_DESCRIPTION)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="folder of a dump; of increments all, base first")
    parser.add_argument("--table", action="append", default=[], metavar="NAME", help="this table only; may be repeated")
    parser.add_argument(
        "--key", action="append", default=[], type=_key, metavar="ID",
        help="show an id instead of the tables; may be repeated; --key=-5 for a negative one",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="with --key, all values of a row")
    parser.add_argument(
        "--rows", type=_rows, default=_DEFAULT_ROWS, metavar="N",
        help=f"rows of each table to look at, spread evenly, or 'all'; default {_DEFAULT_ROWS}",
    )  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="read every file and check what a load would check")
    parser.add_argument("--json", action="store_true", help="print the same facts for scripts")
    return parser


def _key(text: str) -> int:
    value = int(text, 0)
    if not -(2**63) <= value < 2**64:
        raise argparse.ArgumentTypeError(f"{text} has more than 64 bits")
    # As ids do: their bits count.
    return value - 2**64 if value >= 2**63 else value


def _rows(text: str) -> int | None:
    if text == "all":
        return None
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of rows; give 1 or more, or 'all'")
    return value


def _print(report: Report, dumps: list[DumpFacts], found: list[KeyFacts], with_tables: bool) -> None:
    for facts in dumps:
        report.dump(facts)
        if len(dumps) == 1:
            report.alone(facts)
        for table in facts.tables if with_tables else []:
            report.table(table)
    report.keys(found, dumps)


def _json(dumps: list[DumpFacts], found: list[KeyFacts], damage: list[str], verified: bool) -> str:
    values = {
        "dumps": [asdict(facts) for facts in dumps],
        "keys": [asdict(facts) for facts in found],
        "verified": verified,
        "damage": damage,
    }
    return json.dumps(_finite(values), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value whose NaNs and infinities are the strings "nan", "inf" and "-inf": JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
