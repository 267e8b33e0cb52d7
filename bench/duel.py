"""Several trainers on the same work, taking turns; ratios of medians.

    python bench/duel.py [--rounds 5 --steps 4] NAME='command' NAME='command' ...

Each command speaks the protocol of bench/step.py. All are started and warmed up one after the
other, then take turns: a round is `steps` steps of each, the first of which is dropped, in an order
that rotates. Ratio: median step of the first (the reference) over the contender's, above 1 the
contender is faster; in brackets the smallest and largest ratio of single rounds."""

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import tempfile


class Contender:
    """A command, started and warm. `error`: what it said last, if it ended before its time."""

    def __init__(self, name, command):
        self.name, self.rounds, self.last, self.error = name, [], None, None
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True)
        self.info = self.read()

    def read(self):
        for line in self.process.stdout:
            if line.startswith("@bench "):
                return json.loads(line[7:])
        self.process.wait()
        self.errors.seek(0)
        self.error = reason(self.errors.read()) or f"exit status {self.process.returncode}"

    def go(self, steps):
        if self.error is None:
            try:
                self.process.stdin.write(f"go {steps}\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                pass  # it ended while it waited: read finds out
            if record := self.read():
                self.last = record
                self.rounds.append(record["step_s"][1:])

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    @property
    def step(self):
        return statistics.median(sum(self.rounds, []))

    @property
    def speed(self):  # tokens a second
        return self.info["tokens_per_step"] / self.step


def reason(errors):
    """The first line of a stderr that names an error, or the last line of it."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exit|Exception)\b", line)]
    return (named or lines[-1:] or [""])[0][:200]


def play(commands, rounds, steps):
    """[(name, command)] -> [Contender], who have taken turns."""
    everyone = [Contender(*pair) for pair in commands]
    for r in range(rounds):
        k = r % len(everyone)
        for contender in everyone[k:] + everyone[:k]:
            contender.go(steps)
    for contender in everyone:
        contender.close()
    return everyone


def ratio(a, b):
    """How many times as long a step of a takes as one of b; the least and the most of a round."""
    rounds = [statistics.median(x) / statistics.median(y) for x, y in zip(a.rounds, b.rounds)]
    return a.step / b.step, min(rounds), max(rounds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("commands", nargs="+")
    args = parser.parse_args()
    pairs = [text.partition("=")[::2] for text in args.commands]
    everyone = play([(name, shlex.split(line)) for name, line in pairs], args.rounds, args.steps)
    for c in everyone:
        if c.error:
            raise SystemExit(f"{c.name} ended without an answer: {c.error}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python "
          f"{platform.python_version()}; {args.rounds} rounds of {args.steps - 1} timed steps\n")
    print("| trainer | parameters | tokens/s | step ms | ratio (range) | peak RSS MB | loss |")
    print("|---|---|---|---|---|---|---|")
    for c in everyone:
        print(f"| {c.name} | {c.info['params']:,} | {c.speed:,.0f} | {c.step * 1e3:,.0f} | "
              "{:.3f} ({:.3f}-{:.3f}) | ".format(*ratio(everyone[0], c)) +
              f"{' / '.join(map(str, c.last['rss_mb']))} | {c.last['loss']:.3f} |")


if __name__ == "__main__":
    main()
