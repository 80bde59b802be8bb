"""Run other projects' suites over kernels and jobs of ours, and hold what differs against what is known to."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from . import known, suites, zdtm, zdtm_sources
from .known import Difference

_ZDTM = "zdtm"
_FOLDER = suites.REPOSITORY / ".peers"
_NAMES = [*suites.SUITES, _ZDTM]


def main() -> int:
    """Do it; return 0 where nothing differs that is not known to."""
    parser = argparse.ArgumentParser(prog="make test-peers", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"all, if none is named: {', '.join(_NAMES)}")
    parser.add_argument("--zdtm", type=Path, help="criu's sources; they are downloaded if none are named")
    arguments = parser.parse_args()
    wanted = arguments.suites or _NAMES
    if unknown := sorted(set(wanted) - set(_NAMES)):
        parser.error(f"there is no suite {unknown[0]}")
    reasons = known.read(known.LIST.read_text())
    logs = _FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _be_nobody_in_particular()
    differences: list[Difference] = []
    for name in wanted:
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        if name == _ZDTM:
            count, found = _run_zdtm(arguments.zdtm, logs)
        else:
            python = suites.environment(_FOLDER)
            count, found = suites.run(name, python, suites.fetch(name, python, _FOLDER), logs)
        differences += found
        print(f"{name}: {count} tests in {time.monotonic() - began:,.0f} s; {len(found)} differ", flush=True)
        if not count:
            print(f"Nothing of {name} was run: see {logs}", file=sys.stderr)
            return 1
    return _report(known.judge(differences, reasons, wanted), logs)


def _be_nobody_in_particular() -> None:
    """Leave aside what whoever runs this has set, as the tests do."""
    for name in list(os.environ):
        if name.startswith(("JPY_", "GPUCKPT_")) and name not in ("GPUCKPT_CRIU", "GPUCKPT_CRIU_PREFIX"):
            del os.environ[name]
    os.environ["GPUCKPT_SAVE_WAIT"] = "600"


def _run_zdtm(named: Path | None, logs: Path) -> tuple[int, list[Difference]]:
    criu = named.absolute() if named else zdtm_sources.fetch(_FOLDER)
    zdtm.build(criu, logs / "zdtm-build.log")
    tried, found = 0, []
    for program, wrong in zdtm.run(zdtm.commands(criu), logs / "zdtm.log"):
        tried += wrong is not None
        if wrong:
            found.append(Difference(_ZDTM, program, wrong))
    return tried, found


def _report(verdict: known.Verdict, logs: Path) -> int:
    for difference, why in verdict.known:
        print(f"known:  {difference.suite} {difference.test}: {why}")
    for entry in verdict.gone:
        print(f"gone:   {entry}: take it off tests/peers/known.txt, if it was not luck")
    for difference in verdict.new:
        print(f"NEW:    {difference.suite} {difference.test}: {difference.seen[:500]}")
    print(f"{len(verdict.new)} new, {len(verdict.known)} known differences. What was said is in {logs}.")
    return 1 if verdict.new else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
