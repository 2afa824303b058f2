"""`cacheblend bench ttft`: time to first token on this machine; what is measured, and how, is in `cacheblend.bench`.

The options that the lab's commands share with it stand here, too.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from cacheblend.cli import output
from cacheblend.cli.help import App
from cacheblend.cli.models import quiet_transformers
from cacheblend.cli.option_groups import names_in, numbers, option
from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, AsJson, JsonFile, ModelOrShape, SelectionOptions
from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.core.failures import failed_since, failures, in_words
from cacheblend.nano import LEAN_PROFILE_NAME, model_path

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.bench.ttft import TtftSettings
    from cacheblend.core.select.selection import Selection

app = App(help="Measure it on this machine.")

_before: dict[str, int] = {}  # what had failed in this process before the benchmark began

WHAT, HOW = "What is measured", "How it is measured"
MOST_CHUNKS = 1 << 16

ChunkTokens = Annotated[int, option(..., "Tokens of a chunk.", least=1, most=MOST_TOKENS, panel=WHAT)]


@dataclass(frozen=True)
class SizeOptions:
    """Chunks of a prompt."""

    panel: ClassVar = WHAT
    chunks: int = option(8, "Chunks of the prompt.", least=1, most=MOST_CHUNKS)
    chunk_tokens: ChunkTokens = 512


@dataclass(frozen=True)
class PromptSizeOptions(SizeOptions):
    """A prompt of chunks and a question."""

    question_tokens: int = option(32, "Tokens after the chunks.", least=1, most=MOST_TOKENS)


@dataclass(frozen=True)
class RoundOptions:
    """How often, and from which seed."""

    panel: ClassVar = HOW
    runs: int = option(5, "Measured rounds, after one warm-up.", least=1, most=100_000)
    seed: int = option(0, "Seed of weights, tokens and orders.", least=0, most=MOST_SEED)


@dataclass(frozen=True)
class ThreadOptions:
    """Threads of the process that measures."""

    panel: ClassVar = HOW
    threads: int | None = option(None, "Threads of torch. Default: torch's own choice.", least=1, most=4096)


@dataclass(frozen=True)
class ResultOptions:
    """Where the result goes: a table on stdout, or JSON there; and a file."""

    json: AsJson = False
    json_file: JsonFile = None

    def check(self) -> None:
        """Raises `InvalidInputError` where the file cannot be written: before minutes of measuring."""
        output.check_outputs(self.json_file)
        _before.clear()
        _before.update(failures())

    def show(self, shown: "Table | str", result: dict[str, Any]) -> None:
        """Prints and writes the result, with what failed since `check` as `failed_blends`."""
        failed = failed_since(_before)
        result = {**result, "failed_blends": sum(failed.values())} | ({"failed": failed} if failed else {})
        if self.json_file is not None:
            output.write_json(self.json_file, result)
        if failed:
            raise CacheBlendError(
                f"no figures are shown, for they are not those of blending: {in_words(failed)} failed while it was "
                "measured and was computed in full; the logs of this command and of its servers say why"
            )
        if self.json:
            output.print_json(result)
        else:
            output.console().print(shown)
            output.console().print("failed_blends: 0")


def prompt_settings(model: "ModelOrShape", **settings: Any) -> "TtftSettings":
    """Settings of a benchmark that prefills prompts."""
    chosen = model.chosen()
    quiet_transformers()
    from cacheblend.bench.ttft import TtftSettings

    return TtftSettings(None if chosen.model is None else str(chosen.model), chosen.shape, **settings)


def selection_of(options: SelectionOptions) -> tuple["Selection", tuple[float, ...], str | None]:
    """How rows are selected, the ratios to measure, and the name of the profile that says so, if one does."""
    from cacheblend.core.select.selection import Selection
    from cacheblend.engines.settings import PROFILE_NAME, read_profile

    given, shipped = options.ratio or [], {"nano": PROFILE_NAME, "lean": LEAN_PROFILE_NAME}
    if len(given) > 1 and (falling := [text for text in given if "," in text]):
        raise InvalidInputError(f"--ratio {falling[0]}: falling ratios are measured alone; leave the others out")
    if options.profile is None:
        measured = [replace(options, ratio=[ratio]) for ratio in given] or [options]
        chosen = [Selection(**each.settings()) for each in measured]
        return chosen[0], tuple(each.final_ratio for each in chosen), None
    if set(replace(options, ratio=None).settings()):
        raise InvalidInputError(f"the profile {options.profile} would not be used beside your own settings; give one")
    name = str(options.profile)
    file = model_path() / shipped[name] if name in shipped and not options.profile.exists() else options.profile
    chosen_by = read_profile(file).selection
    ratios = tuple(one for text in given for one in numbers("--ratio", text, float))
    return chosen_by, ratios or (chosen_by.final_ratio,), "lean" if name == "lean" else "profile"


@app.command("ttft")
def ttft(
    model: ModelOrShape,
    size: PromptSizeOptions,
    rounds: RoundOptions,
    threads: ThreadOptions,
    result: ResultOptions,
    selection: SelectionOptions,
    data: Path | None = option(None, "Real passages. Default: random tokens.", "-d", panel=WHAT),
    methods: list[str] | None = option(
        None,
        "Methods to measure, with commas: full, prefix, reuse, blend, and miss (blend with nothing stored). Default: "
        "the first four.",
        "--methods",
        "--arms",
        "-a",
        panel=HOW,
    ),
    store: str = option("memory", "memory, disk, or both: memory,disk.", panel=HOW),
) -> None:
    """Time to first token: full prefill, prefix caching, full reuse and blend, alternating on the same prompts.

    A prompt is 32 tokens of plain text that no cache holds, the stored chunks in shuffled order, the question. Several
    ratios are measured one by one. --profile takes a file, or nano or lean: the profiles of the model that ships.
    """
    result.check()
    chosen, ratios, profile = selection_of(selection)
    settings = prompt_settings(
        model,
        data=None if data is None else str(data),
        **vars(size),
        **vars(rounds),
        **vars(threads),
        selection=chosen,
        ratios=ratios,
        profile=profile,
        arms=names_in(methods or ["full,prefix,reuse,blend"]),
        stores=names_in([store]),
    )
    from cacheblend.bench import ttft as bench

    with output.progress("measuring", "rounds", quiet=result.json) as advance:
        found = bench.run(settings, lambda done, total, _: advance(done, total))
        advance(1, 1)
    result.show(bench.table(found), found)
