"""Print the first answers, and every error, of a batch job's result file.

python tools/show_results.py RESULTS.jsonl [--answers 5] [--width 100]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def answers(row: Mapping[str, Any]) -> list[str]:
    """The generated texts of one result row, in either form; none for an error row."""
    if row.get("error"):
        return []
    if "response" in row:
        choices = row["response"]["body"]["choices"]
        return [c["message"]["content"] if "message" in c else c["text"] for c in choices]
    return [output["text"] for output in row["outputs"]]


def describe(row: Mapping[str, Any], width: int) -> Iterator[str]:
    """One line for each answer of a row, or one for its error."""
    name = str(row.get("custom_id", row.get("id")))
    if row.get("error"):
        yield f"  {name:<24} error {row['error']['code']}: {row['error']['message']}"
    for text in answers(row):
        flat = " ".join(text.split())
        yield f"  {name:<24} {flat if len(flat) <= width else flat[: width - 3] + '...'}"


def main() -> int:
    """Read the file named on the command line; 1 if it cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--answers", type=int, default=6, help="rows with an answer to show")
    parser.add_argument("--width", type=int, default=100, help="characters of an answer to show")
    options = parser.parse_args()
    try:
        rows = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        print(f"error: {options.results}: expected a batch job's results: {error}", file=sys.stderr)
        return 1
    good = [row for row in rows if not row.get("error")]
    step = max(1, len(good) // max(1, options.answers))
    print("\nsome answers:")
    for row in good[::step][: options.answers]:
        print("\n".join(describe(row, options.width)))
    bad = [row for row in rows if row.get("error")]
    if bad:
        print("error rows:")
        for row in bad:
            print("\n".join(describe(row, options.width)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
