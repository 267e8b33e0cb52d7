"""Several trainers on the same work, taking turns; ratios of medians.

    python bench/duel.py [--rounds 5 --steps 4] NAME='command' NAME='command' ...

Each command speaks the protocol of bench/step.py. All are started and warmed up one after the
other, then take turns: a round is `steps` steps of each, the first of which is dropped, in an order
that rotates. Ratio: median step of the first (the reference) over the contender's, above 1 the
contender is faster; in brackets the smallest and largest ratio of single rounds."""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess


class Contender:
    def __init__(self, text):
        self.name, _, command = text.partition("=")
        self.process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.rounds, self.info = [], self.read()

    def read(self):
        for line in self.process.stdout:
            if line.startswith("@bench "):
                return json.loads(line[7:])
        raise SystemExit(f"{self.name} ended without an answer")

    def go(self, steps):
        self.process.stdin.write(f"go {steps}\n")
        self.process.stdin.flush()
        self.last = self.read()
        self.rounds.append(self.last["step_s"][1:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("commands", nargs="+")
    args = parser.parse_args()
    everyone = [Contender(text) for text in args.commands]
    for r in range(args.rounds):
        k = r % len(everyone)
        for contender in everyone[k:] + everyone[:k]:
            contender.go(args.steps)
    for contender in everyone:
        contender.process.stdin.close()
        contender.process.wait()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python "
          f"{platform.python_version()}; {args.rounds} rounds of {args.steps - 1} timed steps\n")
    print("| trainer | parameters | tokens/s | step ms | ratio (range) | peak RSS MB | loss |")
    print("|---|---|---|---|---|---|---|")
    first = everyone[0]
    for c in everyone:
        step = statistics.median(sum(c.rounds, []))
        medians = [map(statistics.median, x.rounds) for x in (first, c)]
        ratios = [a / b for a, b in zip(*medians)]
        ratio = statistics.median(sum(first.rounds, [])) / step
        speed = c.info["tokens_per_step"] / step
        print(f"| {c.name} | {c.info['params']:,} | {speed:,.0f} | "
              f"{step * 1e3:,.0f} | {ratio:.3f} "
              f"({min(ratios):.3f}-{max(ratios):.3f}) | "
              f"{' / '.join(map(str, c.last['rss_mb']))} | {c.last['loss']:.3f} |")


if __name__ == "__main__":
    main()
