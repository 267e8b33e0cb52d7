"""This project beside what a user would pick instead: every row of the table, by one command.

    python bench/compare.py --peers DIR              into bench/RESULTS.md, between its markers
    python bench/compare.py --peers DIR --only gpt2 llama ddp fsdp2 tensor pipeline context
    python bench/compare.py --only data checkpoint --ranks FILE --out ''      only on the terminal
    python bench/compare.py --peers DIR --quick      does every row run? Tiny sizes, one round

DIR holds checkouts, DIR/nanoGPT and DIR/litgpt; FILE is a file of tiktoken's ranks. A peer that is
absent is a row that says so, and so is one that does not run. Part of the section is replaced by
what is measured, the rest of it, and of the file, stays.

The contenders of a part are warm in memory together and take turns (bench/duel.py). One process has
two threads, two ranks have one each, on gloo. Ratio: of medians, how many times as long theirs
takes as ours, so that above 1 ours is faster; in brackets the least and the most of single rounds.
Where these hold 1 there is nothing to claim. Absolute figures drift with the machine's load."""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from typing import NamedTuple

import duel

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench/compare.py writes from here -->", "<!-- to here -->"
PACKAGES = ("torch", "numpy", "tiktoken", "transformers")
CHECKOUTS = ("nanoGPT", "litgpt")


class Row(NamedTuple):
    """A contender: its name, its command behind `python bench/`, and what it needs: a checkout in
    DIR, a package, or nothing of these (ours, torch's)."""

    name: str
    command: str
    needs: str = ""


class Part(NamedTuple):
    """`rows`: contenders that take turns, ours from `ours` on, the first of them the reference; or,
    with ours = None, scripts that measure both sides themselves."""

    title: str
    rows: list
    ours: int | None


def parts(quick):
    """{name: Part}, all that is compared, in the order of the tables."""
    gpt2, llama, two = ("gpt2-tiny", "tiny", "tiny") if quick else ("gpt2", "llama", "llama")
    ring, one = ("tiny", " --threads 1") if quick else ("long", "")  # two threads wait for a core
    few = " --rounds 1 --layers 1 --width 64" if quick else ""
    text = " --turns 1 --tokens 100000 --text train.py" if quick else ""
    nano, lit, hf = (f"peers.py {peer} --path DIR/{peer2}" if peer2 else f"peers.py {peer}"
                     for peer, peer2 in (("nanogpt", "nanoGPT"), ("litgpt", "litgpt"), ("hf", "")))
    both = lambda name, command, needs="": [  # noqa: E731  eager and compiled
        Row(f"{name}, eager", command + one, needs),
        Row(f"{name}, compiled", f"{command} --compile{one}", needs)]
    return {
        "gpt2": Part("one process, GPT-2 shape (6 x 384, vocabulary 50304)", [
            *both("nanoGPT", f"{nano} --shape {gpt2}", "nanoGPT"),
            *both("ours", f"step.py --shape {gpt2}")], 2),
        "llama": Part("one process, Llama shape (8 x 512, vocabulary 8192)", [
            *both("Hugging Face", f"{hf} --shape {llama}", "transformers"),
            *both("litgpt", f"{lit} --shape {llama}", "litgpt"),
            *both("ours", f"step.py --shape {llama}")], 4),
        "ddp": Part("two ranks, Llama shape, replicated", [
            Row("Hugging Face in DDP", f"{hf} --wrap ddp --shape {two}", "transformers"),
            Row("our model in DDP", f"sharded.py ddp --shape {two}"),
            Row("ours, zero 0", f"sharded.py ours --shape {two}")], 2),
        "fsdp2": Part("two ranks, Llama shape, sharded", [
            Row("Hugging Face in FSDP2", f"{hf} --wrap fsdp2 --shape {two}", "transformers"),
            Row("our model in FSDP2", f"sharded.py fsdp2 --shape {two}"),
            Row("ours, zero 3", f"sharded.py ours --zero 3 --shape {two}")], 2),
        "tensor": Part("two ranks, Llama shape, tensor and sequence parallel", [
            Row("DTensor, loss_parallel", f"tensor.py dtensor --shape {two}"),
            Row("ours", f"tensor.py ours --shape {two}"),
            Row("ours, keep_gathered (as DTensor)", f"tensor.py ours --keep --shape {two}")], 1),
        "pipeline": Part("two ranks, Llama shape, 1F1B with 8 microbatches", [
            Row("torch pipelining", f"pipeline.py torch --shape {two}"),
            Row("ours", f"pipeline.py ours --shape {two}")], 1),
        "context": Part("two ranks, one sequence (4 x 256, 4096 tokens)", [
            Row("torch context_parallel", f"context.py torch --shape {ring}"),
            Row("one process, one thread", f"context.py single --shape {ring}"),
            Row("ours, ring", f"context.py ring --shape {ring}"),
            Row("ours, ulysses", f"context.py ulysses --shape {ring}")], 2),
        "checkpoint": Part("checkpoints beside the training, over torch.distributed.checkpoint", [
            Row("one process", f"ckpt.py{few}"),
            Row("two ranks, zero 3", f"ckpt.py --ranks 2{few}")], None),
        "data": Part("a memory map over nanoGPT's idiom, BPE over tiktoken's batches", [
            Row("memory map", f"loading.py{text}"),
            Row("BPE", f"loading.py --ranks FILE --skip-batches{text}", "FILE")], None),
    }


def absent(needs, args):
    """Why a row cannot run here, or None."""
    if needs in CHECKOUTS and not (args.peers and (args.peers / needs).is_dir()):
        return f"absent: no checkout DIR/{needs}"
    if needs in PACKAGES and importlib.util.find_spec(needs) is None:
        return f"absent: pip install {needs}"
    return "absent: no --ranks FILE" if needs == "FILE" and not args.ranks else None


def command_of(row, args):
    """As a list of words, from the row's text."""
    places = {"DIR": str(args.peers), "FILE": str(args.ranks)}
    script, *words = row.command.split()
    words = [re.sub(r"^(DIR|FILE)(?=/|$)", lambda m: places[m[0]], word) for word in words]
    return [sys.executable, str(ROOT / "bench" / script), *words]


def contest(part, args):
    """The table of contenders that take turns, and whether ours ran."""
    why = {row.name: absent(row.needs, args) for row in part.rows}
    rounds, steps = (1, 2) if args.quick else (args.rounds, args.steps)
    played = {c.name: c for c in duel.play(
        [(row.name, command_of(row, args)) for row in part.rows if not why[row.name]],
        rounds, steps)}
    for name, contender in played.items():
        why[name] = contender.error and f"does not run: {contender.error}"
    reference = played[part.rows[part.ours].name]
    rows = [f"| {name} | {reason} | | | |" if reason else
            contest_row(played[name], None if reference.error else reference)
            for name, reason in why.items()]
    good = not any(why[row.name] for row in part.rows[part.ours :])
    return ["| trainer | tokens/s | its step over ours (range) | peak RSS MB | parameters |",
            "|---|---|---|---|---|", *rows], good


def contest_row(contender, reference):
    ratio = "" if reference is None else "1" if contender is reference else (
        "{:.3f} ({:.3f}-{:.3f})".format(*duel.ratio(contender, reference)))
    return (f"| {contender.name} | {contender.speed:,.0f} | {ratio} | "
            f"{' / '.join(map(str, contender.last['rss_mb']))} | {contender.info['params']:,} |")


def reports(part, args):
    """The table of scripts that measure both sides, and whether all ran."""
    rows, good = [], True
    for row in part.rows:
        if why := absent(row.needs, args):
            rows.append(f"| {row.name} | {why} | | |")
            continue
        done = subprocess.run(command_of(row, args), capture_output=True, text=True, cwd=ROOT)
        if found := re.findall(r"^@bench (.*)$", done.stdout, re.M):
            rows += [report_row(row.name, record) for record in json.loads(found[-1])]
        else:
            rows.append(f"| {row.name} | does not run: {duel.reason(done.stderr)} | | |")
            good = False
    return ["| what | ours | theirs | ours better by (range) |", "|---|---|---|---|", *rows], good


def report_row(name, record):
    """Of a rate more is better, of a time less."""
    sides, unit = (record["ours"], record["theirs"]), record["unit"]
    better, worse = sides if unit.endswith("/s") else sides[::-1]
    rounds = [a / b for a, b in zip(better, worse)]
    ours, theirs = (f"{statistics.median(side):.3g} {unit}" for side in sides)
    return (f"| {name}: {record['what']} | {ours} | {theirs} | "
            f"{statistics.median(better) / statistics.median(worse):.2f} "
            f"({min(rounds):.2f}-{max(rounds):.2f}) |")


def say_git(folder, *what):
    done = subprocess.run(["git", "-C", str(folder), *what], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def facts(args, name, commit):
    """Two lines: when, what, where; and the versions of everything."""
    try:
        cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        cpu = platform.processor() or platform.machine()
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        if importlib.util.find_spec(package):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    for peer in CHECKOUTS:
        if not absent(peer, args):
            versions.append(f"{peer} {say_git(args.peers / peer, 'rev-parse', '--short', 'HEAD')}")
    more = " --ranks FILE" * bool(args.ranks) + " --quick" * args.quick
    more += f" --rounds {args.rounds} --steps {args.steps}" * (not args.quick)
    return (f"{datetime.date.today()}, commit {commit}; "
            f"{os.cpu_count()} cores, {cpu}, load {os.getloadavg()[0]:.1f} before it.\n"
            f"{', '.join(versions)}.\n"
            f"`python bench/compare.py --peers DIR --only {name}{more}`")


def written(text, fresh):
    """RESULTS.md with the parts {name: its text} put between the markers. The other parts that are
    there stay, and so does every character outside."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"no place to write to: one line {BEGIN!r}, and after it one {END!r}")
    before, rest = text.split(BEGIN)
    section, after = rest.split(END)
    old = re.split(r"^### (\w+): ", section, flags=re.M)
    held = {name: f"### {name}: {body.strip()}\n" for name, body in zip(old[1::2], old[2::2])}
    held |= fresh
    order = [*parts(False)]
    shown = sorted(held, key=lambda name: order.index(name) if name in order else len(order))
    return f"{before}{BEGIN}\n\n" + "\n".join(held[name] for name in shown) + f"\n{END}{after}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=pathlib.Path, help="the folder of checkouts")
    parser.add_argument("--only", nargs="+", choices=parts(False), default=[*parts(False)])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round, no file")
    parser.add_argument("--ranks", type=pathlib.Path, help="tiktoken's ranks, to tokenize with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a round; the first is not timed")
    parser.add_argument("--out", help="default: bench/RESULTS.md, with --quick none")
    args = parser.parse_args()
    args.ranks = args.ranks and args.ranks.resolve()
    default = "" if args.quick else ROOT / "bench/RESULTS.md"
    out, failed = default if args.out is None else args.out, []
    if out:
        written(pathlib.Path(out).read_text(), {})  # before hours of work
    commit = say_git(ROOT, "describe", "--always", "--dirty")  # before this writes to RESULTS.md
    for name in args.only:
        part, told = parts(args.quick)[name], facts(args, name, commit)
        table, good = (reports if part.ours is None else contest)(part, args)
        shown = f"### {name}: {part.title}\n\n{told}\n\n" + "\n".join(table) + "\n"
        print(shown, flush=True)
        failed += [name] * (not good)
        if out:
            file = pathlib.Path(out)
            file.write_text(written(file.read_text(), {name: shown}))
    if failed:
        raise SystemExit(f"ours did not run in: {', '.join(failed)}")


if __name__ == "__main__":
    main()
