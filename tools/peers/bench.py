#!/usr/bin/env python3
"""Measure llama.cpp and this engine side by side on models of one shape.

bench.py --coli PATH --gguf FILE --model [LABEL=]DIR [--model ...]

Every repetition runs all arms one after the other, each in a fresh process that warms up before it
measures: llama.cpp decode, llama.cpp prefill, and `coli bench decode` and `coli bench prefill` for
every model. Every other repetition runs them in reverse order, so that a machine that slows down
or speeds up favours nobody. Reported are medians with their range, the weight bytes of one
decoded token, and the ratios ours / llama.cpp.

Beside every figure stands how many cores other processes kept busy meanwhile. Threads that wait
for each other by spinning lose most of their speed to a single busy neighbour, so figures count
only when that number is near zero.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

try:
    from gguf import GGUFReader
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is missing: pip install -r tools/peers/requirements.txt")

from llamacpp_arm import Job

ARM_SCRIPT = Path(__file__).with_name("llamacpp_arm.py")
PHASES = ("decode", "prefill")
QUIET_CORES = 0.05
"""Cores that others may keep busy before a warning."""
# Instruction sets as Linux and llama.cpp name them; a good build uses all that the CPU has.
WANTED = {
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
}


class Failed(Exception):
    """An arm did not produce a figure."""


@dataclass
class Figures:
    """Rates of one engine, model and phase, one per repetition, and what came with the last."""

    rates: list[float] = field(default_factory=list)
    others: list[float | None] = field(default_factory=list)
    """Cores that other processes kept busy during each repetition."""
    extra: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Median and range in tokens per second."""
        return {
            "tok_per_s": median(self.rates),
            "tok_per_s_min": min(self.rates),
            "tok_per_s_max": max(self.rates),
            "rates": self.rates,
            "other_busy_cores": self.others,
            **self.extra,
        }


@dataclass(frozen=True)
class Gguf:
    """What a run needs to know about a GGUF file."""

    vocab: int
    bytes_per_token: int


def read_gguf(path: Path) -> Gguf:
    """Vocabulary and weight bytes per decoded token: of the experts the chosen ones, of all else
    everything, the embedding (a single row) left out unless it is the head too."""
    reader = GGUFReader(path)

    def number(key: str) -> int:
        found = reader.get_field(key)
        if found is None:
            raise Failed(f"{path} has no {key}")
        return int(found.contents())

    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise Failed(f"{path} has no general.architecture")
    prefix = architecture.contents()
    experts = number(f"{prefix}.expert_count")
    used = number(f"{prefix}.expert_used_count")
    names = {tensor.name for tensor in reader.tensors}
    total = 0
    for tensor in reader.tensors:
        if "_exps." in tensor.name:
            total += int(tensor.n_bytes) * used // experts
        elif tensor.name != "token_embd.weight" or "output.weight" not in names:
            total += int(tensor.n_bytes)
    return Gguf(number(f"{prefix}.vocab_size"), total)


def run(command: list[str], limit_s: float) -> tuple[dict[str, Any], str]:
    """Run a command whose stdout is, or ends with a line of, one JSON object.

    Returns that object and stderr; raises `Failed` with the end of stderr.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"no answer within {limit_s:.0f} s: {' '.join(command)}") from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise Failed(f"exit code {done.returncode}: {' '.join(command)}\n{last}")
    for text in (done.stdout, (done.stdout.strip().splitlines() or [""])[-1]):
        try:
            return json.loads(text), done.stderr
        except json.JSONDecodeError:
            continue
    raise Failed(f"no JSON object on stdout: {' '.join(command)}")


class Others:
    """How many cores other processes keep busy, from its creation to `cores`."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.busy = self.busy_s()
        self.own = self.own_s()

    @staticmethod
    def busy_s() -> float | None:
        """CPU seconds spent on this machine by anyone (and taken by its host), where Linux says."""
        try:
            first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        except OSError:
            return None
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, first[1:9])
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def own_s() -> float:
        """CPU seconds of this process and the children it has waited for."""
        total = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            total += usage.ru_utime + usage.ru_stime
        return total

    def cores(self) -> float | None:
        """Mean over the time since creation, or None where it is unknown."""
        now = self.busy_s()
        if self.busy is None or now is None:
            return None
        theirs = now - self.busy - (self.own_s() - self.own)
        return round(max(0.0, theirs) / (time.monotonic() - self.started), 3)


def repacked_mib(log: str) -> float:
    """MiB of weights that llama.cpp repacked for the CPU when it loaded the model."""
    total = 0.0
    for line in log.splitlines():
        if "CPU_REPACK model buffer size" in line:
            total += float(line.rpartition("=")[2].split()[0])
    return total


def llama(options: argparse.Namespace, gguf: Gguf, phase: str, seed: int, to: Figures) -> None:
    """Measure llama.cpp once."""
    count = options.tokens if phase == "decode" else options.prompt
    job = Job(
        gguf=str(options.gguf),
        vocab=gguf.vocab,
        threads=options.threads,
        count=count,
        flash_attn=options.flash_attn,
        repack=options.repack == "on",
        seed=seed,
    )
    command = [sys.executable, str(ARM_SCRIPT), phase, json.dumps(asdict(job))]
    result, log = run(command, options.limit_s)
    to.rates.append(result["tok_per_s"])
    to.extra = {"repacked_mib": repacked_mib(log)}


def ours(options: argparse.Namespace, model: Path, phase: str, to: Figures) -> None:
    """Measure `coli` once."""
    count = options.tokens if phase == "decode" else options.prompt
    command = [str(options.coli), "bench", phase, "--model", str(model)]
    command += ["--threads", str(options.threads), "--tokens", str(count), "--reps", "1", "--json"]
    result, _ = run(command, options.limit_s)
    try:
        to.rates.append(float(result["tok_per_s"]))
    except KeyError:
        raise Failed(f"no tok_per_s in the answer of: {' '.join(command)}") from None
    keys = ("bytes_per_token", "read_gb_per_s", "limit_tok_per_s", "limit_ratio")
    to.extra = {key: result[key] for key in keys if key in result}


def has_prefill(coli: Path) -> bool:
    """Whether this build knows `coli bench prefill`."""
    command = [str(coli), "bench", "prefill", "--help"]
    return subprocess.run(command, capture_output=True).returncode == 0


def coli_version(coli: Path) -> str:
    """The line of `coli --version`."""
    done = subprocess.run([str(coli), "--version"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown version"


def cpu() -> tuple[str, set[str]]:
    """Name and flags of the processor, as far as Linux tells."""
    name, flags = "unknown processor", set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    except OSError:
        pass
    return name, flags


def unused_sets(flags: set[str], system_info: str) -> list[str]:
    """Instruction sets that the CPU has and this build of llama.cpp does not use."""
    built = set()
    for part in system_info.replace("CPU :", "|").split("|"):
        name, _, value = part.partition("=")
        if value.strip() == "1":
            built.add(name.strip())
    return [name for flag, name in WANTED.items() if flag in flags and name not in built]


def ratio(our: Figures, peer: Figures) -> dict[str, float] | None:
    """Ours / peer: of the medians, and the range over repetitions."""
    if not our.rates or not peer.rates:
        return None
    pairs = [a / b for a, b in zip(our.rates, peer.rates)]
    return {
        "ratio": median(our.rates) / median(peer.rates),
        "ratio_min": min(pairs),
        "ratio_max": max(pairs),
    }


def say(text: str = "") -> None:
    """A line for the reader; stdout is kept free for the report."""
    print(text, file=sys.stderr, flush=True)


def rate_text(figures: Figures) -> str:
    """Median and range, or a dash."""
    if not figures.rates:
        return "-"
    low, high = min(figures.rates), max(figures.rates)
    return f"{median(figures.rates):.2f} ({low:.2f} to {high:.2f})"


def ratio_text(found: dict[str, float] | None) -> str:
    """Ratio and range, or a dash."""
    if found is None:
        return "-"
    return f"{found['ratio']:.2f} ({found['ratio_min']:.2f} to {found['ratio_max']:.2f})"


def table(report: dict[str, Any], figures: dict[tuple[str, str], Figures]) -> str:
    """The report for a person: tok/s as median (range)."""
    rows = [("", "decode tok/s", "prefill tok/s", "MB/token", "decode x", "prefill x")]
    for entry in [report["llama_cpp"], *report["ours"]]:
        label = entry["label"]
        size = entry["bytes_per_token"]
        rows.append(
            (
                label,
                rate_text(figures[label, "decode"]),
                rate_text(figures[label, "prefill"]),
                "-" if size is None else f"{size / 1e6:.1f}",
                ratio_text(entry.get("decode_ratio")) if "model" in entry else "",
                ratio_text(entry.get("prefill_ratio")) if "model" in entry else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def measure(options: argparse.Namespace) -> None:
    """Run all arms and print the report; raises `Failed`."""
    gguf = read_gguf(options.gguf)
    build, _ = run([sys.executable, str(ARM_SCRIPT), "info"], options.limit_s)
    name, flags = cpu()
    unused = unused_sets(flags, build["system_info"])
    prefill = has_prefill(options.coli)
    say(f"machine    {name}, load average {os.getloadavg()[0]:.2f}")
    say(f"ours       {coli_version(options.coli)}")
    say(f"llama.cpp  xllamacpp {build['version']} {json.dumps(build['build'])}")
    say(f"           {build['system_info']}")
    if unused:
        say(f"warning: this llama.cpp does not use {', '.join(unused)}, which the CPU has; the")
        say("         ratios flatter us. Build it from source as the README says.")
    if not prefill:
        say("warning: this coli has no `bench prefill`: of ours only decode is measured")

    peer = "llama.cpp"
    figures = {(label, phase): Figures() for label in [peer, *options.models] for phase in PHASES}
    arms = [(label, phase) for phase in PHASES for label in [peer, *options.models]]
    if not prefill:
        arms = [(label, phase) for label, phase in arms if label == peer or phase == "decode"]
    for repetition in range(options.reps):
        for label, phase in arms if repetition % 2 == 0 else reversed(arms):
            to = figures[label, phase]
            others = Others()
            if label == peer:
                llama(options, gguf, phase, options.seed + repetition, to)
            else:
                ours(options, options.models[label], phase, to)
            to.others.append(others.cores())
            busy = "unknown" if to.others[-1] is None else f"{to.others[-1]:.2f}"
            say(
                f"{repetition + 1}/{options.reps} {label} {phase}: {to.rates[-1]:.2f} tok/s, "
                f"others kept {busy} cores busy"
            )

    repacked = figures[peer, "decode"].extra["repacked_mib"]
    say(f"llama.cpp repacked {repacked:.0f} MiB of weights" + ("" if repacked else ": none"))
    busiest = max((x or 0.0 for found in figures.values() for x in found.others), default=0.0)
    if busiest > QUIET_CORES:
        say(f"warning: other processes kept up to {busiest:.2f} cores busy: these figures and")
        say("         ratios do not count; run again on a quiet machine")
    report: dict[str, Any] = {
        "machine": {"cpu": name, "most_other_busy_cores": busiest},
        "settings": {
            key: getattr(options, key)
            for key in ("threads", "prompt", "tokens", "reps", "flash_attn", "repack", "seed")
        },
        "coli_version": coli_version(options.coli),
        "llama_cpp": {
            "label": peer,
            **build,
            "unused_instruction_sets": unused,
            "gguf": str(options.gguf),
            "bytes_per_token": gguf.bytes_per_token,
        },
        "ours": [
            {
                "label": label,
                "model": str(model),
                "bytes_per_token": figures[label, "decode"].extra.get("bytes_per_token"),
                **{
                    f"{phase}_ratio": ratio(figures[label, phase], figures[peer, phase])
                    for phase in PHASES
                },
            }
            for label, model in options.models.items()
        ],
    }
    for entry in [report["llama_cpp"], *report["ours"]]:
        for phase in PHASES:
            found = figures[entry["label"], phase]
            entry[phase] = found.summary() if found.rates else None
    print(json.dumps(report, indent=2) if options.json else table(report, figures))


def count(text: str) -> int:
    """An argument that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def parse() -> argparse.Namespace:
    """Options; `models` maps labels to directories. Exits with code 2 on wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coli", type=Path, required=True, metavar="PATH", help="release binary")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="peer's model")
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="[LABEL=]DIR",
        help="model of ours; may be repeated",
    )
    parser.add_argument("--threads", type=count, default=2, metavar="N", help="[2]")
    parser.add_argument("--prompt", type=count, default=512, metavar="N", help="to prefill [512]")
    parser.add_argument("--tokens", type=count, default=64, metavar="N", help="to decode [64]")
    parser.add_argument("--reps", type=count, default=5, metavar="N", help="repetitions [5]")
    parser.add_argument("--flash-attn", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--repack", choices=("on", "off"), default="on")
    parser.add_argument("--seed", type=int, default=417, metavar="S", help="of prompts [417]")
    parser.add_argument("--limit-s", type=float, default=900.0, metavar="S", help="per arm [900]")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    for path in (options.coli, options.gguf):
        if not path.is_file():
            parser.error(f"{path} is not a file")
    options.models = {}
    for text in options.model:
        label, equals, directory = text.partition("=")
        path = Path(directory if equals else text)
        label = label if equals else path.name
        if not path.is_dir():
            parser.error(f"{path} is not a directory")
        if not label or label in options.models or label == "llama.cpp":
            parser.error(f"--model {text}: the label must be new and not empty")
        options.models[label] = path
    options.coli = options.coli.resolve()
    return options


def main() -> None:
    """Command line."""
    try:
        measure(parse())
    except Failed as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
