#!/usr/bin/env python3
"""Mutation testing: breaks the library in many places, one at a time, and shows which tests detect it.

    tests/mutation/campaign.py                       all folders, table on standard output
    tests/mutation/campaign.py --folder shard        one folder
    tests/mutation/campaign.py --check               only check that every mutant still matches the sources

A mutant is a few lines of a source file and their replacement (tests/mutation/<folder>.mutants; pipeline.mutants describes the
format). All mutants are compiled into one build, in a copy of the tree; the environment variable PENSTOCK_MUTANT selects the active
one, so that all mutants need only one build. For each mutant the tests of its folder run, shortest first, until a test file fails.
A file that takes ten times as long as without a mutant counts as hanging and has failed.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("pipeline", "graph", "shard")

SWITCH = """#pragma once
#include <cstdlib>
inline bool penstock_mutant(int number) {
  static const int awake = std::getenv("PENSTOCK_MUTANT") ? std::atoi(std::getenv("PENSTOCK_MUTANT")) : 0;
  return awake == number;
}
"""


class Mutant:
    def __init__(self, number, folder, file, title):
        self.number, self.folder, self.file, self.title = number, folder, file, title
        self.before, self.after = [], []


def read_mutants(folders):
    mutants = []
    for folder in folders:
        for line in (ROOT / "tests/mutation" / f"{folder}.mutants").read_text().splitlines():
            if line.startswith("= "):
                file, title = line[2:].split(": ", 1)
                first = 100 * (1 + FOLDERS.index(folder))
                number = first + 1 + sum(m.folder == folder for m in mutants)
                mutants.append(Mutant(number, folder, place_of(folder, file), title))
            elif line.startswith("- "):
                mutants[-1].before.append(line[2:])
            elif line.startswith("+ "):
                mutants[-1].after.append(line[2:])
    return mutants


def place_of(folder, file):
    """Returns the path of a source file, whichever room of the folder it is in."""
    found = sorted((ROOT / "penstock" / folder).rglob(file))
    return str(found[0].relative_to(ROOT)) if len(found) == 1 else f"penstock/{folder}/{file}"


def squeezed(text):
    """Returns the text without white space, and where each of its characters was: line breaks do not matter to a match."""
    kept = [(c, at) for at, c in enumerate(text) if not c.isspace()]
    return "".join(c for c, _ in kept), [at for _, at in kept]


def apply(mutants, tree):
    """Writes all mutants into the sources under `tree`; returns those that do not match exactly once."""
    unfit = []
    for file in sorted({m.file for m in mutants}):
        path = tree / file
        text = path.read_text() if path.exists() else ""
        for mutant in (m for m in mutants if m.file == file):
            wanted, _ = squeezed("\n".join(mutant.before))
            dense, places = squeezed(text)
            if not wanted or dense.count(wanted) != 1:
                unfit.append((mutant, dense.count(wanted) if wanted else 0))
                continue
            at = dense.index(wanted)
            new = "\n".join(mutant.after).replace("MUTANT", f"penstock_mutant({mutant.number})")
            text = text[:places[at]] + new + text[places[at + len(wanted) - 1] + 1:]
        if path.exists():
            path.write_text('#include "penstock/base/mutant.h"\n' + text)
    (tree / "penstock/base/mutant.h").write_text(SWITCH)
    return unfit


def copy_tree(into):
    shutil.copytree(ROOT, into, ignore=lambda folder, names: {"build", ".git", ".cache", "carry", "runs"} & set(names) if folder == str(ROOT) else set())


def tests_of(build, folder):
    """Returns names, commands and environments of the tests of a folder, except GPU and long tests."""
    shown = json.loads(subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], check=True, capture_output=True, text=True).stdout)
    found = []
    for test in shown["tests"]:
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        here = pathlib.Path(properties.get("WORKING_DIRECTORY", "")) == build / "tests" / folder
        if here and not {"gpu", "long"} & set(properties.get("LABELS", [])):
            found.append((test["name"], test["command"], dict(e.split("=", 1) for e in properties.get("ENVIRONMENT", []))))
    return found


def run_test(test, mutant, limit_s):
    """Returns whether the test passed, the failed tests in it, and the seconds it took."""
    _, command, environment = test
    begin = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, **environment, "PENSTOCK_MUTANT": str(mutant)}, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        started = re.findall(r"\[ RUN      \] (\S+)", output)
        return False, [f"{started[-1] if started else '?'} (hangs)"], time.monotonic() - begin
    failed = list(dict.fromkeys(re.findall(r"\[  FAILED  \] ([\w/]+\.[\w/]+)", output)))
    if process.returncode != 0 and not failed:
        started = re.findall(r"\[ RUN      \] (\S+)", output)
        failed = [f"{started[-1] if started else '?'} (ends the process)"]
    return process.returncode == 0, failed, time.monotonic() - begin


def judge(mutant, tests, seconds):
    for test in tests:
        passed, failed, _ = run_test(test, mutant.number, max(30.0, 10 * seconds[test[0]]))
        if not passed:
            return mutant, test[0], failed
    return mutant, None, []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", action="append", choices=FOLDERS, help="only this folder (may be repeated)")
    parser.add_argument("--only", type=int, action="append", help="only the mutant with this number (may be repeated)")
    parser.add_argument("--check", action="store_true", help="only check that every mutant matches exactly one place")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/mutation", help="folder for the copy of the tree and its build")
    parser.add_argument("--cmake", action="append", default=[], help="further arguments for CMake, e.g. --cmake=-DTorch_DIR=...")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="number of mutants to test in parallel")
    parser.add_argument("--table", type=pathlib.Path, help="file for the table (default: standard output)")
    options = parser.parse_args()
    options.work = options.work.resolve()
    folders = options.folder or list(FOLDERS)
    mutants = read_mutants(folders)

    tree, build = options.work / "tree", options.work / "build"
    shutil.rmtree(tree, ignore_errors=True)
    copy_tree(tree)
    unfit = apply(mutants, tree)
    for mutant, places in unfit:
        print(f"{mutant.number} {mutant.file}: {mutant.title}: matches {places} places instead of one", file=sys.stderr)
    if options.check or unfit:
        return 1 if unfit else 0

    subprocess.run(["cmake", "-S", str(tree), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                    "-DPENSTOCK_WERROR=OFF", *options.cmake], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", str(build), "--target", *(f"tests/{folder}/all" for folder in folders)], check=True, stdout=sys.stderr)

    tests, seconds = {}, {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for folder in folders:
            tests[folder] = tests_of(build, folder)
        everything = [test for folder in folders for test in tests[folder]]
        for test, (passed, failed, took) in zip(everything, pool.map(lambda t: run_test(t, 0, 600), everything)):
            seconds[test[0]] = took
            if not passed:
                print(f"{test[0]} fails without a mutant and is skipped: {', '.join(failed)}", file=sys.stderr)
                for folder in folders:
                    tests[folder] = [t for t in tests[folder] if t is not test]
        for folder in folders:
            tests[folder].sort(key=lambda test: seconds[test[0]])
        chosen = [m for m in mutants if not options.only or m.number in options.only]
        results = []
        for done, future in enumerate(concurrent.futures.as_completed([pool.submit(judge, m, tests[m.folder], seconds) for m in chosen]), 1):
            mutant, test, failed = future.result()
            results.append((mutant, test, failed))
            print(f"[{done}/{len(chosen)}] {mutant.number} {mutant.title}: {test or 'SURVIVES'} {', '.join(failed[:3])}", file=sys.stderr)

    rows = ["| | place | what is broken | noticed by |", "|---|---|---|---|"]
    for mutant, test, failed in sorted(results, key=lambda r: r[0].number):
        more = f" and {len(failed) - 2} more" if len(failed) > 2 else ""
        by = f"{', '.join(f'`{name}`' for name in failed[:2])}{more}" if test else "**nobody**"
        rows.append(f"| {mutant.number} | `{mutant.file.removeprefix('penstock/')}` | {mutant.title} | {by} |")
    table = "\n".join(rows) + "\n"
    options.table.write_text(table) if options.table else print(table)
    return 0 if all(test for _, test, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
