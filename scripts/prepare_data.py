#!/usr/bin/env python3
"""Tokenise text into a token store ahead of training, or check one.

    python scripts/prepare_data.py 'corpus/*.jsonl.gz' --out store --tokenizer TOKENIZER
    python scripts/prepare_data.py corpus/ --out store --train-tokenizer 32768
    python scripts/prepare_data.py --hub allenai/c4 --subset en --out store --tokenizer TOKENIZER
    python scripts/prepare_data.py --check store
    python scripts/prepare_data.py --corpus python --out python.jsonl

The same command resumes where an earlier one ended, however it ended. Train on the store with
`'data.sources=[{path: store}]' data.tokenizer=null`; it brings its tokenizer along.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._command import command, make_parser
from training.config.load import expand_home, user_path
from training.data.config import (
    DataConfig,
    DataError,
    SourceConfig,
    TokenizerFile,
    TrainedBpe,
)
from training.data.corpora import CORPORA, write_corpus
from training.data.lock import try_lock
from training.data.sources import make_reader, source_name
from training.data.store import TokenStore, is_store
from training.data.tokenizer import load_tokenizer
from training.data.writer import refuse_bad_lines, write_store


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "inputs",
        type=expand_home,
        nargs="*",
        help="files, globs or folders (jsonl, parquet, arrow, txt)",
    )
    add("--out", type=user_path, help="folder of the store (with --corpus: a file)")
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", type=expand_home, help="tokenizer.json, a folder with one, or a hub name"
    )
    tokenizer.add_argument(
        "--train-tokenizer", type=int, metavar="N", help="train a byte-level BPE of N tokens first"
    )
    add("--eos-token", help="end-of-document token, if the tokenizer names none")
    add("--hub", help="data set name for the datasets library, instead of inputs")
    add("--subset", help="configuration of the hub data set")
    add("--split", help="split of the hub data set (default train)")
    add("--files", type=expand_home, nargs="+", help="data files of the hub data set or builder")
    add("--format", default="auto", help="auto, jsonl, json, parquet, arrow, text or lines")
    add("--text-field", help="field with the text (default text)")
    add("--on-bad-line", choices=("stop", "skip"), default="stop")
    add("--workers", type=int, default=0, help="number of processes; 0: one per core")
    add("--check", type=user_path, metavar="STORE", help="verify counts and checksums")
    add("--corpus", help=f"write a text that anyone can have as jsonl: {', '.join(CORPORA)}")
    return parser.parse_args(arguments)


def check(folder: Path) -> int:
    """Print what a store holds and everything that is wrong with it."""
    store = TokenStore(folder)
    print(store.describe(str(folder)), f"{len(store.blocks)} blocks", sep=", ")
    faults = store.check()
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    if not faults:
        print("all counts and checksums agree")
    return 1 if faults else 0


def prepare(given: argparse.Namespace) -> None:
    """Make the store, or finish it."""
    if given.out is None:
        raise DataError("--out is missing: the folder of the store")
    if bool(given.inputs) == bool(given.hub):
        raise DataError("give either input files or --hub")
    source = SourceConfig(
        path=given.inputs[0] if len(given.inputs) == 1 else given.inputs or None,
        hub=given.hub,
        format=given.format,
        text_field=given.text_field,
        subset=given.subset,
        split=given.split,
        files=given.files,
    )
    if isinstance(source.path, str) and is_store(source.path):
        raise DataError(f"{source.path} is a token store already; --check verifies it")
    if given.train_tokenizer is not None:
        tokenizer = TrainedBpe(vocab_size=given.train_tokenizer)
    elif given.tokenizer is not None:
        tokenizer = TokenizerFile(path=given.tokenizer, eos_token=given.eos_token)
    else:
        raise DataError("give --tokenizer, or --train-tokenizer N to train one on the inputs")
    config = DataConfig(sources=[source], tokenizer=tokenizer, on_bad_line=given.on_bad_line)
    given.out.mkdir(parents=True, exist_ok=True)
    lock = try_lock(given.out / ".lock")
    if lock is None:
        raise DataError(f"{given.out} is being written by another process")
    try:
        reader = make_reader(source, "inputs")
        for line in reader.notes:
            print(line)
        # An earlier run of this command may have left its tokenizer here: it is used again if it
        # was trained, and must be the same if it is named.
        tokenizer = load_tokenizer(config, given.out / "tokenizer", place="--out")
        start = time.monotonic()
        before = len(TokenStore(given.out).blocks) if is_store(given.out) else 0
        write_store(
            given.out,
            reader,
            tokenizer,
            on_bad_line=given.on_bad_line,
            workers=given.workers,
            label=source_name(source),
        )
    finally:
        os.close(lock)
    seconds = time.monotonic() - start
    store = TokenStore(given.out)
    refuse_bad_lines(given.out, store.blocks, given.on_bad_line)
    new = store.blocks[before:]
    if not store.documents:
        skipped = sum(store.skipped().values())
        raise DataError(f"no documents in the inputs ({skipped} lines or documents left out)")
    print(store.describe(str(given.out)))
    print(
        f"{sum(b.tokens for b in new):,} tokens in {seconds:.1f} s "
        f"({sum(b.text_bytes for b in new) / 1e6 / max(seconds, 1e-9):.2f} MB/s)"
    )


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 done, 1 a damaged store, 2 a mistake told in one line."""
    given = parse_arguments(arguments)
    if given.check is not None:
        return check(given.check)
    if given.corpus is not None:
        if given.out is None:
            raise DataError("--out is missing: the jsonl file to write")
        count = write_corpus(given.corpus, given.out)
        print(f"{given.out}: {count} documents, {given.out.stat().st_size:,} bytes")
        return 0
    prepare(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
