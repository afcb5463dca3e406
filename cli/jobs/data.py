"""`oobleck data`: make token files from text, and show their content."""

import glob
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import msgspec

from oobleck.cli import options
from oobleck.cli.jobs.own_code import tell
from oobleck.cli.output import text
from oobleck.core.units import format_bytes
from oobleck.host.command import FAILED, NO_SUCH_THING, USAGE, CommandFailed, Group
from oobleck.host.display import inline

if TYPE_CHECKING:
    from oobleck.host.token_file import Dtype, TokenFileInfo
    from oobleck.host.tokenise import Tokenizer

_SHOWN_TOKENS = 16


@click.group(cls=Group)
def data() -> None:
    """Make and inspect token files for training."""


@data.command(short_help="Convert text to a token file.")
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option(
    "-o", "--output", required=True, metavar="FILE", type=click.Path(dir_okay=False, path_type=Path)
)
@click.option(
    "--tokenizer",
    metavar="TOKENIZER.json",
    help="A Hugging Face tokenizers file. Without it every byte is a token.",
)
@click.option(
    "--dtype",
    type=click.Choice(["uint8", "uint16", "uint32"]),
    help="Type of the ids; by default the smallest that fits the tokenizer's vocabulary.",
)
@click.option(
    "--document-separator",
    "separator",
    metavar="TOKEN",
    help="Token after every document, '' for none. By default the tokenizer's usual "
    "token, such as <|endoftext|>; for bytes none.",
)
@click.option(
    "--field",
    default="text",
    show_default=True,
    metavar="NAME",
    help="Key of the text in .jsonl files.",
)
@click.option("--force", is_flag=True, help="Replace FILE where it exists.")
def prepare(
    inputs: tuple[str, ...],
    output: Path,
    tokenizer: str | None,
    dtype: "Dtype | None",
    separator: str | None,
    field: str,
    force: bool,
) -> None:
    """Convert text to a token file, and FILE.json beside it, which describes FILE.

    INPUT is a file, or a pattern in quotes such as 'texts/**/*.txt'. A text file is one document; a
    .jsonl file has one per line; .gz files of either are unpacked. A job reads the result with
    `data: {tokens: FILE}`. FILE appears when it is complete.
    """
    from oobleck.host.token_file import CannotWrite, DataError, TokenWriter, narrowest, sweep
    from oobleck.host.tokenise import load_tokenizer, tokenise

    if output.exists() and not force:
        raise CommandFailed(
            f"{output} exists already; use --force to replace it, or name another FILE",
            USAGE,
        )
    files = _expand(inputs, output)
    sweep(output)
    try:
        with _terminated_as_interrupted():
            reader = load_tokenizer(tokenizer)
            kind = dtype or narrowest(reader.vocabulary)
            _check_dtype(kind, reader)
            behind = reader.separator(separator)
            total = sum(os.path.getsize(path) for path in files)
            with _bar(total) as report, TokenWriter(output, kind) as writer:
                info = tokenise(files, reader, writer, field=field, separator=behind, report=report)
    except CannotWrite as error:
        raise CommandFailed(str(error), FAILED) from error
    except DataError as error:
        raise CommandFailed(str(error), USAGE) from error
    click.echo(_summary(output, info))


@data.command(short_help="Show the content of a token file.")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["uint8", "uint16", "uint32"]),
    help="Type of the ids if there is no FILE.json, as a job's data.dtype.",
)
@options.json_option("Print all facts about FILE as JSON.")
def inspect(file: Path, dtype: "Dtype | None", as_json: bool) -> None:
    """Show the content of a token file, and warn if it looks like ids of another type."""
    from oobleck.host.token_file import DataError, look_through, read_info, read_tokens, type_of

    if not file.is_file():
        raise CommandFailed(f"{file} does not exist; give a token file", NO_SUCH_THING)
    try:
        info = read_info(file)
        if info is None and dtype is None:
            raise DataError(
                f"{file}.json does not exist, so the content of {file} is unknown; make both with "
                "'oobleck data prepare', or give its type with --dtype, and in the job: "
                f"data: {{tokens: {file}, dtype: uint16}}"
            )
        kind = type_of(file, info, dtype)
        first = read_tokens(file, kind, _SHOWN_TOKENS)
        if doubt := look_through(file, kind):
            tell(f"warning: {doubt}")
    except DataError as error:
        raise CommandFailed(str(error), USAGE) from error
    begins = f"begins      {' '.join(map(str, first))}"
    if info is None:
        _show_alone(file, kind, first, begins, as_json=as_json)
        return
    if as_json:
        click.echo(text.dump_line(msgspec.to_builtins(info)))
        return
    separator = " ".join(map(str, info.separator)) or "none"
    digest = f" (SHA-256 {info.tokenizer_sha256[:12]}...)" if info.tokenizer_sha256 else ""
    click.echo(_summary(file, info))
    click.echo(inline(f"tokenizer   {info.tokenizer}{digest}, {info.vocabulary:,} tokens"))
    click.echo(f"highest id  {info.highest:,}")
    click.echo(f"separator   {separator}")
    click.echo(begins)


def _show_alone(
    file: Path, dtype: "Dtype", first: Sequence[int], begins: str, *, as_json: bool
) -> None:
    """Print the size, type and first ids of a token file without a FILE.json."""
    size, width = os.path.getsize(file), int(dtype[4:]) // 8
    if as_json:
        known = {"dtype": dtype, "tokens": size // width, "begins": list(first)}
        click.echo(text.dump_line(known))
        return
    click.echo(inline(f"{file}: {size // width:,} {dtype} tokens, {format_bytes(size)}"))
    click.echo(begins)


def _summary(path: Path, info: "TokenFileInfo") -> str:
    documents = f"{info.documents:,} document" + ("" if info.documents == 1 else "s")
    size = format_bytes(info.tokens * info.width)
    return inline(f"{path}: {info.tokens:,} {info.dtype} tokens of {documents}, {size}")


def _check_dtype(dtype: "Dtype", tokenizer: "Tokenizer") -> None:
    from oobleck.host.token_file import DataError, narrowest

    needed = narrowest(tokenizer.vocabulary)
    if int(dtype[4:]) < int(needed[4:]):
        raise DataError(
            f"--dtype {dtype} is too small for the {tokenizer.vocabulary} tokens of "
            f"{tokenizer.name}; leave it out, or choose {needed}"
        )


def _expand(inputs: Sequence[str], output: Path) -> list[str]:
    """Return the files, in the order given; those of a pattern are sorted."""
    found: dict[str, None] = {}
    for given in inputs:
        matches = [given] if os.path.exists(given) else sorted(glob.glob(given, recursive=True))
        files = [path for path in matches if os.path.isfile(path)]
        if not files:
            what = f"{matches[0]} is not a regular file" if matches else f"no file matches {given}"
            raise CommandFailed(
                f"{what}; give text files, or patterns in quotes that match some", USAGE
            )
        found.update(dict.fromkeys(files))
    for path in found:
        if output.exists() and os.path.samefile(path, output):
            raise CommandFailed(f"{path} is both input and output; name another FILE", USAGE)
    return list(found)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar over the input's bytes, on a terminal only; yield its update."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda read, written: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", leave=False) as bar:

        def report(read: int, written: int) -> None:
            bar.set_postfix_str(f"{written:,} tokens", refresh=False)
            bar.update(read - bar.n)

        yield report


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Make SIGTERM unwind as Ctrl-C does, so that no half-written file stays."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
